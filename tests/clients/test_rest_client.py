"""Legacy plugins: the two functions of the documents that N.E.K.O. authors copy, and the plugin in clients/rest."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from lab.stage import free_ports
from tests.support.processes import ROOT, environment
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.errors import Code, Stage
from toolbus.testing import running_bus

PLUGIN = ROOT / "clients" / "rest" / "plugin.py"

# What every author of such a plugin has, as the documents show it.
DOCUMENTED = (ROOT / "tests" / "parts" / "moving" / "neko" / "plugins" / "registering" / "__init__.py").read_text(
    "utf-8"
)


class Naps:
    """Stands for `asyncio` in the documented code: notes how long it would sleep, and hardly does."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self.first = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.taken.append(seconds)
        self.first.set()
        await asyncio.sleep(0.01)


def documented(main_server: str, port: int, naps: Naps | None = None) -> dict[str, Any]:
    """Returns the namespace of a plugin that was written by the documents."""
    namespace: dict[str, Any] = {}
    exec(DOCUMENTED.partition("from plugin.sdk.plugin")[0], namespace)
    namespace |= {"asyncio": naps or asyncio, "MAIN_SERVER": main_server, "MY_PORT": port}
    return namespace


class Weather(BaseHTTPRequestHandler):
    """Answers what is posted, and keeps the bodies."""

    bodies: list[Any]

    def do_POST(self) -> None:
        call = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(call)
        content = json.dumps({"output": {"city": call["arguments"]["city"], "temp_c": 22}, "is_error": False}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def weather() -> Iterator[tuple[int, list[Any]]]:
    """Serves callbacks on a free port; yields it and the bodies that arrive."""
    bodies: list[Any] = []
    handler = type("Handler", (Weather,), {"bodies": bodies})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield server.server_port, bodies
        finally:
            server.shutdown()
            serving.join()


async def offered(bus: Bus, *names: str) -> None:
    """Waits until exactly these tools are offered."""
    async with asyncio.timeout(WAIT_SECONDS):
        async for _ in bus.watch():
            if [listing.tool.name for listing in bus.list()] == list(names):
                return


# -- the documents' own functions ----------------------------------------------------------------------------------


async def test_the_documented_functions_register_a_tool_that_is_listed_called_and_unregistered() -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        with weather() as (port, bodies):
            main_server = f"http://{bus.http_address}"
            plugin = documented(main_server, port)
            async with asyncio.timeout(WAIT_SECONDS):
                await plugin["register_with_retry"]()
            async with httpx.AsyncClient(base_url=main_server, trust_env=False, timeout=WAIT_SECONDS) as client:
                listed = (await client.get("/api/tools")).json()
            assert listed["tools_by_role"] == {
                "default": [
                    {
                        "name": "get_weather",
                        "description": "Look up the weather in a given city",
                        "source": "my_plugin",
                        "callback_url": f"http://127.0.0.1:{port}/tool_invoke",
                        "is_remote": True,
                    }
                ]
            }

            result = await bus.call("get_weather", '{"city":"Beijing"}')
            assert (result.is_error, result.output) == (False, {"city": "Beijing", "temp_c": 22})
            (body,) = bodies
            assert list(body) == ["name", "arguments", "call_id", "raw_arguments"]  # REST-40
            assert body["raw_arguments"] == '{"city":"Beijing"}'

            async with asyncio.timeout(WAIT_SECONDS):
                await plugin["unregister_on_shutdown"]()
            assert bus.list() == []


async def test_a_documented_plugin_that_is_up_before_the_bus_is_registered_at_its_next_try() -> None:
    (port,), naps = free_ports(1), Naps()
    plugin = documented(f"http://127.0.0.1:{port}", 9876, naps)
    registering = asyncio.create_task(plugin["register_with_retry"]())
    async with asyncio.timeout(WAIT_SECONDS):
        await naps.first.wait()
        async with running_bus(http=f"127.0.0.1:{port}") as bus:
            await registering
            assert [listing.tool.name for listing in bus.list()] == ["get_weather"]
    assert set(naps.taken) == {2}


async def test_a_documented_plugin_ends_without_an_error_if_the_bus_has_stopped() -> None:
    plugin = documented(f"http://127.0.0.1:{free_ports(1)[0]}", 9876)
    async with asyncio.timeout(WAIT_SECONDS):
        await plugin["unregister_on_shutdown"]()


# -- clients/rest as a process ---------------------------------------------------------------------------------------


@contextmanager
def plugin_process(folder: Path, main_server: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs clients/rest/plugin.py until the block is left; it is killed where it is still there."""
    with open(folder / "plugin.err", "ab") as said:
        process = subprocess.Popen(
            [sys.executable, str(PLUGIN), str(port)],
            env=environment({"MAIN_SERVER": main_server}),
            stderr=said,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def end(process: subprocess.Popen[bytes], number: signal.Signals) -> int:
    """Sends a signal; returns the exit code."""
    process.send_signal(number)
    return await asyncio.to_thread(process.wait, WAIT_SECONDS)


async def test_the_rest_plugin_answers_calls_and_unregisters_on_a_signal(tmp_path: Path) -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        with plugin_process(tmp_path, f"http://{bus.http_address}", 0) as process:
            await offered(bus, "roll_dice")
            for _ in range(3):  # over one kept connection
                rolled = await bus.call("roll_dice", {"dice": "3d6+2"}, timeout=WAIT_SECONDS)
                assert not rolled.is_error, rolled.text
                assert rolled.output["total"] == sum(rolled.output["rolls"]) + 2
            refused = await bus.call("roll_dice", {"dice": "seven"}, timeout=WAIT_SECONDS)
            assert refused.is_error
            assert refused.text.startswith("'seven' is not dice: write NdS")

            assert await end(process, signal.SIGTERM) == 0
            assert bus.list(include_offline=True) == []


async def test_a_killed_rest_plugin_goes_offline_and_is_back_when_it_is_started_again(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with running_bus(http="127.0.0.1:0") as bus:
        main_server = f"http://{bus.http_address}"
        with plugin_process(tmp_path, main_server, port) as process:
            await offered(bus, "roll_dice")
            assert not (await bus.call("roll_dice", {"dice": "d6"}, timeout=WAIT_SECONDS)).is_error
            await end(process, signal.SIGKILL)

        for _ in range(3):  # REST-43
            assert [listing.tool.name for listing in bus.list()] == ["roll_dice"]
            error = (await bus.call("roll_dice", {"dice": "d6"}, timeout=WAIT_SECONDS)).error
            assert error is not None
            assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
            assert f"http://127.0.0.1:{port} accepts no connection" in error.message
        assert bus.list() == []
        (away,) = bus.list(include_offline=True)
        assert away.tool.name == "roll_dice"
        error = (await bus.call("roll_dice", {"dice": "d6"}, timeout=WAIT_SECONDS)).error
        assert error is not None
        assert (error.code, error.retry_safe) == (Code.UNAVAILABLE, True)

        with plugin_process(tmp_path, main_server, port):
            await offered(bus, "roll_dice")
            assert not (await bus.call("roll_dice", {"dice": "d6"}, timeout=WAIT_SECONDS)).is_error


async def test_a_rest_plugin_whose_port_is_in_use_prints_that_and_exits(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with plugin_process(tmp_path, "http://127.0.0.1:9", taken.getsockname()[1]) as process:
            assert await asyncio.to_thread(process.wait, WAIT_SECONDS) == 1
    assert "name another (0 picks a free one)" in (tmp_path / "plugin.err").read_text()


async def test_the_rest_plugin_answers_an_invalid_request_with_a_status(tmp_path: Path) -> None:
    cases = (
        ("/other", "Content-Length: 2", "{}", 404),
        ("/tool_invoke", "Content-Length: 4", "nope", 400),
        ("/tool_invoke", "Content-Length: 2", "[]", 400),
        ("/tool_invoke", "Content-Length: many", "", 413),
        ("/tool_invoke", "Transfer-Encoding: chunked", "", 413),
    )
    async with running_bus(http="127.0.0.1:0") as bus, asyncio.timeout(WAIT_SECONDS):
        with plugin_process(tmp_path, f"http://{bus.http_address}", 0):
            await offered(bus, "roll_dice")
            (listing,) = bus.list()
            port = urlsplit(listing.tool.callback_url).port
            for path, head, body, status in cases:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n\r\n{body}".encode())
                assert (await reader.readline()).split()[1] == str(status).encode(), (path, head)
                writer.close()
                await writer.wait_closed()
