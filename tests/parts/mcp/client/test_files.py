"""Files of mounts: what is read, what is refused and how to fix it; following them, and changing one's own."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus, Config
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.entries import MountEntry
from toolbus.parts.mcp.client.files import (
    MAX_MOUNTS,
    ConfiguredMounts,
    MountsFollower,
    MountsReading,
    OwnMounts,
    parse_commented,
    read_document,
    read_mounts,
)
from toolbus.parts.mcp.client.offer import is_allowed
from toolbus.parts.mcp.client.room import McpClientRoom

ENVIRONMENT = {"TOKEN": "s3cret", "EMPTY": "", "HOME": "/home/ada"}


def read(mounts: dict[str, Any], table: str = "mcpServers", **others: Any) -> MountsReading:
    return read_document({table: mounts, **others}, "mcp.json", ENVIRONMENT)


def entry(**fields: Any) -> MountEntry:
    reading = read({"files": fields})
    assert not reading.refused
    return reading.entries["files"]


def refusal(**fields: Any) -> str:
    reading = read({"bad": fields, "good": {"command": "true"}})
    assert list(reading.entries) == ["good"]  # the neighbour stays
    assert "s3cret" not in reading.refused["bad"]
    return reading.refused["bad"]


def test_an_entry_of_a_client_reads_as_it_is() -> None:
    mount = entry(command="npx", args=["-y", "server", 8080], env={"KEY": "${TOKEN}", "N": 1}, cwd="/srv")
    assert (mount.command, mount.args, dict(mount.env), mount.cwd) == (
        "npx",
        ("-y", "server", "8080"),
        {"KEY": "s3cret", "N": "1"},
        Path("/srv"),
    )


@pytest.mark.parametrize("table", ["mcpServers", "servers"])
def test_both_names_of_the_table_are_read(table: str) -> None:
    remote = read({"x": {"type": "http", "url": "https://a.example/mcp", "headers": {"A": "Bearer ${TOKEN}"}}}, table)
    assert dict(remote.entries["x"].headers) == {"A": "Bearer s3cret"}
    assert remote.notices == ()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${TOKEN}", "s3cret"),
        ("${env:TOKEN}", "s3cret"),
        ("a${TOKEN}b${TOKEN}", "as3cretbs3cret"),
        ("${MISSING:-fallback}", "fallback"),
        ("${TOKEN:-fallback}", "s3cret"),
        ("$TOKEN", "$TOKEN"),
        ("{}", "{}"),
    ],
)
def test_variables_are_replaced(written: str, value: str) -> None:
    assert entry(command="x", args=[written]).args == (value,)


def test_what_is_replaced_is_not_replaced_again() -> None:
    reading = read_document({"servers": {"x": {"command": "${A}"}}}, "f", {"A": "${B}"})
    assert reading.entries["x"].command == "${B}"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"command": "x", "args": ["${MISSING}"]}, "args needs the variable MISSING, which is not set"),
        ({"command": "x", "env": {"K": "${env:EMPTY}"}}, "env.K needs the variable EMPTY"),
        ({"command": "x", "args": ["${input:key}"]}, "write ${NAME} instead"),
        ({"command": "x", "args": ["${workspaceFolder}/a"]}, "write its value"),
        ({"command": "x", "args": ["${no name}"]}, "is not a variable"),
        ({"type": "sse", "url": "https://a.example/sse"}, 'try type "http"'),
        ({"type": "ws", "url": "https://a.example/sse"}, 'must be "stdio" (a command) or "http" (a url)'),
        ({"type": "stdio", "url": "https://a.example"}, "drop one"),
        ({"type": "http", "command": "x"}, "drop one"),
        ({}, "neither command nor url"),
        ({"command": "x", "url": "https://a.example"}, "both command and url"),
        ({"url": "ftp://a.example"}, "url is not http://"),
        ({"url": "https://u:s3cret@a.example"}, "put it into headers"),
        ({"url": "https://a.example/#s3cret"}, "remove it"),
        ({"url": "https://a.example/${TOKEN} x"}, "url is not http://"),
        ({"command": ["s3cret"]}, "is not text"),
        ({"command": "x", "args": "s3cret"}, "must be a list or an object"),
        ({"command": "x", "env": {"A": ["s3cret"]}}, "env.A is not text"),
        ({"command": "x", "env": {"A=B": "s3cret"}}, "is not a variable name"),
        ({"command": "x", "env": {"A": "s3cret\0"}}, "holds a NUL"),
        ({"url": "https://a.example", "headers": {"A": "s3cret\r\nX: y"}}, "headers.A is not a valid header value"),
        ({"url": "https://a.example", "headers": {"A b": "s3cret"}}, "is not the name of a header"),
        ({"command": "x", "cwd": "here"}, "must be an absolute path"),
        ({"command": "x", "disabled": "yes"}, "must be true or false"),
        ({"command": "x", "toolbus": {"pin": "maybe"}}, "must be one of warn, block"),
        ({"command": "x", "toolbus": {"allow": "read_*"}}, "put [ and ] around it"),
        ({"command": "x", "toolbus": {"timeout_seconds": 301}}, "from 0 to 300"),
    ],
)
def test_a_bad_entry_is_refused_with_what_to_do_and_its_neighbour_stays(fields: dict[str, Any], says: str) -> None:
    assert says in refusal(**fields)


def test_our_settings_stand_under_toolbus() -> None:
    mount = entry(command="x", toolbus={"allow": ["read_*"], "pin": "block", "trustHints": True, "max_in_flight": 2})
    assert (mount.allow, mount.pin, mount.trust_hints, mount.max_in_flight) == (("read_*",), "block", True, 2)


def test_unknown_keys_are_a_notice_which_says_the_key_that_was_meant() -> None:
    reading = read({"x": {"command": "x", "comand": "y", "envFile": ".env", "toolbus": {"alow": []}}}, theme="dark")
    assert list(reading.entries) == ["x"]
    text = "\n".join(reading.notices)
    for said in ("did you mean command?", "did you mean allow?", "envFile is not read", "theme"):
        assert said in text


def test_a_name_that_is_not_a_source_is_changed_with_a_notice_and_a_second_one_is_refused() -> None:
    reading = read({"My Files!": {"command": "x"}, "My-Files": {"command": "y"}, "toolbus": {"command": "z"}, "—": {}})
    assert list(reading.entries) == ["My-Files", "toolbus-mcp"]
    assert "is named My-Files" in reading.notices[0]
    assert "has the name My-Files already" in reading.refused["My-Files (2)"]
    assert "no letter or digit" in reading.refused["—"]


def test_a_file_has_no_more_mounts_than_the_limit() -> None:
    reading = read({f"m{number}": {"command": "x"} for number in range(MAX_MOUNTS + 1)})
    assert len(reading.entries) == MAX_MOUNTS
    assert f"may have {MAX_MOUNTS} mounts" in reading.refused[f"m{MAX_MOUNTS}"]


def test_a_repr_shows_no_secret() -> None:
    mount = entry(command="x", args=["${TOKEN}"], env={"A": "${TOKEN}"})
    assert "s3cret" not in repr(mount)
    assert mount.command_digest == entry(command="x", args=["${TOKEN}"]).command_digest


def test_comments_and_trailing_commas_of_an_editor_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(
        '// mine\n{"servers": {/* one */ "x": {"command": "//not", "args": ["/* nor */", ",]",],},}, "inputs": []}\n'
    )
    reading = read_mounts(path, {})
    assert (reading.entries["x"].command, reading.entries["x"].args) == ("//not", ("/* nor */", ",]"))
    assert reading.entries["x"].origin == str(path)
    assert reading.notices == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON"),
        (b"[]", "must be an object"),
        (b"{}", 'neither "mcpServers" nor "servers"'),
        (b'{"mcpServers": []}', "must be an object"),
        (b'{"mcpServers": {"x": {"command": NaN}}}', "JSON has no NaN"),
        (b"\xff\xfe", "is not UTF-8"),
        (b'{"mcpServers": ' + b"[" * 100_000, "nested too deep"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_as_a_whole(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_bytes(content)
    with pytest.raises(SetupError, match=r"mcp\.json") as refused:
        read_mounts(path, {})
    assert says in str(refused.value)


def test_a_file_that_others_could_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text('{"mcpServers": {}}')
    tmp_path.chmod(0o755)
    path.chmod(0o666)
    with pytest.raises(SetupError, match="chmod go-w"):
        read_mounts(path, {})
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    with pytest.raises(SetupError, match="chmod go-w"):
        read_mounts(path, {})


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\/*,]}{[:\n ', max_size=12) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)


@given(_JSON, st.sampled_from([None, 1]))
@settings(max_examples=30, deadline=None)
def test_plain_json_means_the_same_with_and_without_room_for_comments(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert parse_commented(text) == value
    assert parse_commented(f"/* a */ {text} // b ]") == value


@pytest.mark.parametrize("names", [("0:", "0"), ("0", "0:"), ("a b", "a:b", "a_b", "a b (2)"), ("", ":")])
def test_refused_mounts_whose_names_become_the_same_are_all_named(names: tuple[str, ...]) -> None:
    reading = read({name: {} for name in names})
    assert len(reading.refused) == len(names)


_KEYS = st.sampled_from(["command", "args", "env", "cwd", "url", "headers", "type", "disabled", "toolbus", "x"])
_VALUES = _JSON | st.sampled_from(["${TOKEN}", "${", "${}", "${env:}", "${a:-${TOKEN}}", "https://x", "http", "stdio"])


@given(st.dictionaries(st.text(max_size=8), st.dictionaries(_KEYS, _VALUES, max_size=6) | _JSON, max_size=4))
@settings(max_examples=40, deadline=None)
def test_every_document_is_read_or_refused_with_a_sentence(mounts: dict[str, Any]) -> None:
    reading = read(mounts)
    assert len(reading.entries) + len(reading.refused) == len(mounts)
    assert all(text.startswith("mcp.json: mount ") for text in reading.refused.values())
    for mount in reading.entries.values():
        assert bool(mount.command) != bool(mount.url)


# -- restrictions of other clients' files ------------------------------------------------------------------------------


def offered(**fields: Any) -> set[str]:
    """Returns which of four tools an entry offers."""
    mount = entry(command="x", **fields)
    names = ("read", "write", "delete_all", "delete[1]")
    return set() if mount.disabled else {name for name in names if is_allowed(mount, name, name)}


ALL = {"read", "write", "delete_all", "delete[1]"}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"enabled": True}, ALL),
        ({"enabled": False}, set()),
        ({"isActive": False}, set()),
        ({"enabled": True, "disabled": True}, set()),
        ({"enabled": False, "disabled": False}, set()),
        ({"disable": True}, set()),
        ({"disabledTools": ["write"]}, ALL - {"write"}),
        ({"disabled_tools": ["write", "delete[1]"]}, {"read", "delete_all"}),
        ({"disabledTools": "write"}, ALL - {"write"}),
        ({"disabledTools": []}, ALL),
        ({"excludeTools": ["delete_*"]}, ALL - {"delete_all"}),
        ({"excludeTools": ["write(now)"]}, ALL - {"write"}),
        ({"disabledTools": ["mcp__files__write", "files:read"]}, {"delete_all", "delete[1]"}),
        ({"excludeTools": ["read"], "disabledTools": ["write"]}, {"delete_all", "delete[1]"}),
        ({"includeTools": ["read", "delete[1]"]}, {"read", "delete[1]"}),
        ({"includeTools": []}, set()),
        ({"includeTools": ["read", "write"], "excludeTools": ["write"]}, {"read"}),
        ({"enabled_tools": ["read"]}, {"read"}),
        ({"allowedTools": ["mcp__files__read"]}, {"read"}),
        ({"tools": ["*"]}, ALL),
        ({"tools": ["read"]}, {"read"}),
        ({"tools": []}, set()),
        ({"tools": {"write": False}}, ALL - {"write"}),
        ({"tools": {"write": {"enabled": False}, "read": {"enabled": True}}}, {"read"}),
        ({"includeTools": ["read", "write"], "toolbus": {"deny": ["read"]}}, {"write"}),
        ({"disabledTools": ["write"], "toolbus": {"allow": ["read", "write"]}}, {"read"}),
        ({"readOnly": False, "sandbox": None, "permissions": {}, "alwaysAllow": ["read"], "toolTimeout": 5}, ALL),
    ],
)
def test_restrictions_in_the_words_of_other_clients_are_kept(fields: dict[str, Any], names: set[str]) -> None:
    assert offered(**fields) == names


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"enabled": "no"}, "enabled"),
        ({"enabled": None}, "enabled"),
        ({"disabledTools": {"write": True, "x": 5}}, "disabledTools"),
        ({"disabledTools": [5]}, "disabledTools"),
        ({"includeTools": 5}, "includeTools"),
        ({"tools": {"write": {"approval": "always"}}}, "approval"),
        ({"tools": ["read"], "includeTools": ["read"]}, "tools and includeTools"),
        ({"includeTools": ["read"], "toolbus": {"allow": ["write"]}}, "allow"),
        ({"readOnly": True}, "readOnly"),
        ({"sandboxEnabled": True}, "sandboxEnabled"),
        ({"toolFilter": "^read"}, "toolFilter"),
        ({"permissions": {"deny": ["write"]}}, "permissions"),
        ({"requireApproval": "always"}, "requireApproval"),
        ({"allowWrites": False}, "allowWrites"),
        ({"hiddenTools": ["write"]}, "hiddenTools"),
        ({"DISABLED": True}, "DISABLED"),
        ({"paused": True}, "paused"),
        ({"off": True}, "off"),
        ({"hidden": True}, "hidden"),
        ({"isSuspended": True}, "isSuspended"),
        ({"toolbus": {"denied": ["write"]}}, "denied"),
        ({"toolbus": {"disabledTools": ["write"]}}, "disabledTools"),
    ],
)
def test_a_restriction_that_the_bus_does_not_know_refuses_its_entry_by_name(fields: dict[str, Any], key: str) -> None:
    assert key in refusal(command="x", **fields)


@pytest.mark.parametrize(
    "settings",
    [
        {"mcp": {"excluded": ["files"]}},
        {"mcp": {"allowed": ["other"]}},
        {"mcp": {"allowed": []}},
        {"excludeMCPServers": ["files"]},
        {"allowMCPServers": ["other"]},
        {"disabledMcpjsonServers": ["files"]},
        {"enabledMcpjsonServers": ["other"]},
        {"disabledMcpServers": "files"},
        {"enabledMcpServers": 5},
        {"disabledServers": ["files"]},
        {"disabledServers": {"files": True}},
        {"enabledServers": {"files": False}},
        {"deniedMcpServers": [{"serverName": "files"}]},
        {"deniedMcpServers": [{"serverCommand": ["x"]}]},
        {"allowedMcpServers": [{"serverName": "other"}]},
    ],
)
def test_a_server_that_its_file_switches_off_is_not_started_and_that_is_said(settings: dict[str, Any]) -> None:
    reading = read({"files": {"command": "x"}}, **settings)
    assert reading.entries["files"].disabled
    assert any("switches it off" in notice for notice in reading.notices)
    others: dict[str, Any] = {"mcp": {"allowed": ["files"], "excluded": ["other"]}, "enabledMcpServers": ["files"]}
    others |= {"disabledServers": {"files": False}, "deniedMcpServers": [{"serverName": "other"}]}
    assert not read({"files": {"command": "x"}}, **others).entries["files"].disabled


# -- following ---------------------------------------------------------------------------------------------------------


def write(path: Path, **mounts: Any) -> None:
    """Replaces a file, as editors do."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"mcpServers": {name: {"command": command} for name, command in mounts.items()}}))
    os.replace(beside, path)


