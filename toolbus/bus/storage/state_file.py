"""Reads and replaces small JSON files in the data directory, such as the changes of operators."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from toolbus.bus.path_ownership import check_path


def read_state(path: Path) -> Any:
    """Returns the content of a file.

    Raises:
        FileNotFoundError: it does not exist.
        OSError: it cannot be read.
        ValueError: it is not JSON.
        SetupError: another user could have written it.
    """
    check_path(path, str(path))
    return json.loads(path.read_text("utf-8"))


def write_state(path: Path, content: Any) -> None:
    """Replaces a file atomically; only its owner can read it.

    Raises:
        OSError: it cannot be written; the former file is left as it is.
    """
    handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
