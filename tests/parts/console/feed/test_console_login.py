"""Logging in over HTTPS: a code that is good once, a cookie that stands for a key, and nothing for other sites."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bus.keys.keys_directory import KeysDirectory
from tests.bus.test_doors import House, open_house
from tests.parts.console.feed.console_bus import STREAM, following
from tests.support.waiting import within
from toolbus.bus.access.identity import Identity, Scopes
from toolbus.bus.gateway.remote_access import BY_COOKIE, RemoteAccess, ResourceMetadata
from toolbus.bus.keys.doorman import Doorman
from toolbus.bus.keys.keyring import Keyring
from toolbus.bus.web_paths import WebPaths
from toolbus.errors import Unauthenticated
from toolbus.parts.console.app import CODE_SECONDS, COOKIE, COOKIE_SECONDS, MAX_CODES, Logins
from toolbus.parts.identity.scope_texts import template

SAME = {"Sec-Fetch-Site": "same-origin"}
DAY = 86_400.0


class Desk:
    """The logins of a bus without a bus, and a clock of the test's own."""

    def __init__(self, folder: Path, data_dir: Path | None = None) -> None:
        self.keys = KeysDirectory(folder)
        self.keys.add("ops", template("operator"))
        self.data_dir = data_dir
        self.ring: Keyring
        self.logins: Logins
        self.restart()

    def restart(self) -> None:
        self.ring = self.keys.ring()
        self.logins = Logins(Doorman(self.ring), self.data_dir, self.keys.clock)

    def login(self) -> str:
        """Returns a cookie of the operator, as a browser sends it."""
        token = self.keys.renew("ops")["token"]
        self.ring.reload()
        _, header = self.logins.exchange(self.logins.code_for(self.ring.identity_of_token(token)))
        return header.partition(";")[0]


