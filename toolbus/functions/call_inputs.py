"""Gives a handler the answers to its questions, and ends its run if one is missing.

A function that asks runs again from its beginning for each answer. The earlier answers come back in the call's
`request_state`, which the SDK writes and reads as `{"answers": {key: answer}}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from toolbus.questions import ELICITATION, Answer, Question, fault_of_answer
from toolbus.text import dump_json, parse_json
from toolbus.tool import Result
from toolbus.v1 import tool_pb2 as pb

_ANSWERS = "answers"


class InputNeeded(BaseException):
    """Ends a run with questions. It is not an Exception, so that a handler's own `except Exception` lets it pass.

    Args:
        questions: `{"method": …, "params": …}` by key.
        state: a text that comes back with the answers.
    """

    def __init__(self, questions: Mapping[str, Mapping[str, Any]], state: str = "") -> None:
        super().__init__(f"the function asks {', '.join(map(repr, questions))} and runs again with the answers")
        self.questions = questions
        self.state = state

    def result(self, call_id: str) -> Result:
        """Returns the result that ends the call.

        Raises:
            TypeError, ValueError: JSON cannot hold a question.
        """
        return Result(call_id, input_requests_json=dump_json(self.questions), request_state=self.state)


class CallInputs:
    """The questions that a caller can answer, and its answers; for one run of the tool's function.

    Attributes:
        accepts: the kinds of questions that the caller can answer.
        state: the request_state, as it came.
    """

    __slots__ = ("_known", "_responses_json", "_unnamed", "accepts", "state")

    def __init__(self, accepts: tuple[str, ...] = (), responses_json: str = "", state: str = "") -> None:
        self.accepts = accepts
        self.state = state
        self._responses_json = responses_json
        self._known: dict[str, Any] | None = None  # answers by key; None before they are first read
        self._unnamed = 0  # how many questions without a key this run has asked

    @property
    def responses(self) -> dict[str, Any]:
        """The answers that came with this call, parsed anew at each access."""
        return _object(self._responses_json)

    def answers(self, questions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the answers to questions.

        Raises:
            InputNeeded: some are missing, or do not fit their question.
        """
        if self._known is None:
            earlier = _object(self.state).get(_ANSWERS)
            self._known = {**(earlier if isinstance(earlier, dict) else {}), **self.responses}
        known = self._known
        missing = {}
        for key, question in questions.items():
            parsed = Question(key, str(question.get("method")), question.get("params") or {})
            if key not in known or fault_of_answer(parsed, known[key]):
                missing[key] = question
        if missing:
            rest = {key: answer for key, answer in known.items() if key not in missing}
            raise InputNeeded(missing, dump_json({_ANSWERS: rest}) if rest else "")
        return {key: known[key] for key in questions}

    def elicited(self, params: Mapping[str, Any], key: str) -> Answer:
        """Returns a person's answer.

        Args:
            params: of the question.
            key: names the question; "" names it by its place in the run and its text, so that another question at that
                place never gets this answer.

        Raises:
            InputNeeded: it is not answered yet.
        """
        if not key:
            self._unnamed += 1
            digest = hashlib.sha256(json.dumps(params, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()
            key = f"{self._unnamed}-{digest[:8]}"
        if params.get("mode") == "url":
            params = {**params, "elicitationId": key}
        return Answer.from_json(self.answers({key: {"method": ELICITATION, "params": params}})[key])


def inputs_of(call: pb.ToolCall) -> CallInputs | None:
    """Returns the questions that the caller of a call can answer, with its answers; None if it can answer nothing."""
    if not call.accepts:
        return None
    return CallInputs(tuple(call.accepts), call.input_responses_json, call.request_state)


def _object(text: str) -> dict[str, Any]:
    """Returns the JSON object of a text, an empty one if the text is something else: callers can send anything."""
    try:
        value = parse_json(text) if text else {}
    except (ValueError, RecursionError):
        value = {}
    return value if isinstance(value, dict) else {}
