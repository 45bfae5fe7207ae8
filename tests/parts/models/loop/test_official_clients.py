"""Tests turns with each provider's own client, over real HTTP, with a real bus and a connected plugin."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.parts.models.loop.model_server import FLAVOURS, Breaks, Recording, Refuses, holds, serving
from tests.parts.models.loop.official_clients import calls_and_results, official
from tests.parts.models.loop.realtime_provider import with_timeout
from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS
from toolbus import Bus, Plugin
from toolbus.errors import ToolBusError
from toolbus.loop import CallProgress, Finished, Reply, TextDelta, ToolLoop, ToolsLeftOut
from toolbus.parts.models.dialects.dialect import EndpointError
from toolbus.testing import running_bus

# One for each client: how a connection breaks does not depend on the flavour of what it carried.
CLIENTS = ("openai", "responses", "anthropic", "gemini", "ollama")
COUNTING = ("anthropic", "gemini", "ollama", "openai", "responses", "vllm")  # whose recordings hold tokens
SAID = "It is sunny in Paris."
PARIS, OSLO = {"city": "Paris"}, {"city": "Oslo"}

# google-genai derives a class from one of aiohttp's when it makes its first request.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning"),
    pytest.mark.asyncio(loop_scope="module"),
]

every_flavour = pytest.mark.parametrize("flavour", FLAVOURS)
every_client = pytest.mark.parametrize("flavour", CLIENTS)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


class Weather:
    """A plugin with one tool, which can be blocked in the middle of its calls."""

    def __init__(self, address: str) -> None:
        self.plugin = Plugin("weather", address=address)
        self.plugin.tool(self.get_weather)
        self.reset()

    def reset(self) -> None:
        """Forgets the calls, and blocks no further ones."""
        self.calls: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.blocked = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def get_weather(self, city: str) -> dict[str, str]:
        """Tells the weather of a city."""
        self.calls.append(city)
        if not self.go.is_set():
            self.blocked.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return {"city": city, "sky": "sunny"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus() -> AsyncIterator[Bus]:
    """One bus for all tests: none leaves a tool on it."""
    async with running_bus() as bus:
        yield bus


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_plugin(bus: Bus) -> AsyncIterator[Weather]:
    offered = Weather(bus.grpc_addresses[0])
    async with offered.plugin:
        await with_timeout(offered.plugin.ready())
        yield offered


@pytest.fixture(autouse=True)
def plugin(shared_plugin: Weather) -> Weather:
    """The plugin, without the calls of other tests."""
    shared_plugin.reset()
    return shared_plugin


async def watched(loop: ToolLoop) -> tuple[list[Any], Reply]:
    """Runs a turn. Returns what happened, and the reply."""
    async with asyncio.timeout(WAIT_SECONDS):
        events = [event async for event in loop.stream("What is the weather?")]
    finished = events[-1]
    assert isinstance(finished, Finished)
    return events, finished.reply


# -- turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cities", [pytest.param([PARIS], id="one"), pytest.param([PARIS, OSLO], id="two")])
@every_flavour
async def test_calls_of_a_model_run_on_the_bus_and_their_results_go_back(
    flavour: str, cities: list[Any], bus: Bus, plugin: Weather
) -> None:
    steps = ("one" if len(cities) == 1 else "two", "text")
    async with serving(flavour, *steps) as server, official(server) as endpoint:
        events, reply = await watched(ToolLoop(bus, endpoint))
    assert sorted(plugin.calls) == sorted(each["city"] for each in cities)
    assert (reply.text, reply.stopped, reply.rounds) == (SAID, "answered", 2)
    assert [(done.name, done.outcome) for done in reply.calls] == [("get_weather", "ok")] * len(cities)
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["It is", " sunny", " in Paris", "."]

    recording = server.recording
    assert (reply.usage is not None) is (flavour in COUNTING)
    first, second = server.requests
    assert "get_weather" in json.dumps(first)
    calls, results = calls_and_results(recording.dialect, second)
    ids = recording.ids[: len(cities)]
    assert calls == [(each, "get_weather", city) for each, city in zip(ids, cities, strict=True)]
    assert [each for each, _ in results] == [each or "get_weather" for each in ids]
    sent = [json.loads(result) if isinstance(result, str) else result for _, result in results]
    assert sent == [city | {"sky": "sunny"} for city in cities]
    for expected in recording.goes_back:
        assert holds(second, expected), f"{expected} is not in {second}"


@every_flavour
async def test_a_conversation_continues_with_its_messages_and_calls(flavour: str, bus: Bus) -> None:
    async with serving(flavour, "one", "text", "text") as server, official(server) as endpoint:
        loop = ToolLoop(bus, endpoint)
        _, reply = await watched(loop)
        again = await with_timeout(loop.run([*reply.items, {"role": "user", "content": "Sure?"}]))
    assert again.text == SAID
    sent = json.dumps(server.requests[-1])
    assert all(text in sent for text in ("sunny", SAID, "Sure?"))


# -- endpoints that take no tools, or nothing ------------------------------------------------------------------------


@every_flavour
async def test_an_endpoint_that_refuses_tools_gets_requests_without_tools_from_then_on(flavour: str, bus: Bus) -> None:
    refusal = Refuses(**Recording.read(flavour).refusal)
    async with serving(flavour, refusal, "text", "text") as server, official(server) as endpoint:
        loop = ToolLoop(bus, endpoint)
        assert [(await watched(loop))[1].text for _ in range(2)] == [SAID, SAID]
    assert not loop.takes_tools
    assert ["get_weather" in json.dumps(request) for request in server.requests] == [True, False, False]


# How each provider refuses the second tool of a request; Ollama does not say which.
ONE_TOOL = {
    "openai": {
        "error": {"message": "Invalid schema for function 'broken': …", "param": "tools[1].function.parameters"}
    },
    "responses": {"error": {"message": "Invalid schema: …", "param": "tools[1].parameters"}},
    "anthropic": {"type": "error", "error": {"message": "tools.1.custom.input_schema: JSON schema is invalid."}},
    "gemini": {
        "error": {
            "code": 400,
            "message": "* GenerateContentRequest.tools[0].function_declarations[1].parameters.properties: …",
            "status": "INVALID_ARGUMENT",
        }
    },
    "ollama": {"error": "json: cannot unmarshal array into Go struct field .tools.function.parameters.properties"},
}


@pytest_asyncio.fixture(loop_scope="module")
async def broken_tool(bus: Bus) -> AsyncIterator[None]:
    bus.tool(name="broken")(lambda: "never")
    yield
    bus.remove_tool("broken")


@every_client
@pytest.mark.usefixtures("broken_tool")
async def test_one_tool_that_a_provider_refuses_does_not_take_the_others_away(
    flavour: str, bus: Bus, plugin: Weather
) -> None:
    refusal = Refuses(400, ONE_TOOL[flavour])
    search = ("text", "text", refusal) if flavour == "ollama" else ()  # without tools, with either tool
    steps = (refusal, *search, "one", "text", "text")
    async with serving(flavour, *steps) as server, official(server) as endpoint:
        loop = ToolLoop(bus, endpoint)
        events, reply = await watched(loop)
        await watched(loop)
    assert (reply.text, plugin.calls) == (SAID, ["Paris"])
    (left_out,) = [event for event in events if isinstance(event, ToolsLeftOut)]
    assert [each.tool for each in left_out.left_out] == ["broken"]
    probes = [False, False, True] if search else []
    assert ["broken" in json.dumps(request) for request in server.requests] == [True, *probes, False, False, False]


@every_client
async def test_a_temporary_error_is_raised_and_the_next_turn_is_offered_tools_again(flavour: str, bus: Bus) -> None:
    fault = Refuses(503, {"error": {"message": "The model is overloaded.", "code": 503, "status": "UNAVAILABLE"}})
    async with serving(flavour, fault, "one", "text") as server, official(server) as endpoint:
        loop = ToolLoop(bus, endpoint)
        with pytest.raises(Exception, match="overloaded") as raised:
            await watched(loop)
        assert type(raised.value).__module__.partition(".")[0] in ("openai", "anthropic", "google", "ollama")
        assert (await watched(loop))[1].text == SAID
    assert loop.takes_tools


# -- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("events", [pytest.param(0, id="at-first"), pytest.param(2, id="in-the-middle")])
@every_client
async def test_cancelling_a_turn_closes_the_connection_to_a_model_that_hangs(
    flavour: str, events: int, bus: Bus
) -> None:
    steps = ("one", Breaks("text", events, "hangs"))
    async with serving(flavour, *steps) as server, official(server) as endpoint:
        turn = asyncio.create_task(ToolLoop(bus, endpoint).run("What is the weather?"))
        await with_timeout(server.hanging.wait())
        turn.cancel()
        await asyncio.wait([turn], timeout=WAIT_SECONDS)
        assert turn.cancelled()
        await with_timeout(server.left.wait())


@every_client
async def test_cancelling_a_turn_cancels_its_call_at_the_plugin(flavour: str, bus: Bus, plugin: Weather) -> None:
    async with serving(flavour, "one", "text") as server, official(server) as endpoint:
        plugin.go.clear()
        turn = asyncio.create_task(ToolLoop(bus, endpoint).run("What is the weather?"))
        await with_timeout(plugin.blocked.wait())
        turn.cancel()
        await asyncio.wait([turn], timeout=WAIT_SECONDS)
        assert turn.cancelled()
        await with_timeout(plugin.cancelled.wait())
    assert len(server.requests) == 1


@every_client
async def test_a_server_that_dies_in_the_middle_of_an_answer_ends_the_turn_and_not_the_loop(
    flavour: str, bus: Bus
) -> None:
    steps = (Breaks("text", 2, "dies"), "one", "text")
    async with serving(flavour, *steps) as server, official(server) as endpoint:
        loop = ToolLoop(bus, endpoint)
        with pytest.raises(Exception, match=r"(?i)connection|payload") as raised:  # whatever its client raises
            await watched(loop)
        assert not isinstance(raised.value, ToolBusError)
        assert (await watched(loop))[1].text == SAID
    assert loop.takes_tools


@every_client
async def test_an_answer_whose_stream_ends_cleanly_before_its_end_is_an_error(
    flavour: str, bus: Bus, plugin: Weather
) -> None:
    # In the format of chat completions only a call tells that it is cut: some servers give no reason for any end.
    steps = (Breaks("one", 4 if flavour == "openai" else -1, "ends"), "one", "text")
    async with serving(flavour, *steps) as server, official(server) as endpoint:
        loop = ToolLoop(bus, endpoint)
        with pytest.raises(EndpointError, match="broke off after 0 characters"):
            await watched(loop)
        assert not plugin.calls
        assert (await watched(loop))[1].text == SAID
    assert loop.takes_tools


PLUGIN = """
import asyncio
from toolbus import Plugin
from toolbus.sdk import ToolScope

