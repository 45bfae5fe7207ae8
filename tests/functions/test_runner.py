"""Whatever a handler does, it ends in exactly one result (REST-62)."""

import asyncio
import concurrent.futures
import datetime
import enum
import json
import logging
import math
import pathlib
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.support.waiting import within
from toolbus.errors import Code, Stage
from toolbus.functions.call_options import CallOptions
from toolbus.functions.declaration import describe
from toolbus.functions.reply import dump_output
from toolbus.functions.runner import MAX_MESSAGE, run_handler
from toolbus.functions.tool_spec import ToolSpec, spec_of
from toolbus.sdk import CallContext, Err, Ok, Reply, ToolScope, audio, image, link, resource, text
from toolbus.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

WAIT = 5.0


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield pool


def spec(function: Callable[..., Any], **options: Any) -> ToolSpec:
    return spec_of(function, describe(function, **{"name": "tool", **options}))


async def run(
    function: Callable[..., Any], arguments: Any = None, scope: ToolScope | None = None, **options: Any
) -> Result:
    async def run_sync(job: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(job)

    return await run_handler(spec(function, **options), arguments or {}, scope or ToolScope("c1", "tool"), run_sync)


class Color(enum.Enum):
    RED = "red"


@dataclass
class Place:
    city: str
    when: datetime.date


class Model:
    def model_dump(self) -> dict[str, Any]:
        return {"color": Color.RED}


RETURNS: list[tuple[Any, Any]] = [
    (None, None),
    ("sunny", "sunny"),
    ("天气 ☀", "天气 ☀"),
    (0, 0),
    (2**80, 2**80),
    (False, False),
    ([1, {"a": None}], [1, {"a": None}]),
    ((1, 2), [1, 2]),
    ({1}, [1]),
    ([], []),
    ({1: "a", None: "b"}, {"1": "a", "null": "b"}),
    (Color.RED, "red"),
    (datetime.datetime(2024, 2, 3, 4, 5), "2024-02-03T04:05:00"),
    (pathlib.PurePosixPath("a/b"), "a/b"),
    (uuid.UUID(int=1), str(uuid.UUID(int=1))),
    (Place("Oslo", datetime.date(2024, 2, 3)), {"city": "Oslo", "when": "2024-02-03"}),
    ([Model()], [{"color": "red"}]),
    (Ok({"a": 1}), {"a": 1}),
    (Ok(), None),
    ({"output": 5}, {"output": 5}),
    ({"output": 5, "exit_code": 0}, {"output": 5, "exit_code": 0}),
    ({"output": 5, "is_error": False}, 5),
    ({"output": None, "is_error": False, "error": None}, None),
    ({"is_error": False, "data": 1}, {"is_error": False, "data": 1}),
    ({"error": "only data"}, {"error": "only data"}),
]


@pytest.mark.parametrize(("returned", "output"), RETURNS, ids=lambda each: str(each)[:40])
async def test_a_plain_return_is_the_output(returned: Any, output: Any) -> None:
    result = await run(lambda: returned)
    assert (result.call_id, result.is_error, result.error) == ("c1", False, None)
    assert result.output == output
    if not isinstance(output, str):
        assert result.output_json == json.dumps(output, ensure_ascii=False, separators=(",", ":"))


ERRORS: list[tuple[Any, Any, str, str]] = [
    (
        {"output": {"reason": "none"}, "is_error": True, "error": "CITY_NOT_FOUND"},
        {"reason": "none"},
        "CITY_NOT_FOUND",
        "CITY_NOT_FOUND",
    ),
    ({"is_error": True, "error": "no city"}, None, "no city", "no city"),
    ({"is_error": "false", "error": "no city"}, None, "no city", "no city"),
    ({"is_error": True, "error": "e", "tried": 3}, {"tried": 3}, "e", "e"),
    ({"is_error": True, "error": {"code": 4}}, None, '{"code":4}', '{"code":4}'),
    ({"is_error": True}, None, "the tool reported an error without a text", ""),
    (Err("no city"), None, "no city", "no city"),
    (Err(KeyError("city")), None, "KeyError: 'city'", "KeyError"),
    (Reply("why", error="NOPE"), "why", "NOPE", "NOPE"),
    (Reply("why", is_error=True), "why", "the tool reported an error without a text", ""),
]


@pytest.mark.parametrize(("returned", "output", "message", "reason"), ERRORS)
async def test_an_error_envelope_is_a_tool_error(returned: Any, output: Any, message: str, reason: str) -> None:
    result = await run(lambda: returned)
    assert result.is_error
    assert result.error is not None
    assert (result.output, result.error.message, result.error.reason) == (output, message, reason)
    assert (result.error.code, result.error.stage, result.error.retry_safe) == (Code.TOOL, Stage.ACCEPTED, False)
    assert Result.from_wire(result.to_wire()) == result


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


RAISED: list[tuple[BaseException, str, str]] = [
    (ValueError("no such city"), "ValueError: no such city", "ValueError"),
    (KeyError("x"), "KeyError: 'x'", "KeyError"),
    (RuntimeError(), "RuntimeError", "RuntimeError"),
    (SystemExit(3), "SystemExit: 3", "SystemExit"),
    (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt"),
    (StopIteration("end"), "", ""),
    (BaseException("base"), "BaseException: base", "BaseException"),
    (Mute(), "Mute", "Mute"),
]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("problem", "message", "reason"), RAISED, ids=lambda each: ascii(each)[:30])
async def test_a_raise_is_a_tool_error_and_the_plugin_goes_on(
    problem: BaseException, message: str, reason: str, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise problem

    async def fails_later() -> None:
        raise problem

    with caplog.at_level(logging.WARNING):
        result = await run(fails_later if asynchronous else fails)
    assert result.is_error
    assert result.error is not None
    assert result.error.code is Code.TOOL
    assert result.output_json == "null"
    if message:
        assert (result.error.message, result.error.reason) == (message, reason)
    result.to_wire().SerializeToString()
    assert "Traceback" in caplog.text
    assert "Traceback" not in result.error.message


async def test_an_exception_text_that_utf_8_cannot_hold_still_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not logged here: a captured log that utf-8 cannot hold ends the process that runs the tests.
    monkeypatch.setattr(logging.getLogger("toolbus.functions.runner"), "disabled", True)

    def fails() -> None:
        raise ValueError("\ud800")

    result = await run(fails)
    assert result.error is not None
    assert (result.error.message, result.error.reason) == ("ValueError: ?", "ValueError")
    result.to_wire().SerializeToString()


async def test_a_very_long_exception_text_is_cut() -> None:
    def fails() -> None:
        raise ValueError("x" * 100_000)

    result = await run(fails)
    assert result.error is not None
    assert len(result.error.message) == MAX_MESSAGE


def cyclic() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


def deep() -> list[Any]:
    held: list[Any] = []
    for _ in range(100_000):
        held = [held]
    return held


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (object, "output is of type object"),
        (lambda: {"a": [1, 1j]}, "output.a[1] is of type complex"),
        (lambda: b"x", "image(data, mime)"),
        (lambda: {"t": math.nan}, "output.t is nan"),
        (lambda: [math.inf], "output[0] is inf"),
        (lambda: {(1, 2): 3}, "key of type tuple"),
        (cyclic, "output[0] contains itself"),
        (deep, "nested too deep"),
        (lambda: {"s": "\ud83d"}, "lone surrogate"),
        (lambda: Place(city=object(), when=datetime.date(2024, 1, 1)), "output.city is of type object"),  # type: ignore[arg-type]
        (lambda: Reply(object()), "output is of type object"),
        (lambda: {"is_error": True, "output": object()}, "output is of type object"),
        (lambda: Reply(content=["x"]), "Reply.content holds a str"),  # type: ignore[list-item]
    ],
)
async def test_a_value_that_json_cannot_hold_is_refused_with_its_place(make: Callable[[], Any], words: str) -> None:
    result = await run(make, parameters={})
    assert result.error is not None
    assert (result.error.code, result.error.reason) == (Code.TOOL, "TypeError")
    assert words in result.error.message


