"""Carries frames of calls through the core of a bus, for a program that counts its instructions.

Counted is what `functools.reduce` runs: taking calls, taking results, and the message with the results. The ends of the
peers, and the decoding of messages, are not. All cases run in one process, so that imports are run once.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from functools import reduce
from math import frexp

from lab.fuzz.core import CoreOnAClock, StreamDouble
from toolbus.bus.calls.call import SpanRow
from toolbus.protocol.tool import Tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

WARM_UP = 200  # calls, until the interpreter has specialized the code; where some are sampled, all of these are
SAMPLED = 0.01  # of the calls, where some are
ARGUMENTS, SCHEMA = '{"text":"hello"}', '{"type":"object","properties":{"text":{"type":"string"}},"required":["text"]}'
_ONCE = (None, None)  # for reduce: one call of its function

STATES = ("off", "metrics", "metrics, 1 % sampled")
SIZES = (128, 1)  # calls of a frame
CASES = tuple((size, state) for size in SIZES for state in STATES)


class Frames:
    """Two peers of one core, and frames between them.

    Args:
        size: calls of a frame.
        state: one of `STATES`.

    Attributes:
        spans: that the core has made.
    """

    def __init__(self, size: int, state: str) -> None:
        self._core = CoreOnAClock(metrics=state != STATES[0])
        self._host, self._plugin = StreamDouble(self._core), StreamDouble(self._core)
        self._host.attach("host")
        self._plugin.attach("plugin", Tool("echo", "Returns the text.", SCHEMA))
        self._host.written()
        self._plugin.written()
        calls = [
            pb.ToolCall(call_id=f"c{number}", name="echo", arguments_json=ARGUMENTS, timeout_seconds=30.0)
            for number in range(size)
        ]
        self._calls = wire.InvokeRequest(calls=calls).SerializeToString()
        self.spans: list[SpanRow] = []
        if state == STATES[2]:
            self.sample(1.0)

    def sample(self, ratio: float) -> None:
        """Has a part of the calls sampled from now on."""
        self._core.dispatcher.traces.start(self.spans.append, ratio=ratio, most=1_000_000)

    def run(self) -> int:
        """Carries one frame there and back. Returns how many calls have ended so far."""
        core, dispatcher, host, plugin = self._core, self._core.dispatcher, self._host.peer, self._plugin.peer
        calls = wire.InvokeRequest.FromString(self._calls).calls
        core.now += 0.001
        reduce(lambda _, __: dispatcher.calls(host, calls, core.now), _ONCE)
        answers = []
        while (sent := plugin.outbox.take()) is not None:
            answers += [pb.ToolResult(call_id=call.call_id, output_json='{"text":"hello"}') for call in sent.calls]
        message = wire.InvokeRequest(results=answers).SerializeToString()
        results = wire.InvokeRequest.FromString(message).results
        core.now += 0.001
        reduce(lambda _, __: self._finish(results), _ONCE)
        return core.records.outcomes[0]

    def _finish(self, results: object) -> None:
        if self._plugin.peer.traced:  # as the writer of a stream does once it has taken a message
            self._plugin.peer.note_sent(self._core.now)
        self._core.dispatcher.results(self._plugin.peer, results, self._core.now)  # type: ignore[arg-type]
        while (frame := self._host.peer.outbox.take()) is not None:
            frame.SerializeToString()


def main() -> None:
    """Carries frames of each size in each state, about as many calls as the command line says.

    `frexp` ends each part. Prints for each case how many calls were counted, and how many of them were sampled.
    """
    calls = int(sys.argv[1])
    random.seed(1)  # which calls are sampled
    for size, state in CASES:
        frames = Frames(size, state)
        gc.collect()
        _carry(frames, max(WARM_UP // size, 2), size)
        if state == STATES[2]:
            frames.sample(SAMPLED)
        frames.spans.clear()
        counted = _carry(frames, max(calls // size, 2), size)
        print(json.dumps((counted, len(frames.spans))))


def _carry(frames: Frames, number: int, size: int) -> int:
    """Carries so many frames; returns how many calls that were."""
    before = frames.run()
    for _ in range(number - 1):
        ended = frames.run()
    if ended - before != (number - 1) * size:
        raise SystemExit(f"{ended - before} calls have ended, of {(number - 1) * size}")
    frexp(1.0)
    return number * size


if __name__ == "__main__":
    main()
