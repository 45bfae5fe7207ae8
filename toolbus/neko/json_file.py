"""Stores a small mapping in a JSON file; each change replaces the whole file atomically."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from toolbus.neko.sdk_errors import TransportError

R = TypeVar("R")

MAX_BYTES = 16 * 1024 * 1024  # each change writes the whole file: more data belongs in a database


class JsonFile:
    """A mapping in a file; safe from any thread of one process.

    Args:
        path: the file; its folder is made when it is first written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._values: dict[str, Any] | None = None  # the content of the file; None before it is first read

    def __repr__(self) -> str:
        return f"<JsonFile {self.path}>"

    def read(self, use: Callable[[dict[str, Any]], R]) -> R:
        """Returns the result of a function of the values, which must not change them.

        Raises:
            TransportError: the file cannot be read.
        """
        with self._lock:
            return use(self._load())

    def change(self, change: Callable[[dict[str, Any]], R]) -> R:
        """Lets a function change the values, writes the file and returns the function's result.

        Raises:
            TransportError: the file cannot be read or written; nothing has changed.
            TypeError, ValueError: JSON cannot hold a value; nothing has changed.
        """
        with self._lock:
            values = json.loads(json.dumps(self._load()))
            returned = change(values)
            text = json.dumps(values, ensure_ascii=False, indent=1, allow_nan=False)
            self._write(text)
            self._values = json.loads(text)
            return returned

    def _load(self) -> dict[str, Any]:
        if self._values is None:
            try:
                loaded = json.loads(self.path.read_bytes().decode("utf-8", "surrogatepass"))
            except FileNotFoundError:
                loaded = {}
            except (OSError, ValueError) as problem:
                raise TransportError(f"{self.path} cannot be read: {problem}; correct it, or move it away") from problem
            if not isinstance(loaded, dict):
                raise TransportError(f"{self.path} does not hold a JSON object: correct it, or move it away")
            self._values = loaded
        return self._values

    def _write(self, text: str) -> None:
        written = text.encode("utf-8", "surrogatepass")
        if len(written) > MAX_BYTES:
            raise TransportError(
                f"{self.path} would get {len(written)} bytes, its limit is {MAX_BYTES}: use sqlite3 for this much"
            )
        name = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            with os.fdopen(handle, "wb") as opened:
                opened.write(written)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(name, self.path)
        except OSError as problem:
            if name:
                with suppress(OSError):
                    os.unlink(name)
            raise TransportError(f"{self.path} cannot be written: {problem}; make its folder writable") from problem
