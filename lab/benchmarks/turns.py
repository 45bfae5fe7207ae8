"""Measures the tool loop by itself: turns with a model that answers at once, less the calls that it makes.

A model makes calls in three rounds, then answers in text. What is not its calls' is the loop's: listing and
exporting tools, writing requests, reading answers, guarding and placing calls.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from lab.benchmarks import catalog
from lab.benchmarks.contest import Plan
from lab.benchmarks.facts import Fact, Line, Measured, measured, microseconds
from lab.benchmarks.local_calls import offered
from lab.load import workload
from lab.stage import Stage
from toolbus.functions.call_context import CallContext
from toolbus.loop import Endpoint, LoopSettings, ToolLoop, ToolSource, source_of
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.protocol.tool import Tool

OFFERED = 50  # tools in every request
ROUNDS = 3  # in which the model asks for calls: the loop's own default
ANSWERS = ROUNDS + 1
TURNS = 5  # of one sample
MODEL_MS = 300.0  # a model that begins to answer soon
TOOL = Tool(workload.TOOL_NAME, workload.DESCRIPTION, workload.PARAMETERS_JSON)


def loop(stage: Stage, plan: Plan, repeats: int) -> tuple[Fact, ...]:
    """Measures turns with tools of a bus of this process, directly and over gRPC."""
    lines: dict[str, Line] = {
        f"{where}, {calls} a round": functools.partial(_turns, over_grpc, calls, repeats)
        for where, over_grpc in (("bus of this process", False), ("host over gRPC", True))
        for calls in (1, 8)
    }
    title = f"The loop's own cost, {OFFERED} tools, {ROUNDS} rounds and an answer"
    return measured("loop", title, lines, plan.rounds)


async def _turns(over_grpc: bool, calls: int, repeats: int) -> Measured:
    answers = [*(_asking(number, calls) for number in range(ROUNDS)), _saying()]
    turn, alone = [], []
    async with offered((TOOL, *catalog.tools(OFFERED - 1)), over_grpc) as caller:
        source, waiting = source_of(caller), iter(answers)

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            return next(waiting)

        tool_loop = ToolLoop(source, Endpoint(OpenAIChat(), ask), LoopSettings(rounds=ROUNDS))

        async def run(number: int) -> None:
            nonlocal waiting
            waiting = iter(answers)
            reply = await tool_loop.run("What will the weather be?")
            if len(reply.calls) != ROUNDS * calls or any(done.result.is_error for done in reply.calls):
                raise RuntimeError(f"a turn went wrong: {reply}")

        async def call(number: int) -> None:
            for each in range(ROUNDS):
                await asyncio.gather(*(_call(source, each, order) for order in range(calls)))

        await microseconds(run, 2)  # imports and the first export do not show
        for _ in range(repeats):
            turn.append(await microseconds(run, TURNS))
            alone.append(await microseconds(call, TURNS))
    own = [(whole - part) / ANSWERS for whole, part in zip(turn, alone, strict=True)]
    return {
        ("turn", "µs"): turn,
        ("its calls alone", "µs"): alone,
        ("loop, each answer of the model", "µs"): own,
        (f"share of {MODEL_MS:g} ms, computed", "%"): [each / MODEL_MS / 10 for each in own],
    }


async def _call(source: ToolSource, number: int, order: int) -> None:
    """Makes the call that the loop makes for one of a round."""
    context = CallContext(attributes={"round": str(number + 1), "order": str(order)})
    result = await source.call(TOOL.name, _arguments(number, order), context=context, schema_hash=TOOL.schema_hash)
    if result.is_error:
        raise RuntimeError(f"a call failed: {result.error}")


def _arguments(number: int, order: int) -> str:
    return workload.arguments_json(number * 100 + order)  # no two of a turn are the same, which a guard would refuse


def _asking(number: int, calls: int) -> dict[str, Any]:
    tool_calls: Sequence[dict[str, Any]] = [
        {
            "id": f"call_{number}_{order}",
            "type": "function",
            "function": {"name": TOOL.name, "arguments": _arguments(number, order)},
        }
        for order in range(calls)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}


def _saying() -> dict[str, Any]:
    message = {"role": "assistant", "content": "It stays clear."}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
