"""``toolbus export``: names, tokens, losses and what is left out."""

import asyncio
import json
import re

import pytest

from tests.support.processes import toolbus
from toolbus.dialects import DIALECTS
from toolbus.parts.models.commands import export_command, search_command
from toolbus.parts.models.search import MAX_RESULTS, MODES
from toolbus.testing import running_bus


@pytest.fixture
def bus(recording_bus: str) -> str:
    """The bus that records contents."""
    return recording_bus


def test_export_prints_names_on_the_wire_tokens_and_losses(bus: str) -> None:
    ended = toolbus("export", "get.weather", "list_tasks", "--dialect", "gemini-live", "--bus", bus)
    assert (ended.returncode, ended.stderr) == (0, "")
    *rows, total = ended.stdout.splitlines()[1:]
    own, weather = sorted(rows, reverse=True)
    assert re.fullmatch(r"get\.weather +get\.weather +\d+", weather)
    assert re.match(r"list_tasks +list_tasks +\d+ +/properties/status: ", own)
    assert total == f"about {sum(int(row.split()[2]) for row in rows)} tokens in all"
    assert "get_weather" in toolbus("export", "get.weather", "--dialect", "openai", "--bus", bus).stdout


def test_export_prints_the_tools_of_a_request_and_lists_what_is_left_out(bus: str) -> None:
    ended = toolbus("export", "forecast", "get.weather", "--dialect", "anthropic", "--json", "--bus", bus)
    assert ended.returncode == 0
    assert [tool["name"] for tool in json.loads(ended.stdout)] == ["get_weather"]
    left_out = ended.stderr.splitlines()
    assert left_out[0].split() == ["LEFT", "OUT", "WHY"]
    assert left_out[1].startswith("forecast")
    assert "城市" in left_out[1]


def test_export_names_tools_that_are_not_offered_on_standard_error(bus: str) -> None:
    words = ("export", "get.weather", "nothing", "nothing", "--dialect", "openai", "--bus", bus)
    ended = toolbus(*words, "--user", "kim")
    assert ended.returncode == 0
    assert ended.stderr == "toolbus: not offered to user 'kim': 'nothing'; `toolbus list` shows the tools\n"
    assert "not offered: 'nothing'; " in toolbus(*words, "--json").stderr


async def test_more_tools_than_the_provider_takes_are_a_warning_that_names_both_numbers() -> None:
    async with running_bus() as bus:
        for number in range(129):
            bus.tool(name=f"tool_{number}")(lambda: "ok")
        words = ("export", "--json", "--bus", bus.grpc_addresses[0], "--dialect")
        ended = await asyncio.to_thread(toolbus, *words, "openai")
        assert ended.returncode == 0
        assert len(json.loads(ended.stdout)) == 129
        assert ended.stderr.startswith("toolbus: these are 129 tools, and openai takes at most 128: name some of them")
        assert (await asyncio.to_thread(toolbus, *words, "anthropic")).stderr == ""


def test_an_unknown_dialect_is_wrong_usage_that_lists_the_known_ones(unused_address: str) -> None:
    ended = toolbus("export", "--dialect", "morse", "--bus", unused_address)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "'morse'" in ended.stderr
    assert all(name in ended.stderr for name in DIALECTS)


def test_help_names_every_dialect_and_mode() -> None:
    shown = export_command.EPILOG.replace(",", " ").replace(".", " ").split()
    assert set(DIALECTS) <= set(shown)
    assert all(mode in search_command.EPILOG for mode in MODES)
    assert search_command.MAX_RESULTS == MAX_RESULTS
