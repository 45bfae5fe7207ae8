"""The examples of extensions and councils, each run as a program: alone, on a bus of their own, and with a model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.processes import ROOT, Running, environment, script, toolbus
from tests.support.waiting import WAIT_SECONDS

MEMORY = ROOT / "examples" / "extension_memory" / "memory.py"
COUNCIL = ROOT / "examples" / "council" / "council.py"
SECONDS = WAIT_SECONDS
SAID = "Let the bell ring once more."


def council(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the example to its end, where any warning is an error."""
    with mock.patch.dict(os.environ):
        for key in [key for key in os.environ if key.startswith("OPENAI_")]:
            del os.environ[key]
        return script(COUNCIL, *words, **{**env, "NO_PROXY": "*", "COLUMNS": "120", "PYTHONWARNINGS": "error"})


def council_in_a_new_interpreter(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs it likewise; a warning of an import is an error too."""
    clean = {key: value for key, value in environment({}).items() if not key.startswith("OPENAI_")}
    return subprocess.run(
        [sys.executable, "-W", "error", str(COUNCIL), *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**clean, "NO_PROXY": "*", "COLUMNS": "120"},
        check=False,
    )


@contextmanager
def model(requests: list[Any]) -> Iterator[str]:
    """Serves chat completions on loopback that always say the same. Yields the base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({**asked, "path": self.path, "key": self.headers["Authorization"]})
            choice = {"message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}
            body = json.dumps({"choices": [choice]}).encode()
            self.send_response(404 if "nowhere" in self.path else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bus with the memory extension, in processes of their own; its address."""
    folder = tmp_path_factory.mktemp("memory")
    with Running(folder, "serve", "--grpc", "127.0.0.1:0", "--http", "off", "--ephemeral") as serve:
        serve.says("toolbus ready")
        (address,) = re.findall(r"grpc=(\S+)", serve.out)
        memories = str(folder / "memories")
        with Running(folder, "run", MEMORY, "--env", f"MEMORY_FOLDER={memories}", TOOLBUS_ADDRESS=address) as run:
            run.says("memory")
            until_listed(folder, address, "memory:recall")
            yield address


def until_listed(folder: Path, address: str, name: str) -> None:
    with Running(folder, "watch", "--json", "--bus", address) as changes:
        changes.says(name)


def called(address: str, tool: str, arguments: dict[str, Any], user: str) -> str:
    ran = toolbus("call", tool, json.dumps(arguments), "--user", user, "--bus", address)
    return (ran.stdout + ran.stderr).strip()


@pytest.mark.parametrize("file", [MEMORY, COUNCIL])
def test_each_example_has_at_most_120_lines(file: Path) -> None:
    assert len(file.read_text("utf-8").splitlines()) <= 120


def test_a_council_runs_without_any_model_and_shows_events_and_block() -> None:
    ran = council_in_a_new_interpreter("I push the door open.")
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = [re.sub(r"\d+\.\d+ s", "T", line.rstrip()) for line in ran.stdout.splitlines()]
    assert lines[:4] == ["council of 2", "  Mira · Lore · T · ok", "  Tom · Pace · T · ok", "done, 2 results in T"]
    assert "what the main model gets" in lines[4]
    for text in ("Council Deliberation", "chooses.", "Tom: the last reply has 15 words; there is room"):
        assert text in ran.stdout


def test_with_a_model_each_member_has_a_prompt_tool_too() -> None:
    requests: list[Any] = []
    with model(requests) as url:
        ran = council("--json", "Who rings?", OPENAI_BASE_URL=url, OPENAI_MODEL="m", OPENAI_API_KEY="k")
    assert (ran.returncode, ran.stderr) == (0, "")
    told = json.loads(ran.stdout)
    assert [(each["memberId"], each["toolName"]) for each in told["results"]] == [
        ("mira", "tavern:lore"),
        ("mira", "analyze_character"),
        ("tom", "tavern:pace"),
        ("tom", "suggest_direction"),
    ]
    assert [each["content"] for each in told["results"]][1::2] == [SAID, SAID]
    assert told["deliberation"].count(SAID) == 2
    assert [each["event"] for each in told["events"]] == [
        *("COUNCIL_STARTED", "COUNCIL_MEMBER_DONE", "COUNCIL_MEMBER_DONE", "COUNCIL_COMPLETED")
    ]
    assert [(each["path"], each["model"], each["key"]) for each in requests] == [
        ("/v1/chat/completions", "m", "Bearer k")
    ] * 2
    assert "You are Mira" in requests[0]["messages"][0]["content"]
    assert "user: Who rings?" in requests[1]["messages"][1]["content"]


def test_a_model_that_does_not_answer_is_counted_at_the_end() -> None:
    requests: list[Any] = []
    with model(requests) as url:
        ran = council("Who rings?", OPENAI_BASE_URL=f"{url}/nowhere", OPENAI_MODEL="none", OPENAI_API_KEY="k")
    assert re.search(r"^done, 4 results, 2 failed in \d+\.\d\d s$", ran.stdout, re.MULTILINE), ran.stdout
    assert len(requests) == 2, "a server that knows no such thing is not asked again"


def test_what_a_user_has_remembered_is_recalled_for_that_user_alone_and_in_a_members_voice(bus: str) -> None:
    stored = called(bus, "memory:remember", {"text": "The innkeeper's dog is afraid of bells."}, "ann")
    (number,) = map(int, re.findall(r"Stored as (\d+)", stored))
    assert "afraid of bells" in called(bus, "memory:recall", {"query": "dogs?"}, "ann")
    assert "Nothing is stored" in called(bus, "memory:recall", {"query": "dogs", "userId": "ann"}, "bo")
    assert "Nothing is stored" in called(bus, "memory:recall", {"query": "Who is of the and?"}, "ann")
    called(bus, "memory:remember", {"text": "The harbour is closed."}, "ann")
    assert "harbour" not in called(bus, "memory:recall", {"query": "Is the dog of the inn here?"}, "ann")
    newest = called(bus, "memory:recall", {"limit": "1"}, "ann")  # which the bus reads as 1
    assert "less than the minimum of 1" in called(bus, "memory:recall", {"limit": 0}, "ann")
    assert ("harbour" in newest, "dog" in newest) == (True, False)
    assert f"no memory has the number {number}" in called(bus, "memory:forget", {"number": number}, "bo")
    told = json.loads(council("The dog barks.", "--bus", bus, "--user", "ann", "--json").stdout)
    recalled = {each["toolName"]: each["content"] for each in told["results"]}["memory:recall"]
    assert recalled == f"Mira (Archivist) remembers:\n{number}. The innkeeper's dog is afraid of bells."
    assert recalled in told["deliberation"]


def test_a_council_whose_bus_or_model_is_none_says_so_in_one_sentence() -> None:
    ran = council("--url", "nonsense")
    assert ran.returncode == 1
    assert re.fullmatch(r"council: sidecar.connection is 'nonsense': give the base URL of .*\n", ran.stderr)
