"""A result with a field that is named like a secret is held back, however it is spelled, and nothing else is."""

from __future__ import annotations

import itertools
import json
import time
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from toolbus.errors import InvalidRequest
from toolbus.parts.tripwire import tripwire
from toolbus.parts.tripwire.tripwire import MAX_LEVELS, MAX_SHOWN, Preset, Tripwire
from toolbus.v1 import tool_pb2 as pb

# Synchronet's list, as it is and as it is not: half of it may surprise.
SYNCHRONET = [
    *("password", "passwordHash", "passwd", "secret", "client_secret", "secretary", "private_key", "api_key"),
    *("x_api_key", "token", "tokens", "max_tokens", "token_count", "tokenizer", "accessToken", "passphrase", "auth"),
    *("auth-header", "basic auth", "PASSWORD", "Api_Key", "AUTH", "auth/x"),
]
NOT_SYNCHRONET = [
    *("apiKey", "api-key", "apikey", "privateKey", "auth_header", "oauth", "authorization", "author", "bearer"),
    *("credential", "credentials", "pwd", "cookie", "session_id", "ssh_key", "access_key"),
]
SECRET = [
    *("password", "passwordHash", "passwd", "secret", "client_secret", "private_key", "api_key", "x_api_key", "token"),
    *("accessToken", "passphrase", "auth", "auth-header", "basic auth", "tokens", "apiKey", "api-key", "apikey"),
    *("privateKey", "auth_header", "oauth", "oauth2", "authorization", "authorisation", "bearer", "credential", "pwd"),
    *("credentials", "cookie", "Set-Cookie", "session_id", "sessionId", "ssh_key", "access_key", "clientSecret"),
    *("dbpassword", "authtokens", "passwordhash", "userCredentials", "api.key", "api\nkey", 'api"key', "jwt", "otp"),
    *("signing_key", "encryption_key", "masterKey", "account-key", "totp", "mfa_code", "creds", "passkey"),
    *("recovery_codes", "backupCodes", "signingkey", "password_type_secret", "next_token_secret"),
    *("APIKey", "AWS_SECRET_ACCESS_KEY", "auth:x", "my auth", "refresh_token", "密码password", "secretary_password"),
]
HARMLESS = [
    *("author", "authority", "authenticated", "secretary", "secretion", "max_tokens", "maxTokens", "maxtokens"),
    *("token_count", "tokenCount", "tokenizer", "tokenization", "prompt_tokens", "promptTokenCount", "nextPageToken"),
    *(
        "page_token",
        "pin",
        "pins",
        "signature",
        "passage",
        "compass",
        "keyboard",
        "monkey",
        "key",
        "keys",
        "public_key",
    ),
    *("next_token", "nextToken", "prev_token", "eos_token", "pad_token", "special_tokens", "token_type", "tokenType"),
    *("password_policy", "cookie_policy", "password_strength", "token_expires_at", "passwordChangedAt", "auth_type"),
    *("session", "name", "日本", "用户", "Größe", ""),
]
BOTH: list[Preset] = ["default", "synchronet"]
SUFFIX = " -- review llm_tools security policy"


def trips(text: str, preset: Preset = "default") -> bool:
    return Tripwire(preset).check("user", text) is not None


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYNCHRONET)
def test_what_synchronet_forbids_is_blocked_with_its_text(name: str) -> None:
    refusal = Tripwire("synchronet").check("user", json.dumps({name: "hunter2"}))
    assert refusal == f'llm_tools: forbidden field "<root>.{name}"{SUFFIX}'


@pytest.mark.parametrize("name", NOT_SYNCHRONET)
def test_what_synchronet_does_not_forbid_passes_there(name: str) -> None:
    assert not trips(json.dumps({name: "hunter2"}), "synchronet")


@pytest.mark.parametrize("name", SECRET)
def test_a_name_of_a_secret_is_blocked_by_default(name: str) -> None:
    assert trips(json.dumps({name: "hunter2"}))
    assert trips(json.dumps({name: "hunter2"}, ensure_ascii=False))


@pytest.mark.parametrize("name", HARMLESS)
def test_a_name_that_only_looks_like_one_passes_by_default(name: str) -> None:
    assert not trips(json.dumps({name: "x"}))


@pytest.mark.parametrize("name", [name for name in SYNCHRONET if name not in HARMLESS])
def test_the_default_is_stricter_than_synchronet(name: str) -> None:
    assert trips(json.dumps({name: "x"}))


