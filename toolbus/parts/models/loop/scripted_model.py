"""Plays a model in tests: its answers, refusals, cut streams and tool calls are a list, written on any dialect's wire.

model = ScriptedModel(calls("get_weather", {"city": "Oslo"}), says("It is sunny."))
with model:  # fails the test if a step was not used
    reply = await ToolLoop(host, model.endpoint).run("How is the weather?")
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

from toolbus.parts.models.dialects.anthropic import Anthropic
from toolbus.parts.models.dialects.conversation import Json
from toolbus.parts.models.dialects.dialect import Dialect
from toolbus.parts.models.dialects.gemini import Gemini
from toolbus.parts.models.dialects.ollama import Ollama
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.openai_responses import OpenAIResponses
from toolbus.parts.models.dialects.wire_names import NameTable
from toolbus.parts.models.loop.endpoint import Endpoint

BROKEN = "the connection broke, as the script says"


@dataclass(frozen=True, slots=True)
class Step:
    """One answer of a scripted model.

    Attributes:
        text: what it writes.
        calls: the tools that it calls, each a listed name and arguments; a text is sent as it is, valid JSON or not.
        ending: ``broken``: a ConnectionError, in the middle of the stream.
    """

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any] | str]] = ()
    ending: Literal["complete", "refused", "cut", "broken"] = "complete"


def says(text: str) -> Step:
    """Returns a step in which the model answers with a text."""
    return Step(text)


def calls(name: str, arguments: Mapping[str, Any] | str | None = None, *, text: str = "") -> Step:
    """Returns a step in which the model calls a tool; several at once are `Step(calls=[(name, arguments), …])`."""
    return Step(text, [(name, {} if arguments is None else arguments)])


def refuses(text: str = "") -> Step:
    """Returns a step in which the provider's filter ends the answer."""
    return Step(text, ending="refused")


def cut(text: str) -> Step:
    """Returns a step whose answer is cut at its limit of tokens."""
    return Step(text, ending="cut")


def breaks(text: str = "") -> Step:
    """Returns a step in which the connection breaks in the middle of the answer."""
    return Step(text, ending="broken")


# A step, an error that the client raises, or a function that returns one of them for the request.
Scripted = Step | Exception | Callable[[Json], "Step | Exception"]


class ScriptedModel:
    """A model that answers with the steps of a test, in order.

    As a context manager it fails the test if it was not asked for all of them.

    Args:
        steps: what it answers; a function is called with the request. The request after the last is an AssertionError.
        dialect: whose wire it speaks: ``openai``, ``responses``, ``anthropic``, ``gemini`` or ``ollama``.
        stream: whether its answers are streams of events.

    Attributes:
        requests: what it was asked, as a provider gets it, oldest first.
        endpoint: for a `ToolLoop`.

    Raises:
        ValueError: the dialect is unknown.
    """

    def __init__(self, *steps: Scripted, dialect: str = "openai", stream: bool = True) -> None:
        if dialect not in _WIRES:
            raise ValueError(f"dialect is {dialect!r}, it must be one of {', '.join(_WIRES)}")
        self.requests: list[Json] = []
        self._steps = list(steps)
        self._stream = stream
        make, self._wire = _WIRES[dialect]
        self._dialect: Dialect = make()
        self.endpoint = Endpoint(self._dialect, self._ask, f"scripted {dialect}")

    def __repr__(self) -> str:
        return f"<ScriptedModel {self._dialect.name} asked={len(self.requests)} left={len(self._steps)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.check()

    def check(self) -> None:
        """Checks that every step was used.

        Raises:
            AssertionError: the model was asked less often; the text names the next step.
        """
        if self._steps:
            raise AssertionError(
                f"the model was asked {len(self.requests)} times, and {len(self._steps)} steps are left, the next is "
                f"{self._steps[0]!r}: remove them, or find why the loop ended"
            )

    async def _ask(self, request: Json) -> Any:
        self.requests.append(json.loads(json.dumps(request, default=str)))
        if not self._steps:
            raise AssertionError(f"the model was asked {len(self.requests)} times: its script has no step for that")
        step = self._steps.pop(0)
        if not isinstance(step, Step | Exception):
            step = step(request)
        if isinstance(step, Exception):
            raise step
        rule = self._dialect.name_rule
        step = replace(step, calls=[(NameTable.build([name], rule).to_wire[name], given) for name, given in step.calls])
        wire = self._wire(step, len(self.requests))
        if self._stream:
            return _play(wire.events(), broken=step.ending == "broken")
        if step.ending == "broken":
            raise ConnectionError(BROKEN)
        return wire.answer()


