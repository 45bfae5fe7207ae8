"""Programs in any language as plugins: what is read, what they get, how they start, end and are cleaned up."""

import asyncio
import contextlib
import ctypes
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.processes import ROOT, Running, alive, environment, toolbus
from tests.support.waiting import WAIT_SECONDS, until, until_sync, within
from toolbus.errors import SetupError
from toolbus.processes.child_environment import token_of
from toolbus.processes.plugin_program import PluginProgram, plugin_commands
from toolbus.processes.supervisor import Command, PluginReport, ReportKind, RestartPolicy, Supervisor
from toolbus.sdk import Plugin
from toolbus.testing import running_bus

PATHS = {"PATH": os.environ["PATH"]}
# A shell that waits for a child, as a start script does: it ends with SIGTERM, and its child does not.
# The child tells its id once it is a program of its own: a SIGTERM before would meet the handler of the shell.
CHILD = "echo child $$ of $PPID; exec sleep 60"
DRAINING = f"trap 'echo drained; exit 0' TERM; sh -c {shlex.quote(CHILD)} & wait; wait"
WRAPPER = f"sh -c {shlex.quote(f'sh -c {shlex.quote(DRAINING)}; true')}"


def _commands(*texts: str, environment: Mapping[str, str] = PATHS) -> dict[str, Command]:
    programs = [PluginProgram.parse(text) for text in texts]
    return plugin_commands(programs, environment, (), None, lambda report: None)


class _Run:
    """A supervisor in this process, and what it reports."""

    def __init__(self, *texts: str, environment: Mapping[str, str] = PATHS) -> None:
        self.reports: list[PluginReport] = []
        restarts = RestartPolicy(backoff_seconds=0.01, max_deaths=3)
        self.supervisor = Supervisor(self.reports.append, restarts=restarts, stop_seconds=60.0)
        for name, command in _commands(*texts, environment=environment).items():
            self.supervisor.add(name, command)
        self.running = asyncio.create_task(self.supervisor.run())

    def texts(self, kind: ReportKind = ReportKind.OUTPUT) -> list[str]:
        return [report.text for report in self.reports if report.kind is kind]


