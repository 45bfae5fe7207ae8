"""``toolbus health``: statuses and changes."""

import json
import signal
from pathlib import Path

from tests.support.processes import Running, toolbus


def test_health_lists_the_bus_and_its_sources(bus: str) -> None:
    ended = toolbus("health", "--json", "--bus", bus)
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["toolbus.source.weather"] == "SERVING"
    assert "serving" in toolbus("health", "toolbus.source.weather", "--bus", bus).stdout


def test_health_of_an_unknown_service_is_exit_code_1(bus: str) -> None:
    ended = toolbus("health", "nobody", "--bus", bus)
    assert ended.returncode == 1
    assert "'nobody'" in ended.stderr


def test_health_watches_until_ctrl_c(bus: str, tmp_path: Path) -> None:
    with Running(tmp_path, "health", "--watch", "--json", "--bus", bus) as watching:
        watching.says('{"service":"","status":"SERVING"}\n')
        watching.send(signal.SIGINT)
        assert watching.code() == 130
        assert watching.err == ""
