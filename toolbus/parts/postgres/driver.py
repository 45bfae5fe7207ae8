"""Keeps rows in a Postgres database that several buses share: a `Driver` of the store.

One thread of its own talks to the database, over three connections: for settings, for results of tasks, and to listen.
Every kind has a version, which each write raises in its transaction; a bus reads a kind again when that differs from
what it has. A NOTIFY is only a hint to look at once. The bus's loop never waits for the database, except for a write,
and for that `WRITE_SECONDS` at most.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, LiteralString, TypeVar
from urllib.parse import urlsplit

from toolbus.bus.storage.store import Driver, Kind, Row, WriteFailed
from toolbus.common.text import clean_line, shorten
from toolbus.errors import SetupError

try:
    import psycopg
except ImportError as missing:
    raise SetupError(f"storage needs more libraries ({missing}): run `pip install 'toolbus[postgres]'`") from None

log = logging.getLogger("toolbus.storage")

POLL_SECONDS = 10.0  # between two looks at the versions, whatever notifications say
HURRIED_SECONDS = 0.5  # the same where notifications do not arrive
WRITE_SECONDS = 2.0  # that a write of settings may take: the bus's loop may wait for it
RESULT_SECONDS = 10.0  # that reading or writing results may take, on threads of their own
CONNECT_SECONDS = 5.0
HEARD_SECONDS = 2.0  # until a notification that does not come counts as swallowed
START_SECONDS = 15.0  # until the first rows are read; after that the bus does not start
LOCK_SECONDS = 100  # above what a helper may take to renew a token
RETRY_SECONDS = (0.1, 5.0)  # between attempts to connect: the first, the longest
RESULT_DAYS = 2  # results that nobody wrote for so long are of buses that are gone
CHANNEL = "toolbus"
_LOCK = 0x746F6F6C627573  # of migrations
_HOUR = 3600.0

# Script i migrates the tables from version i to i + 1. A script only adds what earlier releases can ignore, or names in
# `OLDEST` the first version whose releases cannot go on. Never edit a released script.
MIGRATIONS: tuple[LiteralString, ...] = (
    """
    CREATE TABLE toolbus_schema (version integer NOT NULL, oldest integer NOT NULL);
    CREATE TABLE toolbus_kinds (
        name text PRIMARY KEY,
        results boolean NOT NULL,
        version bigint NOT NULL DEFAULT 1
    );
    CREATE TABLE toolbus_rows (
        kind text NOT NULL REFERENCES toolbus_kinds (name),
        key bytea NOT NULL,
        number bigint GENERATED ALWAYS AS IDENTITY,
        value text NOT NULL,
        checksum bigint NOT NULL,
        written timestamptz NOT NULL DEFAULT clock_timestamp(),
        PRIMARY KEY (kind, key)
    )
    """,
)
OLDEST = 1  # the version that a release has to know to use these tables

_PUT: LiteralString = (
    "INSERT INTO toolbus_rows (kind, key, value, checksum) VALUES (%s, %s, %s, %s) ON CONFLICT (kind, key) "
    "DO UPDATE SET value = excluded.value, checksum = excluded.checksum, written = clock_timestamp()"
)
_DELETE: LiteralString = "DELETE FROM toolbus_rows WHERE kind = %s AND key = %s"
_DECLARE: LiteralString = "INSERT INTO toolbus_kinds (name, results) VALUES (%s, %s) ON CONFLICT DO NOTHING"
_RAISE: LiteralString = (
    "INSERT INTO toolbus_kinds (name, results) VALUES (%s, %s) ON CONFLICT (name) "
    "DO UPDATE SET version = toolbus_kinds.version + 1 RETURNING version"
)

_MAY_PASS = (psycopg.OperationalError, OSError, TimeoutError)  # errors that may be over at the next attempt
Connection = psycopg.AsyncConnection[tuple[Any, ...]]
Result = TypeVar("Result")


class NotShared(WriteFailed):
    """The database did not take a change, so it is not in force either."""

    in_force = False


class PostgresDriver(Driver):
    """The rows of one database, as one bus has them.

    Args:
        url: of the database; may hold a password, which no message repeats.
        name: of the bus, for those who look at the database's connections.
        poll_seconds, start_seconds: see `POLL_SECONDS`, `START_SECONDS`.
        migrations, oldest: those of this release.

    Attributes:
        hears: whether notifications arrive; a pooler may swallow them.
    """

    def __init__(
        self,
        url: str,
        name: str = "",
        *,
        poll_seconds: float = POLL_SECONDS,
        start_seconds: float = START_SECONDS,
        migrations: Sequence[LiteralString] = MIGRATIONS,
        oldest: int = OLDEST,
    ) -> None:
        self._url = url
        self._name = name
        self._poll_seconds = poll_seconds
        self._start_seconds = start_seconds
        self._migrations = migrations
        self._oldest = oldest
        self._on_change: Callable[[frozenset[str]], object] = lambda kinds: None
        self._on_read: Callable[[Mapping[str, Mapping[str, Row]]], object] = lambda rows: None
        self._versions: dict[str, int] = {}  # of the kinds of settings as they were read; those of `_rows`
        self._rows: dict[str, dict[str, Row]] = {}  # settings by kind and key; replaced as a whole
        self._written: dict[str, int] = {}  # by kind, the moment of the last change by another bus
        self._moment = 0  # counts these
        self._offset = time.time() - time.monotonic()  # of the database's clock from the monotonic one
        self._read_at = time.monotonic()  # when the versions were last known
        self._away = "it was not connected yet"  # why it cannot be used; "" where it can
        self.hears = False
        self._loop = asyncio.SelectorEventLoop()
        self._thread: threading.Thread | None = None  # None until open
        self._main: asyncio.Task[None] | None = None  # connects, listens and reads; None until open
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()  # the first rows are read
        self._connections: dict[str, Connection] = {}  # by what they are for
        self._locks = {purpose: asyncio.Lock() for purpose in ("settings", "results")}

    def __repr__(self) -> str:
        return f"the database {self.place}"

    @property
    def place(self) -> str:
        """Where the database is, without password."""
        parts = urlsplit(self._url)
        return f"{parts.hostname or 'socket'}{f':{parts.port}' if parts.port else ''}{parts.path}"

    @property
    def away(self) -> str:
        """Why the database cannot be used now; "" where it can."""
        return self._away

    @property
    def age(self) -> float:
        """For how many seconds changes of other buses may be missing."""
        return time.monotonic() - self._read_at

    def on_change(self, changed: Callable[[frozenset[str]], object]) -> None:
        """Calls a function, on the thread of the driver, with the kinds that other buses changed."""
        self._on_change = changed

    def on_read(self, read: Callable[[Mapping[str, Mapping[str, Row]]], object]) -> None:
        """Calls a function, on the thread of the driver, with the rows of settings that were read anew, by kind."""
        self._on_read = read

    def begin_with(self, rows: Mapping[str, Iterable[Row]], age: float) -> None:
        """Has `open` go on with settings that were read some seconds ago, where the database does not answer."""
        self._rows = {kind: {row[0]: row for row in each} for kind, each in rows.items()}
        self._read_at = time.monotonic() - max(0.0, age)

    # -- the driver ----------------------------------------------------------------------------------------------------

    def open(self) -> frozenset[str]:
        self._thread = threading.Thread(target=self._serve, name="toolbus-postgres", daemon=True)
        self._thread.start()
        try:
            self._ready.result(self._start_seconds)
            return frozenset()
        except TimeoutError:
            why = self._away
            if self._rows:
                return frozenset()
        except SetupError as error:
            why = str(error)
        self.close()
        raise SetupError(
            f"storage, {self}, cannot be used: {why}. Nothing was changed. Start the database, correct the URL, let "
            "its user create tables, or leave storage out: the settings of this machine are used then"
        )

    def kinds(self) -> Mapping[str, bool]:
        return dict.fromkeys(self._rows, False)

    def declare(self, kind: Kind, rows: Sequence[Row], *, imported: bool = False) -> None:
        self._write(kind, rows, (), declares=True)

    def load(self, kind: Kind, key: str | None = None) -> Iterable[Row]:
        if kind.shared != "results":
            rows = self._rows.get(kind.name, {})
            return list(rows.values()) if key is None else [rows[key]] if key in rows else []
        where: LiteralString = "WHERE kind = %s ORDER BY number" if key is None else "WHERE kind = %s AND key = %s"
        given = (kind.name,) if key is None else (kind.name, _bytes(key))

        async def read(connection: Connection) -> list[Row]:
            found = await connection.execute(f"SELECT key, value, checksum FROM toolbus_rows {where}", given)
            return [_row(*each) for each in await found.fetchall()]

        try:
            return self._do("results", read, RESULT_SECONDS)
        except (psycopg.Error, OSError) as error:
            raise SetupError(f"{self} does not answer ({_why(error)}): try again when it is back") from None

    def write(self, kind: Kind, rows: Sequence[Row], deleted: Sequence[str]) -> None:
        self._write(kind, rows, deleted)

    def changes(self, after: int) -> tuple[int, frozenset[str]]:
        written = self._written
        return self._moment, frozenset(kind for kind, moment in written.items() if moment > after)

    def is_connected(self, suffix: str) -> bool | None:
        """Tells whether a bus whose name ends so has a connection; None where the database is away, or a pooler's."""
        with contextlib.suppress(psycopg.Error, OSError):
            if self.hears and not self._away:
                return self._do("results", partial(_is_connected, suffix), RESULT_SECONDS)
        return None

    def now(self) -> float:
        return time.monotonic() + self._offset

    def damaged(self, kind: Kind, what: str) -> SetupError:
        delete = f"DELETE FROM toolbus_rows WHERE kind = '{kind.name}'"
        return SetupError(
            f"{self} cannot be used: it is damaged: {what}. Nothing was changed. Restore a backup of it, or run "
            f"`{delete}` there to {kind.without}"
        )

    def check(self) -> None:
        """Raises `NotShared` where the database is known to be away."""
        if self._away:
            raise NotShared(self._refusal())

    def look(self) -> None:
        """Reads what other buses changed, and returns when it is read."""
        self._do("settings", self._refresh, WRITE_SECONDS)

    def locked(self, name: str) -> AbstractAsyncContextManager[None]:
        """Holds a lock of the database for a block of the running loop; other buses wait for it.

        Raises:
            NotShared: on entering: the database is away, or another bus has held the lock for `LOCK_SECONDS`.
        """
        return _locked(self._url, str(self), name)

    def close(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # it has just ended
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(CONNECT_SECONDS)

    # -- from any thread -----------------------------------------------------------------------------------------------

    def _write(self, kind: Kind, rows: Sequence[Row], deleted: Sequence[str], *, declares: bool = False) -> None:
        self.check()
        results = kind.shared == "results"

        async def write(connection: Connection) -> None:
            done = await _change(connection, kind, rows, deleted, declares)
            if not results:
                await self._applied(connection, kind.name, rows if done else (), deleted if done else ())

        try:
            self._do("results" if results else "settings", write, RESULT_SECONDS if results else WRITE_SECONDS)
        except (psycopg.Error, OSError) as error:
            if isinstance(error, psycopg.OperationalError | OSError):
                raise NotShared(
                    f"{self} did not confirm it ({_why(error)}): look whether it is there when the database is back, "
                    "and do it again if it is not"
                ) from None
            raise NotShared(f"{self} refused it: {_why(error)}") from None

    async def _applied(self, connection: Connection, kind: str, rows: Sequence[Row], deleted: Sequence[str]) -> None:
        """Takes a written change over, and reads what other buses wrote just before."""
        own = {key: row for key, row in self._rows.get(kind, {}).items() if key not in deleted}
        self._rows = {**self._rows, kind: own | {row[0]: row for row in rows}}
        try:
            await self._refresh(connection)
        except (psycopg.Error, OSError) as error:
            self._lost(_why(error))

    def _refusal(self) -> str:
        since = f"has been away for up to {time.monotonic() - self._read_at:.0f} s"
        return f"{self}, which the buses share, {since} ({self._away}): do it again when it is back"

    def _do(self, purpose: str, act: Callable[[Connection], Coroutine[Any, Any, Result]], seconds: float) -> Result:
        """Does something over a connection; one that does not answer in time is given up."""

        async def run() -> Result:
            async with self._locks[purpose]:
                connection = self._connections.get(purpose)
                if connection is None:
                    raise psycopg.OperationalError(self._away or "it is not connected")
                return await act(connection)

        async def bounded() -> Result:
            work = _begin(run())
            await asyncio.wait([work], timeout=seconds)
            if not work.done():
                self._lost(f"no answer within {seconds:g} s")
                raise psycopg.OperationalError(f"no answer within {seconds:g} s")
            if isinstance(work.exception(), psycopg.OperationalError):
                self._lost(_why(work.exception()))
            return work.result()

        try:
            return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result(seconds + CONNECT_SECONDS)
        except (RuntimeError, TimeoutError, concurrent.futures.CancelledError):
            raise psycopg.OperationalError("the bus has disconnected from it") from None

    # -- on the driver's thread ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._follow())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _end(self) -> None:
        self._away = "the bus stops"
        for connection in self._connections.values():
            _cut(connection)
        if self._main is not None:
            self._main.cancel()

    async def _follow(self) -> None:
        """Connects, reads everything, then what changes; for ever."""
        wait = RETRY_SECONDS[0]
        while True:
            try:
                await self._connect()
                wait = RETRY_SECONDS[0]
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._listen()
            except (psycopg.Error, OSError, TimeoutError, SetupError) as error:
                self._lost(_why(error))
                if not self._ready.done() and not isinstance(error, _MAY_PASS):
                    self._ready.set_exception(SetupError(self._away))
                    return
            finally:
                await self._disconnect()
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(wait * 2, RETRY_SECONDS[1])

    async def _connect(self) -> None:
        made: dict[str, Connection] = {}
        try:
            for purpose in ("settings", "results", "notifications"):
                made[purpose] = await _in_time(
                    psycopg.AsyncConnection.connect(
                        self._url,
                        autocommit=True,
                        prepare_threshold=None,  # a pooler gives each transaction another connection
                        application_name=f"toolbus {purpose} {self._name}".strip()[:63],
                    )
                )
            await _in_time(_migrate(made["settings"], self._migrations, self._oldest), made["settings"])
            await _in_time(made["notifications"].execute(f"LISTEN {CHANNEL}"), made["notifications"])
            self.hears = await _is_heard(made["settings"], made["notifications"])
            if not self.hears:
                log.warning(
                    "%s takes LISTEN and delivers nothing, as poolers in transaction mode do: it is asked for changes "
                    "every %g s instead. Give storage a URL that goes around the pooler", self, HURRIED_SECONDS,
                )  # fmt: skip
            self._connections = made
            self._versions = {}  # whatever was missed
            async with self._locks["settings"]:
                await _in_time(self._refresh(made["settings"]), made["settings"])
        except BaseException:
            self._connections = made  # to be closed
            raise
        was_away, self._away = self._away, ""
        log.info("connected with %s (after: %s)", self, was_away)

    async def _listen(self) -> None:
        swept = 0.0
        poll = self._poll_seconds if self.hears else min(self._poll_seconds, HURRIED_SECONDS)
        while True:
            async for _ in self._connections["notifications"].notifies(timeout=poll, stop_after=1):
                pass
            async with self._locks["settings"]:
                await _in_time(self._refresh(settings := self._connections["settings"]), settings)
            if time.monotonic() - swept > _HOUR:
                swept = time.monotonic()
                async with self._locks["results"]:
                    await _in_time(_sweep(results := self._connections["results"]), results)

    async def _refresh(self, connection: Connection) -> None:
        """Reads the kinds whose version is another one than before."""
        began = time.monotonic()
        async with connection.transaction():
            await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            found = await connection.execute(
                "SELECT name, version, extract(epoch FROM clock_timestamp())::float8 FROM toolbus_kinds "
                "WHERE NOT results UNION ALL SELECT '', 0, extract(epoch FROM clock_timestamp())::float8"
            )
            versions: dict[str, int] = {}
            for name, version, now in await found.fetchall():
                versions[name] = version
                self._offset = now - began
            del versions[""]
            stale = [name for name, version in versions.items() if self._versions.get(name) != version]
            rows: dict[str, dict[str, Row]] = {name: {} for name in stale}
            if stale:
                found = await connection.execute(
                    "SELECT kind, key, value, checksum FROM toolbus_rows WHERE kind = ANY(%s) ORDER BY number", (stale,)
                )
                async for name, *row in found:
                    read = _row(*row)
                    rows[name][read[0]] = read
        self._read_at = began
        gone = {name: dict[str, Row]() for name in self._rows if name not in versions and self._rows[name]}
        before, self._rows = self._rows, {**self._rows, **rows, **gone}
        self._versions = versions
        if rows or gone:
            self._on_read(rows | gone)
        changed = frozenset(n for n, each in (rows | gone).items() if before.get(n, {}) != each)
        if changed:
            self._moment += 1
            self._written = {**self._written, **dict.fromkeys(changed, self._moment)}
            self._on_change(changed)

    def _lost(self, why: str) -> None:
        if not self._away:
            log.error(
                "%s is away (%s): this bus goes on with what it read last, and refuses changes of shared settings",
                self,
                why,
            )
        self._away = why
        for connection in self._connections.values():
            _cut(connection)

    async def _disconnect(self) -> None:
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            _cut(connection)
            with contextlib.suppress(Exception):
                await connection.close()


def _begin(work: Coroutine[Any, Any, Result]) -> asyncio.Future[Result]:
    """Begins some work that may be given up; asyncio logs no error of it then."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task


async def _is_connected(suffix: str, connection: Connection) -> bool:
    """Tells whether a bus whose name ends so has a connection."""
    found = await connection.execute(
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
        "AND starts_with(application_name, 'toolbus ') AND right(application_name, %s) = %s LIMIT 1",
        (len(suffix), suffix),
    )
    return await found.fetchone() is not None


async def _in_time(work: Coroutine[Any, Any, Result], connection: Connection | None = None) -> Result:
    """Waits for the database, at most `CONNECT_SECONDS`; then it cuts the connection.

    Raises:
        TimeoutError: it did not answer.
    """
    task = _begin(work)
    try:
        await asyncio.wait([task], timeout=CONNECT_SECONDS)
    finally:
        if not task.done():
            if connection is None:
                task.cancel()
            else:
                _cut(connection)
            await asyncio.wait([task], timeout=1.0)
    if task.cancelled() or isinstance(task.exception(), psycopg.OperationalError):
        raise TimeoutError(f"no answer: {_why(None if task.cancelled() else task.exception())}")
    return task.result()


async def _migrate(connection: Connection, migrations: Sequence[LiteralString], own_oldest: int) -> None:
    """Brings the tables to this version, one bus at a time.

    Raises:
        SetupError: a newer release wrote them, and says that this one cannot read them.
    """
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        made = await (await connection.execute("SELECT to_regclass('toolbus_schema') IS NOT NULL")).fetchone()
        version = 0
        if made and made[0]:
            found = await (await connection.execute("SELECT version, oldest FROM toolbus_schema")).fetchone()
            version, oldest = found or (0, 0)
            if oldest > len(migrations):
                raise SetupError(
                    f"a newer toolbus wrote its tables (version {version}; readable from {oldest} on; this one "
                    f"knows {len(migrations)}): use that toolbus"
                )
        for script in migrations[version:]:
            await connection.execute(script)
        if version < len(migrations):
            await connection.execute("DELETE FROM toolbus_schema")
            await connection.execute("INSERT INTO toolbus_schema VALUES (%s, %s)", (len(migrations), own_oldest))


async def _is_heard(sender: Connection, listener: Connection) -> bool:
    """Tells whether notifications arrive: a pooler that gives transactions different connections swallows them."""
    token = f"test {secrets.token_hex(8)}"
    await _in_time(sender.execute("SELECT pg_notify(%s, %s)", (CHANNEL, token)), sender)
    heard, end = False, time.monotonic() + HEARD_SECONDS
    while not heard and (left := end - time.monotonic()) > 0:
        async for each in listener.notifies(timeout=left, stop_after=1):
            heard = heard or each.payload == token
    return heard


@contextlib.asynccontextmanager
async def _locked(url: str, shown: str, name: str) -> AsyncIterator[None]:
    connection: Connection | None = None
    try:
        connection = await _in_time(psycopg.AsyncConnection.connect(url, prepare_threshold=None))
        await connection.execute("SELECT set_config('lock_timeout', %s, true)", (f"{LOCK_SECONDS}s",))
        await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (name,))
    except (psycopg.Error, OSError) as error:
        if connection is not None:
            await connection.close()
        raise NotShared(f"{shown} gives no lock ({_why(error)})") from None
    try:
        yield
    finally:
        await connection.close()  # which ends the transaction, and with it the lock


async def _change(
    connection: Connection, kind: Kind, rows: Sequence[Row], deleted: Sequence[str], declares: bool
) -> bool:
    """Changes rows in one transaction; returns False where a kind was to be declared that there is."""
    results = kind.shared == "results"
    async with connection.transaction():
        made = await connection.execute(_DECLARE if declares else _RAISE, (kind.name, results))
        if not made.rowcount:
            return False
        async with connection.cursor() as cursor:
            await cursor.executemany(_DELETE, [(kind.name, _bytes(key)) for key in deleted])
            await cursor.executemany(_PUT, [(kind.name, _bytes(key), text, checksum) for key, text, checksum in rows])
        if not results:
            await connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, kind.name))
    return True


async def _sweep(connection: Connection) -> None:
    """Deletes results of buses that are gone, by the database's clock."""
    await connection.execute(
        "DELETE FROM toolbus_rows USING toolbus_kinds WHERE name = kind AND results "
        "AND written < clock_timestamp() - make_interval(days => %s)",
        (RESULT_DAYS,),
    )


def _cut(connection: Connection) -> None:
    """Ends a connection at once, so that whoever waits for it gets an error; psycopg would wait for the server."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as twin:
        twin.shutdown(socket.SHUT_RDWR)


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")  # a text of Postgres can hold neither a NUL nor half of a pair


def _row(key: bytes, text: str, checksum: int) -> Row:
    return key.decode("utf-8", "surrogatepass"), text, checksum


def _why(error: BaseException | None) -> str:
    return shorten(clean_line(str(error)) or type(error).__name__, 300)
