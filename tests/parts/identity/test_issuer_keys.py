"""Tests the keys of an issuer: how often they are fetched, how long they count, and which answers are refused."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from toolbus.errors import SetupError, Unauthenticated
from toolbus.parts.identity.authority import Authority
from toolbus.parts.identity.issuers import IssuerKeys, fetch_jwks, parse_jwks
from toolbus.parts.identity.settings import Issuer

KEY = {"kty": "OKP", "crv": "Ed25519", "x": "AAAA"}


class Published:
    """What an issuer publishes, and a clock."""

    def __init__(self) -> None:
        self.kids = ["a"]
        self.fetches = 0
        self.fault: Exception | None = None
        self.now = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        record = Issuer("https://login.example", "toolbus", "https://login.example/keys", {"*": "chat"})
        self.keys = IssuerKeys(record, self.fetch, lambda: self.now)

    async def fetch(self, url: str) -> bytes:
        self.fetches += 1
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return json.dumps({"keys": [{**KEY, "kid": kid} for kid in self.kids]}).encode()


@pytest_asyncio.fixture
async def published() -> AsyncIterator[Published]:
    published = Published()
    yield published
    await published.keys.close()


async def test_an_unknown_key_is_fetched_at_most_every_30_seconds(published: Published) -> None:
    assert (await published.keys.find("a"))["kid"] == "a"
    for _ in range(5):
        with pytest.raises(Unauthenticated, match=r"key 'b', which its issuer login.example does not publish"):
            await published.keys.find("b")
    assert published.fetches == 1
    published.kids.append("b")
    published.now += 30
    assert (await published.keys.find("b"))["kid"] == "b"
    assert published.fetches == 2


async def test_a_key_that_is_no_longer_published_does_not_count(published: Published) -> None:
    await published.keys.find("a")
    assert published.keys.holds("a")
    published.kids, published.now = ["b"], 30.0
    await published.keys.find("b")
    assert not published.keys.holds("a")
    with pytest.raises(Unauthenticated, match="does not publish"):
        await published.keys.find("a")


async def test_old_keys_count_for_a_day_where_they_cannot_be_fetched(published: Published) -> None:
    await published.keys.find("a")
    published.fault = OSError("no answer")
    published.now = 86_399.0
    assert (await published.keys.find("a"))["kid"] == "a"
    published.now = 86_400.0
    assert not published.keys.holds("a")
    with pytest.raises(Unauthenticated, match=r"keys of its issuer login.example cannot be fetched: try again later"):
        await published.keys.find("a")
    published.fault = None
    published.now += 30
    assert (await published.keys.find("a"))["kid"] == "a"


async def test_a_host_that_cannot_be_looked_up_is_a_refusal_and_no_fault_of_the_bus(published: Published) -> None:
    with pytest.raises(UnicodeError) as raised:
        await fetch_jwks("https://login..example/keys")
    published.fault = raised.value
    with pytest.raises(Unauthenticated, match=r"keys of its issuer login.example cannot be fetched: try again later"):
        await published.keys.find("a")


async def test_keys_are_fetched_again_every_hour_while_calls_go_on(published: Published) -> None:
    await published.keys.find("a")
    published.gate.clear()
    published.now = 3601.0
    assert (await published.keys.find("a"))["kid"] == "a"  # it does not wait
    published.gate.set()


async def test_many_who_wait_cause_one_fetch(published: Published) -> None:
    published.gate.clear()
    waiting = [asyncio.create_task(published.keys.find("a")) for _ in range(10)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    published.gate.set()
    assert [each["kid"] for each in await asyncio.gather(*waiting[1:])] == ["a"] * 9
    assert published.fetches == 1


async def test_a_token_without_the_id_of_its_key_needs_an_issuer_with_one_key(published: Published) -> None:
    assert (await published.keys.find(""))["kid"] == "a"
    published.kids, published.now = ["a", "b"], 30.0
    with pytest.raises(Unauthenticated):
        await published.keys.find("b2")
    with pytest.raises(Unauthenticated, match="key '', which"):
        await published.keys.find("")


async def test_keys_can_be_in_a_file_that_only_its_owner_may_write(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": [{**KEY, "kid": "a"}]}))
    now = 0.0
    keys = IssuerKeys(Issuer("login", "toolbus", str(file), {"*": "chat"}), fetch_jwks, lambda: now)
    file.chmod(0o666)
    with pytest.raises(Unauthenticated, match="cannot be fetched"):
        await keys.find("a")
    file.chmod(0o644)
    now = 30.0
    assert (await keys.find("a"))["kid"] == "a"
    os.truncate(file, 0)
    now = 60.0
    with pytest.raises(Unauthenticated, match="does not publish"):
        await keys.find("b")
    assert keys.holds("a")


async def test_keys_do_not_count_in_a_directory_where_others_may_replace_the_file(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    file = directory / "jwks.json"
    file.write_text(json.dumps({"keys": [{**KEY, "kid": "a"}]}))
    file.chmod(0o644)
    directory.chmod(0o777)
    now = 0.0
    keys = IssuerKeys(Issuer("login", "toolbus", str(file), {"*": "chat"}), fetch_jwks, lambda: now)
    with pytest.raises(Unauthenticated, match="cannot be fetched"):
        await keys.find("a")
    directory.chmod(0o755)
    now = 30.0
    assert (await keys.find("a"))["kid"] == "a"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "it is not JSON"),
        (b"[" * 60_000, "it is not JSON"),
        (b"[]", r"it is not {\"keys\": \[...\]} with at most 100 keys"),
        (json.dumps({"keys": [KEY] * 101}).encode(), "at most 100 keys"),
        (json.dumps({"keys": [{"kty": "oct", "k": "AAAA"}]}).encode(), "it holds no public key of kind RSA, EC or OKP"),
        (json.dumps({"keys": [{**KEY, "use": "enc"}, 7]}).encode(), "it holds no public key"),
    ],
)
def test_a_set_without_public_keys_is_refused(content: bytes, error: str) -> None:
    with pytest.raises(SetupError, match=error):
        parse_jwks(content)


DOCUMENTS = st.recursive(
    st.none() | st.text(), lambda inner: st.dictionaries(st.sampled_from(["keys", "kty", "kid"]), st.lists(inner))
)


@given(st.binary() | DOCUMENTS.map(lambda value: json.dumps(value).encode()))
def test_any_answer_is_read_or_refused(content: bytes) -> None:
    try:
        assert parse_jwks(content)
    except SetupError:
        pass


class Server:
    """An https server, and who trusts it."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self.url = url
        self.context = context


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    authority, _ = Authority.create(time.time())
    issued = authority.server(["localhost"], time.time())
    (tmp_path / "server.pem").write_bytes(issued.key + issued.certificate)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / "server.pem")

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/moved":
            raise web.HTTPFound("/keys")
        body: Any = {"/keys": b"{}", "/large": b"x" * 65_537, "/full": b"x" * 65_536}.get(request.path)
        return web.Response(body=body) if body is not None else web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{any}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=serving)
    await site.start()
    port = runner.addresses[0][1]
    trusting = ssl.create_default_context(cadata=authority.root_pems.decode())
    yield Server(f"https://localhost:{port}", trusting)
    await runner.cleanup()


async def test_keys_are_fetched_over_https_up_to_64_kb(server: Server) -> None:
    assert await fetch_jwks(server.url + "/keys", server.context) == b"{}"
    assert len(await fetch_jwks(server.url + "/full", server.context)) == 65_536
    with pytest.raises(SetupError, match="the answer is larger than 64 KiB"):
        await fetch_jwks(server.url + "/large", server.context)


@pytest.mark.parametrize(("path", "status"), [("/moved", 302), ("/none", 404)])
async def test_a_redirect_or_an_error_is_not_an_answer(server: Server, path: str, status: int) -> None:
    with pytest.raises(SetupError, match=f"the answer is status {status}, it must be 200 without a redirect"):
        await fetch_jwks(server.url + path, server.context)


async def test_a_server_that_is_not_trusted_gets_no_request(server: Server) -> None:
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await fetch_jwks(server.url + "/keys")
    with pytest.raises(SetupError, match="the URL is not https"):
        await fetch_jwks(server.url.replace("https", "http") + "/keys", server.context)