@pytest.mark.parametrize("value", [0, -1, 12, 1.5, 1e9, True, False])
@pytest.mark.parametrize("name", ["token", "tokens", "user_tokens", "pass"])
def test_a_count_of_tokens_is_not_a_secret(name: str, value: object) -> None:
    text = json.dumps({name: value})
    for same in (text, text[:-1], json.dumps([{name: value, "x": 1}], indent=1)):
        assert not trips(same)
    assert trips(json.dumps({name: str(value)}))
    assert trips(json.dumps({f"{name}_secret": value})) is not isinstance(value, bool)


@pytest.mark.parametrize(
    "text", ['{"password":null}', '{"has_password": false ,"x":1}', '[{"password_required":true}]']
)
def test_true_false_and_null_are_not_secrets_by_default(text: str) -> None:
    assert not trips(text)
    assert not trips(json.dumps({"body": f"it is: {text}"}))
    assert trips(text, "synchronet")


@pytest.mark.parametrize("preset", BOTH)
def test_the_name_of_an_error_code_is_not_a_secret(preset: Preset) -> None:
    assert not trips('{"outcomes":{"OK":3,"SECRET_BLOCKED":1}}', preset)
    assert trips('{"outcomes":{"secret_blocked":"x"}}', preset)


@pytest.mark.parametrize("text", ['{"token":1x}', '{"token":[1]}', '{"token":', '{"token":nulls}', '{"token":truer}'])
def test_a_value_under_token_that_is_not_a_number_is_blocked(text: str) -> None:
    assert trips(text)


# -- spellings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", BOTH)
@pytest.mark.parametrize(
    "field",
    [
        r'"p\u0061ssword"',
        r'"\u0050\u0041\u0053\u0053\u0057\u004f\u0052\u0044"',
        '"ｐａｓｓｗｏｒｄ"',
        r'"\uff50\uff41\uff53\uff53word"',
        '"pass\u200bword"',
        r'"pass\u200bword"',
        r'"pass\u0000word"',
        '"pass\u00adword"',
        '"p\u0308assword"',
        '"𝐩𝐚𝐬𝐬𝐰𝐨𝐫𝐝"',
        r'"\ud835\udc29assword"',
        r'"password\ud800"',
        '"password\ud800"',
        '"我的password"',
        r'"password\"s"',
        r'"password\/\\\n"',
        '"password"\n\t ',
        '"a":1,"password"',
    ],
)
def test_a_disguised_name_is_blocked(field: str, preset: Preset) -> None:
    for text in (f'{{{field}:"hunter2"}}', json.dumps({"text": f'{{{field}:"hunter2"}}'}, ensure_ascii=False)):
        refusal = Tripwire(preset).check("user", text)
        assert refusal is not None
        refusal.encode()
        assert refusal.isprintable()
        assert "hunter2" not in refusal


def test_every_letter_that_folds_to_ascii_or_to_nothing_makes_a_name_suspect() -> None:
    missed = []
    for number in (*range(0x7F, 0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200)):
        letter = chr(number)
        if unicodedata.category(letter) in ("Cn", "Co") or tripwire._undisguised(letter) == letter:
            continue
        folded = tripwire._undisguised(letter)
        if folded == "" or any(each.isascii() and each.isalnum() for each in folded):
            text = f'{{"a{letter}":1}}'
            if tripwire._finds_none(text) or tripwire._finds_none(json.dumps(text)):
                missed.append(f"{number:x}")
    assert missed == []


# -- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"token":"x"}', "<root>.token"),
        ('{"user":{"token":"x"}}', ".user.token"),
        ('[{"token":"x"}]', ".0.token"),
        ('{"a":[1,[],{"b":2},{"c":{"token":"x"}}]}', ".a.3.c.token"),
        ('{"a":{"b":{}},"c,{[":"}]","d":{"token":"x","password":"y"}}', ".d.token"),
        ('{"token":{"password":"x"}}', "<root>.token"),
        (json.dumps('{"token":"x"}'), "<root>.token"),
        (json.dumps({"body": json.dumps([{"token": "x"}])}), ".body.0.token"),
        (json.dumps([1, " \n" + json.dumps({"a": json.dumps({"token": "x"})})]), ".1.a.token"),
        (r'"\u007b\u0022token\u0022:\u0022x\u0022\u007d"', "<root>.token"),
        ('{"a":{"token":"x"},"a":1}', ".a.token"),
        ('{"token":NaN,"b":1', "<root>.token"),
        ('{"b":"x"}\n{"token":"x"}', "<root>.token"),
    ],
)
def test_the_error_names_the_path(text: str, field: str) -> None:
    assert Tripwire("synchronet").check("user", text) == f'llm_tools: forbidden field "{field}"{SUFFIX}'