def commands(configured: ConfiguredMounts) -> dict[str, str]:
    return {name: entry.command for name, entry in configured.entries.items()}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "mcp.json", tmp_path / "named.json"


def test_both_files_count_and_of_one_name_the_bus_own_entry_is_used(files: tuple[Path, Path]) -> None:
    own, named = files
    write(own, a="own")
    write(named, a="named", b="named")
    configured = MountsFollower(own, named, {}).read_first()
    assert commands(configured) == {"a": "own", "b": "named"}
    assert "is ignored" in configured.notices[0]


def test_a_missing_or_broken_own_file_does_not_keep_a_bus_from_starting(files: tuple[Path, Path]) -> None:
    own, named = files
    write(named, b="named")
    assert MountsFollower(own, named, {}).read_first().errors == {}
    own.write_text("{")
    configured = MountsFollower(own, named, {}).read_first()
    assert (commands(configured), list(configured.errors)) == ({"b": "named"}, [str(own)])


def test_a_named_file_that_cannot_be_read_is_an_error_of_the_start(files: tuple[Path, Path]) -> None:
    with pytest.raises(SetupError, match=r"named\.json"):
        MountsFollower(files[0], files[1], {}).read_first()


async def test_a_file_is_followed_also_where_it_comes_breaks_and_goes(files: tuple[Path, Path]) -> None:
    own, _ = files
    follower = MountsFollower(own, None, {})
    assert commands(follower.read_first()) == {}
    changes = follower.follow(0.01)
    async with asyncio.timeout(WAIT_SECONDS):
        write(own, a="one")
        assert commands(await anext(changes)) == {"a": "one"}
        own.write_text("{")
        broken = await anext(changes)
        assert commands(broken) == {"a": "one"}  # it goes on
        assert "not JSON" in broken.errors[str(own)]
        write(own, b="two")
        assert commands(await anext(changes)) == {"b": "two"}
        own.unlink()
        assert await anext(changes) == ConfiguredMounts()
    await changes.aclose()


