"""Users log in at a mounted server with accounts of their own, and nothing of one ever serves another."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import aiohttp
import jwt
import pytest
from aiohttp import web

from tests.bus.keys.keys_directory import KeysDirectory
from tests.parts.identity.played_issuer import PlayedIssuer
from tests.parts.mcp.client.mount_cases import SERVER
from tests.parts.mcp.client.remote_server import RemoteServer
from tests.support.waiting import until, within
from toolbus.bus import Bus
from toolbus.bus.access.identity import LOCAL, Identity
from toolbus.bus.local import LocalCaller
from toolbus.errors import Code, Stage
from toolbus.functions.scope import ToolScope
from toolbus.parts.identity.scope_texts import template
from toolbus.parts.mcp.client.authorization import token_path, users_path, write_document
from toolbus.parts.mcp.client.mount import MountState
from toolbus.parts.mcp.client.room import McpClientRoom
from toolbus.parts.mcp.client.user_logins import User
from toolbus.parts.mcp.client.user_servers import PerUserMount
from toolbus.parts.mcp.messages import headers
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext
from toolbus.testing import running_bus
from toolbus.v1 import tool_pb2 as pb

# Stands in for the helper: takes each answer, and gives a token that says whose it is.
HELPER = """
import json, os, sys
logins = {}
for line in sys.stdin:
    request = json.loads(line)
    answer = logins.setdefault(request["id"], request) and request.get("answer", {})
    if "url" in request:
        print(json.dumps({"id": request["id"], "page": "http://127.0.0.1:1/?state=of-" + request["id"]}), flush=True)
    elif "error" in answer:
        print(json.dumps({"id": request["id"], "error": answer["error"]}), flush=True)
    elif "code" in answer:
        login = logins[request["id"]]
        document = {"url": login["url"], "tokens": {"access_token": answer["code"]}, **login["about"]}
        with open(login["path"], "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump(document, file)
        print(json.dumps({"id": request["id"], "done": True}), flush=True)
"""
NAMES = [f"user-{number}" for number in range(20)]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Tracker(RemoteServer):
    """A server with accounts: a call returns the token that it came with. Its origin also is an authorization server.

    Attributes:
        lists: whether it lists its tools without a token.
        good: the tokens that are in force; None: all.
        mixed: requests that used the session of another token.
        grants: the forms of requests for tokens.
    """

    def __init__(self, *, modern: bool = True, lists: bool = True) -> None:
        super().__init__(modern=modern)
        self.lists = lists
        self.good: set[str] | None = None
        self.mixed: list[tuple[str, str]] = []
        self.grants: list[dict[str, str]] = []
        self.registered = 0
        self.extra: dict[str, Handler] = {}  # what answers further paths
        self._owners: dict[str, str] = {}  # of sessions
        self.on |= {"tools/call": self._whose, "tools/list": self._tools}

    @property
    def origin(self) -> str:
        return self.url.removesuffix("/mcp")

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        answer = await self._authorize(request)
        if answer is not None:
            return answer
        token, session = _token(request), request.headers.get(headers.SESSION, "")
        if session and self._owners.get(session, token) != token:
            self.mixed.append((session, token))
        text = await request.text()
        method = json.loads(text).get("method") if text else ""
        is_good = token in self.good if self.good is not None else bool(token)
        if not is_good and (not self.lists or token or method == "tools/call"):
            metadata = f'Bearer resource_metadata="{self.origin}/.well-known/oauth-protected-resource/mcp"'
            return web.Response(status=401, headers={"WWW-Authenticate": metadata})
        response = await super()._serve(request)
        if headers.SESSION in response.headers:
            self._owners[response.headers[headers.SESSION]] = token
        return response

    async def _authorize(self, request: web.Request) -> web.StreamResponse | None:
        if request.path.startswith("/.well-known/oauth-protected-resource"):
            return web.json_response({"resource": self.url, "authorization_servers": [self.origin]})
        if request.path.startswith("/.well-known/"):
            ends = {f"{name}_endpoint": f"{self.origin}/{name}" for name in ("token", "registration")}
            ends |= {"authorization_endpoint": f"{self.origin}/authorize", "issuer": self.origin}
            return web.json_response(
                {**ends, "response_types_supported": ["code"], "code_challenge_methods_supported": ["S256"]}
            )
        if request.path in self.extra:
            return await self.extra[request.path](request)
        if request.path == "/registration":
            self.registered += 1
            return web.json_response({**await request.json(), "client_id": f"c{self.registered}"}, status=201)
        if request.path == "/authorize":  # whoever sits at the browser is logged in there
            query = request.query
            answer = {"code": request.cookies["account"], "state": query["state"]}
            raise web.HTTPFound(f"{query['redirect_uri']}?{urlencode(answer)}")
        if request.path == "/token":
            form = {name: values[0] for name, values in parse_qs(await request.text()).items()}
            self.grants.append(form)
            tokens = {"access_token": f"of {form['code']}".replace(" ", "-"), "token_type": "Bearer"}
            return web.json_response({**tokens, "expires_in": 3600})
        return None

    async def _whose(self, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0)
        return self.result(message, {"content": [{"type": "text", "text": _token(request)}]})

    async def _tools(self, request: web.Request, message: dict[str, Any]) -> web.StreamResponse:
        names = ["whose", *([f"only-{_token(request)}"] if _token(request) else [])]
        return self.result(message, {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]})


def _token(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


@asynccontextmanager
async def tracker(**options: Any) -> AsyncIterator[Tracker]:
    server = Tracker(**options)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


@asynccontextmanager
async def mounted(
    home: Path,
    entry: Mapping[str, Any],
    settled: Callable[[PerUserMount], object] | None = None,
    *,
    sdk: bool = False,
    **settings: Any,
) -> AsyncIterator[tuple[Bus, PerUserMount]]:
    """Runs a bus with one mount, `far`, once it has listed its tools.

    Args:
        sdk: whether the real helper runs.
    """
    data = home / "data"
    data.mkdir(mode=0o700, exist_ok=True)
    own = {"login": "user", **entry.get("toolbus", {})}
    (data / "mcp.json").write_text(json.dumps({"mcpServers": {"far": {**entry, "toolbus": own}}}))
    async with running_bus(**{"data_dir": data, "http": "127.0.0.1:0", **settings}) as bus:
        room = bus.core.rooms.find(McpClientRoom)
        assert room is not None
        assert room.mounts is not None
        mount = room.mounts.get("far")
        assert isinstance(mount, PerUserMount)
        if not sdk:
            mount.logins.command = (sys.executable, "-I", "-S", "-c", HELPER)
        await until(lambda: settled(mount) if settled is not None else mount.offer.tools, "its tools")
        yield bus, mount


async def call(bus: Bus, user: str, tool: str = "far:whose", source: str = "host", **more: Any) -> Result:
    """Makes a call of a host whose callers can be sent to a page."""
    message = pb.ToolCall(name=tool, accepts=["elicitation.url"], timeout_seconds=60, **more)
    message.context.user_id = user
    return await within(LocalCaller(source, bus.dispatcher).call(message))


async def again(bus: Bus, user: str, asked: Result, action: str = "accept") -> Result:
    answers = json.dumps({"login": {"action": action}})
    return await call(bus, user, request_state=asked.request_state, input_responses_json=answers)


def link_of(asked: Result) -> str:
    (question,) = json.loads(asked.input_requests_json).values()
    assert question["method"] == "elicitation/create"
    assert question["params"]["mode"] == "url"
    return str(question["params"]["url"])


async def browse(link: str, account: str) -> tuple[int, str]:
    """Does what the browser of somebody does who agrees on each page."""
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        async with browser.get(link) as page:
            assert page.status == 200
            assert "account that you choose" in await page.text()
        async with browser.get(f"{link}?go=1", allow_redirects=False) as page:
            there = page.headers["Location"]
        async with browser.get(there, headers={"Cookie": f"account={account}"}, allow_redirects=False) as page:
            back = page.headers["Location"]
        async with browser.get(back) as page:
            return page.status, await page.text()


def give_token(home: Path, url: str, user: User, token: str) -> None:
    folder = users_path(home / "data", "far")
    about = {"account": user.account, "user": user.id, "since": 0}
    document = {"url": url, "tokens": {"access_token": token, "token_type": "Bearer"}, "user": about}
    write_document(folder / f"{user.digest}.json", document)


async def thousand(bus: Bus, tool: str) -> list[Result]:
    """Makes 1,000 calls of 20 users, 100 at a time."""
    turns = asyncio.Semaphore(100)

    async def one(number: int) -> Result:
        async with turns:
            return await call(bus, NAMES[number % 20], tool)

    return await asyncio.gather(*map(one, range(1_000)))


# -- isolation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modern", [True, False])
async def test_a_thousand_calls_of_twenty_users_never_use_the_token_or_session_of_another(
    tmp_path: Path, modern: bool
) -> None:
    async with tracker(modern=modern) as server:
        for name in NAMES:
            give_token(tmp_path, server.url, User("host", name), f"token-of-{name}")
        async with mounted(tmp_path, {"url": server.url, "toolbus": {"max_in_flight": 50}}) as (bus, mount):
            results = await thousand(bus, "far:whose")
            assert [each.output for each in results] == [f"token-of-{NAMES[number % 20]}" for number in range(1_000)]
            assert server.mixed == []
            assert mount.users == 20
            assert {each.tool.name for each in bus.list() if each.source == "far"} == {"far:whose"}
            assert modern or server.made_sessions == 21


async def test_a_thousand_calls_of_twenty_users_each_reach_the_process_of_their_user(tmp_path: Path) -> None:
    entry = {
        "command": sys.executable,
        "args": ["-I", "-S", str(SERVER), "--", "--user=${user:id}"],
        "env": {"WHO": "${user:id}", "PLACE": "${user:dir}"},
        "toolbus": {"max_in_flight": 50},
    }
    async with mounted(tmp_path, entry) as (bus, mount):
        await until(lambda: mount.status().pid == 0, "the end of the process that listed")
        assert mount.state is MountState.LIVE
        results = await thousand(bus, "far:env")
        seen = [json.loads(each.output) for each in results]
        assert [each["WHO"] for each in seen] == [NAMES[number % 20] for number in range(1_000)]
        assert len({each["PLACE"] for each in seen}) == 20
        assert len({each["TOOLBUS_MOUNT"] for each in seen}) == 20
        assert mount.users == 20


async def test_callers_that_name_the_same_user_do_not_share_a_login(tmp_path: Path) -> None:
    async with tracker() as server:
        give_token(tmp_path, server.url, User("host", "ann"), "token-of-ann")
        async with mounted(tmp_path, {"url": server.url}) as (bus, _):
            assert (await call(bus, "ann")).output == "token-of-ann"
            for user, source in (("ann", "other"), ("", "host"), ("Ann", "host"), ("host", "ann")):
                assert (await call(bus, user, source=source)).input_requests_json, (user, source)


async def test_a_tool_that_calls_is_a_call_of_the_user_who_called_it(tmp_path: Path) -> None:
    async with tracker() as server:
        give_token(tmp_path, server.url, User("host", "ann"), "token-of-ann")
        async with mounted(tmp_path, {"url": server.url}) as (bus, _):

            @bus.tool
            async def relay(scope: ToolScope) -> str:
                return str((await scope.call("far:whose")).text)

            assert (await call(bus, "ann", "relay")).output == "token-of-ann"
            assert "has to log in at far: have this user open http://127" in (await call(bus, "bob", "relay")).text


# -- a login ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)  # the helper loads the SDK, which takes seconds on a busy machine
async def test_a_call_without_a_token_asks_for_a_login_and_goes_on_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with tracker() as server, mounted(tmp_path, {"url": server.url}, sdk=True) as (bus, mount):
        asked, other = await asyncio.gather(call(bus, "ann"), call(bus, "bob"))
        link = link_of(asked)
        assert link != link_of(other)
        assert link_of(await call(bus, "ann")) == link  # one login at a time

        going_on = asyncio.create_task(again(bus, "ann", asked))
        status, text = await browse(link, "ann")
        assert (status, "You are logged in" in text) == (200, True), text
        assert (await going_on).output == "of-ann"
        assert (await call(bus, "ann")).output == "of-ann"
        assert server.grants[0]["redirect_uri"] == f"{link.rpartition('/')[0]}/callback"

        assert [row["user"] for row in mount.logins.kept() if row["token"]] == ["ann"]
        file = mount.logins.token_file("far", User("host", "ann"))
        assert file.stat().st_mode & 0o777 == 0o600
        assert (await call(bus, "bob")).input_requests_json
        await browse(link_of(other), "bob")
        assert (await call(bus, "bob")).output == "of-bob"
        assert (await call(bus, "ann")).output == "of-ann"
        assert "toolbus.mounts" not in {each.name for each in caplog.records if each.levelname == "WARNING"}
        assert server.registered <= 2  # those that began before there was a client
        assert not mount.logins.pending


async def test_a_login_that_is_refused_says_why_and_the_next_call_asks_again(tmp_path: Path) -> None:
    async with tracker() as server, mounted(tmp_path, {"url": server.url}) as (bus, mount):
        link = link_of(await call(bus, "ann"))
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            async with browser.get(f"{link}?go=1", allow_redirects=False) as page:
                state = page.headers["Location"].rpartition("=")[2]
            back = f"{link.rpartition('/')[0]}/callback?state={state}&error=access_%3Cdenied%3E"
            async with browser.get(back) as page:
                assert page.status == 502
                assert "access_&lt;denied&gt;" in await page.text()
        assert not mount.logins.pending
        assert link_of(await call(bus, "ann")) != link


async def test_a_login_that_is_given_up_while_its_helper_starts_does_not_hold_up_the_next_one(tmp_path: Path) -> None:
    async with tracker() as server, mounted(tmp_path, {"url": server.url}) as (bus, mount):
        beginning = asyncio.create_task(mount.logins.begin(mount.entry, User("host", "ann")))
        await asyncio.sleep(0)
        assert mount.logins.pending
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        assert not mount.logins.pending
        assert link_of(await call(bus, "ann"))


async def test_a_login_that_is_given_up_goes_on_for_another_call_that_waits_for_it(tmp_path: Path) -> None:
    async with tracker() as server, mounted(tmp_path, {"url": server.url}) as (_, mount):
        beginning, other = (asyncio.create_task(mount.logins.begin(mount.entry, User("host", "ann"))) for _ in range(2))
        await asyncio.sleep(0)
        beginning.cancel()
        assert (await other).startswith("http")
        assert mount.logins.pending == 1


async def test_only_the_browser_that_has_seen_the_page_of_the_bus_ends_a_login(tmp_path: Path) -> None:
    async with tracker() as server, mounted(tmp_path, {"url": server.url}) as (bus, mount):
        asked = await call(bus, "ann")
        link, base = link_of(asked), link_of(asked).rpartition("/")[0]
        async with aiohttp.ClientSession() as browser:

            async def status_of(url: str, **sent: str) -> int:
                async with browser.get(url, headers=sent, allow_redirects=False) as page:
                    return page.status

            state = f"of-{link.rpartition('/')[2]}"
            assert await status_of(f"{base}/callback?code=evil&state=guessed") == 404
            assert await status_of(f"{base}/callback?code=evil&state=") == 404
            assert await status_of(f"{base}/callback?code=evil&state={state}") == 403
            assert await status_of(f"{base}/guessed") == 404
            async with browser.get(f"{link}?go=1", allow_redirects=False) as page:
                cookie = SimpleCookie(page.headers["Set-Cookie"])
            (name,) = cookie
            assert cookie[name]["httponly"]
            assert await status_of(f"{base}/callback?code=evil&state={state}", Cookie=f"{name}=guessed") == 403
        assert server.grants == []
        declined = await again(bus, "ann", asked, "decline")
        assert declined.error is not None
        assert (declined.error.code, declined.error.stage) == (Code.TOOL, Stage.NOT_DISPATCHED)
        assert "did not log in" in declined.error.message
        assert mount.logins.kept() == []
        assert not mount.logins.pending


async def test_a_caller_that_cannot_be_sent_to_a_page_gets_the_link_in_the_error(tmp_path: Path) -> None:
    async with tracker() as server, mounted(tmp_path, {"url": server.url}) as (bus, _):
        refused = await bus.call("far:whose", context=CallContext(user_id="ann"))
        assert refused.error is not None
        assert refused.error.retry_safe
        assert "user 'ann' of source" in refused.error.message
        assert "/mcp-login/" in refused.error.message


async def test_a_bus_without_http_says_what_a_login_needs(tmp_path: Path) -> None:
    async with tracker() as server, mounted(tmp_path, {"url": server.url}, http="off") as (bus, _):
        refused = await call(bus, "ann")
        assert refused.error is not None
        assert "set `http`, or `login_url` of [mcp]" in refused.error.message


@pytest.mark.parametrize("lists", [True, False])
async def test_the_catalog_is_what_the_server_lists_to_the_operator_or_to_nobody(tmp_path: Path, lists: bool) -> None:
    async with tracker(lists=lists) as server:
        give_token(tmp_path, server.url, User("host", "ann"), "token-of-ann")
        wanted = MountState.LIVE if lists else MountState.NEEDS_LOGIN
        async with mounted(tmp_path, {"url": server.url}, lambda mount: mount.state is wanted) as (bus, mount):
            if not lists:
                tokens = {"access_token": "operator", "token_type": "Bearer"}
                write_document(token_path(tmp_path / "data", "far"), {"url": server.url, "tokens": tokens})
                await until(lambda: mount.state is MountState.LIVE, "the operator's login")
            assert (await call(bus, "ann")).output == "token-of-ann"
            expected = {"far:whose"} if lists else {"far:whose", "far:only-operator"}
            assert {each.tool.name for each in bus.list() if each.source == "far"} == expected
            assert (await call(bus, "bob")).input_requests_json  # the operator's token makes no calls


async def test_a_server_that_lists_no_longer_keeps_its_tools_until_its_operator_has_logged_in(tmp_path: Path) -> None:
    async with tracker() as server:
        give_token(tmp_path, server.url, User("host", "ann"), "token-of-ann")
        async with mounted(tmp_path, {"url": server.url}) as (bus, mount):
            assert (await call(bus, "ann")).output == "token-of-ann"
            sleeping = mount.connected_users
            server.lists = False
            mount.logged_in()  # lists anew, as after a restart of the server
            await until(lambda: mount.state is MountState.DEGRADED)
            assert "cannot list its tools again" in mount.reason
            assert (await call(bus, "ann")).output == "token-of-ann"
            tokens = {"access_token": "operator", "token_type": "Bearer"}
            write_document(token_path(tmp_path / "data", "far"), {"url": server.url, "tokens": tokens})
            await until(lambda: mount.state is MountState.LIVE)
            assert mount.connected_users == sleeping
            assert "far:only-operator" in {each.tool.name for each in bus.list()}


# -- ends ------------------------------------------------------------------------------------------------------------


async def test_a_user_and_an_operator_end_logins_and_what_was_kept_is_gone(tmp_path: Path) -> None:
    async with tracker() as server:
        for name in NAMES[:3]:
            give_token(tmp_path, server.url, User("host", name), f"token-of-{name}")
        async with mounted(tmp_path, {"url": server.url}) as (bus, _):
            for name in NAMES[:3]:
                assert (await call(bus, name)).output == f"token-of-{name}"
            shown = await operate(bus, "mount_logins")
            assert {(row["account"], row["user"], row["token"]) for row in shown["logins"]} == {
                ("host", name, True) for name in NAMES[:3]
            }
            assert "token-of" not in json.dumps(shown)
            ended = await call(bus, NAMES[0], "toolbus:mount_login", arguments_json='{"name":"far","action":"end"}')
            assert ended.output["ended"]
            assert (await call(bus, NAMES[0])).input_requests_json
            assert (await call(bus, NAMES[1])).output == f"token-of-{NAMES[1]}"
            assert "no login is ended without a choice" in await operate(bus, "mount_logins", end=True)
            assert len((await operate(bus, "mount_logins", end=True, user=NAMES[1]))["logins"]) == 1
            assert (await call(bus, NAMES[1])).input_requests_json
            assert (await call(bus, NAMES[2])).output == f"token-of-{NAMES[2]}"


async def test_a_user_has_a_process_until_it_is_idle_and_their_number_is_bounded(tmp_path: Path) -> None:
    entry = {"command": sys.executable, "args": ["-I", "-S", str(SERVER)], "toolbus": {"max_users": 2}}
    async with mounted(tmp_path, entry) as (bus, mount):
        pids = [(await call(bus, name, "far:pid")).output for name in ("ann", "bob", "ann")]
        assert pids[0] == pids[2] != pids[1]
        sleeping = [
            asyncio.create_task(call(bus, name, "far:sleep", arguments_json='{"seconds":30}'))
            for name in ("ann", "bob")
        ]
        await until(lambda: len(mount.handler.pending) == 2)
        refused = await call(bus, "eve", "far:pid")
        assert refused.error is not None
        assert (refused.error.code, "max_users" in refused.error.message) == (Code.OVERLOADED, True)
        sleeping[1].cancel()
        await until(lambda: mount.server_of(User("host", "bob")).handler.is_idle)  # type: ignore[union-attr]
        assert (await call(bus, "eve", "far:pid")).output not in pids  # in the place of bob, who is idle
        assert {each.id for each in mount.connected_users} == {"ann", "eve"}
        sleeping[0].cancel()
        await asyncio.gather(*sleeping, return_exceptions=True)


async def test_an_idle_process_ends(tmp_path: Path) -> None:
    entry = {"command": sys.executable, "args": ["-I", "-S", str(SERVER)], "toolbus": {"idle_seconds": 0.05}}
    async with mounted(tmp_path, entry) as (bus, mount):
        first = (await call(bus, "ann", "far:pid")).output
        await until(lambda: mount.users == 0, "its idle end")
        assert (await call(bus, "ann", "far:pid")).output != first


async def test_a_process_that_dies_fails_only_the_calls_of_its_user(tmp_path: Path) -> None:
    async with mounted(tmp_path, {"command": sys.executable, "args": ["-I", "-S", str(SERVER)]}) as (bus, _):
        sleeping = asyncio.create_task(call(bus, "bob", "far:sleep", arguments_json='{"seconds":0.3,"text":"slept"}'))
        died = await call(bus, "ann", "far:die")
        assert died.error is not None
        assert (died.error.code, died.error.stage) == (Code.UNAVAILABLE, Stage.DISPATCHED)
        assert (await sleeping).output == "slept"
        assert not (await call(bus, "ann", "far:pid")).is_error


async def operate(bus: Bus, tool: str, **arguments: Any) -> Any:
    result = await bus.call(f"toolbus:{tool}", arguments)
    return result.text if result.is_error else result.output


@pytest.mark.parametrize("how", ["revoked", "removed"])
async def test_a_login_ends_with_the_identity_that_had_it(tmp_path: Path, how: str) -> None:
    keys = KeysDirectory(tmp_path, time.time(), "127.0.0.1")
    for name in ("chat", "other"):
        keys.add(name)
    async with tracker() as server:
        ann = User("identity chat", "ann")
        for user in (ann, User("identity other", "ann"), User("identity chat/jwt", ""), User("host", "ann")):
            give_token(tmp_path, server.url, user, "token")
        address = ("tls:127.0.0.1:0",)
        async with mounted(tmp_path, {"url": server.url}, grpc=address, keys=keys.path) as (bus, mount):
            keyring = bus.core.sessions.keyring
            assert keyring is not None
            caller = LocalCaller("app", bus.dispatcher, identity=Identity("chat", keyring.identities["chat"]))
            message = pb.ToolCall(name="far:whose")
            message.context.user_id = "ann"
            assert (await within(caller.call(message))).output == "token"
            keys.renew("chat")  # the key before it stays valid for a while, and the identity for longer
            await bus.core.sessions.doorman.refresh()
            assert len(mount.logins.kept()) == 4
            if how == "revoked":
                keys.store.revoke("chat")
            else:
                keys.write(keys.file.read_text().replace("[identities.chat]", "[identities.former]"))
            await bus.core.sessions.doorman.refresh()
            gone = {"identity chat"} if how == "revoked" else {"identity chat", "identity chat/jwt"}
            left = {"identity chat", "identity other", "identity chat/jwt", "host"} - gone
            await until(lambda: {row["account"] for row in mount.logins.kept()} == left)
            assert mount.users == 0


# -- token exchange --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def exchanging(home: Path, program: bool = False, **more: Any) -> AsyncIterator[Any]:
    """Runs a bus whose mount exchanges tokens; returns the server, the mount, what calls, and what was exchanged."""
    played, forms = PlayedIssuer(), []
    answers: dict[str, Any] = {"status": 200, "body": {"token_type": "Bearer", "expires_in": 3600}}
    async with tracker() as server:

        async def exchange(request: web.Request) -> web.StreamResponse:
            form = {name: values[0] for name, values in parse_qs(await request.text()).items()}
            forms.append((form, request.headers.get("Authorization", "")))
            claims = jwt.decode(form["subject_token"], options={"verify_signature": False})
            body = {"access_token": f"{claims['sub']}-{len(forms)}", **answers["body"]}
            return web.json_response(body, status=answers["status"])

        server.extra["/exchange"] = exchange
        oauth = {"exchange_at": f"{server.origin}/exchange", "client_id": "bus", "client_secret": "s:1", **more}
        entry: dict[str, Any] = {"url": server.url, "toolbus": {"oauth": oauth}}
        if program:
            entry = {"command": sys.executable, "args": ["-I", "-S", str(SERVER)], "env": {"KEY": "${user:token}"}}
            entry["toolbus"] = {"oauth": oauth}
        async with mounted(home, entry) as (bus, mount):
            bus.core.sessions.doorman.issuers = played.issuers

            async def call_as(sub: str, user: str = "", tool: str = "far:whose") -> Result:
                identity = LOCAL if not sub else await played.issuers.identity_of(played.token(sub=sub))
                if sub:
                    identity = replace(identity, scopes=template("operator"))
                message = pb.ToolCall(name=tool)
                message.context.user_id = user
                return await within(LocalCaller("app", bus.dispatcher, identity=identity).call(message))

            yield server, mount, call_as, forms, answers


async def test_the_token_of_a_caller_is_exchanged_once_for_one_of_the_server(tmp_path: Path) -> None:
    async with exchanging(tmp_path, audience="far", scope="read") as (server, _, call_as, forms, _):
        assert (await call_as("ann")).output == "ann-1"
        assert (await call_as("ann")).output == "ann-1"
        assert (await call_as("bob")).output == "bob-2"
        ((form, credential), _) = forms
        assert form.pop("subject_token").count(".") == 2
        assert form == {
            "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
            "subject_token_type": "urn:ietf:params:oauth:token-type:access_token",
            "audience": "far",
            "scope": "read",
        }
        assert credential == "Basic " + base64.b64encode(b"bus:s%3A1").decode()
        server.good = {"ann-3"}
        assert (await call_as("ann")).output == "ann-3"  # the server had refused the one before


async def test_a_process_gets_the_exchanged_token_and_ends_with_it(tmp_path: Path) -> None:
    async with exchanging(tmp_path, program=True) as (_, mount, call_as, _, answers):
        assert json.loads((await call_as("ann", tool="far:env")).output)["KEY"] == "ann-1"
        answers["body"]["expires_in"] = 0.2
        assert json.loads((await call_as("bob", tool="far:env")).output)["KEY"] == "bob-2"
        await until(
            lambda: {each.identity for each in mount.connected_users} == {"chat/ann"}, "the end of bob's process"
        )
        assert json.loads((await call_as("bob", tool="far:env")).output)["KEY"] == "bob-3"


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (400, {"error": "invalid_target", "error_description": "no such audience"}, "invalid_target: no such audience"),
        (401, {"error": "invalid_client"}, "answered 401 (invalid_client)"),
        (200, {"access_token": 7}, "answered 200"),
        (200, {"access_token": "a\nb"}, "answered 200"),
        (200, {"token_type": "DPoP"}, "type 'DPoP', it must be Bearer"),
        (302, {}, "answered 302"),
    ],
)
async def test_an_exchange_that_fails_says_what_the_endpoint_said(
    tmp_path: Path, status: int, body: dict[str, Any], problem: str
) -> None:
    async with exchanging(tmp_path) as (_, _, call_as, _, answers):
        answers |= {"status": status, "body": answers["body"] | body}
        refused = await call_as("ann")
        assert refused.error is not None
        assert (refused.error.code, refused.error.stage) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED)
        assert problem in refused.error.message
        assert "eyJ" not in refused.error.message


async def test_only_the_user_whose_token_it_is_gets_its_exchange(tmp_path: Path) -> None:
    async with exchanging(tmp_path) as (_, _, call_as, forms, _):
        assert (await call_as("ann", "ann")).output == "ann-1"
        for sub, user, problem in (("ann", "bob", "token of another user"), ("", "ann", "has proven no JWT")):
            refused = await call_as(sub, user)
            assert refused.error is not None
            assert problem in refused.error.message
        assert len(forms) == 1


# -- entries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"url": "http://a.example", "toolbus": {"login": "users"}}, 'it must be true, false or "user"'),
        ({"command": "x", "env": {"A": "${user:id}"}}, "env has ${user:id}, which stands in args and env of a mount"),
        ({"url": "http://a.example/${user:id}", "toolbus": {"login": "user"}}, "stands in args and env"),
        ({"command": "x", "args": ["${user:name}"], "toolbus": {"login": "user"}}, "which is not a variable"),
        ({"command": "x", "args": ["${user:token}"], "toolbus": {"login": "user"}}, "needs oauth.exchange_at"),
        ({"url": "http://a.example", "toolbus": {"oauth": {"client_id": "c"}}}, 'add "login": "user"'),
        ({"url": "http://a.example", "headers": {"authorization": "x"}, "toolbus": {"login": "user"}}, "remove one"),
        ({"url": "http://a.example", "toolbus": {"login": "user", "max_users": 0}}, "max_users"),
    ],
)
def test_an_entry_that_would_share_or_misread_a_login_is_refused(entry: dict[str, Any], problem: str) -> None:
    from toolbus.parts.mcp.client.files import read_document

    reading = read_document({"mcpServers": {"far": entry}}, "mcp.json", {})
    assert problem in reading.refused["far"]
