"""Makes a plugin with `toolbus new` in each language, starts it as its README says, and calls its tool.

    python -m tests.parts.development.languages [LANGUAGE …]

`make clients` runs it after it has built the packages. The exit code is 1 where a plugin does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.support.processes import toolbus
from toolbus.parts.development.templates import TEMPLATES
from toolbus.sdk import Host
from toolbus.testing import running_bus

START_SECONDS = 300.0  # which a compiler may take
CRATE = Path(__file__).resolve().parents[3] / "clients" / "rust"


async def greeting(language: str, home: Path) -> object:
    """Returns what the tool of a new plugin answers."""
    made = toolbus("new", "hi", "--in", home, "--language", language, "--json")
    if made.returncode:
        return made.stderr
    command: str = json.loads(made.stdout)["start"]
    if language == "python":
        command = TEMPLATES[language].program.replace("@name@", "hi")  # `toolbus dev` has a bus of its own
    async with running_bus() as bus:
        address = bus.grpc_addresses[0]
        variables = {**os.environ, "TOOLBUS_ADDRESS": address}
        if language == "rust":
            command = command.replace("target/", f"{_share_builds(home)}/")
        process = await asyncio.create_subprocess_shell(command, cwd=home / "hi", env=variables, start_new_session=True)
        try:
            async with Host(address) as host, asyncio.timeout(START_SECONDS):
                while not await host.list():
                    if process.returncode is not None:
                        return f"it ended with {process.returncode}"
                    await asyncio.sleep(0.1)
                return (await host.call("hi_hello", {"who": "World"})).unwrap()
        except TimeoutError:
            return f"it did not offer its tool within {START_SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            await process.wait()


def _share_builds(home: Path) -> Path:
    """Has cargo use what it built for the crate, below a folder; returns where it writes."""
    (home / ".cargo").mkdir()
    manifest = (CRATE / "Cargo.toml").read_text("utf-8")
    settings = f"[build]\ntarget-dir = '{CRATE / 'build'}'\n\n{manifest[manifest.index('[profile.dev]') :]}"
    (home / ".cargo" / "config.toml").write_text(settings, "utf-8")
    shutil.copy(CRATE / "Cargo.lock", home / "hi")
    return CRATE / "build"


def main() -> int:
    """Makes them, one after the other."""
    wrong = 0
    for language in sys.argv[1:] or TEMPLATES:
        with tempfile.TemporaryDirectory() as folder:
            answer = asyncio.run(greeting(language, Path(folder)))
        print(f"toolbus new --language {language}: {answer}", flush=True)
        wrong += answer != "Hello, World!"
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
