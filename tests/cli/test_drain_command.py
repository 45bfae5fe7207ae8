"""``toolbus drain``: a source, and the whole bus."""

import json
from pathlib import Path

from tests.support.processes import Running, toolbus
from tests.support.served_bus import PLUGIN, address_of, start_bus
from tests.support.waiting import until_sync


def test_drain_ends_a_source_and_then_the_bus(tmp_path: Path) -> None:
    file = tmp_path / "weather.py"
    file.write_text(PLUGIN)
    with (
        start_bus(tmp_path, "--grpc", "127.0.0.1:0", "--http", "off") as serving,
        Running(tmp_path, "run", file, "--bus", address_of(serving)) as plugin,
    ):
        address = address_of(serving)
        until_sync(lambda: "refuse" in toolbus("list", "--bus", address).stdout, "the plugin's tools")
        unknown = toolbus("drain", "nobody", "--bus", address)
        assert unknown.returncode == 1
        assert "no session of source 'nobody'" in unknown.stderr
        drained = toolbus("drain", "weather", "--json", "--bus", address)
        assert json.loads(drained.stdout) == {"source": "weather", "sessions": 1}
        assert plugin.code() == 0
        assert toolbus("drain", "--bus", address).stdout.startswith("draining the bus")
        assert serving.code() == 0
        assert toolbus("list", "--bus", address).returncode == 3
