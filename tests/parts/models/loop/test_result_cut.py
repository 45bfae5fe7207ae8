"""Tests what a model gets of a huge result, and that the program gets it whole."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.models.loop.realtime_provider import Provider, feed, opened
from tests.parts.models.loop.scripted_model import ApiError, FunctionSource, ScriptedModel, call, says
from toolbus.errors import Code, SetupError, Stage
from toolbus.loop import CallEnded, LoopSettings, ToolLoop
from toolbus.parts.models.dialects.conversation import Answered, Answers, ModelCall
from toolbus.parts.models.loop.result_cut import MIN_RESULT_BYTES, ResultCutter, cut_result
from toolbus.protocol.questions import NEEDS_INPUT
from toolbus.protocol.tool import KIB, Annotations, CallError, Result
from toolbus.v1 import tool_pb2 as pb

IMAGE = pb.ContentBlock(image=pb.ImageContent(data=bytes(100_000), mime_type="image/png"))
SMALL = LoopSettings(result_bytes=MIN_RESULT_BYTES)
ENTRIES = [{"id": number, "name": f"entry {number}"} for number in range(1_000)]


def text_block(text: str) -> pb.ContentBlock:
    return pb.ContentBlock(text=pb.TextContent(text=text))


def entries() -> list[dict[str, Any]]:
    return ENTRIES


def bytes_of(result: Result) -> int:
    return len(result.text.encode())


async def test_the_model_gets_a_part_and_how_to_get_less_and_the_program_everything() -> None:
    model = ScriptedModel(says("", call("entries")), says("done"))
    reply = await ToolLoop(FunctionSource(entries=entries), model.endpoint, SMALL).run("?")
    (text,) = model.results(1)
    whole = json.dumps(ENTRIES, separators=(",", ":"))
    shown, _, mark = text.partition(" …\n")
    assert whole.startswith(shown)
    assert len(text.encode()) <= MIN_RESULT_BYTES
    assert f"it has {len(whole):,} bytes, and the first {len(shown):,} are shown" in mark
    assert "call the tool so that it returns less" in mark
    assert reply.calls[0].result.output == ENTRIES


async def test_later_turns_get_the_same_part_also_from_a_stored_conversation() -> None:
    model = ScriptedModel(says("", call("entries")), says("done"), says("again"), says("and again"))
    loop = ToolLoop(FunctionSource(entries=entries), model.endpoint, SMALL)
    reply = await loop.run("?")
    await loop.run([*reply.items, {"role": "user", "content": "?"}])
    stored = pickle.loads(pickle.dumps(reply.items))
    await ToolLoop(FunctionSource(entries=entries), model.endpoint, SMALL).run(
        [*stored, {"role": "user", "content": "?"}]
    )
    assert model.results(1) == model.results(2) == model.results(3)


@pytest.mark.parametrize("result_bytes", [0, None])
async def test_without_a_limit_the_model_gets_everything(result_bytes: int | None) -> None:
    model = ScriptedModel(says("", call("entries")), says("done"))
    settings = LoopSettings(result_bytes=result_bytes)
    await ToolLoop(FunctionSource(entries=entries), model.endpoint, settings).run("?")
    assert json.loads(model.results(1)[0]) == ENTRIES


async def test_by_default_a_result_has_at_most_64_kib() -> None:
    model = ScriptedModel(says("", call("fits"), call("long")), says("done"))
    source = FunctionSource(fits=lambda: "x" * 64 * KIB, long=lambda: "x" * (64 * KIB + 1))
    await ToolLoop(source, model.endpoint).run("?")
    fits, long = model.results(1)
    assert (len(fits), "cut here" in long, len(long.encode()) <= 64 * KIB) == (64 * KIB, True, True)


async def test_a_reply_that_is_a_huge_result_is_whole_for_the_user_and_cut_for_later_turns() -> None:
    source = FunctionSource()
    source.offer(lambda: "x" * 5_000, name="report", direct_reply=True)
    model = ScriptedModel(says("", call("report")), says("done"))
    loop = ToolLoop(source, model.endpoint, SMALL)
    reply = await loop.run("?")
    assert (reply.text, reply.stopped) == ("x" * 5_000, "direct_reply")
    await loop.run([*reply.items, {"role": "user", "content": "?"}])
    assert len(str(model.requests[1]["messages"])) < 3 * MIN_RESULT_BYTES


@pytest.mark.parametrize("path", ["/b", "é" * 2_000])
async def test_a_cut_still_says_that_the_arguments_were_changed(path: str) -> None:
    source = FunctionSource()
    source.offer(lambda path="": "x" * 5_000, name="delete", annotations=Annotations(destructive=True))
    model = ScriptedModel(says("", call("delete")), says("done"))
    await ToolLoop(source, model.endpoint, SMALL, approve=lambda request: {"path": path}).run("?")
    (text,) = model.results(1)
    shown, _, edit = text.rpartition("\n")
    assert shown.endswith("narrower search.]")
    assert edit.startswith(f'[The user changed the arguments of this call before it ran: {{"path":"{path[:100]}')
    assert edit.endswith("]")
    assert len(text.encode()) <= MIN_RESULT_BYTES


async def test_a_model_without_tools_gets_a_part_too() -> None:
    model = ScriptedModel(says("", call("entries")), ApiError(400, "this model does not support tools"), says("done"))
    await ToolLoop(FunctionSource(entries=entries), model.endpoint, SMALL).run("?")
    assert "cut here" in str(model.requests[2])
    assert len(str(model.requests[2])) < 2 * MIN_RESULT_BYTES


async def test_a_realtime_session_gets_a_part_and_its_program_everything() -> None:
    source, provider = FunctionSource(entries=entries), Provider()
    ended: list[Any] = []
    session = await opened(source, provider, settings=SMALL, on_event=ended.append)
    await feed(session, provider.begin(), provider.call("c1", "entries"), provider.end())
    await provider.until(lambda: "c1" in provider.outputs)
    assert "cut here" in provider.outputs["c1"]
    assert len(provider.outputs["c1"].encode()) <= MIN_RESULT_BYTES
    assert [event.done.result.output for event in ended if isinstance(event, CallEnded)] == [ENTRIES]
    await session.close()


def test_too_low_a_limit_is_refused() -> None:
    with pytest.raises(SetupError, match="result_bytes is 999, it must be 1000 or more; 0 means any number"):
        LoopSettings(result_bytes=999)


def test_a_text_is_cut_at_the_end_of_a_character() -> None:
    text = cut_result(Result(output_json=json.dumps("ü😀" * 1_000)), 1_000).text
    assert set(text.partition(" …\n")[0]) == {"ü", "😀"}


def test_a_failure_stays_one_and_its_message_is_shown_first() -> None:
    error = CallError(Code.TOOL, "no such page", Stage.ACCEPTED)
    result = cut_result(Result(output_json=json.dumps("x" * 5_000), is_error=True, error=error), 1_000)
    assert (result.is_error, result.error) == (True, error)
    assert result.text.startswith("no such page\nxxx")
    long = CallError(Code.TOOL, "e" * 5_000, Stage.ACCEPTED)
    result = cut_result(Result(output_json='"output"', is_error=True, error=long), 1_000)
    assert result.error is not None
    assert (result.error.code, result.error.stage, "output" in result.text) == (Code.TOOL, Stage.ACCEPTED, False)
    assert bytes_of(result) <= 1_000


def test_content_counts_and_images_stay() -> None:
    content = (text_block("a" * 400), IMAGE, text_block("b" * 5_000), text_block("last"), IMAGE)
    result = cut_result(Result(output_json='"output"', content=content), 1_000)
    assert [block.WhichOneof("kind") for block in result.content] == ["text", "image", "text", "image"]
    assert result.text.startswith("output\n" + "a" * 400)
    assert "last" not in result.text
    file = pb.ContentBlock(resource=pb.EmbeddedResource(uri="file:///a", text="c" * 5_000))
    assert "cut here" in cut_result(Result(content=(file,)), 1_000).text
    whole = Result(output_json='"output"', content=(IMAGE, IMAGE))
    assert cut_result(whole, 1_000) is whole


@pytest.mark.parametrize(
    "result",
    [
        Result(output_json=json.dumps("😀" * 260, ensure_ascii=False)),
        Result(content=(pb.ContentBlock(audio=pb.AudioContent()),) * 80),
    ],
)
def test_the_quick_look_misses_no_long_text(result: Result) -> None:
    assert bytes_of(result) > 1_000
    assert ResultCutter(1_000).cut(result) == cut_result(result, 1_000) != result


def test_the_questions_of_a_tool_are_not_cut() -> None:
    asks = Result(input_requests_json=json.dumps([{"id": NEEDS_INPUT, "message": "x" * 5_000}]))
    assert cut_result(asks, 1_000) is asks


TEXTS = st.text(max_size=300)
LISTS = st.lists(st.text(max_size=90), max_size=20)
BLOCKS = st.one_of(
    TEXTS.map(text_block),
    st.just(IMAGE),
    st.text(max_size=50).map(
        lambda uri: pb.ContentBlock(resource_link=pb.ResourceLink(uri=uri.encode("utf-8", "replace").decode()))
    ),
    TEXTS.map(lambda text: pb.ContentBlock(resource=pb.EmbeddedResource(text=text))),
)
RESULTS = st.builds(
    Result,
    output_json=st.one_of(
        st.text(max_size=900),
        st.text(max_size=900).map(json.dumps),
        st.lists(st.text(max_size=90), max_size=20).map(json.dumps),
    ),
    is_error=st.booleans(),
    error=st.none() | st.builds(CallError, code=st.just(Code.TOOL), message=st.text(max_size=900)),
    content=st.lists(BLOCKS, max_size=5).map(tuple),
)


@given(RESULTS)
def test_every_cut_has_at_most_the_limit_says_so_once_and_is_cut_no_further(result: Result) -> None:
    limit = MIN_RESULT_BYTES
    images = sum(len(Result(content=(block,)).text) + 1 for block in result.content if block == IMAGE)
    cut = cut_result(result, limit)
    if cut is result:
        assert bytes_of(result) <= limit
    else:
        assert bytes_of(cut) <= limit + images
        assert cut.text.count("[The result is cut here") == 1
    items = ResultCutter(limit).cut_items([Answers((Answered(ModelCall("1", "t"), result),))])
    assert isinstance(items[0], Answers)
    assert items[0].answered[0].result == cut  # no result is missed by the quick look at its size
