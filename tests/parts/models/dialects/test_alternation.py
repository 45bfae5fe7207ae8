"""Tests the joining of messages of one role, and the text of system messages."""

from __future__ import annotations

from typing import Any

from toolbus.parts.models.dialects.conversation import Json, Message, Turn
from toolbus.parts.models.dialects.history import alternating, system_text

OPENING: Json = {"role": "user", "parts": ["."]}


def joined(*messages: Json) -> list[Json]:
    def parts_of(value: Any) -> list[Any]:
        return [value] if isinstance(value, str) else list(value or ())

    return alternating(messages, "parts", parts_of, OPENING)


def test_neighbors_of_one_role_become_one_message_with_their_other_keys() -> None:
    first, second = {"role": "user", "parts": "a", "more": 1}, {"role": "user", "parts": ["b"]}
    assert joined(first, second) == [{"role": "user", "parts": ["a", "b"], "more": 1}]
    assert first == {"role": "user", "parts": "a", "more": 1}


def test_a_message_without_parts_is_left_out_and_its_neighbors_are_joined() -> None:
    messages = [{"role": "user", "parts": ["a"]}, {"role": "assistant", "parts": []}, {"role": "user", "parts": ["b"]}]
    assert joined(*messages) == [{"role": "user", "parts": ["a", "b"]}]
    assert joined({"role": "user"}) == []


def test_the_opening_is_added_only_before_a_conversation_that_the_model_begins() -> None:
    for role in ("assistant", "model"):
        assert joined({"role": role, "parts": ["a"]})[0] == OPENING
    assert joined({"role": "user", "parts": ["a"]}) == [{"role": "user", "parts": ["a"]}]


def test_system_messages_become_one_text_wherever_they_stand() -> None:
    messages = [Message("system", "A"), Message("user", "B"), Message("system", " "), Message("system", "D")]
    assert system_text([*messages, Turn("C")]) == "A\n\nD"
    assert system_text([]) == ""