def test_a_code_is_good_once_and_for_a_minute(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    who = desk.logins.identity_in(desk.login())
    assert who is not None
    code = desk.logins.code_for(who)
    assert desk.logins.exchange(code)[0] is who
    late = desk.logins.code_for(who)
    desk.keys.clock.now += CODE_SECONDS
    for used in (code, late, "", "x" * 32):
        with pytest.raises(Unauthenticated, match="it is good once, for 60 s"):
            desk.logins.exchange(used)


def test_unused_codes_do_not_fill_memory(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    who = desk.logins.identity_in(desk.login())
    assert who is not None
    codes = [desk.logins.code_for(who) for _ in range(MAX_CODES + 1)]
    assert repr(desk.logins) == f"<Logins codes={MAX_CODES}>"
    with pytest.raises(Unauthenticated):
        desk.logins.exchange(codes[0])
    assert desk.logins.exchange(codes[-1])


def test_a_cookie_stands_for_its_key_and_ends_with_it_or_after_twelve_hours(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    cookie = desk.login()
    who = desk.logins.identity_in(f"other=1; {cookie}; more=2")
    assert who is not None
    assert (who.name, who.scopes is desk.ring.identities["ops"]) == ("ops", True)
    assert desk.logins.identity_in("other=1") is None
    desk.keys.store.revoke("ops")
    desk.ring.reload()
    with pytest.raises(Unauthenticated, match="was revoked"):
        desk.logins.identity_in(cookie)
    cookie = desk.login()
    desk.keys.clock.now += COOKIE_SECONDS + 1
    with pytest.raises(Unauthenticated, match="has expired"):
        desk.logins.identity_in(cookie)


def test_a_cookie_that_was_changed_or_made_by_another_bus_proves_nothing(tmp_path: Path) -> None:
    desk, other = Desk(tmp_path / "one"), Desk(tmp_path / "other")
    cookie = desk.login()
    for broken in (cookie[:-1] + ("A" if cookie[-1] != "A" else "B"), f"{COOKIE}=x.y", other.login()):
        with pytest.raises(Unauthenticated, match="the login of this browser has ended"):
            desk.logins.identity_in(broken)


@pytest.mark.parametrize("kept", [True, False])
def test_a_login_survives_a_restart_where_the_bus_has_a_data_directory(tmp_path: Path, kept: bool) -> None:
    desk = Desk(tmp_path, tmp_path / "data" if kept else None)
    cookie = desk.login()
    desk.restart()
    if kept:
        who = desk.logins.identity_in(cookie)
        assert who is not None
        assert who.name == "ops"
    else:
        with pytest.raises(Unauthenticated, match="the login of this browser has ended"):
            desk.logins.identity_in(cookie)


# -- over HTTPS ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tmp_path) as house:
        yield house


@contextlib.asynccontextmanager
async def logged_in(house: House, name: str, scopes: Scopes) -> AsyncIterator[httpx.AsyncClient]:
    """Runs a browser that has exchanged a code for a cookie."""
    credential = house.keys.add(name, scopes)
    async with house.web(credential) as program:
        answer = await program.post("/api/console/code")
        assert answer.status_code == 200, answer.text
    async with house.web(None) as browser:
        page = await browser.get("/console/style.css")
        assert page.status_code == 200  # files need no key
        login = await browser.post("/api/console/login", json=answer.json(), headers=own_origin(house))
        assert login.status_code == 200
        again = await browser.post("/api/console/login", json=answer.json(), headers=own_origin(house))
        assert again.status_code == 401
        assert "good once" in again.json()["detail"]
        cookie = login.headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}=")
        assert {"Path=/", "Secure", "HttpOnly", "SameSite=Strict"} <= set(cookie.split("; "))
        assert "tbk_" not in cookie
        yield browser


def own_origin(house: House) -> dict[str, str]:
    return {"Origin": f"https://{house.bus.https_address}"}


async def test_a_browser_that_logged_in_may_do_what_its_identity_may(house: House) -> None:
    scopes = Scopes(administer=frozenset({"calls"}))
    async with logged_in(house, "watcher", scopes) as browser:
        me = (await browser.get("/api/console/me", headers=SAME)).json()
        assert (me["identity"], me["administer"]) == ("watcher", ["calls"])
        async with following(browser, **SAME) as stream:
            assert (await stream.digest())["full"]
        refused = await browser.post("/api/bus/drain", json={}, headers=own_origin(house))
        assert refused.json()["error"]["code"] == "PERMISSION_DENIED"
        more = await browser.post("/api/console/code", headers=own_origin(house))
        assert more.status_code == 403  # a stolen cookie could else live for ever


def echo(text: str) -> str:
    return text


async def test_a_reader_reads_single_digests_as_well_as_the_stream_and_calls_nothing(house: House) -> None:
    """The second tab of a browser has no stream of its own."""
    house.bus.tool(echo)
    async with logged_in(house, "eye", template("reader")) as browser:
        digest = await browser.post("/api/bus/digest", json={}, headers=own_origin(house))
        assert digest.json()["output"]["full"]
        called = await browser.post(
            "/api/tools/invoke", json={"name": "echo", "arguments": {"text": "x"}}, headers=own_origin(house)
        )
        assert called.json()["error"]["code"] == "PERMISSION_DENIED"
        refused = await browser.post("/api/bus/plugin_logs", json={}, headers=own_origin(house))
        assert "'logs' in its scope administer" in refused.json()["error"]["message"]


async def test_answers_for_an_identity_are_not_cached_on_their_way(house: House) -> None:
    async with logged_in(house, "ops", template("operator")) as browser:
        for path in ("/api/console/me", "/api/tools", "/api/calls", "/api/tasks/none", "/metrics"):
            answer = await browser.get(path, headers=SAME)
            assert answer.headers.get_list("cache-control") == ["no-store"], path
        async with browser.stream("GET", STREAM, headers=SAME) as answer:
            assert answer.headers.get_list("cache-control") == ["no-store"]


async def test_a_login_ends_with_its_key_and_its_stream_too(house: House) -> None:
    async with logged_in(house, "ops", template("operator")) as browser:
        async with following(browser, **SAME) as stream:
            await stream.digest()
            house.keys.store.revoke("ops")
            with pytest.raises(httpx.RemoteProtocolError):
                await within(stream.to_the_end())
        refused = await browser.get("/api/console/me", headers=SAME)
        assert refused.status_code == 401
        assert "was revoked" in refused.json()["detail"]


FOREIGN: tuple[dict[str, str], ...] = (
    {},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "https://elsewhere.example"},
    {"Origin": "https://elsewhere.example", "Sec-Fetch-Site": "same-origin"},
    {"Origin": "null"},
)


async def test_a_cookie_is_worth_nothing_to_another_page(house: House) -> None:
    async with logged_in(house, "ops", template("operator")) as browser:
        for headers in FOREIGN:
            for method, path in (("GET", STREAM), ("GET", "/api/tools"), ("POST", "/api/bus/drain")):
                refused = await browser.request(method, path, headers=headers)
                assert refused.status_code == 403, (method, path, headers)
        assert not house.bus.core.sessions.presence.draining


async def test_who_may_not_read_calls_gets_no_code_and_without_a_key_nothing_but_files_is_served(house: House) -> None:
    plugin = house.keys.add("plugin", template("plugin"))
    async with house.web(plugin) as web:
        refused = await web.post("/api/console/code")
        assert refused.status_code == 403
        assert "'calls' in its scope administer" in refused.json()["detail"]
    async with house.web(None) as web:
        assert (await web.get("/console/style.css")).status_code == 200
        for method, path in (("GET", STREAM), ("GET", "/api/console/me"), ("POST", "/api/console/code")):
            assert (await web.request(method, path)).status_code == 401
        for body in (b"", b"[]", b'{"x": 1}', b"\xff"):
            assert (await web.post("/api/console/login", content=body)).status_code == 422
        assert (await web.post("/api/console/login", content=b"x" * 5_000)).status_code == 413


async def test_what_a_login_began_ends_with_it() -> None:
    remote = RemoteAccess(Doorman(None), ResourceMetadata(()), WebPaths())
    ending = Identity("ops", Scopes(), expires=time.time() + 0.05)
    answered: list[int] = []

    async def forever(scope: object, receive: object, send: object) -> None:
        await asyncio.Event().wait()

    async def receive() -> Any:
        return {}

    async def send(message: Any) -> None:
        answered.append(message.get("status", 0))

    scope = {"type": "http", "scheme": "https", "path": STREAM, "headers": [], BY_COOKIE: True}
    await within(remote.serve(forever, scope, receive, send, ending))
    assert answered[0] == 401