plugin = Plugin("weather")

@plugin.tool
async def get_weather(city: str, scope: ToolScope) -> str:
    scope.progress(message="looking out of the window")
    await asyncio.Event().wait()

plugin.run()
"""


@asynccontextmanager
async def killable(bus: Bus, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a plugin in a process of its own, which is gone in the end whatever happens."""
    file = folder / "weather.py"
    file.write_text(PLUGIN, "utf-8")
    env = environment({"TOOLBUS_ADDRESS": bus.grpc_addresses[0]})
    process = await asyncio.create_subprocess_exec(sys.executable, str(file), env=env)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            async for changes in bus.watch():
                if changes.added:
                    break
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@dataclass
class KilledTurn:
    """A turn whose plugin was killed while its call ran."""

    finished: Finished | None = None  # None before its end
    requests: list[Any] = field(default_factory=list)  # to the model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KilledTurn]:
    """A turn with each client, all at once, in the middle of which their one plugin was killed."""
    turns, begun = {flavour: KilledTurn() for flavour in CLIENTS}, 0

    async def run(bus: Bus, plugin: asyncio.subprocess.Process, flavour: str, turn: KilledTurn) -> None:
        nonlocal begun
        async with serving(flavour, "one", "text") as server, official(server) as endpoint:
            async for event in ToolLoop(bus, endpoint).stream("What is the weather?"):
                if isinstance(event, CallProgress):  # it runs
                    begun += 1
                    if begun == len(turns):
                        plugin.kill()
                if isinstance(event, Finished):
                    turn.finished = event
            turn.requests = server.requests

    async with (
        asyncio.timeout(WAIT_SECONDS),
        running_bus() as bus,
        killable(bus, tmp_path_factory.mktemp("killed")) as plugin,
        asyncio.TaskGroup() as group,
    ):
        for flavour, turn in turns.items():
            group.create_task(run(bus, plugin, flavour, turn))
    return turns


@every_client
async def test_a_model_gets_the_error_of_a_killed_plugin_and_the_turn_continues(
    flavour: str, killed: dict[str, KilledTurn]
) -> None:
    finished, requests = killed[flavour].finished, killed[flavour].requests
    assert finished is not None
    assert finished.reply.text == SAID
    (done,) = finished.reply.calls
    assert done.outcome == "unavailable"
    # Its tool went with it, so some dialects tell of the call in words: where no tool is declared none may be called.
    assert json.dumps(done.result.text)[1:-1] in json.dumps(requests[1])