def test_a_path_that_is_too_long_is_shortened() -> None:
    deep = "[" * 500 + '{"token":"x"}'
    refusal = Tripwire("synchronet").check("user", deep)
    assert refusal is not None
    assert refusal.endswith(f'.0.0.token"{SUFFIX}')
    far = "[" + "1," * tripwire.MAX_TOKENS + '{"token":"x"}]'
    assert Tripwire("synchronet").check("user", far) == f'llm_tools: forbidden field ".….token"{SUFFIX}'


def test_the_second_of_two_fields_of_one_name_does_not_hide_the_first() -> None:
    assert trips('{"token":"hunter2","token":1}')
    assert trips('{"token":1,"token":"hunter2"}')


def test_the_default_error_names_tool_field_rule_and_how_to_fix_it_and_no_value() -> None:
    refusal = Tripwire().check("user", '{"user":{"apiKey":"hunter2"}}')
    assert refusal is not None
    assert "'user'" in refusal
    assert "'.user.apiKey'" in refusal
    assert "preset default" in refusal
    assert "[tripwire_allow] in the bus's configuration file" in refusal
    assert "hunter2" not in refusal


def test_a_name_that_holds_its_value_does_not_show_it() -> None:
    for preset in BOTH:
        refusal = Tripwire(preset).check("user", '{"password=hunter2":1}')
        assert refusal is not None
        assert "hunter2" not in refusal


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "12", '""', "{}", "[]", "password", "password: hunter2", '"my password is: x"', '"', "\\", "{"),
        json.dumps({"note": 'the "password": it is "x"', "b": "token"}),
        json.dumps("[1] see the \"password\": 'x'"),
        json.dumps(["password", "token", {"name": "secret"}]),
    ],
)
def test_values_and_plain_texts_are_not_judged(text: str) -> None:
    for preset in BOTH:
        assert not trips(text, preset)


def test_json_in_texts_is_read_to_a_bounded_depth() -> None:
    text = json.dumps({"token": "x"})
    for _ in range(MAX_LEVELS - 1):
        text = json.dumps({"inner": text})
        assert trips(text)
    assert not trips(json.dumps({"inner": text}))


# -- exceptions ------------------------------------------------------------------------------------------------------


def test_an_allowed_name_passes_for_its_tool_only_and_as_it_is_written() -> None:
    guard = Tripwire(allow={"pages": frozenset({"auth_token"}), "shop:buy": frozenset({"cookie"})})
    text = '{"auth_token":"abc"}'
    assert guard.check("pages", text) is None
    assert guard.check("web:pages", text) is None
    assert guard.check("other", text)
    assert guard.check("pages", '{"Auth_Token":"abc"}')
    assert guard.check("pages", '{"auth_token":"abc","password":"x"}')
    assert guard.check("shop:buy", '{"cookie":"x"}') is None
    assert guard.check("buy", '{"cookie":"x"}')


@pytest.mark.parametrize("allow", [{"pages": "token"}, {"pages": 1}, {"pages": ["token", 1]}, {"pages": {"a": 1}.get}])
def test_a_wrong_allow_list_is_refused(allow: Any) -> None:
    with pytest.raises(InvalidRequest, match="allow-list for tool 'pages'"):
        Tripwire(allow=allow)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'lax' does not exist: use default or synchronet"):
        Tripwire("lax")  # type: ignore[arg-type]


def test_a_result_is_checked_in_all_that_a_model_reads_of_it() -> None:
    leak = '{"token":"hunter2"}'
    text = pb.ContentBlock(text=pb.TextContent(text=f" {leak}"))
    guard = Tripwire()
    assert guard.check_result("user", pb.ToolResult(output_json=leak))
    assert guard.check_result("user", pb.ToolResult(output_json="{}", content=[pb.ContentBlock(), text]))
    assert guard.check_result("user", pb.ToolResult(error=pb.CallError(message=leak)))
    assert guard.check_result("user", pb.ToolResult(error=pb.CallError(reason=leak)))
    prose = pb.ContentBlock(text=pb.TextContent(text='see "token": x and {1}'))
    assert guard.check_result("user", pb.ToolResult(output_json='{"a":1}', content=[prose])) is None
    assert guard.check_result("user", pb.ToolResult()) is None


