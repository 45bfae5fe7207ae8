from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.played_bus import SECONDS, PlayedStream, played_bus
from tests.sdk.plugin_client_cases import wait_for
from tests.support.waiting import Stopwatch, until, within
from toolbus.errors import Code, SetupError
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolDefinition, llm_tool
from toolbus.sdk.host import Host
from toolbus.sdk.plugin_client import Plugin
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

# -- declaring --------------------------------------------------------------------------------------------------------


def test_the_decorator_takes_both_forms_and_returns_the_function() -> None:
    plugin = Plugin("calc")

    @plugin.tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    @plugin.tool(name="times", timeout=5, idempotent=True)
    async def mul(a: int, b: int) -> int:
        return a * b

    assert add(1, 2) == 3
    assert [(spec.tool.name, spec.tool.timeout_seconds) for spec in plugin.tools] == [("add", 30.0), ("times", 5.0)]
    assert plugin.tools.get("times").tool.repeatable  # type: ignore[union-attr]


def test_every_form_of_a_tool_can_be_added_and_a_name_only_once() -> None:
    plugin = Plugin("calc")

    @llm_tool(name="one")
    def first() -> None: ...

    plugin.add_tool(first)
    plugin.add_tool(first, name="two")
    plugin.add_tool(ToolDefinition("three", handler=lambda given: given))
    assert [spec.tool.name for spec in plugin.tools] == ["one", "two", "three"]
    with pytest.raises(SetupError, match="already has a tool 'one'"):
        plugin.add_tool(first)
    assert plugin.remove_tool("one")
    assert not plugin.remove_tool("one")


async def test_a_plugin_that_was_not_started_raises_with_the_fix() -> None:
    with pytest.raises(SetupError, match="await start"):
        await Plugin("calc").ready()
    with pytest.raises(ValueError, match="workers"):
        Plugin("calc", workers=0)


# -- running handlers -------------------------------------------------------------------------------------------------


async def test_an_async_handler_runs_on_the_loop_of_start_and_a_plain_one_on_a_thread() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])
        here = threading.current_thread()

        @plugin.tool
        async def on_loop() -> bool:
            return threading.current_thread() is here

        @plugin.tool
        def on_thread() -> bool:
            return threading.current_thread() is here

        plugin.add_tool(lambda: on_loop(), name="handed_back")
        async with plugin:
            await within(plugin.ready())
            assert (await within(host.call("on_loop"))).unwrap() is True
            assert (await within(host.call("on_thread"))).unwrap() is False
            assert (await within(host.call("handed_back"))).unwrap() is True


async def test_an_async_handler_that_blocks_its_loop_does_not_stop_the_heartbeats() -> None:
    echoed: list[int] = []

    async def ask(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.write(calls=[pb.ToolCall(call_id="1", name="block")])
        await wait_for(blocking)
        for sequence in range(3):
            await stream.write(heartbeat=wire.Heartbeat(sequence=sequence + 1))
            echoed.append((await stream.read_until("heartbeat")).heartbeat.sequence)
        release.set()
        results.append((await stream.read_until("results")).results[0].call_id)
        await stream.read()

    results: list[str] = []
    blocking, release = threading.Event(), threading.Event()
    async with played_bus(ask) as bus:
        plugin = Plugin("calc", address=bus.address)

        @plugin.tool
        async def block() -> None:
            blocking.set()
            release.wait(SECONDS)  # the mistake that this is about

        def run() -> None:
            async def main() -> None:
                await plugin.start()
                await plugin.ready()
                await asyncio.to_thread(release.wait, SECONDS)
                while not results:
                    await asyncio.sleep(0.01)
                await plugin.close()

            asyncio.run(main())

        await asyncio.to_thread(run)
    assert echoed == [1, 2, 3]
    assert results == ["1"]


async def test_a_cancel_reaches_an_async_handler_as_cancellation_within_moments() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])
        began, ended = asyncio.Event(), asyncio.Event()

        @plugin.tool
        async def forever() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with plugin:
            await within(plugin.ready())
            call = asyncio.create_task(host.call("forever"))
            await within(began.wait())
            stopwatch = Stopwatch()
            call.cancel()
            await within(ended.wait())
            assert stopwatch.seconds() < 1.0
            with pytest.raises(asyncio.CancelledError):
                await call


async def test_a_cancel_reaches_a_plain_function_through_its_scope() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])
        began, cancelled = threading.Event(), threading.Event()

        @plugin.tool
        def forever(ctx: ToolScope) -> None:
            began.set()
            if ctx.cancelled.wait(SECONDS):
                cancelled.set()

        async with plugin:
            await within(plugin.ready())
            call = asyncio.create_task(host.call("forever"))
            await wait_for(began)
            call.cancel()
            await wait_for(cancelled)


