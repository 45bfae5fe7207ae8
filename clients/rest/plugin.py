"""Offers a tool that rolls dice over HTTP alone. Needs httpx and the standard library.

It registers the tool with a callback URL, answers the calls that are posted there, and unregisters before it ends. It
works with any main server that follows docs/reference/rest-contract.md.

python clients/rest/plugin.py [PORT]
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

logger = logging.getLogger("dice")

MAIN_SERVER = os.environ.get("MAIN_SERVER", "http://127.0.0.1:48911").rstrip("/")
PORT = 9876  # of the callback; with a fixed port the registration works again after this program was killed
PATH = "/tool_invoke"
SOURCE = "dice"
TOOL_NAME = "roll_dice"
MAX_DICE, MAX_SIDES, MAX_BONUS = 100, 1000, 10_000
MAX_BYTES = 1024 * 1024  # of a call
RETRY_SECONDS = 2.0
REGISTER_SECONDS = 5.0
UNREGISTER_SECONDS = 2.0
IDLE_SECONDS = 60.0  # after which a connection without calls is closed

TOOL = {
    "name": TOOL_NAME,
    "description": "Roll dice, written as in games: 3d6+2 is three six-sided dice and two more.",
    "parameters": {
        "type": "object",
        "properties": {"dice": {"type": "string", "description": "For example 'd20', '2d8' or '3d6+2'"}},
        "required": ["dice"],
    },
    "role": None,
    "source": SOURCE,
    "timeout_seconds": 10,
}


# -- the tool --------------------------------------------------------------------------------------------------------


def roll_dice(arguments: dict[str, Any]) -> dict[str, Any]:
    """Rolls, and returns the body of the callback's response."""
    notation = str(arguments.get("dice", ""))
    parts = re.fullmatch(r"(\d{0,3})d(\d{1,4})([+-]\d{1,5})?", notation.replace(" ", "").lower(), re.ASCII)
    count, sides, bonus = (int(parts[1] or 1), int(parts[2]), int(parts[3] or 0)) if parts else (0, 0, 0)
    if not (1 <= count <= MAX_DICE and 1 <= sides <= MAX_SIDES and abs(bonus) <= MAX_BONUS):
        return failure(
            f"{notation[:80]!r} is not dice: write NdS or NdS+B, with N from 1 to {MAX_DICE}, S from 1 to {MAX_SIDES} "
            f"and B up to {MAX_BONUS}"
        )
    rolls = [random.randint(1, sides) for _ in range(count)]
    return {"output": {"dice": notation, "rolls": rolls, "total": sum(rolls) + bonus}, "is_error": False}


def failure(error: str) -> dict[str, Any]:
    """Returns the body of a response that fails, with a text for the model."""
    return {"output": None, "is_error": True, "error": error}


# -- the callback ------------------------------------------------------------------------------------------------------


class Callback(BaseHTTPRequestHandler):
    """Answers calls. One connection carries many of them, each thread serves one connection."""

    protocol_version = "HTTP/1.1"  # which keeps connections
    timeout = IDLE_SECONDS
    wbufsize = -1  # head and body leave in one piece; in two, the second may wait 40 ms for an acknowledgement

    def do_POST(self) -> None:
        """Runs the tool."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BYTES:
            self.close_connection = True  # the body is not read, so the next request cannot be parsed
            return self._answer(413, failure(f"a call has a Content-Length of at most {MAX_BYTES} bytes"))
        body = self.rfile.read(int(length))
        if self.path != PATH:
            return self._answer(404, failure(f"nothing is at {self.path[:80]!r}: calls go to {PATH}"))
        try:
            call = json.loads(body)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            return self._answer(400, failure("a call is a JSON object with name and arguments"))
        if name != TOOL_NAME or not isinstance(arguments, dict):
            return self._answer(200, failure(f"this plugin has {TOOL_NAME}, called with an object"))
        try:
            return self._answer(200, roll_dice(arguments))
        except Exception as error:  # one call fails, the plugin goes on
            logger.exception("a call failed")
            return self._answer(200, failure(f"{type(error).__name__}: {error}"))

    def _answer(self, status: int, envelope: dict[str, Any]) -> None:
        content = json.dumps(envelope, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs requests at DEBUG instead of to standard error."""
        logger.debug(format, *args)


# -- registration ------------------------------------------------------------------------------------------------------


async def register_with_retry(callback_url: str) -> None:
    """Registers the tool; retries every 2 s, without end, until the main server accepts it."""
    logged = ""  # the reason of the newest log line
    async with httpx.AsyncClient(trust_env=False, timeout=REGISTER_SECONDS) as client:  # no proxy on this machine
        while True:
            try:
                response = await client.post(
                    f"{MAIN_SERVER}/api/tools/register", json={**TOOL, "callback_url": callback_url}
                )
                if response.is_success and response.json().get("ok"):
                    logger.info("registered with %s, calls come to %s", MAIN_SERVER, callback_url)
                    return
                reason = f"it answered {response.status_code}: {response.text[:500]}"
            except (httpx.TransportError, httpx.InvalidURL) as error:  # it is starting or stopping
                reason = f"{type(error).__name__}: {error}"
            except ValueError:
                reason = "its response is not that of a main server"
            if reason != logged:  # once for each reason: this may go on for hours
                logger.warning("not registered with %s (%s), retrying every %g s", MAIN_SERVER, reason, RETRY_SECONDS)
                logged = reason
            await asyncio.sleep(RETRY_SECONDS)


async def unregister_on_shutdown() -> None:
    """Unregisters the tool, so that models are not offered it any more; ignores a main server that has stopped."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=UNREGISTER_SECONDS) as client:
            await client.post(f"{MAIN_SERVER}/api/tools/unregister", json={"name": TOOL_NAME, "role": None})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        logger.info("not unregistered (%s: %s)", type(error).__name__, error)


async def main() -> int:
    """Serves until a signal comes."""
    try:
        port = int(sys.argv[1]) if len(sys.argv) > 1 else PORT
        server = ThreadingHTTPServer(("127.0.0.1", port), Callback)
    except (ValueError, OverflowError, OSError) as error:
        named = " ".join(sys.argv[1:]) or PORT
        print(f"cannot listen on port {named}: {error}; name another (0 picks a free one)", file=sys.stderr)
        return 1
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    registering = asyncio.create_task(register_with_retry(f"http://127.0.0.1:{server.server_port}{PATH}"))
    await stopping.wait()
    registering.cancel()
    await unregister_on_shutdown()
    server.shutdown()
    server.server_close()
    return 0


if __name__ == "__main__":
    logging.basicConfig(format="%(name)s: %(message)s")
    logger.setLevel(os.environ.get("LOG_LEVEL", "INFO").upper())
    sys.exit(asyncio.run(main()))
