"""The verbs of scenarios: each accepts what a client should do, and names what another one did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from tests.support.waiting import WAIT_SECONDS
from toolbus.parts.conformance.bus_player import RawStream
from toolbus.parts.conformance.match import Mismatch, Missed
from toolbus.parts.conformance.player import WorldVerbs
from toolbus.parts.conformance.script import Scenario
from toolbus.parts.conformance.scripted_bus import Line
from toolbus.parts.conformance.stage import TOKEN, ScenarioStage
from toolbus.parts.conformance.stream_verbs import StreamVerbs, Unclaimed
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

SLEEPS = ("sh", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done")
ATTACH = {
    "protocol_version": 1,
    "source": "conformance",
    "instance": "0123456789abcdef0123456789abcdef",
    "token": TOKEN,
    "tools": [{"name": "echo", "parameters_json": "{}"}],
}
SOON = {"within": 0.05}  # for what does not come


class Bench:
    """A scripted bus, and a client whose messages the test writes; its process only sleeps."""

    def __init__(self, stage: ScenarioStage) -> None:
        self.stage = stage
        self.line = stage.lines["plugin"]
        self.streams, self.world = StreamVerbs(stage), WorldVerbs(stage)
        self.channel = grpc.aio.insecure_channel(self.line.proxy.address)
        self.stub: Any = rpc.ToolBusServiceStub(self.channel)

    def open(self) -> RawStream:
        return RawStream(self.stub.Invoke())

    async def attach(self, **fields: Any) -> RawStream:
        client = self.open()
        await client.send({"attach": {**ATTACH, **fields}})
        return client

    async def attached(self) -> RawStream:
        client = await self.attach()
        await self.play("accept", {})
        assert (await client.next("the answer"))[0] == "attached"
        return client

    async def play(self, verb: str, value: Any, line: Line | None = None, **further: Any) -> None:
        verbs = self.streams if hasattr(self.streams, verb) else self.world
        await getattr(verbs, verb)(line or self.line, {verb: value, **further})

    async def fails(self, text: str, verb: str, value: Any, **further: Any) -> Mismatch:
        with pytest.raises(Mismatch, match=text) as error:
            await self.play(verb, value, **further)
        return error.value


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    stage = ScenarioStage(SLEEPS, Scenario("a test", ("OPEN-1",), ()), 1.0)
    await stage.start(tmp_path)
    stage.opened, stage.starting = True, False  # else each wait allows for the start of a client
    bench = Bench(stage)
    try:
        yield bench
    finally:
        await bench.channel.close(None)
        await stage.stop()


@pytest.mark.parametrize(
    ("fields", "rule", "text"),
    [
        ({"source": "other"}, "", "attach.source"),
        ({"instance": "short"}, "OPEN-4", "the instance is 'short'"),
    ],
)
async def test_an_attach_that_is_not_the_expected_one_is_named(
    bench: Bench, fields: Mapping[str, Any], rule: str, text: str
) -> None:
    await bench.attach(**fields)
    assert (await bench.fails(text, "accept", {})).rule == rule


async def test_a_nested_call_that_the_client_cancels_gets_its_result_as_from_a_bus(bench: Bench) -> None:
    client = await bench.attach()
    await bench.play("accept", {}, answers_cancels=True)
    assert (await client.next("the answer"))[0] == "attached"
    await bench.play("send", {"calls": [{"call_id": "p", "name": "echo"}]})
    assert (await client.next("the call"))[0] == "calls"
    await client.send({"calls": [{"call_id": "n", "name": "other", "parent_call_id": "p"}]})
    await bench.play("expect", {"calls": [{"call_id": "n"}]})
    await client.send({"cancels": [{"call_id": "n"}]})
    field, result = await client.next("the result of the nested call")
    assert (field, result["call_id"], result["error"]["code"]) == ("results", "n", "ERROR_CODE_CANCELLED")
    await client.send({"results": [{"call_id": "p", "output_json": "1"}]})
    await bench.play("expect", {"cancels": [{"call_id": "n"}], "results": [{"call_id": "p"}]})


async def test_a_stream_without_an_attach_and_an_instance_that_changes_break_rules_of_their_own(bench: Bench) -> None:
    await bench.open().send({"heartbeat": {"sequence": "1"}})
    assert (await bench.fails("no attach", "accept", {})).rule == "OPEN-1"
    await bench.attached()
    await bench.attach(instance="f" * 32)
    assert (await bench.fails("this client attached as", "stream", {})).rule == "OPEN-4"
    bench.line.forget()
    await bench.attach()
    assert (await bench.fails("that of a process before", "stream", {})).rule == "OPEN-4"


async def test_a_wrong_token_breaks_a_rule_and_the_scenario_continues(bench: Bench) -> None:
    await bench.attach(token="guess")
    await bench.play("accept", {})
    assert "'guess'" in bench.stage.aside["OPEN-5"]


async def test_tools_are_declared_again_by_an_attach_or_by_unary_requests(bench: Bench) -> None:
    client = await bench.attached()
    await client.send({"attach": {**ATTACH, "tools": [{"name": "late", "parameters_json": "{}"}]}})
    await bench.play("declared", {"has": ["late"], "lacks": ["echo"]})
    session = bench.stage.current(bench.line).session_id
    register = bench.stub.Register(wire.RegisterRequest(session_id=session, tools=[pb.Tool(name="more")]))
    await bench.play("declared", {"has": ["more"]})
    answer = await register
    assert (answer.ok, list(answer.registered)) == (True, ["more"])
    unregister = bench.stub.Unregister(wire.UnregisterRequest(session_id=session, name="late"))
    await bench.play("declared", {"lacks": ["late"]})
    assert (await unregister).ok
    await bench.fails("nothing came", "declared", {"has": ["never"]}, **SOON)


async def test_another_request_or_session_is_no_declaration(bench: Bench) -> None:
    await bench.attached()
    listing = bench.stub.List(wire.ListRequest())
    await bench.fails("came: a request List", "declared", {"has": ["more"]})
    foreign = bench.stub.Register(wire.RegisterRequest(session_id="other", tools=[pb.Tool(name="more")]))
    assert (await bench.fails("of the session 'other'", "declared", {"has": ["more"]})).rule == "OPEN-9"
    for call in (listing, foreign):
        call.cancel()


async def test_expected_items_come_in_any_number_of_messages_unless_that_is_bounded(bench: Bench) -> None:
    client = await bench.attached()
    for count in ("2", "1"):
        await bench.play(
            "send", {"calls": [{"call_id": f"{count}a", "name": "echo"}, {"call_id": f"{count}b", "name": "echo"}]}
        )
    for each in ("2a", "2b"):
        await client.send({"results": [{"call_id": each, "output_json": "1"}]})
    results = {"results": [{"call_id": "2a"}, {"call_id": "2b"}]}
    with pytest.raises(Missed, match="the number of messages"):
        await bench.play("expect", results, messages=1)
    await client.send({"results": [{"call_id": "1b", "output_json": "1"}, {"call_id": "1a", "output_json": "1"}]})
    in_order = {"results": [{"call_id": "1a"}, {"call_id": "1b"}]}
    await bench.fails("expected: results", "expect", in_order, in_order=True)
    await bench.play("expect", {"results": [{"call_id": "1a"}]})
    await bench.fails("nothing came", "expect", {"heartbeat": {}}, **SOON)


async def test_quiet_and_no_stream_fail_for_what_comes(bench: Bench) -> None:
    client = await bench.attached()
    await bench.play("quiet", 0.02)
    await client.send({"cancels": [{"call_id": "unknown"}]})
    assert (await bench.fails("not made on this stream", "quiet", 1.0)).rule == "CALL-2"
    await client.send({"drain": {"reason": "leaving"}})
    await bench.fails("expected: nothing for 1.0 s", "quiet", 1.0)
    await bench.play("no_stream", 0.02)
    await bench.attach()
    await bench.fails("came: a stream", "no_stream", 1.0)


async def test_only_the_end_of_a_direction_counts_as_a_half_close(bench: Bench) -> None:
    client = await bench.attached()
    await client.send({"drain": {"reason": "leaving"}})
    await bench.fails("came: drain", "expect_half_close", True)
    await client.half_close()
    await bench.play("expect_half_close", True)
    await bench.play("end", "UNAVAILABLE", text="the bus stops")
    assert await client.next("the end") == ("end", ("UNAVAILABLE", "the bus stops"))


async def test_unary_requests_are_checked_and_answered(bench: Bench) -> None:
    await bench.attached()
    listing = bench.stub.List(wire.ListRequest(source="a"))
    await bench.play("rpc", "List", request={"source": "a"}, response={"revision": "7"})
    assert (await listing).revision == 7
    refused = bench.stub.List(wire.ListRequest())
    await bench.play("rpc", "List", status="NOT_FOUND", text="no such role")
    with pytest.raises(grpc.aio.AioRpcError, match="no such role"):
        await refused
    other = bench.stub.Clear(wire.ClearRequest())
    await bench.fails("came: a request Clear; expected: List", "rpc", "List")
    other.cancel()


async def test_a_tool_that_the_client_does_not_offer_is_unclaimed(bench: Bench) -> None:
    await bench.attached()
    with pytest.raises(Unclaimed, match="meet"):
        await bench.play("send", {"calls": [{"call_id": "1", "name": "meet"}]})
    with pytest.raises(Unclaimed, match="host"):
        await bench.play("drive", {"id": "1", "name": "echo"})


async def test_the_outcome_of_a_driven_call_is_what_its_result_says(bench: Bench) -> None:
    client = await bench.attach(tools=[{"name": "host", "parameters_json": "{}"}])
    await bench.play("accept", {})
    for number, output in (("1", '{"failed": false}'), ("2", '{"failed": true}')):
        await bench.play("drive", {"id": number, "name": "echo"})
        await client.send({"results": [{"call_id": f"drive-{number}", "output_json": output}]})
        if number == "1":
            await bench.play("outcome", {"id": number, "failed": False})
    await bench.fails("what the application saw", "outcome", {"id": "2", "failed": False})
    await client.send({"drain": {"reason": "leaving"}})
    await bench.fails("came: drain", "outcome", {"id": "3"})


async def test_a_stalled_connection_passes_nothing_on_and_a_reset_one_ends_the_stream(bench: Bench) -> None:
    client = await bench.attached()
    await bench.play("stall", True)
    await client.send({"drain": {"reason": "leaving"}})
    await bench.play("quiet", 0.05)
    await bench.play("stall", False)
    await bench.play("expect", {"drain": {"reason": "leaving"}})
    await bench.play("cut", True)
    assert (await client.next("the end"))[1][0] == "UNAVAILABLE"


async def test_a_client_that_is_sent_away_sees_why(bench: Bench) -> None:
    client = await bench.attached()
    await bench.play("goaway", True)
    name, text = (await client.next("the end"))[1][:2]
    assert name in ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL")
    assert text


async def test_attempts_are_counted_and_their_pauses_measured(bench: Bench) -> None:
    async def attempt() -> None:  # at known times, which the proxy notes of connections
        bench.line.proxy.attempts.extend([100.0, 100.05, 100.35])

    for rule, text in (
        ({"during": 0.05, "at_most": 1}, "3 attempts in 0.05 s"),
        ({"during": 0.05, "longest_pause": 0.2}, "a pause of 0.30"),
    ):
        attempting = asyncio.create_task(attempt())  # begins while the verb counts
        await bench.fails(text, "attempts", rule)
        await attempting
    began = time.monotonic()
    await bench.play("attempts", {"during": 0.01, "at_most": 0})
    await bench.play("wait", 0.01)
    assert time.monotonic() - began >= 0.02


async def test_the_clients_process_is_signalled_restarted_and_its_end_judged(bench: Bench) -> None:
    await bench.play("shown", "ready", times=1)
    await bench.fails("nothing came", "shown", "never", **SOON)
    await bench.fails("still runs after 0.01 s", "expect_exit", "done", within=0.01)
    await bench.play("restart", True)
    await bench.play("shown", "ready", times=1)
    await bench.play("leave", True)
    await bench.play("expect_exit", "failed", within=WAIT_SECONDS)
    await bench.fails("the exit code is 5, expected 0", "expect_exit", "done", within=WAIT_SECONDS)
    await bench.fails("the client ended", "shown", "never")
    await bench.play("restart", True)
    await bench.play("signal", "KILL")
    await bench.play("expect_exit", "failed", within=WAIT_SECONDS)


async def test_a_client_that_was_restarted_has_the_time_of_a_start_for_its_stream(bench: Bench) -> None:
    await bench.play("restart", True)

    async def start() -> RawStream:
        await asyncio.sleep(0.3)
        return await bench.attach()

    starting = asyncio.create_task(start())
    await bench.play("accept", {}, within=0.05)
    client = await starting
    assert (await client.next("the answer"))[0] == "attached"
    await bench.fails("nothing came", "accept", {}, **SOON)


async def test_a_renewed_credential_replaces_the_file(tmp_path: Path) -> None:
    stage = ScenarioStage(SLEEPS, Scenario("a test", ("KEY-1",), (), access="mtls", mode=0o640), 1.0)
    await stage.start(tmp_path)
    try:
        await WorldVerbs(stage).renew(stage.lines["plugin"], {"renew": "second-token"})
    finally:
        await stage.stop()
    file = tmp_path / "credential.toml"
    assert file.stat().st_mode & 0o777 == 0o640
    assert 'token = "second-token"' in file.read_text()
    assert 'address = "mtls:127.0.0.1:' in file.read_text()
