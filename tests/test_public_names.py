"""The names that ``import toolbus`` offers: a name that goes or comes is a change for its users, and shows here."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import toolbus
from toolbus import errors
from toolbus.protocol import tool

SDK = {"Plugin", "Host", "SyncHost", "llm_tool"}
RECORDS = {"Tool", "Result", "CallError"}
BUS = {"Bus", "Config"}
ERRORS = {
    *("Code", "Stage", "ToolBusError", "RequestError", "InvalidTool", "InvalidRequest", "ProtocolError"),
    *("VersionMismatch", "UnknownRole", "SessionGone", "NotPermitted", "NotApproved"),
    *("AlreadyAttached", "LimitExceeded"),
    *("Unauthenticated", "NotOffered", "NotKept", "NotAudited", "PeerLost", "CallFailed", "SetupError"),
}


def test_the_public_names_are_these() -> None:
    assert sorted(toolbus.__all__) == sorted({"__version__"} | SDK | RECORDS | BUS | ERRORS)


def test_every_error_class_is_public() -> None:
    classes = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.ToolBusError)
    }
    assert classes <= ERRORS


@pytest.mark.parametrize(
    ("home", "names"),
    [("sdk", SDK), ("protocol.tool", RECORDS), ("bus", BUS), ("errors", ERRORS)],
    ids=["sdk", "tool", "bus", "errors"],
)
def test_a_public_name_is_the_one_of_its_module(home: str, names: set[str]) -> None:
    module = importlib.import_module(f"toolbus.{home}")
    assert [name for name in sorted(names) if getattr(toolbus, name) is not getattr(module, name)] == []


def test_public_names_are_listed_before_they_are_loaded() -> None:
    assert set(toolbus.__all__) <= set(dir(toolbus))
    assert toolbus.Tool is tool.Tool


@pytest.mark.parametrize(
    "package", ["sdk", "dropin", "openapi", "loop", "extension", "dialects", "bus", "parts.tasks", "tools"]
)
def test_a_package_lists_what_it_offers_and_offers_what_it_lists(package: str) -> None:
    module = importlib.import_module(f"toolbus.{package}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) <= set(dir(module))
    assert [name for name in module.__all__ if getattr(module, name, None) is None] == []
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", ["sdk", "loop", "extension"])
def test_a_package_for_peers_loads_a_name_when_it_is_first_used(package: str) -> None:
    script = f"import sys, toolbus.{package} as it; print(len(it.__all__) > 10, 'grpc' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=30
    )
    assert (ran.stdout.strip(), ran.stderr) == ("True False", "")


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no public name 'Bsu'; it has .*Bus"):
        toolbus.Bsu  # noqa: B018


def test_without_the_server_extra_the_error_names_what_to_install() -> None:
    script = "import sys; sys.modules['orjson'] = None\nimport toolbus\nprint(toolbus.Tool)\ntoolbus.Bus"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=30
    )
    assert "toolbus.protocol.tool.Tool" in ran.stdout
    assert "toolbus.Bus needs orjson, which is not installed: pip install 'toolbus[server]'" in ran.stderr


def test_the_version_is_a_release_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", toolbus.__version__)
