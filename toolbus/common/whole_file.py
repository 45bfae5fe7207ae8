"""Replaces a file so that readers see the old content or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def prepared(path: Path, content: bytes, suffix: str = "") -> Iterator[Path]:
    """Writes a complete file beside a path, for the caller to move or link there; removes it afterwards.

    Raises:
        OSError: it cannot be written.
    """
    import tempfile  # here, since processes of drop-in tools import this and write no file

    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=suffix, dir=path.parent)  # always 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replaces a file atomically, once its content is on the disk.

    Args:
        mode: who may read and write it from now on, whatever it was before.

    Raises:
        OSError: it cannot be written; the former file is left as it is.
    """
    with prepared(path, content) as complete:
        os.chmod(complete, mode)
        os.replace(complete, path)