@pytest.mark.parametrize("kind", ["async", "plain", "stubborn"])
async def test_every_call_has_exactly_one_result_a_cancelled_one_too(kind: str) -> None:
    results: list[pb.ToolResult] = []

    async def ask(stream: PlayedStream) -> None:
        await stream.accept()
        calls = [pb.ToolCall(call_id=str(number), name="work", timeout_seconds=5) for number in range(50)]
        cancels = [pb.ToolCancel(call_id=str(number), reason="cancelled") for number in range(0, 50, 2)]
        await stream.write(calls=calls, cancels=cancels)
        for number in range(1, 50, 7):
            await stream.write(cancels=[pb.ToolCancel(call_id=str(number))])
        while len(results) < 50:
            results.extend((await stream.read_until("results")).results)
        await stream.write(drain=wire.Drain(reason="shutdown"))
        while (frame := await stream.read()) is not None:
            results.extend(frame.results)
        done.set()

    async def rest(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.read()

    done = asyncio.Event()
    async with played_bus(ask, rest) as bus:
        plugin = Plugin("calc", address=bus.address, workers=4, max_in_flight=10)
        if kind == "plain":
            plugin.add_tool(lambda: time.sleep(0.001), name="work")
        else:

            @plugin.tool
            async def work() -> None:
                try:
                    await asyncio.sleep(0.001)
                except asyncio.CancelledError:
                    if kind != "stubborn":
                        raise

        async with plugin:
            await within(done.wait())
    assert sorted(int(result.call_id) for result in results) == list(range(50))
    assert {result.call_id for result in results if not result.is_error} >= {"3", "5"}


async def test_a_call_that_expired_in_the_queue_never_runs() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0], workers=1)
        ran: list[str] = []
        release, began = threading.Event(), threading.Event()

        @plugin.tool
        def work(word: str) -> None:
            ran.append(word)
            began.set()
            release.wait(SECONDS)

        @plugin.tool
        async def ping() -> None: ...

        async with plugin:
            await within(plugin.ready())
            first = asyncio.create_task(host.call("work", {"word": "first"}))
            await wait_for(began)
            late = (await within(host.call("work", {"word": "late"}, timeout=0.1))).error
            await within(host.call("ping"))  # behind the cancel on the same stream
            release.set()
            await within(first)
            await within(host.call("work", {"word": "last"}))
        assert late is not None
        assert late.code is Code.DEADLINE_EXCEEDED
        assert ran == ["first", "last"]


async def test_what_expired_in_the_queue_is_answered_as_not_dispatched() -> None:
    answers: list[pb.ToolResult] = []

    async def ask(stream: PlayedStream) -> None:
        await stream.accept()
        await stream.write(
            calls=[
                pb.ToolCall(call_id="1", name="work", timeout_seconds=5),
                pb.ToolCall(call_id="2", name="work", timeout_seconds=0.01),
            ]
        )
        while len(answers) < 2:
            answers.extend((await stream.read_until("results")).results)
        done.set()
        await stream.read()

    done = asyncio.Event()
    async with played_bus(ask) as bus:
        plugin = Plugin("calc", address=bus.address, workers=1)
        plugin.add_tool(lambda: time.sleep(0.1), name="work")
        async with plugin:
            await within(done.wait())
    error = next(each.error for each in answers if each.call_id == "2")
    assert (error.code, error.stage) == (pb.ERROR_CODE_DEADLINE_EXCEEDED, pb.CALL_STAGE_NOT_DISPATCHED)
    assert error.limit.name == "timeout_seconds"


async def test_a_handler_calls_other_tools_and_its_context_goes_along() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])

        @plugin.tool
        async def inner(a: int) -> int:
            return a + 1

        @plugin.tool
        async def outer(a: int, ctx: ToolScope) -> Any:
            return (await ctx.call("inner", {"a": a})).unwrap()

        @plugin.tool
        def outer_sync(a: int, ctx: ToolScope) -> Any:
            return ctx.call_sync("inner", {"a": a}).unwrap()

        async with plugin:
            await within(plugin.ready())
            assert (await within(host.call("outer", {"a": 1}))).unwrap() == 2
            assert (await within(host.call("outer_sync", {"a": 2}))).unwrap() == 3


async def test_progress_arrives_before_the_result_and_in_order() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])

        @plugin.tool
        def count(ctx: ToolScope) -> str:
            for number in range(3):
                ctx.progress(number + 1, total=3, message=f"step {number}")
            return "done"

        @plugin.tool
        async def spell() -> Any:
            for letter in "abc":
                yield letter

        async with plugin:
            await within(plugin.ready())
            seen: list[Any] = []
            assert (await within(host.call("count", on_progress=seen.append))).unwrap() == "done"
            assert [(each.progress, each.total, each.message) for each in seen] == [
                (1, 3, "step 0"),
                (2, 3, "step 1"),
                (3, 3, "step 2"),
            ]
            seen.clear()
            assert (await within(host.call("spell", on_progress=seen.append))).unwrap() == "abc"
            assert [each.chunk for each in seen] == ["a", "b", "c"]


