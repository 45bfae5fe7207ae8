"""A plugin that knows HTTP and nothing else: rolls dice. Needs httpx and the standard library.

It registers a tool with a callback URL, answers what is posted there, and unregisters before it ends. Any main server
that speaks the contract of docs/reference/rest-contract.md will do; nothing here knows which one it is.

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
PORT = 9876  # where calls arrive; a port that stays the same is found again after this program was killed
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
    """Rolls, and returns the envelope that a callback answers with."""
    said = str(arguments.get("dice", ""))
    parts = re.fullmatch(r"(\d{0,3})d(\d{1,4})([+-]\d{1,5})?", said.replace(" ", "").lower(), re.ASCII)
    count, sides, bonus = (int(parts[1] or 1), int(parts[2]), int(parts[3] or 0)) if parts else (0, 0, 0)
    if not (1 <= count <= MAX_DICE and 1 <= sides <= MAX_SIDES and abs(bonus) <= MAX_BONUS):
        return failure(
            f"{said[:80]!r} is no dice: write NdS or NdS+B, with N from 1 to {MAX_DICE}, S from 1 to {MAX_SIDES} "
            f"and B up to {MAX_BONUS}"
        )
    rolls = [random.randint(1, sides) for _ in range(count)]
    return {"output": {"dice": said, "rolls": rolls, "total": sum(rolls) + bonus}, "is_error": False}


def failure(error: str) -> dict[str, Any]:
    """The envelope that says no, with words for the model."""
    return {"output": None, "is_error": True, "error": error}


# -- where calls arrive ------------------------------------------------------------------------------------------------


class Callback(BaseHTTPRequestHandler):
    """Answers calls. One connection carries many of them, each thread serves one connection."""

    protocol_version = "HTTP/1.1"  # which keeps connections
    timeout = IDLE_SECONDS
    wbufsize = -1  # head and body leave in one piece; in two, the second may wait 40 ms for an acknowledgement

    def do_POST(self) -> None:
        """Runs the tool."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BYTES:
            self.close_connection = True  # what follows cannot be told from the next request
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
        except Exception as problem:  # one call fails, the plugin goes on
            logger.exception("a call failed")
            return self._answer(200, failure(f"{type(problem).__name__}: {problem}"))

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
        """Says nothing of calls that went well."""
        logger.debug(format, *args)


# -- registered while it runs ------------------------------------------------------------------------------------------


async def register_with_retry(callback_url: str) -> None:
    """Registers the tool; tries again every 2 s, for ever, until the main server is there and takes it."""
    said = ""
    async with httpx.AsyncClient(trust_env=False, timeout=REGISTER_SECONDS) as client:  # no proxy on this machine
        while True:
            try:
                answer = await client.post(
                    f"{MAIN_SERVER}/api/tools/register", json={**TOOL, "callback_url": callback_url}
                )
                if answer.is_success and answer.json().get("ok"):
                    logger.info("registered with %s, calls come to %s", MAIN_SERVER, callback_url)
                    return
                why = f"it answered {answer.status_code}: {answer.text[:500]}"
            except (httpx.TransportError, httpx.InvalidURL) as problem:  # it is not up yet, or just going down
                why = f"{type(problem).__name__}: {problem}"
            except ValueError:
                why = "what answers there is no main server"
            if why != said:  # once for each reason: this may go on for hours
                logger.warning("not registered with %s (%s), trying on every %g s", MAIN_SERVER, why, RETRY_SECONDS)
                said = why
            await asyncio.sleep(RETRY_SECONDS)


async def unregister_on_shutdown() -> None:
    """Takes the tool back, so that no model is offered it any more; a main server that is gone needs no word."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=UNREGISTER_SECONDS) as client:
            await client.post(f"{MAIN_SERVER}/api/tools/unregister", json={"name": TOOL_NAME, "role": None})
    except (httpx.HTTPError, httpx.InvalidURL) as problem:
        logger.info("not unregistered (%s: %s)", type(problem).__name__, problem)


async def main() -> int:
    """Serves until a signal comes."""
    try:
        port = int(sys.argv[1]) if len(sys.argv) > 1 else PORT
        server = ThreadingHTTPServer(("127.0.0.1", port), Callback)
    except (ValueError, OverflowError, OSError) as problem:
        asked = " ".join(sys.argv[1:]) or PORT
        print(f"cannot listen on port {asked}: {problem}; name another (0 picks a free one)", file=sys.stderr)
        return 1
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    registering = asyncio.create_task(register_with_retry(f"http://127.0.0.1:{server.server_port}{PATH}"))
    await told.wait()
    registering.cancel()
    await unregister_on_shutdown()
    server.shutdown()
    server.server_close()
    return 0


if __name__ == "__main__":
    logging.basicConfig(format="%(name)s: %(message)s")
    logger.setLevel(os.environ.get("LOG_LEVEL", "INFO").upper())
    sys.exit(asyncio.run(main()))
