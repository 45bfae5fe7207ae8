"""Links that a model made up are marked or removed, whole and streamed; those of tools and users stay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import FunctionSource, ScriptedModel, call, says
from tests.support.waiting import WAIT_SECONDS
from toolbus.errors import SetupError
from toolbus.loop import LoopSettings, ToolLoop
from toolbus.parts.models.dialects.conversation import Answered, Answers, Message, ModelCall, Turn
from toolbus.parts.models.loop.links import MARK, MAX_HELD, REMOVED, LinkFilter
from toolbus.parts.models.loop.loop_events import TextDelta
from toolbus.protocol.tool import Result

KNOWN = "https://example.org/a"
ITEMS = (
    Message("user", "I mean https://user.example/x, not (https://user.example/y)."),
    Turn(text="as at https://invented.example/earlier"),
    Answers(
        (
            Answered(
                ModelCall("1", "find"),
                Result("1", '{"hits": [{"url": "https:\\/\\/example.org\\/a", "text": "see www.other.org/z\\nend"}]}'),
            ),
        )
    ),
)


def find() -> dict[str, Any]:
    return {"url": KNOWN}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"see {KNOWN}.", f"see {KNOWN}."),
        (f"see {KNOWN}/ or HTTP://EXAMPLE.org/a", f"see {KNOWN}/ or HTTP://EXAMPLE.org/a"),
        ("https://user.example/y and www.other.org/z", "https://user.example/y and www.other.org/z"),
        ("no link: http colon slash", "no link: http colon slash"),
        (f"{KNOWN}?q=secret!", f"{KNOWN}?q=secret{MARK}!"),
        ("as https://invented.example/earlier", f"as https://invented.example/earlier{MARK}"),
        ("[here](https://bad.example/p) it is", f"[here](https://bad.example/p){MARK} it is"),
        (f"[here]({KNOWN}) it is", f"[here]({KNOWN}) it is"),
        ("www.bad.example", f"www.bad.example{MARK}"),
        ("![](https://bad.example/?d=1)", f"![](https://bad.example/?d=1){MARK}"),
    ],
)
def test_only_links_of_no_tool_and_no_user_are_marked(text: str, shown: str) -> None:
    links = LinkFilter(ITEMS, "mark")
    assert links.filtered(text) == shown
    for size in (1, 2, 7):  # in pieces it is the same text
        pieces: list[str] = []
        for start in range(0, len(text), size):
            links.stream(text[start : start + size], pieces.append)
        links.finish(pieces.append)
        assert "".join(pieces) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("go to https://bad.example/p.", f"go to {REMOVED}."),
        ("[here](https://bad.example/p) it is", f"[here] {REMOVED} it is"),
        ("(https://bad.example/p)", f"({REMOVED})"),
    ],
)
def test_removed_links_leave_the_sentence(text: str, shown: str) -> None:
    assert LinkFilter(ITEMS, "remove").filtered(text) == shown


def test_a_stream_without_blanks_is_not_held_without_end() -> None:
    pieces: list[str] = []
    links = LinkFilter((), "mark")
    for _ in range(10):
        links.stream("x" * 1_000, pieces.append)
    assert len("".join(pieces)) >= 10_000 - MAX_HELD


@pytest.mark.parametrize("streams", [False, True])
async def test_a_turn_marks_what_the_model_made_up(streams: bool) -> None:
    answer = f"Read {KNOWN} and https://bad.example/x now"
    model = ScriptedModel(says("", call("find")), says(answer), streams=streams)
    loop = ToolLoop(FunctionSource(find=find), model.endpoint, LoopSettings(unknown_links="mark"))
    async with asyncio.timeout(WAIT_SECONDS):
        if streams:
            events = [event async for event in loop.stream("Where?")]
            text = "".join(event.text for event in events if isinstance(event, TextDelta))
        else:
            reply = await loop.run("Where?")
            text = reply.text
            assert isinstance(reply.items[-1], Turn)
            assert reply.items[-1].text == answer
    assert text == f"Read {KNOWN} and https://bad.example/x{MARK} now"


def test_another_word_is_refused() -> None:
    with pytest.raises(SetupError, match="it must be one of keep, mark, remove"):
        LoopSettings(unknown_links="drop")  # type: ignore[arg-type]