@pytest.mark.parametrize("preset", BOTH)
@pytest.mark.parametrize(
    "text",
    [
        'tool exec: {"password": "hunter2"}',
        'Here: {"api_key": "hunter2"} ok',
        'Rows:\n[{"a": 1, "token": "hunter2"}]',
        '5" of {"a": "b"} and it\'s 6" of { "b": 1, "token" : "hunter2"}',
        'HTTP 400: {"error": "{\\"token\\": \\"hunter2\\"}"}',
    ],
)
def test_json_after_other_text_is_judged_wherever_the_text_is(text: str, preset: Preset) -> None:
    leaks = [
        pb.ToolResult(output_json=json.dumps(text)),
        pb.ToolResult(output_json=json.dumps({"error": text})),
        pb.ToolResult(output_json="{}", content=[pb.ContentBlock(text=pb.TextContent(text=text))]),
        pb.ToolResult(error=pb.CallError(message=text)),
    ]
    for leak in leaks:
        refusal = Tripwire(preset).check_result("user", leak)
        assert refusal is not None
        assert "hunter2" not in refusal


def test_checking_a_result_does_not_change_it() -> None:
    result = pb.ToolResult(output_json="{}")
    Tripwire().check_result("user", result)
    assert not result.HasField("error")


# -- whatever is sent ------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(SECRET)
harmless = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(HARMLESS), inner, max_size=3),
    max_leaves=12,
)
WORDS = [*SECRET, *HARMLESS, *SYNCHRONET, "a", "_", "-", "K", "字", "\u200b", '"', "\\", "\n", "é", ":", "0"]
names = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map("".join)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)


def written(value: Any, spelling: int, wraps: int) -> str:
    text = json.dumps(value, ensure_ascii=bool(spelling & 1), indent=2 if spelling & 2 else None)
    for _ in range(wraps):
        text = json.dumps(text if spelling & 4 else {"text": text}, ensure_ascii=bool(spelling & 1))
    return text


@given(harmless, st.integers(0, 7), st.integers(0, MAX_LEVELS - 1))
def test_harmless_names_never_trip(value: Any, spelling: int, wraps: int) -> None:
    assert not trips(written(value, spelling, wraps))


@given(
    st.sampled_from(SECRET),
    st.lists(st.sampled_from([*HARMLESS, 0, 2]), max_size=6),
    harmless,
    st.integers(0, 7),
    st.integers(0, MAX_LEVELS - 1),
)
def test_a_secret_at_any_depth_trips_and_its_value_is_not_shown(
    name: str, path: list[Any], beside: Any, spelling: int, wraps: int
) -> None:
    value: Any = {"beside": beside, name: "hunter2"}
    for step in path:
        value = [beside] * step + [value] if isinstance(step, int) else {"other": beside, step: value}
    refusal = Tripwire().check("user", written(value, spelling, wraps))
    assert refusal is not None
    assert "hunter2" not in refusal
    assert len(refusal) < 2 * MAX_SHOWN + 400
    refusal.encode()


def named_like_secrets(value: Any, preset: Preset) -> bool:
    """What the rule says of a value that a parser read."""
    if isinstance(value, list):
        return any(named_like_secrets(each, preset) for each in value)
    if not isinstance(value, dict):
        return False
    is_secret = tripwire._is_secret_by_default if preset == "default" else tripwire._is_secret_for_synchronet
    return any(
        is_secret(name, "" if isinstance(each, str | list | dict) else json.dumps(each)[0])
        or named_like_secrets(each, preset)
        for name, each in value.items()
    )


@settings(max_examples=examples(75))
@given(anything, st.sampled_from(BOTH), st.integers(0, 7), st.integers(0, MAX_LEVELS - 1))
def test_reading_the_text_finds_what_a_parser_would(value: Any, preset: Preset, spelling: int, wraps: int) -> None:
    assert trips(written(value, spelling, wraps), preset) == named_like_secrets(value, preset)


