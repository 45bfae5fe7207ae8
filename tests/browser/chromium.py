"""Drives a headless Chromium of its own over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
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
# Keys that have names → their code, and what Windows calls it, which the protocol asks for.
KEYS = MappingProxyType(
    {
        **{name: (name, number) for name, number in zip(("End", "Home"), (35, 36), strict=True)},
        **{f"Arrow{way}": (f"Arrow{way}", 37 + n) for n, way in enumerate(("Left", "Up", "Right", "Down"))},
        "Enter": ("Enter", 13),
        "Escape": ("Escape", 27),
        "Tab": ("Tab", 9),
        "Backspace": ("Backspace", 8),
        "Delete": ("Delete", 46),
        "PageDown": ("PageDown", 34),
        "PageUp": ("PageUp", 33),
        " ": ("Space", 32),
    }
)
TEXT_OF_KEYS = {"Enter": "\r", " ": " "}
COMMANDS = {"Control+a": ["selectAll"]}  # which a desktop would make of these keys
MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


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


class Navigated(Exception):
    """The page went to another document before a script in it had ended."""


class Page:
    """A tab.

    Attributes:
        complaints: what the browser logged about it: what it blocked, and errors of scripts.
        requests: the addresses that it asked for.
        loading: ids of the requests that have not ended, event streams aside.
        dialogs: the texts of the dialogs that it opened, which are dismissed.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, http: aiohttp.ClientSession, browser: str) -> None:
        self._socket = socket
        self._http = http
        self._browser = browser  # its host and port
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}  # answers, by the number of their command
        self._loaded = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()  # commands whose result nobody waits for
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.loading: set[str] = set()

    async def read(self) -> None:
        """Reads events and answers until the tab is closed."""
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._pending.pop(event["id"]).set_result(event)
            else:
                self._see(event["method"], event["params"])

    def _see(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Log.entryAdded":
                entry = params["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description") or str(details))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
                if params.get("type") != "EventSource":  # which never ends
                    self.loading.add(params["requestId"])
            case "Network.loadingFinished" | "Network.loadingFailed":
                self.loading.discard(params["requestId"])
            case "Page.javascriptDialogOpening":
                self.dialogs.append(params["message"])
                dismissing = asyncio.create_task(self.send("Page.handleJavaScriptDialog", accept=False))
                self._background.add(dismissing)
                dismissing.add_done_callback(self._background.discard)
            case "Page.loadEventFired":
                self._loaded.set()

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        number = next(self._numbers)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        event = await asyncio.wait_for(answer, 2 * WAIT_SECONDS)  # `until` gives up before
        if "navigated" in event.get("error", {}).get("message", ""):
            raise Navigated(event["error"]["message"])
        assert "error" not in event, event
        result: dict[str, Any] = event["result"]
        return result

    @asynccontextmanager
    async def another(self) -> AsyncIterator[Page]:
        """Opens another tab of the same browser, and closes it again."""
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        async with _driven(self._http, self._browser, target) as page:
            yield page
            await self.send("Target.closeTarget", targetId=target)

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

    async def until(self, script: str, what: str = "", seconds: float = WAIT_SECONDS) -> None:
        """Waits, a frame at a time, until an expression is true in the page, in the next document if it goes there."""
        loop = f"""new Promise((done, failed) => {{
            const giveUp = performance.now() + {seconds * 1000};
            const look = () => {{
                let found;
                try {{ found = {script}; }} catch (error) {{ failed(error); return; }}
                if (found) done(true);
                else if (performance.now() > giveUp) done(false);
                else setTimeout(look, 5);
            }};
            look();
        }})"""
        while True:
            with contextlib.suppress(Navigated):
                assert await self.run(loop), f"waited {seconds:g} s for {what or script}"
                return

    # -- as a person -------------------------------------------------------------------------------------------------

    async def press(self, *keys: str) -> None:
        """Presses keys one after the other: ``j``, ``Enter``, ``Control+A``."""
        for each in keys:
            *held, key = each.split("+") if len(each) > 1 else [each]
            code, number = KEYS.get(key, (f"Key{key.upper()}" if key.isalpha() else "", ord(key.upper()[0])))
            text = TEXT_OF_KEYS.get(key, key if len(key) == 1 and not {"Control", "Alt"} & set(held) else "")
            common = {"key": key, "code": code, "windowsVirtualKeyCode": number}
            common["modifiers"] = sum(MODIFIERS[name] for name in held)
            down = {"type": "keyDown" if text else "rawKeyDown", "text": text, "commands": COMMANDS.get(each, [])}
            await self.send("Input.dispatchKeyEvent", **down, **common)
            await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        """Puts a text into what has the focus, as an input method does."""
        await self.send("Input.insertText", text=text)

    async def click(self, selector: str) -> None:
        """Clicks on the middle of the first element that a selector finds."""
        find = f"document.querySelector({selector!r})"
        await self.until(f"!!{find}", selector)
        box = await self.run(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])({find}.getBoundingClientRect())"
        )
        common = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, **common)

    # -- what it looks like ------------------------------------------------------------------------------------------

    async def size(self, width: int, height: int, *, phone: bool = False) -> None:
        """Gives the page the size of another screen."""
        scale = 2 if phone else 1
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    async def media(self, *, scheme: str = "light", still: bool = True) -> None:
        """Makes the page light or dark, and without motion."""
        motion = "reduce" if still else "no-preference"
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        await self.send(
            "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features.items()]
        )

    async def picture(self, quality: int = 80) -> bytes:
        """Returns what is seen, as WebP."""
        shot = await self.send("Page.captureScreenshot", format="webp", quality=quality)
        return base64.b64decode(shot["data"])

    # -- what it costs -----------------------------------------------------------------------------------------------

    async def counters(self) -> dict[str, float]:
        """Returns the browser's counters, among them ScriptDuration, TaskDuration (seconds) and Nodes."""
        metrics = await self.send("Performance.getMetrics")
        return {each["name"]: each["value"] for each in metrics["metrics"]}

    async def heap(self) -> float:
        """Returns how many bytes its objects take, after a collection of garbage."""
        await self.send("HeapProfiler.collectGarbage")
        return float((await self.send("Runtime.getHeapUsage"))["usedSize"])


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
                async with _driven(http, f"127.0.0.1:{port}", tab["id"]) as page:
                    yield page
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


@asynccontextmanager
async def _driven(http: aiohttp.ClientSession, browser: str, target: str) -> AsyncIterator[Page]:
    """Drives the tab of that id."""
    async with http.ws_connect(f"ws://{browser}/devtools/page/{target}", max_msg_size=0) as socket:
        page = Page(socket, http, browser)
        reading = asyncio.create_task(page.read())
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            await page.send(f"{domain}.enable")
        yield page
        reading.cancel()


def _port(folder: str) -> str:
    """Returns where the browser with that profile is driven; empty until it has said so."""
    said = Path(folder, "DevToolsActivePort")
    return said.read_text().partition("\n")[0] if said.exists() else ""
