"""Runs a plugin in its sandbox, for tests: ``python -m tests.parts.dropin.sandbox.sandboxed_plugin ADDRESS FOLDER``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from toolbus.parts.dropin.sandbox import SandboxGrants, apply, run_beside_main


def main(bus: str, folder: str) -> None:
    protection = apply(SandboxGrants(write=(Path(folder),), cpu_seconds_per_call=1), bus=bus, readable=[Path(__file__)])
    from toolbus.sdk import Plugin

    plugin = Plugin("boxed", address=bus)

    @plugin.tool
    def note(text: str) -> int:
        """Writes into the granted folder.

        Args:
            text: what to write.
        """
        with protection.cpu.call(), open(f"{folder}/notes", "a", encoding="utf-8") as notes:
            return notes.write(text)

    @plugin.tool
    def look(path: str) -> str:
        """Reads a file.

        Args:
            path: which.
        """
        return Path(path).read_text(encoding="utf-8")

    @plugin.tool
    def base() -> str:
        """Uses SQLite, in the granted folder."""
        import sqlite3

        with sqlite3.connect(f"{folder}/base.db") as held:
            held.execute("create table if not exists t (x)")
            held.execute("insert into t values (1)")
        count = json.dumps(held.execute("select count(*) from t").fetchone())
        held.close()
        return count

    @plugin.tool
    def tidy() -> bool:
        """Makes and removes a tree in the granted folder."""
        import shutil

        Path(folder, "tree/branch").mkdir(parents=True)
        Path(folder, "tree/branch/leaf").write_text("x", encoding="utf-8")
        Path(folder, "tree/branch/leaf").rename(Path(folder, "tree/leaf"))
        shutil.rmtree(Path(folder, "tree"))
        return not Path(folder, "tree").exists()

    @plugin.tool
    def spin() -> None:
        """Never ends."""
        with protection.cpu.call():
            while True:
                pass

    stopped = asyncio.Event()

    async def run() -> None:
        async with plugin:
            await stopped.wait()

    def work() -> int:
        loop.run_until_complete(run())
        return 0

    loop = asyncio.new_event_loop()
    run_beside_main(work, lambda name: loop.call_soon_threadsafe(stopped.set))


if __name__ == "__main__":
    main(*sys.argv[1:])
