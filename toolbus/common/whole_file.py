"""Replaces a file so that readers see the old content or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replaces a file atomically, once its content is on the disk.

    Args:
        mode: who may read and write it from now on, whatever it was before.

    Raises:
        OSError: it cannot be written; the former file is left as it is.
    """
    import tempfile  # here, since processes of drop-in tools import this and write no file

    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
