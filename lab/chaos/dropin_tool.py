"""Offers the drop-in tools of a run. The scene copies this file into a folder, with `lab/ledger.py` as a helper."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from _ledger import Runs  # type: ignore[import-not-found]  # the name that helpers have there

# `register_tool` is there without an import in every drop-in file.
PARAMETERS = {
    "type": "object",
    "properties": {"token": {"type": "string"}, "seconds": {"type": "number"}, "refuse": {"type": "boolean"}},
    "required": ["token"],
}
runs = Runs(Path("LEDGERS"), "folder")


async def run(args: dict[str, Any], env: Any) -> dict[str, Any]:
    runs.begin(args["token"])
    await asyncio.sleep(args.get("seconds", 0.0))
    output = runs.end(args["token"])
    return {"error": "refused on purpose"} if args.get("refuse") else dict(output)


for name, idempotent in (("folder_once", False), ("folder_again", True)):
    register_tool(  # type: ignore[name-defined]  # noqa: F821
        name=name,
        execute=run,
        idempotent=idempotent,
        timeout=8.0,
        definition={"description": "Writes down that it ran.", "parameters": PARAMETERS},
    )
