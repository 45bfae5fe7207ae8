from __future__ import annotations

from typing import Any

import pytest

from tests.parts.council.fake_tool_source import settings
from toolbus.functions.call_context import ContextMessage
from toolbus.parts.council.deliberation import Scene, context_messages, message_of, text_of_content
from toolbus.parts.extension.extension import context_text

SCENE = Scene(persona="A tired guard.", character="The castle's ghost.", world_info="[Door]: of oak")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}], "see"),
        ([{"type": "input_text", "text": "a"}, {"type": "input_audio", "data": "…"}, {"text": "b"}, "c"], "a\nb\nc"),
        ([{"type": "thinking", "text": "hidden"}, {"type": "text", "text": 7}, 8], ""),
        ({"type": "text", "text": "no list"}, ""),
        (b"bytes", ""),
        ("half \ud83d", "half \ufffd"),
    ],
)
def test_content_becomes_its_text_and_everything_else_is_dropped(content: Any, text: str) -> None:
    assert text_of_content(content) == text


def test_messages_keep_role_and_name_whatever_else_they_hold() -> None:
    shown = context_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "guard", "id": 7},
            ContextMessage("assistant", "Boo"),
            {"role": None, "content": "odd"},
            "a bare text",  # type: ignore[list-item]
        ],
        settings(),
    )
    assert shown == (
        ContextMessage("user", "Hi", "guard"),
        ContextMessage("assistant", "Boo"),
        ContextMessage("user", "odd"),
        ContextMessage("user", "a bare text"),
    )


def test_the_context_text_has_blank_lines_between_and_roles_in_front_except_of_system() -> None:
    shown = (ContextMessage("system", "Rules"), ContextMessage("user", "Hi"), ContextMessage("assistant", "Boo"))
    assert context_text(shown) == "Rules\n\nuser: Hi\n\nassistant: Boo"


def test_the_window_holds_the_newest_messages_and_the_scene_stands_before_it() -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(30)]
    shown = context_messages(messages, settings(), SCENE)
    assert [each.role for each in shown[:4]] == ["system", "system", "system", "user"]
    assert shown[0].content == "## User persona\nA tired guard."
    assert [each.content for each in shown[3:]] == [str(number) for number in range(5, 30)]
    assert [each.content for each in context_messages(messages, settings(sidecar_context_window=1))] == ["29"]


@pytest.mark.parametrize(
    ("flag", "gone"),
    [
        ("include_user_persona", "A tired guard."),
        ("include_character_info", "The castle's ghost."),
        ("include_world_info", "[Door]: of oak"),
    ],
)
def test_each_text_of_the_scene_can_be_left_out(flag: str, gone: str) -> None:
    shown = context_messages([], settings(**{flag: False}), SCENE)
    assert len(shown) == 2
    assert gone not in context_text(shown)


def test_the_users_newest_message_can_be_left_out_before_the_window_is_cut() -> None:
    messages = [{"role": role, "content": role} for role in ("assistant", "user", "assistant", "user")]
    left = context_messages(messages, settings(exclude_latest_user_message=True, sidecar_context_window=2))
    assert [each.role for each in left] == ["user", "assistant"]
    alone = context_messages([{"role": "assistant", "content": "Boo"}], settings(exclude_latest_user_message=True))
    assert len(alone) == 1


def test_messages_of_gemini_are_read_without_thoughts() -> None:
    message = {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"text": "Come in."}, {"inline_data": {}}]}
    assert message_of(message) == ContextMessage("assistant", "Come in.")
