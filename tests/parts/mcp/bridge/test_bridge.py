"""The bridge between a client on standard streams and a bus that may start later or restart."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import platformdirs
import psutil
import pytest

from tests.parts.mcp.server.http_client import HttpClient, serving
from tests.support.processes import ROOT, UNMEASURED, environment
from tests.support.waiting import until_sync, within
from toolbus.parts.mcp.bridge import own_answers
from toolbus.parts.mcp.bridge.bridge import WAIT_SECONDS, Bridge
from toolbus.parts.mcp.bridge.bridge_socket import ATTACH
from toolbus.parts.mcp.bridge.links import Link, NoBus
from toolbus.parts.mcp.bridge.program import default_data_dir, endpoint_of
from toolbus.sdk import Plugin
from toolbus.testing import running_bus

Json = dict[str, Any]
MODERN = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
INITIALIZE = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
SERVER = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {"listChanged": True}},
    "serverInfo": {"name": "bus"},
}


class OneBus:
    """A bus as the bridge sees it: answers the bridge's own requests, and records everything."""

    where = "here"
    unsent: Container[str] = ()
    running: Container[str] = ()

    def __init__(self, client: Client, answers_handshakes: bool = True) -> None:
        self._client = client
        self._answers_handshakes = answers_handshakes
        self.got: list[Json] = []

    def send(self, line: bytes) -> None:
        message = json.loads(line)
        self.got.append(message)
        if message.get("method") == ATTACH:
            self.say({"id": message["id"], "result": {}})
        elif message.get("method") == "initialize" and self._answers_handshakes:
            self.say({"id": message["id"], "result": SERVER})

    def leave(self, why: str) -> bool:
        return False

    def close(self) -> None: ...

    def say(self, message: Json) -> None:
        self._client.bridge.from_bus(json.dumps({"jsonrpc": "2.0", **message}).encode())

    @property
    def methods(self) -> list[str]:
        """What it was sent after the bridge attached."""
        return [message.get("method", "") for message in self.got[1:]]


class Client:
    """A client with its bridge, which records the bridge's lines."""

    def __init__(self) -> None:
        self.got: list[Json] = []
        self.bus: OneBus | None = None  # which the bridge finds next
        self.later = 0.0  # by which the bridge's clock is ahead
        self.bridge = Bridge(self._connect, lambda line: self.got.append(json.loads(line)), clock=self._clock)

    def _clock(self) -> float:
        return time.monotonic() + self.later

    def _connect(self, take: Callable[[bytes], None], end: Callable[[Link, str], None]) -> Link:
        if self.bus is None:
            raise NoBus("there is no bus in this test")
        return self.bus

    def finds(self, bus: OneBus) -> OneBus:
        """Has the bridge find a bus."""
        self.bus = bus
        self.bridge.connect_once()
        return bus

    def loses(self, bus: OneBus) -> None:
        """Has the bridge lose it."""
        self.bus = None
        self.bridge.ended(bus, "it was killed")

    def say(self, method: str, id: int | str | None = None, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params, **({} if id is None else {"id": id})}
        self.bridge.take(json.dumps(message).encode() + b"\n")

    def begin(self) -> None:
        """Shakes hands as legacy clients do."""
        self.say("initialize", 1, **INITIALIZE)
        self.say("notifications/initialized")

    def answer(self, id: int | str) -> Json:
        """Returns the only answer that the client got to a request."""
        (answer,) = (each for each in self.got if each.get("id") == id and "method" not in each)
        return answer

    @property
    def notifications(self) -> list[str]:
        """The notifications that the client got."""
        return [each["method"] for each in self.got if "method" in each]


def test_without_a_bus_handshakes_are_answered_and_lists_are_empty_with_a_reason() -> None:
    client = Client()
    client.bridge.connect_once()
    client.begin()
    client.say("server/discover", 2, _meta=MODERN)
    client.say("ping", 3)
    client.say("tools/list", 4)
    client.say("prompts/list", "5", _meta=MODERN)
    initialized = client.answer(1)["result"]
    assert initialized["protocolVersion"] == "2025-06-18"
    assert "there is no bus in this test" in initialized["instructions"]
    assert client.answer(2)["result"]["supportedVersions"] == ["2026-07-28"]
    assert client.answer(3)["result"] == {}
    assert client.answer(4)["result"] == {"tools": []}
    assert client.answer("5")["result"]["prompts"] == []
    assert client.answer("5")["result"]["resultType"] == "complete"


