"""Results that are sent on by themselves: they arrive, or the log says that they did not, and not what they were."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tests.parts.tasks.samples import Receiver, finished, running
from tests.support.waiting import until
from toolbus.bus.callback_url import parse_callback_url
from toolbus.parts.tasks.delivery import MAX_TEXT, Delivery, target_of
from toolbus.parts.tasks.task import Task


@contextmanager
def delivering(attempts: int = 4) -> Iterator[Delivery]:
    with closing(Delivery(attempts, first_backoff=0.001)) as delivery:
        yield delivery


async def test_a_finished_task_is_posted_as_json() -> None:
    async with Receiver() as receiver:
        with delivering() as delivery:
            delivery.send(finished(output_json='"日本 done"'), parse_callback_url(receiver.url))
            await until(lambda: bool(receiver.posts))
    ((headers, body),) = receiver.posts
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert body == {
        "task_id": "task_1",
        "tool": "report",
        "status": "completed",
        "text": "日本 done",
        "truncated": False,
    }


async def test_user_and_password_of_the_url_are_sent_as_basic_auth() -> None:
    async with Receiver() as receiver:
        with delivering() as delivery:
            delivery.send(finished(), parse_callback_url(receiver.url.replace("//", "//ann:secret@")))
            await until(lambda: bool(receiver.posts))
    assert receiver.posts[0][0]["Authorization"] == "Basic YW5uOnNlY3JldA=="


@pytest.mark.parametrize(("size", "truncated"), [(MAX_TEXT, False), (MAX_TEXT + 1, True)])
async def test_a_long_text_is_cut_and_says_so(size: int, truncated: bool) -> None:
    async with Receiver() as receiver:
        with delivering() as delivery:
            delivery.send(finished(output_json=f'"{"x" * size}"'), parse_callback_url(receiver.url))
            await until(lambda: bool(receiver.posts))
    body = receiver.posts[0][1]
    assert body["truncated"] is truncated
    assert len(body["text"]) == MAX_TEXT
    assert body["text"].endswith("the beginning of 9001 characters, check_task has all]") is truncated


async def test_a_receiver_that_stumbles_gets_it_again() -> None:
    async with Receiver(500, 302, 404) as receiver:
        with delivering() as delivery:
            delivery.send(finished(), parse_callback_url(receiver.url))
            await until(lambda: len(receiver.posts) == 4 and not delivery._posts)


async def test_a_receiver_that_takes_nothing_is_given_up_and_the_log_has_no_contents(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Receiver(*[503] * 9) as receiver:
        url = receiver.url.replace("//", "//ann:hunter2@")
        with delivering(attempts=3) as delivery:
            delivery.send(finished(output_json='"my secret"'), parse_callback_url(url))
            await until(lambda: "was not posted" in caplog.text)
    assert len(receiver.posts) == 3
    assert "in 3 attempts: it answered 503" in caplog.text
    assert "<Task task_1 report completed>" in caplog.text
    assert "secret" not in caplog.text
    assert "hunter2" not in caplog.text


async def test_what_waits_to_be_posted_again_keeps_no_result_in_memory() -> None:
    async with Receiver(503) as receiver:
        with closing(Delivery(first_backoff=60.0)) as delivery:
            delivery.send(finished("task_kept", output_json='"large"'), parse_callback_url(receiver.url))
            await until(lambda: bool(receiver.posts))
            held = [each for each in gc.get_objects() if isinstance(each, Task) and each.task_id == "task_kept"]
            assert (held, len(delivery._posts)) == ([], 1)


async def test_a_refused_connection_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with Receiver() as receiver:
        url = receiver.url
    with delivering(attempts=2) as delivery:
        delivery.send(finished(), parse_callback_url(url))
        await until(lambda: "was not posted" in caplog.text)
    assert "ClientConnectorError" in caplog.text


async def test_closing_gives_up_what_waits_and_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async with Receiver(*[500] * 9) as receiver:
        delivery = Delivery(first_backoff=60.0)
        target = parse_callback_url(receiver.url)
        delivery.send(finished(), target)
        await until(lambda: bool(receiver.posts))
        delivery.close()
        delivery.close()
        delivery.send(finished(), target)
    assert "1 finished tasks were not posted: this program ends" in caplog.text
    assert "is not posted to http://127.0.0.1" in caplog.text
    assert len(receiver.posts) == 1


def test_a_function_is_called_at_once_and_its_exception_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    delivered: list[Task] = []
    with delivering() as delivery, caplog.at_level(logging.ERROR):
        delivery.send(finished(), delivered.append)
        delivery.send(finished(), lambda task: 1 / 0)
    assert delivered == [finished()]
    assert "a callback failed for <Task task_1 report completed>" in caplog.text


@pytest.mark.parametrize("url", ["http://example.com/x", "ftp://127.0.0.1/", "", "127.0.0.1:80"])
def test_a_url_that_leads_away_from_this_machine_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="callback_url"):
        target_of(url)


async def wait_for(task: Task) -> None: ...


@pytest.mark.parametrize("target", [wait_for, functools.partial(wait_for), 5, b"http://127.0.0.1/"])
def test_a_target_that_is_neither_url_nor_plain_function_is_refused(target: object) -> None:
    with pytest.raises(TypeError, match="give a URL, or a plain function"):
        target_of(target)


def test_what_still_runs_has_a_text_that_says_what_to_do() -> None:
    assert "Call await_task with task_id='task_1'" in running().text
