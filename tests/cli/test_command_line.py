"""All commands: help, wrong usage, imports and the environment."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import command_words, find_command
from tests.support.processes import ROOT, environment, toolbus
from tests.support.waiting import HANG_SECONDS
from toolbus.cli.command_line import commands
from toolbus.common.version import VERSION

_NOW = {row.old: row.name for row in commands() if row.old}  # old names → names


@pytest.mark.parametrize("command", [" ".join(words) for words in command_words()])
def test_help_shows_examples_and_exit_codes(command: str) -> None:
    shown = toolbus(*command.split(), "--help").stdout
    assert "Examples" in shown
    assert "Exit codes:" in shown
    first, _, verb = command.partition(" ")
    name = f"toolbus {_NOW.get(first, first)} {verb}".strip()
    assert name.removesuffix("mounts show").strip() in shown.partition("Examples")[2]
    assert "--json" in shown or command in ("", "mcp")


@pytest.mark.parametrize("command", ["list", "calls", "health"])
def test_help_names_where_an_operator_sees_more(command: str) -> None:
    shown = " ".join(toolbus(command, "--help").stdout.split())
    assert "toolbus top" in shown
    assert "toolbus console" in shown


_HOMES = {row.home.partition(":")[0] for row in commands() if row.home}
_MARK = "-- modules --"


def _loaded(*words: str, **env: str) -> set[str]:
    """Returns the modules that a process has loaded once it has run a command."""
    code = (
        f"import sys; sys.argv[0] = 'toolbus'; from toolbus.cli import main\n"
        f"try: main()\nexcept SystemExit: pass\nprint({_MARK!r}, *sys.modules, sep='\\n')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, timeout=HANG_SECONDS, env=environment(env), check=True,
    )  # fmt: skip
    return set(ended.stdout.partition(_MARK)[2].split())


def test_help_imports_neither_grpc_nor_protobuf_nor_the_bus() -> None:
    modules = _loaded("call", "--help")
    assert not modules & {"grpc", "google.protobuf", "toolbus.protocol.tool", "toolbus.bus", "uvloop", "textual"}
    assert "toolbus.cli.call_command" in modules


@pytest.mark.parametrize(
    ("words", "home"),
    [
        (("list", "--help"), "toolbus.cli.catalog_commands"),
        (("access", "permit", "--help"), "toolbus.cli.operator_commands"),
        (("permit", "--help"), "toolbus.cli.operator_commands"),
        (("mounts", "logs", "--help"), "toolbus.parts.mcp.commands.mounts_command"),
        (("--help",), None),
        (("plugins", "--help"), None),
    ],
)
def test_a_command_imports_no_other_command_and_no_other_part(words: tuple[str, ...], home: str | None) -> None:
    modules = _loaded(*words)
    part = home and home.startswith("toolbus.parts") and ".".join(home.split(".")[:3])
    helpers = {"toolbus.cli.call_command"}  # many commands call a tool of the bus
    assert (modules & _HOMES) - helpers == ({home} if home else set())
    assert {
        name for name in modules if name.startswith("toolbus.parts.") and not (part and name.startswith(part))
    } == set()


def test_the_version_is_printed_without_typer_and_rich() -> None:
    modules = _loaded("--version")
    assert not {name for name in modules if name.partition(".")[0] in ("typer", "rich", "asyncio")}
    assert not modules & _HOMES
    assert toolbus("--version").stdout == f"toolbus {VERSION}\n"


def test_help_lists_each_command_once_in_80_columns() -> None:
    shown = toolbus("--help", COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    lines = [line.strip("│ ") for line in shown.splitlines()]
    for row in commands():
        noun, _, verb = row.name.partition(" ")
        (about,) = [number for number, line in enumerate(lines) if line.startswith(f"{noun} ")]
        assert verb in " ".join(lines[about : about + 3])
        assert not [line for line in lines if row.old and line.startswith(f"{row.old} ")]


def test_an_old_name_is_the_same_command() -> None:
    for row in commands():
        if row.old:
            old, new = find_command(row.old), find_command(*row.name.split())
            assert [each.opts for each in old.params] == [each.opts for each in new.params], row.old
            assert old.callback is not None or old.commands.keys() == new.commands.keys()


def test_a_noun_without_a_verb_shows(unused_address: str) -> None:
    for words in (("access",), ("access", "--json"), ("permissions",), ("mounts",), ("mounts", "files")):
        ended = toolbus(*words, "--bus", unused_address)
        assert (ended.returncode, ended.stdout) == (3, ""), words
    assert toolbus("dev").returncode == 2


_WITHOUT_MODELS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "toolbus.parts.models":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
from toolbus.cli import main
main()
"""