def test_an_output_that_json_can_hold_is_written_compactly() -> None:
    assert dump_output({"a": [1, "é"]}) == '{"a":[1,"é"]}'


async def weather(*, city: str, days: int = 1) -> dict[str, Any]:
    return {"city": city, "days": days}


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ({"city": "Oslo"}, {"city": "Oslo", "days": 1}),
        ('{"city":"Oslo","days":12345678901234567890}', {"city": "Oslo", "days": 12345678901234567890}),
    ],
)
async def test_arguments_arrive_as_keywords(arguments: Any, output: Any) -> None:
    assert (await run(weather, arguments)).output == output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ({}, Code.TOOL, "TypeError: tool() is missing 'city' (it takes city, days)"),
        ({"city": "a", "town": "b"}, Code.TOOL, "TypeError: tool() takes no argument 'town' (it takes city, days)"),
        ("[1]", Code.INVALID_ARGUMENTS, "not a JSON object"),
        ("{", Code.INVALID_ARGUMENTS, "not a JSON object"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused_without_running_the_handler(
    arguments: Any, code: Code, words: str
) -> None:
    result = await run(weather, arguments)
    assert result.error is not None
    assert result.error.code is code
    assert words in result.error.message


async def test_a_function_without_parameters_names_the_arguments_that_it_does_not_take() -> None:
    result = await run(lambda: 1, {"city": "a"})
    assert result.error is not None
    assert result.error.message == "TypeError: tool() takes no argument 'city' (it takes none)"


async def test_a_handler_of_any_keyword_gets_them_all() -> None:
    assert (await run(lambda **rest: rest, '{"a":1,"self":2}')).output == {"a": 1, "self": 2}
    assert (await run(lambda: 1, "")).output == 1


async def test_hinted_arguments_are_converted_and_declared_ones_are_not() -> None:
    def tool(color: Color) -> str:
        return type(color).__name__

    assert (await run(tool, {"color": "red"})).output == "Color"
    assert (await run(tool, {"color": "red"}, parameters={"type": "object"})).output == "str"
    result = await run(tool, {"color": "blue"})
    assert result.error is not None
    assert result.error.message == "ValueError: argument 'color': 'blue' is not one of 'red'"


async def test_the_scope_fills_the_parameter_that_asks_for_it() -> None:
    def tool(city: str, scope: ToolScope) -> list[Any]:
        return [city, scope.call_id, scope.context.user_id, scope.time_left() == math.inf]

    scope = ToolScope("c9", "tool", context=CallContext(user_id="u"))
    assert (await run(tool, {"city": "Oslo"}, scope)).output == ["Oslo", "c9", "u", True]
    result = await run(tool, {"city": "Oslo", "scope": "forged"})
    assert result.error is not None
    assert "takes no argument 'scope'" in result.error.message


async def test_a_sync_handler_runs_off_the_loop() -> None:
    assert (await run(lambda: threading.current_thread() is threading.main_thread())).output is False


async def test_a_plain_function_that_hands_back_a_coroutine_is_awaited() -> None:
    assert (await run(lambda: weather(city="Oslo"))).output == {"city": "Oslo", "days": 1}
    assert (await run(partial(weather, city="Oslo"))).output == {"city": "Oslo", "days": 1}


async def test_a_resource_is_a_part_with_what_is_in_it() -> None:
    parts = [resource("file:///a", "what is in it", "text/plain"), resource("file:///b", b"B")]
    result = await run(lambda: parts)
    assert [(each.resource.uri, each.resource.text, each.resource.data) for each in result.content] == [
        ("file:///a", "what is in it", b""),
        ("file:///b", "", b"B"),
    ]


async def test_content_travels_beside_the_output() -> None:
    parts = [text("t"), image(b"i", "image/jpeg"), audio(b"a"), link("https://example.org", mime="text/html")]
    result = await run(lambda: Reply({"n": 4}, parts))
    assert (result.output, list(result.content)) == ({"n": 4}, parts)
    assert [each.WhichOneof("kind") for each in parts] == ["text", "image", "audio", "resource_link"]
    assert list((await run(lambda: parts)).content) == parts
    assert list((await run(lambda: parts[0])).content) == parts[:1]
    assert parts[3].resource_link.name == "https://example.org"
    with pytest.raises(TypeError, match="read_bytes"):
        image("picture.png")  # type: ignore[arg-type]


async def test_a_generators_chunks_are_progress_and_together_the_output() -> None:
    def words() -> Iterator[str]:
        yield "a"
        yield "b"

    async def later() -> Any:
        yield "a"
        yield "b"

    for function in (words, later, lambda: words(), lambda: later()):
        sent: list[pb.ToolProgress] = []
        scope = ToolScope("c1", "tool", send_progress=sent.append)
        assert (await run(function, scope=scope)).output == "ab"
        assert [(each.call_id, each.output_chunk) for each in sent] == [("c1", "a"), ("c1", "b")]


async def test_a_generator_of_something_else_is_refused() -> None:
    def numbers() -> Iterator[int]:
        yield 1

    def returns() -> Any:
        yield "a"
        return "b"

    for function, words in ((numbers, "not int"), (returns, "must not return")):
        result = await run(function)
        assert result.error is not None
        assert words in result.error.message


async def test_a_cancelled_task_ends_in_a_cancelled_result() -> None:
    started = asyncio.Event()
    cleaned = asyncio.Event()

    async def waits() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    scope = ToolScope("c1", "tool")
    task = asyncio.create_task(run(waits, scope=scope))
    await asyncio.wait_for(started.wait(), WAIT)
    scope.cancel("timeout_seconds")
    task.cancel()
    result = await asyncio.wait_for(task, WAIT)
    assert cleaned.is_set()
    assert result.error is not None
    assert result.error.code is Code.CANCELLED
    assert "timeout_seconds" in result.error.message


async def test_a_sync_handler_sees_that_its_call_was_taken_back() -> None:
    started = threading.Event()

    def waits(ctx) -> str:  # type: ignore[no-untyped-def]
        started.set()
        assert ctx.cancelled.wait(WAIT)
        ctx.raise_if_cancelled()
        return "not reached"

    scope = ToolScope("c1", "tool")
    task = asyncio.create_task(run(waits, scope=scope))
    assert await asyncio.to_thread(started.wait, WAIT)
    scope.cancel()
    result = await asyncio.wait_for(task, WAIT)
    assert result.error is not None
    assert result.error.code is Code.CANCELLED


async def test_a_sync_handler_cancelled_before_it_got_a_thread_does_not_run() -> None:
    ran: list[int] = []
    scope = ToolScope("c1", "tool")
    scope.cancel("caller gone")
    result = await run(lambda: ran.append(1), scope=scope)
    assert result.error is not None
    assert (result.error.code, ran) == (Code.CANCELLED, [])


async def test_an_endless_generator_ends_when_it_is_cancelled() -> None:
    scope = ToolScope("c1", "tool", send_progress=lambda _: scope.cancel())
    closed: list[int] = []

    def endless() -> Iterator[str]:
        try:
            while True:
                yield "x"
        finally:
            closed.append(1)

    result = await run(endless, scope=scope)
    assert result.error is not None
    assert (result.error.code, closed) == (Code.CANCELLED, [1])


def test_a_scope_reads_a_call_and_keeps_nothing_of_its_frame() -> None:
    call = pb.ToolCall(
        call_id="c",
        name="t",
        timeout_seconds=10,
        context=pb.CallContext(
            user_id="u",
            attributes={"locale": "de"},
            member_json='{"name":"Ada"}',
            messages=[pb.ContextMessage(role="user", content="hi")],
            traceparent="00-1",
        ),
    )
    scope = ToolScope.of(call)
    assert 0 < scope.time_left() <= 10
    assert scope.context.member == {"name": "Ada"}
    assert scope.context.messages[0].content == "hi"
    assert scope.context.to_wire() == call.context
    assert CallContext.from_wire(pb.CallContext(member_json="{")).member is None


def test_a_passed_deadline_leaves_no_time() -> None:
    assert ToolScope(deadline=-1.0).time_left() == 0.0


def test_progress_after_the_end_is_dropped() -> None:
    sent: list[pb.ToolProgress] = []
    scope = ToolScope("c", "t", send_progress=sent.append)
    scope.progress(1, total=2, message="half", content=[text("t")])
    scope.end()
    scope.progress(2)
    assert [(each.progress, each.total, each.message) for each in sent] == [(1, 2, "half")]
    assert "ended" in repr(scope)


def test_progress_that_is_not_unicode_is_left_out_and_the_handler_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[pb.ToolProgress] = []
    scope = ToolScope("c", "t", send_progress=sent.append)
    scope.progress(1, message="\ud83d")
    scope.progress(2)
    assert [each.progress for each in sent] == [2]
    assert "left out" in caplog.text


async def test_a_call_that_is_cancelled_takes_back_the_nested_call_for_which_its_thread_waits() -> None:
    nested: concurrent.futures.Future[Result] = concurrent.futures.Future()
    scope = ToolScope("c1", "t", caller=lambda *_: nested)
    waiting = asyncio.create_task(asyncio.to_thread(scope.call_sync, "other"))
    scope.cancel("the caller has gone")
    with pytest.raises(asyncio.CancelledError):
        await within(waiting)
    assert nested.cancelled()


async def test_a_nested_call_belongs_to_its_call() -> None:
    calls: list[tuple[str, str, CallOptions]] = []

    def caller(name: str, arguments_json: str, options: CallOptions) -> concurrent.futures.Future[Result]:
        calls.append((name, arguments_json, options))
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        future.set_result(Result(output_json="7"))
        return future

    scope = ToolScope("c1", "t", caller=caller)
    assert (await scope.call("other", {"a": 1}, timeout=2, role="r")).output == 7
    assert (await asyncio.to_thread(scope.call_sync, "other")).output == 7
    with pytest.raises(RuntimeError, match="would block the event loop"):
        scope.call_sync("other")
    assert len(calls) == 2
    assert calls[0] == ("other", '{"a":1}', CallOptions(2, "r", parent_call_id="c1"))
    assert calls[1][1] == "{}"
    with pytest.raises(RuntimeError, match="not connected to a bus"):
        await ToolScope("c1", "t").call("other")


async def test_the_result_of_a_nested_call_is_passed_on() -> None:
    part = text("t")
    assert await run(lambda: Result("other", "7", content=(part,))) == Result("c1", "7", content=(part,))
    inner = Result("other", is_error=True, error=CallError(Code.NOT_FOUND, "no tool x", Stage.NOT_DISPATCHED, True))
    error = (await run(lambda: inner)).error
    assert error == CallError(Code.TOOL, "no tool x", Stage.ACCEPTED, reason="NOT_FOUND")


async def test_closing_the_coroutine_does_not_make_a_result(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    run_sync = partial(asyncio.get_running_loop().run_in_executor, pool)
    coroutine = run_handler(spec(waits), {}, ToolScope(), run_sync)
    coroutine.send(None)
    coroutine.close()


async def test_a_thread_pool_of_the_loop_is_a_run_sync(pool: concurrent.futures.ThreadPoolExecutor) -> None:
    run_sync = partial(asyncio.get_running_loop().run_in_executor, pool)
    assert (await run_handler(spec(lambda: 5), {}, ToolScope(), run_sync)).output == 5


async def test_pictures_of_a_dict_with_images_are_content_below_their_texts() -> None:
    shot = {"data_b64": "cG5n", "mime": "image/png", "vision_prompt": "Look at the sky."}
    shown = await run(lambda: {"output": {"shot": 7}, "images": [shot, {"data_b64": "cG5n"}, {"data_b64": "?"}]})
    assert (shown.output, shown.error) == ({"shot": 7}, None)
    assert shown.content == (
        *(text("Look at the sky."), image(b"png"), image(b"png", "image/jpeg"), text("[image 3 is not base64]")),
    )
    failed = await run(lambda: {"output": None, "images": [shot], "is_error": True, "error": "TOO_DARK"})
    assert failed.error is not None
    assert (failed.error.reason, len(failed.content)) == ("TOO_DARK", 2)


@pytest.mark.parametrize(
    "returned",
    [
        {"output": 1, "images": ["a.png"]},
        {"output": 1, "images": [{"data_b64": "cG5n"}], "count": 1},
        {"images": [{"data_b64": "cG5n"}]},
        {"output": 1, "images": {"data_b64": "cG5n"}},
    ],
)
async def test_a_dict_that_only_has_a_key_images_is_an_output(returned: dict[str, Any]) -> None:
    result = await run(lambda: returned)
    assert (result.output, result.content) == (returned, ())
