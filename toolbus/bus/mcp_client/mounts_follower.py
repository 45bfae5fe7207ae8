"""Follows the files of mounts of one bus: its own in the data directory, and one that the operator names.

The files are looked at twice a second, as those of the keys are: a look costs some microseconds, finds what a link
leads to now, and works where a file does not exist yet. A file that cannot be read any more changes nothing: its mounts
go on, and the error says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolbus.bus.keys.private_files import Stamp, stamp_of
from toolbus.bus.mcp_client.mounts_file import MountEntry, MountsReading, read_mounts
from toolbus.errors import SetupError
from toolbus.processes.secrets_file import read_variables

FOLLOW_SECONDS = 0.5
_NOTHING = MountsReading()


@dataclass(frozen=True, slots=True)
class ConfiguredMounts:
    """What all files say together.

    Attributes:
        entries: by name; of two with one name that of the first file.
        refused: by name, why an entry is not mounted.
        notices: what was read otherwise than written.
        errors: by path, why a file could not be read; what it said before is still in `entries`.
    """

    entries: Mapping[str, MountEntry] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)


def variables_for(secrets: Path | None, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns where `${VAR}` is looked up: in a file of secrets, then in an environment.

    Raises:
        SetupError: the file cannot be used.
    """
    return environment if secrets is None else {**environment, **read_variables(secrets)}


class MountsFollower:
    """The files of mounts of one bus.

    Args:
        own: the file that `toolbus mount` writes; None where there is no data directory. It may be missing.
        named: the file of `--mcp-servers`; None where there is none.
        environment: where `${VAR}` is looked up.
    """

    def __init__(self, own: Path | None, named: Path | None, environment: Mapping[str, str]) -> None:
        self._own = own
        self._files = [path for path in (own, named) if path is not None]
        self._environment = environment
        self._readings: dict[Path, MountsReading] = {}  # the newest good one of each file
        self._errors: dict[str, str] = {}
        self._stamps: dict[Path, Stamp] = {}  # as of the last look

    def __repr__(self) -> str:
        return f"<MountsFollower {' '.join(map(str, self._files))}>"

    def read_first(self) -> ConfiguredMounts:
        """Returns what the files say at the start of a bus.

        Raises:
            SetupError: the named file cannot be read: a bus without the mounts that it was given would be no help.
        """
        configured = self._read()
        for path, why in configured.errors.items():
            if self._own is None or path != str(self._own):
                raise SetupError(why)
        return configured

    async def follow(self, seconds: float = FOLLOW_SECONDS) -> AsyncGenerator[ConfiguredMounts]:
        """Yields what the files say whenever one of them has changed since it was read."""
        while True:
            await asyncio.sleep(seconds)
            if self._has_changed():  # some microseconds
                yield await asyncio.to_thread(self._read)

    def _has_changed(self) -> bool:
        return any(self._stamps.get(path) != stamp_of(path) for path in self._files)

    def _read(self) -> ConfiguredMounts:
        for path in self._files:
            stamp = stamp_of(path)  # before it is read: what is written meanwhile is found by the next look
            if path in self._stamps and self._stamps[path] == stamp:
                continue
            self._stamps[path] = stamp
            self._errors.pop(str(path), None)
            if stamp is None and path == self._own:
                self._readings.pop(path, None)
                continue
            try:
                self._readings[path] = read_mounts(path, self._environment)
            except SetupError as error:
                self._errors[str(path)] = str(error)
        return self._merged()

    def _merged(self) -> ConfiguredMounts:
        entries: dict[str, MountEntry] = {}
        refused: dict[str, str] = {}
        notices: list[str] = []
        for path in self._files:
            reading = self._readings.get(path, _NOTHING)
            for name, entry in reading.entries.items():
                if name in entries:
                    notices.append(f"{path}: mount {name} stands in {entries[name].origin} already, which is used")
                else:
                    entries[name] = entry
            refused.update(reading.refused)
            notices.extend(reading.notices)
        refused = {name: why for name, why in refused.items() if name not in entries}
        return ConfiguredMounts(entries, refused, tuple(notices), dict(self._errors))
