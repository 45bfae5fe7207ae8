"""The texts of errors in the records of calls: recorded where only the bus's own user looks, elsewhere for a while."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until, within
from toolbus.bus import Bus, Config
from toolbus.errors import SetupError
from toolbus.testing import running_bus

TEXT = "no account 4711, password=hunter2"


async def newest_text(bus: Bus, name: str = "pay") -> str:
    """Makes a call that fails, and returns the text that its record has."""
    await bus.call(name, {})
    (call,) = (await bus.call("toolbus:calls", {"limit": 1})).unwrap()
    text: str = call["failure"]["message"]
    return text


def offer(bus: Bus) -> None:
    @bus.tool
    def pay() -> None:
        raise LookupError(TEXT)


async def test_a_bus_on_loopback_records_what_tools_say_of_their_errors_without_secrets() -> None:
    async with running_bus() as bus:
        offer(bus)
        text = await newest_text(bus)
        assert "no account 4711" in text
        assert "hunter2" not in text
        (call,) = (await bus.call("toolbus:calls", {"limit": 1})).unwrap()
        assert "arguments" not in call


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ({}, True),
        ({"grpc": ("unix:/tmp/toolbus.sock",)}, True),
        ({"neighbours": ("any",)}, False),
        ({"grpc": ("127.0.0.1:0", "tls:0.0.0.0:0")}, False),
        ({"https": "0.0.0.0:0"}, False),
        ({"https": "0.0.0.0:0", "record_errors": "always"}, True),
        ({"record_errors": "never"}, False),
    ],
)
def test_texts_are_recorded_by_default_where_only_the_own_user_connects(
    settings: dict[str, Any], recorded: bool, tmp_path: Path
) -> None:
    assert Config(data_dir=tmp_path, **settings).records_errors is recorded


def test_another_word_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SetupError, match=r"record_errors is 'yes'.*own, always"):
        Config(record_errors="yes")


async def test_an_operator_has_them_recorded_for_a_while() -> None:
    async with running_bus(record_errors="never") as bus:
        offer(bus)
        assert await newest_text(bus) == ""
        assert (await bus.call("toolbus:record_errors")).unwrap() == {"recorded": True, "seconds": 600.0}
        assert "no account" in await newest_text(bus)
        begun = (await bus.call("toolbus:record_errors", {"seconds": 0.01})).unwrap()
        assert begun == {"recorded": True, "seconds": 0.01}
        await within(until(lambda: not bus.records.texts, "the end of the recording"))
        assert await newest_text(bus) == ""
        await bus.call("toolbus:record_errors")
        assert (await bus.call("toolbus:record_errors", {"seconds": 0})).unwrap() == {"recorded": False, "seconds": 0.0}


async def test_what_the_configuration_records_is_not_ended_by_an_operator() -> None:
    async with running_bus() as bus:
        assert (await bus.call("toolbus:record_errors", {"seconds": 0})).unwrap() == {"recorded": True, "seconds": 0.0}
        assert (await bus.call("toolbus:record_errors")).unwrap() == {"recorded": True, "seconds": 0.0}


async def test_a_length_out_of_range_names_the_range() -> None:
    async with running_bus() as bus:
        answer = await bus.call("toolbus:record_errors", {"seconds": 86_401})
        assert answer.is_error
        assert "86401, it must be from 0 to 86400" in answer.text
