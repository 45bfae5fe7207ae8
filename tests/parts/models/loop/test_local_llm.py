"""Tests the example `examples/local_llm` as a program with a bus, a plugin and a recorded model."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.parts.models.loop.model_server import Breaks, ModelServer, serving
from tests.parts.models.loop.realtime_provider import with_timeout
from tests.support.fork_server import Program, fork_python
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


class Agent:
    """The agent in a process of its own, a fork of one that has imported what it imports."""

    def __init__(self, folder: Path, server: ModelServer, bus: str) -> None:
        self._out, self._err = folder / "agent.out", folder / "agent.err"
        read, self._stdin = os.pipe()
        words = (str(AGENT), "--url", f"{server.url}/v1", "--model", "m")
        variables = environment({"TOOLBUS_ADDRESS": bus, "NO_PROXY": "*"})
        with open(read, "rb") as stdin, self._out.open("wb") as out, self._err.open("wb") as err:
            files = {0: stdin.fileno(), 1: out.fileno(), 2: err.fileno()}
            self.process = fork_python(words, variables, files, Program.AGENT)

    def say(self, *lines: str) -> None:
        os.write(self._stdin, "".join(f"{line}\n" for line in lines).encode())

    async def ended(self, *lines: str) -> str:
        """Says the lines and nothing more. Returns what was answered by a program that may first have to start."""
        self.say(*lines)
        self.close()
        code = await asyncio.to_thread(self.process.wait, HANG_SECONDS)
        assert (code, self._err.read_text()) == (0, "")
        return self._out.read_text()

    def close(self) -> None:
        """Ends its input."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1


Chatting = Callable[[ModelServer], Agent]


@pytest.fixture
def chatting(bus: str, tmp_path: Path) -> Iterator[Chatting]:
    """Starts an agent with a model."""
    started: list[Agent] = []

    def start(server: ModelServer) -> Agent:
        started.append(Agent(tmp_path, server, bus))
        return started[-1]

    yield start
    for agent in started:
        agent.close()
        agent.process.kill()


@pytest.mark.parametrize("flavour", ["llama_cpp", "ollama_v1", "vllm"])
async def test_the_agent_calls_tools_of_the_bus_and_shows_text_and_calls(flavour: str, chatting: Chatting) -> None:
    async with serving(flavour, "two", "text", "text") as server:
        output = await chatting(server).ended("What is the weather?", "Sure?")
    assert re.search(r'→ get_weather {"city": ?"Paris"}\n', output)
    assert re.search(r'→ get_weather {"city": ?"Oslo"}\n', output)
    assert "← get_weather ok: Oslo: sunny" in output
    assert output.count(SAID) == 2
    assert [request["model"] for request in server.requests] == ["m"] * 3
    assert "Paris: sunny" in str(server.requests[2]["messages"])  # the second turn goes on where the first ended


async def test_ctrl_c_ends_a_turn_of_the_agent_and_the_chat_continues(chatting: Chatting) -> None:
    async with serving("openai", Breaks("text", 2, "hangs"), "text") as server:
        agent = chatting(server)
        agent.say("What is the weather?")
        async with asyncio.timeout(HANG_SECONDS):
            await server.hanging.wait()
            agent.process.send_signal(signal.SIGINT)
            await server.left.wait()
        output = await agent.ended("And now?")
    assert "KeyboardInterrupt" in output
    assert SAID in output


async def test_an_unreachable_model_is_reported_and_the_chat_continues(chatting: Chatting) -> None:
    async with serving("openai") as server:
        pass  # nobody listens there any more
    output = await chatting(server).ended("What is the weather?", "")
    assert "APIConnectionError: Connection error." in output
