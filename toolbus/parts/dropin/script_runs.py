"""Offers `run_script`: a short JavaScript program that calls other tools, for loops and filters over many results.

The program runs in an engine of its own, without files, network and processes. Its calls are nested calls of the one
that runs it: of the same user, checked, guarded, counted and recorded like any. A drop-in file of one line offers it:
``from toolbus.dropin import run_script``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

from toolbus.common.text import shorten
from toolbus.functions.reply import Reply
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.dropin.javascript import Engine, EngineLimits, ScriptError, random_key, with_remedy
from toolbus.protocol.tool import MIB, Result

MAX_CALLS = 200  # of one script
MAX_AT_ONCE = 16  # of its calls; others wait
MAX_SHOWN = 50  # failed and unfinished calls, each
MAX_LOG = 50  # lines of console.log
MAX_LINE = 2_000  # characters of a line, and of an error
MAX_SCRIPT = 65_536  # characters
MAX_SECONDS = 3_600.0  # where the call has no timeout
LEFT_SECONDS = 2.0  # of the script's time, for its answer: its calls end before
LIMITS = EngineLimits(heap_bytes=64 * MIB, turn_seconds=2.0)


@dataclass(slots=True)
class InnerCall:
    """A call of a script; `result` is None while it runs."""

    name: str
    result: Result | None = None

    def described(self) -> dict[str, Any]:
        """Returns how it ended, for a model that wants to go on."""
        if self.result is None:
            return {"name": self.name, "may_be_repeated": False, "state": "unfinished: it may have run"}
        error = self.result.error
        assert error is not None  # the others are counted
        stage = error.stage.name.lower()
        state = f"{error.code.name}, {stage}: {shorten(error.message, MAX_LINE)}"
        return {"name": self.name, "may_be_repeated": error.retry_safe, "state": state}


class ScriptRun:
    """One run of a script; used once, on the loop of its call."""

    def __init__(self, scope: ToolScope) -> None:
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._calls: list[InnerCall] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut: asyncio.Future[str] = self._loop.create_future()  # why it is ended before its end
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._log: list[str] = []
        self._engine = Engine(self._take, LIMITS)

    async def run(self, text: str, values: dict[str, Any]) -> Reply:
        """Runs a script to its end, or to the end of the call's time."""
        self._engine.install("web.js", random_key())
        self._engine.install("script.js")
        left = min(max(self._scope.time_left() - LEFT_SECONDS / 2, 0.05), MAX_SECONDS)
        timer = self._loop.call_later(left, self.cut, f"the script was cut after {left:.0f} s: do less in one script")
        future = asyncio.wrap_future(self._engine.request("run", {"text": text, "input": values}))
        error, value = "", None
        try:
            await asyncio.wait((future, self._cut), return_when=asyncio.FIRST_COMPLETED)
            value = future.result() if future.done() else None
            error = "" if future.done() else self._cut.result()
        except ScriptError as problem:
            error = shorten(with_remedy(str(problem)), MAX_LINE)
        finally:
            timer.cancel()
            future.cancel()
            for task in self._tasks:
                task.cancel()
            self._engine.close()
        answer = {"result": value, **self._described()}
        return Reply(output=answer, error=f"{error}. {self._summary()}") if error else Reply(output=answer)

    def cut(self, why: str) -> None:
        """Ends the script where it is."""
        if not self._cut.done():
            self._cut.set_result(why)

    def _described(self) -> dict[str, Any]:
        """Returns what became of the calls, and the log; empty parts are left out."""
        ok = Counter(call.name for call in self._calls if call.result is not None and call.result.error is None)
        failed = [call.described() for call in self._calls if call.result is not None and call.result.error is not None]
        unfinished = [call.described() for call in self._calls if call.result is None]
        parts = {"ran": dict(ok), "failed": failed[:MAX_SHOWN], "unfinished": unfinished[:MAX_SHOWN], "log": self._log}
        return {name: part for name, part in parts.items() if part}

    def _summary(self) -> str:
        """Returns what became of the calls, for a model that reads only the error."""
        described = self._described()
        ran = ", ".join(f"{name} {count} times" for name, count in described.get("ran", {}).items()) or "no call"
        parts = [f"Before that succeeded: {ran}; do not repeat them"]
        for each in (*described.get("failed", ()), *described.get("unfinished", ())):
            repeat = "may" if each["may_be_repeated"] else "must not"
            parts.append(f"{each['name']} {repeat} be repeated ({shorten(each['state'], 200)})")
        return shorten("; ".join(parts), MAX_LINE)

    # -- what the script posts: on the thread of its engine ------------------------------------------------------------

    def _take(self, post: list[Any]) -> None:
        match post:
            case ["call", int(number), str(name), str(arguments)]:
                self._loop.call_soon_threadsafe(self._begin, number, name, arguments)
            case ["log", _, str(line)] if len(self._log) < MAX_LOG:
                self._log.append(shorten(line, MAX_LINE))

    # -- on the loop of the call ---------------------------------------------------------------------------------------

    def _begin(self, number: int, name: str, arguments: str) -> None:
        if len(self._calls) >= MAX_CALLS:
            error = f"a script makes at most {MAX_CALLS} calls: filter first, or go on in another script"
            self._engine.notify("called", {"id": number, "error": error, "code": "OVERLOADED"})
            return
        call = InnerCall(name)
        self._calls.append(call)
        task = self._loop.create_task(self._call(call, number, arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, call: InnerCall, number: int, arguments: str) -> None:
        async with self._at_once:
            left = self._scope.time_left() - LEFT_SECONDS
            call.result = await self._scope.call(call.name, arguments, timeout=max(left, 0.05))
        error = call.result.error
        fields: dict[str, Any] = {"id": number, "output": call.result.output_json or "null"}
        if error is not None:
            fields |= {"error": error.message, "code": error.code.name}
        self._engine.notify("called", fields)


Script = Annotated[
    str,
    "JavaScript, the body of an async function. await call('tool_name', {argument: value}) returns the tool's output "
    "or throws an Error with a code; return what you need. Promise.all runs calls at the same time.",
]


@llm_tool(
    description="Runs a short JavaScript program that calls other tools, and answers what it returns. Use it when you "
    "would call tools many times, or need a small part of large results: loop, filter and add up in the program. It "
    "has no files and no network. Do not use it for one or two calls: call those tools directly. Example: "
    "const rows = await call('list_orders', {}); return rows.filter(row => row.total > 100).length",
    destructive=True,  # it is as much as the tools that it calls, so programs that ask people ask about it
    timeout=120,
)
async def run_script(script: Script, scope: ToolScope, input: dict[str, Any] | None = None) -> Reply:
    """Runs a script over tools.

    Args:
        script: the text.
        input: what the script gets as `input`.
    """
    if len(script) > MAX_SCRIPT:
        return Reply(error=f"the script has {len(script)} characters, at most {MAX_SCRIPT} are run: write less")
    return await ScriptRun(scope).run(script, input or {})
