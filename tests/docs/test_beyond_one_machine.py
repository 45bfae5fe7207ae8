"""Runs the guide for other machines from its first line to its last: a bus, a host, a plugin and HTTPS with keys."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shlex
import socket
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.docs.pages import TEXTS, Block, blocks, listed
from tests.parts.identity.played_issuer import PlayedIssuer
from tests.support import curl
from tests.support.processes import Running, toolbus
from tests.support.waiting import until_sync

PAGE = "docs/start/beyond-one-machine.md"
ID = "4f2a91c0"  # of a credential, on the page
PORTS = ("48930", "48931", "48912")
MESSAGES = listed(TEXTS[PAGE], "Texts of errors")


class Reader:
    """Does what the page says, in a folder, with the bus on this machine and on free ports.

    Attributes:
        did: the commands that it ran.
    """

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder = folder
        self.did: list[str] = []
        self._running = running
        self._ports = {port: _free_port() for port in PORTS}
        self._keys = folder / "data" / "keys" / "keys.toml"
        self._serving = False
        self._revoked: set[str] = set()

    def reads(self, block: Block) -> None:
        if block.kind == "toml":
            self._edits(self._here(block.text))
        for line in block.text.splitlines() if block.kind == "sh" else ():
            self._types(self._here(line), block)

    def _here(self, text: str) -> str:
        text = text.replace("bus.team.example", "localhost")
        for shown, port in self._ports.items():
            text = text.replace(shown, port)
        return text.replace(ID, next((each for each in self._live() if each not in self._revoked), ID))

    def _live(self) -> list[str]:
        """Returns the credentials of `chat`, the oldest first."""
        keys = tomllib.loads(self._keys.read_text("utf-8"))["keys"] if self._serving else {}
        return [
            each.removesuffix("-token") for each, key in keys.items() if key["identity"] == "chat" and "token" in each
        ]

    def _edits(self, table_text: str) -> None:
        if not table_text.startswith("[identities.chat]"):
            return
        before, _, after = self._keys.read_text("utf-8").partition("[identities.chat]")
        edited = self._keys.with_name("edited")
        edited.write_text(f"{before}{table_text}\n[{after.partition('[')[2].partition(chr(10) + '[')[2]}", "utf-8")
        edited.chmod(0o600)
        os.replace(edited, self._keys)
        # Not team-*: once this is refused, the bus has taken the edit over.
        self._until("list", "--user", "bob", "--credential", "chat.toolbus", shows=lambda out: "get_weather" not in out)
        assert "get_weather" in toolbus("list", "--user", "team-a", "--credential", "chat.toolbus").stdout

    def _types(self, line: str, block: Block) -> None:
        words = shlex.split(line)
        self.did.append(" ".join(words[:3]))
        if words[0] == "curl":
            base = f"https://localhost:{self._ports['48912']}"
            printed = curl.read(line, base).run(base, self.folder)
            assert block.shown is None or curl.is_as_shown(block.shown, printed, block.shown_kind)
            assert "invoke" not in line or '"is_error":false' in printed
        elif words[:2] == ["toolbus", "serve"]:
            self._serves()
        elif words[:2] == ["toolbus", "run"]:
            self._running.enter_context(Running(self.folder, *words[1:]))
            self._until("list", "--credential", "chat.toolbus", shows=lambda out: "get_weather" in out)
        elif words[0] == "toolbus":
            ended = toolbus(*words[1:], TOOLBUS_DATA_DIR=str(self.folder / "data"))
            assert ended.returncode == 0, f"{line}: {ended.stderr}"
            if words[2] == "revoke":
                self._revoked.add(words[3])
        else:
            assert words[:2] == ["pip", "install"]

    def _serves(self) -> None:
        """Starts the bus once, as the last of the page's commands says."""
        if self._serving:
            return
        lines = [line for block in blocks(PAGE) for line in block.text.splitlines() if line.startswith("toolbus serve")]
        words = shlex.split(self._here(lines[-1]))[1:]
        issuer = PlayedIssuer()
        issuer.now = time.time()
        (self.folder / "jwks.json").write_bytes(issuer.jwks())
        (self.folder / "jwks.json").chmod(0o600)
        (self.folder / "ann.jwt").write_text(issuer.token(), "utf-8")
        (settings,) = (block.text for block in blocks(PAGE) if "[[issuers]]" in block.text)
        fetched = tomllib.loads(settings)["issuers"][0]["jwks"]
        (self.folder / "toolbus.toml").write_text(settings.replace(fetched, str(self.folder / "jwks.json")), "utf-8")
        more = ("--http", "off", "--config", self.folder / "toolbus.toml", "--data-dir", self.folder / "data")
        bus = self._running.enter_context(Running(self.folder, *words, *more))
        bus.says("toolbus ready")
        self._serving = True

    def _until(self, *words: str, shows: Callable[[str], bool]) -> None:
        until_sync(lambda: shows(toolbus(*words).stdout), f"{words} shows it")


def _free_port() -> str:
    """Returns a port for a bus whose address has to be known before it listens.

    It is below those that the kernel gives out (Linux: 32768 and above), which another test could get meanwhile, and
    free in both address families, since `localhost` may lead to either.
    """
    hosts = [("127.0.0.1", socket.AF_INET), *([("::1", socket.AF_INET6)] if socket.has_ipv6 else [])]
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for host, family in hosts:
                held.enter_context(socket.create_server((host, port), family=family))
            return str(port)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    (plugin,) = (block for block in blocks("docs/start/plugins.md") if block.file == "weather.py")
    (tmp_path / "weather.py").write_text(plugin.text, "utf-8")
    with ExitStack() as running:
        yield Reader(tmp_path, running)


def test_the_guide_can_be_followed_from_its_first_command_to_its_last(reader: Reader) -> None:
    for block in blocks(PAGE):
        reader.reads(block)
    assert reader.did[0] == "toolbus keys init"
    assert reader.did[-1].startswith("curl ")
    keys = json.loads(toolbus("keys", "list", "--json", TOOLBUS_DATA_DIR=str(reader.folder / "data")).stdout)["keys"]
    assert {key["identity"] for key in keys if key["state"] == "live" and not key["old_root"]} == {"chat", "weather"}


@functools.cache
def _texts_of_toolbus() -> str:
    """Returns the code, with the texts that are split over lines joined again."""
    root = Path(__file__).parents[2] / "toolbus"
    code = " ".join(path.read_text("utf-8") for path in sorted(root.rglob("*.py")))
    joined = code.replace('"\n', "\n").replace("\n", " ")
    return " ".join(joined.replace(' f"', " ").replace(' "', " ").split())


@pytest.mark.parametrize("row", MESSAGES, ids=[row[0] for row in MESSAGES])
def test_every_message_that_the_guide_explains_is_one_of_toolbus(row: list[str]) -> None:
    for part in row[0].strip("*").replace(", ", "…").split("…"):
        assert part.strip() in _texts_of_toolbus(), part
