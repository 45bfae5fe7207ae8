"""Globals of browsers that scripts have: what they answer is what Node.js 20 answers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parts.dropin.javascript.test_engine import SECONDS, Scope
from toolbus.parts.dropin.javascript import EngineLimits, ScriptError, random_key
from toolbus.protocol.tool import MIB

# Expressions, and their values.
ANSWERS = [json.loads(line) for line in Path(__file__).with_name("web_globals.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def web() -> Iterator[Scope]:
    scope = Scope(EngineLimits(heap_bytes=64 * MIB, turn_seconds=SECONDS))
    scope.engine.install("web.js", random_key())
    scope.tool("return Promise.resolve((0, eval)(args)).then(value => JSON.stringify(value))")
    yield scope
    scope.engine.close()


@pytest.mark.parametrize(("expression", "value"), ANSWERS)
def test_a_global_of_browsers_answers_as_in_nodejs(web: Scope, expression: str, value: object) -> None:
    assert json.loads(web.call(expression)) == value


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("new URL('/x')", "TypeError: Invalid URL: /x"),
        ("new URL('http://ü/')", "TypeError: Invalid URL"),  # a host has to be written in ASCII
        ("new TextDecoder('shift_jis')", "RangeError: the encoding shift_jis does not exist here: only utf-8 does"),
        ("crypto.getRandomValues(new Uint8Array(65537))", "QuotaExceededError"),
    ],
)
def test_what_is_not_there_is_an_error(web: Scope, expression: str, error: str) -> None:
    with pytest.raises(ScriptError, match=error):
        web.call(expression)


def test_random_numbers_are_chacha20_with_the_key() -> None:
    scope = Scope(EngineLimits(turn_seconds=SECONDS))
    scope.engine.install("web.js", [0] * 8)
    scope.tool("return Array.from(crypto.getRandomValues(new Uint8Array(args)))")
    # RFC 8439, appendix A.1, test vectors 1 and 2.
    first = "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    second = "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    assert bytes(scope.call(96)).hex()[:64] == first
    assert bytes(scope.call(32)).hex()[-64:] != first
    scope.engine.close()
    scope = Scope(EngineLimits(turn_seconds=SECONDS))
    scope.engine.install("web.js", [0] * 8)
    scope.tool("return Array.from(crypto.getRandomValues(new Uint8Array(args)))")
    assert bytes(scope.call(96)).hex()[-64:] == second
    scope.engine.close()
