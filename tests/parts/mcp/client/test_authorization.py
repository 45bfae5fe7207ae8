"""Tests tokens of mounts: when they are renewed, by whom, and where they are never sent."""

from __future__ import annotations

import asyncio
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from aiohttp import web

from tests.parts.mcp.client.remote_server import RemoteServer, connected, serving
from tests.support.waiting import until
from toolbus.parts.mcp.client.authorization import (
    TokenAuthorization,
    read_document,
    remove_tokens,
    token_path,
    write_document,
)
from toolbus.parts.mcp.client.connection import McpConnection
from toolbus.parts.mcp.client.oauth import login
from toolbus.parts.mcp.client.transport import Lost, NeedsLogin

# Stands in for the helper: notes that it ran, and writes the next token.
HELPER = """
import json, os, sys
request = json.loads(sys.stdin.readline())
path = request["path"]
with open(path + ".runs", "a") as runs:
    runs.write(json.dumps(request["challenge"]["used"]) + "\\n")
document = json.load(open(path))
if document.get("broken"):
    print(json.dumps({"error": "the refresh token has ended"}))
    sys.exit(1)
number = int(document["tokens"]["access_token"].removeprefix("t")) + 1
document["tokens"]["access_token"] = f"t{number}"
document["expires_at"] = 0
with open(path + ".new", "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
    json.dump(document, file)
os.replace(path + ".new", path)
print(json.dumps({"done": True}))
"""


class Guarded(RemoteServer):
    """A server that wants a token.

    Attributes:
        token: the one that is good now; None: none is asked for.
        challenge: of its refusals.
    """

    token: str | None = "t1"
    challenge = "Bearer"
    status = 401

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            self.seen.append((request.method, dict(request.headers), {"method": "refused"}))
            return web.Response(status=self.status, headers={"WWW-Authenticate": self.challenge}, text="no")
        return await super()._serve(request)


@pytest.fixture
async def server() -> AsyncIterator[Guarded]:
    guarded = Guarded(modern=True)
    await guarded.start()
    yield guarded
    await guarded.kill()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def _write(home: Path, url: str, **more: Any) -> Path:
    path = token_path(home, "far")
    tokens = {"access_token": "t1", "refresh_token": "r", "token_type": "Bearer"}
    write_document(path, {"url": url, "tokens": tokens, "expires_at": 0, **more})
    return path


def _authorization(home: Path, url: str) -> TokenAuthorization:
    helper = home / "helper.py"
    helper.write_text(HELPER)
    return TokenAuthorization("far", url, token_path(home, "far"), command=(sys.executable, str(helper)))


def _runs(path: Path) -> int:
    runs = path.with_name(path.name + ".runs")
    return len(runs.read_text().splitlines()) if runs.exists() else 0


async def call(connection: McpConnection) -> str:
    result = await connection.request("tools/call", {"name": "add", "arguments": {}}, name="add")
    return str(result["content"][0]["text"])


async def test_calls_that_are_refused_together_have_the_token_renewed_once_and_are_sent_again(
    server: Guarded, home: Path
) -> None:
    path = _write(home, server.url)
    async with connected(server, authorization=_authorization(home, server.url)) as connection:
        assert await call(connection) == "done"
        server.token = "t2"
        assert await asyncio.gather(*(call(connection) for _ in range(5))) == ["done"] * 5
        assert _runs(path) == 1


async def test_a_token_is_renewed_a_minute_before_its_end_while_calls_go_on(server: Guarded, home: Path) -> None:
    path = _write(home, server.url, expires_at=time.time() + 3600)
    async with connected(server, authorization=_authorization(home, server.url)) as connection:
        await call(connection)
        assert _runs(path) == 0
        _write(home, server.url, expires_at=time.time() + 50)
        assert await call(connection) == "done"
        server.token = None
        await until(lambda: _runs(path) == 1)
        await until(lambda: read_document(path)["tokens"]["access_token"] == "t2")
        await call(connection)
        assert server.seen[-1][1]["Authorization"] == "Bearer t2"
        assert _runs(path) == 1


async def test_a_server_that_takes_no_token_is_asked_four_times_and_no_more(server: Guarded, home: Path) -> None:
    path = _write(home, server.url)
    async with connected(server, authorization=_authorization(home, server.url)) as connection:
        server.token, server.status, server.challenge = "none", 403, 'Bearer error="insufficient_scope", scope="all"'
        server.seen.clear()
        with pytest.raises(Lost, match="answered 403"):
            await call(connection)
        assert len(server.seen) == 4
        assert _runs(path) == 3


async def test_a_403_for_another_reason_asks_for_no_token(server: Guarded, home: Path) -> None:
    path = _write(home, server.url)
    async with connected(server, authorization=_authorization(home, server.url)) as connection:
        server.token, server.status = "none", 403
        with pytest.raises(Lost, match="answered 403"):
            await call(connection)
        assert _runs(path) == 0


async def test_without_a_token_the_command_to_log_in_is_told(server: Guarded, home: Path) -> None:
    with pytest.raises(NeedsLogin, match=f"run `toolbus mounts add far --url {server.url} --login`"):
        async with connected(server, authorization=_authorization(home, server.url)):
            raise AssertionError


async def test_a_refresh_that_fails_says_why_and_how_to_log_in(server: Guarded, home: Path) -> None:
    path = _write(home, server.url, broken=True)
    server.token = "t2"
    with pytest.raises(NeedsLogin, match=r"the refresh token has ended.*--login"):
        async with connected(server, authorization=_authorization(home, server.url)):
            raise AssertionError
    assert _runs(path) == 1


