"""Implements the steps that act on streams and requests; each method is the verb of that name (README.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from toolbus.parts.conformance.match import Expectation, Mismatch, Missed, check, fill
from toolbus.parts.conformance.scripted_bus import Arrived, ClientStream, Line, UnaryRequest
from toolbus.parts.conformance.stage import DRIVEN, TOKEN, ScenarioStage

BASIC_TOOLS = ("echo", "fail", "slow", "steps", "meet", "relay", "context")
OTHER_TOOLS = ("chunks", "picture", "ask", "big", "late_progress", "offer", "withdraw", "about", "host")
TOOLS = (*BASIC_TOOLS, *OTHER_TOOLS)
ATTACHES: Mapping[str, Mapping[str, Any]] = {
    "plugin": {"protocol_version": 1, "source": "conformance"},
    "host": {"protocol_version": 1, "source": "conformance-host"},
}
ATTACHED: Mapping[str, Any] = {
    "bus_id": "conformance",
    "boot_id": "conformance",
    "heartbeat_seconds": 10,
    "revision": "1",
    "protocol_version": 1,
    "bus_version": "0",
    "limits": {
        "message_bytes": 16777216,
        "calls_in_flight": 256,
        "arguments_bytes": 1048576,
        "result_bytes": 4194304,
        "schema_bytes": 262144,
        "description_bytes": 16384,
        "tools": 100000,
        "call_depth": 8,
        "grace_seconds": 5,
    },
}


class Unclaimed(Exception):
    """The client does not offer a tool that the scenario needs."""


class StreamVerbs:
    """Streams, requests, and the client's own host."""

    def __init__(self, stage: ScenarioStage) -> None:
        self._stage = stage

    async def stream(self, line: Line, step: Mapping[str, Any]) -> None:
        expected = {**ATTACHES[line.name], **(step.get("stream") or step.get("accept") or {})}
        while True:
            line.current = stream = await self._stage.within(step, line.streams.get(), f"a new stream ({line.name})")
            self._stage.opened, self._stage.starting = True, False
            arrived = await self._stage.next(step, stream, "attach")
            if arrived.field != "gone":
                break  # else its client gave it up before anything of it came: while nothing passed
        if arrived.field != "attach":
            raise Mismatch(f"the first message has {arrived.field}: it must have attach", "OPEN-1")
        attach = arrived.item
        if attach["token"] != TOKEN:
            self._stage.aside["OPEN-5"] = f"the token of the attach is {attach['token']!r}, not TOOLBUS_TOKEN"
        check(expected, attach, self._stage.bindings, "attach")
        check(step.get("metadata", {}), stream.metadata, self._stage.bindings, "metadata")
        if line.instance and attach["instance"] != line.instance:
            text = f"the instance is {attach['instance']!r}; this client attached as {line.instance!r} before"
            raise Mismatch(text, "OPEN-4")
        if attach["instance"] in line.others:
            raise Mismatch(f"the instance {attach['instance']!r} is that of a process before", "OPEN-4")
        line.instance = attach["instance"]
        if line.name == "plugin":
            self._stage.tools = {tool["name"] for tool in attach["tools"]}

    async def accept(self, line: Line, step: Mapping[str, Any]) -> None:
        await self.stream(line, step)
        names = sorted(self._stage.tools) if line.name == "plugin" else []
        stream = self._stage.current(line)
        stream.answers_cancels = bool(step.get("answers_cancels"))
        await self._answer(stream, names, step)

    async def _answer(self, stream: ClientStream, names: Iterable[str], step: Mapping[str, Any]) -> None:
        answer = {**ATTACHED, "session_id": stream.session_id, "registered": sorted(names), **step.get("with", {})}
        await stream.send({"attached": answer})

    async def declared(self, line: Line, step: Mapping[str, Any]) -> None:
        stream, declared = self._stage.current(line), step["declared"]
        has, lacks = set(declared.get("has", ())), set(declared.get("lacks", ()))
        meanwhile = Expectation(step.get("meanwhile", {}))
        text = f"tools declared again, with {sorted(has)} and without {sorted(lacks)} {meanwhile!r}"
        events: asyncio.Queue[Arrived | UnaryRequest] = asyncio.Queue()
        done = False
        while not done or meanwhile.missing:
            waiting = [asyncio.ensure_future(_move(queue, events)) for queue in (stream.arrived, line.requests)]
            try:
                await self._stage.within(step, asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED), text)
            finally:
                for task in waiting:
                    task.cancel()
            while not events.empty():
                each = events.get_nowait()
                if isinstance(each, UnaryRequest):
                    self._changed(stream, each)
                else:
                    stream.take(each)
                    if each.field == "attach":
                        self._stage.tools = {tool["name"] for tool in each.item["tools"]}
                        await self._answer(stream, self._stage.tools, step)
                    elif not self._stage.is_outcome(each):
                        meanwhile.take(each.field, each.item, self._stage.bindings)
                        continue
                done = has <= self._stage.tools and not lacks & self._stage.tools

    def _changed(self, stream: ClientStream, request: UnaryRequest) -> None:
        """Answers a Register or Unregister, and updates the client's tools."""
        message = request.message
        if request.method not in ("Register", "Unregister"):
            raise Mismatch(f"came: a request {request.method}; expected: tools declared again")
        if message["session_id"] != stream.session_id:
            text = f"{request.method} of the session {message['session_id']!r}; this stream has {stream.session_id!r}"
            raise Mismatch(text, "OPEN-9")
        if request.method == "Register":
            names = {tool["name"] for tool in message["tools"]}
            self._stage.tools |= names
            request.answer.set_result(("OK", {"registered": sorted(names), "ok": True}))
        else:
            self._stage.tools.discard(message["name"])
            request.answer.set_result(("OK", {"name": message["name"], "removed": True, "ok": True}))

    async def read(self, line: Line, step: Mapping[str, Any]) -> None:
        reads = self._stage.current(line).reads
        (reads.set if step["read"] else reads.clear)()

    async def no_stream(self, line: Line, step: Mapping[str, Any]) -> None:
        await self._stage.within(step, line.proxy.attempted.wait(), "a connection")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(line.streams.get(), step["no_stream"])
            raise Mismatch("came: a stream; expected: none")

    async def send(self, line: Line, step: Mapping[str, Any]) -> None:
        frame = step["send"]
        if line.name == "plugin":
            for call in frame.get("calls", ()):
                if call["name"] in TOOLS and call["name"] not in self._stage.tools:
                    raise Unclaimed(call["name"])
        await self._stage.current(line).send(frame, unknown=step.get("unknown", False))

    async def expect(self, line: Line, step: Mapping[str, Any]) -> None:
        stream = self._stage.current(line)
        expectation = Expectation(step["expect"], in_order=step.get("in_order", False))
        messages = set()
        while expectation.missing:
            arrived = await self._stage.next(step, stream, expectation)
            messages.add(arrived.message)
            expectation.take(arrived.field, arrived.item, self._stage.bindings)
        if "messages" in step:
            try:
                check(step["messages"], len(messages), self._stage.bindings, "the number of messages")
            except Mismatch as problem:
                raise Missed(str(problem)) from None

    async def quiet(self, line: Line, step: Mapping[str, Any]) -> None:
        stream = self._stage.current(line)
        try:
            async with asyncio.timeout(step["quiet"]):
                while True:
                    arrived = await stream.arrived.get()
                    stream.take(arrived)
                    if not self._stage.is_outcome(arrived):
                        break
        except TimeoutError:
            return
        raise Mismatch(f"came: {arrived.field} {arrived.item}; expected: nothing for {step['quiet']} s")

    async def end(self, line: Line, step: Mapping[str, Any]) -> None:
        status = step["end"]
        self._stage.current(line).end(status, step.get("text", f"the scenario ends the stream with {status}"))

    async def expect_half_close(self, line: Line, step: Mapping[str, Any]) -> None:
        arrived = await self._stage.next(step, self._stage.current(line), "the end of the client's direction")
        if arrived.field != "half_close":
            raise Mismatch(f"came: {arrived.field} {arrived.item}; expected: the end of the client's direction")

    async def rpc(self, line: Line, step: Mapping[str, Any]) -> None:
        request = await self._stage.within(step, line.requests.get(), f"a request {step['rpc']}")
        if request.method != step["rpc"]:
            raise Mismatch(f"came: a request {request.method}; expected: {step['rpc']}")
        check(step.get("request", {}), request.message, self._stage.bindings, request.method)
        check(step.get("metadata", {}), request.metadata, self._stage.bindings, "metadata")
        status = step.get("status", "OK")
        answer = fill(step.get("response", {}), self._stage.bindings) if status == "OK" else step.get("text", status)
        request.answer.set_result((status, answer))

    async def drive(self, line: Line, step: Mapping[str, Any]) -> None:
        arguments = dict(step["drive"])
        call = {"call_id": f"{DRIVEN}{arguments.pop('id')}", "name": "host"}
        call["arguments_json"] = json.dumps({"address": self._stage.address("host"), **arguments})
        await self.send(self._stage.lines["plugin"], {"send": {"calls": [call]}})

    async def outcome(self, _: Line, step: Mapping[str, Any]) -> None:
        expected = dict(step["outcome"])
        call_id = f"{DRIVEN}{expected.pop('id')}"
        stream = self._stage.current(self._stage.lines["plugin"])
        text = f"the result of the tool host: {expected}"
        while call_id not in self._stage.outcomes:
            arrived = await self._stage.within(step, stream.arrived.get(), text)
            stream.take(arrived)
            if not self._stage.is_outcome(arrived):
                raise Mismatch(f"came: {arrived.field} {arrived.item}; expected: {text}")
        check(
            {"is_error": False, "output_json": {"$parsed": expected} if expected else {"$any": True}},
            self._stage.outcomes.pop(call_id),
            self._stage.bindings,
            "what the application saw",
        )


async def _move(queue: asyncio.Queue[Any], to: asyncio.Queue[Any]) -> None:
    to.put_nowait(await queue.get())
