"""Holds the configuration of a bus as one frozen record that checks itself before the bus listens.

Each setting of the core is declared once, as a field of `Config`; the settings of parts are records of their own. An
error names the value, the rule and how to fix it. `serve_settings` knows where settings come from; this file opens no
socket and makes no directory. It imports little, since the options of ``toolbus serve`` are made from it.
"""

from __future__ import annotations

import math
import socket
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolbus.bus.access.neighbours import DEFAULT as DEFAULT_NEIGHBOURS
from toolbus.bus.access.neighbours import allowed_uids
from toolbus.bus.loopback import is_loopback_host
from toolbus.common.reader import Keys, Reader
from toolbus.common.setting import (
    FLAG,
    NUMBER,
    PATH,
    TEXT,
    TEXTS,
    WHOLE,
    Option,
    Switch,
    at_least_one,
    check_items,
    check_settings,
    one_of,
    read_parts,
    setting,
    settings_of,
    table,
    texts,
    within,
)
from toolbus.errors import InvalidRequest, SetupError
from toolbus.protocol.limits import DEFAULT_TIMINGS, Limits, Timings

if TYPE_CHECKING:
    from toolbus.bus.catalog.policy import AccessRules

DEFAULT_GRPC = "127.0.0.1:48930"
DEFAULT_HTTP_PORT = 48911
MAX_UNIX_PATH = 107  # bytes: sun_path of Linux holds 108 with its end
MAX_SECONDS = 3600.0
MIN_HEARTBEAT_SECONDS = 0.1  # below, the bus would do little else
ADOPT_ROLES = ("off", "first-use", "upstream")
OFFERED = ("tasks", "search", "results")  # groups of the bus's own tools that are made for models

Record = TypeVar("Record")


# -- how values are read and checked ---------------------------------------------------------------------------------


def _users(reader: Reader) -> tuple[str, ...]:
    """Reads a list of users, or one; a uid may be a number."""
    if isinstance(reader.value, str):
        return (reader.value,)
    return tuple(str(item.whole()) if isinstance(item.value, int) else item.text() for item in reader.items())


def _limits(reader: Reader) -> Limits:
    keys: Keys = {each.name: (each.name, Reader.whole) for each in fields(Limits)}
    return Limits(**reader.record(keys))


def _rules(reader: Reader) -> AccessRules:
    from toolbus.bus.catalog.policy import AccessRules

    try:
        return AccessRules.read({key: value.value for key, value in reader.entries().items()})
    except InvalidRequest as error:
        raise SetupError(f"{reader.subject}: {error}") from None


def _no_rules() -> AccessRules:
    from toolbus.bus.catalog.policy import AccessRules

    return AccessRules()


def _check_grpc(name: str, addresses: tuple[str, ...]) -> None:
    if not addresses:
        raise SetupError(f"{name} has no address: give at least one, for example {DEFAULT_GRPC}")
    check_items(name, addresses)
    for written in addresses:
        secure, address = _split_secure(written)
        check_address(name, address, unix=not secure, anywhere=bool(secure))


def _split_secure(address: str) -> tuple[str, str]:
    from toolbus.bus.keys.doorman import split_secure

    return split_secure(address)


def _check_neighbours(name: str, users: tuple[str, ...]) -> None:
    check_items(name, users)
    allowed_uids(users)  # raises for a user that does not exist


def _check_http(name: str, address: str) -> None:
    if address != "off":
        check_address(name, address)


def _check_https(name: str, address: str | None) -> None:
    if address is not None:
        check_address(name, address, anywhere=True)


def check_sources(name: str, sources: Iterable[str]) -> None:
    """Refuses what is not a source, or a beginning of one with ``*`` behind it."""
    from toolbus.protocol.tool import is_source

    check_items(name, tuple(sources))
    for source in sources:
        stem = source if name == "silenced" else source.rstrip("*")
        if stem and not is_source(stem):
            raise SetupError(f"{name} names {stem!r}: a source is 1 to 128 of [A-Za-z0-9_.:-]")


