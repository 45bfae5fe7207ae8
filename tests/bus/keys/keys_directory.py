"""Makes keys for tests, in a directory of the test's own, with a clock of the test's own."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from toolbus.bus.access.identity import Globs, Scopes
from toolbus.bus.keys.keyring import Keyring
from toolbus.bus.keys.keys_file import FILE
from toolbus.parts.identity.key_store import CredentialRequest, KeyStore, Made
from toolbus.parts.identity.scope_texts import template

DAY = 86_400.0
ADDRESS = "mtls:bus.example:48931"


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class KeysDirectory:
    """A keys directory with what a test does to it."""

    def __init__(self, folder: Path, now: float = 1_800_000_000.0, host: str = "bus.example") -> None:  # 2027-01-15
        self.folder = folder
        self.path = folder / "keys"
        self.clock = Clock(now)
        self.store = KeyStore(self.path, self.clock)
        self.store.init([host], ADDRESS.replace("bus.example", host))

    @property
    def file(self) -> Path:
        return self.path / FILE

    def ring(self) -> Keyring:
        return Keyring(self.path, self.clock)

    def add(self, name: str, scopes: Scopes | None = None, days: float = 90) -> dict[str, Any]:
        """Adds an identity and returns its credential."""
        return self.credential(self.store.add(name, scopes or template("host"), self._order(name, days)))

    def renew(self, name: str, days: float = 90) -> dict[str, Any]:
        return self.credential(self.store.renew(name, self._order(name, days)))

    def credential(self, made: Made) -> dict[str, Any]:
        return {**tomllib.loads(made.file.read_text("utf-8")), "id": made.id}

    def edit(self, old: str, new: str) -> None:
        """Changes the file as an editor does that writes a new one."""
        text = self.file.read_text("utf-8")
        assert old in text
        self.write(text.replace(old, new, 1))

    def write(self, text: str) -> None:
        beside = self.file.with_name("edited")
        beside.write_text(text, "utf-8")
        beside.chmod(0o600)
        os.replace(beside, self.file)

    def _order(self, name: str, days: float) -> CredentialRequest:
        return CredentialRequest(self.folder / f"{name}.toolbus", days, overwrite=True)


def calls(*patterns: str) -> Scopes:
    """Returns scopes that may call what fits the patterns."""
    return Scopes(call=Globs(patterns))
