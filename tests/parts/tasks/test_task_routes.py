"""Tasks over HTTP: what their owner is told, that nobody else is, and results too large to be read again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.bus.gateway.calling import Connection, client, events, invoke, legacy_plugin
from tests.support.waiting import WAIT_SECONDS, Stopwatch, until
from toolbus.bus import Bus
from toolbus.parts.tasks.task_routes import TaskCancelled, TaskLines, TaskRedirected, TaskShown
from toolbus.protocol.tool import Result
from toolbus.sdk import ToolScope
from toolbus.testing import running_bus

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE = 0.01  # seconds after which a call becomes a task
LINE = ["task_id", "tool", "status", "seconds", "started", "ended", "progress", "error"]
Words = dict[str, Any]


@dataclass
class Works:
    """A bus whose tool ``work`` ends when it is told to, with what it is told."""

    bus: Bus
    http: httpx.AsyncClient
    running: list[asyncio.Future[Any]] = field(default_factory=list)  # one for each call, oldest first
    scopes: list[ToolScope] = field(default_factory=list)  # the same

    async def begin(self, user: str = "") -> str:
        """Calls it; returns the task that it becomes."""
        more = {"background_after_seconds": AT_ONCE, "context": {"user_id": user}}
        said = await invoke(self.http, "work", {}, **more)
        assert said["output"]["status"] == "running", said
        task_id: str = said["output"]["task_id"]
        return task_id

    async def get(self, path: str, model: Any = TaskShown, **query: Any) -> Words:
        answer = await self.http.get(f"/api/tasks{path}", params=query)
        assert answer.status_code == 200, answer.text
        said: Words = answer.json()
        model.model_validate(said)
        return said

    async def awaited(self, task_id: str, **query: Any) -> Words:
        return await self.get(f"/{task_id}/await", timeout=WAIT_SECONDS, **query)


@pytest_asyncio.fixture(loop_scope="module")
async def works() -> AsyncIterator[Works]:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0) as bus, client(bus) as http:
        works = Works(bus, http)

        @bus.tool
        async def work(scope: ToolScope) -> Any:
            works.scopes.append(scope)
            works.running.append(asyncio.get_running_loop().create_future())
            return await works.running[-1]

        yield works


async def test_the_result_of_a_long_call_is_fetched_later(works: Works) -> None:
    task_id = await works.begin("ann")
    works.scopes[0].progress(1, total=3, message="begun")
    running = await works.get(f"/{task_id}", user_id="ann")
    assert sorted(running) == sorted([*LINE, "result"])
    assert (running["task_id"], running["tool"], running["status"]) == (task_id, "work", "running")
    assert (running["ended"], running["error"], running["result"]) == (None, None, None)
    assert running["progress"] == {"done": 1.0, "total": 3.0, "message": "begun"}
    works.running[0].set_result({"answer": [1, 2.5, None, "天"]})
    done = await works.awaited(task_id, user_id="ann")
    assert (done["status"], done["progress"]) == ("completed", None)
    assert done["result"]["output"] == {"answer": [1, 2.5, None, "天"]}
    assert (done["result"]["is_error"], done["result"]["error"]) == (False, None)
    assert done["ended"] >= done["started"] > 1_600_000_000
    assert await works.get(f"/{task_id}", user_id="ann") == done


async def test_a_failed_task_says_why(works: Works) -> None:
    task_id = await works.begin()
    works.running[0].set_exception(ValueError("no such city"))
    failed = await works.awaited(task_id)
    assert failed["status"] == "failed"
    assert "no such city" in failed["error"]


async def test_a_wait_ends_with_its_time_and_the_task_goes_on(works: Works) -> None:
    task_id = await works.begin()
    assert (await works.get(f"/{task_id}/await", timeout=0.01))["status"] == "running"
    assert (await works.get(f"/{task_id}/await", timeout=0))["status"] == "running"
    for wrong in ("-1", "301", "soon", "nan"):
        answer = await works.http.get(f"/api/tasks/{task_id}/await", params={"timeout": wrong})
        assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["query", "timeout"]), wrong
    works.running[0].set_result("late")
    assert (await works.awaited(task_id))["result"]["output"] == "late"


async def test_a_disconnect_ends_the_wait_and_the_task_goes_on(works: Works) -> None:
    task_id = await works.begin()
    waiters = works.bus.tasks._work[task_id].waiters
    async with Connection(works.bus) as connection:
        await connection.ask("GET", f"/api/tasks/{task_id}/await")
        await until(lambda: len(waiters) == 1)
    await until(lambda: not waiters)
    assert (await works.get(f"/{task_id}"))["status"] == "running"
    works.running[0].set_result(1)


# -- whose they are --------------------------------------------------------------------------------------------------


async def test_a_list_holds_a_user_s_tasks_only(works: Works) -> None:
    hers, his, nobodys = [await works.begin(user) for user in ("ann", "bob", "")]
    for user, task_id in (("ann", hers), ("bob", his), ("", nobodys)):
        said = await works.get("", TaskLines, user_id=user)
        assert (said["ok"], said["count"], [each["task_id"] for each in said["tasks"]]) == (True, 1, [task_id])
        assert sorted(said["tasks"][0]) == sorted(LINE)
    assert (await works.get("", TaskLines, user_id="eve"))["tasks"] == []
    assert (await works.get("", TaskLines, user_id="source:http"))["tasks"] == []  # a name that a user may choose
    works.running[0].set_result(1)
    await works.awaited(hers, user_id="ann")
    for status, ids in (("running", []), ("completed", [hers]), ("failed", []), ("", [hers])):
        said = await works.get("", TaskLines, user_id="ann", status=status)
        assert [each["task_id"] for each in said["tasks"]] == ids
    answer = await works.http.get("/api/tasks", params={"status": "done"})
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["query", "status"])


async def test_a_foreign_task_is_answered_like_one_that_never_was(works: Works) -> None:
    task_id = await works.begin("ann")
    for method, path in (("GET", ""), ("GET", "/await"), ("DELETE", ""), ("POST", "/redirect")):
        for user in ("", "bob", "source:http"):
            body = {"url": "http://127.0.0.1:9/", "user_id": user} if method == "POST" else None
            said = []
            for asked in (task_id, "task_0000000000000000"):
                url = f"/api/tasks/{asked}{path}"
                query = {} if method == "POST" else {"user_id": user}
                answer = await works.http.request(method, url, params=query, json=body)
                assert answer.status_code == 404, (method, path, user)
                said.append(answer.json()["detail"].replace(asked, "ID"))
            assert said[0] == said[1]
    assert (await works.get(f"/{task_id}", user_id="ann"))["status"] == "running"


async def test_an_unknown_id_of_any_length_is_echoed_in_short(works: Works) -> None:
    answer = await works.http.get(f"/api/tasks/{'x' * 5_000}")
    assert (answer.status_code, len(answer.text) < 300) == (404, True)


# -- changes ---------------------------------------------------------------------------------------------------------


async def test_a_cancelled_task_ends_with_its_work(works: Works) -> None:
    task_id = await works.begin("ann")
    for cancelled in (True, False):
        answer = await works.http.delete(f"/api/tasks/{task_id}", params={"user_id": "ann"})
        TaskCancelled.model_validate(answer.json())
        assert answer.json() == {"ok": True, "task_id": task_id, "cancelled": cancelled, "status": "failed"}
    await until(lambda: works.running[0].cancelled())
    assert "cancelled" in (await works.get(f"/{task_id}", user_id="ann"))["error"]


@asynccontextmanager
async def webhook() -> AsyncIterator[tuple[str, asyncio.Queue[Words]]]:
    posted: asyncio.Queue[Words] = asyncio.Queue()

    async def take(body: Words) -> bytes:
        posted.put_nowait(body)
        return b"{}"

    async with legacy_plugin(take) as url:
        yield url, posted


async def test_a_result_is_posted_where_it_was_redirected_to_cut_at_9000_characters(works: Works) -> None:
    task_id = await works.begin("ann")
    async with webhook() as (url, posted):
        asked = url.replace("http://", "http://me:secret@")
        bodies: list[tuple[Words, str | None]] = [
            ({"url": url}, url),
            ({"url": None}, None),
            ({"url": asked}, asked.replace("secret", "***")),
        ]
        for body, shown in bodies:
            answer = await works.http.post(f"/api/tasks/{task_id}/redirect", json={**body, "user_id": "ann"})
            TaskRedirected.model_validate(answer.json())
            assert answer.json() == {"ok": True, "task_id": task_id, "url": shown}
        works.running[0].set_result("x" * 20_000)
        async with asyncio.timeout(WAIT_SECONDS):
            told = await posted.get()
            assert {**told, "text": ""} == {
                "task_id": task_id,
                "tool": "work",
                "status": "completed",
                "text": "",
                "truncated": True,
            }
            assert len(told["text"]) == 9_000
            done = {"url": url, "user_id": "ann"}  # has ended: is posted at once
            assert (await works.http.post(f"/api/tasks/{task_id}/redirect", json=done)).status_code == 200
            assert (await posted.get())["task_id"] == task_id


@pytest.mark.parametrize(
    "url",
    ["http://example.com/", "ftp://127.0.0.1/", "http://user:hunter2@10.0.0.1/", "", 5, "bus"],
)
async def test_a_redirect_that_leads_elsewhere_or_back_is_refused(works: Works, url: Any) -> None:
    task_id = await works.begin()
    port = str(works.bus.http_address).rpartition(":")[2]
    given = f"http://localhost:{port}/api/tools" if url == "bus" else url
    answer = await works.http.post(f"/api/tasks/{task_id}/redirect", json={"url": given})
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"][0]["loc"][:2] == ["body", "url"]
    assert "hunter2" not in answer.text
    assert (await works.http.post(f"/api/tasks/{task_id}/redirect", json={})).status_code == 422


async def test_an_unknown_field_of_a_redirect_is_refused_by_its_name(works: Works) -> None:
    task_id = await works.begin()
    answer = await works.http.post(f"/api/tasks/{task_id}/redirect", json={"url": None, "userId": "ann"})
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["body", "userId"])


# -- events ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def following(works: Works, **query: str) -> AsyncIterator[Callable[[], Awaitable[Words]]]:
    async with works.http.stream("GET", "/api/tasks/events", params=query) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "retry: 1000"  # and from now on it hears of every task
        await anext(lines)
        stream = events(answer, lines)

        async def following() -> Words:
            async with asyncio.timeout(WAIT_SECONDS):
                kind, data, _ = await anext(stream)
            assert kind == "task"
            found: Words = data
            return found

        yield following


async def test_a_stream_sends_a_user_s_tasks_as_they_end(works: Works) -> None:
    async with following(works, user_id="ann") as hers, following(works) as nobodys:
        his, first, second, unnamed = [await works.begin(user) for user in ("bob", "ann", "ann", "")]
        for future in works.running:
            future.set_result("x")
        told = [await hers(), await hers()]
        assert {each["task_id"] for each in told} == {first, second}
        assert [each["status"] for each in told] == ["completed", "completed"]
        assert sorted(told[0]) == sorted(LINE)  # not the result
        assert (await nobodys())["task_id"] == unnamed
        assert his
    await until(lambda: not works.bus.tasks._events)


async def test_a_stop_of_the_bus_ends_streams_and_waits_at_once() -> None:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0) as bus, client(bus) as http:
        works = Works(bus, http)

        @bus.tool
        async def work() -> None:
            await asyncio.Event().wait()

        task_id = await works.begin()
        waiting = asyncio.ensure_future(works.awaited(task_id))
        async with following(works) as next_task:
            await until(lambda: len(bus.tasks._work[task_id].waiters) == 1)
            stopwatch = Stopwatch()
            await bus.stop()
            assert stopwatch.seconds() < 0.9  # else their connections would be cut
            assert (await waiting)["status"] == "failed"
            assert (await next_task())["task_id"] == task_id
            with pytest.raises(StopAsyncIteration):
                await next_task()


# -- results as they came --------------------------------------------------------------------------------------------


async def result_of(works: Works, output_json: str) -> str:
    """Has a task end with a text as its output; returns the answer that shows it."""
    loop = asyncio.get_running_loop()
    works.bus.tasks.timeout = 0.0
    ended: asyncio.Future[Any] = loop.create_future()
    said = json.loads(await works.bus.tasks.execute(ended, "work", "ann"))
    ended.set_result(Result("", output_json))
    answer = await works.http.get(f"/api/tasks/{said['task_id']}/await", params={"user_id": "ann"})
    assert answer.status_code == 200
    return answer.text


@pytest.mark.parametrize(
    "output", ["5", "5.0", "1.50e3", str(2**70), "1" * 400, r'"\ud800"', '{"b": 1, "a":{}}', "null", '"天"', "[ ]"]
)
async def test_an_output_is_passed_on_letter_by_letter(works: Works, output: str) -> None:
    text = await result_of(works, output)
    assert f'"output":{output},' in text.replace(f'"output":{output}}}', f'"output":{output},')
    json.loads(text)


@pytest.mark.parametrize("output", ["", "NaN", "1e400", "{", "5 6", "]]]],[[[[1", "1],[2", "[" * 5_000 + "]" * 5_000])
async def test_an_output_that_is_not_json_is_returned_as_text(works: Works, output: str) -> None:
    assert json.loads(await result_of(works, output))["result"]["output"] == output


async def test_a_large_result_does_not_block_the_loop(works: Works) -> None:
    rows = json.dumps([{"number": number, "share": number / 7, "name": "x" * 20} for number in range(60_000)])
    assert len(rows) > 3 << 20

    async def longest_pause() -> float:
        """How long the loop worked at most without a turn while the result was read, in processor time."""
        longest, done = 0.0, asyncio.Event()

        async def tick() -> None:
            nonlocal longest
            before = time.thread_time()
            while not done.is_set():
                await asyncio.sleep(0)
                now = time.thread_time()
                longest, before = max(longest, now - before), now

        ticking = asyncio.ensure_future(tick())
        text = await result_of(works, rows)
        done.set()
        await ticking
        assert rows in text
        return longest

    for _ in range(5):  # a garbage collection makes pauses longer, never shorter
        started = time.thread_time()
        json.dumps(json.loads(rows))
        half = (time.thread_time() - started) / 2  # of what reading it and writing it again takes
        if await longest_pause() < half:
            return
    pytest.fail("the loop stood still while a large result was read")