def test_without_a_bus_a_call_fails_and_says_that_nothing_has_run() -> None:
    client = Client()
    client.begin()
    client.say("tools/call", 2, name="x")
    client.say("resources/read", 3, uri="x:y")
    result = client.answer(2)["result"]
    assert result["isError"]
    assert result["_meta"]["dev.toolbus/error"]["stage"] == "NOT_DISPATCHED"
    assert client.answer(3)["error"]["data"]["dev.toolbus/error"]["retry_safe"] is True


@pytest.mark.parametrize("method", ["initialize", "tools/call", "subscriptions/listen", "resources/subscribe", ["x"]])
def test_a_request_whose_params_or_method_have_the_wrong_type_is_answered(method: object) -> None:
    client = Client()
    request = {"jsonrpc": "2.0", "method": method, "params": ["x"]}
    client.bridge.take(json.dumps({**request, "id": 1}).encode())
    assert client.got
    bus = client.finds(OneBus(client))
    client.bridge.take(json.dumps({**request, "id": 2}).encode())
    assert bus.got[-1]["method"] == method


def test_a_new_bus_gets_the_handshake_and_the_client_a_notification_of_changed_lists() -> None:
    client = Client()
    client.begin()
    client.say("logging/setLevel", 2, level="debug")
    bus = client.finds(OneBus(client))
    assert bus.methods == ["initialize", "notifications/initialized", "logging/setLevel"]
    assert client.notifications == ["notifications/tools/list_changed"]
    bus.say({"id": bus.got[-1]["id"], "result": {}})
    assert [each.get("id") for each in client.got if "method" not in each] == [1, 2]


def test_a_client_that_shakes_hands_while_the_bridge_connects_has_a_session() -> None:
    client = Client()

    class Slow(OneBus):
        def say(self, message: Json) -> None:
            if len(self.got) == 1:  # the answer to the first message, which is not a handshake yet
                client.begin()
            super().say(message)

    bus = client.finds(Slow(client))
    client.say("tools/list", 2)
    assert bus.methods == ["initialize", "notifications/initialized", "tools/list"]


def test_a_subscription_that_a_new_bus_refuses_is_repeated_once_it_lists_the_resource() -> None:
    client = Client()
    bus = client.finds(OneBus(client))
    client.begin()
    for id, uri in ((2, "x://a"), (3, "x://b")):
        client.say("resources/subscribe", id, uri=uri)
        bus.say({"id": id, "result": {}})
    client.loses(bus)
    after = client.finds(OneBus(client))
    first, second = after.got[-2:]
    after.say({"id": first["id"], "error": {"code": -32002, "message": "Unknown resource"}})
    after.say({"id": second["id"], "result": {}})
    for _ in range(2):
        after.say({"method": "notifications/resources/list_changed"})
    assert after.methods[-3:] == ["resources/subscribe"] * 3
    assert after.got[-1]["params"] == {"uri": "x://a"}
    after.say({"id": after.got[-1]["id"], "result": {}})
    updated = [each["params"]["uri"] for each in client.got if each.get("method") == "notifications/resources/updated"]
    assert updated == ["x://b", "x://a"], "of what the client may have missed"


def test_requests_and_answers_pass_unchanged_while_there_is_a_bus() -> None:
    client = Client()
    bus = client.finds(OneBus(client))
    client.begin()
    client.say("tools/call", "a", name="x")
    assert client.answer(1)["result"] == SERVER
    assert bus.got[-1] == {"jsonrpc": "2.0", "method": "tools/call", "params": {"name": "x"}, "id": "a"}
    bus.say({"id": "q1", "method": "elicitation/create", "params": {}})
    client.bridge.take(b'{"jsonrpc":"2.0","id":"q1","result":{}}')
    assert bus.got[-1] == {"jsonrpc": "2.0", "id": "q1", "result": {}}
    bus.say({"id": "a", "result": {"content": []}})
    assert client.answer("a")["result"] == {"content": []}
    assert client.notifications == ["elicitation/create"]


