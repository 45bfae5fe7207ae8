"""`_manifest.json`: which files may load, what each may reach, and what is refused."""

import contextlib
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.dropin import FileGrants, Manifest, Target, append, load_manifest, read_manifest
from toolbus.errors import SetupError

FILE = "_manifest.json"


def read(folder: Path, content: Any) -> Manifest:
    return read_manifest(json.dumps(content), folder)


def grants(folder: Path, **entry: Any) -> FileGrants:
    return read(folder, {"files": {"a.py": entry}}).grants("a.py")


def refusal(folder: Path, **entry: Any) -> str:
    with pytest.raises(SetupError) as error:
        grants(folder, **entry)
    return str(error.value)


def test_a_manifest_that_is_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(SetupError, match=f"{FILE} is not a regular file"):
        load_manifest(tmp_path)


def test_an_allow_list_that_is_null_allows_nothing(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="allow is None, it must not be null: leave it out"):
        read(tmp_path, {"allow": None})


def test_a_manifest_lists_which_files_load_and_what_each_may_reach(tmp_path: Path) -> None:
    content = {
        "allow": ["a.py", "relay_message.py"],
        "files": {
            "relay_message.py": {
                "write": ["queue.db", "/var/spool/relay"],
                "read": ["/usr/share/dict/words"],
                "connect": ["127.0.0.1:8000", "[::1]:80", "API.example.org:443", "[::ffff:10.0.0.1]:5"],
                "secrets": ["API_KEY"],
                "memory_mb": 512,
                "cpu_seconds": 2,
            }
        },
    }
    (tmp_path / FILE).write_text(json.dumps(content))
    manifest = load_manifest(tmp_path, require=True)
    assert [manifest.allows(file) for file in ("a.py", "relay_message.py", "b.py")] == [True, True, False]
    assert manifest.grants("a.py") == FileGrants()
    assert manifest.grants("relay_message.py") == FileGrants(
        write=(tmp_path / "queue.db", Path("/var/spool/relay").resolve()),
        read=(Path("/usr/share/dict/words").resolve(),),
        connect=(Target("127.0.0.1", 8000), Target("::1", 80), Target("api.example.org", 443), Target("10.0.0.1", 5)),
        secrets=("API_KEY",),
        memory_mb=512,
        cpu_seconds=2,
    )


def test_without_a_manifest_or_an_allow_list_every_file_is_allowed_and_nothing_granted(tmp_path: Path) -> None:
    for manifest in (load_manifest(tmp_path), read(tmp_path, {}), read(tmp_path, {"files": {"a.py": {}}})):
        assert manifest.allows("anything.py")
        assert manifest.grants("a.py") == FileGrants()


def test_an_empty_list_allows_nothing(tmp_path: Path) -> None:
    assert not read(tmp_path, {"allow": []}).allows("a.py")


def test_a_missing_manifest_is_refused_if_one_is_required(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"has no _manifest\.json.*create one like"):
        load_manifest(tmp_path, require=True)


@pytest.mark.parametrize("require", [False, True])
def test_an_unreadable_manifest_is_refused_whether_or_not_one_is_required(tmp_path: Path, require: bool) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(SetupError, match="is not a regular file"):
        load_manifest(tmp_path, require=require)
    (tmp_path / FILE).rmdir()
    (tmp_path / FILE).write_bytes(b"\xff")
    with pytest.raises(SetupError, match="UTF-8"):
        load_manifest(tmp_path, require=require)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("not JSON",)),
        ("{", ("not JSON",)),
        ("[" * 100_000, ("too deeply",)),
        ("[]", ("[]", "must be an object")),
        ('{"alow": []}', ("unknown key alow", "did you mean allow", "allow, files")),
        ('{"allow": [], "allow": ["a.py"]}', ("'allow'", "twice")),
        ('{"files": {"a.py": {"read": []}, "a.py": {}}}', ("'a.py'", "twice")),
        ('{"allow": "a.py"}', ("'a.py'", "must be a list")),
        ('{"allow": [5]}', ("5", "the name of a tool file")),
        ('{"allow": ["../a.py"]}', ("'../a.py'", "the name of a tool file")),
        ('{"allow": ["/a.py"]}', ("'/a.py'", "the name of a tool file")),
        ('{"allow": ["a"]}', ("'a'", "without a path")),
        ('{"allow": [".a.py"]}', ("'.a.py'", "the name of a tool file")),
        ('{"allow": ["a\\u0000.py"]}', ("the name of a tool file",)),
        ('{"allow": ["\\ud800.py"]}', ("the name of a tool file",)),
        ('{"files": []}', ("[]", "must be an object")),
        ('{"files": {"../a.py": {}}}', ("'../a.py'",)),
        ('{"files": {"a.py": []}}', ("a.py", "must be an object")),
        ('{"files": {"a.py": {"conect": []}}}', ("unknown key files.a.py.conect", "did you mean connect")),
        ('{"files": {"_common.py": {"read": ["x"]}}}', ("'_common.py'", "grant it to those files")),
        ('{"files": {"my tool.py": {"read": ["x"]}}}', ("'my tool.py'", "rename the file")),
    ],
)
def test_a_broken_manifest_is_refused_with_value_rule_and_how_to_fix_it(
    tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(SetupError) as error:
        read_manifest(text, tmp_path)
    assert [word for word in words if word not in str(error.value)] == []
    assert FILE in str(error.value)


@pytest.mark.parametrize("key", ["write", "read"])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("../queue.db", "'..'"),
        ("data/../../queue.db", "'..'"),
        ("/var/../etc/passwd", "'..'"),
        ("", "must be a path"),
        ("  ", "must be a path"),
        ("a\0b", "must be a path"),
        (".", "leads out"),
        ("out", "leads out"),  # a symbolic link
        ("out/deeper", "leads out"),
        ("loop", "loop"),
        ("~/queue.db", "pattern"),
        ("*.db", "pattern"),
        ("/", "whole file system"),
        ("\ud800", "leads nowhere"),
        (5, "must be text"),
    ],
)
def test_a_path_that_leads_out_or_nowhere_is_refused(tmp_path: Path, key: str, path: Any, words: str) -> None:
    (tmp_path / "out").symlink_to("/var")
    (tmp_path / "loop").symlink_to("loop")
    assert words in refusal(tmp_path, **{key: [path]})


