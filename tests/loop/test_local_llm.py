"""Tests the example `examples/local_llm` as a program with a bus, a plugin and a recorded model."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.loop.model_server import Breaks, ModelServer, serving
from tests.loop.realtime_provider import with_timeout
from tests.support.processes import ROOT, Running, environment
from tests.support.waiting import HANG_SECONDS
from toolbus import Plugin

AGENT = ROOT / "examples" / "local_llm" / "agent.py"
SAID = "It is sunny in Paris."


def test_the_agent_has_less_than_40_lines() -> None:
    assert len(AGENT.read_text("utf-8").splitlines()) < 40


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[str]:
    """A bus in a process of its own, with a plugin; its address."""
    with Running(tmp_path, "serve", "--grpc", "127.0.0.1:0", "--http", "off", "--ephemeral") as serve:
        await asyncio.to_thread(serve.says, "toolbus ready")
        (address,) = re.findall(r"grpc=(\S+)", serve.out)
        plugin = Plugin("weather", address=address)

        @plugin.tool
        def get_weather(city: str) -> str:
            """Tells the weather of a city."""
            return f"{city}: sunny"

        async with plugin:
            await with_timeout(plugin.ready())
            yield address


@asynccontextmanager
async def chatting(server: ModelServer, bus: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(AGENT), "--url", f"{server.url}/v1", "--model", "m"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment({"TOOLBUS_ADDRESS": bus, "NO_PROXY": "*"}),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process, *lines: str) -> str:
    """Says the lines and nothing more. Returns what was answered by a program that may first have to start."""
    async with asyncio.timeout(HANG_SECONDS):
        out, err = await process.communicate("".join(f"{line}\n" for line in lines).encode())
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode()


@pytest.mark.parametrize("flavour", ["llama_cpp", "ollama_v1", "vllm"])
async def test_the_agent_calls_tools_of_the_bus_and_shows_text_and_calls(flavour: str, bus: str) -> None:
    async with serving(flavour, "two", "text", "text") as server, chatting(server, bus) as agent:
        output = await ended(agent, "What is the weather?", "Sure?")
    assert re.search(r'→ get_weather {"city": ?"Paris"}\n', output)
    assert re.search(r'→ get_weather {"city": ?"Oslo"}\n', output)
    assert "← get_weather ok: Oslo: sunny" in output
    assert output.count(SAID) == 2
    assert [request["model"] for request in server.requests] == ["m"] * 3
    assert "Paris: sunny" in str(server.requests[2]["messages"])  # the second turn goes on where the first ended


async def test_ctrl_c_ends_a_turn_of_the_agent_and_the_chat_continues(bus: str) -> None:
    async with serving("openai", Breaks("text", 2, "hangs"), "text") as server, chatting(server, bus) as agent:
        assert agent.stdin is not None
        agent.stdin.write(b"What is the weather?\n")
        async with asyncio.timeout(HANG_SECONDS):
            await server.hanging.wait()
            agent.send_signal(signal.SIGINT)
            await server.left.wait()
        output = await ended(agent, "And now?")
    assert "KeyboardInterrupt" in output
    assert SAID in output


async def test_an_unreachable_model_is_reported_and_the_chat_continues(bus: str) -> None:
    async with serving("openai") as server:
        pass  # nobody listens there any more
    async with chatting(server, bus) as agent:
        output = await ended(agent, "What is the weather?", "")
    assert "APIConnectionError: Connection error." in output
