"""Second implementations that the core is tested with: a peer without a stream, and the core wired on a clock.

Nothing here is a mock: `PeerDouble` runs and makes calls by the same two protocols as a stream does; `StreamDouble` and
the wiring are those of `lab.fuzz.core`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.fuzz.core import CoreOnAClock
from lab.fuzz.core import StreamDouble as StreamDouble  # for tests, too
from toolbus.bus.access.identity import Principal
from toolbus.bus.access.quota import Quota
from toolbus.bus.calls.call import ArgumentBudget, Call
from toolbus.bus.calls.call_records import Row
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.entry import CompiledTool, Entry, Slots, Trust, compile_tool
from toolbus.errors import Code, Stage
from toolbus.protocol.tool import Annotations, CallError, Limits, Result, Tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

IDEMPOTENT = Annotations(idempotent=True)
NUMBER = Tool("n", parameters_json='{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')


class PeerDouble:
    """Runs and makes calls; its wire is a list that is handed over when the test asks for it."""

    session_state = wire.SESSION_STATE_LIVE

    def __init__(
        self,
        source: str,
        dispatcher: Dispatcher | None = None,
        *,
        instance: str = "",
        max_in_flight: int = 256,
        shares: bool = True,
        waits: bool | None = None,
        trusted: bool = True,
        qualified: bool = False,
        max_item_bytes: int = 1 << 40,
        trust: Trust = Trust.OWN,
    ) -> None:
        self.kind = "peer"
        self.trust = trust
        self.source = source
        self.instance = instance
        self.max_in_flight = max_in_flight
        self.shares = shares
        self.awaits_roles = shares if waits is None else waits
        self.remote = True
        self.persisted = False
        self.may_set_context = trusted
        self.qualified = qualified
        self.max_item_bytes = max_item_bytes
        self.principal = Principal(source)
        self.longest_timeout = 300.0
        self.takes_calls = True
        self.pending: dict[str, Any] = {}
        self.in_flight: dict[str, Any] = {}
        self.slots = Slots()
        self.stuck = 0
        self.budget = dispatcher.budget(source) if dispatcher else ArgumentBudget()
        self.quota: Quota | None = None
        self.allowed: set[Entry] = set()
        self.allowed_at = 0
        self.waiting: dict[str, Call] = {}  # calls that have not been handed over
        self.received: list[Call] = []  # calls that were, in order
        self.cancelled: list[tuple[str, str]] = []  # (id, reason) of cancels that were sent
        self.results: dict[str, list[Result]] = {}  # what came back, by call_id
        self.signs: list[pb.ToolProgress] = []  # progress of its own calls

    def __repr__(self) -> str:
        return (
            f"<PeerDouble {self.source}/{self.instance} pending={list(self.pending)} in_flight={list(self.in_flight)}>"
        )

    # -- as handler

    def send(self, calls: Sequence[Call], now: float) -> None:
        for call in calls:
            assert self.pending[call.id] is call
            self.waiting[call.id] = call

    def hand_over(self) -> list[Call]:
        """Does what a writer does: whatever waits reaches the plugin."""
        calls = list(self.waiting.values())
        self.waiting.clear()
        self.received += calls
        return calls

    def cancel(self, call: Call, reason: str) -> bool:
        if self.waiting.pop(call.id, None) is not None:
            return True
        self.cancelled.append((call.id, reason))
        return False

    def stage(self, call: Call) -> Stage:
        return Stage.NOT_DISPATCHED if call.id in self.waiting else Stage.DISPATCHED

    # -- as caller

    def deliver(self, results: Sequence[tuple[str, str]]) -> None:
        for call_id, output_json in results:
            self.results.setdefault(call_id, []).append(Result(call_id, output_json))

    def deliver_result(self, call_id: str, result: pb.ToolResult) -> None:
        result.call_id = call_id
        self.results.setdefault(call_id, []).append(Result.from_wire(result))

    def progress(self, call_id: str, progress: pb.ToolProgress) -> None:
        copy = pb.ToolProgress()
        copy.CopyFrom(progress)
        copy.call_id = call_id
        self.signs.append(copy)


class KeeperDouble:
    """Takes over calls at their soft deadline, as long as it has room."""

    def __init__(self, core: Core, room: int = 1_000) -> None:
        self.peer = core.peer("keeper")  # their caller from then on
        self.room = room
        self.adopted: list[Call] = []
        core.dispatcher.seams.background = self

    def adopt(self, call: Call, now: float, cancel: object, calls: object) -> tuple[PeerDouble, str, Result] | None:
        if len(self.peer.in_flight) >= self.room:
            return None
        self.adopted.append(call)
        task_id = f"task{len(self.adopted)}"
        return self.peer, task_id, Result(call.call_id, f'{{"task_id":"{task_id}"}}')


class Core(CoreOnAClock):
    """The core with doubles beside its streams, and what tests do with both."""

    def peer(self, source: str, **more: Any) -> PeerDouble:
        return PeerDouble(source, self.dispatcher, **more)

    def plugin(self, source: str, *tools: Tool, **more: Any) -> PeerDouble:
        """Returns a double that offers tools."""
        plugin = self.peer(source, trusted=False, **more)
        self.registry.register(plugin, offered(*tools), qualified=plugin.qualified)
        return plugin

    def call(self, caller: PeerDouble, name: str, arguments: str = "{}", *, call_id: str = "", **more: Any) -> str:
        """Asks for one call; returns its id."""
        call_id = call_id or f"c{len(caller.results) + len(caller.in_flight) + 1}"
        message = pb.ToolCall(call_id=call_id, name=name, arguments_json=arguments, **more)
        self.dispatcher.calls(caller, [message], self.now)
        return call_id

    def refusal(self, caller: PeerDouble, name: str, arguments: str = "{}", **more: Any) -> CallError:
        """Asks for one call that is refused at once; returns why."""
        call_id = self.call(caller, name, arguments, **more)
        assert call_id not in caller.in_flight
        return error_of(caller, call_id)

    def answer(self, plugin: PeerDouble, output: str = "1", **more: Any) -> None:
        """Has a plugin answer its oldest pending call."""
        plugin.hand_over()
        result = pb.ToolResult(call_id=next(iter(plugin.pending)), output_json=output, **more)
        self.dispatcher.results(plugin, [result], self.now)

    def progress(self, plugin: PeerDouble, call_id: str, **more: Any) -> None:
        self.dispatcher.progress(plugin, [pb.ToolProgress(call_id=call_id, **more)], self.now)

    def cancel(self, caller: PeerDouble, call_id: str, reason: str = "") -> None:
        self.dispatcher.endings.cancels(caller, [pb.ToolCancel(call_id=call_id, reason=reason)], self.now)

    def lose(self, plugin: PeerDouble, why: str = "its connection broke") -> None:
        """Breaks a double off, in the order in which presence ends a session."""
        self.registry.lose(plugin, why, self.now)
        plugin.takes_calls = False
        pending, asked = list(plugin.pending.values()), list(plugin.in_flight.values())
        plugin.pending.clear()
        plugin.in_flight.clear()
        self.dispatcher.endings.handler_ended(pending, why, self.now)
        self.dispatcher.endings.caller_ended(asked, self.now)
        plugin.waiting.clear()

    def stream(self) -> StreamDouble:
        return StreamDouble(self)

    def attached(self, source: str, *tools: Tool, **attach: Any) -> StreamDouble:
        """Returns a stream whose attach was answered."""
        stream = self.stream()
        stream.attach(source, *tools, **attach)
        assert stream.status is None, stream.status
        return stream


def row(call_id: str, name: str, started: float, ended: float, code: int) -> Row:
    """Returns the record of a call as the dispatcher makes it."""
    return call_id, name, "plugin", "host", started, ended, code, 0, 0, None, "", None


def tool(name: str, description: str = "", **more: Any) -> Tool:
    """Returns a tool that takes any arguments."""
    return Tool(name, description, **more)


def offered(*tools: Tool) -> list[CompiledTool]:
    return [compile_tool(tool, Limits()) for tool in tools]


def error_of(caller: PeerDouble, call_id: str) -> CallError:
    """Returns how a call failed, having checked that it ended once."""
    (result,) = caller.results[call_id]
    assert result.is_error
    assert result.error is not None
    return result.error


def outputs(caller: PeerDouble) -> list[str]:
    """Returns what came back, each call having ended once."""
    return [result.output_json for (result,) in caller.results.values()]


def names(core: Core, *, include_offline: bool = False) -> list[str]:
    return [listing.tool.name for listing in core.registry.listings(include_offline=include_offline)]


def call(stream: StreamDouble, name: str, call_id: str = "1", **more: Any) -> None:
    stream.send(calls=[pb.ToolCall(call_id=call_id, name=name, **more)])


def answer(stream: StreamDouble, call_id: str, output: str = "1") -> None:
    stream.send(results=[pb.ToolResult(call_id=call_id, output_json=output)])


def codes(stream: StreamDouble) -> dict[str, Code]:
    return {result.call_id: Code(result.error.code) for result in stream.read("results")}


def one_call(*tools: Tool, limits: Limits | None = None) -> tuple[Core, PeerDouble, PeerDouble]:
    core = Core(limits=limits)
    return core, core.peer("host"), core.plugin("plugin", *(tools or (tool("t"),)))


def nested(core: Core, plugin: PeerDouble, name: str, call_id: str = "child", **more: Any) -> str:
    """Has a plugin call another tool while it answers its oldest pending call."""
    return core.call(plugin, name, call_id=call_id, parent_call_id=next(iter(plugin.pending)), **more)
