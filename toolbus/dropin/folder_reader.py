"""Reads a folder of tool files: which tools each source has to offer, and the faults of the folder or its manifest.

It starts nothing and waits for nothing. Grants that are not available now, of a path in a folder that does not exist
for example, are left out; `FolderReader.unavailable_grants` says when it is worth reading again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from toolbus.dropin.file_grants import NO_GRANTS, FileGrants, own_source
from toolbus.dropin.file_loader import is_script, is_shared, not_loaded, tool_files
from toolbus.dropin.grant_checks import grant_warnings, unavailable
from toolbus.dropin.group import Group, groups
from toolbus.dropin.javascript import EXTRA
from toolbus.dropin.manifest import Manifest, load_manifest
from toolbus.dropin.source_state import SourcePlan
from toolbus.errors import SetupError
from toolbus.tool import MIB, is_source

_USES_SPINDLE = re.compile(rb"\bspindle\s*(?:\?\.|[.\[])")  # an extension, which has a scope of its own

MAX_CODE_BYTES = 4 * MIB  # of a file that are read for its fingerprint, in the process of the bus


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """The plan of a whole folder.

    Attributes:
        sources: by name; None if the folder cannot be read now, so that what runs stays as it is.
        faults: what is wrong, one sentence each.
    """

    sources: dict[str, SourcePlan] | None
    faults: list[str]


class FolderReader:
    """Reads one folder, each time that it may have changed.

    Args:
        environment: where granted secrets come from.
        require_manifest: a folder without a manifest loads nothing.
        only: the files that are read, with the helpers in their languages; None means all.
        max_code_bytes: how much of a file is read to notice a change.
        missing_engine: returns why JavaScript cannot run, empty if it can; None asks which packages are installed.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        *,
        require_manifest: bool = False,
        only: Collection[str] | None = None,
        max_code_bytes: int = MAX_CODE_BYTES,
        missing_engine: Callable[[], str] | None = None,
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._require_manifest = require_manifest
        self._only = only
        self._max_code_bytes = max_code_bytes
        self._missing_engine = missing_engine or _missing_engine
        self._waiting: tuple[FileGrants, ...] = ()  # grants that were not available at the last reading
        self._was_missing = False  # the folder did not exist at the last reading

    def unavailable_grants(self) -> list[str]:
        """Returns why grants of the last reading are still not available; another value is a reason to read again."""
        return [unavailable(grants) for grants in self._waiting]

    def read(self, current: Mapping[str, FileGrants]) -> FolderPlan:
        """Reads the folder and its manifest.

        A folder that is missing once may be about to be replaced; missing twice in a row it has no tools.

        Args:
            current: what each file is granted now.
        """
        was_missing, self._was_missing = self._was_missing, False
        try:
            files = tool_files(self._folder)
            manifest = load_manifest(self._folder, require=self._require_manifest)
        except FileNotFoundError as error:
            self._was_missing = True
            if was_missing and current:
                return FolderPlan({}, [f"{error}: its tools are withdrawn"])
            return FolderPlan(None, [str(error)])
        except (SetupError, OSError) as error:
            return FolderPlan(None, [str(error)])
        if self._only is not None:
            files = [file for file in files if self._is_selected(file, self._only)]
            manifest = manifest.of(files)
        faults = [f"{problem.file} {problem.reason}" for problem in not_loaded(files, manifest)]
        faults += grant_warnings(files, manifest, self._environment)
        files, manifest = self._available(files, manifest, current, faults)
        files, extensions = self._scripts(files, manifest, faults)
        plans = {
            group.source: SourcePlan(group, self._fingerprint(group)) for group in groups(files, manifest, extensions)
        }
        return FolderPlan(plans, faults)

    @staticmethod
    def _is_selected(file: str, only: Collection[str]) -> bool:
        alike = [each for each in only if is_script(each) == is_script(file) and "/" not in each]
        return file in only or (is_shared(file) and bool(alike))

    def _scripts(self, files: list[str], manifest: Manifest, faults: list[str]) -> tuple[list[str], list[str]]:
        """Returns the files that can be loaded, and which are extensions; adds a fault for each script that cannot."""
        scripts = [file for file in files if is_script(file) and manifest.allows(file)]
        reasons = dict.fromkeys(scripts, self._missing_engine() if scripts else "")
        extensions = [file for file in scripts if not is_shared(file) and self._is_extension(file)]
        owners: dict[str, str] = {}  # the file of each source
        for file in (each for each in files if each in extensions or manifest.grants(each) != NO_GRANTS):
            owner = owners.setdefault(source := own_source(file), file)
            if not is_source(source):
                reasons[file] = "its name cannot be that of a source: use letters, digits, '_', '-' and '.'"
            elif owner != file:
                reasons[file] = f"its source would be {source}, as that of {owner}: rename one of them"
        faults += [f"{file} is not loaded: {reason}" for file, reason in reasons.items() if reason]
        return [file for file in files if not reasons.get(file)], extensions

    def _is_extension(self, file: str) -> bool:
        if "/" in file:
            return True
        try:
            return _USES_SPINDLE.search(read_code(self._folder / file, self._max_code_bytes)) is not None
        except OSError:
            return False

    def _available(
        self, files: list[str], manifest: Manifest, current: Mapping[str, FileGrants], faults: list[str]
    ) -> tuple[list[str], Manifest]:
        """Returns files and manifest without grants that are not available now, and adds a fault for each.

        A file keeps its current grants, unless the manifest has taken one of them away.
        """
        reasons = {
            file: reason for file in files if manifest.allows(file) and (reason := unavailable(manifest.grants(file)))
        }
        self._waiting = tuple(manifest.grants(file) for file in reasons)
        unchanged = {
            file: current[file] for file in reasons if file in current and manifest.grants(file).covers(current[file])
        }
        for file, reason in reasons.items():
            meanwhile = "it runs with its previous grants" if file in unchanged else "it is not loaded"
            faults.append(f'{file} has a "write" grant that is not available: {reason}. Until then {meanwhile}')
        loaded = [file for file in files if file not in reasons or file in unchanged]
        return loaded, replace(manifest, files={**manifest.files, **unchanged})

    def _fingerprint(self, group: Group) -> str:
        digest = hashlib.sha256(repr(group).encode(errors="surrogateescape"))
        for name in group.order:
            try:
                code = read_code(self._folder / name, self._max_code_bytes)
            except OSError as error:
                code = str(error.errno).encode()
            digest.update(hashlib.sha256(code).digest())
        return digest.hexdigest()


def _missing_engine() -> str:
    """Returns why JavaScript cannot run; empty if it can."""
    if importlib.util.find_spec("quickjs") is not None:
        return ""
    return f"JavaScript needs QuickJS, which is not installed: {EXTRA}"


def read_code(path: Path, limit: int = MAX_CODE_BYTES) -> bytes:
    """Returns what differs when a file has changed: its content, or its first ``limit`` bytes, size and time."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        content, status = file.read(limit), os.fstat(file.fileno())
    return content if len(content) < limit else content + repr((status.st_size, status.st_mtime_ns)).encode()