def _reap(pids: str) -> None:
    """Leaves no zombie to the tests that follow."""
    for pid in map(int, re.findall(r"\d+", pids)):
        with contextlib.suppress(ChildProcessError):  # its own parent has reaped it
            os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("weather=node weather.js", ("node", "weather.js")),
        ("a.b:c-d=sh -c 'echo \"a=b\" | cat'", ("sh", "-c", 'echo "a=b" | cat')),
        ("x=./run\\ me --city 'New York' ''", ("./run me", "--city", "New York", "")),
    ],
)
def test_a_command_is_split_as_a_shell_does(text: str, words: tuple[str, ...]) -> None:
    assert PluginProgram.parse(text).words == words


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("node weather.js", "--exec 'node weather.js' has no name: write NAME=COMMAND"),
        ("=node", "the name '' breaks the rule"),
        ("a b=node", "the name 'a b' breaks the rule"),
        (f"{'a' * 129}=node", "breaks the rule"),
        ("w=", "--exec w: the command is empty"),
        ("w=  ", "--exec w: the command is empty"),
        ("w='' x", "--exec w: the command is empty"),
        ("w=node 'a", '--exec w: the command "node \'a" cannot be split into words (no closing quotation)'),
        ("w=node \\", "(no escaped character)"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_rule(text: str, error: str) -> None:
    with pytest.raises(SetupError, match=re.escape(error)):
        PluginProgram.parse(text)


def test_a_program_that_cannot_be_started_is_named_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weather").write_text("")
    for command, error in (
        ("nodd a.js", "--exec w: no program 'nodd' is in a directory of PATH: install it, or write its path"),
        ("weather", "write ./weather for the file in this directory"),
        ("./weather", "'./weather' is not executable: chmod +x ./weather, or write the program that runs it"),
        ("bin/weather", f"'bin/weather' does not exist: check the path, which is relative to {tmp_path}"),
        (str(tmp_path), "is a directory: name the program in it"),
        ("cd app && npm start", "no shell runs the command: where it needs one, write sh -c '…'"),
    ):
        with pytest.raises(SetupError, match=re.escape(error)):
            _commands(f"w={command}")
    (tmp_path / "weather").chmod(0o755)
    assert _commands("w=./weather")["w"].arguments[-2:] == ("./weather", "./weather")


def test_a_name_stands_for_one_plugin_of_a_run(tmp_path: Path) -> None:
    (file := tmp_path / "w.py").write_text("")
    program = PluginProgram.parse("w=sh")
    cases: tuple[list[Path | PluginProgram], ...] = ([program, program], [file, program], [file, file, program])
    for plugins in cases:
        with pytest.raises(SetupError, match="two plugins of this run have the name 'w': give one of them another"):
            plugin_commands(plugins, PATHS, (), None, lambda report: None)


async def test_a_program_gets_the_variables_of_plugins_its_token_and_its_secrets_and_nothing_else(
    tmp_path: Path,
) -> None:
    secrets = tmp_path / "secrets.toml"
    secrets.write_text('[w]\nWEATHER_KEY = "kéy"\n')
    secrets.chmod(0o600)
    given = {**PATHS, "TOOLBUS_TOKEN": "mine", "OPENAI_API_KEY": "no", "CITY": "Oslo", "GRPC_VERBOSITY": "NONE"}
    programs = [PluginProgram.parse("w=env"), PluginProgram.parse("v=env")]
    commands = plugin_commands(programs, given, ["CITY"], secrets, lambda report: None)
    assert "kéy" not in f"{commands} {[command.environment for command in commands.values()]}"
    reports: list[PluginReport] = []
    supervisor = Supervisor(reports.append)
    for name, command in commands.items():
        supervisor.add(name, command)
    assert await within(supervisor.run())
    got = {
        name: dict(each.text.split("=", 1) for each in reports if (each.plugin, each.stream) == (name, "stdout"))
        for name in commands
    }
    usual = {**PATHS, "CITY": "Oslo", "TOOLBUS_ADDRESS": "127.0.0.1:48930", "PYTHONUNBUFFERED": "1"}
    assert got["w"] == usual | {"TOOLBUS_TOKEN": token_of("mine", "--exec w"), "WEATHER_KEY": "kéy"}
    assert got["v"] == usual | {"TOOLBUS_TOKEN": token_of("mine", "--exec v")}


def _ignored(status: str) -> set[int]:
    """Returns the signals that a process ignores, without those of the C library."""
    (mask,) = re.findall(r"SigIgn:\s*([0-9a-f]+)", status)
    return {number for number in range(1, 32) if int(mask, 16) >> (number - 1) & 1}


OURS = _ignored(Path("/proc/self/status").read_text()) if sys.platform == "linux" else set()


async def test_a_program_starts_in_the_directory_of_the_command_with_empty_input_and_default_signals() -> None:
    run = _Run("w=sh -c 'pwd -P; cat; grep SigIgn /proc/self/status; exit 0'")
    assert await within(run.running)
    directory, *ignored = run.texts()
    assert directory == os.getcwd()
    if sys.platform == "linux":
        (mask,) = ignored
        # What was ignored when this process started stays so (`nohup`), but not what Python itself ignores.
        assert _ignored(mask) == OURS - {signal.SIGPIPE, signal.SIGXFSZ}


async def test_a_program_that_dies_is_restarted_until_it_is_a_crash_loop() -> None:
    run = _Run("w=sh -c 'echo going; exit 3'")
    assert not await within(run.running)
    assert run.texts() == ["going"] * 3
    assert "died 3 times within 30 s, the last time with exit code 3" in run.texts(ReportKind.GIVEN_UP)[0]


async def test_a_program_that_cannot_start_is_given_up_at_once(tmp_path: Path) -> None:
    for name, text in (("plain", "echo"), ("lost", "#!/nothing/here\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    run = _Run(f"plain={tmp_path}/plain", f"lost={tmp_path}/lost", "says=sh -c 'exit 78'")
    assert not await within(run.running)
    assert len(run.texts(ReportKind.STARTED)) == len(run.texts(ReportKind.GIVEN_UP)) == 3
    errors = {report.plugin: report.text for report in run.reports if report.kind is ReportKind.OUTPUT}
    assert "neither a program for this machine nor a script" in errors["plain"]
    assert "(#!) names an interpreter that does not exist" in errors["lost"]


async def test_what_a_shell_leaves_behind_shuts_down_gracefully_too() -> None:
    run = _Run(f"w={WRAPPER}")
    await until(run.texts, "the child")
    run.supervisor.stop()
    assert await within(run.running)
    assert run.texts()[1:] == ["drained"]
    pids = re.findall(r"\d+", run.texts()[0])
    assert [alive(int(pid)) for pid in pids] == [False, False]


@pytest.mark.skipif(sys.platform != "linux", reason="keeps zombies as a subreaper, and reads /proc")
async def test_zombies_that_are_never_reaped_delay_no_shutdown() -> None:
    prctl, set_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(set_subreaper, 1, 0, 0, 0)
    try:
        run = _Run(f"w={WRAPPER}")
        await until(run.texts, "the child")
        run.supervisor.stop()
        assert await within(run.running)
    finally:
        prctl(set_subreaper, 0, 0, 0, 0)
    _reap(run.texts()[0])
    assert run.texts()[1:] == ["drained"]


async def test_a_plugin_in_another_language_is_offered_with_a_token_that_binds_its_source() -> None:
    async with running_bus() as bus:
        address = bus.grpc_addresses[0]
        program = f"units={sys.executable} {ROOT}/clients/python/units.py"
        run = _Run(program, environment=environment({"TOOLBUS_ADDRESS": address}))
        async with asyncio.timeout(WAIT_SECONDS):
            async for _ in bus.watch():
                if bus.list():
                    break
        result = await bus.call("convert_units", {"value": 1, "from": "km", "to": "m"})
        assert result.output == {"value": 1000.0, "unit": "m", "quantity": "length"}
        with pytest.raises(Exception, match="source 'units' is bound to a token"):
            async with Plugin("units", address=address) as other:
                await other.ready()
        run.supervisor.stop()
        assert await within(run.running)
    assert run.texts(ReportKind.ENDED) == ["ended (exit code 0)"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an installed package that is a plugin; it is imported by this process if anything imports it."""
    (folder := tmp_path / "weather_of_towns").mkdir()
    (folder / "__init__.py").write_text("from toolbus import Plugin\n\nplugin = Plugin('weather')\n")
    (folder / "tools.py").write_text(
        "from . import plugin\n\n@plugin.tool\ndef sun(town: str) -> str:\n    return town\n"
    )
    (folder / "__main__.py").write_text("from .tools import plugin\n\nplugin.run()\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


async def test_an_installed_package_runs_as_a_plugin_with_its_own_imports_and_token(package: Path) -> None:
    async with running_bus() as bus:
        passed = environment({"TOOLBUS_ADDRESS": bus.grpc_addresses[0], "PYTHONPATH": str(package.parent)})
        program = PluginProgram.of_module(package.name)
        assert package.name not in sys.modules
        commands = plugin_commands([program], passed, ["PYTHONPATH"], None, lambda report: None)
        supervisor = Supervisor(lambda report: None, restarts=RestartPolicy(enabled=False), stop_seconds=60.0)
        for name, command in commands.items():
            supervisor.add(name, command)
        running = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(WAIT_SECONDS):
            async for _ in bus.watch():
                if bus.list():
                    break
        assert (await bus.call("sun", {"town": "Oslo"})).output == "Oslo"
        with pytest.raises(Exception, match="source 'weather' is bound to a token"):
            async with Plugin("weather", address=bus.grpc_addresses[0]) as other:
                await other.ready()
        supervisor.stop()
        assert await within(running)


async def test_a_package_that_the_bus_refuses_is_given_up_with_the_reason_and_no_traceback(package: Path) -> None:
    async with running_bus() as bus, Plugin("weather", address=bus.grpc_addresses[0], token="of another") as taken:
        await taken.ready()
        passed = environment({"TOOLBUS_ADDRESS": bus.grpc_addresses[0], "PYTHONPATH": str(package.parent)})
        program = PluginProgram.of_module(package.name)
        reports: list[PluginReport] = []
        supervisor = Supervisor(reports.append, restarts=RestartPolicy(), stop_seconds=60.0)
        supervisor.add(
            package.name, plugin_commands([program], passed, ["PYTHONPATH"], None, reports.append)[package.name]
        )
        assert not await within(supervisor.run())
        said = [each.text for each in reports if each.kind is ReportKind.OUTPUT]
        assert said[-1].startswith("source 'weather' is bound to a token")
        assert not any("Traceback" in each for each in said)


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("nothing_like_this", "no such package is installed for"),
        ("nothing_like_this.tools", "no such package is installed for"),
        ("./weather_of_towns", "no such package is installed for"),
        ("weather_of_towns/", "no such package is installed for"),
        ("", "no such package is installed for"),
        ("weather_of_towns", "the package has no __main__.py: add one that calls plugin.run()"),
    ],
)
def test_a_package_that_cannot_run_is_refused_and_not_imported(module: str, error: str, package: Path) -> None:
    (package / "__main__.py").unlink()
    with pytest.raises(SetupError, match=re.escape(error)):
        PluginProgram.of_module(module)
    assert package.name not in sys.modules


def test_no_process_of_a_program_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with Running(tmp_path, "run", "--exec", f"w={WRAPPER}") as running:
        running.says("child ")
        pids = [int(pid) for pid in re.findall(r"started \(pid (\d+)", running.err)]
        until_sync(lambda: re.search(r"child \d+ of \d+\n", running.out), "the pids")
        pids += map(int, re.findall(r"\d+", running.out))
        assert len(pids) == 3
        assert all(map(alive, pids))
        running.send(signal.SIGKILL)
        assert running.code() == -signal.SIGKILL
        until_sync(lambda: not any(map(alive, pids)), "the end of all")


def test_programs_run_beside_files_and_their_output_has_their_names(tmp_path: Path) -> None:
    (file := tmp_path / "dies.py").write_text("import os\nprint('going', flush=True)\nos._exit(0)\n")
    ended = toolbus("run", file, "--exec", "says=sh -c 'echo last words; echo why >&2; exit 3'", "--json", "--once")
    assert ended.returncode == 1
    for words in (
        '{"plugin":"dies","event":"output","stream":"stdout","text":"going"}',
        '{"plugin":"says","event":"output","stream":"stdout","text":"last words"}',
        '{"plugin":"says","event":"output","stream":"stderr","text":"why"}',
        '{"plugin":"says","event":"given_up","text":"died (exit code 3)"}',
    ):
        assert words in ended.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--exec", "w=nothing-like-this"), "toolbus: --exec w: no program 'nothing-like-this' is in"),
        ((".", "--exec", "w=sh"), "holds drop-in tools, and --exec runs a plugin: run them by two commands"),
        (("-m", "nothing_like_this"), "-m 'nothing_like_this': no such package is installed for"),
        ((".", "-m", "json"), "holds drop-in tools, and -m runs a plugin: run them by two commands"),
        ((), "nothing to run: name a plugin file, a folder, -m MODULE or --exec NAME=COMMAND"),
    ],
)
def test_what_cannot_run_is_wrong_usage_and_nothing_is_started(
    words: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    ended = toolbus("run", *(tmp_path if word == "." else word for word in words))
    assert (ended.returncode, error in ended.stderr) == (2, True), ended.stderr
    assert "started" not in ended.stderr