def test_requests_that_a_bus_had_when_it_disconnected_fail_with_an_unknown_stage() -> None:
    client = Client()
    bus = client.finds(OneBus(client))
    client.begin()
    client.say("tools/call", 2, name="x")
    client.say("tools/call", 3, name="x", _meta=MODERN)
    client.loses(bus)
    for id in (2, 3):
        assert client.answer(id)["result"]["_meta"]["dev.toolbus/error"]["stage"] == "UNKNOWN"
    assert "resultType" not in client.answer(2)["result"]
    assert client.answer(3)["result"]["resultType"] == "complete"
    bus.say({"id": 2, "result": {}})
    client.answer(2)  # still exactly one


def test_requests_during_a_restart_wait_for_the_next_bus() -> None:
    client = Client()
    client.loses(client.finds(OneBus(client)))
    client.begin()
    client.say("tools/list", 2)
    client.say("tools/list", 3)
    client.say("notifications/cancelled", requestId=3)
    assert [each.get("id") for each in client.got] == [1]
    bus = client.finds(OneBus(client))
    assert bus.methods == ["initialize", "notifications/initialized", "tools/list"]
    assert client.notifications == ["notifications/tools/list_changed"]


DRAINS = {
    "content": [{"type": "text", "text": "UNAVAILABLE: the bus is draining and takes no new calls"}],
    "isError": True,
    "_meta": {"dev.toolbus/error": {"code": "UNAVAILABLE", "stage": "NOT_DISPATCHED", "retry_safe": True}},
}


def test_calls_that_a_draining_bus_refuses_run_at_the_next_one() -> None:
    client = Client()
    bus = client.finds(OneBus(client))
    client.begin()
    client.say("tools/call", 2, name="x")
    client.say("tools/call", 3, name="slow")
    bus.say({"id": 2, "result": DRAINS})
    client.say("tools/call", 4, name="x")  # is not even sent to it
    client.say("tools/call", 5, name="x")
    client.say("notifications/cancelled", requestId=5)
    client.say("tools/list", 6)
    bus.say({"id": 6, "result": {"tools": []}})
    bus.say({"id": 3, "result": {"content": []}})  # what it has, it ends
    assert [each.get("id") for each in client.got] == [1, 6, 3]
    assert bus.methods[-4:] == ["tools/call", "tools/call", "notifications/cancelled", "tools/list"]
    client.loses(bus)
    after = client.finds(OneBus(client))
    assert [each["id"] for each in after.got if each.get("method") == "tools/call"] == [2, 4]
    after.say({"id": 2, "result": {"content": []}})
    assert not client.answer(2)["result"].get("isError")
    client.say("tools/call", 7, name="x")
    assert after.methods[-1] == "tools/call"


@pytest.mark.parametrize(
    "other",
    [
        {**DRAINS, "content": [{"type": "text", "text": "tool 'x' is offline"}]},
        {**DRAINS, "_meta": {"dev.toolbus/error": {"code": "UNAVAILABLE", "stage": "UNKNOWN"}}},
        {**DRAINS, "_meta": {"dev.toolbus/error": 5}},
        {**DRAINS, "_meta": None},
        {"content": [{"type": "text", "text": "the bus is draining"}]},
    ],
)
def test_other_failures_are_answers(other: Json) -> None:
    client = Client()
    bus = client.finds(OneBus(client))
    client.begin()
    client.say("tools/call", 2, name="x")
    bus.say({"id": 2, "result": other})
    assert client.answer(2)["result"] == other


def test_where_no_bus_follows_a_draining_one_the_call_fails_at_its_deadline() -> None:
    client = Client()
    bus = client.finds(OneBus(client))
    client.begin()
    client.say("tools/call", 2, name="x")
    bus.say({"id": 2, "result": DRAINS})
    client.later = WAIT_SECONDS
    thread = threading.Thread(target=client.bridge.run, daemon=True)
    thread.start()
    until_sync(lambda: len(client.got) > 1, "the answer without a bus")
    result = client.answer(2)["result"]
    assert "draining" in result["content"][0]["text"]
    assert result["_meta"]["dev.toolbus/error"]["stage"] == "NOT_DISPATCHED"
    client.bridge.finish()
    client.loses(bus)
    thread.join()


