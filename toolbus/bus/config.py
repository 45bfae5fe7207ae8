"""Holds the configuration of a bus as one frozen record that checks itself before the bus listens.

An error names the value, the rule and how to fix it. `serve_settings` knows where settings come from; this file opens
no socket and makes no directory.
"""

from __future__ import annotations

import math
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

from toolbus.bus.access.neighbours import DEFAULT as DEFAULT_NEIGHBOURS
from toolbus.bus.access.neighbours import allowed_uids
from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.calls.call_traces import MAX_SPANS_PER_SECOND
from toolbus.bus.calls.tripwire import Tripwire
from toolbus.bus.catalog.policy import AccessRules
from toolbus.bus.keys.doorman import split_secure
from toolbus.bus.keys.issuer_settings import Issuer, check_issuers
from toolbus.bus.loopback import is_loopback_host, mask
from toolbus.bus.metrics.call_counts import MAX_COUNTED
from toolbus.bus.pins.pins import PINS, Pin
from toolbus.errors import InvalidRequest, SetupError
from toolbus.parts.mcp.settings import McpSettings
from toolbus.protocol.limits import DEFAULT_TIMINGS, Limits, Timings
from toolbus.protocol.tool import is_source

DEFAULT_GRPC = "127.0.0.1:48930"
DEFAULT_HTTP_PORT = 48911
MAX_UNIX_PATH = 107  # bytes: sun_path of Linux holds 108 with its end
MAX_SECONDS = 3600.0
MIN_HEARTBEAT_SECONDS = 0.1  # below, the bus would do little else
ADOPT_ROLES = ("off", "first-use", "upstream")
TRACES_PATH = "/v1/traces"  # of OTLP over HTTP
OFFERED = ("tasks", "search")  # groups of the bus's own tools that are made for models


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration of a bus: what it listens on, what it accepts, what it persists.

    Attributes:
        grpc: ``HOST:PORT`` or ``unix:PATH``; port 0 picks a free one. Beyond this machine ``tls:HOST:PORT``, where each
            RPC needs a token, and ``mtls:HOST:PORT``, where each connection needs a certificate.
        http: ``HOST:PORT``, or ``off``.
        http_fallback: whether to listen on the next free port where that of ``http`` is taken.
        neighbours: the users of this machine that may connect, beside the bus's own and root: ``self``, ``any``,
            names or uids.
        https: ``HOST:PORT`` beyond this machine, where each request needs a key; None: HTTPS is not served.
        keys: the directory of the keys; None: ``keys`` in the data directory.
        issuers: whose tokens (JWT) prove identities as well, for hosts with an OIDC token.
        roles: the personas that tools can be for, in order; empty: none yet.
        adopt_roles: whether roles that are not configured are added when programs name them: ``off``; ``first-use``, by
            the first registration of a tool and by the main server of ``upstream``; ``upstream``, by that alone.
        data_dir: the directory in which what survives a restart is persisted; None: nothing survives.
        upstream: ``http://HOST:PORT`` of a main server that our tools are offered to; None: the bus has no main server.
        limits: see `Limits`.
        grace_seconds: how long the tools of a broken session wait for it to come back.
        drain_seconds: how long calls in flight may take when the bus stops.
        heartbeat_seconds, idle_heartbeat_seconds, missed_heartbeats, missed_heartbeats_gone: how soon a hung peer is
            noticed, see `Timings`.
        silenced: sources that may attach and call, but may not offer tools.
        generation: sources that may use the models that hosts lend (``host:generate``); ``*`` as in ``guarded``.
        guarded: sources whose results are withheld where they hold something named like a secret; one that ends with
            ``*`` stands for all that begin so.
        tripwire: how secrets are recognized by their names: ``default``, or ``synchronet`` for that system's own rules.
        tripwire_allow: names that a tool's results may hold all the same, by tool.
        pins: what happens to a plugin's tools that change after they were first seen, by source: ``warn`` marks them,
            ``block`` refuses them until they are approved; other sources are not compared. ``*`` as above.
        permissions: which users may call which tools, and those of which roles and sources.
        background_after_seconds: how long a call of this process (`toolbus.tools.ToolRegistry`) waits before it becomes
            a task.
        tools_dir: a folder of drop-in tools to offer, in sandboxed processes of their own.
        require_manifest: whether such a folder offers nothing without a ``_manifest.json``.
        council: a file of members that run tools before a model is asked (`toolbus.extension`), and of their settings;
            None: each request for a run brings its members.
        mcp_secrets: a file of variables, in which `${VAR}` of mounts is looked up before the environment.
        mcp_servers: a file of MCP servers to mount, in the common JSON of MCP clients, beside those of `toolbus mount`.
        offered: the bus's own tools that models are offered: ``tasks``, ``search``, or both.
        repair_arguments: whether arguments that break a schema are repaired before they are refused, and defaults are
            filled in.
        record_contents: whether the record of calls holds arguments and outputs, cut and without secrets.
        audit: whether changes of the bus are recorded in the data directory, if it has one.
        audit_required: whether a change is refused that cannot be recorded.
        audit_calls: whether calls are recorded too: by whom, which tool, how they ended; no contents.
        traces: the URL of a collector of OpenTelemetry that gets spans of sampled calls (OTLP over HTTP);
            ``/v1/traces`` is added where it has no path. None: calls are not traced.
        trace_ratio: the share of the calls without a trace that begin one: from 0 to 1.
        trace_most: how many calls are sampled in a second at most.
        slow_seconds: calls that take longer are logged and listed; 0: no call.
        metrics: whether the calls of each tool are counted, and `/metrics` is served.
        metrics_tools: how many tools have series of their own there; the rest is ``other``.
        grpc_reflection: whether clients can list the services of the server.
        mcp: what MCP clients are offered.
        console: whether operators have a page over HTTP.

    Raises:
        SetupError: from the constructor, naming the first rule that is broken.
    """

    grpc: tuple[str, ...] = (DEFAULT_GRPC,)
    http: str = f"127.0.0.1:{DEFAULT_HTTP_PORT}"
    http_fallback: bool = False
    neighbours: tuple[str, ...] = DEFAULT_NEIGHBOURS
    https: str | None = None
    keys: Path | None = None
    issuers: tuple[Issuer, ...] = ()
    roles: tuple[str, ...] = ("default",)
    adopt_roles: str = "off"
    data_dir: Path | None = None
    upstream: str | None = None
    limits: Limits = field(default_factory=Limits)
    grace_seconds: float = 5.0
    drain_seconds: float = 30.0
    heartbeat_seconds: float = DEFAULT_TIMINGS.busy_heartbeat_seconds
    idle_heartbeat_seconds: float = DEFAULT_TIMINGS.idle_heartbeat_seconds
    missed_heartbeats: int = DEFAULT_TIMINGS.missed_heartbeats
    missed_heartbeats_gone: int = DEFAULT_TIMINGS.missed_heartbeats_gone
    silenced: tuple[str, ...] = ()
    generation: tuple[str, ...] = ()
    guarded: tuple[str, ...] = ("dropin", "dropin:*")
    tripwire: str = "default"
    tripwire_allow: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pins: Mapping[str, Pin] = field(default_factory=dict)
    permissions: AccessRules = field(default_factory=AccessRules)
    background_after_seconds: float = 10.0
    tools_dir: Path | None = None
    require_manifest: bool = False
    council: Path | None = None
    mcp_secrets: Path | None = None
    mcp_servers: Path | None = None
    offered: tuple[str, ...] = ()
    repair_arguments: bool = True
    record_contents: bool = False
    audit: bool = True
    audit_required: bool = False
    audit_calls: bool = False
    traces: str | None = None
    trace_ratio: float = 0.0
    trace_most: int = MAX_SPANS_PER_SECOND
    slow_seconds: float = 10.0
    metrics: bool = True
    metrics_tools: int = 200
    grpc_reflection: bool = True
    console: bool = True
    mcp: McpSettings = field(default_factory=McpSettings)

    def __post_init__(self) -> None:
        if not self.grpc:
            raise SetupError(f"grpc has no address: give at least one, for example {DEFAULT_GRPC}")
        for name in ("grpc", "neighbours", "roles", "silenced", "generation", "guarded", "offered"):
            _check_list(name, getattr(self, name))
        for address in self.grpc:
            secure, address = split_secure(address)
            check_address("grpc", address, unix=not secure, anywhere=bool(secure))
        allowed_uids(self.neighbours)  # raises for a user that does not exist
        if self.http != "off":
            check_address("http", self.http)
        if self.https is not None:
            check_address("https", self.https, anywhere=True)
        check_issuers(list(self.issuers))
        if self.issuers and not self.needs_keys:
            raise SetupError(
                "issuers are for the addresses tls:, mtls: and https, and this bus has none of them: add one, or drop "
                "the issuers"
            )
        if self.needs_keys and self.keys_dir is None:
            raise SetupError(
                "the addresses tls:, mtls: and https need keys, and this bus has no data directory to hold them: give "
                "it one with --data-dir, or name the directory of the keys with --keys"
            )
        if self.upstream is not None:
            check_upstream(self.upstream)
            if self.http == "off":
                raise SetupError("upstream needs http, since the main server calls tools back over it: drop http off")
        if self.adopt_roles not in ADOPT_ROLES:
            raise SetupError(f"adopt_roles is {self.adopt_roles!r}, it must be one of {', '.join(ADOPT_ROLES)}")
        if self.adopt_roles == "upstream" and self.upstream is None:
            raise SetupError("adopt_roles upstream needs a main server whose roles are taken: set upstream")
        if self.tools_dir is not None and not self.tools_dir.is_dir():
            raise SetupError(f"tools_dir {str(self.tools_dir)!r} is not a folder: create it or name another one")
        for name, file in (("council", self.council), ("mcp_servers", self.mcp_servers)):
            if file is not None and not file.is_file():
                raise SetupError(f"{name} {str(file)!r} is not a file: create it or name another one")
        self._check_sources()
        try:
            Tripwire(self.tripwire, self.tripwire_allow)  # type: ignore[arg-type]  # it checks the preset
        except InvalidRequest as error:
            raise SetupError(str(error)) from None
        self._check_audit()
        self._check_slow()
        self._check_traces()
        for group in self.offered:
            if group not in OFFERED:
                raise SetupError(f"offered names {group!r}: the bus can offer models {' and '.join(OFFERED)}")
        for name in ("grace_seconds", "drain_seconds", "background_after_seconds"):
            seconds = getattr(self, name)
            if not 0 <= seconds <= MAX_SECONDS:  # NaN fails this too
                raise SetupError(f"{name} is {seconds:g}, it must be from 0 to {MAX_SECONDS:g} seconds")
        self._check_heartbeats()
        if not 0 <= self.metrics_tools <= MAX_COUNTED:
            raise SetupError(f"metrics_tools is {self.metrics_tools}, it must be from 0 to {MAX_COUNTED}")
        for limit in fields(Limits):
            value = getattr(self.limits, limit.name)
            if value < 1:
                raise SetupError(f"limits.{limit.name} is {value}, it must be at least 1")

    @property
    def timings(self) -> Timings:
        """The timings of a bus with the heartbeats that are configured."""
        return Timings(
            busy_heartbeat_seconds=self.heartbeat_seconds,
            idle_heartbeat_seconds=self.idle_heartbeat_seconds,
            missed_heartbeats=self.missed_heartbeats,
            missed_heartbeats_gone=self.missed_heartbeats_gone,
        )

    def _check_heartbeats(self) -> None:
        for name in ("heartbeat_seconds", "idle_heartbeat_seconds"):
            seconds = getattr(self, name)
            if not MIN_HEARTBEAT_SECONDS <= seconds <= MAX_SECONDS:  # NaN fails this too
                rule = f"it must be from {MIN_HEARTBEAT_SECONDS:g} to {MAX_SECONDS:g} seconds"
                raise SetupError(f"{name} is {seconds:g}, {rule}")
        if self.missed_heartbeats < 1:
            raise SetupError(f"missed_heartbeats is {self.missed_heartbeats}, it must be at least 1")
        if self.missed_heartbeats_gone < self.missed_heartbeats:
            raise SetupError(
                f"missed_heartbeats_gone is {self.missed_heartbeats_gone}, less than missed_heartbeats = "
                f"{self.missed_heartbeats}: a session ends after its calls, so give at least as many"
            )

    def _check_sources(self) -> None:
        patterns = {"generation": self.generation, "guarded": self.guarded, "pins": tuple(self.pins)}
        stems = {name: tuple(each.rstrip("*") for each in sources) for name, sources in patterns.items()}
        for name, sources in {"silenced": self.silenced, **stems}.items():
            for source in sources:
                if source and not is_source(source):
                    raise SetupError(f"{name} names {source!r}: a source is 1 to 128 of [A-Za-z0-9_.:-]")
        for source, pin in self.pins.items():
            if pin not in PINS:
                raise SetupError(f"pins.{source} is {pin!r}, it must be one of {', '.join(PINS)}")

    def _check_audit(self) -> None:
        for name in ("audit_required", "audit_calls"):
            if getattr(self, name) and not self.audit:
                raise SetupError(f"{name} contradicts audit = false: drop one")
            if getattr(self, name) and self.data_dir is None:
                raise SetupError(f"{name} needs a data directory, where the audit is written: set data_dir")

    def _check_slow(self) -> None:
        if not 0.0 <= self.slow_seconds < math.inf:  # NaN fails this too
            raise SetupError(
                f"slow_seconds is {self.slow_seconds:g}, it must be 0 (off) or a number of seconds above 0"
            )

    def _check_traces(self) -> None:
        if self.traces is not None:
            check_collector(self.traces)
        if not 0.0 <= self.trace_ratio <= 1.0:  # NaN fails this too
            raise SetupError(f"trace_ratio is {self.trace_ratio:g}, it must be from 0 (none) to 1 (all)")
        if self.trace_most < 1:
            raise SetupError(f"trace_most is {self.trace_most}, it must be at least 1: without traces none is sampled")

    @property
    def traces_url(self) -> str:
        """Where spans are posted; "" where they are not."""
        if self.traces is None:
            return ""
        return self.traces if urlsplit(self.traces).path.strip("/") else f"{self.traces.rstrip('/')}{TRACES_PATH}"

    @property
    def needs_keys(self) -> bool:
        """Whether it listens where each request needs a key."""
        return self.https is not None or any(split_secure(address)[0] for address in self.grpc)

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


def check_upstream(url: str) -> None:
    """Checks the address of a main server.

    Raises:
        SetupError: it is not an http URL of a host and port on loopback.
    """
    try:
        target = parse_callback_url(url)
    except ValueError:
        raise SetupError(
            f"upstream {mask(url)!r} is not http://HOST:PORT of this machine: write for example http://127.0.0.1:48911"
        ) from None
    if target.scheme != "http" or target.user or target.url.partition("://")[2].partition("/")[2]:
        raise SetupError(f"upstream {target.shown!r} is not http://HOST:PORT: write for example http://127.0.0.1:48911")


def check_collector(url: str) -> None:
    """Checks the address of a collector.

    Raises:
        SetupError: it is not an http or https URL.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, a bracket that is not closed
        fits = False
    if not fits or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise SetupError(
            f"traces {mask(url)!r} is not http://HOST:PORT or https://HOST:PORT: write for example "
            "http://127.0.0.1:4318, or off"
        )


def check_port(where: str, port: str) -> int:
    """Returns a port from its text.

    Raises:
        SetupError: it is not a number from 0 to 65535.
    """
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise SetupError(f"{where}: port {port!r} is not a number from 0 to 65535; 0 picks a free one")
    return int(port)


# -- rules ---------------------------------------------------------------------------------------------------------


def _check_list(name: str, values: Sequence[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if not value:
            raise SetupError(f"{name} has an empty item: name it or leave it out")
        if value in seen and not value.endswith(":0"):  # two free ports are two addresses
            raise SetupError(f"{name} names {value!r} twice: name it once")
        seen.add(value)


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
