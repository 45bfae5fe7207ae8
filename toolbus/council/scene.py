"""Selects the messages for tools: the scene as system messages, then the newest messages, as texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolbus.council.council_settings import CouncilSettings
from toolbus.functions.call_context import ContextMessage
from toolbus.text import join_surrogates

_TEXT_PARTS = (None, "text", "input_text", "output_text")  # as the providers call them; some do not


@dataclass(frozen=True, slots=True)
class Scene:
    """Texts of the host besides the messages. Tools get each text that is not empty and that the settings allow.

    Attributes:
        chat_id: of the conversation, for events, history and regenerated replies.
        persona: the character that the user plays.
        character: the character that the main model plays.
        world_info: facts about the world.
    """

    chat_id: str = ""
    persona: str = ""
    character: str = ""
    world_info: str = ""


NO_SCENE = Scene()


def text_of_content(content: Any) -> str:
    """Returns the text of a message's content: the text parts, a line each; other parts are ignored."""
    if isinstance(content, str):
        return join_surrogates(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        return ""
    return "\n".join(filter(None, (_part_text(part) for part in content)))


def context_messages(
    messages: Iterable[Mapping[str, Any] | ContextMessage], settings: CouncilSettings, scene: Scene = NO_SCENE
) -> tuple[ContextMessage, ...]:
    """Returns the messages for tools: the scene as system messages, then the newest messages, oldest first."""
    shown = [each if isinstance(each, ContextMessage) else message_of(each) for each in messages]
    if settings.exclude_latest_user_message:
        latest = next((index for index in reversed(range(len(shown))) if shown[index].role == "user"), None)
        shown = [each for index, each in enumerate(shown) if index != latest]
    return (*_scene_messages(scene, settings), *shown[-settings.sidecar_context_window :])


def message_of(message: Any) -> ContextMessage:
    """Reads a message as providers write it; any other value becomes a message without content."""
    if not isinstance(message, Mapping):
        return ContextMessage("user", text_of_content(message))
    role, name = message.get("role"), message.get("name")
    if role == "model":  # as Gemini's API has it, with `parts` for the content
        role = "assistant"
    return ContextMessage(
        role=join_surrogates(role) if isinstance(role, str) and role else "user",
        content=text_of_content(message.get("parts") if message.get("content") is None else message["content"]),
        name=join_surrogates(name) if isinstance(name, str) else "",
    )


def _scene_messages(scene: Scene, settings: CouncilSettings) -> Iterable[ContextMessage]:
    for included, heading, text in (
        (settings.include_user_persona, "User persona", scene.persona),
        (settings.include_character_info, "Character", scene.character),
        (settings.include_world_info, "World info", scene.world_info),
    ):
        if included and text.strip():
            yield ContextMessage("system", join_surrogates(f"## {heading}\n{text.strip()}"))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return join_surrogates(part)
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return "" if part.get("thought") else join_surrogates(part["text"])  # Gemini marks thoughts so
    return ""
