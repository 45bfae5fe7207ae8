"""`_manifest.json`: which files of a folder are loaded, and what each of them may reach.

    {"allow": ["clock.py", "relay.py"],
     "files": {"relay.py": {"write": ["queue.db"], "connect": ["127.0.0.1:8000"], "secrets": ["API_KEY"]}}}

Without `allow` every file is loaded, without an entry under `files` a file may reach nothing. It fails closed: what
cannot be read, or holds a word that this version does not know, loads nothing. Nothing is enforced here: that is the
sandbox's part, which gets the grants as plain records.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
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
    file_name,
    list_of,
    object_of,
    read_grants,
    refused,
)
from toolbus.errors import SetupError

_FILE_MODE = 0o644  # of a file that is made


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder's manifest says; the empty one allows every file and grants nothing.

    Attributes:
        allow: the files that are loaded; None means all.
        files: what each file may reach.
    """

    allow: tuple[str, ...] | None = None
    files: Mapping[str, FileGrants] = field(default_factory=lambda: MappingProxyType({}))

    def allows(self, file: str) -> bool:
        """Tells whether a file may be loaded."""
        return self.allow is None or file in self.allow

    def grants(self, file: str) -> FileGrants:
        """Returns what a file may reach; `NO_GRANTS` where nothing was said."""
        return self.files.get(file, NO_GRANTS)


def load_manifest(folder: Path, *, require: bool = False) -> Manifest:
    """Reads the manifest of a folder; without one, everything is allowed and nothing granted.

    Args:
        require: a folder without a manifest is refused as well.

    Raises:
        SetupError: it is missing, cannot be read, or breaks a rule. Nothing of the folder may be loaded then.
    """
    try:
        if not stat.S_ISREG((folder / FILE).stat().st_mode):  # a pipe would be waited for without end
            raise SetupError(f"{folder / FILE} cannot be read: it is no plain file: write one like {EXAMPLE}")
        text = (folder / FILE).read_text("utf-8-sig")
    except FileNotFoundError:
        if require:
            raise _missing(folder) from None
        return Manifest()
    except (OSError, UnicodeDecodeError) as problem:
        raise _unreadable(folder, problem) from None
    return read_manifest(text, folder)


def read_manifest(text: str, folder: Path) -> Manifest:
    """Reads the text of a manifest. Paths become absolute and are followed through symbolic links.

    Raises:
        SetupError: naming the value, the rule that it breaks and the cure.
    """
    said = object_of(_parsed(text), "the manifest", ("allow", "files"))
    allow = None
    if "allow" in said:  # null is no list either: it would allow everything
        allow = tuple(file_name(each, "allow") for each in list_of(said["allow"], "allow"))
    entries = said.get("files", {})
    if not isinstance(entries, dict):
        raise refused("files", entries, "must be an object of file names", f"write it like {EXAMPLE}")
    return Manifest(allow, MappingProxyType({file: read_grants(file, each, folder) for file, each in entries.items()}))


def append(folder: Path, file: str) -> bool:
    """Puts a file on the allow list, in one step that a reader sees whole; returns whether it was missing there.

    A manifest without a list allows every file already, and stays as it is.

    Raises:
        SetupError: there is no manifest, it is broken, the name is none, or the folder cannot be written.
    """
    file_name(file, "allow")
    try:
        with _locked(folder):
            manifest = load_manifest(folder, require=True)
            if manifest.allows(file):
                return False
            said = _parsed((folder / FILE).read_text("utf-8-sig"))
            said["allow"].append(file)
            write_whole(folder / FILE, _text(said))
    except FileNotFoundError:
        raise _missing(folder) from None
    except OSError as problem:
        raise _unwritable(folder, problem) from None
    return True


def grant(folder: Path, file: str, entry: Mapping[str, Any], beside: Sequence[str] = ()) -> bool:
    """Allows a file, where there is an allow list, and grants it what an entry says; in one step, as `append`.

    What was granted before stays: lists grow, numbers stay as they are. Without a manifest one is made, if there is
    something to grant.

    Args:
        beside: further files to be allowed, which it imports.

    Returns:
        Whether that changed anything.

    Raises:
        SetupError: the manifest is broken or would be, or the folder cannot be written.
    """
    try:
        with _locked(folder):
            said = {}
            if (folder / FILE).exists():
                load_manifest(folder)
                said = _parsed((folder / FILE).read_text("utf-8-sig"))
            after = _granted(said, file, entry, beside)
            if after == said:
                return False
            read_manifest(_text(after).decode(), folder)
            write_whole(folder / FILE, _text(after))
    except OSError as problem:
        raise _unwritable(folder, problem) from None
    return True


def _granted(said: dict[str, Any], file: str, entry: Mapping[str, Any], beside: Sequence[str]) -> dict[str, Any]:
    after = dict(said)
    if (allow := said.get("allow")) is not None:
        after["allow"] = [*allow, *(each for each in (*beside, file) if each not in allow)]
    if entry:
        own = dict(said.get("files", {}).get(file, {}))
        for key, value in entry.items():
            if isinstance(value, list):
                before = own.get(key, [])
                own[key] = [*before, *(each for each in value if each not in before)]
            else:
                own.setdefault(key, value)
        after["files"] = {**said.get("files", {}), file: own}
    return after


def _text(said: dict[str, Any]) -> bytes:
    return (json.dumps(said, ensure_ascii=False, indent=2) + "\n").encode()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps others from appending; the folder itself is the lock, so that nothing is left in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that a reader sees as it was or as it is, never half of it."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, name)
        else:
            os.chmod(name, _FILE_MODE)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _unwritable(folder: Path, problem: OSError) -> SetupError:
    return SetupError(f"{folder / FILE} cannot be written: {problem.strerror}: let this user write it")


def _missing(folder: Path) -> SetupError:
    return SetupError(f"{folder} has no {FILE}, so nothing of it may be loaded: write one like {EXAMPLE}")


def _unreadable(folder: Path, problem: OSError | UnicodeDecodeError) -> SetupError:
    if isinstance(problem, OSError):
        return SetupError(f"{folder / FILE} cannot be read: {problem.strerror}: let this user read it")
    return SetupError(f"{folder / FILE} is no UTF-8 text: save it as UTF-8")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise SetupError(f"{FILE} is nested too deep: write it like {EXAMPLE}") from None
    except ValueError as problem:
        raise SetupError(f"{FILE} is no JSON: {problem}: write it like {EXAMPLE}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise refused("keys", repeated, "is there twice, and only one of them would count", "join the two")
    return found
