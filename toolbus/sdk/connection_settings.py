"""Holds the settings of a connection to the bus, and its timeouts and pauses, as frozen records.

For the address, an argument wins over the environment, and the environment over the credential file.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolbus.common.part import installed, load, parts
from toolbus.common.setting import SWITCHES
from toolbus.common.text import quote
from toolbus.errors import SetupError
from toolbus.protocol.limits import MIB
from toolbus.protocol.tool import INSTANCE, SOURCE, explain_instance
from toolbus.sdk.bus_address import ADDRESS, BusAddress, is_several

if TYPE_CHECKING:
    from toolbus.sdk.credential import Credential

MESSAGE_BYTES = 16 * MIB  # the largest message that this side receives, and the bus too unless it states a limit
MAX_IN_FLIGHT = 4096  # calls that a session may have in flight in each direction


@dataclass(frozen=True, slots=True)
class ConnectionTimings:
    """The timeouts and pauses of a connection, in seconds, and what it sends at once. Tests use tiny values.

    Attributes:
        handshake: for the bus to answer an attach.
        silence: without any message before the bus counts as lost, where it has not stated its heartbeat interval:
            four heartbeats of an idle session.
        half_close: for the bus to end a stream after our half-close.
        writer: for a writer to notice that its stream has ended.
        tick, late: how often a connection looks at the clock, and how late such a look may be. A later one means that
            this process stood still. Their sum is the shortest stall that is always noticed.
        steady: a session that lived this long resets the backoff.
        first_pause, max_pause: backoff between two attempts. The bus is on this machine: peers should be back within a
            second after it listens again.
        settle: after a restart of the bus, for the plugins to reconnect: the default `grace_seconds` of a bus.
        max_refused_pause: the longest pause while the bus is there and refuses this peer.
        attach_bytes: tools in one attach or `Register`; those that do not fit follow by `Register`.
    """

    handshake: float = 10.0
    silence: float = 40.0
    half_close: float = 2.0
    writer: float = 0.2
    tick: float = 0.5
    late: float = 0.5
    steady: float = 1.0
    first_pause: float = 0.05
    max_pause: float = 0.8
    max_refused_pause: float = 10.0
    settle: float = 5.0
    attach_bytes: int = 12 * MIB


TIMINGS = ConnectionTimings()


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """The settings of one connection, checked.

    Attributes:
        address: see `BusAddress`; empty means TOOLBUS_ADDRESS, then that of the credential, then 127.0.0.1:48930.
        source: whose tools and calls these are.
        instance: tells the sessions of a source apart, up to 128 printable ASCII characters without blanks; empty
            generates one, which stays for all attempts.
        max_in_flight: calls in flight in each direction; 0 means the bus's 256.
        qualified: whether the tools are listed as ``source:name``.
        token: proves that this process may use the source; empty means TOOLBUS_TOKEN.
        notices: texts for operators about the source, one sentence each.
        timings: its timeouts and pauses.
        credential: proves who this peer is, to a bus that requires it; None for none.
        all_or_none: whether the bus refuses all tools if one of them is bad.
        repeat: whether a call that a lost bus may have run is made again at the next one, if its tool is repeatable.
        lane: whether it uses the lane where there is one; None means TOOLBUS_LANE, then yes.
        made_by: the process that generated the instance, whose forks are other instances; 0: it was given.

    Raises:
        SetupError: from the constructor; a setting breaks its rule.
    """

    source: str
    address: str = ""
    instance: str = ""
    max_in_flight: int = 0
    qualified: bool = False
    token: str = field(default="", repr=False)
    notices: tuple[str, ...] = ()
    timings: ConnectionTimings = TIMINGS
    credential: Credential | None = None
    all_or_none: bool = False
    repeat: bool = True
    lane: bool | None = None
    made_by: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", address_text(self.address, self.credential))
        object.__setattr__(self, "token", self.token or os.environ.get("TOOLBUS_TOKEN", ""))
        if not self.instance:
            object.__setattr__(self, "instance", secrets.token_hex(16))
            object.__setattr__(self, "made_by", os.getpid())
        if self.lane is None:
            object.__setattr__(self, "lane", lane_allowed(os.environ.get("TOOLBUS_LANE", "")))
        if self.several:
            several_buses().check(self)
        else:
            check_address(self.bus, self.credential)
        if self.token and not self.several and not self.bus.tls and not self.bus.is_local:
            raise SetupError(
                f"the bus's address {self.address} is not of this machine, and the token of source "
                f"{quote(self.source)} would be sent there in plain text: write tls:{self.address} or "
                f"mtls:{self.address}, or leave TOOLBUS_TOKEN out"
            )
        if not SOURCE.fullmatch(self.source):
            raise SetupError(f"source {quote(self.source)} breaks the rule [A-Za-z0-9_.:-]{{1,128}}: choose another")
        if not INSTANCE.fullmatch(self.instance):
            raise SetupError(explain_instance(self.instance))
        if not 0 <= self.max_in_flight <= MAX_IN_FLIGHT:
            raise SetupError(
                f"max_in_flight is {self.max_in_flight}, it must be from 0 (the default) to {MAX_IN_FLIGHT}"
            )

    @property
    def several(self) -> bool:
        """Whether the address names several buses; `bus` is then of no use."""
        return is_several(self.address)

    @property
    def bus(self) -> BusAddress:
        """The address, parsed."""
        return BusAddress.parse(self.address)


def lane_allowed(text: str) -> bool:
    """Reads TOOLBUS_LANE.

    Raises:
        SetupError: it is neither on nor off.
    """
    allowed = SWITCHES.get(text.lower()) if text else True
    if allowed is None:
        raise SetupError(f"TOOLBUS_LANE is {quote(text)}, it must be on or off")
    return allowed


def find_credential(given: Credential | str | Path | None) -> Credential | None:
    """Returns the credential of this process: the given one, else that of TOOLBUS_CREDENTIAL, else None.

    Raises:
        SetupError: as `Credential.read`.
    """
    path = given or os.environ.get("TOOLBUS_CREDENTIAL")
    if not path:
        return None
    from toolbus.sdk.credential import Credential  # most peers have none

    return path if isinstance(path, Credential) else Credential.read(path)


def address_text(given: str, credential: Credential | None) -> str:
    """Returns the address as written: the given one, else TOOLBUS_ADDRESS, else the credential's, else the default."""
    of_file = credential.address if credential is not None else ""
    return given or os.environ.get("TOOLBUS_ADDRESS") or of_file or ADDRESS


