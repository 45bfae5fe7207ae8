"""Plugins that are made once, as a module does it, and run any number of times: in tests above all."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolbus.errors import SetupError
from toolbus.sdk import Plugin, llm_tool
from toolbus.testing import running_bus

FILE = """
from toolbus import Plugin
plugin = Plugin("weather")
@plugin.tool
def get_weather(city: str) -> str:
    "Returns the weather of a city."
    return f"{city}: sunny"
"""


async def test_a_plugin_of_a_module_runs_in_one_test_after_the_other_and_never_on_the_real_bus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "weather.py").write_text(FILE)
    async with running_bus() as real:
        monkeypatch.setenv("TOOLBUS_ADDRESS", real.grpc_addresses[0])
        plugin = Plugin("voice")
        plugin.add_tool(lambda text: text.upper(), name="shout", description="Shouts.")
        for _ in range(3):
            async with running_bus(plugin, tmp_path / "weather.py", roles=("a", "b")) as host:
                assert (await host.call("shout", {"text": "hey"})).unwrap() == "HEY"
                assert (await host.call("get_weather", {"city": "Oslo"})).unwrap() == "Oslo: sunny"
                assert {each.source for each in await host.list()} == {"voice", "weather"}
            assert plugin.closed
        assert not real.core.catalog.registry.find("shout")
        async with plugin:  # at its own address again
            await plugin.ready()
            assert real.core.catalog.registry.find("shout")
            with pytest.raises(SetupError, match="plugin 'voice' runs: close it before you start it again"):
                await plugin.start()


async def test_a_tool_that_the_bus_refuses_fails_the_test_with_the_reason() -> None:
    plugin = Plugin("bad")

    @plugin.tool
    @llm_tool(parameters={"type": "object", "properties": {"x": {"type": "no"}}})
    def odd(x: int) -> int:
        """Is declared badly."""
        return x

    with pytest.raises(SetupError, match=r"the bus refuses tools of 'bad': tool 'odd': schema at #/properties/x/type"):
        async with running_bus(plugin):
            pass


def test_setting_an_attribute_of_a_plugin_that_would_do_nothing_is_an_error() -> None:
    plugin = Plugin("voice", address="127.0.0.1:7")
    for name in ("address", "source", "token", "instance", "adress"):
        with pytest.raises(AttributeError):
            setattr(plugin, name, "127.0.0.1:8")
    assert plugin.address == "127.0.0.1:7"
