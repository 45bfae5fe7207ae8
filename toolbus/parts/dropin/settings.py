"""Declares the settings of a bus for drop-in tools."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolbus.common.setting import FLAG, PATH, CheckedRecord, Option, is_folder, setting


@dataclass(frozen=True, slots=True)
class DropinSettings(CheckedRecord):
    """Which folder of drop-in tools a bus runs, if any."""

    tools_dir: Path | None = setting(
        None,
        PATH,
        "a folder of [drop-in tools](../start/drop-in-tools.md) that the bus runs",
        check=is_folder,
        option=Option(
            "Also run the drop-in tools of this folder, and follow its changes.",
            "DIR",
            only_once="copy the tools into one folder",
        ),
    )
    require_manifest: bool = setting(
        False,
        FLAG,
        "loads tools from that folder only if it has a `_manifest.json`",
        option=Option("Load nothing from --tools-dir without a _manifest.json."),
    )
