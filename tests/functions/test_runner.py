"""Whatever a handler does, it ends in exactly one result (REST-62)."""

import asyncio
import concurrent.futures
import dataclasses
import datetime
import math
import re
import threading
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pydantic
import pytest

from tests.functions.runner_cases import Color, run, spec
from tests.support.waiting import WAIT_SECONDS, within
from toolbus.errors import Code, NotAudited, NotKept, Stage, ToolBusError
from toolbus.functions.call_context import CallOptions
from toolbus.functions.runner import run_handler
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk import CallContext, Reply, ToolScope, audio, image, link, resource, text
from toolbus.v1 import tool_pb2 as pb


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield pool


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
        ({}, Code.INVALID_ARGUMENTS, "TypeError: tool() is missing 'city' (it takes city, days)"),
        (
            {"city": "a", "town": "b"},
            Code.INVALID_ARGUMENTS,
            "TypeError: tool() takes no argument 'town' (it takes city, days)",
        ),
        ("[1]", Code.INVALID_ARGUMENTS, "not a JSON object"),
        ("{", Code.INVALID_ARGUMENTS, "not a JSON object"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused_without_running_the_handler(
    arguments: Any, code: Code, words: str
) -> None:
    result = await run(weather, arguments)
    assert result.error is not None
    assert (result.error.code, result.error.stage) == (code, Stage.NOT_DISPATCHED)
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


class Trip(pydantic.BaseModel):
    days: int

    @pydantic.field_validator("days")
    @classmethod
    def _whole_weeks(cls, days: int) -> int:
        if days % 7:
            raise ValueError("choose whole weeks")
        return days


class ValidationError(Exception):
    """As pydantic 1 raises it."""

    def errors(self) -> list[Any]:
        return []


@dataclasses.dataclass
class OldTrip:
    days: int

    def __post_init__(self) -> None:
        raise ValidationError("choose whole weeks")


async def test_a_value_that_a_model_of_another_library_refuses_is_named_too() -> None:
    def tool(trip: OldTrip) -> None: ...

    error = (await run(tool, {"trip": {"days": 3}})).error
    assert error is not None
    assert (error.code, error.message) == (
        Code.INVALID_ARGUMENTS,
        "ValidationError: argument 'trip': choose whole weeks",
    )


async def test_a_value_that_its_type_refuses_is_named_with_the_rule() -> None:
    def tool(
        trip: Trip = Trip(days=7),  # noqa: B008
        day: datetime.date = datetime.date.min,
        key: uuid.UUID = uuid.UUID(int=0),  # noqa: B008
    ) -> None: ...

    async def refused(arguments: dict[str, Any]) -> str:
        error = (await run(tool, arguments)).error
        assert error is not None
        assert error.code is Code.INVALID_ARGUMENTS
        return error.message

    sentence = await refused({"trip": {"days": 3}})
    assert re.fullmatch("ValidationError: argument 'trip': days: .*choose whole weeks", sentence)
    sentence = await refused({"day": "2026-02-30"})
    assert sentence.startswith("ValueError: argument 'day': '2026-02-30' is not a date (")
    assert sentence.endswith("): write it as 2026-01-31")
    assert (await refused({"key": "k-1"})).startswith("ValueError: argument 'key': 'k-1': ")


async def test_an_error_of_several_tasks_names_each_of_them() -> None:
    async def find(city: str) -> None:
        raise LookupError(f"no city {city}")

    async def tool(cities: list[str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for city in cities:
                tasks.create_task(find(city))

    one = (await run(tool, {"cities": ["Osla"]})).error
    assert one is not None
    assert (one.reason, one.message) == ("LookupError", "LookupError: no city Osla")
    two = (await run(tool, {"cities": ["Osla", "Romo"]})).error
    assert two is not None
    assert two.reason == "ExceptionGroup"
    assert two.message.endswith(": LookupError: no city Osla; LookupError: no city Romo")


@pytest.mark.parametrize("kind", [NotKept, NotAudited])
async def test_a_full_disk_is_not_the_fault_of_the_tool_and_logs_no_traceback(
    kind: type[ToolBusError], caplog: pytest.LogCaptureFixture
) -> None:
    async def permit() -> None:
        raise kind("the disk is full: make room")

    error = (await run(permit)).error
    assert error is not None
    assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.ACCEPTED, False)
    assert (error.reason, error.message) == (kind.__name__, f"{kind.__name__}: the disk is full: make room")
    assert not caplog.records


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
    await within(started.wait())
    scope.cancel("timeout_seconds")
    task.cancel()
    result = await within(task)
    assert cleaned.is_set()
    assert result.error is not None
    assert result.error.code is Code.CANCELLED
    assert "timeout_seconds" in result.error.message


async def test_a_sync_handler_sees_that_its_call_was_taken_back() -> None:
    started = threading.Event()

    def waits(ctx) -> str:  # type: ignore[no-untyped-def]
        started.set()
        assert ctx.cancelled.wait(WAIT_SECONDS)
        ctx.raise_if_cancelled()
        return "not reached"

    scope = ToolScope("c1", "tool")
    task = asyncio.create_task(run(waits, scope=scope))
    assert await asyncio.to_thread(started.wait, WAIT_SECONDS)
    scope.cancel()
    result = await within(task)
    assert result.error is not None
    assert result.error.code is Code.CANCELLED


async def test_what_a_plain_function_hands_back_after_the_cancel_of_its_call_ends_where_it_first_waits() -> None:
    seen = []

    async def wait() -> None:
        seen.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("ended")

    def begin() -> Any:
        scope.cancel("timeout_seconds")  # while the function runs on its thread
        return wait()

    scope = ToolScope("c1", "tool")
    result = await within(run(begin, scope=scope))
    assert seen == ["begun", "ended"]
    assert result.error is not None
    assert (result.error.code, result.error.message) == (
        Code.CANCELLED,
        "the call of tool was cancelled: timeout_seconds",
    )


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


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (Result(output_json={"a": 1}), "Result.output_json is of type dict, not a text: return"),  # type: ignore[arg-type]
        (Result(content=("x",)), "Result.content holds a str"),  # type: ignore[arg-type]
        (Result(input_requests_json="{}", request_state=7), "Result.request_state is of type int"),  # type: ignore[arg-type]
    ],
)
async def test_a_result_that_a_handler_made_of_other_values_is_an_error_with_the_reason(
    returned: Result, words: str
) -> None:
    error = (await run(lambda: returned)).error
    assert error is not None
    assert error.code is Code.TOOL
    assert words in error.message


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