async def test_a_bus_takes_variables_of_mounts_from_its_file_of_secrets(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    secrets = tmp_path / "secrets.toml"
    secrets.write_text('TOKEN = "from the file"')
    secrets.chmod(0o600)
    entry = {"url": "http://127.0.0.1:1/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}, "disabled": True}
    files[1].write_text(json.dumps({"mcpServers": {"far": entry}}))
    files[1].chmod(0o600)
    config = Config(grpc=("127.0.0.1:0",), http="off", data_dir=None, mcp_servers=files[1], mcp_secrets=secrets)
    async with Bus(config, rooms=(McpClientRoom,)) as bus:
        room = bus.core.rooms.find(McpClientRoom)
        assert room is not None
        assert room.configured is not None
        assert room.configured.entries["far"].headers == {"Authorization": "Bearer from the file"}


# -- the file in a data directory --------------------------------------------------------------------------------------


def test_entries_are_added_and_removed_in_a_file_that_only_the_owner_reads(tmp_path: Path) -> None:
    own = OwnMounts(tmp_path / "data")
    own.add({"files": {"command": "x"}, "web": {"url": "https://a.example/mcp"}})
    assert own.path.stat().st_mode & 0o777 == 0o600
    assert list(read_mounts(own.path, {}).entries) == ["files", "web"]
    assert own.remove("files")
    assert not own.remove("files")
    assert list(own.entries()) == ["web"]


def test_an_entry_is_replaced_only_on_request(tmp_path: Path) -> None:
    own = OwnMounts(tmp_path)
    own.add({"files": {"command": "x"}})
    with pytest.raises(SetupError, match="--replace"):
        own.add({"more": {"command": "y"}, "files": {"command": "y"}})
    assert own.entries() == {"files": {"command": "x"}}
    own.add({"files": {"command": "y"}}, replace=True)
    assert own.entries() == {"files": {"command": "y"}}


def test_what_a_person_wrote_beside_stays(tmp_path: Path) -> None:
    own = OwnMounts(tmp_path)
    own.path.write_text('{"$schema": "x", "servers": {"a": {"command": "x"}}} // mine')
    own.add({"b": {"command": "y"}})
    assert list(own.entries()) == ["a", "b"]
    assert '"$schema": "x"' in own.path.read_text()


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=OwnMounts(tmp_path).add, args=({f"m{number}": {"command": "x"}},))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(OwnMounts(tmp_path).entries()) == 8
