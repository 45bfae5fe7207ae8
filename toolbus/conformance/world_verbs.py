"""Implements the steps that change the network or the client's process; each method is the verb of that name."""

from __future__ import annotations

import asyncio
import itertools
import signal as signals
from collections.abc import Mapping
from typing import Any

from toolbus.conformance.match import Mismatch
from toolbus.conformance.scripted_bus import Line
from toolbus.conformance.stage import STEP_SECONDS, ScenarioStage


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

    async def stall(self, line: Line, step: Mapping[str, Any]) -> None:
        self._stage.trace.add("!", line.name, "nothing passes" if step["stall"] else "everything passes again")
        line.proxy.stall(step["stall"])

    async def wait(self, _: Line, step: Mapping[str, Any]) -> None:
        await asyncio.sleep(step["wait"])

    async def leave(self, _: Line, __: Mapping[str, Any]) -> None:
        assert self._stage.client is not None
        self._stage.trace.add("!", "client", "SIGTERM")
        self._stage.client.signal(signals.SIGTERM)

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
