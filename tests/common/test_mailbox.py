"""Tests of the bounded mailbox between senders and one slow reader."""

from __future__ import annotations

import asyncio
import threading

from toolbus.common.mailbox import Mailbox


async def _read_all(mailbox: Mailbox[int]) -> list[int]:
    mailbox.close()
    return [each async for each in mailbox]


async def test_events_are_read_in_their_order_and_the_iteration_ends_after_close() -> None:
    mailbox = Mailbox[int](10)
    for number in range(3):
        mailbox.put(number)
    assert len(mailbox) == 3
    assert await _read_all(mailbox) == [0, 1, 2]
    assert await _read_all(mailbox) == []


async def test_a_full_mailbox_drops_the_oldest_and_counts_it() -> None:
    mailbox = Mailbox[int](2)
    for number in range(5):
        mailbox.put(number)
    assert mailbox.lost == 3
    assert repr(mailbox) == "<Mailbox waiting=2 lost=3>"
    assert await _read_all(mailbox) == [3, 4]


async def test_the_reader_is_told_how_many_were_lost_before_what_comes_after_them() -> None:
    mailbox = Mailbox[int](2, on_lost=lambda count: -count)
    for number in range(5):
        mailbox.put(number)
    assert [await anext(mailbox), await anext(mailbox)] == [-3, 3]
    mailbox.put(5)
    mailbox.put(6)
    assert await _read_all(mailbox) == [-1, 5, 6]


async def test_a_sender_takes_back_what_was_not_read_yet() -> None:
    mailbox = Mailbox[int](10)
    first, second = mailbox.put(1), mailbox.put(2)
    assert await anext(mailbox) == 1
    assert mailbox.take_back(first) is None
    assert mailbox.take_back(second) == 2
    mailbox.put(3)
    assert await _read_all(mailbox) == [3]
    assert mailbox.lost == 0


async def test_a_reader_that_waits_is_woken_by_a_put_and_by_the_close() -> None:
    mailbox = Mailbox[int](10)
    reader = asyncio.ensure_future(anext(mailbox))
    await asyncio.sleep(0)
    mailbox.put(1)
    assert await reader == 1

    async def rest() -> list[int]:
        return [each async for each in mailbox]

    ending = asyncio.ensure_future(rest())
    await asyncio.sleep(0)
    mailbox.close()
    assert await ending == []


async def test_a_reader_that_is_cancelled_loses_no_event() -> None:
    mailbox = Mailbox[int](10)
    reader = asyncio.ensure_future(anext(mailbox))
    await asyncio.sleep(0)
    mailbox.put(1)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert await _read_all(mailbox) == [1]


async def test_other_threads_put_and_close() -> None:
    mailbox = Mailbox[int](1_000)

    def send() -> None:
        for number in range(500):
            mailbox.put(number)
        mailbox.close()

    sender = threading.Thread(target=send)
    sender.start()
    assert [each async for each in mailbox] == list(range(500))
    sender.join()


async def test_closing_calls_back_once_and_later_events_are_ignored() -> None:
    closed: list[int] = []
    async with Mailbox[int](10, on_close=lambda: closed.append(1)) as mailbox:
        mailbox.put(1)
    mailbox.close()
    mailbox.put(2)
    assert closed == [1]
    assert await _read_all(mailbox) == [1]
    assert repr(mailbox) == "<Mailbox waiting=0 lost=0 closed>"


def test_events_that_come_after_the_end_of_the_loop_disturb_nobody() -> None:
    async def wait_for_ever() -> tuple[Mailbox[int], asyncio.Task[int]]:
        mailbox = Mailbox[int](10)

        async def read() -> int:
            return await anext(mailbox)

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        return mailbox, reader

    loop = asyncio.new_event_loop()
    mailbox, reader = loop.run_until_complete(wait_for_ever())
    loop.close()
    reader._log_destroy_pending = False  # type: ignore[attr-defined]  # it can never end
    mailbox.put(1)
    sender = threading.Thread(target=mailbox.put, args=(2,))
    sender.start()
    sender.join()
    mailbox.close()
    assert len(mailbox) == 2


async def test_a_mailbox_of_bytes_holds_as_many_as_it_may() -> None:
    mailbox = Mailbox[bytes](10, weigh=len)
    for item in (b"aaaa", b"bbbb", b"cccc"):
        mailbox.put(item)
    assert (len(mailbox), mailbox.lost) == (2, 1)
    mailbox.put(b"x" * 20)  # more than all of it
    assert (len(mailbox), mailbox.lost) == (1, 3)
    assert mailbox.take_back(4) == b"x" * 20
    for item in (b"dddddd", b"eeee"):
        mailbox.put(item)
    mailbox.close()
    assert [each async for each in mailbox] == [b"dddddd", b"eeee"]
