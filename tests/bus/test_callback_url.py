"""Tests of which callback URLs are valid, and of what is requested for them."""

from __future__ import annotations

import json
from base64 import b64encode
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from tests.bus.mutated_urls import mutated_urls
from tests.support.waiting import Stopwatch
from toolbus.bus.callback_url import MAX_URL, CallbackUrl, parse_callback_url
from toolbus.bus.loopback import is_loopback_host, mask

VECTORS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "vectors" / "callback_urls.jsonl").read_text("utf-8").splitlines()
]


def _accepted(url: str) -> bool:
    try:
        parse_callback_url(url)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("case", VECTORS, ids=[repr(case["url"][:60]) for case in VECTORS])
def test_every_vector_gets_its_verdict(case: dict[str, str]) -> None:
    assert _accepted(case["url"]) == (case["verdict"] == "accept")  # REST-30, REST-31


REJECTED = [
    "",
    "http",
    "http:",
    "http://",
    "http:/127.0.0.1/",
    "http:///127.0.0.1/",
    "http:\\\\127.0.0.1\\",
    "http://127.0.0.1\\@evil.com/",
    "http://evil.com\\.127.0.0.1/",
    "httpſ://127.0.0.1/",
    "httpx://127.0.0.1/",
    "javascript://127.0.0.1/",
    "view-source:http://127.0.0.1/",
    "http+unix://127.0.0.1/",
    "ht\ttp://127.0.0.1/",
    "http://127.0.0.1\n",
    "http://127.0.0.1/\u2028",
    "http://127.0.0.1/\u3000",
    "http://127.0.0.1/\u00a0",
    "http://127.0.0.1/\x85",
    "http://127.0.0.1/\x7f",
    "http://127.0.0.1/\x9b31m",
    "http://127.0.0.1/#\r\nHost: evil.com",
    "http://127.0.0.1/\ud800",
    "http://a@b@127.0.0.1/",
    "http://127.0.0.1@127.0.0.1@evil.com/",
    "http://127.0.0.1:80@evil.com/",
    "http://[::1]@evil.com/",
    "http://evil.com[@127.0.0.1/",
    "http://a:b:c@evil.com/",
    "http://a%3Ab:c@127.0.0.1/",
    "http://a%0d%0ab:c@127.0.0.1/",
    "http://a:b%00@127.0.0.1/",
    "http://a:%ff@127.0.0.1/",
    "http://%31%32%37.0.0.1/",
    "http://127%2E0.0.1/",
    "http://localhos%74/",
    "http://localhost%00/",
    "http://localhost%2eevil.com/",
    "http://１２７.0.0.1/",
    "http://١٢٧.0.0.1/",
    "http://127．0．0．1/",
    "http://127.0.0.1./",
    "http://127.0.0.1.nip.io/",
    "http://127.0.0.256/",
    "http://127.0.0.01/",
    "http://127.0.0/",
    "http://127.0.0.1.1/",
    "http://0x7f.0.0.1/",
    "http://0x7f000001/",
    "http://017700000001/",
    "http://128.0.0.1/",
    "http://126.255.255.255/",
    "http://localhoſt/",
    "http://localhost,evil.com/",
    "http://localhost;evil.com/",
    "http://localhost&@evil.com/",
    "http://localhost.localdomain/",
    "http://ip6-localhost/",
    "http://[localhost]/",
    "http://[127.0.0.1]/",
    "http://::1/",
    "http://[::1/",
    "http://::1]/",
    "http://[[::1]]/",
    "http://[::1]x/",
    "http://x[::1]/",
    "http://[::1].evil.com/",
    "http://[::1%25]/",
    "http://[::1%25eth0]:80/",
    "http://[::01:127.0.0.1]/",
    "http://[::7f00:1]/",
    "http://[::ffff:7eff:1]/",
    "http://[::ffff:127.1]/",
    "http://[::ffff:127.0.0.01]/",
    "http://[::ffff:0x7f.0.0.1]/",
    "http://[::ffff:0:127.0.0.1]/",
    "http://[2002:7f00:1::]/",
    "http://[64:ff9b::127.0.0.1]/",
    "http://[::2]/",
    "http://[0:0:0:0:0:0:0:0:1]/",
    "http://[]/",
    "http://[::１]/",
    "http://127.0.0.1:+80/",
    "http://127.0.0.1:-80/",
    "http://127.0.0.1: 80/",
    "http://127.0.0.1:80 /",
    "http://127.0.0.1:0/",
    "http://127.0.0.1:65536/",
    "http://127.0.0.1:100000/",
    "http://127.0.0.1:٨٠/",
    "http://127.0.0.1:8_0/",
    "http://127.0.0.1:0x50/",
    "http://127.0.0.1:80:80/",
    "http://127.0.0.1:80%2f/",
    "http://127.0.0.1/" + "a" * (MAX_URL - 16),
]