async def test_a_draining_bus_says_so_in_the_words_that_the_bridge_looks_for_whatever_plugins_have_left() -> None:
    async with serving() as bus:
        bus.core.sessions.presence.draining = bus.core.calls.dispatcher.draining = True
        error = (await bus.call("toolbus:this_bus", {})).error
        assert error is not None
        assert own_answers.DRAINING in error.message
        assert own_answers.is_draining((await HttpClient(bus).call("of_a_plugin_that_left")).answer)


def test_a_stream_of_changes_stays_open_over_a_restart() -> None:
    client = Client()
    client.say("subscriptions/listen", 7, _meta=MODERN, notifications={"toolsListChanged": True})
    assert client.notifications == ["notifications/subscriptions/acknowledged"]
    for _ in range(2):
        bus = client.finds(OneBus(client))
        assert bus.methods == ["subscriptions/listen"]
        meta = {"io.modelcontextprotocol/subscriptionId": 7}
        bus.say({"method": "notifications/subscriptions/acknowledged", "params": {"_meta": meta}})
        assert client.notifications == ["notifications/subscriptions/acknowledged", "notifications/tools/list_changed"]
        assert client.got[-1]["params"]["_meta"] == meta
        client.loses(bus)
        client.got.pop()
    client.say("notifications/cancelled", requestId=7)
    assert client.finds(OneBus(client)).methods == []


def test_a_bus_that_does_not_answer_the_handshake_keeps_no_client_waiting() -> None:
    client = Client()
    bus = client.finds(OneBus(client, answers_handshakes=False))
    client.say("initialize", 1, **INITIALIZE)
    until_sync(lambda: client.got, "the answer of the bridge itself")
    bus.say({"id": bus.got[-1]["id"], "result": SERVER})  # too late
    assert client.answer(1)["result"]["serverInfo"]["name"] == "toolbus"


def test_the_reason_of_a_bus_that_refuses_is_in_the_instructions() -> None:
    class Refusing(OneBus):
        def send(self, line: bytes) -> None:
            self.say({"id": None, "error": {"code": -32600, "message": "there is no profile 'x'"}})

    client = Client()
    client.finds(Refusing(client))
    client.begin()
    assert "there is no profile 'x'" in client.answer(1)["result"]["instructions"]


def test_a_request_whose_bus_ends_while_it_is_sent_is_answered_once_and_run_nowhere_else() -> None:
    class Ending(OneBus):
        def send(self, line: bytes) -> None:
            super().send(line)
            if self.got[-1].get("method") == "tools/call":
                client.loses(self)  # as the thread that reads notices it
                raise BrokenPipeError

    client = Client()
    client.finds(Ending(client))
    client.begin()
    client.say("tools/call", 7, name="add")
    following = client.finds(OneBus(client))
    assert client.answer(7)["result"]["isError"]
    assert "tools/call" not in following.methods


def test_the_data_directory_is_that_of_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_data_dir() == platformdirs.user_data_path("toolbus")
    monkeypatch.setenv("XDG_DATA_HOME", "/elsewhere")
    assert default_data_dir() == platformdirs.user_data_path("toolbus")


class Started:
    """`toolbus mcp` as a client starts it."""

    def __init__(self, command: list[str], **env: str) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(env)
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout
        self.stderr: list[bytes] = []
        self._draining = threading.Thread(target=self._drain, daemon=True)
        self._draining.start()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.stderr += lines

    def say(self, method: str, id: int | None = None, **params: Any) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params, **({} if id is None else {"id": id})}
        self._in.write(json.dumps(message).encode() + b"\n")
        self._in.flush()

    def next(self) -> Json:
        line = self._out.readline()
        assert line, b"".join(self.stderr)
        message: Json = json.loads(line)
        return message

    def until(self, method: str) -> Json:
        while True:
            if (message := self.next()).get("method") == method:
                return message

    def ends(self) -> int:
        """Closes its input, and waits for its end."""
        self._in.close()
        return self.process.wait(30)

    def kill(self) -> None:
        """Ends it in any case."""
        self.process.kill()
        self.process.wait()
        self._draining.join()
        self._in.close()
        self._out.close()


def started(*words: str, **env: str) -> Started:
    return Started([sys.executable, "-m", "toolbus.cli", "mcp", *words], PYTHONPATH=str(ROOT), **env)


