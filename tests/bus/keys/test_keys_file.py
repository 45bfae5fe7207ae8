"""Tests how ``keys.toml`` is read: what it may hold, and which error a slip gets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from toolbus.bus.keys.keys_file import parse_keys
from toolbus.errors import SetupError

KEY = 'identity = "chat"\nkind = "token"\nsha256 = "' + "a" * 64 + '"\n'


def test_days_and_times_are_read_as_utc_and_a_key_without_end_never_expires() -> None:
    file = parse_keys(
        (
            f"[keys.a]\n{KEY}expires = 2027-02-20\ncreated = 2027-01-01\nrevoked = 2027-01-02T10:00:00Z\n"
            f"[keys.b]\n{KEY.replace('aaaa', 'bbbb')}expires = 2027-02-20T01:00:00+01:00\n"
            f"[keys.c]\n{KEY.replace('aaaa', 'cccc')}"
        ).encode(),
        "keys.toml",
    )
    a, b, c = (file.keys[name] for name in "abc")
    assert a.expires == b.expires == 1_803_081_600.0
    assert (a.created, a.revoked, b.revoked) == ("2027-01-01", "2027-01-02", "")
    assert c.expires == math.inf
    assert [key.state(1_803_081_600.0) for key in (a, b, c)] == ["revoked", "expired", "live"]
    assert b.state(1_803_081_599.0) == "live"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "keys.toml is empty: restore it, or make keys anew with `toolbus keys init`"),
        ("[keys", "keys.toml is not TOML: .*: correct that line"),
        ("x = " + "[" * 5000, "keys.toml"),
        ("[key.a]\n", r"keys.toml: unknown key key \(did you mean keys\?\); known are identities, keys, server"),
        ("[identities.chat]\ncal = []\n", r"unknown key identities.chat.cal \(did you mean call\?\)"),
        ("[keys.a]\n", "keys.toml: keys.a has no identity: add it, or remove the key"),
        (f"[keys.'a b']\n{KEY}", "the id 'a b' breaks the rule"),
        (f"[keys.a]\n{KEY}[keys.b]\n{KEY}", "keys a and b have one sha256: remove one of them"),
        (
            f"[keys.a]\n{KEY.replace('aaaa', 'AAAA')}",
            "keys.a.sha256 is 'AAAA.*, it must be 64 hex digits in lower case",
        ),
        (
            f"[keys.a]\n{KEY}expires = '2027-02-20'\n",
            "keys.a.expires is '2027-02-20', it must be a day or a time: write",
        ),
        (f"[keys.a]\n{KEY}revoked = true\n", "keys.a.revoked is True, it must be a day: write it without quotes"),
        (f"[keys.a]\n{KEY.replace('token', 'jwt')}", "keys.a.kind is 'jwt', it must be one of token, certificate"),
    ],
)
def test_a_slip_is_refused_with_its_place_and_what_to_do(text: str, error: str) -> None:
    with pytest.raises(SetupError, match=error):
        parse_keys(text.encode(), "keys.toml")


@given(st.binary() | st.text().map(str.encode))
def test_any_content_is_read_or_refused_with_its_place(content: bytes) -> None:
    try:
        parse_keys(content, "keys.toml")
    except SetupError as error:
        refused = str(error)
    else:
        return
    assert "keys.toml" in refused


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "call", "identity"]), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from(["server", "identities", "keys"]), st.dictionaries(st.text("ab ", max_size=2), VALUES)
    )
)
def test_any_tables_are_read_or_refused_with_their_place(tables: dict[str, dict[str, object]]) -> None:
    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_none(each) for key, each in value.items() if each is not None}
        return [without_none(each) for each in value if each is not None] if isinstance(value, list) else value

    try:
        parse_keys(tomlkit.dumps(without_none(tables)).encode() or b"#", "keys.toml")
    except SetupError as error:
        refused = str(error)
    else:
        return
    assert "keys.toml" in refused
