"""Turns a model's answer into a value of a program's type: a dataclass, a TypedDict, a pydantic model or another hint.

The model is told the JSON Schema, and gets one more request where its answer does not fit.
"""

from __future__ import annotations

import json
import re
from typing import Any

from toolbus.common.text import shorten
from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.conversion import converter, fitting
from toolbus.functions.hints import output_schema
from toolbus.parts.models.dialects.conversation import Message
from toolbus.parts.models.loop.turn_reply import Reply

MAX_WHY = 1_000  # characters of what does not fit, for the model
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n\s*```", re.DOTALL)


class OutputMismatch(ToolBusError):
    """The model's answer is not a value of the output type, after its repair either.

    Attributes:
        reply: the turn, with the answer as the model wrote it.
    """

    def __init__(self, why: str, reply: Reply) -> None:
        super().__init__(why, reply)
        self.why = why
        self.reply = reply

    def __str__(self) -> str:
        return f"the model's answer does not fit the output type: {self.why}; its text is in `reply.text`"


class OutputType:
    """How a model writes a value of one type.

    Args:
        kind: a class with fields, or any other type hint that JSON can hold.

    Raises:
        SetupError: JSON Schema cannot describe it.
    """

    def __init__(self, kind: Any) -> None:
        def answer() -> None:
            """Has the type as its return annotation."""

        answer.__annotations__ = {"return": kind}
        self._schema = output_schema(answer)
        if not self._schema:
            raise SetupError(f"output_type is {kind!r}: give a dataclass, a TypedDict, a pydantic model or a JSON type")
        self._validate = getattr(kind, "model_validate", None)
        self._fits = fitting(kind)
        self._convert = converter(kind)

    @property
    def instruction(self) -> Message:
        """What the model is told."""
        schema = json.dumps(self._schema, ensure_ascii=False)
        return Message(
            "system", f"Your final answer is one JSON value and no other text. It fits this JSON Schema: {schema}"
        )

    def repair(self, why: str) -> Message:
        """Returns what the model is told about an answer that does not fit."""
        return Message(
            "user",
            f"Your answer does not fit: {shorten(why, MAX_WHY)}. Write the whole JSON value again, and nothing else.",
        )

    def read(self, text: str) -> Any:
        """Returns the value of an answer; a code fence around it is not part of it.

        Raises:
            ValueError: it is not JSON, or does not fit the type.
        """
        fenced = _FENCED.search(text)
        try:
            value = json.loads(fenced[1] if fenced else text)
        except ValueError as error:
            raise ValueError(f"it is not JSON ({error})") from None
        if self._validate is not None:
            return self._validate(value)
        if not self._fits(value):
            raise ValueError("a key or the type of a value differs from the JSON Schema")
        return value if self._convert is None else self._convert(value)
