"""Records the results of tools while somebody reads them, and describes calls as a file has them.

A recording has what the tool got and what it answered: after repairs, overlays and guards of its arguments, and before
anything changes its result. Values of fields that are named like secrets are hidden.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from toolbus.bus.access.identity import Globs
from toolbus.bus.calls.call import Call, Interceptor
from toolbus.bus.calls.call_records import HIDDEN, MAX_PARSED, redacted
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.entry import Handler, is_operators
from toolbus.common.text import parse_json
from toolbus.errors import Code
from toolbus.protocol.tool import MIB, Result
from toolbus.v1 import tool_pb2 as pb

MAX_TEXT = MAX_PARSED  # characters of arguments, outputs and texts; of longer ones length and hash are kept
MAX_WAITING = 8 * MIB  # bytes of calls that nobody has read yet; further ones are lost and counted
MAX_RECORDINGS = 4  # at a time
READ_SECONDS = 45.0  # a recording that nobody reads for so long ends


class CallCapture(NamedTuple):
    """One call that has a result, as it was taken: it is described later, and not on the bus's loop."""

    tool: str
    source: str
    schema: str
    user_id: str
    arguments: str
    result: pb.ToolResult
    seconds: float
    ended: float  # seconds since the epoch

    def described(self) -> dict[str, Any]:
        """Returns the call as a JSON object."""
        arguments = bounded(self.arguments or "{}")
        line = {"tool": self.tool, "source": self.source, "schema": self.schema, "arguments": arguments}
        if self.user_id:
            line["user_id"] = self.user_id
        if isinstance(arguments, dict) and "too_long" not in arguments and json.dumps(HIDDEN) in json.dumps(arguments):
            line["hidden"] = True
        times = {"seconds": round(self.seconds, 6), "ended": round(self.ended, 3)}
        return line | {"result": described(Result.from_wire(self.result))} | times


def described(result: Result) -> dict[str, Any]:
    """Returns a result as a recording has it: output, further content and error, without secrets."""
    shown: dict[str, Any] = {"output": bounded(result.output_json or "null")}
    blocks = result.content_beside_output()
    if blocks:
        shown["content"] = [_block(block) for block in blocks]
    if result.asks:
        shown["asks"] = bounded(result.input_requests_json)
    if result.is_error:
        code, text = (result.error.code, result.error.message) if result.error is not None else (Code.TOOL, "")
        shown["error"] = {"code": code.name, "message": redacted(text, MAX_TEXT)}
    return shown


def bounded(text: str) -> Any:
    """Returns the value of a JSON text without its secrets; of a long text its length and hash."""
    if len(text) > MAX_TEXT:
        return {"too_long": len(text), "sha256": hashlib.sha256(text.encode(errors="replace")).hexdigest()}
    shown = redacted(text, 4 * MAX_TEXT)
    try:
        return parse_json(shown)
    except (ValueError, RecursionError):
        return shown


def _block(block: pb.ContentBlock) -> dict[str, Any]:
    kind = block.WhichOneof("kind") or "unknown"
    if kind == "text":
        return {"kind": kind, "text": redacted(block.text.text, MAX_TEXT)}
    body = block.SerializeToString(deterministic=True)
    return {"kind": kind, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}


class Recording:
    """The calls that one reader records.

    Attributes:
        tools, sources: patterns of what is recorded; without any, everything is.
        lost: calls that were not recorded, since the reader was too slow.
    """

    def __init__(self, tools: Sequence[str], sources: Sequence[str]) -> None:
        self._tools, self._sources = Globs(tuple(tools)), Globs(tuple(sources))
        self._everything = not (tools or sources)
        self._waiting: list[CallCapture] = []
        self._bytes = 0
        self._more = asyncio.Event()
        self.lost = 0
        self.read_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<Recording waiting={len(self._waiting)} lost={self.lost}>"

    def takes(self, call: Call) -> bool:
        """Tells whether calls of a tool are recorded."""
        entry = call.entry
        names = entry.name, entry.bare_name, f"{entry.source}:{entry.bare_name}"
        return self._everything or self._tools.match(*names) or self._sources.match(entry.source)

    def add(self, taken: CallCapture) -> None:
        """Records a call."""
        size = len(taken.arguments) + taken.result.ByteSize()
        if self._bytes + size > MAX_WAITING:
            self.lost += 1
            return
        self._bytes += size
        self._waiting.append(taken)
        self._more.set()

    def wake(self) -> None:
        """Ends a read that waits."""
        self._more.set()

    async def read(self, wait_seconds: float) -> list[dict[str, Any]]:
        """Returns what was recorded since the last read, at the latest after so many seconds."""
        self.read_at = time.monotonic()
        try:
            async with asyncio.timeout(wait_seconds):
                await self._more.wait()
        except TimeoutError:
            pass
        taken, self._waiting, self._bytes = self._waiting, [], 0
        self._more.clear()
        self.read_at = time.monotonic()
        return await asyncio.to_thread(lambda: [each.described() for each in taken])


class Recorder(Interceptor):
    """The recordings of one bus: an `Interceptor` while there are any, so calls pay nothing without them."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.recordings: dict[str, Recording] = {}

    def __repr__(self) -> str:
        return f"<Recorder recordings={len(self.recordings)}>"

    def begin(self, name: str, recording: Recording) -> None:
        if not self.recordings:
            self._dispatcher.seams.interceptors = (*self._dispatcher.seams.interceptors, self)
        self.recordings[name] = recording

    def end(self, name: str) -> None:
        """Ends a recording, if there is one of that name."""
        if self.recordings.pop(name, None) is not None and not self.recordings:
            others = (each for each in self._dispatcher.seams.interceptors if each is not self)
            self._dispatcher.seams.interceptors = tuple(others)

    # -- the interceptor ---------------------------------------------------------------------------------------------

    def after(self, handler: Handler, results: Iterable[pb.ToolResult], now: float) -> Iterable[pb.ToolResult]:
        """Records results; those that guards held come for the second time."""
        if handler.kind == "guard":
            return results
        results = list(results)
        for result in results:
            call: Call | None = handler.pending.get(result.call_id)
            if call is None or not call.active or is_operators(call.entry.source):
                continue
            readers = [each for each in self.recordings.values() if each.takes(call)]
            if readers:
                taken = _taken(call, result, now)
                for each in readers:
                    each.add(taken)
        return results


def _taken(call: Call, result: pb.ToolResult, now: float) -> CallCapture:
    copy = pb.ToolResult()
    copy.CopyFrom(result)
    entry, schema = call.entry, call.declaration.tool.schema_hash
    user_id = call.context.user_id if call.context is not None else ""
    times = now - call.started, time.time()
    return CallCapture(entry.name, entry.source, schema, user_id, str(call.arguments_json), copy, *times)
