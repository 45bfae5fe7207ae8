"""``toolbus console``: where the page is, and the code with which a browser gets in on another machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from subprocess import CompletedProcess

import httpx
import pytest

from tests.bus.keys.keys_directory import KeysDirectory
from tests.support.processes import toolbus
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus, Config
from toolbus.parts.identity.scope_texts import template

PORT = "127.0.0.1:0"


class Site:
    """A bus with every kind of address, and credentials for it."""

    def __init__(self, bus: Bus, keys: KeysDirectory) -> None:
        self.bus = bus
        self.keys = keys
        self.keys.add("ops", template("operator"))
        self.keys.add("plugin", template("plugin"))
        self.plain, tls = bus.grpc_addresses
        self.tls = f"tls:localhost:{tls.rpartition(':')[2]}"
        self.https = f"https://localhost:{(bus.https_address or '').rpartition(':')[2]}"

    def credential(self, name: str) -> str:
        return str(self.keys.folder / f"{name}.toolbus")

    async def run(self, *words: str) -> CompletedProcess[str]:
        """Runs the command on a thread."""
        return await asyncio.to_thread(toolbus, "console", *words)

    async def login(self, url: str) -> httpx.Response:
        """Does what the page does with its address."""
        place, _, code = url.strip().partition("/console#code=")
        async with httpx.AsyncClient(verify=False, timeout=WAIT_SECONDS) as browser:  # of a test's own authority
            return await browser.post(f"{place}/api/console/login", json={"code": code})


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    keys = KeysDirectory(tmp_path, time.time(), "localhost")
    async with Bus(Config(grpc=(PORT, f"tls:{PORT}"), http=PORT, https=PORT, keys=keys.path)) as bus:
        yield Site(bus, keys)


async def test_the_page_of_a_bus_on_this_machine_needs_no_login(site: Site) -> None:
    shown = await site.run("--print", "--bus", site.plain)
    assert (shown.stdout, shown.stderr) == (f"http://{site.bus.http_address}/console\n", "")


async def test_a_credential_is_exchanged_for_a_code_that_lets_a_browser_in(site: Site) -> None:
    shown = await site.run("--print", "--bus", site.tls, "--credential", site.credential("ops"))
    assert shown.stdout.startswith(f"{site.https}/console#code="), shown.stderr
    assert "tbk_" not in shown.stdout
    first = await site.login(shown.stdout)
    assert (first.status_code, first.json()) == (200, {"identity": "ops"})
    assert (await site.login(shown.stdout)).status_code == 401
    direct = await site.run("--json", "--bus", site.https, "--credential", site.credential("ops"))
    assert direct.returncode == 0
    assert json.loads(direct.stdout)["url"].startswith(f"{site.https}/console#code=")


async def test_what_is_wrong_is_said_with_how_to_fix_it(site: Site, tmp_path: Path) -> None:
    KeysDirectory(tmp_path / "other", time.time(), "localhost").add("ops")
    ops = ("--credential", site.credential("ops"))
    for words, code, text in (
        (("--bus", site.https), 2, "name a credential with --credential FILE"),
        (("--bus", site.https, "--credential", site.credential("plugin")), 1, "'calls' in its scope administer"),
        (("--bus", site.https, "--credential", str(tmp_path / "other" / "ops.toolbus")), 3, "is not the bus of"),
        (("--bus", "https://localhost:1", *ops), 3, "no bus at https://localhost:1"),
        (("--bus", "https://bus..example", *ops), 3, "no bus at https://bus..example"),
        (("--bus", "https://[::1", *ops), 2, "write https://HOST:PORT"),
    ):
        shown = await site.run("--print", *words)
        assert shown.returncode == code, shown.stderr
        assert text in " ".join(shown.stderr.split())