async def _play(events: Iterator[Json], *, broken: bool) -> AsyncIterator[Json]:
    """Yields events one by one; of an answer that breaks, the first half."""
    played = list(events)
    for event in played[: len(played) // 2] if broken else played:
        await asyncio.sleep(0)
        yield event
    if broken:
        raise ConnectionError(BROKEN)


class _Wire:
    """Writes one step as a provider does."""

    endings: Mapping[str, str] = {}  # the provider's word of each ending

    def __init__(self, step: Step, number: int) -> None:
        self.text = step.text
        texts = [(name, given if isinstance(given, str) else json.dumps(given)) for name, given in step.calls]
        self.calls = [(f"call_{number}_{place}", name, text) for place, (name, text) in enumerate(texts)]
        ending = "complete" if step.ending == "broken" else step.ending
        if ending not in self.endings:
            raise ValueError(f"a step ends as {ending!r}, which this dialect cannot say: use another dialect")
        self.ending = self.endings[ending]

    def pieces(self) -> list[str]:
        """Returns the text in pieces, two or more where it is long enough."""
        half = (len(self.text) + 1) // 2
        return [piece for piece in (self.text[:half], self.text[half:]) if piece]

    def answer(self) -> Json:
        """Returns the whole answer."""
        raise NotImplementedError

    def events(self) -> Iterator[Json]:
        """Yields the events of a stream."""
        raise NotImplementedError


class _Chat(_Wire):
    endings: Mapping[str, str] = {"complete": "stop", "refused": "content_filter", "cut": "length"}

    def _calls(self) -> list[Json]:
        return [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in self.calls]

    def answer(self) -> Json:
        message: Json = {"role": "assistant", "content": self.text or None}
        if self.calls:
            message["tool_calls"] = self._calls()
        return {"choices": [{"index": 0, "message": message, "finish_reason": self._stop()}]}

    def _stop(self) -> str:
        return "tool_calls" if self.calls and self.ending == "stop" else self.ending

    def events(self) -> Iterator[Json]:
        deltas: list[Json] = [{"role": "assistant", "content": piece} for piece in self.pieces()]
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(self._calls())]
        for delta in deltas or [{"role": "assistant", "content": ""}]:
            yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": self._stop()}]}


class _Responses(_Wire):
    endings: Mapping[str, str] = {"complete": "", "refused": "content_filter", "cut": "max_output_tokens"}

    def _output(self) -> list[Json]:
        parts = [{"type": "output_text", "text": self.text, "annotations": []}]
        message = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": parts}
        return [*([message] if self.text else ())] + [
            {"type": "function_call", "id": f"fc_{i}", "call_id": i, "name": n, "arguments": a, "status": "completed"}
            for i, n, a in self.calls
        ]

    def answer(self) -> Json:
        details = {"incomplete_details": {"reason": self.ending}} if self.ending else {}
        return {"id": "resp_1", "status": "incomplete" if details else "completed", "output": self._output(), **details}

    def events(self) -> Iterator[Json]:
        yield {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "output": []}}
        for place, item in enumerate(self._output()):
            empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            where = {"output_index": place, "item_id": item["id"]}
            yield {"type": "response.output_item.added", "output_index": place, "item": {**item, **empty}}
            if "arguments" in item:
                yield {"type": "response.function_call_arguments.delta", **where, "delta": item["arguments"]}
            else:
                for piece in self.pieces():
                    yield {"type": "response.output_text.delta", **where, "content_index": 0, "delta": piece}
            yield {"type": "response.output_item.done", "output_index": place, "item": item}
        answer = self.answer()
        yield {"type": f"response.{answer['status']}", "response": answer}


