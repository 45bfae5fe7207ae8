"""Plays one scenario: a new client process against a new scripted bus."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import signal as signals
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbus.parts.conformance.match import Mismatch, Missed, fill
from toolbus.parts.conformance.script import Scenario, verb_of
from toolbus.parts.conformance.scripted_bus import Line
from toolbus.parts.conformance.stage import STEP_SECONDS, ScenarioStage
from toolbus.parts.conformance.stream_verbs import StreamVerbs, Unclaimed


class WorldVerbs:
    """The network, and the client's process."""

    def __init__(self, stage: ScenarioStage) -> None:
        self._stage = stage

    async def port(self, line: Line, step: Mapping[str, Any]) -> None:
        await line.set_port(step["port"])

    async def attempts(self, line: Line, step: Mapping[str, Any]) -> None:
        rule, attempts = step["attempts"], line.proxy.attempts
        first = len(attempts)
        await asyncio.sleep(rule["during"])
        came = attempts[first:]
        if not rule.get("at_least", 0) <= len(came) <= rule.get("at_most", len(came)):
            raise Mismatch(f"{len(came)} attempts in {rule['during']} s; expected: {rule}")
        pauses = [later - earlier for earlier, later in itertools.pairwise(came)]
        if "longest_pause" in rule and pauses and max(pauses) > rule["longest_pause"] * self._stage.patience:
            raise Mismatch(f"a pause of {max(pauses):.2f} s between two attempts; expected: {rule}")

    async def cut(self, line: Line, _: Mapping[str, Any]) -> None:
        self._stage.trace.add("!", line.name, "the connection is reset")
        self._stage.current(line).cut()

    async def goaway(self, line: Line, _: Mapping[str, Any]) -> None:
        self._stage.trace.add("!", line.name, "the connection ends with GOAWAY: too_many_pings")
        self._stage.current(line).send_away()

    async def stall(self, line: Line, step: Mapping[str, Any]) -> None:
        self._stage.trace.add("!", line.name, "nothing passes" if step["stall"] else "everything passes again")
        line.proxy.stall(step["stall"])

    async def wait(self, _: Line, step: Mapping[str, Any]) -> None:
        await asyncio.sleep(step["wait"])

    async def leave(self, line: Line, _: Mapping[str, Any]) -> None:
        await self.signal(line, {"signal": "TERM"})

    async def signal(self, _: Line, step: Mapping[str, Any]) -> None:
        assert self._stage.client is not None
        self._stage.trace.add("!", "client", f"SIG{step['signal']}")
        self._stage.client.signal(signals.Signals[f"SIG{step['signal']}"])

    async def restart(self, _: Line, __: Mapping[str, Any]) -> None:
        self._stage.trace.add("!", "client", "killed, and started again")
        await self._stage.restart()

    async def expect_exit(self, _: Line, step: Mapping[str, Any]) -> None:
        assert self._stage.client is not None
        seconds = step.get("within", STEP_SECONDS) * self._stage.patience
        await asyncio.wait({self._stage.client.exited}, timeout=seconds)
        code = self._stage.client.code
        if code is None:
            raise Mismatch(f"the client still runs after {seconds:g} s; expected: its end")
        if (code == 0) != (step["expect_exit"] == "done"):
            expected = "0" if step["expect_exit"] == "done" else "another"
            raise Mismatch(f"the exit code is {code}, expected {expected}")
        for each in self._stage.lines.values():
            if each.current is not None:
                each.current.over = True  # also where the end of its connection has not been read yet

    async def renew(self, _: Line, step: Mapping[str, Any]) -> None:
        self._stage.trace.add("!", "client", f"the credential is written anew: {step['renew']}")
        self._stage.write_credential(step["renew"])

    async def shown(self, _: Line, step: Mapping[str, Any]) -> None:
        assert self._stage.client is not None
        client, text = self._stage.client, step["shown"]
        await self._stage.within(step, client.shows(text), f"the text {text!r} in the client's output")
        lines = [each for each in client.lines if text in each]
        if len(lines) > step.get("times", len(lines)):
            raise Mismatch(f"{len(lines)} lines have the text {text!r}; expected: {step['times']}: {lines}")


FENCE = "9000000000000000001"  # the heartbeat that ends a scenario: nothing but its echo may come
STDERR_LINES = 20  # in a report
STARVED_SECONDS = 0.25  # if the player itself was late by so much, its measurements are not reliable


@dataclass(frozen=True, slots=True)
class Played:
    """How a scenario went.

    Attributes:
        broken: the rules that the client broke there, each with the reason; empty if it kept all.
        unclaimed: the missing tool of the client; "" if it offered all.
        exited_early: whether the client opened no stream.
        code: its exit code; None if it still ran at the end.
        tools: the names of the tools that it offered.
        trace: the messages in both directions, newest last.
        stderr: the client's last lines.
        first_lines: its first ones.
        starved: whether this process did not get enough processor time to measure.
        about: the output of the client's tool `about`, if the scenario called it.
    """

    scenario: Scenario
    broken: Mapping[str, str]
    unclaimed: str
    exited_early: bool
    code: int | None
    tools: Sequence[str]
    trace: Sequence[str]
    stderr: Sequence[str]
    first_lines: Sequence[str]
    seconds: float
    starved: bool
    about: Mapping[str, Any]