def test_a_bridge_takes_at_most_20_mb(tmp_path: Path) -> None:
    bridge = started(TOOLBUS_DATA_DIR=str(tmp_path), **UNMEASURED)
    try:
        bridge.say("initialize", 1, **INITIALIZE)
        assert "result" in bridge.next()
        assert psutil.Process(bridge.process.pid).memory_info().rss <= 20 * 1024 * 1024
    finally:
        bridge.kill()


async def test_a_client_that_starts_before_the_bus_keeps_its_session_over_two_buses(tmp_path: Path) -> None:
    bridge = started(TOOLBUS_DATA_DIR=str(tmp_path))
    try:
        bridge.say("initialize", 1, **INITIALIZE)
        assert "no tools now" in (await within(asyncio.to_thread(bridge.next)))["result"]["instructions"]
        bridge.say("notifications/initialized")
        for number in (2, 3):
            async with running_bus(data_dir=tmp_path) as bus:
                await within(asyncio.to_thread(bridge.until, "notifications/tools/list_changed"))
                plugin = Plugin("greeter", address=bus.grpc_addresses[0])
                plugin.tool(greet)
                async with plugin:
                    await plugin.ready()
                    bridge.say("tools/call", number, name="greet", arguments={"name": "Ann"})
                    answer = await within(asyncio.to_thread(_answer, bridge, number))
                    assert answer["result"]["content"][0]["text"] == "Hello, Ann!"
        assert await within(asyncio.to_thread(bridge.ends)) == 0
    finally:
        bridge.kill()


@pytest.mark.parametrize("by", ["option", "variable"])
async def test_a_bridge_finds_the_endpoint_of_a_bus_by_its_address(by: str, tmp_path: Path) -> None:
    async with running_bus(http="127.0.0.1:0") as bus, Plugin("greeter", address=bus.grpc_addresses[0]) as plugin:
        plugin.tool(greet)
        await plugin.ready()
        addresses = f"unix:{tmp_path}/away.sock,{bus.grpc_addresses[0]}"
        named = {"option": ["--bus", addresses], "variable": []}[by]
        variables = {"TOOLBUS_ADDRESS": addresses} if by == "variable" else {}
        bridge = started(*named, **variables, XDG_DATA_HOME=str(tmp_path), TOOLBUS_DATA_DIR="")
        try:
            bridge.say("initialize", 1, **INITIALIZE)
            bridge.say("notifications/initialized")
            bridge.say("tools/call", 2, name="greet", arguments={"name": "Ann"})
            answer = await within(asyncio.to_thread(_answer, bridge, 2))
            assert answer["result"]["content"][0]["text"] == "Hello, Ann!"
        finally:
            bridge.kill()


async def test_a_bus_without_http_says_what_to_name_instead() -> None:
    async with running_bus() as bus:
        with pytest.raises(NoBus, match="serves no HTTP: name its data directory with --data-dir"):
            await asyncio.to_thread(endpoint_of, bus.grpc_addresses[0])


def greet(name: str) -> str:
    """Greets a person."""
    return f"Hello, {name}!"


def _answer(bridge: Started, id: int) -> Json:
    while True:
        if (message := bridge.next()).get("id") == id:
            return message


def test_the_bridge_loads_the_standard_library_alone() -> None:
    program = (
        "import sys; from toolbus.cli import main; sys.argv = ['toolbus', 'mcp', '--help']\n"
        "import toolbus.parts.mcp.bridge.program\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = ('typer', 'grpc', 'google', 'msgspec', 'asyncio', 'ssl', 'logging')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment({}), check=True, cwd=os.sep
    )
    assert ended.stdout.endswith("[]\n"), ended.stdout


def test_requests_that_wait_for_a_bus_get_an_answer_at_their_deadline() -> None:
    client = Client()
    client.loses(client.finds(OneBus(client)))
    client.say("tools/list", 2)
    assert client.got == []
    client.later = WAIT_SECONDS
    thread = threading.Thread(target=client.bridge.run, daemon=True)
    thread.start()
    until_sync(lambda: client.got, "the answer without a bus")
    assert client.answer(2)["result"] == {"tools": []}
    client.bridge.finish()
    thread.join()