@settings(max_examples=examples(75))
@given(
    st.text()
    | st.lists(
        st.sampled_from([*'{}[]",:\\ \n', "\\u", "0061", "\ud800", '"token"', "password", "1"]), max_size=30
    ).map("".join),
    st.sampled_from(BOTH),
)
def test_any_text_is_accepted_or_refused_with_an_error(text: str, preset: Preset) -> None:
    refusal = Tripwire(preset).check(text, text)
    assert refusal is None or refusal.encode()


def _names(count: int) -> Iterable[str]:
    return ("".join(letters) for letters in itertools.islice(itertools.product("abcdefghijklmn", repeat=5), count))


SUSPECT = '"\\u0041":1,'  # so that the rest is read
# Each of a number of thousands of parts, made when it is needed.
BOMBS: dict[str, Callable[[int], str]] = {
    "brackets": lambda number: SUSPECT + "[" * (3 * number),
    "brackets before a secret": lambda number: "[" * (3 * number) + '"token":"x"',
    "fields": lambda number: SUSPECT + '"":' * number,
    "texts": lambda number: SUSPECT + '"",' * number,
    "texts like JSON": lambda number: SUSPECT + '"[a' * number,
    "escaped quotes": lambda number: SUSPECT + '"' + '\\"' * (2 * number) + "\\",
    "backslashes": lambda number: SUSPECT + '"' + "\\" * (3 * number),
    "one long name": lambda number: '{"' + "tokens" * number + '\u200b":1}',
    "words": lambda number: "token" * number + '"token"' * (number // 2),
    "spaces": lambda number: SUSPECT + '"a"' + " " * (3 * number),
    "numbers": lambda number: SUSPECT + '"token":' + "1" * (3 * number),
    "ones": lambda number: SUSPECT + "1," * (2 * number),
    "many names": lambda number: "{" + ",".join(f'"tokens_{each}":1' for each in range(number)) + "}",
    "many different names": lambda number: "{" + ",".join(f'"token{name}":1' for name in _names(number)) + "}",
    "many names of no secret": lambda number: "{" + SUSPECT + ",".join(f'"{name}":1' for name in _names(number)) + "}",
    "many long names": lambda number: (
        "{" + ",".join(f'"{"tokens_max" * 90}{name}":1' for name in _names(number // 75)) + "}"
    ),
    "many names in need of a closer look": lambda number: (
        "{" + ",".join(f'"{"ö" * 900}{name}":1' for name in _names(number // 75)) + "}"
    ),
    "many texts": lambda number: "[" + SUSPECT + ",".join(f'"[{name}"' for name in _names(number)) + "]",
    "many texts with escapes": lambda number: (
        "[" + SUSPECT + ",".join(f'"{name}\\u0041"' for name in _names(number)) + "]"
    ),
    "objects in a text": lambda number: json.dumps("see " + '{"A\u200b":1} ' * number),
    "quotes in a text": lambda number: json.dumps('see {"A\u200b":1} ' + ',"' * (2 * number)),
    "levels": lambda number: json.dumps(json.dumps(json.dumps(json.dumps({"a\u200b": "x" * (3 * number)})))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_time_is_in_proportion_to_the_text(name: str) -> None:
    text, before = BOMBS[name](75_000), time.process_time()
    for preset in BOTH:
        Tripwire(preset).check("user", text)
    assert time.process_time() - before < 6.0  # 0.5 s at worst on a busy machine; squared, it would be minutes


def test_a_result_that_takes_too_long_to_judge_is_blocked_and_the_error_says_why() -> None:
    for name in ("many different names", "many names of no secret", "many texts"):
        refusal = Tripwire().check("user", BOMBS[name](120_000))
        assert refusal is not None
        assert "too many different fields" in refusal
        assert "Return less of it at once" in refusal
    assert Tripwire().check("user", json.dumps({f"tokens_{number}": 1 for number in range(25_000)})) is None
    assert Tripwire().check("user", json.dumps([{"prompt_tokens": n, "größe": n} for n in range(50_000)])) is None


def test_most_results_are_not_read_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tripwire, "_refusal", lambda *_: pytest.fail("it was read"))
    for value in ({"city": "Bern", "note": "your password"}, [{"作者": "x", "key": 1}], "the token: x", {"a": "密码"}):
        assert Tripwire().check("user", json.dumps(value, ensure_ascii=False)) is None