def choose_address(given: str, credential: Credential | None) -> BusAddress:
    """Returns the address of one bus, chosen as `address_text` does; of several one that answers.

    Raises:
        SetupError: it is not an address, or the credential cannot be used there.
    """
    text = address_text(given, credential)
    if is_several(text):
        text = several_buses().choose(text)
    return check_address(BusAddress.parse(text), credential)


def several_buses() -> Any:
    """Returns what connects peers to several buses: its `check`, `choose` and `connect`.

    Raises:
        SetupError: its part was removed from this installation.
    """
    return load(next(part.several for part in parts() if part.several))


def diagnose(address: BusAddress, credential: Credential | None, cause: str = "") -> str:
    """Returns why a client with a credential cannot talk to the server at an address, and how to fix it; it blocks.

    Args:
        cause: gRPC's text, for a server that accepts the client; "" returns no text then.

    Returns:
        "" if that is not known, or the part that probes was removed.
    """
    probes = (load(part.probe) for part in installed() if part.probe)
    return next((str(probe(address, credential, cause)) for probe in probes), "")


def check_address(address: BusAddress, credential: Credential | None) -> BusAddress:
    """Returns an address at which a credential can be used.

    Raises:
        SetupError: it cannot.
    """
    if credential is not None:
        credential.check_for(address)
    elif address.mtls:
        raise SetupError(
            f"the bus at {address} asks for a client certificate: name a credential file in TOOLBUS_CREDENTIAL, which "
            "`toolbus keys add NAME -o FILE` writes on the machine of the bus"
        )
    return address