async def test_a_result_beyond_the_limit_becomes_an_error_that_names_it() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])
        plugin.add_tool(lambda: "x" * (20 << 20), name="much")
        plugin.add_tool(lambda: 1, name="little")
        async with plugin:
            await within(plugin.ready())
            error = (await within(host.call("much"))).error
            assert error is not None
            assert error.code is Code.RESULT_TOO_LARGE
            assert "result_bytes" in error.message
            assert (await within(host.call("little"))).unwrap() == 1


# -- ending -----------------------------------------------------------------------------------------------------------


async def test_close_finishes_the_calls_that_it_has() -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        plugin = Plugin("calc", address=bus.grpc_addresses[0])
        began = asyncio.Event()

        @plugin.tool
        async def slow() -> str:
            began.set()
            await asyncio.sleep(0.2)
            return "done"

        await plugin.start()
        await within(plugin.ready())
        call = asyncio.create_task(host.call("slow"))
        await within(began.wait())
        await within(plugin.close())
        assert (await within(call)).unwrap() == "done"


PROGRAM = """
import gc, time
from toolbus.sdk.plugin_client import Plugin

plugin = Plugin("child", address={address!r})

@plugin.tool
def slow(seconds: float) -> str:
    time.sleep(seconds)
    return "done"

@plugin.tool
async def block(seconds: float) -> str:
    time.sleep(seconds)
    return "done"

plugin.run()
print("ended in good order, frozen:", gc.get_freeze_count())
"""


def start_child(tmp_path: Path, address: str) -> subprocess.Popen[str]:
    program = tmp_path / "child.py"
    program.write_text(PROGRAM.format(address=address))
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_finishes_the_calls_and_ends_the_process(tmp_path: Path, number: signal.Signals) -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        child = start_child(tmp_path, bus.grpc_addresses[0])
        try:
            await until(bus.list, "its tools")
            seconds = {"slow": 1.0, "block": 0.5}  # one still runs when the loop of the other's process goes on
            for name in seconds:
                assert (await within(host.call(name, {"seconds": 0}))).unwrap() == "done"
            calls = asyncio.gather(*(host.call(name, {"seconds": each}) for name, each in seconds.items()))
            while not all(listed.in_flight for listed in await host.list()):
                await asyncio.sleep(0.01)
            child.send_signal(number)
            assert [result.unwrap() for result in await within(calls)] == ["done", "done"]
            out, err = await asyncio.to_thread(child.communicate, timeout=SECONDS)
            assert (child.returncode, out) == (0, "ended in good order, frozen: 0\n"), err
            assert len(await host.list()) == 0
        finally:
            child.kill()
            child.communicate()


def test_the_first_signal_drains_a_plugin_whose_start_has_not_returned_yet() -> None:
    drained = []

    class Starting(Plugin):
        async def start(self, *, address: str | None = None) -> None:
            signal.raise_signal(
                signal.SIGTERM
            )  # the connection has a thread of its own: the tools may be offered by now
            raise SetupError("the test has seen enough")

        def leave(self, reason: str = "closed", grace_seconds: float = 0.0) -> bool:
            drained.append(reason)
            return True

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SetupError, match="seen enough"):
        Starting("p").run()
    assert drained == ["SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("number", "printed"), [(signal.SIGTERM, b""), (signal.SIGINT, b"tidy\n")])
def test_a_signal_before_a_plugin_connects_does_what_it_does_to_any_program(number: int, printed: bytes) -> None:
    program = (
        "import asyncio, os\nfrom toolbus.sdk.plugin_client import Plugin\n\n"
        "class Starting(Plugin):\n    async def start(self, **_):\n"
        f"        os.kill(os.getpid(), {int(number)})\n        await asyncio.sleep(600)\n\n"
        "try:\n    Starting('p').run()\nfinally:\n    print('tidy', flush=True)\n"
    )
    command, place = [sys.executable, "-c", program], Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=place, timeout=SECONDS, check=False, capture_output=True)
    assert (ended.returncode, ended.stdout) == (-number, printed)


async def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    async with running_bus() as bus, Host(bus.grpc_addresses[0]) as host:
        child = start_child(tmp_path, bus.grpc_addresses[0])
        try:
            await until(bus.list, "its tools")
            assert (await within(host.call("slow", {"seconds": 0}))).unwrap() == "done"
            call = asyncio.create_task(host.call("slow", {"seconds": 30}))
            while not any(listed.in_flight for listed in await host.list()):
                await asyncio.sleep(0.01)
            child.send_signal(signal.SIGTERM)
            while len(await host.list()):  # the drain has arrived
                await asyncio.sleep(0.01)
            child.send_signal(signal.SIGTERM)
            await asyncio.to_thread(child.wait, SECONDS)
            assert child.returncode == -signal.SIGTERM
            error = (await within(call)).error
            assert error is not None
            assert error.code is Code.UNAVAILABLE
        finally:
            child.kill()
            child.communicate()
