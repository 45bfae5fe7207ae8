"""Tests of which hosts, peers and headers are loopback, and of masking passwords."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.bus.mutated_urls import mutated_urls
from tests.support.waiting import Stopwatch
from toolbus.bus.loopback import is_allowed_host_header, is_allowed_origin, is_loopback_host, is_loopback_peer, mask

LOOPBACK = ["127.0.0.1", "127.255.255.255", "127.0.0.0", "::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1", "::FFFF:7F01:1"]
ELSEWHERE = [
    *("", "0.0.0.0", "10.0.0.1", "::", "::2", "::ffff:8.8.8.8", "::127.0.0.1", "fe80::1", "::1%lo", "[::1]"),
    *("127.1", "0127.0.0.1", "127.0.0.1 ", "127.0.0.1\n", "localhost.", "evil.com", "127.0.0.1:80", "１27.0.0.1"),
]


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_loopback_address_is_this_machine(host: str) -> None:
    assert is_loopback_peer(host)
    assert is_loopback_host(host)
    bracketed = f"[{host}]" if ":" in host else host
    assert is_allowed_host_header(bracketed)
    assert is_allowed_host_header(f"{bracketed}:48911")
    assert is_allowed_origin(f"https://{bracketed}:1")


@pytest.mark.parametrize("host", ELSEWHERE)
def test_any_other_address_is_not_this_machine(host: str) -> None:
    assert not is_loopback_peer(host)
    assert not is_loopback_host(host)


def test_localhost_is_a_host_in_any_case_but_not_a_peer() -> None:
    assert is_loopback_host("LocalHost")
    assert is_allowed_host_header("LOCALHOST:80")
    assert not is_loopback_peer("localhost")


REFUSED_HEADERS = [
    *("", ":80", "localhost.", "localhost:", "localhost:0", "localhost:65536", "localhost:+1", "localhost:80:80"),
    *("u@localhost", "u:p@localhost", "localhost, evil.com", "localhost evil.com", "localhost/", "localhost\n"),
    *(" localhost", "localhost,", "::1", "::1:80", "[::1", "[127.0.0.1]", "[localhost]", "[::1%lo]", "[::1]80"),
    *("evil.com", "localhost.evil.com", "127.0.0.1.nip.io", "127.1", "0.0.0.0", "[::]", "http://localhost"),
    *("localhost:" + "1" * 10_000, "localhost:٨", "localhoſt", "192.168.0.1:48911"),
]


@pytest.mark.parametrize("value", REFUSED_HEADERS, ids=lambda value: ascii(value[:40]))
def test_any_other_host_header_is_refused(value: str) -> None:
    assert not is_allowed_host_header(value)
    assert not is_allowed_origin(f"http://{value}")


@pytest.mark.parametrize(
    "value",
    [
        *("", "null", "localhost", "//localhost", "file://", "file://localhost", "ws://localhost", "http:localhost"),
        *("http://localhost/", "http://localhost?x", "http://localhost#x", "http://localhost http://localhost"),
        *("httpſ://localhost", "http://localhost\\", "chrome-extension://localhost", " http://localhost"),
    ],
)
def test_an_origin_of_another_form_is_refused(value: str) -> None:
    assert not is_allowed_origin(value)


@given(st.text())
def test_no_header_or_address_raises(text: str) -> None:
    for tells in (is_loopback_host, is_loopback_peer, is_allowed_host_header, is_allowed_origin):
        assert tells(text) in (True, False)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("", ""),
        ("no URL, a@b", "no URL, a@b"),
        ("http://127.0.0.1:9000/cb", "http://127.0.0.1:9000/cb"),
        ("http://u@127.0.0.1/", "http://u@127.0.0.1/"),
        ("http://u:p@127.0.0.1/", "http://u:***@127.0.0.1/"),
        ("http://u:***@127.0.0.1/", "http://u:***@127.0.0.1/"),
        ("http://u:p@x/y#z@127.0.0.1/", "http://u:***@127.0.0.1/"),
        ("http:/u:p@127.0.0.1/", "http:/u:***@127.0.0.1/"),
        ("http:u:p@127.0.0.1/", "http:u:***@127.0.0.1/"),
        ("http:\\\\u:p@127.0.0.1/", "http:\\\\u:***@127.0.0.1/"),
        ("//u:p@127.0.0.1/", "//u:***@127.0.0.1/"),
        ("u:p@127.0.0.1", "u:***@127.0.0.1"),
        ("http://u:p%40127.0.0.1/", "http://u:***%40127.0.0.1/"),
        ("http://u:p＠127.0.0.1/", "http://u:***＠127.0.0.1/"),
        ("redis://:p@localhost", "redis://:***@localhost"),
        ("'http://a:p@h/x' and (http://b:q@h)", "'http://a:***@h/x' and (http://b:***@h)"),
        ("POST http://h:1/x, then http://b:q@h", "POST http://h:1/x, then http://b:***@h"),
    ],
)
def test_a_password_is_masked(text: str, masked: str) -> None:
    assert mask(text) == masked
    assert mask(masked) == masked


PREFIXES = st.sampled_from(
    ["http://", "https://", "HTTP:///", "http:/", "http:", "http:\\\\", "//", "ftp://", " http://", "see 'http://", ""]
)
WORDS = st.text(st.characters(exclude_characters=":@"), max_size=8)
PASSWORDS = st.text(min_size=4, max_size=20) | st.text(st.sampled_from("ab:/\\@?#[]%. '"), min_size=4, max_size=12)
AFTER = st.sampled_from(
    ["127.0.0.1:9000/cb", "localhost", "evil.com/a@b:c", "[::1]:1?m=x@y", "", "127.0.0.1/ http://x"]
)


@given(PREFIXES, WORDS, PASSWORDS, st.booleans(), AFTER)
def test_no_password_survives_masking(prefix: str, user: str, password: str, quoted: bool, after: str) -> None:
    if quoted:
        password = quote(password.encode("utf-8", "surrogatepass"), safe="")
    assume(prefix or password[0] not in "/\\")  # `a://b@c` is the user b of a scheme a
    assume(password not in prefix + user + after + ":***@")
    assert password not in mask(f"{prefix}{user}:{password}@{after}").replace("***", "\0")


@given(st.text() | mutated_urls())
def test_masking_twice_masks_no_more(text: str) -> None:
    assert mask(mask(text)) == mask(text)


@pytest.mark.parametrize("unit", ["@", ":", "//", "://", "http://", " http://", "a:b@", "http:", "%40", "[", "a", "1."])
def test_100_kb_of_any_text_are_checked_at_once(unit: str) -> None:
    text = unit * (100_000 // len(unit))
    stopwatch = Stopwatch()
    for whole in (text, f"http://{text}", f"{text}@", f"http://a:{text}@127.0.0.1"):
        mask(whole)
        assert not is_allowed_host_header(whole)
        assert not is_allowed_origin(whole)
        assert not is_loopback_host(whole)
    assert stopwatch.seconds() < 1  # a quadratic one takes minutes