@pytest.mark.parametrize("url", REJECTED, ids=ascii)
def test_a_url_that_could_lead_elsewhere_is_rejected_with_a_sentence(url: str) -> None:
    with pytest.raises(ValueError, match=r"^callback_url .{10,}") as caught:
        parse_callback_url(url)
    assert len(str(caught.value)) < 1000
    str(caught.value).encode()  # half a surrogate pair would break the answer that carries it


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/x", "http://127.0.0.1:0/", "http://127.0.0.1:port/"])
def test_the_advice_for_a_bad_port_survives_the_masking_of_passwords(url: str) -> None:
    with pytest.raises(ValueError, match="from 1 to 65535") as caught:
        parse_callback_url(url)
    assert mask(str(caught.value)) == str(caught.value)


# given: url, host, port, user, password, shown (None: as it was given)
ACCEPTED: list[tuple[str, str, str, int, str, str, str | None]] = [
    ("http://127.0.0.1:9000/cb", "http://127.0.0.1:9000/cb", "127.0.0.1", 9000, "", "", None),
    ("HTTPS://LocalHost", "https://localhost/", "localhost", 443, "", "", None),
    ("http://127.0.0.1:", "http://127.0.0.1/", "127.0.0.1", 80, "", "", None),
    ("http://127.0.0.1:080/", "http://127.0.0.1:80/", "127.0.0.1", 80, "", "", None),
    ("https://[0:0::1]:65535?x=1#y", "https://[::1]:65535/?x=1", "::1", 65535, "", "", None),
    ("http://[::1]:/:80", "http://[::1]/:80", "::1", 80, "", "", None),
    ("http://[::FFFF:7f00:1]/", "http://[::ffff:127.0.0.1]/", "::ffff:127.0.0.1", 80, "", "", None),
    ("http://[0:0:0:0:0:FFFF:127.9.8.7]/", "http://[::ffff:127.9.8.7]/", "::ffff:127.9.8.7", 80, "", "", None),
    ("http://localhost/a%2Fb/../%zz?q=%20+[]", "http://localhost/a%2Fb/../%zz?q=%20+[]", "localhost", 80, "", "", None),
    ("http://localhost//evil.com/@x:y", "http://localhost//evil.com/@x:y", "localhost", 80, "", "", None),
    ("http://localhost/工具?é=1", "http://localhost/%E5%B7%A5%E5%85%B7?%C3%A9=1", "localhost", 80, "", "", None),
    ("http://u@localhost/", "http://localhost/", "localhost", 80, "u", "", None),
    ("http://@localhost/", "http://localhost/", "localhost", 80, "", "", None),
    ("http://u:p@127.0.0.1:9/a", "http://127.0.0.1:9/a", "127.0.0.1", 9, "u", "p", "http://u:***@127.0.0.1:9/a"),
    ("HTTP://:p@[::1]/#f", "http://[::1]/", "::1", 80, "", "p", "HTTP://:***@[::1]/#f"),
    ("http://u:@localhost/", "http://localhost/", "localhost", 80, "u", "", "http://u:***@localhost/"),
    ("http://u:a:b@localhost/", "http://localhost/", "localhost", 80, "u", "a:b", "http://u:***@localhost/"),
    (
        "http://u%40x:%3A%40%2f@localhost/",
        "http://localhost/",
        "localhost",
        80,
        "u@x",
        ":@/",
        "http://u%40x:***@localhost/",
    ),
    ("http://ü:%C3%BC@localhost/", "http://localhost/", "localhost", 80, "ü", "ü", "http://ü:***@localhost/"),
]


