"""What tools are shown of the conversation: messages as texts, the newest of them, with the scene in front."""

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
    """What the host knows beside the messages; each text is shown where it is not empty and the settings allow it.

    Attributes:
        chat_id: which conversation it is: for events, history and runs that are made again.
        persona: who the user plays.
        character: who the main model plays.
        world_info: what is known of the world.
    """

    chat_id: str = ""
    persona: str = ""
    character: str = ""
    world_info: str = ""


NO_SCENE = Scene()


def text_of_content(content: Any) -> str:
    """Returns the text of a message's content: the text parts, a line each, without whatever else there is."""
    if isinstance(content, str):
        return join_surrogates(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        return ""
    return "\n".join(filter(None, (_part_text(part) for part in content)))


def context_messages(
    messages: Iterable[Mapping[str, Any] | ContextMessage], settings: CouncilSettings, scene: Scene = NO_SCENE
) -> tuple[ContextMessage, ...]:
    """Returns what tools are shown: the scene as system messages, then the newest messages, oldest first."""
    told = [each if isinstance(each, ContextMessage) else message_of(each) for each in messages]
    if settings.exclude_latest_user_message:
        latest = next((index for index in reversed(range(len(told))) if told[index].role == "user"), None)
        told = [each for index, each in enumerate(told) if index != latest]
    return (*_scene_messages(scene, settings), *told[-settings.sidecar_context_window :])


def message_of(said: Any) -> ContextMessage:
    """Reads a message as providers write it; what is none becomes one without content, not an error."""
    if not isinstance(said, Mapping):
        return ContextMessage("user", text_of_content(said))
    role, name = said.get("role"), said.get("name")
    if role == "model":  # as Gemini's API has it, with `parts` for the content
        role = "assistant"
    return ContextMessage(
        role=join_surrogates(role) if isinstance(role, str) and role else "user",
        content=text_of_content(said.get("parts") if said.get("content") is None else said["content"]),
        name=join_surrogates(name) if isinstance(name, str) else "",
    )


def _scene_messages(scene: Scene, settings: CouncilSettings) -> Iterable[ContextMessage]:
    for wanted, heading, text in (
        (settings.include_user_persona, "User persona", scene.persona),
        (settings.include_character_info, "Character", scene.character),
        (settings.include_world_info, "World info", scene.world_info),
    ):
        if wanted and text.strip():
            yield ContextMessage("system", join_surrogates(f"## {heading}\n{text.strip()}"))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return join_surrogates(part)
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return "" if part.get("thought") else join_surrogates(part["text"])  # Gemini's marks what was only thought
    return ""
