"""Runs a bus with plugins, or two sessions without a network, and plays models: for tests of plugins and hosts.

async with running_bus(weather.plugin) as host:
    assert (await host.call("get_weather", {"city": "Oslo"})).unwrap() == "sunny"
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from toolbus.common.lazy import lazily
from toolbus.errors import SetupError
from toolbus.protocol.limits import Timings
from toolbus.protocol.session import Session, Side, State
from toolbus.v1 import tool_bus_service_pb2 as wire

if TYPE_CHECKING:
    from toolbus.bus import Bus
    from toolbus.parts.models.loop.scripted_model import ScriptedModel, Step, breaks, calls, cut, refuses, says
    from toolbus.sdk import Host, Plugin

__all__ = [
    "running_bus", "PATIENT", "PairedSessions",
    # a model whose answers are a list
    "ScriptedModel", "Step", "says", "calls", "refuses", "cut", "breaks",
]  # fmt: skip

__getattr__, __dir__ = lazily(
    __name__, {"parts.models.loop.scripted_model": "ScriptedModel Step says calls refuses cut breaks"}
)

Handle = Callable[[str, Any], object]

# A bus in the process of a test stands still only together with its peers there, on an overloaded machine. So it does
# not refuse the calls that waited, as a bus does whose callers went on meanwhile.
PATIENT = Timings(stall_seconds=60.0)


@overload
def running_bus(
    *,
    unix: bool = ...,
    timings: Timings | None = ...,
    embedder: Callable[[Sequence[str]], Any] | Literal[False] | None = ...,
    **settings: Any,
) -> AbstractAsyncContextManager[Bus]: ...
@overload
def running_bus(
    plugin: Plugin | Path | str, /, *plugins: Plugin | Path | str, **settings: Any
) -> AbstractAsyncContextManager[Host]: ...
def running_bus(*plugins: Plugin | Path | str, **settings: Any) -> Any:
    """Runs a bus on a free port of loopback, without HTTP, and plugins on it, which offer their tools then.

    It is a bus; its address is ``bus.grpc_addresses[0]``. With plugins it is a host on that bus. Whatever address and
    credential they have, the plugins connect to this bus alone; they are closed at the end, and may be used again.

    Args:
        plugins: each a `Plugin`, or the file or folder of one, as `toolbus run` takes it.
        unix: listens on a unix socket in a directory of its own instead.
        timings: lengths of time that are not configuration; `PATIENT` by default.
        embedder: compares the meanings of tools for searches; None: the one that is installed; False: none.
        settings: of `toolbus.bus.Config`; they win over the defaults here.

    Raises:
        SetupError: a plugin cannot be loaded, or the bus refuses one of its tools; the text has the reason.
    """
    return _with_plugins(plugins, settings) if plugins else _running_bus(**settings)


@asynccontextmanager
async def _with_plugins(plugins: Sequence[Plugin | Path | str], settings: dict[str, Any]) -> AsyncIterator[Host]:
    from toolbus.sdk import Host

    async with _running_bus(**settings) as bus, AsyncExitStack() as stack:
        address = bus.grpc_addresses[0]
        for given in plugins:
            plugin = _loaded(given) if isinstance(given, str | Path) else given
            stack.push_async_callback(plugin.close)
            await plugin.start(address=address)
            await plugin.ready()
            if plugin.refused:
                reasons = "; ".join(dict.fromkeys(each.error for each in plugin.refused))
                raise SetupError(f"the bus refuses tools of {plugin.source!r}: {reasons}")
        yield await stack.enter_async_context(Host(address))


def _loaded(path: str | Path) -> Plugin:
    from toolbus.processes.loader import load_plugin
    from toolbus.sdk import Plugin

    loaded = load_plugin(path)
    if loaded.owner is not None:
        return Plugin.from_object(loaded.owner, source=loaded.source)
    return loaded.plugin or Plugin(loaded.source, tools=loaded.tools)


@asynccontextmanager
async def _running_bus(
    *,
    unix: bool = False,
    timings: Timings | None = None,
    embedder: Callable[[Sequence[str]], Any] | Literal[False] | None = None,
    **settings: Any,
) -> AsyncIterator[Bus]:
    from toolbus.bus import Bus, Config  # needs toolbus[server]

    with tempfile.TemporaryDirectory(prefix="toolbus-") as folder:
        address = f"unix:{folder}/bus.sock" if unix else "127.0.0.1:0"
        async with Bus(
            Config(**{"grpc": (address,), "http": "off", **settings}), timings=timings or PATIENT, embedder=embedder
        ) as bus:
            yield bus


class PairedSessions:
    """Both ends of one stream in memory. Nothing moves until `pump`; the time is whatever ``now`` is set to.

    Attributes:
        bus, peer: the two ends; put items into their outboxes.
        now: the time that both see, in seconds.
        seen_by_bus, seen_by_peer: the fields that arrived, as (name, value), oldest first.
    """

    def __init__(self, *, source: str = "paired", max_in_flight: int = 256, attached: bool = True) -> None:
        """Creates the pair.

        Args:
            attached: whether attach and attached have already been exchanged.
        """
        self.now = 0.0
        self.bus: Session[wire.InvokeResponse] = Session(Side.BUS, wire.InvokeResponse, self.now)
        self.peer: Session[wire.InvokeRequest] = Session(Side.PEER, wire.InvokeRequest, self.now)
        self.seen_by_bus: list[tuple[str, Any]] = []
        self.seen_by_peer: list[tuple[str, Any]] = []
        if attached:
            attach = wire.Attach(protocol_version=1, source=source, max_in_flight=max_in_flight)
            self.peer.outbox.room(attach.ByteSize()).attach.CopyFrom(attach)
            self.pump()
            self.bus.open(max_in_flight, 0)
            answer = wire.Attached(session_id="paired", limits=wire.Limits(calls_in_flight=max_in_flight))
            self.bus.outbox.room(answer.ByteSize()).attached.CopyFrom(answer)
            self.pump()
            self.peer.open(max_in_flight, 0)
            self.seen_by_bus.clear()
            self.seen_by_peer.clear()

    def __repr__(self) -> str:
        return f"<PairedSessions {self.bus!r} {self.peer!r}>"

    def pump(self, to_bus: Handle | None = None, to_peer: Handle | None = None) -> int:
        """Carries frames between both ends until neither has any; returns how many there were.

        Each frame is serialized and parsed, as on a wire.

        Args:
            to_bus, to_peer: called with the name and the value of each field that arrives; what they put into an
                outbox is carried too.

        Raises:
            ProtocolError: an end refused a frame.
        """
        carried = 0
        while self.peer.outbox or self.bus.outbox:
            if (request := self.peer.outbox.take()) is not None:
                carried += 1
                arrived = wire.InvokeRequest.FromString(request.SerializeToString())
                _deliver(self.bus.receive(cast(Any, arrived), self.now), self.seen_by_bus, to_bus)
            if (response := self.bus.outbox.take()) is not None:
                carried += 1
                answered = wire.InvokeResponse.FromString(response.SerializeToString())
                _deliver(self.peer.receive(cast(Any, answered), self.now), self.seen_by_peer, to_peer)
        return carried

    def break_off(self) -> None:
        """Ends both ends, as when a connection breaks; what was not carried is lost."""
        for session in (self.bus, self.peer):
            if session.state is not State.CLOSED:
                session.end()
                session.outbox.discard()


def _deliver(fields: list[tuple[str, Any]], seen: list[tuple[str, Any]], handle: Handle | None) -> None:
    for field in fields:
        seen.append(field)
        if handle is not None:
            handle(*field)
