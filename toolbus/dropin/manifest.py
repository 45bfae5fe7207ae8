"""Reads and changes `_manifest.json`: which files of a folder are loaded, and what each of them may reach.

    {"allow": ["clock.py", "relay.py"],
     "files": {"relay.py": {"write": ["queue.db"], "connect": ["127.0.0.1:8000"], "secrets": ["API_KEY"]}}}

Without `allow` every file is loaded; without an entry under `files` a file may reach nothing. It fails closed: if the
manifest cannot be read or holds an unknown key, nothing is loaded. Nothing is enforced here; the sandbox does that, and
gets the grants as plain values.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from toolbus.dropin.file_grants import (
    EXAMPLE,
    FILE,
    NO_GRANTS,
    FileGrants,
    read_file_name,
    read_grants,
    refuse_null,
)
from toolbus.errors import SetupError
from toolbus.reader import Keys, Reader
from toolbus.text import quote

_FILE_MODE = 0o644  # of a new file


@dataclass(frozen=True, slots=True)
class Manifest:
    """A folder's manifest; the empty one allows every file and grants nothing.

    Attributes:
        allow: the files that are loaded; None means all.
        files: what each file may reach.
    """

    allow: tuple[str, ...] | None = None
    files: Mapping[str, FileGrants] = field(default_factory=lambda: MappingProxyType({}))

    def allows(self, file: str) -> bool:
        """Tells whether a file may be loaded."""
        return self.allow is None or file in self.allow

    def of(self, files: Sequence[str]) -> Manifest:
        """Returns what it says about these files only."""
        allow = None if self.allow is None else tuple(file for file in self.allow if file in files)
        return Manifest(allow, {file: grants for file, grants in self.files.items() if file in files})

    def grants(self, file: str) -> FileGrants:
        """Returns what a file may reach; `NO_GRANTS` if it has no entry."""
        return self.files.get(file, NO_GRANTS)


def load_manifest(folder: Path, *, require: bool = False) -> Manifest:
    """Reads the manifest of a folder; without one, everything is allowed and nothing granted.

    Args:
        require: a folder without a manifest is refused as well.

    Raises:
        SetupError: it is missing, cannot be read, or breaks a rule. Nothing of the folder may be loaded then.
    """
    try:
        if not stat.S_ISREG((folder / FILE).stat().st_mode):  # reading a pipe would block
            raise SetupError(f"{folder / FILE} is not a regular file: replace it by a file like {EXAMPLE}")
        text = (folder / FILE).read_text("utf-8-sig")
    except FileNotFoundError:
        if require:
            raise _missing(folder) from None
        return Manifest()
    except OSError as error:
        raise SetupError(f"{folder / FILE} cannot be read: {error.strerror}: let this user read it") from None
    except UnicodeDecodeError:
        raise SetupError(f"{folder / FILE} is not UTF-8 text: save it as UTF-8") from None
    return read_manifest(text, folder)


def read_manifest(text: str, folder: Path) -> Manifest:
    """Reads the text of a manifest. Paths become absolute, with symbolic links followed.

    Raises:
        SetupError: naming the value, the rule that it breaks and how to fix it.
    """
    reader = Reader(_parse(text), FILE)
    refuse_null(reader, ("allow", "files"))
    keys: Keys = {
        "allow": ("allow", lambda each: tuple(read_file_name(item) for item in each.items())),
        "files": ("files", lambda each: _read_files(each, folder)),
    }
    return Manifest(**reader.record(keys))


def _read_files(reader: Reader, folder: Path) -> Mapping[str, FileGrants]:
    return MappingProxyType({file: read_grants(file, entry, folder) for file, entry in reader.entries().items()})


def append(folder: Path, file: str) -> bool:
    """Adds a file to the allow list, atomically; returns whether it was missing there.

    A manifest without an allow list allows every file already, and stays as it is.

    Raises:
        SetupError: the manifest is missing or broken, the name is not a file name, or the folder cannot be written.
    """
    read_file_name(Reader(file, FILE, "allow"))
    try:
        with _locked(folder):
            manifest = load_manifest(folder, require=True)
            if manifest.allows(file):
                return False
            content = _parse((folder / FILE).read_text("utf-8-sig"))
            content["allow"].append(file)
            replace_file(folder / FILE, _as_text(content))
    except FileNotFoundError:
        raise _missing(folder) from None
    except OSError as error:
        raise _not_writable(folder, error) from None
    return True


def grant(folder: Path, file: str, entry: Mapping[str, Any], helpers: Sequence[str] = ()) -> bool:
    """Adds a file to the allow list, if there is one, and an entry to its grants; atomically.

    What was granted before stays: lists grow, numbers stay as they are. Without a manifest one is created, if there is
    something to grant.

    Args:
        helpers: further files to be allowed, which it imports.

    Returns:
        Whether that changed anything.

    Raises:
        SetupError: the manifest is broken or would be, or the folder cannot be written.
    """
    try:
        with _locked(folder):
            content = {}
            if (folder / FILE).exists():
                load_manifest(folder)
                content = _parse((folder / FILE).read_text("utf-8-sig"))
            after = _with_grants(content, file, entry, helpers)
            if after == content:
                return False
            read_manifest(_as_text(after).decode(), folder)
            replace_file(folder / FILE, _as_text(after))
    except OSError as error:
        raise _not_writable(folder, error) from None
    return True


def _with_grants(
    content: dict[str, Any], file: str, entry: Mapping[str, Any], helpers: Sequence[str]
) -> dict[str, Any]:
    """Returns a manifest's content with a file allowed and an entry added to its grants."""
    after = dict(content)
    if (allow := content.get("allow")) is not None:
        after["allow"] = [*allow, *(each for each in (*helpers, file) if each not in allow)]
    if entry:
        own = dict(content.get("files", {}).get(file, {}))
        for key, value in entry.items():
            if isinstance(value, list):
                before = own.get(key, [])
                own[key] = [*before, *(each for each in value if each not in before)]
            else:
                own.setdefault(key, value)
        after["files"] = {**content.get("files", {}), file: own}
    return after


def _as_text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the manifest against other writers; the folder itself is the lock, so that no lock file is left."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file atomically: a reader sees the old content or the new one, never a part."""
    import tempfile  # here, since processes of tools read manifests and write none

    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, stat.S_IMODE(path.stat().st_mode) if path.exists() else _FILE_MODE)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _not_writable(folder: Path, error: OSError) -> SetupError:
    return SetupError(f"{folder / FILE} cannot be written: {error.strerror}: let this user write it")


def _missing(folder: Path) -> SetupError:
    return SetupError(f"{folder} has no {FILE}, so no file of it may be loaded: create one like {EXAMPLE}")


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicates)
    except RecursionError:
        raise SetupError(f"{FILE} is nested too deeply: write it like {EXAMPLE}") from None
    except ValueError as error:
        raise SetupError(f"{FILE} is not JSON: {error}: write it like {EXAMPLE}") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise SetupError(f"{FILE} has the key {quote(duplicate)} twice, and only one would count: merge the two")
    return content
