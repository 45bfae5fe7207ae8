"""Provides `self.config`: the values of a plugin's plugin.toml, and those that the plugin has set itself."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from toolbus.common.whole_file import replace_file
from toolbus.parts.moving.neko.absences import RAISING
from toolbus.parts.moving.neko.sdk_errors import NotProvided, SdkError, TransportError, ValidationError
from toolbus.parts.moving.neko.sdk_results import Err, Ok

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
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, written)
        except OSError as problem:
            raise TransportError(f"{self.path} cannot be written: {problem}; make its folder writable") from problem


V = TypeVar("V")
P = ParamSpec("P")


class PluginConfig:
    """Configuration by paths such as ``weather.city``.

    Values come from plugin.toml. Those that `set` and `update` store, in a JSON file of the plugin's data, win over
    them. `timeout` has no effect.

    Args:
        values: of plugin.toml.
        path: the file for the values that the plugin sets.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._base = dict(values)
        self._changes = JsonFile(path)

    def __repr__(self) -> str:
        return f"<PluginConfig {', '.join(self._base)}; changes in {self._changes.path}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("profile_"):
            raise NotProvided(f"self.config.{name}", RAISING["get_own_profiles_state"])
        raise AttributeError(f"PluginConfig has no attribute {name!r}")

    def replace_base(self, values: Mapping[str, Any]) -> None:
        """Takes the values of a plugin.toml that has changed; those that the plugin has set still win."""
        self._base = dict(values)

    async def dump(self, *, timeout: float = 5.0) -> dict[str, Any]:
        """Returns everything as one dict."""
        return await asyncio.to_thread(self._merged)

    async def get(self, path: str, default: Any = None, *, timeout: float = 5.0) -> Any:
        """Returns the value at a path, or the default."""
        try:
            return _at(await self.dump(), path)
        except ValidationError:
            return default

    async def require(self, path: str, *, timeout: float = 5.0) -> Any:
        """Returns the value at a path.

        Raises:
            ValidationError: the path has no value.
        """
        return _at(await self.dump(), path)

    async def get_bool(self, path: str, default: bool | None = None, *, timeout: float = 5.0) -> bool | None:
        """Returns the truth value at a path; raises ValidationError for another value."""
        return _typed(await self.get(path, default), path, bool)

    async def get_int(self, path: str, default: int | None = None, *, timeout: float = 5.0) -> int | None:
        """Returns the whole number at a path; raises ValidationError for another value."""
        return _typed(await self.get(path, default), path, int)

    async def get_str(self, path: str, default: str | None = None, *, timeout: float = 5.0) -> str | None:
        """Returns the text at a path; raises ValidationError for another value."""
        return _typed(await self.get(path, default), path, str)

    async def base_dump(self, *, timeout: float = 5.0) -> dict[str, Any]:
        """Returns the values of plugin.toml."""
        return copy.deepcopy(self._base)

    async def base_get(self, path: str, default: Any = None, *, timeout: float = 5.0) -> Any:
        """Returns the value of plugin.toml at a path, or the default."""
        try:
            return _at(self._base, path)
        except ValidationError:
            return default

    async def set(self, path: str, value: Any, *, timeout: float = 5.0) -> None:
        """Stores a value at a path, for later runs too.

        Raises:
            ValidationError: the path is empty.
            TransportError: the file cannot be written.
        """
        parts = path.split(".")
        if not all(parts):
            raise ValidationError(f"configuration path {path!r} has an empty part: write it as section.key")

        def put(changes: dict[str, Any]) -> None:
            inner = changes
            for part in parts[:-1]:
                if not isinstance(inner.get(part), dict):
                    inner[part] = {}
                inner = inner[part]
            inner[parts[-1]] = value

        await asyncio.to_thread(self._changes.change, put)

    async def update(self, patch: Mapping[str, Any], *, timeout: float = 5.0) -> dict[str, Any]:
        """Stores several values, inner dicts key by key, and returns everything.

        Raises:
            TransportError: the file cannot be written.
        """

        def put(changes: dict[str, Any]) -> None:
            merged = merge(changes, patch)
            changes.clear()
            changes.update(merged)

        await asyncio.to_thread(self._changes.change, put)
        return await self.dump()

    def _merged(self) -> dict[str, Any]:
        return copy.deepcopy(self._changes.read(lambda changes: merge(self._base, changes)))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Returns two mappings as one; the second wins, and dicts that both have are merged in the same way."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _at(values: Mapping[str, Any], path: str) -> Any:
    inner: Any = values
    for part in path.split(".") if path else ():
        if not isinstance(inner, Mapping) or part not in inner:
            raise ValidationError(f"configuration has no {path!r}: set it in plugin.toml")
        inner = inner[part]
    return copy.deepcopy(inner)


