"""Groups the files of a folder by process: files without grants share one, each file with grants has its own.

A process has the grants of one file, or none; so no file can use what was granted to another. A process runs either
Python or JavaScript, and an extension in JavaScript is alone, since it has a scope and a source of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from toolbus.parts.dropin.file_loader import is_script, is_shared
from toolbus.parts.dropin.manifest import NO_GRANTS, SCRIPTS, SOURCE, FileGrants, Manifest, own_source


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one process.

    Attributes:
        source: of their tools, on the bus.
        files: those whose tools are offered, in order.
        helpers: the `_*.py` files, which each group loads first, to import.
        grants: what the process may reach.
        is_extension: whether its one file is an extension in JavaScript.
    """

    source: str
    files: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    grants: FileGrants = NO_GRANTS
    is_extension: bool = False

    @property
    def order(self) -> tuple[str, ...]:
        """The files that are loaded, in order."""
        return (*self.helpers, *(file for file in self.files if file not in self.helpers))


def groups(files: Sequence[str], manifest: Manifest, extensions: Collection[str] = ()) -> list[Group]:
    """Returns the groups of the files that are allowed, in the order of their first files.

    Helpers belong to every group of their language, but for extensions. A tool that one of them offers itself is
    offered once, by the shared group; that group therefore exists as soon as there is a helper.

    Args:
        extensions: those of the files that are extensions in JavaScript.
    """
    allowed = [file for file in files if manifest.allows(file)]
    own = [file for file in allowed if file in extensions or manifest.grants(file) != NO_GRANTS]
    result: list[Group] = []
    for file in allowed:
        alike = [each for each in allowed if is_script(each) == is_script(file)]
        helpers = tuple(each for each in alike if is_shared(each))
        plain = tuple(each for each in alike if each not in own)
        if file in extensions:
            result.append(Group(own_source(file), (file,), (), manifest.grants(file), is_extension=True))
        elif file in own:
            result.append(Group(own_source(file), (file,), helpers, manifest.grants(file)))
        elif file == plain[0]:
            result.append(Group(SCRIPTS if is_script(file) else SOURCE, plain, helpers))
    return result
