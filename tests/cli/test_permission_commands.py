"""``toolbus permissions``, ``permit``, ``grant`` and ``revoke``, and access levels."""

import re
import signal
from pathlib import Path

import pytest

from tests.support.processes import ROOT, toolbus
from tests.support.served_bus import address_of, run_json, start_grpc_bus
from tests.support.waiting import until_sync
from toolbus.cli import terminal


@pytest.fixture
def bus(recording_bus: str) -> str:
    """The bus that records contents."""
    return recording_bus


def test_permit_applies_at_once_to_lists_and_calls(bus: str) -> None:
    def names(*words: str) -> set[str]:
        return {each["name"] for each in run_json(bus, "list", *words)["tools"]}

    permitted = toolbus("permit", "tools", "forecast", "--user", "hal", "--user", "ida", "--bus", bus)
    assert (permitted.returncode, permitted.stdout, permitted.stderr) == (0, "tools forecast: hal, ida\n", "")
    rows = [line.split() for line in toolbus("permissions", "--bus", bus).stdout.splitlines()]
    assert rows == [["KIND", "NAME", "USERS"], ["tools", "forecast", "hal,", "ida"]]
    assert "forecast" not in names()
    assert "forecast" not in names("--user", "jim")
    assert "forecast" in names("--user", "ida")
    assert "PERMISSION_DENIED" in toolbus("call", "forecast", "城市=Oslo", "--user", "jim", "--bus", bus).stderr
    assert toolbus("call", "forecast", "城市=Oslo", "--user", "hal", "--bus", bus).stdout == '"Oslo"\n'
    found = run_json(bus, "search", "tomorrow", "--user", "jim")["results"]
    assert "forecast" not in [each["name"] for each in found]
    for option, users, who in (("--nobody", [], "(nobody)"), ("--everyone", ["*"], "(everyone)")):
        assert toolbus("permit", "tools", "forecast", option, "--bus", bus).stdout == f"tools forecast: {who}\n"
        assert run_json(bus, "permissions")["tools"] == {"forecast": users}
    assert run_json(bus, "permit", "tools", "forecast", "--no-rule") == {"tools": {}, "roles": {}, "sources": {}}
    assert "forecast" in names()


def test_a_rule_for_an_unknown_tool_is_noted(bus: str) -> None:
    for option in ("--nobody", "--everyone", "--user=hal"):
        permitted = toolbus("permit", "tools", "nothing", option, "--bus", bus)
        assert permitted.returncode == 0
        assert permitted.stderr == (
            "toolbus: no source offers such a tool now: the rule for 'nothing' applies as soon as one does\n"
        )
    for words in (
        ("tools", "nothing", "--no-rule"),
        ("sources", "nobody", "--nobody"),
        ("sources", "nobody", "--no-rule"),
    ):
        assert toolbus("permit", *words, "--bus", bus).stderr == ""


def test_the_permissions_of_the_documents_apply_and_permit_is_kept_over_a_restart(tmp_path: Path) -> None:
    text, *_ = re.findall(
        r"^```toml\n(.*?)^```$", (ROOT / "docs/start/permissions.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    file = tmp_path / "toolbus.toml"
    file.write_text(text, "utf-8")
    words = ("--config", file, "--data-dir", tmp_path / "data")
    with start_grpc_bus(tmp_path, *words) as serving:
        tables = run_json(address_of(serving), "permissions")
        assert tables.pop("silenced") == []
        assert tables.pop("generation") == {}
        assert all(tables.values())
        offered = [each["name"] for each in run_json(address_of(serving), "list")["tools"]]
        assert offered == ["check_task", "await_task", "list_tasks", "cancel_task", "search_tools"]
        toolbus("permit", "sources", "more", "--nobody", "--bus", address_of(serving))
        serving.send(signal.SIGTERM)
        assert serving.code() == 0
    with start_grpc_bus(tmp_path, *words) as serving:
        again = run_json(address_of(serving), "permissions")
    assert again == {**tables, "sources": {**tables["sources"], "more": []}, "silenced": [], "generation": {}}


def test_a_tool_with_a_min_level_is_found_with_that_level_only(bus: str) -> None:
    for words, visible in (((), False), (("--level", "49"), False), (("--level", "50"), True)):
        listed = [each["name"] for each in run_json(bus, "list", *words)["tools"]]
        found = [each["name"] for each in run_json(bus, "search", "restart the station", *words)["results"]]
        called = toolbus("call", "restart", *words, "--bus", bus)
        exported = toolbus("export", "restart", "--dialect", "openai", *words, "--bus", bus).stdout
        assert ["restart" in each for each in (listed, found, called.stdout, exported)] == [visible] * 4
        assert called.returncode == (0 if visible else 1)


def test_a_level_that_is_set_twice_or_invalid_is_refused(bus: str) -> None:
    for words in (("--level", "5", "--context", "level=3"), ("--level", "-1"), ("--level", "high")):
        assert toolbus("call", "restart", *words, "--bus", bus).returncode == terminal.USAGE


def test_a_source_loses_its_tools_and_gets_them_back(bus: str) -> None:
    revoked = toolbus("revoke", "weather", "--bus", bus)
    assert (revoked.stdout, revoked.stderr) == ("weather may not offer tools; 5 withdrawn\n", "")
    assert [each["source"] for each in run_json(bus, "list")["tools"] if each["source"] == "weather"] == []
    assert "may not offer tools" in toolbus("permissions", "--bus", bus).stdout
    called = toolbus("call", "forecast", "城市=x", "--bus", bus)
    assert (called.returncode, "is withdrawn" in called.stderr) == (1, True)
    assert toolbus("grant", "weather", "--bus", bus).stdout == "weather may offer tools\n"
    until_sync(
        lambda: len([each for each in run_json(bus, "list")["tools"] if each["source"] == "weather"]) == 4, "its tools"
    )


def test_revoking_from_an_absent_source_is_noted_and_from_an_invalid_one_refused(bus: str) -> None:
    revoked = toolbus("revoke", "wether", "--bus", bus)
    assert (revoked.returncode, "source 'wether' is not attached now" in revoked.stderr) == (0, True)
    assert run_json(bus, "permissions")["silenced"] == ["wether"]
    assert toolbus("grant", "wether", "--bus", bus).returncode == 0
    refused = toolbus("revoke", "dropin:*", "--bus", bus)
    assert (refused.returncode, "breaks the rule" in refused.stderr) == (1, True)