def _check_offered(name: str, groups: tuple[str, ...]) -> None:
    check_items(name, groups)
    for group in groups:
        if group not in OFFERED:
            raise SetupError(f"{name} names {group!r}: the bus can offer models {' and '.join(OFFERED)}")


def _check_metrics_tools(name: str, tools: int) -> None:
    from toolbus.bus.metrics.call_counts import MAX_COUNTED

    if not 0 <= tools <= MAX_COUNTED:
        raise SetupError(f"{name} is {tools}, it must be from 0 to {MAX_COUNTED}")


def _check_slow(name: str, seconds: float) -> None:
    if not 0.0 <= seconds < math.inf:  # NaN fails this too
        raise SetupError(f"{name} is {seconds:g}, it must be 0 (off) or a number of seconds above 0")


def _check_limits(name: str, limits: Limits) -> None:
    for each in fields(Limits):
        at_least_one(f"{name}.{each.name}", getattr(limits, each.name))


_A_WHILE = within(0, MAX_SECONDS, "seconds")
_A_HEARTBEAT = within(MIN_HEARTBEAT_SECONDS, MAX_SECONDS, "seconds")


# -- the record ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The configuration of a bus: what it listens on, what it accepts, what it persists.

    Each setting of the reference page (Configuration) is a keyword, those of parts included. Without a ``data_dir``
    nothing survives a restart.

    Attributes:
        http_fallback: whether to listen on the next free port where that of ``http`` is taken.
        parts: the settings of the parts, one record for each; see `part`.

    Raises:
        SetupError: from the constructor, naming the first rule that is broken.
        TypeError: neither the core nor a part has a setting of such a name.
    """

    grpc: tuple[str, ...] = setting(
        (DEFAULT_GRPC,),
        TEXTS,
        "[addresses](#addresses) for gRPC: `HOST:PORT` on loopback, `unix:PATH`, or for other machines `tls:HOST:PORT` "
        "and `mtls:HOST:PORT`; port 0 picks a free one",
        check=_check_grpc,
        option=Option(
            "Listen here for gRPC; may be repeated. Port 0 picks a free port (default: 127.0.0.1:48930). With tls: "
            "or mtls: for other machines, whose programs need a key.",
            "[tls:|mtls:]HOST:PORT|unix:PATH",
        ),
    )
    http: str = setting(
        f"127.0.0.1:{DEFAULT_HTTP_PORT}",
        TEXT,
        "the address for HTTP on loopback, or `off`",
        check=_check_http,
        option=Option("Listen here for HTTP, or not at all (default: see below).", "HOST:PORT|off"),
    )
    http_fallback: bool = False
    https: str | None = setting(
        None,
        TEXT,
        "the address for HTTPS, for other machines: each request needs a key",
        check=_check_https,
        option=Option("Also listen here for HTTPS, for programs with a key (default: no HTTPS).", "HOST:PORT"),
    )
    keys: Path | None = setting(
        None,
        PATH,
        "the directory of the [keys](#identities-and-keys), for `tls:`, `mtls:` and `https`",
        option=Option("The keys of `toolbus keys` (default: keys in the data directory).", "DIR"),
        shown="`keys` in the data directory",
    )
    neighbours: tuple[str, ...] = setting(
        DEFAULT_NEIGHBOURS,
        texts(_users),
        "which [users of this machine](../about/security.md#who-may-connect-on-this-machine) may connect: `self`, "
        '`any`, or names and uids such as `["www-data", 1001]`',
        check=_check_neighbours,
        option=Option(
            "Which users of this machine may connect, besides this one and root; may be repeated (default: self).",
            "self|any|USER",
        ),
    )
    roles: tuple[str, ...] = setting(
        ("default",),
        TEXTS,
        "the personas that tools can be for, in order",
        check=check_items,
        option=Option(
            "A role that tools can be registered for; may be repeated (default: the role default).", "NAME", "--role"
        ),
        switch=Switch("no_roles", (), "starts without any role", Option("Start without any role.")),
    )
    adopt_roles: str = setting(
        "off",
        TEXT,
        "adds [roles](#roles) that are not configured: `first-use`, of registrations and the main server of "
        "`upstream`; `upstream`, only of the latter",
        check=one_of(*ADOPT_ROLES),
        option=Option(
            "Add roles that are not configured: first-use, when a tool is registered for one or the main server has "
            "it; upstream, when the main server has it (default: off).",
            "off|first-use|upstream",
        ),
    )
    name_owner: str = setting(
        "newest",
        TEXT,
        "which source has a name that several offer: the `newest`, or the `first` (later ones are `source:name`)",
        check=one_of("newest", "first"),
        option=Option("Which source has a name that several offer (default: newest).", "newest|first"),
    )
    data_dir: Path | None = setting(
        None,
        PATH,
        "[the directory](#the-data-directory) for everything that survives a restart",
        option=Option(
            "Store here what outlives a restart; for one bus at a time (default: the platform's data folder).", "DIR"
        ),
        shown="the platform's",
        switch=Switch(
            "ephemeral",
            None,
            "stores nothing",
            Option("Store nothing: tools with a callback URL, tasks and rules end with the bus."),
        ),
    )
    grace_seconds: float = setting(
        5.0,
        NUMBER,
        "how long tools stay offline after their session broke, until their plugin reconnects; 0 to 3600",
        check=_A_WHILE,
    )
    drain_seconds: float = setting(
        30.0,
        NUMBER,
        "how long calls in flight may take during a graceful shutdown, cancelled ones included; 0 to 3600",
        check=_A_WHILE,
    )
    heartbeat_seconds: float = setting(
        DEFAULT_TIMINGS.busy_heartbeat_seconds,
        NUMBER,
        "between [heartbeats](#heartbeats) of a peer that runs calls; 0.1 to 3600",
        check=_A_HEARTBEAT,
        option=Option("Between heartbeats of a peer that runs calls (default: 1).", "SECONDS"),
    )
    idle_heartbeat_seconds: float = setting(
        DEFAULT_TIMINGS.idle_heartbeat_seconds,
        NUMBER,
        "between heartbeats of a peer without calls; 0.1 to 3600",
        check=_A_HEARTBEAT,
    )
    missed_heartbeats: int = setting(
        DEFAULT_TIMINGS.missed_heartbeats,
        WHOLE,
        "after this number in a row the calls of a peer end",
        check=at_least_one,
        option=Option("After so many without an echo the calls of a peer end (default: 4).", "COUNT"),
    )
    missed_heartbeats_gone: int = setting(
        DEFAULT_TIMINGS.missed_heartbeats_gone,
        WHOLE,
        "after this number in a row the session of a peer ends; not less than `missed_heartbeats`",
    )
    generation: tuple[str, ...] = setting(
        (),
        TEXTS,
        "sources that may use the [models that hosts lend](../start/hosts.md#lending-a-model); `*` at the end stands "
        "for any rest",
        check=check_sources,
    )
    silenced: tuple[str, ...] = setting(
        (), TEXTS, "sources that may attach and call, but not offer tools", check=check_sources
    )
    guarded: tuple[str, ...] = setting(
        ("dropin", "dropin:*"),
        TEXTS,
        "[untrusted sources](../about/security.md#what-a-tool-may-do); `*` at the end stands for any rest",
        check=check_sources,
    )
    offered: tuple[str, ...] = setting(
        (),
        TEXTS,
        "the bus's own tools that are offered to models: `tasks`, `search`, `results`",
        check=_check_offered,
        option=Option(
            "Offer this group of the bus's own tools to models; may be repeated.", "tasks|search|results", "--offer"
        ),
    )
    repair_arguments: bool = setting(
        True,
        FLAG,
        "[repairs](../start/types.md#what-the-bus-repairs) arguments that break a schema, and fills in defaults",
        option=Option(
            "Refuse arguments that break a tool's schema as they are, and fill in no defaults.", name="--no-repair"
        ),
    )
    record_contents: bool = setting(
        False,
        FLAG,
        "the records of calls hold arguments and outputs, shortened and without secrets",
        option=Option("Record arguments and outputs of the newest calls, shortened and without secrets."),
    )
    record_errors: str = setting(
        "own",
        TEXT,
        "the records of failed calls hold the texts of errors, which may repeat arguments: `always`, `never`, or "
        "`own`, on a bus that only programs of its own user reach",
        check=one_of("own", "always", "never"),
    )
    metrics: bool = setting(True, FLAG, "counts the calls of each tool and serves [`/metrics`](../start/metrics.md)")
    metrics_tools: int = setting(
        200,
        WHOLE,
        "how many tools have their [own series](../start/metrics.md#how-many-series-there-are); at most 10,000",
        check=_check_metrics_tools,
    )
    lane: bool = setting(
        True,
        FLAG,
        "plugins and hosts on the SDK connect over [the lane](#the-lane)",
        option=Option("Serve plugins and hosts on the SDK over gRPC only.", name="--no-lane"),
    )
    grpc_reflection: bool = setting(True, FLAG, "clients can list the services of the server")
    slow_seconds: float = setting(
        10.0,
        NUMBER,
        "calls that take longer are [logged and listed](../start/logs.md#slow-calls); 0: none",
        check=_check_slow,
    )
    # -- tables of the file
    limits: Limits = setting(Limits, table(_limits), check=_check_limits)
    permissions: AccessRules = setting(_no_rules, table(_rules))
    parts: tuple[Any, ...] = ()

    if TYPE_CHECKING:  # the parts' settings: `toolbus.parts` lists the records that declare them, a test compares
        audit: bool = True
        audit_calls: bool = False
        audit_required: bool = False
        background_after_seconds: float = 10.0
        console: bool = True
        council: Path | None = None
        guards: tuple[Any, ...] = ()
        approvals: tuple[Any, ...] = ()
        issuers: tuple[Any, ...] = ()
        mcp: object = None
        mcp_secrets: Path | None = None
        mcp_servers: Path | None = None
        overlays: Path | None = None
        pins: Mapping[str, str] = {}
        require_manifest: bool = False
        results: object = None
        storage: str | None = None
        tools_dir: Path | None = None
        trace_most: int = 100
        trace_ratio: float = 0.0
        traces: str | None = None
        http_origins: tuple[str, ...] = ()
        tripwire: str = "default"
        tripwire_allow: Mapping[str, tuple[str, ...]] = {}
        upstream: str | None = None
    else:

        def __init__(self, *, parts: Iterable[Any] = (), **settings: Any) -> None:
            for each in fields(self):
                if each.name in settings:
                    value = settings.pop(each.name)
                else:
                    value = each.default if each.default_factory is MISSING else each.default_factory()
                object.__setattr__(self, each.name, value)
            object.__setattr__(self, "parts", read_parts(parts, settings))
            self._check()

        def __getattr__(self, name: str) -> Any:
            for record in self.parts if name != "parts" else ():
                if name in settings_of(type(record)):
                    return getattr(record, name)
            raise AttributeError(f"{type(self).__name__} has no setting {name!r}")

    def part(self, record: type[Record]) -> Record:
        """Returns the settings of a part, by the class of its record."""
        found: Record = next((each for each in self.parts if type(each) is record), None) or record()
        return found

    @property
    def reserved(self) -> frozenset[str]:
        """Addresses that HTTP does not fall back to: the bus's own, and those that parts leave to others."""
        others = (getattr(record, "reserved", "") for record in self.parts)
        return frozenset((*self.grpc, self.https or "", *others)) - {""}

    def _check(self) -> None:
        check_settings(self)
        for record in self.parts:
            check = getattr(record, "check_beside", None)
            if check is not None:
                check(self)
        if self.needs_keys and self.keys_dir is None:
            raise SetupError(
                "the addresses tls:, mtls: and https need keys, and this bus has no data directory to hold them: give "
                "it one with --data-dir, or name the directory of the keys with --keys"
            )
        if self.missed_heartbeats_gone < self.missed_heartbeats:
            raise SetupError(
                f"missed_heartbeats_gone is {self.missed_heartbeats_gone}, less than missed_heartbeats = "
                f"{self.missed_heartbeats}: a session ends after its calls, so give at least as many"
            )

    @property
    def timings(self) -> Timings:
        """The timings of a bus with the heartbeats that are configured."""
        return Timings(
            busy_heartbeat_seconds=self.heartbeat_seconds,
            idle_heartbeat_seconds=self.idle_heartbeat_seconds,
            missed_heartbeats=self.missed_heartbeats,
            missed_heartbeats_gone=self.missed_heartbeats_gone,
        )

    @property
    def needs_keys(self) -> bool:
        """Whether it listens where each request needs a key."""
        return self.https is not None or any(_split_secure(address)[0] for address in self.grpc)

    @property
    def records_errors(self) -> bool:
        """Whether texts of errors are recorded."""
        is_own = not self.needs_keys and self.neighbours == DEFAULT_NEIGHBOURS
        return self.record_errors == "always" or (self.record_errors == "own" and is_own)

    @property
    def keys_dir(self) -> Path | None:
        """The directory of the keys; None where nothing is persisted."""
        return self.keys or (self.data_dir / "keys" if self.data_dir is not None else None)

    @property
    def bus_id(self) -> str:
        """Names the bus so that it is the same after a restart on the same machine and addresses."""
        return uuid.uuid5(uuid.NAMESPACE_DNS, f"{socket.gethostname()} {' '.join(self.grpc)}").hex