def _typed(value: Any, path: str, kind: type[V]) -> V | None:
    if value is None or (isinstance(value, kind) and isinstance(value, bool) is (kind is bool)):
        return value
    raise ValidationError(f"configuration {path!r} is {value!r:.80}, it must be of type {kind.__name__}")


class OlderStore:
    """Keys and JSON values in a file. Each method returns the value itself, or raises an error of `sdk_errors`.

    Args:
        path: the file.
    """

    enabled = True  # `[plugin.store] enabled` of a plugin.toml has no effect: the file is made on first use

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._file.path}>"

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or the default."""
        return self._file.read(lambda values: values.get(_checked(key), default))

    def set(self, key: str, value: Any) -> None:
        """Stores a value under a key."""
        self._file.change(lambda values: values.update({_checked(key): value}))

    def delete(self, key: str) -> bool:
        """Removes a key; returns whether it existed."""
        missing = object()
        return self._file.change(lambda values: values.pop(_checked(key), missing) is not missing)

    def exists(self, key: str) -> bool:
        """Tells whether a key is stored."""
        return key in self.dump()

    def keys(self, prefix: str = "") -> list[str]:
        """Returns the keys that begin with a prefix, sorted."""
        return sorted(key for key in self.dump() if key.startswith(prefix))

    def clear(self) -> int:
        """Removes everything; returns how many keys there were."""

        def empty(values: dict[str, Any]) -> int:
            count = len(values)
            values.clear()
            return count

        return self._file.change(empty)

    def count(self) -> int:
        """Returns how many keys are stored."""
        return self._file.read(len)

    def dump(self) -> dict[str, Any]:
        """Returns all keys with their values."""
        return self._file.read(dict)

    def close(self) -> None:
        """Does nothing: every change is in the file already."""


def _checked(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise ValidationError(f"store key {key!r:.80} must be a text that is not empty")
    return key


def _awaited(
    method: Callable[Concatenate[OlderStore, P], V],
) -> Callable[Concatenate[PluginStore, P], Coroutine[Any, Any, Ok[V] | Err[SdkError]]]:
    """Returns a method of `OlderStore` as one of `PluginStore`."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def run(store: PluginStore, /, *given: P.args, **named: P.kwargs) -> Ok[V] | Err[SdkError]:
        signature.bind(store.plain, *given, **named)  # a call with other arguments raises: it says nothing of a value
        try:
            return Ok(await asyncio.to_thread(method, store.plain, *given, **named))
        except SdkError as problem:
            return Err(problem)
        except (TypeError, ValueError, RecursionError) as problem:
            return Err(ValidationError(f"the value cannot be stored as JSON: {problem}"))

    return run


class PluginStore:
    """The methods of a store, awaited. Each returns `Ok` or `Err`, as in N.E.K.O., and raises nothing.

    Args:
        path: the file.

    Attributes:
        plain: the store whose methods return values and raise.
    """

    enabled = True

    def __init__(self, path: Path) -> None:
        self.plain = plain = OlderStore(path)
        # N.E.K.O.'s own plugins call these where they cannot await.
        self._read_value, self._write_value = plain.get, plain.set
        self._delete_value, self._read_all = plain.delete, plain.dump

    def __repr__(self) -> str:
        return f"<PluginStore of {self.plain!r}>"

    get, set, delete = _awaited(OlderStore.get), _awaited(OlderStore.set), _awaited(OlderStore.delete)
    keys, clear, count = _awaited(OlderStore.keys), _awaited(OlderStore.clear), _awaited(OlderStore.count)
    dump = _awaited(OlderStore.dump)

    async def exists(self, key: str) -> Ok[bool] | Err[SdkError]:
        """Tells whether a key is stored."""
        missing = object()
        found = await self.get(key, missing)
        return found if isinstance(found, Err) else Ok(found.value is not missing)

    async def close(self) -> Ok[None]:
        """Does nothing: every change is in the file already."""
        return Ok(None)