@pytest.mark.parametrize("case", ACCEPTED, ids=[ascii(case[0]) for case in ACCEPTED])
def test_an_accepted_url_is_parsed_into_its_parts(case: tuple[str, str, str, int, str, str, str | None]) -> None:
    text, url, host, port, user, password, shown = case
    scheme = url.partition(":")[0]
    parsed = parse_callback_url(text)
    assert parsed == CallbackUrl(text, url, scheme, host, port, user, password, text if shown is None else shown)
    assert parsed.origin == (scheme, host, port)


@pytest.mark.parametrize(
    ("info", "named"),
    [("", None), ("u:p@", b"u:p"), ("u@", b"u:"), (":p@", b":p"), ("%C3%A4:%40@", "ä:@".encode()), (":@", None)],
)
def test_user_and_password_become_one_header(info: str, named: bytes | None) -> None:
    headers = parse_callback_url(f"http://{info}127.0.0.1/").headers
    expected = {} if named is None else {"Authorization": f"Basic {b64encode(named).decode()}"}
    assert headers == expected


def test_the_longest_url_is_accepted() -> None:
    assert _accepted("http://127.0.0.1/" + "a" * (MAX_URL - 17))


def test_a_repr_shows_no_credentials() -> None:
    shown = repr(parse_callback_url("http://somebody:secret@127.0.0.1/cb"))
    assert "secret" not in shown
    assert "http://somebody:***@127.0.0.1/cb" in shown


@pytest.mark.parametrize(
    "url",
    [
        "http://u:secret@example.com/",
        "http://u:secret@127.0.0.1:0/",
        "http://u:secret@127.0.0.1/ ",
        "http://u:x@secret@127.0.0.1/",
        "http://u:x/secret@127.0.0.1/",
        "http://u:%ffsecret@127.0.0.1/",
        "http://u%3Ax:secret@127.0.0.1/",
        "u:secret@127.0.0.1",
        "http://u:secret@127.0.0.1/" + "a" * MAX_URL,
        "http://u:" + "secret" * MAX_URL + "@127.0.0.1/",
    ],
    ids=lambda url: url[:40],
)
def test_an_error_never_repeats_the_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"\*\*\*") as caught:
        parse_callback_url(url)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@given(st.text() | mutated_urls())
@example("HTTP://[::1]?")
@example("http://127.0.0.1??")
def test_every_library_reads_an_accepted_url_as_we_do(text: str) -> None:
    try:
        parsed = parse_callback_url(text)
    except ValueError:
        return
    url = parsed.url
    url.encode("ascii")
    library, yarl, encoded, other = urlsplit(url), URL(url), URL(url, encoded=True), httpx.URL(url)
    for host in (library.hostname, yarl.host, encoded.host, other.host, parsed.host):
        assert host is not None
        assert is_loopback_host(host)
        assert host == parsed.host or ip_address(host) == ip_address(parsed.host)
    given_ports = {library.port or parsed.port, yarl.port, encoded.port, other.port or parsed.port}
    assert given_ports == {parsed.port}
    assert {library.scheme, yarl.scheme, encoded.scheme, other.scheme} == {parsed.scheme}
    assert not any([library.username, yarl.user, encoded.user, other.userinfo, library.fragment])
    sent = encoded.raw_path_qs
    assert url.endswith((sent, f"{sent}?"))  # yarl leaves an empty query out
    assert parse_callback_url(url).origin == parsed.origin


@pytest.mark.parametrize("unit", ["@", ":", "//", "://", "http://", " http://", "a:b@", "http:", "%40", "[", "a", "1."])
def test_100_kb_of_any_text_are_refused_at_once(unit: str) -> None:
    text = unit * (100_000 // len(unit))
    stopwatch = Stopwatch()
    for whole in (text, f"http://{text}", f"{text}@", f"http://a:{text}@127.0.0.1"):
        assert not _accepted(whole)
    assert stopwatch.seconds() < 1  # a quadratic one takes minutes
