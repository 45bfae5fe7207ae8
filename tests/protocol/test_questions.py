"""The questions of tools: which answers fit them."""

from __future__ import annotations

from typing import Any

import pytest

from toolbus.protocol.questions import ELICITATION, SAMPLING, Question, fault_of_answer

FORM: dict[str, Any] = {
    "properties": {
        "day": {"type": "string", "enum": ["mon", "tue"]},
        "count": {"type": "integer"},
        "sure": {"type": "boolean"},
    },
    "required": ["day", ["not a name"]],
}


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ({"action": "accept", "content": {"day": "mon", "count": 1, "sure": True}}, ""),
        ({"action": "accept", "content": {"day": "mon", "other": [1]}}, ""),
        ({"action": "decline"}, ""),
        ("yes", "it is not an object"),
        ({"action": "perhaps"}, "its action is not one of accept, decline, cancel"),
        ({"action": "accept", "content": ["mon"]}, "its content is not an object"),
        ({"action": "accept"}, "field 'day' is missing"),
        ({"action": "accept", "content": {"day": "sun"}}, "field 'day' is not one of mon, tue"),
        ({"action": "accept", "content": {"day": "mon", "count": True}}, "field 'count' is not of the type integer"),
    ],
)
def test_an_answer_fits_its_form_or_its_fault_is_named(answer: object, fault: str) -> None:
    assert fault_of_answer(Question("k", ELICITATION, {"requestedSchema": FORM}), answer) == fault


def test_any_object_answers_a_question_that_is_not_for_a_person() -> None:
    assert fault_of_answer(Question("k", SAMPLING, {}), {"content": 1}) == ""
