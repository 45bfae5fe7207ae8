"""Groups the files of a folder by process: files without grants share one, each file with grants has its own.

A process has the grants of one file, or none; so no file can use what was granted to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolbus.dropin.file_grants import NO_GRANTS, SOURCE, FileGrants
from toolbus.dropin.file_loader import is_shared
from toolbus.dropin.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one process.

    Attributes:
        source: of their tools, on the bus.
        files: those whose tools are offered, in order.
        helpers: the `_*.py` files, which each group loads first, to import.
        grants: what the process may reach.
    """

    source: str
    files: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    grants: FileGrants = NO_GRANTS

    @property
    def order(self) -> tuple[str, ...]:
        """The files that are loaded, in order."""
        return (*self.helpers, *(file for file in self.files if file not in self.helpers))


def groups(files: Sequence[str], manifest: Manifest) -> list[Group]:
    """Returns the groups of the files that are allowed, in the order of their first files.

    Helpers belong to every group. A tool that one of them offers itself is offered once, by the shared group; that
    group therefore exists as soon as there is a helper.
    """
    allowed = [file for file in files if manifest.allows(file)]
    helpers = tuple(file for file in allowed if is_shared(file))
    plain = tuple(file for file in allowed if manifest.grants(file) == NO_GRANTS)
    result = []
    for file in allowed:
        if file in plain:
            if file == plain[0]:
                result.append(Group(SOURCE, plain, helpers))
        else:
            source = f"{SOURCE}:{file.removesuffix('.py')}"
            result.append(Group(source, (file,), helpers, manifest.grants(file)))
    return result
