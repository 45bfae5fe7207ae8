"""The program itself: verdicts, reports, exit codes; a client that does not start is no client that keeps the rules."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.parts.conformance.clients import CLIENTS
from tests.parts.conformance.forked_client import fork_client
from tests.parts.conformance.mutants import ROOT
from tests.support.processes import alive, environment, toolbus
from tests.support.waiting import WAIT_SECONDS, until_sync
from toolbus.parts.conformance import report, suite
from toolbus.parts.conformance.script import Scenario, rules
from toolbus.parts.conformance.suite import Choice, ClientOutcome, NoSuchRule, RuleVerdict, run

STUBS = CLIENTS["stubs"]
RULES = ("NEST-7", "NEST-8")  # one scenario each
OTHER_TRACE = "00-11111111111111111111111111111111-2222222222222222-01"


@pytest.fixture(autouse=True)
def _clients_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
    monkeypatch.setattr("asyncio.create_subprocess_exec", fork_client)


def changed(folder: Path, old: str, new: str) -> Sequence[str]:
    """Returns the command of a client with a text replaced wherever it stands."""
    texts = {path.name: path.read_text() for path in (ROOT / "clients" / "python").glob("*.py")}
    assert any(old in text for text in texts.values())
    for name, text in texts.items():
        (folder / name).write_text(text.replace(old, new))
    return (sys.executable, str(folder / "conformance.py"))


@pytest.fixture
def broken(tmp_path: Path) -> Sequence[str]:
    """A client that breaks NEST-8: it begins another trace in a nested call."""
    return changed(tmp_path, '"traceparent": self.message.traceparent', f'"traceparent": "{OTHER_TRACE}"')


def verdicts(outcome: ClientOutcome) -> dict[str, RuleVerdict]:
    return {each.rule.id: each.verdict for each in outcome.judged}


async def test_a_broken_rule_is_named_with_what_was_exchanged_and_the_others_are_kept(broken: Sequence[str]) -> None:
    outcome = await run(broken, Choice(rules=RULES))
    assert verdicts(outcome) == {"NEST-7": RuleVerdict.KEPT, "NEST-8": RuleVerdict.BROKEN}
    assert not outcome.kept
    shown = {each["id"]: each for each in report.as_json(outcome)["rules"]}
    assert OTHER_TRACE in shown["NEST-8"]["why"]
    assert any(OTHER_TRACE in line for line in shown["NEST-8"]["trace"])
    assert "trace" not in shown["NEST-7"]


async def test_what_is_known_as_broken_does_not_fail_and_what_is_known_and_kept_does(broken: Sequence[str]) -> None:
    outcome = await run(broken, Choice(rules=RULES, known=["NEST-8"]))
    assert verdicts(outcome)["NEST-8"] is RuleVerdict.KNOWN
    assert outcome.kept
    stale = await run(STUBS, Choice(rules=RULES, known=["NEST-8"]))
    assert verdicts(stale)["NEST-8"] is RuleVerdict.KEPT
    assert not stale.kept


async def test_a_missing_tool_is_unclaimed_and_broken_for_a_client_that_claims_the_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = Scenario(
        "a tool that it lacks",
        ("CALL-5",),
        ({"accept": {}}, {"send": {"calls": [{"call_id": "1", "name": "steps"}]}}),
    )
    command = changed(tmp_path, " steps, ", " ")
    monkeypatch.setattr(suite, "scenarios", lambda: (needs,))
    monkeypatch.setattr(suite, "BASIC_TOOLS", ())  # which every client has to have
    assert verdicts(await run(command, Choice(rules=["CALL-5"]))) == {"CALL-5": RuleVerdict.UNCLAIMED}
    claimed = await run(command, Choice(rules=["CALL-5"], roles=["plugin"]))
    assert verdicts(claimed) == {"CALL-5": RuleVerdict.BROKEN}
    assert "steps" in claimed.judged[0].why


async def test_a_fault_of_a_scenario_is_none_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Scenario("a scenario that expects before it accepts", ("CALL-5",), ({"expect": {"heartbeat": {}}},))
    monkeypatch.setattr(suite, "scenarios", lambda: (wrong,))
    with pytest.raises(ExceptionGroup) as error:
        await run(STUBS, Choice(rules=["CALL-5"]))
    assert "nothing was accepted" in str(error.value.exceptions[0])


async def test_a_client_that_ends_in_the_middle_breaks_the_rule_and_its_exit_code_is_named(tmp_path: Path) -> None:
    command = changed(tmp_path, "return arguments\n", "__import__('os')._exit(7)\n")
    outcome = await run(command, Choice(rules=["CALL-4"]))
    assert verdicts(outcome) == {"CALL-4": RuleVerdict.BROKEN}
    assert "exit code 7" in outcome.judged[0].why


def test_rules_and_groups_and_roles_that_there_are_not_are_named() -> None:
    for choice in (
        Choice(rules=["CALL-999"]),
        Choice(rules=["NOPE"]),
        Choice(known=["LIVE-1"]),
        Choice(roles=["guest"]),
    ):
        with pytest.raises(NoSuchRule, match="is not a"):
            choice.chosen()
    assert [rule.id for rule in Choice(rules=["CALL-5"]).chosen()] == ["CALL-5"]
    assert all(rule.role == "plugin" for rule in Choice(roles=["plugin"]).chosen())


def test_the_command_writes_all_reports_and_ends_with_1(broken: Sequence[str], tmp_path: Path) -> None:
    files = [tmp_path / "out" / name for name in ("report.json", "report.xml", "badge.json")]
    options = [
        text
        for option, path in zip(("--json", "--junit", "--badge"), files, strict=True)
        for text in (option, str(path))
    ]
    ended = toolbus("conformance", "--rules", ",".join(RULES), "--trace", *options, "--", *broken)
    assert ended.returncode == 1
    assert "NEST-8" in ended.stdout
    assert OTHER_TRACE in ended.stdout
    read = json.loads(files[0].read_text())
    assert [(each["id"], each["result"]) for each in read["rules"]] == [("NEST-7", "kept"), ("NEST-8", "broken")]
    cases = ElementTree.fromstring(files[1].read_text())
    assert (cases.get("tests"), cases.get("failures")) == ("2", "1")
    assert json.loads(files[2].read_text()) == {
        "schemaVersion": 1,
        "label": "toolbus protocol 1",
        "message": "1/2 rules",
        "color": "red",
    }


def test_a_client_that_does_not_start_ends_with_3_and_its_last_words(tmp_path: Path) -> None:
    absent = toolbus("conformance", "--", str(tmp_path / "absent"))
    assert absent.returncode == 3
    assert "cannot be started" in absent.stderr
    silent = toolbus("conformance", "--", sys.executable, "-c", "raise SystemExit('no library here')")
    assert silent.returncode == 3
    assert "no library here" in silent.stderr
    assert "ended with exit code 1 before it opened a stream" in silent.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_ends_the_clients_too(tmp_path: Path, number: signal.Signals, code: int) -> None:
    mark = tmp_path / "pid"
    client = f"import os, time; open('{mark}.new', 'w').write(str(os.getpid())); os.rename('{mark}.new', '{mark}')"
    command = [sys.executable, "-m", "toolbus.cli", "conformance", "--", sys.executable]
    with subprocess.Popen([*command, "-c", f"{client}; time.sleep(600)"], env=environment({})) as program:
        until_sync(mark.exists, "the client")
        program.send_signal(number)
        assert program.wait(WAIT_SECONDS) == code
    until_sync(lambda: not alive(int(mark.read_text())), "the end of the client")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "which client"),
        (("--rules", "NOPE", "--", "x"), "'NOPE'"),
        (("--known", "absent.txt", "--", "x"), "absent.txt"),
        (("--bus", "127.0.0.1:1", "--", "x"), "leave out one"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(options: Sequence[str], says: str) -> None:
    ended = toolbus("conformance", *options)
    assert ended.returncode == 2
    assert says in ended.stderr


def test_the_list_has_every_rule() -> None:
    shown = toolbus("conformance", "--list").stdout
    assert all(rule in shown for rule in rules())


def test_one_cause_is_shown_once_with_the_first_lines_of_the_program(tmp_path: Path) -> None:
    texts = {path.name: path.read_text() for path in (ROOT / "clients" / "python").glob("*.py")}
    told = "import sys\nprint('the wrong table is read', file=sys.stderr, flush=True)\n"
    for name, text in texts.items():
        begun = text.replace("\nimport ", f"\n{told}import ", 1) if name == "conformance.py" else text
        (tmp_path / name).write_text(begun.replace('"conformance"', '"another"'))
    done = toolbus(
        "dev", "conformance", "--rules", "CALL-5,CALL-7", "--", sys.executable, str(tmp_path / "conformance.py")
    )
    assert done.returncode == 1
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines() if line.startswith("CALL-7 ")]
    assert [row[3] for row in rows] == ["as CALL-5"]
    assert "CALL-5 and 1 more: attach.source: expected" in done.stdout
    assert done.stdout.count("    the wrong table is read") == 1
