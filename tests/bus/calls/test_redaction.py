"""Tests that what looks like a secret is taken out of texts that people look at; everything else stays as it is."""

from __future__ import annotations

import json
import string
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from toolbus.bus.calls.call_records import HIDDEN, MAX_PARSED, is_secret_name, redacted

MOST = 4_096

SECRET_NAMES = """
    password Password PASSWORD passwordHash password2 userPassword user_password DBPassword DB_PASSWORD passwd pwd
    passphrase passcode clientSecret client_secret secret secrets x-api-key X-API-Key apiKey APIKey api_key apikey
    openai_api_key privateKey private_key accessKey AWS_SECRET_ACCESS_KEY ssh_key Authorization auth auth_header
    proxy-authorization oauth oauth2 bearerToken token tokens accessToken refresh_token access_token2 cookie cookies
    Set-Cookie sessionId session_id sessionid credentials credential signature pin otp jwt used_password
""".split()  # noqa: SIM905 – as a list, the names would fill a page
OTHER_NAMES = """
    author authored_by authority authenticated max_tokens maxTokens token_count tokenCount total_tokens totalTokens
    prompt_tokens completion_tokens cached_tokens tokens_used token_limit tokenizer secretary spin pins pinned opinion
    keyboard monkey key keys primary_key passage compass passenger bypass session desk description name
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_name_of_a_secret_is_recognized_however_it_is_spelled(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["paſſword", "to\u212aen", "pın", "SECRET", "accesſKey"])
def test_a_name_of_a_secret_is_recognized_in_letters_that_fold_to_others(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_that_only_resembles_one_is_not_a_secret(name: str) -> None:
    assert not is_secret_name(name)


# -- JSON ------------------------------------------------------------------------------------------------------------


def test_values_of_secret_keys_are_hidden_whatever_they_are_and_nothing_else_is() -> None:
    text = json.dumps(
        {
            "city": "Bern",
            "password": "hunter2",
            "pin": 1234,
            "auth": {"user": "ann", "key": "abc"},
            "list": [{"token": ["a", "b"]}, 1.5, None, True],
            "secret": None,
            "cookie": "",
            "max_tokens": 100,
            "日本": "語",
        }
    )
    assert json.loads(redacted(text, MOST)) == {
        "city": "Bern",
        "password": HIDDEN,
        "pin": HIDDEN,
        "auth": HIDDEN,
        "list": [{"token": HIDDEN}, 1.5, None, True],
        "secret": None,
        "cookie": "",
        "max_tokens": 100,
        "日本": "語",
    }
    assert redacted('"日本語"', MOST) == '"日本語"'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("password=hunter2 and more", f"password={HIDDEN} and more"),
        ("DB_PASSWORD=hunter2", f"DB_PASSWORD={HIDDEN}"),
        ("client_secret: abc, x", f"client_secret: {HIDDEN} x"),
        ("my api key: abc", f"my api key: {HIDDEN}"),
        ("x: y: password=abc", f"x: y: password={HIDDEN}"),
        ("password='a b' more", f"password={HIDDEN} more"),
        ("password => abc", f"password => {HIDDEN}"),
        ("Authorization: Bearer abc more", f"Authorization: {HIDDEN} more"),
        ("sent bearer abc.def", f"sent bearer {HIDDEN}"),
        ("basic dXNlcjpwYXNzd29yZA==", f"basic {HIDDEN}"),
        ("BEARER abc", f"BEARER {HIDDEN}"),
        ("baſic dXNlcjpwYXNzd29yZA", f"baſic {HIDDEN}"),
        ("sk-abcdefghijkl", HIDDEN),
        ("sk-abcdefghijk", "sk-abcdefghijk"),
        ("sk-abcdefghijklmnop", HIDDEN),
        ("given tbk_4f2a91c0_abcdefghijklmnop to Ann", f"given {HIDDEN} to Ann"),
        ("ghp_abcdefghijklmnop and xoxb-abcdefghijklmnop", f"{HIDDEN} and {HIDDEN}"),
        ("https://ann:hunter2@example.com/x", "https://ann:***@example.com/x"),
        ('{"clientSecret": "a b", "x": 1', f'{{"clientSecret": {HIDDEN}, "x": 1'),
        ('{"password": ["a", {"b": "c"}], "x', f'{{"password": {HIDDEN}'),
        (r"{\"password\": \"a b\", \"x\": 1", rf"{{\"password\": {HIDDEN}, \"x\": 1"),
        ("a basic idea, and a skeleton.png.backup", "a basic idea, and a skeleton.png.backup"),
        ("the author: ann, max_tokens=5", "the author: ann, max_tokens=5"),
        ("", ""),
    ],
)
def test_in_plain_texts_the_value_after_a_secret_name_is_hidden(text: str, shown: str) -> None:
    assert redacted(text, MOST) == shown
    if not text.startswith("{"):
        assert json.loads(redacted(json.dumps({"x": text}), MOST)) == {"x": shown}


def test_a_long_text_is_shortened_and_one_too_long_to_be_searched_is_not_shown() -> None:
    assert redacted("x" * 100, 10) == "x" * 9 + "…"
    assert redacted("x" * 10, 10) == "x" * 10
    assert redacted("x" * (MAX_PARSED + 1), MOST) == f"[{MAX_PARSED + 1} characters]"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"a":',
        "[" * 60_000,
        '{"a":' * 10_000,
        "1" * 60_000,
        '"\\ud800"',
        "\ud800",
        "NaN",
        "[1e999]",
        "\x00",
        "\\u",
    ],
)
def test_whatever_a_peer_sends_can_be_shown(text: str) -> None:
    shown = redacted(text, MOST)
    shown.encode()
    assert len(shown) <= MOST


@pytest.mark.parametrize(
    "part",
    [
        "token ",
        "a:",
        "a-",
        "a=b",
        "password=",
        'password:"',
        "password='\\",
        "token\\",
        "bearer ",
        "http://",
        "@:",
        "sk-",
    ],
)
def test_no_text_takes_long_to_search(part: str) -> None:
    text = part * (MAX_PARSED // len(part))
    began = time.process_time()
    redacted(text, MOST)
    redacted("token" + text[: MAX_PARSED - 5], MOST)
    assert time.process_time() - began < 2.0  # quadratic, it would be 60


SECRET = st.text(string.ascii_letters + string.digits + "!#$%()*+-./<>?[]^_{|}~,;&", min_size=9, max_size=30).map(
    lambda text: f"Zq{text}qZ"
)
PLAIN = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)


@st.composite
def hiding(draw: st.DrawFn, secret: str) -> Any:
    """Draws something of JSON with a secret somewhere under a key that names one."""
    holds = draw(st.sampled_from([secret, [secret], {"value": secret}, [{"a": [secret]}]]))
    value: Any = {draw(st.sampled_from(SECRET_NAMES)): holds}
    for _ in range(draw(st.integers(0, 8)) * draw(st.sampled_from([1, 1, 6]))):
        value = {draw(st.text(max_size=3)): draw(PLAIN), "x": value} if draw(st.booleans()) else [draw(PLAIN), value]
    return value


@settings(max_examples=examples(75))
@given(st.data(), SECRET, st.booleans())
def test_a_secret_under_a_key_that_names_one_is_never_shown(data: st.DataObject, secret: str, spaced: bool) -> None:
    text = json.dumps(data.draw(hiding(secret)), separators=None if spaced else (",", ":"))
    for shown in (redacted(text, MOST), redacted(json.dumps({"body": text}), MOST)):
        assert secret not in shown
        assert "Zq" not in shown


@settings(max_examples=examples(75))
@example(name="token", sign="=", around=("N", ""), secret="Zq000000000qZ")
@given(
    name=st.sampled_from(SECRET_NAMES),
    sign=st.sampled_from(["=", ": ", ":", " = ", "=>", '="', "='", "': '"]),
    around=st.tuples(st.text(max_size=20), st.text(max_size=20)),
    secret=SECRET,
)
def test_a_secret_after_its_name_in_a_text_is_never_shown(
    name: str, sign: str, around: tuple[str, str], secret: str
) -> None:
    close = sign[-1] if sign[-1] in "\"'" else ""
    text = f"{around[0]} {name}{sign}{secret}{close} {around[1]}"
    for sent in (text, json.dumps(text), json.dumps([{"said": text}]), json.dumps({text: 1})):
        assert secret not in redacted(sent, MOST)


@settings(max_examples=examples(75))
@given(st.text(max_size=300), st.integers(1, 400))
def test_any_text_at_all_becomes_one_that_can_be_printed_and_is_short_enough(text: str, most: int) -> None:
    shown = redacted(text, most)
    shown.encode()
    assert len(shown) <= most
