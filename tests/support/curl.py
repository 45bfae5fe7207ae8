"""The few words of curl that the documents use: a command line in, a request out, and what a page says it prints."""

from __future__ import annotations

import json
import re
import shlex
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

_SWITCHES = {"-s", "-N", "-sN"}  # silent, unbuffered: nothing that a request shows
_FILES = {"--cacert", "--cert", "--key"}
_CONTENT = re.compile(r"\$\(cat ([\w./-]+)\)")  # what the shell puts in its place


@dataclass(frozen=True, slots=True)
class Curl:
    """A request as a command line says it.

    Attributes:
        target: path and query of its URL.
        files: of TLS, by option.
    """

    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    def run(self, base: str, folder: Path = Path()) -> str:
        """Sends it to a bus; returns the body of the answer.

        Args:
            folder: where the files are that it names.
        """
        headers = {
            name: _CONTENT.sub(lambda match: (folder / match[1]).read_text("utf-8").strip(), value)
            for name, value in self.headers.items()
        }
        verify = self._tls(folder) if self.files else True
        with httpx.Client(base_url=base, trust_env=False, timeout=20, verify=verify) as client:
            answer = client.request(self.method, self.target, content=self.body, headers=headers)
        answer.raise_for_status()
        return answer.text

    def _tls(self, folder: Path) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=folder / self.files["--cacert"])
        if "--cert" in self.files:
            context.load_cert_chain(folder / self.files["--cert"], folder / self.files["--key"])
        return context


def read(command: str, base: str) -> Curl:
    """Takes a command line apart.

    Args:
        base: scheme, host and port that it has to ask.

    Raises:
        ValueError: a word that this player does not know, or another server.
    """
    words = iter(shlex.split(command, comments=True)[1:])
    method, target, body = "", "", None
    headers: dict[str, str] = {}
    files: dict[str, str] = {}
    for word in words:
        if word == "-X":
            method = next(words)
        elif word in _FILES:
            files[word] = next(words)
        elif word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word in ("-d", "--json"):
            body = next(words)
            if word == "--json":
                headers = {"Content-Type": "application/json", "Accept": "application/json"} | headers
        elif word.startswith(f"{base}/"):
            target = word.removeprefix(base)
        elif word not in _SWITCHES:
            raise ValueError(f"this player of curl does not know {word!r}")
    if not target:
        raise ValueError(f"{command!r} does not ask {base}")
    return Curl(method or ("GET" if body is None else "POST"), target, headers, body, files)


def is_as_shown(shown: str, printed: str, kind: str) -> bool:
    """Whether an answer is what a page shows; ``…`` stands for anything.

    Args:
        kind: of the page's block: ``json`` compares values, ``text`` letters.
    """
    return _like(json.loads(shown), json.loads(printed)) if kind == "json" else _reads(shown, printed)


def _reads(shown: str, printed: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, shown.split("…"))), printed, re.DOTALL) is not None


def _like(shown: Any, found: Any) -> bool:
    if isinstance(shown, str):
        return shown == "…" or (isinstance(found, str) and _reads(shown, found))
    if isinstance(shown, dict) and isinstance(found, dict):
        return list(shown) == list(found) and all(_like(shown[key], found[key]) for key in shown)
    if isinstance(shown, list) and isinstance(found, list):
        return len(shown) == len(found) and all(map(_like, shown, found))
    return type(shown) is type(found) and bool(shown == found)