async def test_a_token_is_sent_to_no_server_but_the_one_that_it_is_for(server: Guarded, home: Path) -> None:
    _write(home, "https://other.example/mcp")
    assert await _authorization(home, server.url).header() == ""
    _write(home, server.url)
    assert await _authorization(home, server.url).header() == "Bearer t1"
    async with serving(modern=True) as other:
        server.token = None

        async def away(request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": other.url})

        server.on["tools/call"] = away
        async with connected(server, authorization=_authorization(home, server.url)) as connection:
            with pytest.raises(Lost, match="redirects"):
                await call(connection)
        assert other.seen == []


async def test_a_file_of_tokens_that_others_can_read_is_not_used(server: Guarded, home: Path) -> None:
    path = _write(home, server.url)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert await _authorization(home, server.url).header() == ""


def test_tokens_are_forgotten_with_their_mount(home: Path) -> None:
    path = _write(home, "https://far.example/mcp")
    remove_tokens(home, "far")
    remove_tokens(home, "far")
    assert not path.exists()


class Login:
    """An authorization server that agrees at once, beside a guarded server."""

    def __init__(self, server: Guarded) -> None:
        self.server = server
        self.grants: list[dict[str, str]] = []
        self.issued = 0

    @property
    def origin(self) -> str:
        return self.server.url.removesuffix("/mcp")

    def metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.origin,
            "authorization_endpoint": f"{self.origin}/authorize",
            "token_endpoint": f"{self.origin}/token",
            "registration_endpoint": f"{self.origin}/register",
            "response_types_supported": ["code"],
            "code_challenge_methods_supported": ["S256"],
            "authorization_response_iss_parameter_supported": True,
        }

    async def serve(self, request: web.Request) -> web.StreamResponse | None:
        path = request.path
        if path.startswith("/.well-known/oauth-protected-resource"):
            return web.json_response({"resource": self.server.url, "authorization_servers": [self.origin]})
        if path.startswith("/.well-known/"):
            return web.json_response(self.metadata())
        if path == "/register":
            return web.json_response({**await request.json(), "client_id": "c1"}, status=201)
        if path == "/authorize":
            answer = {"code": "code", "state": request.query["state"], "iss": self.origin}
            return web.Response(
                status=302, headers={"Location": f"{request.query['redirect_uri']}?{urlencode(answer)}"}
            )
        if path == "/token":
            form = {name: values[0] for name, values in parse_qs(await request.text()).items()}
            self.grants.append(form)
            self.issued += 1
            self.server.token = f"t{self.issued}"
            tokens = {"access_token": self.server.token, "refresh_token": "r", "token_type": "Bearer"}
            return web.json_response({**tokens, "expires_in": 3600})
        return None


class GuardedWithLogin(Guarded):
    """A guarded server whose origin also serves its authorization server."""

    def __init__(self) -> None:
        super().__init__(modern=True)
        self.token = "nobody has it"
        self.login = Login(self)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        metadata = f"{self.login.origin}/.well-known/oauth-protected-resource/mcp"
        self.challenge = f'Bearer resource_metadata="{metadata}"'
        return await self.login.serve(request) or await super()._serve(request)


def _agree(url: str) -> None:
    """Does what a browser does with the page of the authorization server."""
    assert urlsplit(url).path == "/authorize"
    with urllib.request.urlopen(url, timeout=30) as page:
        page.read()


def _intrude_and_agree(url: str) -> None:
    """Does what any program of this machine can do while a login waits, then what the browser does."""
    redirect = parse_qs(urlsplit(url).query)["redirect_uri"][0]
    for query in ("error=access_denied", "code=evil", "code=evil&state=guessed", "error=no&state="):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{redirect}?{query}", timeout=30)
        assert refused.value.code == 400
        refused.value.close()
    _agree(url)


@pytest.mark.timeout(300)
async def test_a_request_without_the_state_of_the_login_neither_ends_nor_answers_it(home: Path) -> None:
    server = GuardedWithLogin()
    await server.start()
    try:
        assert await asyncio.to_thread(
            login, home, "far", server.url, show=lambda text: None, open_browser=_intrude_and_agree
        )
        assert [each["code"] for each in server.login.grants] == ["code"]
    finally:
        await server.kill()


@pytest.mark.timeout(300)  # two processes load the SDK, which takes seconds on a busy machine
async def test_a_user_logs_in_once_and_the_token_is_refreshed_without_one(home: Path) -> None:
    server = GuardedWithLogin()
    await server.start()
    try:
        shown: list[str] = []
        done = await asyncio.to_thread(login, home, "far", server.url, show=shown.append, open_browser=_agree)
        assert done
        assert "Agree in the browser" in shown[0]
        grant = server.login.grants[0]
        assert grant["grant_type"] == "authorization_code"
        assert len(grant["code_verifier"]) >= 43
        assert grant["resource"] == server.url
        assert grant["redirect_uri"].startswith("http://127.0.0.1:")
        path = token_path(home, "far")
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_document(path)["expires_at"] > time.time() + 3500
        async with connected(
            server, authorization=TokenAuthorization("far", server.url, token_path(home, "far"))
        ) as connection:
            assert await call(connection) == "done"
            server.token = "ended"
            assert await call(connection) == "done"
            assert [each["grant_type"] for each in server.login.grants] == ["authorization_code", "refresh_token"]
    finally:
        await server.kill()
