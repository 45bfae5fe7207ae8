"""Sends messages from peers through sessions, presence, registry and dispatcher.

An input is a play of up to 80 steps on four streams: raw messages, valid ones made of a few names that collide, and
what happens beside them (time, writing, half-closes, breaks, drains). A stream that has ended is replaced by a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

from lab.fuzz.bus_model import BusModel, Stream
from lab.fuzz.choices import Choices, block_of
from lab.fuzz.target import Target, conversations, no_faults
from toolbus.errors import ToolBusError
from toolbus.protocol.tool import Annotations, Tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

STEPS = 80
SOURCES = ("one", "two", "three", "guarded", "silent", "bystander", "")
IDS = ("a", "b", "c", "", "1", "x" * 200)
NUMBER = '{"type":"object","properties":{"a":{"type":"integer"},"userId":{}},"required":["a"]}'
TOOLS = (
    Tool("echo"),
    Tool("again", annotations=Annotations(idempotent=True)),
    Tool("echo", "another declaration", idle_timeout_seconds=3.0),
    Tool("number", parameters_json=NUMBER, min_level=2),
    Tool("here", role="other"),
    Tool("slow", no_background=True, validate=False),
    Tool("refused", parameters_json='{"$ref":"#"}'),
    Tool("echo", "for a role that is not there", role="later"),
)
NAMES = ("echo", "again", "number", "here", "slow", "one:echo", "steady", "unknown")
ARGUMENTS = (
    *("{}", '{"a":1}', '{"a":"x"}', '{"userId":"u","a":2}', "", "[]", "{", '{"a":"' + "y" * 3000 + '"}', '"\\u0041"'),
)
OUTPUTS = ("1", "null", "", '{"password":"hunter2-hunter2"}', "no json", '"' + "z" * 5000 + '"')
SECONDS = (0.0, 1.0, 2.5, 400.0, -1.0, float("nan"))


def _attach(bus: BusModel, stream: Stream, choose: Choices) -> None:
    stream.attach(
        choose.pick(SOURCES),
        *choose.some(TOOLS, 4),
        instance=choose.pick(("", "i", "j")),
        max_in_flight=choose.pick((0, 2, 1, 4000)),
        max_message_bytes=choose.pick((0, 8192, 100, 1 << 24)),
        qualified=choose.flag(),
        subscribe=[wire.SUBSCRIPTION_CATALOG] if choose.flag() else [],
        token=choose.pick(("", "", "t", "u")),
        protocol_version=choose.pick((1, 1, 1, 2)),
        all_or_none=choose.pick((False, False, False, True)),
    )


def _calls(bus: BusModel, stream: Stream, choose: Choices) -> None:
    calls = []
    for _ in range(choose.pick((1, 1, 2, 5, 12))):
        call = pb.ToolCall(call_id=choose.pick(IDS), name=choose.pick(NAMES), arguments_json=choose.pick(ARGUMENTS))
        more = choose.byte()
        if more & 1:
            call.timeout_seconds = choose.pick(SECONDS)
        if more & 2:
            call.parent_call_id = _pending(stream, choose)
        if more & 4:
            call.background_after_seconds = choose.pick(SECONDS)
        if more & 8:
            call.context.user_id = choose.pick(("u", "v"))
            call.context.attributes["level"] = choose.pick(("0", "3", "x"))
        if more & 16:
            call.role = choose.pick(("default", "other", "none"))
        if more & 32:
            call.schema_hash = choose.pick((TOOLS[0].schema_hash, TOOLS[2].schema_hash, "0"))
        calls.append(call)
    stream.send(calls=calls)


def _pending(stream: Stream, choose: Choices) -> str:
    return choose.pick([*stream.peer.pending, "1"])


def _results(bus: BusModel, stream: Stream, choose: Choices) -> None:
    results = []
    for _ in range(choose.pick((1, 1, 2, 3))):
        result = pb.ToolResult(call_id=_pending(stream, choose), output_json=choose.pick(OUTPUTS))
        more = choose.byte()
        result.is_error = bool(more & 1)
        if more & 2:
            result.error.code = choose.byte() % 20  # type: ignore[assignment]  # also numbers that no code has
            result.error.retry_safe = choose.flag()
        if more & 4:
            result.content.add().image.data = bytes(choose.byte() * 20)
        results.append(result)
    stream.send(results=results)


def _progress(bus: BusModel, stream: Stream, choose: Choices) -> None:
    chunk = choose.pick(("", "piece", "c" * 5000))
    stream.send(progress=[pb.ToolProgress(call_id=_pending(stream, choose), output_chunk=chunk, message="m")])


def _cancels(bus: BusModel, stream: Stream, choose: Choices) -> None:
    call_id = choose.pick([*stream.peer.in_flight, "a"])
    stream.send(cancels=[pb.ToolCancel(call_id=call_id, reason=choose.pick(("", "why")))])


def _unary(bus: BusModel, stream: Stream, choose: Choices) -> None:
    """Asks by one of the RPCs that change the catalog; their refusals are answers."""
    presence, session_id = bus.core.presence, stream.peer.session_id
    asks: tuple[tuple[type[Any], Callable[[Any], Any]], ...] = (
        (wire.RegisterRequest, presence.register),
        (wire.UnregisterRequest, presence.unregister),
        (wire.ClearRequest, presence.clear),
    )
    kind, ask = choose.pick(asks)
    try:
        request = kind.FromString(choose.block())
    except DecodeError:
        return
    if hasattr(request, "session_id"):
        request.session_id = session_id
    try:
        ask(request)
    except ToolBusError:
        pass


def _bus(bus: BusModel, stream: Stream, choose: Choices) -> None:
    presence, now = bus.core.presence, bus.core.now
    match choose.byte() % 4:
        case 0:
            presence.drain_source(choose.pick(SOURCES[:3]), choose.pick((0.0, 5.0)), now)
        case 1:
            bus.core.registry.add_role(choose.pick(("more", "other")))
        case 2:
            presence.drain(5.0)
            presence.end_idle(now)
        case 3:
            presence.watchers.notify()


Act = Callable[[BusModel, Stream, Choices], object]
ACTS: dict[str, Act] = {
    "raw": lambda bus, stream, choose: stream.read_raw(choose.block()),
    "attach": _attach,
    "calls": _calls,
    "results": _results,
    "write": lambda bus, stream, choose: stream.write(),
    "time": lambda bus, stream, choose: bus.pass_time(choose.pick((0.1, 0.5, 2.0, 2.0, 2.5, 31.0, 61.0))),
    "progress": _progress,
    "cancels": _cancels,
    "ending": lambda bus, stream, choose: (stream.half_close if choose.flag() else stream.end)(),
    "drain": lambda bus, stream, choose: stream.send(drain=wire.Drain(reason="bye")),
    "unary": _unary,
    "bus": _bus,
}
ORDER = (*ACTS, "calls", "results")  # twice what makes most of a conversation


def run(data: bytes) -> None:
    with no_faults():
        choose, bus = Choices(data), BusModel()
        streams = [bus.stream() for _ in range(4)]
        for _ in range(STEPS):
            if not choose:
                break
            act, index = ACTS[choose.pick(ORDER)], choose.byte() % len(streams)
            if streams[index].ended:
                streams[index].write()
                streams[index] = bus.stream()
            act(bus, streams[index], choose)
            bus.check()
        bus.end()


def step(act: str, stream: int, *rest: int, block: bytes | None = None) -> bytes:
    return bytes([ORDER.index(act), stream, *rest]) + (b"" if block is None else block_of(block))


def raw(stream: int, **fields: Any) -> bytes:
    return step("raw", stream, block=wire.InvokeRequest(**fields).SerializeToString())


def seeds() -> Iterator[bytes]:
    """The vectors' conversations, and plays that reach what those do not."""
    for messages in conversations("bus.jsonl", wire.InvokeRequest):
        if play := b"".join(step("raw", 0, block=each) + step("write", 0) for each in messages if len(each) < 1000):
            yield play
    plugin = raw(0, attach=wire.Attach(protocol_version=1, source="one", tools=[each.to_wire() for each in TOOLS[:2]]))
    host = raw(1, attach=wire.Attach(protocol_version=1, source="two", subscribe=[wire.SUBSCRIPTION_CATALOG]))
    ask = step("calls", 1, 0, 0, 0, 1, 0)
    yield plugin + host + ask + step("write", 0) + step("results", 0, 0, 0, 0, 0) + step("write", 1)
    yield plugin + host + ask + step("time", 0, 5) + step("progress", 0, 1, 0) + step("cancels", 1, 0, 0)
    yield plugin + host + ask + step("write", 0) + step("ending", 0, 0) + plugin + step("ending", 1, 1)
    yield plugin + host + step("calls", 1, 3, *(value for _ in range(5) for value in (0, 0, 0, 4, 1)))
    yield plugin + host + ask + step("calls", 0, 0, 1, 0, 0, 2, 0) + step("results", 0, 0, 0, 3, 0) + step("bus", 0, 2)
    yield plugin + host + step("bus", 0, 2) + ask + step("write", 1)
    yield plugin + host + ask + step("time", 0, 5) * 3 + raw(0, heartbeat=wire.Heartbeat(sequence=1)) + step("write", 0)
    # Calls within calls, up to one more than may be.
    nested = step("calls", 0, 0, 1, 1, 0, 2, 0) + step("calls", 0, 0, 2, 1, 0, 2, 1)
    deepest = step("calls", 0, 0, 4, 1, 0, 2, 2) + step("results", 0, 0, 2, 5, 0)
    yield plugin + host + ask + step("write", 0) + nested + deepest
    both = step("results", 0, 0, 1, 0, 0) + step("results", 0, 0, 0, 0, 0)
    yield plugin + host + ask + nested + both + step("write", 0)
    guarded = raw(0, attach=wire.Attach(protocol_version=1, source="guarded", tools=[TOOLS[0].to_wire()]))
    yield guarded + host + ask + step("write", 0) + step("progress", 0, 0, 1) + step("results", 0, 0, 0, 3, 0)
    yield plugin + host + step("calls", 1, 3, *(value for each in range(5) for value in (each, 0, 7, 0)))
    yield plugin * 2 + host + raw(0, attach=wire.Attach(protocol_version=1, source="other")) + step("write", 0)
    yield (step("attach", 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0) + step("attach", 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0)) * 5
    more = wire.RegisterRequest(tools=[TOOLS[4].to_wire()]).SerializeToString()
    yield plugin + host + step("unary", 0, 0, block=more)
    yield plugin + host + ask + step("drain", 0) + step("results", 0, 0, 0, 0, 0) + step("write", 0)


TARGET = Target("frames", "one result a call, nothing left over, bystanders untouched, whatever peers send", run, seeds)
