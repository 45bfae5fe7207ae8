"""The file of `toolbus run --secrets`: who may read it, what it may hold."""

import os
from pathlib import Path

import pytest

from toolbus.errors import SetupError
from toolbus.processes.child_environment import read_secrets, read_variables

PLUGINS = ("weather", "news")
SECRET = "s3cret-value"


def _file(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    file = folder / "my secrets.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    return file


def test_each_plugin_has_the_variables_of_its_table(tmp_path: Path) -> None:
    file = _file(tmp_path, '[weather]\nKEY = "a"\nOTHER_1 = """b\nc"""\n[news]\n')
    assert read_secrets(file, PLUGINS) == {"weather": {"KEY": "a", "OTHER_1": "b\nc"}, "news": {}}


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_that_only_its_owner_can_read_is_accepted(tmp_path: Path, mode: int) -> None:
    assert read_secrets(_file(tmp_path, "", mode), PLUGINS) == {}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_file_that_others_may_read_or_change_is_refused_with_the_command_that_fixes_it(
    tmp_path: Path, mode: int
) -> None:
    file = _file(tmp_path, "", mode)
    with pytest.raises(SetupError, match=f"mode {mode:04o}.*: chmod 600 '{file}'$"):
        read_secrets(file, PLUGINS)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, me = _file(tmp_path, ""), os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: me)
    with pytest.raises(SetupError, match=f"belongs to user id {me - 1}, .*: sudo chown {me} '{file}'$"):
        read_secrets(file, PLUGINS)


def test_a_pipe_may_hold_the_secrets(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b'[news]\nKEY = "a"\n')
    os.close(write_end)
    try:
        assert read_secrets(Path(f"/dev/fd/{read_end}"), PLUGINS) == {"news": {"KEY": "a"}}
    finally:
        os.close(read_end)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f'[wether]\nKEY = "{SECRET}"\n',
            r"\[wether\] is not a plugin of this run \(did you mean \[weather\]\?\): the",
        ),
        (f'[xyz]\nKEY = "{SECRET}"\n', "not a plugin of this run: the plugins are weather, news$"),
        (f'KEY = "{SECRET}"\n', r"'KEY' is in no table: put it below \[PLUGIN\]; the plugins are weather, news$"),
        (f'[news]\n"a b" = "{SECRET}"\n', r"'a b' of \[news\] is not a valid variable name"),
        (f'[news]\nKEY = ["{SECRET}"]\n', r"'KEY' of \[news\] is not text: put its value in quotes"),
        ("[news]\nKEY = 5\n", r"'KEY' of \[news\] is not text: put its value in quotes"),
        (f'[news]\nKEY = "{SECRET}\\u0000"\n', r"'KEY' of \[news\] holds a NUL"),
        (f"[news]\nKEY = {SECRET}\n", "is not TOML: .*line 2"),
        (b"\xff" + SECRET.encode(), "is not TOML: it is not UTF-8"),
    ],
)
def test_a_mistake_in_the_file_is_named_and_no_value_is_repeated(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(SetupError, match=words) as refused:
        read_secrets(_file(tmp_path, text), PLUGINS)
    assert SECRET not in str(refused.value)
    assert "my secrets.toml" in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot read .*missing\.toml: No such file"):
        read_secrets(tmp_path / "missing.toml", PLUGINS)
    with pytest.raises(SetupError, match=r"cannot read .*: Is a directory"):
        read_secrets(tmp_path, PLUGINS)


def test_a_file_without_tables_holds_variables_and_its_values_are_never_shown(tmp_path: Path) -> None:
    assert read_variables(_file(tmp_path, 'KEY = "a"\nOTHER_1 = "b"')) == {"KEY": "a", "OTHER_1": "b"}
    for text in ('[weather]\nKEY = "hidden"', "KEY = 12345", '"K-Y" = "hidden"'):
        with pytest.raises(SetupError) as raised:
            read_variables(_file(tmp_path, text))
        assert "hidden" not in str(raised.value)
        assert "12345" not in str(raised.value)
    with pytest.raises(SetupError, match="chmod 600"):
        read_variables(_file(tmp_path, 'KEY = "a"', 0o640))
