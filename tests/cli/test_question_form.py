"""Fills in what a tool asks, at a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from typing import Any

import pytest

from tests.support.processes import environment
from tests.support.waiting import within
from toolbus.bus import Bus, Config
from toolbus.cli.call_command import ask_person
from toolbus.protocol.questions import DECLINED, ELICITATION, Answer, Question
from toolbus.sdk import ToolScope

FIELDS: dict[str, Any] = {
    "name": {"type": "string", "title": "Your name", "description": "as on the card"},
    "days": {"type": "integer", "minimum": 1, "default": 2},
    "size": {"type": "string", "enum": ["small", "large"]},
    "extras": {
        "type": "array",
        "items": {"anyOf": [{"const": "tea", "title": "Tea"}, {"const": "cake", "title": "Cake"}]},
    },
    "now": {"type": "boolean"},
}


def question_of(*required: str, **fields: Any) -> Question:
    schema = {"type": "object", "properties": fields, "required": list(required)}
    return Question("q", ELICITATION, {"mode": "form", "message": "Which?", "requestedSchema": schema})


class Typed:
    """A person who types these lines, and Ctrl-D behind them."""

    def __init__(self, *lines: str) -> None:
        self.prompts: list[str] = []
        self._lines = list(lines)

    async def __call__(self, prompt: str) -> str | None:
        self.prompts.append(prompt.strip())
        return self._lines.pop(0) if self._lines else None


async def test_each_field_is_asked_with_what_is_known_of_it_and_read_as_its_type() -> None:
    person = Typed("Ada", "3", "large", "tea, cake", "yes")
    answer = await ask_person(question_of("name", **FIELDS), person)
    content = {"name": "Ada", "days": 3, "size": "large", "extras": ["tea", "cake"], "now": True}
    assert answer == Answer(content=content)
    assert person.prompts == [
        "Your name (as on the card; Enter: decline):",
        "days (whole number; Enter: 2):",
        "size (one of small, large; Enter: leave it out):",
        "extras (several, with commas; one of tea (Tea), cake (Cake); Enter: leave it out):",
        "now (yes or no; Enter: leave it out):",
    ]


async def test_enter_takes_the_default_or_leaves_a_field_out_and_declines_where_it_is_required() -> None:
    assert await ask_person(question_of("name", **FIELDS), Typed("Ada", "", "", "", "")) == Answer(
        content={"name": "Ada", "days": 2}
    )
    assert await ask_person(question_of("name", **FIELDS), Typed("")) == DECLINED
    assert await ask_person(question_of("name", **FIELDS), Typed("Ada")) == DECLINED


@pytest.mark.parametrize(
    ("name", "wrong", "right", "value", "says"),
    [
        ("days", "0", "1", 1, "at least 1"),
        ("days", "two", "2", 2, "a whole number"),
        ("size", "huge", "small", "small", "small"),
        ("extras", "tea,beer", "tea", ["tea"], "cake"),
        ("now", "perhaps", "no", False, "true or false"),
    ],
)
async def test_what_does_not_fit_is_asked_again_with_the_reason(
    capsys: pytest.CaptureFixture[str], name: str, wrong: str, right: str, value: Any, says: str
) -> None:
    answer = await ask_person(question_of(name, **{name: FIELDS[name]}), Typed(wrong, right))
    assert answer == Answer(content={name: value})
    assert says in capsys.readouterr().err


async def test_a_form_without_fields_is_a_question_of_yes_or_no() -> None:
    assert await ask_person(question_of(), Typed("yes")) == Answer()
    assert await ask_person(question_of(), Typed("")) == DECLINED


@pytest.mark.parametrize(("typed", "output"), [(b"Ada\n", '"Hello Ada"'), (b"\x04", '"declined"')])
async def test_a_call_at_a_terminal_asks_what_its_tool_asks(typed: bytes, output: str) -> None:
    async with Bus(Config(grpc=("127.0.0.1:0",), http="off", data_dir=None)) as bus:

        @bus.tool
        async def greet(ctx: ToolScope) -> str:
            """Greets."""
            answer = await ctx.elicit("Who?", {"name": {"type": "string"}})
            return f"Hello {answer.content['name']}" if answer.accepted else "declined"

        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "toolbus.cli", "call", "greet", "--bus", bus.grpc_addresses[0]]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=theirs, stderr=theirs, stdout=asyncio.subprocess.PIPE, env=environment({})
        )
        os.close(theirs)
        try:
            shown = b""
            while b"name (Enter: leave it out):" not in shown:
                try:
                    shown += await within(asyncio.to_thread(os.read, ours, 65536))
                except OSError:  # how Linux reports that the command has ended
                    pytest.fail(shown.decode())
            os.write(ours, typed)
            out, _ = await within(process.communicate())
        finally:
            if process.returncode is None:
                process.kill()
            os.close(ours)
        assert b"the tool asks: Who?" in shown
        assert out.decode().strip() == output


@pytest.mark.parametrize(
    ("field", "prompt", "typed", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "x (Enter: leave it out):", "a", "a"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x (whole number; Enter: leave it out):", "3", 3),
        ({"oneOf": [{"type": "null"}, {"type": "boolean"}]}, "x (yes or no; Enter: leave it out):", "yes", True),
        ({"type": ["integer", "null"]}, "x (whole number; Enter: leave it out):", "3", 3),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, "x (one of a, b; Enter: leave it out):", "b", "b"),
        ({"type": "string", "enum": ["a", None]}, "x (one of a; Enter: leave it out):", "a", "a"),
        (
            {"type": "string", "oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]},
            *("x (one of a (A), b (B); Enter: leave it out):", "b", "b"),
        ),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "x (Enter: leave it out):", "a", "a"),
    ],
)
async def test_a_field_that_may_be_null_is_asked_without_it(
    field: dict[str, Any], prompt: str, typed: str, value: object
) -> None:
    person = Typed(typed)
    answer = await ask_person(question_of(x=field), person)
    assert person.prompts[0] == prompt
    assert answer in (Answer(content={"x": value}), DECLINED)  # the rules of forms may not know such a field
