"""Follows the files of mounts of one bus: its own in the data directory, and one that the operator names.

The files are polled twice a second, like those of the keys: a poll costs some microseconds, follows links, and works
before a file exists. A file that becomes unreadable changes nothing: its mounts continue, and the error says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from toolbus.bus.keys.private_files import Stamp, stamp_of
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.mounts_file import MountEntry, MountsReading, read_mounts
from toolbus.processes.child_environment import read_variables

FOLLOW_SECONDS = 0.5
_NOTHING = MountsReading()


@dataclass(frozen=True, slots=True)
class ConfiguredMounts:
    """The content of all files together.

    Attributes:
        entries: by name; the first file wins.
        refused: by name, why an entry is not mounted.
        notices: what is ignored, or read differently than written.
        errors: by path, why a file could not be read; `entries` still has its last content.
    """

    entries: Mapping[str, MountEntry] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)


def variables_for(secrets: Path | None, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables for `${VAR}`: those of a file of secrets, then those of an environment.

    Raises:
        SetupError: the file cannot be used.
    """
    return environment if secrets is None else {**environment, **read_variables(secrets)}


class MountsFollower:
    """The files of mounts of one bus.

    Args:
        own: the file that `toolbus mount` writes, which may be missing; None without a data directory.
        named: the file of `--mcp-servers`; None without that option.
        environment: where `${VAR}` is looked up.
    """

    def __init__(self, own: Path | None, named: Path | None, environment: Mapping[str, str]) -> None:
        self._own = own
        self._files = [path for path in (own, named) if path is not None]
        self._environment = environment
        self._readings: dict[Path, MountsReading] = {}  # the last valid content of each file
        self._errors: dict[str, str] = {}
        self._stamps: dict[Path, Stamp] = {}  # of the last poll

    def __repr__(self) -> str:
        return f"<MountsFollower {' '.join(map(str, self._files))}>"

    def read_first(self) -> ConfiguredMounts:
        """Returns the content of the files at the start of a bus.

        Raises:
            SetupError: the named file cannot be read: a bus must not start without the mounts of its options.
        """
        configured = self._read()
        for path, why in configured.errors.items():
            if self._own is None or path != str(self._own):
                raise SetupError(why)
        return configured

    async def follow(self, seconds: float = FOLLOW_SECONDS) -> AsyncGenerator[ConfiguredMounts]:
        """Yields the content of the files whenever one of them has changed."""
        while True:
            await asyncio.sleep(seconds)
            if self._has_changed():  # some microseconds
                yield await asyncio.to_thread(self._read)

    def _has_changed(self) -> bool:
        return any(self._stamps.get(path) != stamp_of(path) for path in self._files)

    def _read(self) -> ConfiguredMounts:
        for path in self._files:
            stamp = stamp_of(path)  # before it is read: the next poll finds a change during the reading
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
                    notices.append(f"{path}: mount {name} is ignored: {entries[name].origin} has that name too")
                else:
                    entries[name] = entry
            refused.update(reading.refused)
            notices.extend(reading.notices)
        refused = {name: why for name, why in refused.items() if name not in entries}
        return ConfiguredMounts(entries, refused, tuple(notices), dict(self._errors))