def check_address(name: str, address: str, *, unix: bool = False, anywhere: bool = False) -> None:
    """Checks an address to listen on.

    Args:
        name: what the address is for, in the error's text.
        unix: whether ``unix:PATH`` will do as well.
        anywhere: whether it may be beyond loopback, where each request needs a key.

    Raises:
        SetupError: another form, a port out of range, a host that is not loopback.
    """
    if unix and address.startswith("unix:"):
        _check_unix(name, address)
        return
    host, colon, port = address.rpartition(":")
    forms = "HOST:PORT or unix:PATH" if unix else "HOST:PORT or off"
    if not colon or host in ("", "unix") or (":" in host and not host.startswith("[")):
        raise SetupError(
            f"{name} address {address!r} is not {forms}: write for example 127.0.0.1:0 (an IPv6 host in brackets)"
        )
    check_port(f"{name} address {address!r}", port)
    if not anywhere and not is_loopback_host(host.removeprefix("[").removesuffix("]")):
        secure = f"mtls:{address}" if name == "grpc" else f"https = {address!r}"
        raise SetupError(
            f"{name} address {address!r} is not on loopback, where other machines could call every tool without a key: "
            f"use 127.0.0.0/8, [::1] or localhost, or {secure} after `toolbus keys init`"
        )


def check_port(where: str, port: str) -> int:
    """Returns a port from its text.

    Raises:
        SetupError: it is not a number from 0 to 65535.
    """
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise SetupError(f"{where}: port {port!r} is not a number from 0 to 65535; 0 picks a free one")
    return int(port)


def _check_unix(name: str, address: str) -> None:
    path = address.removeprefix("unix:")
    if not path or path.startswith("//"):
        raise SetupError(f"{name} address {address!r} has no path: write for example unix:/run/toolbus/bus.sock")
    size = len(path.encode())
    if size > MAX_UNIX_PATH:
        raise SetupError(
            f"{name} address {address!r} has a path of {size} bytes, more than the {MAX_UNIX_PATH} that the system "
            "takes: choose a shorter one"
        )
    if "\0" in path:
        raise SetupError(f"{name} address {address!r} has a NUL byte in its path: leave it out")
