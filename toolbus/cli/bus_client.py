"""Connects commands to a bus: finds address and credential, checks that a server listens, opens the channel or a host.

A plain socket reports a refused connection at once, before grpc is imported: most mistakes end here.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from toolbus.cli import terminal

if TYPE_CHECKING:
    import grpc

    from toolbus.sdk import CallContext, Credential, Host
    from toolbus.sdk.bus_address import BusAddress
    from toolbus.sdk.listing import Listing

DEFAULT_ADDRESS = "127.0.0.1:48930"
CONNECT_SECONDS = 5.0
SOURCE = "toolbus-cli"  # in the bus's call records
PROBE_AFTER_SECONDS = 1.0  # without an answer of a server that listens: then its TLS is looked at
REPLY_SECONDS = 10.0  # timeout of every request but a tool call
_OTHER_SERVER = "a gRPC server listens there, but it is not a toolbus, or one of another version"

BusOption = Annotated[
    str | None,
    typer.Option(
        "--bus",
        metavar="ADDR",
        envvar="TOOLBUS_ADDRESS",
        show_default=False,
        help="Address of the bus: HOST:PORT, tls:HOST:PORT, mtls:HOST:PORT or unix:PATH, several with commas between "
        f"them, or dns:NAME:PORT (default: that of the credential, then {DEFAULT_ADDRESS}).",
    ),
]
CredentialOption = Annotated[
    Path | None,
    typer.Option(
        "--credential",
        metavar="FILE",
        envvar="TOOLBUS_CREDENTIAL",
        show_envvar=False,
        help="Credential for a bus on another machine, as `toolbus keys add` writes it.",
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

RoleOption = Annotated[
    str | None, typer.Option("--role", metavar="NAME", help="Only tools of this role (default: all roles).")
]

Reply = TypeVar("Reply")
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class BusTarget:
    """The bus that a command is for, as its options say.

    Attributes:
        address: None means that of the credential, or the default one.
        credential: its file; None for a bus that needs none.
    """

    address: str | None
    credential: Path | None = None

    def read(self) -> tuple[BusAddress, Credential | None]:
        """Returns the address and the credential; ends the command if one of them cannot be used."""
        from toolbus.sdk.connection_settings import choose_address, find_credential

        with terminal.wrong_usage():
            credential = find_credential(self.credential)
            return choose_address(self.address or "", credential), credential


def check_listening(address: BusAddress) -> bool:
    """Ends the command if no server listens at an address, and warns of one that is another user's.

    Returns:
        Whether it may be the bus of this user or of root, who may have the token of a credential.
    """
    try:
        if address.is_unix:
            with socket.socket(socket.AF_UNIX) as attempt:
                attempt.settimeout(CONNECT_SECONDS)
                attempt.connect(address.target.removeprefix("unix:").removeprefix("//"))
        else:
            socket.create_connection((address.host, address.port), CONNECT_SECONDS).close()
    except OSError as error:
        fail_without_bus(address, error.strerror or str(error))
    from toolbus.common.local_users import show_user
    from toolbus.sdk.reconnect import foreign_owner

    owner = foreign_owner(address)
    if owner is not None:
        terminal.print_note(
            f"the program that listens at {address} belongs to {show_user(owner)}, neither to you nor to root: check "
            "that it is the bus; no token of a credential is sent to it"
        )
    return owner is None


def fail_without_bus(address: BusAddress, reason: str) -> NoReturn:
    """Ends the command: no bus answers at the address."""
    fix = "start one with `toolbus serve`, or set its address with --bus or TOOLBUS_ADDRESS"
    terminal.fail(f"no bus at {address} ({reason.rstrip('.')}): {fix}", terminal.NO_BUS)


def query(bus: BusTarget, request: Callable[[grpc.Channel, Metadata], Reply]) -> Reply:
    """Sends a request over a channel of its own; ends the command if the bus refuses or does not answer.

    Args:
        request: takes the metadata that each of its RPCs has to carry.
    """
    address, credential = bus.read()
    trusted = check_listening(address)
    import grpc

    from toolbus.sdk.credential import tls_credentials

    options = (("grpc.max_receive_message_length", 64 * 1024 * 1024),)
    with (
        grpc.secure_channel(address.target, tls_credentials(credential), options=options)
        if address.tls
        else grpc.insecure_channel(address.target, options=options)
    ) as channel:
        try:
            return request(channel, credential.metadata if credential is not None and trusted else ())
        except grpc.RpcError as error:
            _fail_rpc(address, credential, error)


def _fail_rpc(address: BusAddress, credential: Credential | None, error: Any) -> NoReturn:
    """Ends the command with the error of an RPC."""
    import grpc

    status, text = error.code(), error.details() or ""
    if status is grpc.StatusCode.UNAVAILABLE:
        _fail_if_wrong(address, credential)
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        fail_without_bus(address, f"a server listens there but does not answer: {text}")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        fail_without_bus(address, _OTHER_SERVER)
    terminal.fail(text or status.name.lower())


def _fail_if_wrong(address: BusAddress, credential: Credential | None) -> None:
    """Ends the command if a look at the server's TLS finds out what is wrong."""
    from toolbus.sdk.connection_settings import diagnose

    if problem := diagnose(address, credential):
        terminal.fail(problem, terminal.NO_BUS)


def with_host(bus: BusTarget, work: Callable[[Host], Coroutine[Any, Any, Reply]], source: str | None = None) -> Reply:
    """Runs a coroutine with a connected host, to its end or to Ctrl-C, which cancels it.

    Ends the command if the bus refuses or does not answer.

    Args:
        source: as which program; None means that of the command line.
    """
    address, credential = bus.read()
    check_listening(address)
    from toolbus.errors import NotOffered, PeerLost, ToolBusError

    try:
        return asyncio.run(_with_host(bus, address, credential, work, source or SOURCE))
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


def listing(bus: BusTarget, user: str | None, level: int | None, **conditions: Any) -> Listing:
    """Lists what can be called on behalf of a user; ends the command if the bus refuses or does not answer."""
    context = call_context(user, level)
    return with_host(bus, lambda host: host.list(context=context, timeout=REPLY_SECONDS, **conditions))


async def _with_host(
    bus: BusTarget,
    address: BusAddress,
    credential: Credential | None,
    work: Callable[[Host], Coroutine[Any, Any, Reply]],
    source: str,
) -> Reply:
    from toolbus.sdk import Host

    async with Host(bus.address, source=source, credential=credential) as host:
        ready = asyncio.ensure_future(host.ready())
        log = logging.getLogger("toolbus.sdk")
        log.setLevel(logging.CRITICAL)  # until the bus has answered: what is wrong ends the command, with its own text
        try:
            await asyncio.wait([ready], timeout=PROBE_AFTER_SECONDS)
            if not ready.done():
                await asyncio.to_thread(_fail_if_wrong, address, credential)
            await asyncio.wait_for(ready, REPLY_SECONDS)
        except TimeoutError:
            raise host.unanswered(REPLY_SECONDS) from None
        finally:
            ready.cancel()
            log.setLevel(logging.NOTSET)
        return await work(host)
