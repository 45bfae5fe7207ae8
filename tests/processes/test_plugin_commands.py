"""Tests what each plugin of one run is started with."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from toolbus.errors import SetupError
from toolbus.processes.plugin_program import plugin_commands
from toolbus.processes.supervisor import Command, PluginReport

ENVIRONMENT = {"PATH": "/bin", "OPENAI_API_KEY": "s3cret", "TOOLBUS_ADDRESS": "127.0.0.1:1"}


def _files(folder: Path, *names: str, text: str = "") -> list[Path]:
    files = [folder / f"{name}.py" for name in names]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return files


def _secrets_file(folder: Path, text: str) -> Path:
    file = folder / "secrets.toml"
    file.write_text(text)
    file.chmod(0o600)
    return file


def _commands(
    files: Sequence[Path],
    environment: Mapping[str, str] = ENVIRONMENT,
    requests: Sequence[str] = (),
    secrets: Path | None = None,
) -> tuple[dict[str, Command], list[str]]:
    reports: list[PluginReport] = []
    commands = plugin_commands(files, environment, requests, secrets, reports.append)
    return commands, [f"{report.plugin}: {report.text}" for report in reports]


def _sent(command: Command) -> dict[str, str]:
    assert command.stdin is not None
    sent: dict[str, str] = json.loads(command.stdin(0))
    return sent


def test_each_file_has_a_token_of_its_own_and_processes_of_one_file_share_it(tmp_path: Path) -> None:
    files = _files(tmp_path, "a", "b")
    link = tmp_path / "c.py"
    link.symlink_to(files[0])
    commands, _ = _commands([*files, files[1], link])
    tokens = {name: _sent(command)["TOOLBUS_TOKEN"] for name, command in commands.items()}
    folder = tmp_path.name
    assert tokens[f"{folder}/b"] == tokens[f"{folder}/b#2"]
    assert tokens["a"] == tokens["c"] != tokens[f"{folder}/b"]


def test_tokens_last_for_one_run_unless_the_operator_gives_a_secret_for_them(tmp_path: Path) -> None:
    files = _files(tmp_path, "a")
    first, second = (_sent(_commands(files)[0]["a"]) for _ in range(2))
    assert first != second
    known = {**ENVIRONMENT, "TOOLBUS_TOKEN": "mine"}
    first, second = (_sent(_commands(files, known)[0]["a"]) for _ in range(2))
    assert first == second
    assert first["TOOLBUS_TOKEN"] != "mine"


def test_nothing_that_is_secret_is_in_the_arguments_the_environment_or_the_repr(tmp_path: Path) -> None:
    files = _files(tmp_path, "a")
    secrets = _secrets_file(tmp_path, '[a]\nKEY = "t0psecret"\n')
    commands, reports = _commands(files, requests=["LEVEL=7"], secrets=secrets)
    command = commands["a"]
    assert _sent(command)["KEY"] == "t0psecret"
    assert command.environment == {"PATH": "/bin", "TOOLBUS_ADDRESS": "127.0.0.1:1", "LEVEL": "7"}
    shown = f"{command.arguments} {dict(command.environment)} {command!r} {reports}"
    assert "t0psecret" not in shown
    assert _sent(command)["TOOLBUS_TOKEN"] not in shown


def test_a_table_is_named_by_the_files_stem_or_by_its_folder_too_where_stems_are_equal(tmp_path: Path) -> None:
    files = _files(tmp_path, "one/a", "two/a", "two/b")
    secrets = _secrets_file(tmp_path, '["one/a"]\nKEY = "1"\n["two/a"]\nKEY = "2"\n[b]\nKEY = "3"\n')
    commands, _ = _commands([*files, files[2]], secrets=secrets)
    assert {name: _sent(command).get("KEY") for name, command in commands.items()} == {
        "one/a": "1",
        "two/a": "2",
        "two/b": "3",
        "two/b#2": "3",
    }
    with pytest.raises(SetupError, match=r"\[a\] is not a plugin of this run.*: the plugins are one/a, two/a, b$"):
        _commands(files, secrets=_secrets_file(tmp_path, '[a]\nKEY = "1"\n'))


def test_a_table_may_set_what_is_never_handed_on(tmp_path: Path) -> None:
    files = _files(tmp_path, "a", "b")
    secrets = _secrets_file(tmp_path, '[a]\nTOOLBUS_TOKEN = "shared"\nTOOLBUS_SIDECAR_API_KEY = "k"\n')
    commands, _ = _commands(files, secrets=secrets)
    assert _sent(commands["a"]) == {"TOOLBUS_TOKEN": "shared", "TOOLBUS_SIDECAR_API_KEY": "k"}
    assert _sent(commands["b"])["TOOLBUS_TOKEN"] != "shared"
    assert len(_sent(commands["b"])) == 1


def test_a_plugin_that_reads_a_variable_that_is_not_handed_on_is_reported_with_the_option_that_does(
    tmp_path: Path,
) -> None:
    text = "import os\nos.environ['OPENAI_API_KEY']\nos.getenv('NOT_SET')\nos.getenv('PATH')\n"
    files = _files(tmp_path, "my-bot", text=text)
    assert _commands(files)[1] == [
        "my-bot: reads OPENAI_API_KEY, which is set here but not passed on to plugins: add --env OPENAI_API_KEY, or "
        "set it below [my-bot] in a file that --secrets names"
    ]
    assert _commands(files, requests=["OPENAI_API_KEY"])[1] == []
    assert _commands(files, secrets=_secrets_file(tmp_path, '[my-bot]\nOPENAI_API_KEY = "x"\n'))[1] == []


def test_a_credential_is_never_handed_on_and_that_is_reported(tmp_path: Path) -> None:
    commands, reports = _commands(_files(tmp_path, "a"), {**ENVIRONMENT, "TOOLBUS_CREDENTIAL": "/c.toolbus"}, ["*"])
    assert "TOOLBUS_CREDENTIAL" not in commands["a"].environment
    assert reports == [
        "a: reads TOOLBUS_CREDENTIAL, which is set here but not passed on to plugins: name it with --credential for "
        "all of them, or set it below [a] in a file that --secrets names"
    ]


def test_a_credential_goes_to_every_plugin_that_has_none_of_its_own(tmp_path: Path) -> None:
    files = _files(tmp_path, "chat", "weather")
    secrets = _secrets_file(tmp_path, '[weather]\nTOOLBUS_CREDENTIAL = "/keys/weather.toolbus"\n')
    commands = plugin_commands(files, ENVIRONMENT, (), secrets, lambda report: None, tmp_path / "chat.toolbus")
    assert [_sent(command)["TOOLBUS_CREDENTIAL"] for command in commands.values()] == [
        str(tmp_path / "chat.toolbus"),
        "/keys/weather.toolbus",
    ]
