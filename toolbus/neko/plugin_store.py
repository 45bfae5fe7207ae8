"""Provides `self.store`: keys and values of a plugin that persist between its runs, in one small JSON file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from toolbus.neko.json_file import JsonFile
from toolbus.neko.sdk_errors import SdkError, ValidationError
from toolbus.neko.sdk_results import Err, Ok

V = TypeVar("V")


class PluginStore:
    """Keys and JSON values in a file. Each method returns `Ok` or `Err`, as in N.E.K.O., and raises nothing.

    Args:
        path: the file.
    """

    enabled = True  # `[plugin.store] enabled` of a plugin.toml has no effect: the file is made on first use

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path)

    def __repr__(self) -> str:
        return f"<PluginStore {self._file.path}>"

    async def get(self, key: str, default: Any = None) -> Ok[Any] | Err[SdkError]:
        """Returns the value of a key, or the default."""
        return await _result(lambda: self._read_value(key, default))

    async def set(self, key: str, value: Any) -> Ok[None] | Err[SdkError]:
        """Stores a value under a key."""
        return await _result(lambda: self._write_value(key, value))

    async def delete(self, key: str) -> Ok[bool] | Err[SdkError]:
        """Removes a key; the value tells whether it existed."""
        return await _result(lambda: self._delete_value(key))

    async def exists(self, key: str) -> Ok[bool] | Err[SdkError]:
        """Tells whether a key is stored."""
        return await _result(lambda: self._file.read(lambda values: _checked(key) in values))

    async def keys(self, prefix: str = "") -> Ok[list[str]] | Err[SdkError]:
        """Returns the keys that begin with a prefix, sorted."""
        return await _result(
            lambda: self._file.read(lambda values: sorted(key for key in values if key.startswith(prefix)))
        )

    async def clear(self) -> Ok[int] | Err[SdkError]:
        """Removes everything; the value is how many keys there were."""

        def empty(values: dict[str, Any]) -> int:
            count = len(values)
            values.clear()
            return count

        return await _result(lambda: self._file.change(empty))

    async def count(self) -> Ok[int] | Err[SdkError]:
        """Returns how many keys are stored."""
        return await _result(lambda: self._file.read(len))

    async def dump(self) -> Ok[dict[str, Any]] | Err[SdkError]:
        """Returns all keys with their values."""
        return await _result(self._read_all)

    async def close(self) -> Ok[None]:
        """Does nothing: every change is in the file already."""
        return Ok(None)

    # N.E.K.O.'s own plugins call these where they cannot await; they raise the errors that the methods above return.
    def _read_value(self, key: str, default: Any = None) -> Any:
        return self._file.read(lambda values: values.get(_checked(key), default))

    def _write_value(self, key: str, value: Any) -> None:
        self._file.change(lambda values: values.update({_checked(key): value}))

    def _delete_value(self, key: str) -> bool:
        missing = object()
        return self._file.change(lambda values: values.pop(_checked(key), missing) is not missing)

    def _read_all(self) -> dict[str, Any]:
        return self._file.read(dict)


def _checked(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise ValidationError(f"store key {key!r:.80} must be a text that is not empty")
    return key


async def _result(work: Callable[[], V]) -> Ok[V] | Err[SdkError]:
    try:
        return Ok(await asyncio.to_thread(work))
    except SdkError as problem:
        return Err(problem)
    except (TypeError, ValueError, RecursionError) as problem:
        return Err(ValidationError(f"the value cannot be stored as JSON: {problem}"))
