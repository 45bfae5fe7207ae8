"""Makes chains of audit lines for tests, and reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolbus.bus.audit import AuditRecord
from toolbus.parts.audit.audit_log import AuditWriter, files_of


@contextmanager
def writing(directory: Path, **options: Any) -> Iterator[AuditWriter]:
    """Opens a writer; at the end everything is written."""
    writer = AuditWriter(directory, "boot", **options)
    writer.open()
    try:
        yield writer
    finally:
        writer.close()


def write(directory: Path, count: int, **options: Any) -> tuple[int, str]:
    """Writes lines, each on its own; returns the head."""
    with writing(directory, **options) as writer:
        for number in range(count):
            writer.put_now(line(str(number)))
        return writer.head


def line(target: str = "") -> AuditRecord:
    return AuditRecord(time.time(), {"act": "role", "target": target})


def raw_lines(directory: Path) -> list[bytes]:
    return [each for file in files_of(directory) for each in file.read_bytes().splitlines(keepends=True)]


def entries(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in raw_lines(directory)]


def targets(directory: Path) -> list[str]:
    return [each["target"] for each in entries(directory)]
