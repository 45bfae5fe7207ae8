"""Declarations of servers as tools of the bus, and what is stored of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bus.storage.store_cases import earlier_file
from toolbus.bus.storage.store import Store
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.offer import (
    MAX_COMMANDS,
    MAX_TOOLS,
    Declared,
    MountManifest,
    StoredServer,
    our_name,
    tools_of,
)
from toolbus.parts.mcp.messages.tools import write_declaration
from toolbus.parts.pins.pins import Pinned
from toolbus.protocol.limits import Limits
from toolbus.protocol.tool import NAME

LIMITS = Limits()


def declared(*items: Any, **fields: Any) -> Declared:
    return tools_of(MountEntry("files", command="x", **fields), items, LIMITS)


def tool(name: str = "read", **fields: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object"}, **fields}


def test_a_declaration_becomes_a_tool_with_the_settings_of_its_mount() -> None:
    made = declared(tool(title="Read", description="Reads."), role="Yui", min_level=2, timeout_seconds=9)
    assert made.left == ()
    [one] = made.tools
    assert (one.name, one.display_name, one.description) == ("read", "Read", "Reads.")
    assert (one.role, one.min_level, one.timeout_seconds) == ("Yui", 2, 9)


def test_hints_are_shown_and_believed_only_where_the_operator_says_so() -> None:
    hints = tool(annotations={"readOnlyHint": True, "idempotentHint": True})
    for trusted in (False, True):
        [one] = declared(hints, trust_hints=trusted).tools
        assert one.annotations.read_only is True
        assert one.repeatable is trusted


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"name": "bad", "inputSchema": nested(70)}, "schema_depth"),
        ({"name": "bad", "inputSchema": "x"}, "inputSchema"),
        ({"name": "bad", "description": 5, "inputSchema": {}}, "description"),
        ({"name": "bad", "inputSchema": {"description": "x" * 300_000}}, "schema_bytes"),
        ({"name": "bad", "inputSchema": {"enum": ["\ud800"]}}, "half of a surrogate pair"),
        ({"inputSchema": {}}, "no name"),
        ({"name": 5}, "no name"),
        ("text", "no name"),
        (tool("read"), "declared twice"),
        (tool("bad", execution={"taskSupport": "required"}), "only as a task"),
    ],
)
def test_what_cannot_be_taken_is_left_out_with_the_reason_and_its_neighbours_stay(bad: Any, says: str) -> None:
    made = declared(tool("read"), bad, tool("write"))
    assert [each.name for each in made.tools] == ["read", "write"]
    [left] = made.left
    assert says in left.reason


def test_a_tool_of_the_modern_era_that_needs_a_task_is_offered_without_a_word_for_other_eras() -> None:
    items = [tool(execution={"taskSupport": "required"})]
    made = tools_of(MountEntry("files", command="x"), items, LIMITS, modern=True)
    [one] = made.tools
    assert "execution" not in write_declaration(one.name, one)


def test_what_is_nested_too_deep_is_left_out() -> None:
    made = declared({"name": "bad", "inputSchema": nested(20_000)}, tool())
    assert ([each.name for each in made.tools], len(made.left)) == (["read"], 1)


def test_what_is_only_beside_a_tool_does_not_cost_the_tool() -> None:
    made = declared(tool(icons=[{"src": "data:" + "x" * 300_000}], outputSchema=nested(70)))
    [one] = made.tools
    assert (one.metadata_json, one.output_schema_json) == ("", "")
    icons, schema = made.notices["read"]
    assert "icons" in icons
    assert "outputSchema" in schema


def test_globs_choose_by_either_name_and_deny_wins() -> None:
    items = [tool("read_file"), tool("read_secret"), tool("write_file"), tool("list/all")]
    made = declared(*items, allow=("read_*", "list/*"), deny=("*secret",))
    assert [made.server_names[each.name] for each in made.tools] == ["read_file", "list/all"]
    assert made.hidden == 2


def test_a_name_that_breaks_our_rules_gets_one_that_keeps_them_and_depends_on_nothing_else() -> None:
    both = declared(tool("list/all"), tool("list all"), tool("x" * 100), tool("…"))
    assert len({each.name for each in both.tools}) == 4
    assert list(both.server_names.values()) == ["list/all", "list all", "x" * 100, "…"]
    alone = declared(tool("list all"))
    assert alone.tools[0].name == both.tools[1].name
    assert "the server calls it 'list all'" in alone.notices[alone.tools[0].name]


def test_characters_that_nobody_sees_are_written_out_and_marked() -> None:
    hidden = "Reads.\U000e0041\U000e0042\nIt\u202e is\u200b safe."
    schema = {"type": "object", "properties": {"p": {"type": "string", "description": "a\u2066b", "enum": ["\u202e"]}}}
    made = declared(tool(description=hidden, inputSchema=schema), tool("plain", description="Größe ♥ 👨‍👩‍👧\n\tx"))
    one, plain = made.tools
    assert one.description == "Reads.[U+E0041 ×2]\nIt[U+202E] is[U+200B] safe."
    assert one.parameters["properties"]["p"] == {"type": "string", "description": "a[U+2066]b", "enum": ["\u202e"]}
    assert "invisible" in made.notices["read"][0]
    assert plain.description == "Größe ♥ 👨‍👩‍👧\n\tx"
    assert "plain" not in made.notices


def test_a_changed_tool_that_is_blocked_is_left_out_with_the_command_that_approves_it() -> None:
    made = tools_of(MountEntry("files", command="x"), [tool("a"), tool("b")], LIMITS, {"tool:a"})
    assert [each.name for each in made.tools] == ["b"]
    assert "toolbus access approve files a" in made.left[0].reason


def test_a_mount_has_no_more_tools_than_the_limit() -> None:
    made = tools_of(MountEntry("files", command="x"), [tool(f"t{number}") for number in range(7)], LIMITS, max_tools=5)
    assert len(made.tools) == 5
    assert MAX_TOOLS == 10_000
    assert "2 more tools" in made.left[0].reason


_ANY: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "x"]), inner, max_size=2),
    max_leaves=6,
)
_KEYS = st.sampled_from(["description", "title", "inputSchema", "outputSchema", "annotations", "icons", "_meta"])


@given(st.lists(_ANY | st.dictionaries(_KEYS, _ANY).map(lambda more: {"name": "n", **more}), max_size=4))
@settings(max_examples=30, deadline=None)
def test_whatever_a_server_declares_is_offered_or_left_out(items: list[Any]) -> None:
    made = declared(*items)
    assert len(made.tools) + len(made.left) == len(items)


@given(st.text(min_size=1, max_size=150))
@settings(max_examples=40)
def test_every_name_becomes_one_that_keeps_the_rules(name: str) -> None:
    assert NAME.fullmatch(our_name(name))


# -- what is stored ----------------------------------------------------------------------------------------------------

SAID = StoredServer({"modern": True}, {"tools": [{"name": "read", "description": "\ud800 ü"}]})
KNOWN = {"tool:read": Pinned("{}", ""), "instructions": Pinned("", '"x"')}


@contextmanager
def stored(directory: Path) -> Iterator[MountManifest]:
    with closing(Store.of(directory)) as store:
        store.open()
        yield MountManifest(store)


def test_what_is_saved_is_there_after_a_restart_for_that_command_line_only(tmp_path: Path) -> None:
    with stored(tmp_path) as first:
        assert first.is_new("files", "c1")
        first.save("files", "c1", SAID)
        first.save_fingerprints("files", "c1", KNOWN)
    with stored(tmp_path) as second:
        assert second.load("files", "c1") == SAID
        assert second.fingerprints("files", "c1") == KNOWN
        assert not second.is_new("files", "c1")
        assert (second.load("files", "c2"), second.fingerprints("files", "c2")) == (None, {})


def test_fingerprints_replace_what_was_there() -> None:
    manifest = MountManifest()
    manifest.save_fingerprints("files", "c", KNOWN)
    manifest.save_fingerprints("files", "c", {"tool:read": Pinned("{}", "{1}")})
    assert manifest.fingerprints("files", "c") == {"tool:read": Pinned("{}", "{1}")}


def test_only_the_newest_command_lines_of_a_mount_are_remembered(tmp_path: Path) -> None:
    with stored(tmp_path) as manifest:
        for number in range(MAX_COMMANDS + 2):
            manifest.save_fingerprints("files", str(number), KNOWN)
            manifest.save("files", str(number), SAID)
        manifest.save("other", "c", SAID)
    for _ in range(2):
        with stored(tmp_path) as manifest:
            assert manifest.load("files", "1") is None
            assert manifest.fingerprints("files", "1") == {}
            assert manifest.load("files", "2") == SAID
            assert manifest.fingerprints("files", "2") == KNOWN
            assert manifest.load("other", "c") == SAID


def test_a_kill_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal; from pathlib import Path\n"
        "from toolbus.bus.storage.store import Store\n"
        "from toolbus.parts.mcp.client.offer import *; from toolbus.parts.pins.pins import Pinned\n"
        f"store = Store.of(Path({str(tmp_path)!r})); store.open()\n"
        "m = MountManifest(store); m.save('files', 'c', StoredServer({'modern': True}, {}))\n"
        "m.save_fingerprints('files', 'c', {'tool:a': Pinned('{}', '')})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    with stored(tmp_path) as manifest:
        assert manifest.load("files", "c") == StoredServer({"modern": True}, {})
        assert manifest.fingerprints("files", "c") == {"tool:a": Pinned("{}", "")}


def test_after_a_damaged_file_of_an_earlier_release_nothing_is_trusted_unseen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mcp.db").write_bytes(earlier_file(0x5442746D))
    with caplog.at_level(logging.ERROR), stored(tmp_path) as manifest:
        assert "mcp.db is damaged" in caplog.text
        assert manifest.was_damaged
        assert not manifest.is_new("files", "c")
        manifest.save("files", "c", SAID)


def test_a_damaged_row_is_left_out_and_a_damaged_approval_counts_as_none(tmp_path: Path) -> None:
    with stored(tmp_path) as manifest:
        manifest.save("files", "c", SAID)
        manifest.save("other", "c", SAID)
        manifest.save_fingerprints("files", "c", KNOWN)
    with closing(sqlite3.connect(tmp_path / "bus.db", isolation_level=None)) as connection:
        for key in (["files", "c"], ["files", "c", "tool:read"]):
            connection.execute('UPDATE mounts SET value = \'{"approved":"evil"}\' WHERE key = ?', [json.dumps(key)])
    with stored(tmp_path) as manifest:
        assert manifest.load("files", "c") is None
        assert manifest.load("other", "c") == SAID
        assert manifest.fingerprints("files", "c")["tool:read"] == Pinned()


def test_a_file_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mcp.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE x (y)")
    before = path.read_bytes()
    with pytest.raises(SetupError, match="another program"), stored(tmp_path):
        pass
    assert path.read_bytes() == before
