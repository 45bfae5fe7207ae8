"""Drives a headless Chromium of its own over the DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.waiting import WAIT_SECONDS, until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOREIGN_HOST = "evil.test"  # a name of another site, which the browser finds on this machine
OPTIONS = (
    "--headless",
    "--no-sandbox",  # it runs as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--remote-debugging-port=0",
    f"--host-resolver-rules=MAP {FOREIGN_HOST} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
)


def find_chromium() -> str:
    """Returns the program; `CHROMIUM` names another.

    Raises:
        RuntimeError: there is none.
    """
    named = os.environ.get("CHROMIUM")
    found = next((path for name in ([named] if named else NAMES) if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError(
            f"{named or 'Chromium'} was not found: install it (on Debian and Ubuntu: apt-get install chromium), or set "
            "CHROMIUM to the path of a browser of its kind"
        )
    return found


class Page:
    """A tab.

    Attributes:
        complaints: what the browser logged about it: what it blocked, and errors of scripts.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}  # answers, by the number of their command
        self._loaded = asyncio.Event()
        self.complaints: list[str] = []

    async def read(self) -> None:
        """Reads events and answers until the tab is closed."""
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._pending.pop(event["id"]).set_result(event)
            elif event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            elif event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(event["params"]["exceptionDetails"]))
            elif event["method"] == "Page.loadEventFired":
                self._loaded.set()

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        event = await asyncio.wait_for(answer, WAIT_SECONDS)
        assert "error" not in event, event
        result: dict[str, Any] = event["result"]
        return result

    async def open(self, url: str) -> None:
        """Loads an address and waits until it is loaded."""
        self._loaded.clear()
        result = await self.send("Page.navigate", url=url)
        assert "errorText" not in result, result
        await asyncio.wait_for(self._loaded.wait(), WAIT_SECONDS)

    async def run(self, script: str) -> Any:
        """Runs an expression in the page and returns its value; waits for a promise."""
        how = {"awaitPromise": True, "returnByValue": True, "userGesture": True}  # as if the user had clicked
        result = await self.send("Runtime.evaluate", expression=script, **how)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")


@asynccontextmanager
async def chromium_page() -> AsyncIterator[Page]:
    """Runs a browser with a profile of its own; yields its tab.

    Raises:
        RuntimeError: there is no browser.
    """
    program = find_chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            *(program, *OPTIONS, f"--user-data-dir={folder}", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await until(lambda: _port(folder), "the browser's port")
            port = _port(folder)
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tab = next(each for each in await answer.json() if each["type"] == "page")
                async with http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    reading = asyncio.create_task(page.read())
                    for domain in ("Page", "Runtime", "Log"):
                        await page.send(f"{domain}.enable")
                    yield page
                    reading.cancel()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def _port(folder: str) -> str:
    """Returns where the browser with that profile is driven; empty until it has said so."""
    said = Path(folder, "DevToolsActivePort")
    return said.read_text().partition("\n")[0] if said.exists() else ""