class Player:
    """Plays a scenario once.

    Args:
        patience: multiplies all times that a client may take.
    """

    def __init__(self, command: Sequence[str], scenario: Scenario, *, patience: float = 1.0) -> None:
        self._scenario = scenario
        self._stage = stage = ScenarioStage(command, scenario, patience)
        self._streams, self._world = StreamVerbs(stage), WorldVerbs(stage)

    async def play(self) -> Played:
        """Plays all steps, and returns what the client did; a client at fault raises nothing.

        Raises:
            OSError: the client cannot be started.
        """
        began = time.monotonic()
        broken: dict[str, str] = {}
        unclaimed = ""
        code: int | None = None
        watch = _Starvation()
        with tempfile.TemporaryDirectory(prefix="toolbus-") as folder:
            try:
                await self._stage.start(Path(folder))
                await self._steps(self._scenario.steps)
                await self._close()
            except Mismatch as problem:
                why = f"{problem}{await self._stage.last_words()}"
                self._stage.trace.add("!", "player", why)
                broken = dict.fromkeys(self._scenario.rules, why)
                if problem.rule:
                    broken = dict.fromkeys(self._scenario.rules, f"not shown, because of {problem.rule}: {why}")
                    broken[problem.rule] = why
            except Unclaimed as tool:
                unclaimed = str(tool)
            finally:
                starved = watch.stop()
                code = None if self._stage.client is None else self._stage.client.code
                await self._stage.stop()
        assert self._stage.client is not None
        return Played(
            scenario=self._scenario,
            broken={**self._stage.aside, **broken},
            unclaimed=unclaimed,
            exited_early=not self._stage.opened,
            code=code,
            tools=sorted(self._stage.tools),
            trace=tuple(self._stage.trace.lines),
            stderr=tuple(self._stage.client.lines)[-STDERR_LINES:],
            first_lines=tuple(self._stage.client.first_lines),
            seconds=time.monotonic() - began,
            starved=starved,
            about=json.loads(self._stage.bindings.get("about", "{}")),
        )

    async def _steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        verb, began = "", 0.0
        for number, step in enumerate(steps, 1):
            before, verb = verb, verb_of(step)
            line = self._stage.lines[step.get("on", "plugin")]
            if before != "send":  # the client may have what was sent before `send` returns here
                began = time.monotonic()
            try:
                await self._do(verb, line, {**step, verb: fill(step[verb], self._stage.bindings)})
            except Mismatch as problem:
                text = f"{self._scenario.name}, step {number} ({verb}): {problem}"
                raise type(problem)(text, problem.rule or step.get("rule", "")) from None
            too_soon = step.get("not_before", 0.0) - (time.monotonic() - began)
            if too_soon > 0:
                text = f"{self._scenario.name}, step {number} ({verb}): it took {too_soon:.3f} s less than it must"
                raise Mismatch(text, step.get("rule", ""))

    async def _do(self, verb: str, line: Line, step: Mapping[str, Any]) -> None:
        if verb == "best_of":
            await self._best_of(step)
        else:
            verbs = self._streams if hasattr(self._streams, verb) else self._world
            await getattr(verbs, verb)(line, step)

    async def _close(self) -> None:
        """Checks that every call was answered, and that nothing but its echo follows a last heartbeat."""
        for line in self._stage.lines.values():
            stream = line.current
            if stream is None or stream.over:
                continue
            if stream.always.pending:
                raise Mismatch(f"the calls {sorted(stream.always.pending)} were never answered", "CALL-1")
            await stream.send({"heartbeat": {"sequence": FENCE}})
            try:
                await self._streams.expect(line, {"expect": {"heartbeat": {"sequence": FENCE}}})
            except Mismatch as problem:
                text = f"after the last step a heartbeat is echoed, and nothing else comes: {problem}"
                raise type(problem)(text, problem.rule) from None

    async def _best_of(self, step: Mapping[str, Any]) -> None:
        """Plays steps several times, until one time keeps all limits."""
        for left in reversed(range(step["best_of"])):
            began = time.monotonic()
            try:
                await self._steps(step["steps"])
                seconds, limit = time.monotonic() - began, step.get("at_most", math.inf) * self._stage.patience
                if seconds > limit:
                    raise Missed(f"the quickest of {step['best_of']} times took {seconds:.3f} s; expected: {limit} s")
                return
            except Missed:
                if not left:
                    raise


class _Starvation:
    """Measures how late this process's loop was."""

    def __init__(self) -> None:
        self._late = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + 0.05
            await asyncio.sleep(0.05)
            self._late = max(self._late, time.monotonic() - due)

    def stop(self) -> bool:
        """Ends the watch; returns whether the loop was too late for reliable measurements."""
        self._task.cancel()
        return self._late > STARVED_SECONDS
