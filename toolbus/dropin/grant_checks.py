"""What grants come to: which cannot be had or have no effect, found before a process starts, and which ended one.

The manifest itself is in order then. These are facts of the machine, which may change without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolbus.dropin.file_grants import FILE, FileGrants
from toolbus.dropin.manifest import Manifest
from toolbus.dropin.sandbox.sandbox_grants import CPU_SECONDS, MEMORY_BYTES
from toolbus.tool import MIB


def unavailable(grants: FileGrants) -> str:
    """Says which path cannot be written for now, and why; empty where all can be."""
    for path in grants.write:
        if path.exists():
            if not os.access(path, os.W_OK):
                return f"{str(path)!r} cannot be written: let this user write it"
        elif not path.parent.is_dir():
            return f"{str(path)!r} cannot be had: there is no folder {str(path.parent)!r}: make it"
        elif not os.access(path.parent, os.W_OK):
            return f"{str(path)!r} cannot be made: let this user write {str(path.parent)!r}"
    return ""


def grant_warnings(files: Sequence[str], manifest: Manifest, environment: Mapping[str, str]) -> list[str]:
    """Says what a manifest grants to no effect: to files that are not there, of what is not there."""
    said = []
    for file, grants in manifest.files.items():
        if file not in files:
            said.append(f'{file} has an entry in {FILE} under "files", but is not in the folder: check the name')
            continue
        said += [
            f"{file} is granted the secret {name}, which is not set: set it where the folder is run from"
            for name in grants.secrets
            if name not in environment
        ]
        said += [
            f"{file} is granted to read {str(path)!r}, which does not exist: make it, and save the file again"
            for path in grants.read
            if not _exists(path)
        ]
    return said


def temporary_folder(grants: FileGrants) -> dict[str, str]:
    """Returns where `tempfile` puts what it makes: in the first folder that may be written."""
    folder = next((path for path in grants.write if path.is_dir()), None)
    return {} if folder is None else {"TMPDIR": str(folder)}


def limit_hit(grants: FileGrants, ending: str) -> str:
    """Says which limit ended a process, as far as its end tells; empty where it was none."""
    if "SIGXCPU" in ending:
        seconds = CPU_SECONDS if grants.cpu_seconds is None else grants.cpu_seconds
        return (
            f"was ended by its limit cpu_seconds = {seconds}: a call, or a minute without one, took more processor "
            "time. Have its tools do less at once, or grant more in _manifest.json"
        )
    if "SIGABRT" in ending or "SIGSEGV" in ending:
        memory = MEMORY_BYTES // MIB if grants.memory_mb is None else grants.memory_mb
        return f"may have hit its limit memory_mb = {memory}: have its tools hold less at once, or grant more"
    return ""


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder on the way may not be looked into
        return False
