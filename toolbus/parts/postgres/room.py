"""Tells operators how old the shared settings are, and revokes keys at every bus that shares a database."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

from toolbus.bus.catalog.entry import Entry
from toolbus.bus.core import Core, Room
from toolbus.bus.keys.keyring import Changed
from toolbus.bus.storage.store import Kind, WriteFailed
from toolbus.errors import SetupError
from toolbus.parts.postgres.settings import StorageSettings

if TYPE_CHECKING:  # their driver is loaded where a bus has a database, and needs the extra
    from toolbus.parts.postgres.logins import SharedLogins
    from toolbus.parts.postgres.shared_store import SharedStore

log = logging.getLogger("toolbus.storage")

SOURCE = "toolbus.settings"  # under which health shows the database
WATCH_SECONDS = 1.0  # between two looks whether it is away, and at the files of logins

REVOKED = Kind(  # by the id of a key: its SHA-256, and the day since which it is revoked
    "revoked_keys",
    needed=True,
    without="trust keys again that were revoked at another bus",
    synced=True,
    shared="settings",
)


class PostgresRoom(Room):
    """The shared database of one bus; without a URL it does nothing."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        shares = core.config.part(StorageSettings).storage is not None
        self._store = cast("SharedStore", core.program.store) if shares else None
        self._was_away = False  # the database, at the last look
        self._refreshing: asyncio.Task[None] | None = None  # puts revoked keys into force
        self._logins: SharedLogins | None = None  # None without a database or a data directory, and until open

    def provides(self) -> Iterable[object]:
        """Returns itself, which explains, and the logins."""
        return [each for each in (self._store and self, self._logins) if each is not None]

    async def open(self) -> None:
        """Revokes the keys that were revoked at other buses, and takes over their logins."""
        directory = self.core.config.data_dir
        if self._store is not None:
            self._store.secret("mcp")  # from now on it is in memory, whatever becomes of the database
            with suppress(WriteFailed):  # its name is told at the next start
                self._store.name_home(f"{socket.gethostname()} ({' '.join(self.core.config.grpc)})")
        if self._store is not None and directory is not None:
            from toolbus.parts.postgres.logins import SharedLogins

            self._logins = SharedLogins(self._store, directory)
            self._logins.compare()
        if self._store is not None and self.core.sessions.keyring is not None:
            self._store.on_change(REVOKED, self._revoke)
            self.core.sessions.doorman.on_refresh.append(self._keys_read)
            self._revoke()

    async def start(self) -> None:
        """Begins to watch the database."""
        if self._store is not None:
            self.repeat(WATCH_SECONDS, partial(self._look, self._store), "looked at the database")
        if self._logins is not None:
            self.repeat(WATCH_SECONDS, partial(self._compare, self._logins), "compared logins")

    async def stop(self) -> None:
        if self._logins is not None:
            await asyncio.to_thread(self._logins.compare)  # a last time

    # -- how old the settings are --------------------------------------------------------------------------------------

    def serving(self, source: str) -> bool | None:
        """Tells whether the database can be used, as the health of a source."""
        return None if self._store is None or source != SOURCE else not self._store.database.away

    def sources(self) -> Iterable[str]:
        """Names what stands for the database."""
        return () if self._store is None else (SOURCE,)

    def explain(self, entry: Entry) -> Iterable[tuple[str, bool | None, str]]:
        """Yields how old the settings are that decide about calls."""
        assert self._store is not None  # else nobody asks
        database = self._store.database
        age = f"read {database.age:.0f} s ago"
        if database.away:
            yield "shared settings", None, f"{age}: {database} is away ({database.away}), later changes are not known"
        else:
            yield "shared settings", None, f"{age} from {database}{'' if database.hears else ', without notifications'}"

    async def _compare(self, logins: SharedLogins) -> None:
        try:
            await asyncio.to_thread(logins.compare)
        except (WriteFailed, SetupError) as error:
            log.warning("logins are not shared: %s", error)

    def _look(self, store: SharedStore) -> None:
        before, self._was_away = self._was_away, bool(store.database.away)
        if before != self._was_away:
            self.core.signals.source_changed(SOURCE)

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _revoke(self) -> None:
        """Takes over what other buses revoked, and ends the sessions of these keys."""
        keyring, doorman = self.core.sessions.keyring, self.core.sessions.doorman
        assert keyring is not None  # nothing is revoked without keys
        assert self._store is not None
        rows = self._store.load(REVOKED)
        known = keyring.keys
        keyring.revoke(
            {name: row["day"] for name, row in rows.items() if name in known and known[name].sha256 == row["sha256"]}
        )
        self._refreshing = asyncio.get_running_loop().create_task(doorman.refresh(), name="toolbus revoked keys")

    def _keys_read(self, changed: Changed) -> None:
        """Tells the other buses which keys are revoked here."""
        keyring, store = self.core.sessions.keyring, self._store
        assert keyring is not None
        assert store is not None
        if store.database.away:
            return  # the next look at the files comes soon
        known = store.load(REVOKED)
        rows = {
            key.id: {"sha256": key.sha256, "day": key.revoked}
            for key in keyring.keys.values()
            if key.revoked and key.id not in known
        }
        try:
            store.write(REVOKED, rows)
        except WriteFailed as error:
            log.error("keys that are revoked here are not revoked at other buses yet: %s", error)