class _Anthropic(_Wire):
    endings: Mapping[str, str] = {"complete": "end_turn", "refused": "refusal", "cut": "max_tokens"}

    def _stop(self) -> str:
        return "tool_use" if self.calls and self.ending == "end_turn" else self.ending

    def answer(self) -> Json:
        blocks: list[Json] = [{"type": "text", "text": self.text}] if self.text else []
        blocks += [{"type": "tool_use", "id": i, "name": n, "input": json.loads(a)} for i, n, a in self.calls]
        return {"type": "message", "role": "assistant", "content": blocks, "stop_reason": self._stop()}

    def events(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": {"type": "message", "role": "assistant", "content": []}}
        deltas = [("text_delta", "text", piece) for piece in self.pieces()]
        blocks: list[tuple[Json, list[tuple[str, str, str]]]] = [({"type": "text", "text": ""}, deltas)]
        for i, name, arguments in self.calls:
            start = {"type": "tool_use", "id": i, "name": name, "input": {}}
            blocks.append((start, [("input_json_delta", "partial_json", arguments)]))
        for index, (block, pieces) in enumerate(blocks if self.text else blocks[1:]):
            yield {"type": "content_block_start", "index": index, "content_block": block}
            for kind, key, piece in pieces:
                yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: piece}}
            yield {"type": "content_block_stop", "index": index}
        yield {"type": "message_delta", "delta": {"stop_reason": self._stop()}}
        yield {"type": "message_stop"}


class _Gemini(_Wire):
    endings: Mapping[str, str] = {"complete": "STOP", "refused": "SAFETY", "cut": "MAX_TOKENS"}

    def _candidate(self, parts: list[Json], ending: str | None) -> Json:
        return {"candidates": [{"content": {"role": "model", "parts": parts}, "finish_reason": ending}]}

    def _calls(self) -> list[Json]:
        return [{"function_call": {"id": i, "name": n, "args": json.loads(a)}} for i, n, a in self.calls]

    def answer(self) -> Json:
        return self._candidate([*([{"text": self.text}] if self.text else ()), *self._calls()], self.ending)

    def events(self) -> Iterator[Json]:
        for part in (*({"text": piece} for piece in self.pieces()), *self._calls()):
            yield self._candidate([part], None)
        yield self._candidate([], self.ending)


class _Ollama(_Wire):
    endings: Mapping[str, str] = {"complete": "stop", "cut": "length"}

    def _message(self, text: str, calls: Sequence[tuple[str, str, str]]) -> Json:
        written = [{"function": {"name": n, "arguments": json.loads(a)}} for _, n, a in calls]
        return {"role": "assistant", "content": text, **({"tool_calls": written} if written else {})}

    def answer(self) -> Json:
        return {"message": self._message(self.text, self.calls), "done": True, "done_reason": self.ending}

    def events(self) -> Iterator[Json]:
        for piece in self.pieces():
            yield {"message": self._message(piece, ()), "done": False}
        for each in self.calls:
            yield {"message": self._message("", [each]), "done": False}
        yield {"message": self._message("", ()), "done": True, "done_reason": self.ending}


_WIRES: dict[str, tuple[Callable[[], Dialect], type[_Wire]]] = {
    "openai": (OpenAIChat, _Chat),
    "responses": (OpenAIResponses, _Responses),
    "anthropic": (Anthropic, _Anthropic),
    "gemini": (Gemini, _Gemini),
    "ollama": (Ollama, _Ollama),
}
