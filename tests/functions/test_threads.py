from __future__ import annotations

import asyncio

from toolbus.functions.workers import Inbox


def test_an_inbox_of_a_closed_loop_never_accepts_a_job() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    inbox = Inbox(loop)
    ran: list[int] = []
    assert [inbox.put(ran.append, number) for number in range(3)] == [False, False, False]
    inbox.run_remaining()
    assert ran == []


def test_a_job_put_before_a_loop_closed_runs_on_the_closing_thread() -> None:
    loop = asyncio.new_event_loop()
    inbox = Inbox(loop)
    ran: list[int] = []
    assert inbox.put(ran.append, 1)
    inbox.run_remaining()
    assert ran == []  # the loop may still come to it
    loop.close()
    assert not inbox.put(ran.append, 2)
    inbox.run_remaining()
    assert ran == [1]


def test_a_loop_runs_what_is_put_in_order() -> None:
    loop = asyncio.new_event_loop()
    inbox = Inbox(loop)
    ran: list[int] = []
    for number in range(3):
        assert inbox.put(ran.append, number)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert ran == [0, 1, 2]
