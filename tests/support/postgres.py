"""Runs a Postgres server of its own for tests: on a unix socket, in a folder that goes with them."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

import psycopg
import pytest

from tests.support.waiting import HANG_SECONDS

USER = "postgres"  # the server refuses to run as root
DEBIAN = Path("/usr/lib/postgresql")
INSTALL = "apt-get install postgresql (its server is enough: postgresql-15), or put its programs into PATH"
_CONFIG = """\
listen_addresses = ''
max_connections = 60
shared_buffers = 16MB
fsync = off
autovacuum = off
"""


def find_programs() -> Path | None:
    """Returns the folder of `initdb` and `postgres`; None where there is none."""
    folders = sorted(DEBIAN.glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    in_path = shutil.which("initdb")
    folders += [Path(in_path).parent] if in_path else []
    return next((each for each in folders if (each / "initdb").exists()), None)


class Server:
    """One server; databases are made in it by name."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._data = folder / "data"
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None  # None while it is stopped

    def _run_as(self) -> dict[str, object]:
        if os.geteuid() != 0:
            return {}
        account = pwd.getpwnam(USER)
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def make(self) -> None:
        """Makes its files."""
        if os.geteuid() == 0:
            account = pwd.getpwnam(USER)
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        options = ("-U", "toolbus", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        command = [self._programs / "initdb", "-D", self._data, *options]
        subprocess.run(command, check=True, capture_output=True, cwd="/", **self._run_as())  # type: ignore[call-overload]
        (self._data / "postgresql.conf").write_text(_CONFIG + f"unix_socket_directories = '{self.folder}'\n")

    def start(self) -> None:
        """Starts it, and waits until it takes connections."""
        command: Sequence[object] = [self._programs / "postgres", "-D", self._data]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # type: ignore[call-overload]
                command, cwd="/", stdout=subprocess.DEVNULL, stderr=log, **self._run_as()
            )
        for _ in range(int(HANG_SECONDS / 0.05)):
            with suppress(psycopg.OperationalError), psycopg.connect(self.url("postgres")):
                return
            try:
                self._process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            break
        raise AssertionError(f"postgres ended with {self._process.poll()}: {(self.folder / 'log').read_text()}")

    def end(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Ends it: SIGKILL ends all its processes at once, as a power cut does; SIGQUIT too, in order."""
        process, self._process = self._process, None
        if process is None:
            return
        if how == signal.SIGKILL:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.kill()
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        else:
            process.send_signal(how)
        process.wait(HANG_SECONDS)

    def url(self, database: str) -> str:
        """Returns the URL of a database, over the socket."""
        return f"postgresql://toolbus@/{database}?host={self.folder}"

    def database(self, name: str) -> str:
        """Makes an empty database, and returns its URL."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url(name)

    def schema(self) -> str:
        """Makes an empty schema, faster than a database, and returns the URL that leads there."""
        name = f"s{secrets.token_hex(6)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}".encode())
        return f"{self.url('postgres')}&options=-csearch_path%3D{name}"

    @property
    def socket(self) -> str:
        """The path of its socket."""
        return str(self.folder / ".s.PGSQL.5432")


@contextmanager
def running_server() -> Iterator[Server]:
    """Runs a server; skips the test where none is installed, and fails it in CI."""
    programs = find_programs()
    if programs is None:
        required = os.environ.get("CI") == "true" or "TOOLBUS_TEST_POSTGRES" in os.environ
        (pytest.fail if required else pytest.skip)(f"there is no Postgres here: {INSTALL}")
    folder = Path(tempfile.mkdtemp(prefix="toolbus-pg-", dir="/tmp"))  # short: the path of a socket has a limit
    server = Server(programs, folder)
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A server for all tests that do not end it."""
    with running_server() as server:
        yield server


class Proxy:
    """Stands between a bus and the server, on a thread: passes bytes on, stops to, or leaves notifications out.

    Attributes:
        stalls: whether it takes bytes and passes none on, as a network does that lost its way.
        deaf: whether it leaves out notifications, as a pooler in transaction mode does.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self.stalls = False
        self.deaf = False
        self.folder = Path(tempfile.mkdtemp(prefix="toolbus-px-", dir="/tmp"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def __enter__(self) -> Proxy:
        self._listener.bind(str(self.folder / ".s.PGSQL.5432"))
        self._listener.listen()
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(HANG_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def url_of(self, url: str) -> str:
        """Returns the URL of a database through the proxy."""
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query)) | {"host": str(self.folder)}
        return parts._replace(query=urlencode(query)).geturl()

    def cut(self) -> None:
        """Ends all connections."""
        for pair in list(self._pairs):
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _run(self, work: Callable[..., object], *given: object) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            with suppress(OSError):
                far.connect(self._target)
            self._pairs.append((near, far))
            self._run(self._pass, near, far)
            self._run(self._answer, far, near)

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while content := near.recv(65536):
                self._wait()
                far.sendall(content)
        self._end(near, far)

    def _answer(self, far: socket.socket, near: socket.socket) -> None:
        """Passes answers on, message by message."""
        with suppress(OSError), far.makefile("rb") as answers:
            while len(head := answers.read(5)) == 5:
                body = answers.read(int.from_bytes(head[1:], "big") - 4)
                self._wait()
                if not (self.deaf and head[:1] == b"A"):
                    near.sendall(head + body)
        self._end(near, far)

    def _wait(self) -> None:
        while self.stalls and not self._closed.wait(0.01):
            pass

    @staticmethod
    def _end(near: socket.socket, far: socket.socket) -> None:
        for end in (near, far):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