def test_links_that_stay_in_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "in").symlink_to("data")
    assert grants(tmp_path, write=["in/queue.db"]).write == (tmp_path.resolve() / "data/queue.db",)


@pytest.mark.parametrize("path", ["a.py", "new.py", FILE, "alias"])
def test_a_tool_may_not_write_tools_or_their_grants(tmp_path: Path, path: str) -> None:
    (tmp_path / "alias").symlink_to("a.py")
    assert "holds tools or their grants" in refusal(tmp_path, write=[path])
    assert "holds tools or their grants" in refusal(tmp_path, write=[str(tmp_path / path)])


def test_a_tool_may_not_write_the_folder_of_the_tools_or_a_folder_above_it(tmp_path: Path) -> None:
    for above in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        assert "holds tools or their grants" in refusal(tmp_path, write=[str(above)])


@pytest.mark.parametrize(
    "target",
    [
        *("localhost", "localhost:", ":80", "localhost:0", "localhost:65536", "localhost:http", "localhost:80:80"),
        *("*:80", "localhost:*", "0.0.0.0:80", "[::]:80", "0:80", "127.1:80", "0x7f.0.0.1:80", "0x7f000001:80"),
        *(
            "2130706433:80",
            "[::1:80",
            "::1:80",
            "[localhost]:80",
            "224.0.0.1:80",
            "[ff02::1]:80",
            "[::ffff:0.0.0.0]:80",
        ),
        *("http://localhost:80", "local host:80", "user@host:80", "-x:80", "", "localhost:８０", "localhost:80\n"),
    ],
)
def test_a_target_is_one_host_and_one_port(tmp_path: Path, target: str) -> None:
    assert repr(target) in refusal(tmp_path, connect=[target])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("secrets", each) for each in ("API KEY", "1KEY", "", "A=B", "KEY*", "KEY\n", "Ä", 5, None)),
        *(("memory_mb", each) for each in (0, -1, 127, 1 << 21, 128.5, True, "512", [1])),
        *(("cpu_seconds", each) for each in (0, 0.5, 2.0, -1, float("inf"), float("nan"), True, "5", 10**400)),
    ],
)
def test_values_out_of_bounds_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    error = refusal(tmp_path, **{key: [value] if key == "secrets" else value})
    assert key in error
    assert repr(value)[:79] in error


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["a.py", "x:1", "data"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["allow", "files", "a.py", "write", "read", "connect", "secrets", "memory_mb"]), inner
            )
        ),
        max_leaves=12,
    )
)
def test_any_content_is_read_or_refused(content: Any) -> None:
    with contextlib.suppress(SetupError):
        manifest = read_manifest(json.dumps(content), Path("/nowhere/tools"))
        assert all(path.is_absolute() for each in manifest.files.values() for path in (*each.write, *each.read))


# -- appending --------------------------------------------------------------------------------------------------------


def test_an_appended_file_is_allowed_and_everything_else_stays(tmp_path: Path) -> None:
    content = {"files": {"a.py": {"secrets": ["API_KEY"]}}, "allow": ["b.py", "a.py"]}
    (tmp_path / FILE).write_text(json.dumps(content))
    (tmp_path / FILE).chmod(0o640)
    assert append(tmp_path, "c.py")
    assert not append(tmp_path, "c.py")
    assert json.loads((tmp_path / FILE).read_text()) == {**content, "allow": ["b.py", "a.py", "c.py"]}
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == [FILE]


def test_a_manifest_without_an_allow_list_is_not_changed_by_append(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"files": {}}')
    assert not append(tmp_path, "c.py")
    assert (tmp_path / FILE).read_text() == '{"files": {}}'


def test_append_needs_a_manifest(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(SetupError, match=r"has no _manifest\.json"):
            append(folder, "c.py")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("file", ["../c.py", "c", "", "a/c.py", "c.py\0"])
def test_only_the_name_of_a_file_can_be_appended(tmp_path: Path, file: str) -> None:
    (tmp_path / FILE).write_text('{"allow": []}')
    with pytest.raises(SetupError, match="the name of a tool file"):
        append(tmp_path, file)


def test_a_broken_manifest_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"allow": ["a.py"')
    with pytest.raises(SetupError, match="not JSON"):
        append(tmp_path, "c.py")
    assert (tmp_path / FILE).read_text() == '{"allow": ["a.py"'


def test_a_manifest_that_could_not_be_replaced_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE).write_text('{"allow": []}')

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SetupError, match="No space left on device"):
        append(tmp_path, "c.py")
    assert (tmp_path / FILE).read_text() == '{"allow": []}'
    assert os.listdir(tmp_path) == [FILE]


def test_concurrent_appends_lose_no_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"allow": []}')
    files = [f"tool{number}.py" for number in range(20)]
    threads = [threading.Thread(target=append, args=(tmp_path, file)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(load_manifest(tmp_path).allow or ()) == sorted(files)
