from __future__ import annotations

import dataclasses
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.support.processes import environment
from toolbus.bus.storage.registration_store import RegistrationStore, StoredRegistration
from toolbus.bus.storage.store import FILE, Store
from toolbus.errors import SetupError
from toolbus.protocol.tool import Tool

PASSWORD = "hunter2-äß"


URL = f"http://user:{PASSWORD}@127.0.0.1:9000/call"


def stored(number: int = 0, **changes: object) -> StoredRegistration:
    plain = StoredRegistration(
        key=f"key-{number}",
        source="external",
        tool=Tool(name=f"tool{number}", description="x" * 40, callback_url=f"http://127.0.0.1:9000/{number}"),
        callback_url=f"http://127.0.0.1:9000/{number}",
        checked=False,
        offers=((None, number), ("default", number)),
        answered_at=1_700_000_000.0 + number,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@contextmanager
def opened(directory: Path) -> Iterator[RegistrationStore]:
    with closing(Store.of(directory)) as store:
        store.open()
        yield RegistrationStore(store)


def loaded(directory: Path) -> list[StoredRegistration]:
    with opened(directory) as store:
        return store.load()


def fill(directory: Path, count: int = 3) -> list[StoredRegistration]:
    rows = [stored(number) for number in range(count)]
    with opened(directory) as store:
        store.apply(rows, ())
    return rows


def refusal(directory: Path) -> str:
    """The sentence of a refused start; nothing of the file may have changed."""
    path = directory / FILE
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(SetupError) as caught:
        loaded(directory)
    assert (path.read_bytes() if path.is_file() else None) == before
    text = str(caught.value)
    assert str(directory) in text
    assert "--data-dir" in text
    assert PASSWORD not in text
    return text


def edit(directory: Path, *statements: str) -> None:
    """Does to the file what no toolbus does."""
    edit_file(directory / FILE, *statements)


def edit_file(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def earlier_file(application_id: int) -> bytes:
    """Returns a file of an earlier release whose tables are damaged."""
    header = bytearray(b"SQLite format 3\0\x10\0\x01\x01\0@  " + bytes(76))
    header[68:72] = application_id.to_bytes(4, "big")
    return bytes(header) + b"\xff" * 8092


@contextmanager
def python(script: str, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment({}),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def cut(to: Callable[[int], int]) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        fill(directory, 100)
        os.truncate(directory / FILE, to((directory / FILE).stat().st_size))

    return make