@pytest.mark.parametrize("words", [["search", "mail"], ["export", "--help"], ["explain", "x", "--dialect", "openai"]])
def test_a_command_of_a_missing_part_says_which_one_and_what_to_install(words: list[str]) -> None:
    command = [sys.executable, "-c", _WITHOUT_MODELS, *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment({}))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "its part 'models'" in ended.stderr
    assert "pip install" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_the_public_interface_of_typer_is_enough() -> None:
    registries = ("registered_commands", "registered_groups", "registered_callback", "typer.models")
    sources = {file: file.read_text("utf-8") for file in (ROOT / "toolbus").rglob("*.py")}
    assert [file.name for file, text in sources.items() if any(each in text for each in registries)] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("toolbus acc", {"access"}),
        ("toolbus access gr", {"grant"}),
        ("toolbus mounts re", {"remove", "restart"}),
        ("toolbus list --rol", {"--role"}),
        ("toolbus permit --every", {"--everyone"}),
    ],
)
def test_the_shell_completes_names_and_options(words: str, expected: set[str]) -> None:
    count = str(len(words.split()) - 1)
    variables = {"_TOOLBUS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'toolbus'; from toolbus.cli import main; main()"]
    shown = subprocess.run(program, capture_output=True, text=True, env=environment(variables), check=False)
    assert set(shown.stdout.split()) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "-event_engine_client,-event_engine_listener"),
        ({"GRPC_EXPERIMENTS": "mine"}, "mine"),
        ({"TOOLBUS_GRPC_EXPERIMENTS": "keep"}, "None"),
    ],
)
def test_the_grpc_experiments_are_set_unless_the_environment_prevents_it(
    env: dict[str, str], expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "asks.py"
    file.write_text("import os\nprint(os.environ.get('GRPC_EXPERIMENTS'), flush=True)\nos._exit(0)\n")
    variables = {key: value for key, value in environment(env).items() if key != "GRPC_EXPERIMENTS" or key in env}
    ended = subprocess.run(
        [sys.executable, "-m", "toolbus.cli", "run", str(file)],
        capture_output=True,
        text=True,
        timeout=30,
        env=variables,
        cwd=ROOT,
        check=True,
    )
    assert ended.stdout == f"asks | {expected}\n"


def test_completion_scripts_are_offered() -> None:
    shown = toolbus("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete" in shown.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("tasks", "check"), "check needs the ID of a task"),
        (("tasks", "--timeout", "1"), "--timeout needs await"),
        (("tasks", "await", "x", "--timeout", "0"), "a number of seconds above 0"),
        (("record", "--for", "nan", "calls.jsonl"), "--for is nan"),
        (("dev", "log-level", "toolbus", "debug", "--for", "inf"), "--for is inf"),
        (("tasks", "forget", "x"), "forget"),
        (("call", "x", "--background-after", "0"), "--background-after is 0"),
        (("call", "x", "--user", "a", "--context", "user_id=b"), "set the same field"),
        (("permit", "tools", "x"), "use exactly one of --user"),
        (("permit", "tools", "x", "--user", "a", "--nobody"), "use exactly one of --user"),
        (("permit", "tools", "x", "--user", ""), "--user is empty"),
        (("permit", "tools", "", "--nobody"), "NAME is empty"),
        (("permit", "doors", "x", "--nobody"), "doors"),
    ],
)
def test_contradicting_or_invalid_options_are_wrong_usage(
    words: tuple[str, ...], error: str, unused_address: str
) -> None:
    ended = toolbus(*words, "--bus", unused_address)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert error in ended.stderr
