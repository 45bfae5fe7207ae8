from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOWS = """
import os, sys

class Shows:
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))

sys.meta_path.insert(0, Shows())
import toolbus.sdk.grpc_transport
print(os.environ.get("GRPC_EXPERIMENTS"))
"""
SWITCH = "-event_engine_client,-event_engine_listener"


@pytest.mark.parametrize(
    ("variables", "while_imported", "afterwards"),
    [
        ({}, SWITCH, "None"),
        ({"TOOLBUS_GRPC_EXPERIMENTS": "keep"}, "None", "None"),
        ({"GRPC_EXPERIMENTS": "mine"}, "mine", "mine"),
        ({"GRPC_EXPERIMENTS": SWITCH}, SWITCH, SWITCH),
    ],
)
def test_the_sdk_switches_grpc_while_it_imports_it_and_only_then(
    variables: dict[str, str], while_imported: str, afterwards: str
) -> None:
    ambient = {name: value for name, value in os.environ.items() if "GRPC" not in name}
    ended = subprocess.run(
        [sys.executable, "-c", SHOWS], env=ambient | variables, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == [while_imported, afterwards]


def test_neither_plugin_nor_host_imports_grpc_on_the_lane() -> None:
    names = (
        "import sys; from toolbus import Plugin; from toolbus.sdk import Host, SyncHost; print('grpc' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
