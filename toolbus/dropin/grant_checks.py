"""Checks grants against the machine: which are not available or have no effect, and which limit ended a process.

The manifest itself is valid then. These facts may change without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from toolbus.dropin.file_grants import FILE, FileGrants
from toolbus.dropin.file_loader import is_script
from toolbus.dropin.manifest import Manifest
from toolbus.dropin.sandbox.sandbox_grants import CPU_SECONDS, MEMORY_BYTES
from toolbus.tool import MIB


def unavailable(grants: FileGrants) -> str:
    """Returns why a granted path cannot be written now; empty if all can be."""
    for path in grants.write:
        if path.exists():
            if not os.access(path, os.W_OK):
                return f"this user may not write {str(path)!r}: change its permissions"
        elif not path.parent.is_dir():
            return f"{str(path)!r} cannot be created: the folder {str(path.parent)!r} does not exist: create it"
        elif not os.access(path.parent, os.W_OK):
            return (
                f"{str(path)!r} cannot be created: this user may not write {str(path.parent)!r}: change its permissions"
            )
    return ""


def grant_warnings(files: Sequence[str], manifest: Manifest, environment: Mapping[str, str]) -> list[str]:
    """Returns warnings about grants without effect: for missing files, or of secrets and paths that do not exist."""
    warnings = []
    for file, grants in manifest.files.items():
        if file not in files:
            warnings.append(f'{file} has an entry in {FILE} under "files", but is not in the folder: check the name')
            continue
        unused = [key for key in ("write", "read", "connect", "secrets") if is_script(file) and getattr(grants, key)]
        if unused:
            warnings.append(
                f"{file} is granted {', '.join(unused)}, which JavaScript cannot use: only memory_mb and cpu_seconds "
                "have an effect. Write the tool in Python if it needs them"
            )
        warnings += [
            f"{file} is granted the secret {name}, which is not set: set it for the bus or for `toolbus run`"
            for name in grants.secrets
            if name not in environment
        ]
        warnings += [
            f"{file} is granted to read {str(path)!r}, which does not exist: create it, and save the file again"
            for path in grants.read
            if not _exists(path)
        ]
    return warnings


def temporary_folder(grants: FileGrants) -> dict[str, str]:
    """Returns the variable that makes `tempfile` use the first folder that may be written."""
    folder = next((path for path in grants.write if path.is_dir()), None)
    return {} if folder is None else {"TMPDIR": str(folder)}


def limit_hit(grants: FileGrants, exit_text: str) -> str:
    """Returns which limit ended a process, as far as its exit shows; empty if none did."""
    if "SIGXCPU" in exit_text:
        seconds = CPU_SECONDS if grants.cpu_seconds is None else grants.cpu_seconds
        return (
            f"was ended by its limit cpu_seconds = {seconds}: a call, or a minute without one, took more processor "
            "time. Make its tools do less at once, or grant more in _manifest.json"
        )
    if "SIGABRT" in exit_text or "SIGSEGV" in exit_text:
        memory = MEMORY_BYTES // MIB if grants.memory_mb is None else grants.memory_mb
        return f"may have hit its limit memory_mb = {memory}: make its tools hold less at once, or grant more"
    return ""


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder on the way cannot be read
        return False
