"""Plays one scenario: a client in a process of its own, against a scripted bus of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from toolbus.conformance.client_process import ClientProcess
from toolbus.conformance.items import Expectation
from toolbus.conformance.keys import FIRST_TOKEN, address_of, write_credential
from toolbus.conformance.match import Bindings, Mismatch, check, fill
from toolbus.conformance.proxy import Proxy
from toolbus.conformance.script import Scenario, verb_of
from toolbus.conformance.scripted_bus import Arrived, Line, Stream, Trace

PATIENCE_SECONDS = 5.0  # for a step that names no time
FENCE = "9000000000000000001"  # the heartbeat that ends a scenario: nothing but its echo may come
TOKEN = "conformance-token"
BASIC_TOOLS = ("echo", "fail", "slow", "steps", "meet", "relay", "context")
OTHER_TOOLS = ("chunks", "picture", "big", "late_progress", "offer", "withdraw", "about", "host")
TOOLS = (*BASIC_TOOLS, *OTHER_TOOLS)
DRIVEN = "drive-"  # begins the ids of calls of the tool `host`
STDERR_LINES = 20  # in a report
LAST_WORDS_SECONDS = 0.2  # between the end of a client and what still comes of it
STARVED_SECONDS = 0.25  # the player itself was late by so much: what it measured then says little

ATTACHES: Mapping[str, Mapping[str, Any]] = {
    "plugin": {"protocol_version": 1, "source": "conformance"},
    "host": {"protocol_version": 1, "source": "conformance-host"},
}
ATTACHED: Mapping[str, Any] = {
    "session_id": "5e55101d5e55101d5e55101d5e55101d",
    "bus_id": "conformance",
    "boot_id": "conformance",
    "heartbeat_seconds": 10,
    "revision": "1",
    "protocol_version": 1,
    "bus_version": "0",
}

T = TypeVar("T")


class Unclaimed(Exception):
    """The client does not offer a tool that the scenario needs."""


@dataclass(frozen=True, slots=True)
class Played:
    """How a scenario went.

    Attributes:
        broken: the rules that the client broke there, each with the reason; empty where it kept all.
        unclaimed: the tool that the client does not offer; "" where it offered all.
        exited_early: whether the client ended before it had opened a stream.
        tools: the names that it offered.
        trace: what was exchanged, newest last.
        stderr: the client's last lines.
        starved: whether this process did not get the processor while it measured.
        about: what the client says of itself, where it was asked.
    """

    scenario: Scenario
    broken: Mapping[str, str]
    unclaimed: str
    exited_early: bool
    tools: Sequence[str]
    trace: Sequence[str]
    stderr: Sequence[str]
    seconds: float
    starved: bool
    about: Mapping[str, Any]


class Player:
    """Plays a scenario once.

    Args:
        patience: by what all times that a client may take are multiplied.
    """

    def __init__(self, command: Sequence[str], scenario: Scenario, *, patience: float = 1.0) -> None:
        self._command = command
        self._scenario = scenario
        self._patience = patience
        self._bindings: Bindings = {}
        self._trace = Trace()
        self._lines: dict[str, Line] = {}  # "plugin" and "host"
        self._client: ClientProcess | None = None
        self._credential: Path | None = None  # the file that the client got; None for none
        self._tools: set[str] = set()  # that the client offers
        self._outcomes: dict[str, Any] = {}  # results of driven calls that no step has asked for yet, by their ids
        self._opened = False  # whether the client has ever opened a stream
        self._verbs: dict[str, Callable[[Line, Mapping[str, Any]], Awaitable[None]]] = {
            "accept": self._accept,
            "stream": self._open,
            "no_stream": self._no_stream,
            "send": self._send,
            "expect": self._expect,
            "quiet": self._quiet,
            "end": self._end,
            "expect_half_close": self._expect_half_close,
            "expect_exit": self._expect_exit,
            "leave": self._leave,
            "signal": self._signal,
            "wait": self._wait,
            "port": self._port,
            "attempts": self._attempts,
            "cut": self._cut,
            "stall": self._stall,
            "drive": self._drive,
            "outcome": self._outcome,
            "rpc": self._rpc,
            "renew": self._renew,
            "shown": self._shown,
            "best_of": self._best_of,
        }

    async def play(self) -> Played:
        """Plays all steps; whatever the client does is in what this returns.

        Raises:
            OSError: the client cannot be started.
        """
        began = time.monotonic()
        broken: dict[str, str] = {}
        unclaimed = ""
        watch = _Starvation()
        with tempfile.TemporaryDirectory(prefix="toolbus-") as folder:
            try:
                await self._start(Path(folder))
                await self._steps(self._scenario.steps)
                await self._close()
            except Mismatch as problem:
                why = f"{problem}{await self._last_words()}"
                self._trace.add("!", "player", why)
                broken = dict.fromkeys(self._scenario.rules, why)
                if problem.rule:
                    broken = dict.fromkeys(self._scenario.rules, f"not shown, because of {problem.rule}: {why}")
                    broken[problem.rule] = why
            except Unclaimed as tool:
                unclaimed = str(tool)
            finally:
                starved = watch.stop()
                await self._stop()
        assert self._client is not None
        return Played(
            scenario=self._scenario,
            broken=broken,
            unclaimed=unclaimed,
            exited_early=not self._opened,
            tools=sorted(self._tools),
            trace=tuple(self._trace.lines),
            stderr=tuple(self._client.lines)[-STDERR_LINES:],
            seconds=time.monotonic() - began,
            starved=starved,
            about=json.loads(self._bindings.get("about", "{}")),
        )

    async def _last_words(self) -> str:
        """Returns what to add to a reason where the client ended by itself."""
        assert self._client is not None
        await asyncio.wait({self._client.exited}, timeout=LAST_WORDS_SECONDS)
        code = self._client.code
        return "" if code is None else f"; the client ended with exit code {code}"

    async def _start(self, folder: Path) -> None:
        for name in ("plugin", "host"):
            path = folder / f"{name}.sock" if self._scenario.unix else None
            self._lines[name] = line = Line(name, Proxy(path), self._trace, self._scenario.access)
            await line.start()
        environment = {"TOOLBUS_ADDRESS": self._address("plugin"), "TOOLBUS_TOKEN": TOKEN}
        if self._scenario.access != "none":
            self._credential = folder / "credential.toml"
            self._write_credential(FIRST_TOKEN)
            environment["TOOLBUS_CREDENTIAL"] = str(self._credential)
        self._client = await ClientProcess.start(self._command, environment)

    def _address(self, line: str) -> str:
        return address_of(self._scenario.access, self._lines[line].proxy.address)

    def _write_credential(self, token: str) -> None:
        assert self._credential is not None
        scenario = self._scenario
        write_credential(self._credential, scenario.access, self._address("plugin"), token, mode=scenario.mode)

    async def _stop(self) -> None:
        if self._client is not None:
            await self._client.stop()
        for line in self._lines.values():
            await line.stop()

    async def _steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        for number, step in enumerate(steps, 1):
            verb = verb_of(step)
            line = self._lines[step.get("on", "plugin")]
            began = time.monotonic()
            try:
                await self._verbs[verb](line, {**step, verb: fill(step[verb], self._bindings)})
            except Mismatch as problem:
                text = f"{self._scenario.name}, step {number} ({verb}): {problem}"
                raise Mismatch(text, problem.rule or step.get("rule", "")) from None
            too_soon = step.get("not_before", 0.0) - (time.monotonic() - began)
            if too_soon > 0:
                text = f"{self._scenario.name}, step {number} ({verb}): it took {too_soon:.3f} s less than it must"
                raise Mismatch(text, step.get("rule", ""))

    async def _close(self) -> None:
        """Checks that nothing is left over: every call answered, and nothing behind the echo of a last heartbeat."""
        for line in self._lines.values():
            stream = line.current
            if stream is None or stream.over:
                continue
            if stream.pending:
                raise Mismatch(f"the calls {sorted(stream.pending)} were never answered", "CALL-1")
            await stream.send({"heartbeat": {"sequence": FENCE}})
            await self._expect(line, {"expect": {"heartbeat": {"sequence": FENCE}}})

    # -- waiting -------------------------------------------------------------------------------------------------

    async def _within(self, step: Mapping[str, Any], waiting: Awaitable[T], for_what: str) -> T:
        """Waits for something of the client, as long as the step allows, or until the client ends.

        Raises:
            Mismatch: it did not come, or the client ended.
        """
        assert self._client is not None
        seconds = step.get("within", PATIENCE_SECONDS) * self._patience
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({task, self._client.exited}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._client.exited.done():
                await asyncio.wait({task}, timeout=LAST_WORDS_SECONDS)  # what it sent before its end
            if task.done():
                return task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if self._client.exited.done():
            raise Mismatch(f"the client ended; expected: {for_what}")
        raise Mismatch(f"nothing came for {seconds:g} s; expected: {for_what}")

    async def _next(self, step: Mapping[str, Any], stream: Stream, for_what: str) -> Arrived:
        while True:
            arrived = await self._within(step, stream.arrived.get(), for_what)
            stream.take(arrived)
            if not self._is_outcome(arrived):
                return arrived

    def _is_outcome(self, arrived: Arrived) -> bool:
        """Tells whether something is the result of a driven call, and keeps it for the step that asks for it."""
        if arrived.arm != "results" or not arrived.item["call_id"].startswith(DRIVEN):
            return False
        self._outcomes[arrived.item["call_id"]] = arrived.item
        return True

    def _current(self, line: Line) -> Stream:
        if line.current is None:
            raise ValueError(f"the scenario is wrong: nothing was accepted on {line.name} before this step")
        return line.current

    # -- streams -------------------------------------------------------------------------------------------------

    async def _open(self, line: Line, step: Mapping[str, Any]) -> None:
        expected = {**ATTACHES[line.name], **(step.get("stream") or step.get("accept") or {})}
        line.current = stream = await self._within(step, line.streams.get(), f"a new stream ({line.name})")
        self._opened = True
        arrived = await self._next(step, stream, "attach")
        if arrived.arm != "attach":
            raise Mismatch(f"the first message has {arrived.arm}: it must have attach", "OPEN-1")
        attach = arrived.item
        check(expected, attach, self._bindings, "attach")
        check(step.get("metadata", {}), stream.metadata, self._bindings, "metadata")
        if line.instance and attach["instance"] != line.instance:
            text = f"the instance is {attach['instance']!r}; this client attached as {line.instance!r} before"
            raise Mismatch(text, "OPEN-4")
        line.instance = attach["instance"]
        if line.name == "plugin":
            self._tools = {tool["name"] for tool in attach["tools"]}

    async def _accept(self, line: Line, step: Mapping[str, Any]) -> None:
        await self._open(line, step)
        names = sorted(self._tools) if line.name == "plugin" else []
        await self._current(line).send({"attached": {**ATTACHED, "registered": names, **step.get("with", {})}})

    async def _no_stream(self, line: Line, step: Mapping[str, Any]) -> None:
        await self._within(step, line.proxy.attempted.wait(), "a connection")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(line.streams.get(), step["no_stream"])
            raise Mismatch("came: a stream; expected: none")

    async def _send(self, line: Line, step: Mapping[str, Any]) -> None:
        frame = step["send"]
        if line.name == "plugin":
            for call in frame.get("calls", ()):
                if call["name"] in TOOLS and call["name"] not in self._tools:
                    raise Unclaimed(call["name"])
        await self._current(line).send(frame)

    async def _expect(self, line: Line, step: Mapping[str, Any]) -> None:
        stream = self._current(line)
        expectation = Expectation(step["expect"])
        messages = set()
        while expectation.wanted:
            arrived = await self._next(step, stream, repr(expectation))
            messages.add(arrived.message)
            expectation.take(arrived.arm, arrived.item, self._bindings)
        if "messages" in step:
            check(step["messages"], len(messages), self._bindings, "the number of messages")

    async def _quiet(self, line: Line, step: Mapping[str, Any]) -> None:
        stream = self._current(line)
        try:
            async with asyncio.timeout(step["quiet"]):
                while True:
                    arrived = await stream.arrived.get()
                    stream.take(arrived)
                    if not self._is_outcome(arrived):
                        break
        except TimeoutError:
            return
        raise Mismatch(f"came: {arrived.arm} {arrived.item}; expected: nothing for {step['quiet']} s")

    async def _end(self, line: Line, step: Mapping[str, Any]) -> None:
        status = step["end"]
        self._current(line).end(status, step.get("text", f"the scenario ends the stream with {status}"))

    async def _expect_half_close(self, line: Line, step: Mapping[str, Any]) -> None:
        arrived = await self._next(step, self._current(line), "the end of the client's direction")
        if arrived.arm != "half_close":
            raise Mismatch(f"came: {arrived.arm} {arrived.item}; expected: the end of the client's direction")

    async def _rpc(self, line: Line, step: Mapping[str, Any]) -> None:
        request = await self._within(step, line.requests.get(), f"a request {step['rpc']}")
        if request.method != step["rpc"]:
            raise Mismatch(f"came: a request {request.method}; expected: {step['rpc']}")
        check(step.get("request", {}), request.message, self._bindings, request.method)
        check(step.get("metadata", {}), request.metadata, self._bindings, "metadata")
        status = step.get("status", "OK")
        answer = fill(step.get("response", {}), self._bindings) if status == "OK" else step.get("text", status)
        request.answer.set_result((status, answer))

    # -- the network ---------------------------------------------------------------------------------------------

    async def _port(self, line: Line, step: Mapping[str, Any]) -> None:
        await line.set_port(step["port"])

    async def _attempts(self, line: Line, step: Mapping[str, Any]) -> None:
        rule, attempts = step["attempts"], line.proxy.attempts
        first = len(attempts)
        await asyncio.sleep(rule["during"])
        came = attempts[first:]
        if not rule.get("at_least", 0) <= len(came) <= rule.get("at_most", len(came)):
            raise Mismatch(f"{len(came)} attempts in {rule['during']} s; expected: {rule}")
        pauses = [later - earlier for earlier, later in itertools.pairwise(came)]
        if "longest_pause" in rule and pauses and max(pauses) > rule["longest_pause"] * self._patience:
            raise Mismatch(f"a pause of {max(pauses):.2f} s between two attempts; expected: {rule}")

    async def _cut(self, line: Line, _: Mapping[str, Any]) -> None:
        self._trace.add("!", line.name, "the connection is reset")
        self._current(line).cut()

    async def _stall(self, line: Line, step: Mapping[str, Any]) -> None:
        self._trace.add("!", line.name, "nothing passes" if step["stall"] else "everything passes again")
        line.proxy.stall(step["stall"])

    async def _wait(self, _: Line, step: Mapping[str, Any]) -> None:
        await asyncio.sleep(step["wait"])

    # -- the client's process ------------------------------------------------------------------------------------

    async def _leave(self, _: Line, __: Mapping[str, Any]) -> None:
        assert self._client is not None
        self._trace.add("!", "client", "SIGTERM")
        self._client.signal(signal.SIGTERM)

    async def _signal(self, _: Line, step: Mapping[str, Any]) -> None:
        assert self._client is not None
        self._trace.add("!", "client", f"SIG{step['signal']}")
        self._client.signal(signal.Signals[f"SIG{step['signal']}"])

    async def _expect_exit(self, _: Line, step: Mapping[str, Any]) -> None:
        assert self._client is not None
        seconds = step.get("within", PATIENCE_SECONDS) * self._patience
        await asyncio.wait({self._client.exited}, timeout=seconds)
        code = self._client.code
        if code is None:
            raise Mismatch(f"the client still runs after {seconds:g} s; expected: its end")
        if (code == 0) != (step["expect_exit"] == "done"):
            wanted = "0" if step["expect_exit"] == "done" else "another"
            raise Mismatch(f"the exit code is {code}, expected {wanted}")

    async def _renew(self, _: Line, step: Mapping[str, Any]) -> None:
        self._trace.add("!", "client", f"the credential is written anew: {step['renew']}")
        self._write_credential(step["renew"])

    async def _shown(self, _: Line, step: Mapping[str, Any]) -> None:
        assert self._client is not None
        await self._within(
            step, self._client.shows(step["shown"]), f"the text {step['shown']!r} in the client's output"
        )

    # -- the client's own host -----------------------------------------------------------------------------------

    async def _drive(self, line: Line, step: Mapping[str, Any]) -> None:
        wanted = dict(step["drive"])
        call = {"call_id": f"{DRIVEN}{wanted.pop('id')}", "name": "host"}
        call["arguments_json"] = json.dumps({"address": self._address("host"), **wanted})
        await self._send(self._lines["plugin"], {"send": {"calls": [call]}})

    async def _outcome(self, _: Line, step: Mapping[str, Any]) -> None:
        wanted = dict(step["outcome"])
        call_id = f"{DRIVEN}{wanted.pop('id')}"
        stream = self._current(self._lines["plugin"])
        while call_id not in self._outcomes:
            arrived = await self._within(step, stream.arrived.get(), f"the result of the tool host: {wanted}")
            stream.take(arrived)
            if not self._is_outcome(arrived):
                raise Mismatch(f"came: {arrived.arm} {arrived.item}; expected: the result of the tool host: {wanted}")
        check(
            {"is_error": False, "output_json": {"$parsed": wanted}},
            self._outcomes.pop(call_id),
            self._bindings,
            "what the application saw",
        )

    async def _best_of(self, _: Line, step: Mapping[str, Any]) -> None:
        best = float("inf")
        for _number in range(step["best_of"]):
            began = time.monotonic()
            await self._steps(step["steps"])
            best = min(best, time.monotonic() - began)
            if best <= step["at_most"] * self._patience:
                return
        text = f"the quickest of {step['best_of']} times took {best:.3f} s; expected: at most {step['at_most']} s"
        raise Mismatch(text)


class _Starvation:
    """Notes whether this process's loop was late."""

    def __init__(self) -> None:
        self._late = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + 0.05
            await asyncio.sleep(0.05)
            self._late = max(self._late, time.monotonic() - due)

    def stop(self) -> bool:
        """Ends the watch; returns whether it was late by much."""
        self._task.cancel()
        return self._late > STARVED_SECONDS
