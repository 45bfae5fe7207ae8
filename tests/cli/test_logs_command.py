"""`toolbus logs`: what plugins of a real supervisor have printed, shown and followed over a real bus."""

import json
from pathlib import Path

from tests.cli.served_bus import address_of, start_grpc_bus
from tests.support.processes import Running, toolbus
from tests.support.waiting import until_sync

CHATTY = r"""
import threading
from toolbus import llm_tool
@llm_tool
def speak(text: str) -> None:
    "Prints."
    print(text, flush=True)
print("\x1b]0;owned\x07up \x1b[31mred\x1b[2J\u202e", flush=True)
"""


def test_output_of_a_supervised_plugin_is_shown_followed_and_survives_a_restart(tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY)
    with start_grpc_bus(tmp_path) as bus:
        address = address_of(bus)
        with Running(tmp_path, "run", tmp_path / "chatty.py", "--bus", address) as run:
            run.says("up")
            bus.says("attached source=run.")
            shown = toolbus("logs", "chatty", "--bus", address)
            assert shown.returncode == 0
            assert "up red\n" in shown.stdout
            with Following(tmp_path, "logs", "chatty", "-f", "--json", "--bus", address) as following:
                following.says("up")
                assert toolbus("call", "speak", "text=hello there", "--bus", address).returncode == 0
                following.says("hello there")
                restarted = toolbus("call", "toolbus:plugin_restart", "plugin=chatty", "--bus", address)
                assert restarted.returncode == 0
                following.says("as an operator asked")
                until_sync(lambda: following.out.count("up ") == 2, "the output of the new process")
            (row,) = json.loads(toolbus("logs", "--json", "--bus", address).stdout)["plugins"]
            assert (row["plugin"], row["state"], row["restarts"]) == ("chatty", "running", 1)


def test_to_follow_needs_a_plugin() -> None:
    assert toolbus("logs", "-f").returncode == 2


class Following(Running):
    """A command that follows, as a process of its own."""
