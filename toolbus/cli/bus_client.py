"""How commands find a bus and ask it: the address, whether anything listens there, and the channel.

A refused connection is told at once by a plain socket, before grpc is imported: most mistakes end here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from toolbus.cli import terminal

if TYPE_CHECKING:
    import grpc

    from toolbus.sdk import CallContext, Host
    from toolbus.sdk.listing import Listing

DEFAULT_ADDRESS = "127.0.0.1:48930"
CONNECT_SECONDS = 5.0
SOURCE = "toolbus-cli"  # in the bus's records
ANSWER_SECONDS = 10.0  # for anything but a tool call
_ANOTHER_SERVER = "what listens there is a gRPC server, but no toolbus, or one of another version"

BusOption = Annotated[
    str | None,
    typer.Option(
        "--bus",
        metavar="ADDR",
        envvar="TOOLBUS_ADDRESS",
        show_default=False,
        help=f"Where the bus is: HOST:PORT or unix:PATH (default: {DEFAULT_ADDRESS}).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]
UserOption = Annotated[str | None, typer.Option("--user", metavar="ID", help="On behalf of this user.")]
LevelOption = Annotated[
    int | None, typer.Option("--level", min=0, metavar="N", help="With this access level (default: 0, the lowest).")
]

Answer = TypeVar("Answer")


def check_shape(address: str | None) -> str:
    """Returns an address as it was given, or the default one; ends the command where it has no sense."""
    address = address or DEFAULT_ADDRESS
    host, colon, port = address.rpartition(":")
    if address.startswith("unix:"):
        well = address != "unix:"
    else:
        well = bool(colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= 65535)
    if not well:
        terminal.fail(
            f"the bus address {address!r} is not HOST:PORT or unix:PATH: write for example {DEFAULT_ADDRESS}",
            terminal.USAGE,
        )
    return address


def reach(address: str | None) -> str:
    """Returns the address of a bus where something listens; ends the command where nothing does."""
    address = check_shape(address)
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as attempt:
                attempt.settimeout(CONNECT_SECONDS)
                attempt.connect(address.removeprefix("unix:").removeprefix("//"))
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as problem:
        no_bus(address, problem.strerror or str(problem))
    return address


def no_bus(address: str, why: str) -> NoReturn:
    """Ends the command: there is no bus."""
    terminal.fail(
        f"no bus at {address} ({why.rstrip('.')}): start one with `toolbus serve`, or name its address with "
        "--bus or TOOLBUS_ADDRESS",
        terminal.NO_BUS,
    )


def ask(address: str | None, question: Callable[[grpc.Channel], Answer]) -> Answer:
    """Asks a question over a channel of its own; ends the command where the bus says no or is not there."""
    address = reach(address)
    import grpc

    options = (("grpc.max_receive_message_length", 64 * 1024 * 1024),)
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            return question(channel)
        except grpc.RpcError as error:
            refused(address, error)


def refused(address: str, error: Any) -> NoReturn:
    """Ends the command with what an RPC ended in."""
    import grpc

    status, text = error.code(), error.details() or ""
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        no_bus(address, f"something listens there but does not answer: {text}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        no_bus(address, _ANOTHER_SERVER)
    terminal.fail(text or status.name.lower())


def with_host(address: str | None, work: Callable[[Host], Coroutine[Any, Any, Answer]]) -> Answer:
    """Runs something with a host that is connected, to its end or to Ctrl-C, which cancels what is under way.

    Ends the command where the bus says no or is not there.
    """
    address = reach(address)
    from toolbus.errors import NotOffered, PeerLost, ToolBusError

    try:
        return asyncio.run(_with_host(address, work))
    except KeyboardInterrupt:
        raise typer.Exit(terminal.INTERRUPTED) from None
    except PeerLost as lost:
        terminal.fail(str(lost), terminal.NO_BUS)
    except NotOffered:
        no_bus(address, _ANOTHER_SERVER)
    except ToolBusError as error:
        terminal.fail(str(error))
    except UnicodeEncodeError as problem:  # the only texts that are ours came as words
        terminal.fail(f"{problem.object[:80]!r} is not UTF-8: write it in the terminal's encoding", terminal.USAGE)


def on_behalf(user: str | None, level: int | None = None) -> CallContext | None:
    """Returns the context of what is asked on behalf of a user with an access level; None where neither is said."""
    if not user and level is None:
        return None
    from toolbus.sdk import CallContext

    return CallContext(user_id=user or "", attributes={} if level is None else {"level": str(level)})


def listing(address: str | None, user: str | None, level: int | None, **conditions: Any) -> Listing:
    """Lists what can be called on behalf of a user; ends the command where the bus says no or is not there."""
    context = on_behalf(user, level)
    return with_host(address, lambda host: host.list(context=context, timeout=ANSWER_SECONDS, **conditions))


async def _with_host(address: str, work: Callable[[Host], Coroutine[Any, Any, Answer]]) -> Answer:
    from toolbus.sdk import Host

    async with Host(address, source=SOURCE) as host:
        try:
            await asyncio.wait_for(host.ready(), ANSWER_SECONDS)
        except TimeoutError:
            no_bus(address, f"what listens there gave no answer within {ANSWER_SECONDS:g} s")
        return await work(host)
