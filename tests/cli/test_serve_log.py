"""The log of ``toolbus serve``."""

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.serve_settings import settle
from toolbus.cli import serve_command


def test_the_log_of_a_bus_has_no_line_for_each_request_to_a_sidecar() -> None:
    names = ("httpx", "uvicorn", "asyncio")
    before = [logging.getLogger(name).level for name in names]
    try:
        serve_command.log_to_stderr(settle({}, {}, None))
        assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
    finally:
        for name, level in zip(names, before, strict=True):
            logging.getLogger(name).setLevel(level)


def _formatted(text: str, *arguments: object, as_json: bool = False, **fields: Any) -> str:
    """Returns what the log of a bus shows of one record."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), _root_handlers():
        serve_command.log_to_stderr(settle({"log_json": as_json}, {}, None))
        logging.getLogger("toolbus.trial").warning(text, *arguments, **fields)
    return stderr.getvalue()


@contextlib.contextmanager
def _root_handlers() -> Iterator[None]:
    """Puts the handlers and levels of the logging module back at the end."""
    loggers = [logging.getLogger(name) for name in ("", "uvicorn", "httpx", "asyncio")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    loggers[0].handlers.clear()
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers


FORGED = "x\n12:00:00 info toolbus.sessions: attached source=operator\r\x1b]0;owned\x07\x9b31m\u202e\u2028y\x85z"


def test_a_text_of_a_peer_stays_within_its_line_and_cannot_change_the_terminal() -> None:
    shown = _formatted("attached instance=%s", FORGED, extra={"role": FORGED})
    assert shown.count("\n") == 1
    assert shown.endswith("\n")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", shown)
    assert 'role="x\\n12:00:00 info' in shown


def test_a_value_of_a_field_cannot_look_like_another_field() -> None:
    shown = _formatted("slow", extra={"tool": 'x outcome=OK call_id="1', "source": "weather", "seconds": 1.25})
    assert shown.endswith('slow tool="x outcome=OK call_id=\\"1" source=weather seconds=1.25\n')


def test_lines_of_an_exceptions_message_and_stack_are_indented_below_its_record() -> None:
    try:
        raise RuntimeError(FORGED)
    except RuntimeError:
        shown = _formatted("failed", exc_info=True, stack_info=True)
    first, *others = shown.splitlines()
    assert first.endswith("warning toolbus.trial: failed")
    assert "  Traceback (most recent call last):" in others
    assert "  Stack (most recent call last):" in others
    assert "  12:00:00 info toolbus.sessions: attached source=operator" in others
    assert all(line.startswith("  ") for line in others)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", shown)


def test_the_fields_of_a_call_are_keys_of_the_json_log() -> None:
    principal = Principal("chat")
    fields = call_fields("c-1", "get_weather", "weather", principal, trace_id="ab", seconds=1.5, outcome="OK")
    line = json.loads(_formatted("slow call", as_json=True, extra=fields))
    assert {key: line[key] for key in ("message", *fields)} == {
        "message": "slow call",
        "call_id": "c-1",
        "tool": "get_weather",
        "source": "weather",
        "identity": "chat",
        "trace_id": "ab",
        "seconds": 1.5,
        "outcome": "OK",
    }


def test_the_log_as_json_lines_escapes_what_could_change_a_terminal() -> None:
    shown = _formatted("attached instance=%s", FORGED, as_json=True)
    assert shown.count("\n") == 1
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", shown)
    assert json.loads(shown)["message"] == f"attached instance={FORGED}"
