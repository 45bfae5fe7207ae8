"""Connects commands to a bus: finds the address, checks that a server listens there, opens the channel or a host.

A plain socket reports a refused connection at once, before grpc is imported: most mistakes end here.
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
SOURCE = "toolbus-cli"  # in the bus's call records
REPLY_SECONDS = 10.0  # timeout of every request but a tool call
_OTHER_SERVER = "a gRPC server listens there, but it is not a toolbus, or one of another version"

BusOption = Annotated[
    str | None,
    typer.Option(
        "--bus",
        metavar="ADDR",
        envvar="TOOLBUS_ADDRESS",
        show_default=False,
        help=f"Address of the bus: HOST:PORT or unix:PATH (default: {DEFAULT_ADDRESS}).",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]
UserOption = Annotated[
    str | None, typer.Option("--user", metavar="ID", help="Act on behalf of this user (default: no user).")
]
LevelOption = Annotated[
    int | None, typer.Option("--level", min=0, metavar="N", help="Act with this access level (default: 0, the lowest).")
]

Reply = TypeVar("Reply")


def check_address(address: str | None) -> str:
    """Returns the address, or the default one; ends the command if it is not an address."""
    address = address or DEFAULT_ADDRESS
    host, colon, port = address.rpartition(":")
    if address.startswith("unix:"):
        valid = address != "unix:"
    else:
        valid = bool(colon and host and port.isascii() and port.isdigit() and 0 < int(port) <= 65535)
    if not valid:
        terminal.fail(
            f"the bus address {address!r} is not HOST:PORT or unix:PATH: write for example {DEFAULT_ADDRESS}",
            terminal.USAGE,
        )
    return address


def check_listening(address: str | None) -> str:
    """Returns the address of the bus; ends the command if no server listens there."""
    address = check_address(address)
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as attempt:
                attempt.settimeout(CONNECT_SECONDS)
                attempt.connect(address.removeprefix("unix:").removeprefix("//"))
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        fail_without_bus(address, error.strerror or str(error))
    return address


def fail_without_bus(address: str, reason: str) -> NoReturn:
    """Ends the command: no bus answers at the address."""
    terminal.fail(
        f"no bus at {address} ({reason.rstrip('.')}): start one with `toolbus serve`, or set its address with "
        "--bus or TOOLBUS_ADDRESS",
        terminal.NO_BUS,
    )


def query(address: str | None, request: Callable[[grpc.Channel], Reply]) -> Reply:
    """Sends a request over a channel of its own; ends the command if the bus refuses or does not answer."""
    address = check_listening(address)
    import grpc

    options = (("grpc.max_receive_message_length", 64 * 1024 * 1024),)
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            return request(channel)
        except grpc.RpcError as error:
            _fail_rpc(address, error)


def _fail_rpc(address: str, error: Any) -> NoReturn:
    """Ends the command with the error of an RPC."""
    import grpc

    status, text = error.code(), error.details() or ""
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        fail_without_bus(address, f"a server listens there but does not answer: {text}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        fail_without_bus(address, _OTHER_SERVER)
    terminal.fail(text or status.name.lower())


def with_host(address: str | None, work: Callable[[Host], Coroutine[Any, Any, Reply]]) -> Reply:
    """Runs a coroutine with a connected host, to its end or to Ctrl-C, which cancels it.

    Ends the command if the bus refuses or does not answer.
    """
    address = check_listening(address)
    from toolbus.errors import NotOffered, PeerLost, ToolBusError

    try:
        return asyncio.run(_with_host(address, work))
    except KeyboardInterrupt:
        raise typer.Exit(terminal.INTERRUPTED) from None
    except PeerLost as error:
        terminal.fail(str(error), terminal.NO_BUS)
    except NotOffered:
        fail_without_bus(address, _OTHER_SERVER)
    except ToolBusError as error:
        terminal.fail(str(error))
    except UnicodeEncodeError as error:  # only the words of the command line can hold such a text
        terminal.fail(f"{error.object[:80]!r} is not UTF-8: write it in the terminal's encoding", terminal.USAGE)


def call_context(user: str | None, level: int | None = None) -> CallContext | None:
    """Returns the context of a call for a user with an access level; None if neither is given."""
    if not user and level is None:
        return None
    from toolbus.sdk import CallContext

    return CallContext(user_id=user or "", attributes={} if level is None else {"level": str(level)})


def listing(address: str | None, user: str | None, level: int | None, **conditions: Any) -> Listing:
    """Lists what can be called on behalf of a user; ends the command if the bus refuses or does not answer."""
    context = call_context(user, level)
    return with_host(address, lambda host: host.list(context=context, timeout=REPLY_SECONDS, **conditions))


async def _with_host(address: str, work: Callable[[Host], Coroutine[Any, Any, Reply]]) -> Reply:
    from toolbus.sdk import Host

    async with Host(address, source=SOURCE) as host:
        try:
            await asyncio.wait_for(host.ready(), REPLY_SECONDS)
        except TimeoutError:
            fail_without_bus(address, f"the server there did not answer within {REPLY_SECONDS:g} s")
        return await work(host)
