"""Keeps the rows that several buses share in a database, and those of this bus where they were before."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from toolbus.bus.config import Config
from toolbus.bus.keys.seal import KEY_BYTES
from toolbus.bus.storage.store import Driver, Kind, Row, Store, WriteFailed
from toolbus.errors import SetupError
from toolbus.parts.postgres.driver import PostgresDriver
from toolbus.parts.postgres.settings import StorageSettings

log = logging.getLogger("toolbus.storage")

SECRETS = Kind(  # by name, in base64
    "secrets",
    needed=True,
    without="make a new one (sessions and cursors of MCP clients then begin anew)",
    synced=True,
    shared="settings",
)


HOMES = Kind(  # by the end of the ids of its tasks: what people call a bus
    "homes", needed=False, without="call buses by the ends of the ids of their tasks", shared="settings"
)
HOME_DIGITS = 4  # in the ids of tasks


COPIES = Kind(  # of this bus: by shared kind its rows as they were read last, and when
    "shared_copies", needed=False, without="wait for the database at a start"
)


def shared_store(config: Config) -> Store:
    """Returns the store of a bus that shares a database."""
    url = config.part(StorageSettings).storage
    assert url is not None  # else the core makes the store
    store = SharedStore.of(config.data_dir)
    assert isinstance(store, SharedStore)
    store.home = hashlib.sha256(config.bus_id.encode()).hexdigest()[:HOME_DIGITS]
    store.share(PostgresDriver(url, f"{socket.gethostname()[:30]}.{store.home}"))
    return store


class SharedStore(Store):
    """A store whose shared kinds are in a database of several buses; the other kinds are those of one bus.

    The first bus that asks an empty database for a kind of settings puts in what it has had itself.
    """

    def __init__(self, driver: Driver, directory: Path | None = None) -> None:
        super().__init__(driver, directory)
        self._own = driver
        self.home = ""  # the end of the ids of this bus's tasks; set before it is opened
        self._postgres: PostgresDriver | None = None  # None until `share`
        self._stores: dict[str, Store] = {}  # by what kinds are: each has a lock of its own
        self._loop: asyncio.AbstractEventLoop | None = None  # of the bus; None until open
        self._listeners: dict[str, list[Callable[[], object]]] = {}  # by kind

    def share(self, driver: PostgresDriver) -> None:
        """Has the shared kinds in a database; to be called before the store is opened."""
        self._postgres = driver
        self._stores = {each: Store(driver) for each in ("settings", "results")}
        driver.on_change(self._changed)

    @property
    def database(self) -> PostgresDriver:
        assert self._postgres is not None  # `shared_store` has set it
        return self._postgres

    @property
    def persistent(self) -> bool:
        """Whether rows outlive the process: the shared ones do."""
        return True

    @property
    def age(self) -> float | None:  # type: ignore[override]  # None in a store of one bus
        """How many seconds ago the shared rows were read; changes since then may be missing."""
        return self.database.age

    def open(self) -> None:
        """Opens both databases; where the shared one does not answer, with what this bus read last.

        Raises:
            SetupError: one of them cannot be used, and this bus never read anything from it.
        """
        super().open()
        if super().persistent:
            copies = super().load(COPIES)
            rows = {kind: [tuple(row) for row in copy["rows"]] for kind, copy in copies.items() if kind}
            newest = max((copy["read_at"] for copy in copies.values()), default=0.0)
            self.database.begin_with(rows, time.time() - newest)
            self.database.on_read(self._copy)
        try:
            self.database.open()
        except SetupError:
            super().close()
            raise
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Closes both databases."""
        self.database.close()
        if self._loop is not None and super().persistent:
            self._write_copies({"": {"rows": [], "read_at": time.time() - self.database.age}})
        self._loop = None
        super().close()

    def load(self, kind: Kind) -> dict[str, Any]:
        """Returns the values of a kind by key: `Store.load`. Settings come from memory."""
        shared = self._shared(kind)
        return super().load(kind) if shared is None else shared.load(kind)

    def get(self, kind: Kind, key: str) -> Any:
        """Returns the value of a key: `Store.get`."""
        shared = self._shared(kind)
        if shared is None:
            return super().get(kind, key)
        if kind.shared == "results":  # perhaps of another bus: it is read, and never declared
            return shared._read(kind, list(self.database.load(kind, key))).get(key)
        return shared.get(kind, key)

    def write(self, kind: Kind, rows: Mapping[str, Any], deleted: Iterable[str] = ()) -> None:
        """Changes rows: `Store.write`. Where that fails, their owner reads again what is in force.

        Raises:
            NotShared: the database is away, or refuses the change.
        """
        shared = self._shared(kind)
        if shared is None:
            super().write(kind, rows, deleted)
            return
        try:
            shared.write(kind, rows, deleted)
        except WriteFailed:
            self._changed(frozenset([kind.name]))
            raise

    def damaged(self, kind: Kind, error: object) -> SetupError:
        """Returns the error for a value that its owner cannot read."""
        shared = self._stores.get(kind.shared)
        return super().damaged(kind, error) if shared is None else shared.damaged(kind, error)

    def on_change(self, kind: Kind, changed: Callable[[], object]) -> None:
        """Has a function called on the bus's loop after another bus changed rows of a kind: `Store.on_change`."""
        self._listeners.setdefault(kind.name, []).append(changed)

    def check(self, kind: Kind) -> None:
        """Raises `NotShared` where the kind is shared and the database away."""
        if kind.shared:
            self.database.check()

    def name_home(self, name: str) -> None:
        """Tells the other buses what people call this one."""
        if self.load(HOMES).get(self.home) != name:
            self.write(HOMES, {self.home: name})

    def other_bus(self, home: str) -> tuple[str, bool | None]:
        """Returns the name of another bus, and whether it is connected with the database: `Store.other_bus`."""
        return str(self.load(HOMES).get(home, "")), self.database.is_connected(f".{home}")

    def now(self) -> float:
        return self.database.now()

    def secret(self, name: str) -> bytes | None:
        """Returns random bytes that all buses of the database have; the first one makes them."""
        made = {name: base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}
        if SECRETS.name not in self.database.kinds():
            super().write(SECRETS, made)  # the first rows of the kind, if no other bus is faster
        if name not in self.load(SECRETS):
            self.write(SECRETS, made)
        return base64.b64decode(self.load(SECRETS)[name])

    def _shared(self, kind: Kind) -> Store | None:
        """Returns the store of a shared kind, which has its first rows; None for a kind of this bus."""
        shared = self._stores.get(kind.shared)
        if shared is not None and kind.shared == "settings" and kind.name not in self.database.kinds():
            if self.database.away:
                raise SetupError(
                    f"{self.database} is away ({self.database.away}), and this bus never read {kind.name} from it: "
                    "start the database"
                )
            super().load(kind)  # declares it, with the rows of earlier releases
            self.database.declare(kind, list(self._own.load(kind)))
        return shared

    def _copy(self, read: Mapping[str, Mapping[str, Row]]) -> None:
        """Stores what was read, for a start while the database is away. On the driver's thread."""
        now = time.time()
        self._write_copies({kind: {"rows": list(rows.values()), "read_at": now} for kind, rows in read.items()})

    def _write_copies(self, copies: Mapping[str, Any]) -> None:
        try:
            super().write(COPIES, copies)
        except WriteFailed as error:
            log.error("a start without the database would have older settings: %s", error)

    def _changed(self, kinds: frozenset[str]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, kinds)

    def _tell(self, kinds: frozenset[str]) -> None:
        for kind in sorted(kinds):
            for changed in self._listeners.get(kind, ()):
                try:
                    changed()
                except Exception as error:
                    log.error("%s changed, and is not in force here: %s", kind, error)
