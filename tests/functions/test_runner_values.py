import datetime
import json
import logging
import math
import pathlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.functions.runner_cases import Color, run
from toolbus.errors import Code, Stage
from toolbus.functions.reply import dump_output
from toolbus.functions.runner import MAX_MESSAGE
from toolbus.protocol.tool import Result
from toolbus.sdk import Err, Ok, Reply


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
