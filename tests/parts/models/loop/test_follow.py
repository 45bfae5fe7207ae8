"""Turns that notifications of plugins start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import FunctionSource, ScriptedModel, call, says
from tests.support.waiting import until, within
from toolbus.errors import PeerLost
from toolbus.loop import ToolLoop
from toolbus.parts.models.dialects.conversation import HistoryItem, Message
from toolbus.parts.moving.neko.plugin_context import describe_message
from toolbus.sdk import Host, Plugin
from toolbus.sdk.notification import Notification, wants_of
from toolbus.testing import running_bus


def text_of(item: HistoryItem) -> str:
    return item.text if isinstance(item, Message) else ""


async def test_a_notification_that_wants_a_reply_starts_a_turn_with_those_that_came_before() -> None:
    model = ScriptedModel(says("the tea is ready"), says("it rains"))
    loop = ToolLoop(FunctionSource(), model.endpoint)
    conversation: list[HistoryItem] = [Message("user", "hello")]
    async with running_bus() as bus, Plugin("kitchen", address=bus.grpc_addresses[0]) as plugin:
        await plugin.ready()
        async with (
            Host(bus.grpc_addresses[0]) as host,
            aclosing(loop.follow(host, conversation, user="ann")) as replies,
        ):
            first = asyncio.ensure_future(anext(replies))
            while not await plugin.notify("nobody", "is the loop there?"):
                await asyncio.sleep(0.1)
            await plugin.notify("ann", "shown only", {"wants": "nothing"})
            await plugin.notify("bob", "for another", {"wants": "reply"})
            for number in (1, 2):
                await plugin.notify("ann", f"water {number}", {"wants": "context", "coalesce_key": "water"})
            await until(lambda: "water 2" in "".join(map(text_of, conversation)), "the context to be read")
            assert not first.done()
            await plugin.notify("", "tea", {"wants": "reply"})
            assert (await within(first)).text == "the tea is ready"
            await plugin.notify("ann", "rain", {"wants": "reply"})
            assert (await within(anext(replies))).text == "it rains"
    sent = [each["content"] for each in model.requests[0]["messages"]]
    assert sent[0] == "hello"
    assert sent[-1] == "[A notification of kitchen, not written by the user]\ntea"
    assert not any("shown only" in each or "for another" in each for each in sent)
    assert [each["content"] for each in model.requests[1]["messages"]][len(sent) :] == [
        "the tea is ready",
        "[A notification of kitchen, not written by the user]\nrain",
    ]


async def _heard(host: Host, text: str) -> None:
    """Waits until a notification has come, and so all before it."""
    async for each in host.notifications():
        if each.text == text:
            return


async def test_of_those_that_come_during_a_turn_the_newest_of_each_key_is_read_with_the_next() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        """Waits."""
        begun.set()
        await go.wait()
        return "done"

    model = ScriptedModel(says("", call("wait")), says("soon"), says("well"))
    loop = ToolLoop(FunctionSource(wait=wait), model.endpoint)
    async with (
        running_bus() as bus,
        Plugin("kitchen", address=bus.grpc_addresses[0]) as plugin,
        Host(bus.grpc_addresses[0]) as host,
        aclosing(loop.follow(host, [], user="ann")) as replies,
    ):
        await plugin.ready()
        arrived = asyncio.ensure_future(_heard(host, "water 3"))
        first = asyncio.ensure_future(anext(replies))
        while not await plugin.notify("nobody", "is the loop there?"):
            await asyncio.sleep(0.1)
        await plugin.notify("ann", "go", {"wants": "reply"})
        await within(begun.wait())
        for text, data in (
            ("water 1", {"wants": "context", "coalesce_key": "water", "priority": 1}),
            ("milk 1", {"wants": "context", "coalesce_key": "milk"}),
            ("water 2", {"wants": "context", "coalesce_key": "water"}),
            ("plain 1", {"wants": "context"}),
            ("plain 2", {"wants": "context"}),
            ("water 3", {"wants": "reply", "coalesce_key": "water", "priority": 9}),
        ):
            assert await plugin.notify("ann", text, data)
        await within(arrived)
        go.set()
        assert (await within(first)).text == "soon"
        assert (await within(anext(replies))).text == "well"
    sent = [each["content"].splitlines()[-1] for each in model.requests[-1]["messages"] if each["role"] == "user"]
    assert sent == ["go", "milk 1", "plain 1", "plain 2", "water 3"]


class Ending:
    """A host that has two notifications, and is closed right after the second."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.closed = asyncio.Event()

    async def notifications(self) -> AsyncIterator[Notification]:
        yield Notification("kitchen", "", "tea", {"wants": "reply"}, 0.0, 1)
        await self.go_on.wait()
        yield Notification("kitchen", "", "rain", {"wants": "reply"}, 0.0, 2)
        self.closed.set()
        raise PeerLost("the host is closed")


async def test_the_end_of_a_host_that_comes_with_its_last_notification_is_told_after_the_turn_of_that() -> None:
    host: Any = Ending()
    loop = ToolLoop(FunctionSource(), ScriptedModel(says("tea"), says("rain")).endpoint)
    async with aclosing(loop.follow(host, [])) as replies:
        assert (await within(anext(replies))).text == "tea"
        host.go_on.set()  # while the program does something with the reply
        await within(host.closed.wait())
        await asyncio.sleep(0)
        assert (await within(anext(replies))).text == "rain"
        with pytest.raises(PeerLost):
            await within(anext(replies))


@pytest.mark.parametrize(
    ("data", "wants"),
    [
        ({"wants": "reply"}, "reply"),
        ({"wants": "context"}, "context"),
        ({"wants": "else"}, "nothing"),
        (None, "nothing"),
        ([1], "nothing"),
        (describe_message({"content": "x"})[1], "reply"),
        (describe_message({"content": "x", "ai_behavior": "read"})[1], "context"),
        (describe_message({"content": "x", "ai_behavior": "blind"})[1], "nothing"),
    ],
)
def test_what_a_notification_wants_is_in_its_data(data: Any, wants: str) -> None:
    assert wants_of(data) == wants
