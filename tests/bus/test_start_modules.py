"""Counts the modules that a started bus has loaded, since seconds depend on the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]
# What the rooms of a bus with HTTP need only once something uses them.
LATER = [
    "aiohttp",
    "yarl",
    "toolbus.parts.council.service",
    "toolbus.parts.models.dialects.dialect",
    "toolbus.parts.models.dialects.export",
]
SCRIPT = f"""
import asyncio, sys
from toolbus.bus import Bus, Config

async def start():
    async with Bus(Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0")):
        print([name for name in {LATER!r} if name in sys.modules])

asyncio.run(start())
"""


MISSING = """
import asyncio, sys
from toolbus.bus import Bus, Config
from toolbus.errors import SetupError

sys.modules["aiohttp"] = None  # as where it is not installed

async def start():
    try:
        async with Bus(Config(grpc=("127.0.0.1:0",), http="off", data_dir=None)):
            print("started")
    except SetupError as error:
        print(error)

asyncio.run(start())
"""


def test_a_bus_whose_client_of_callback_urls_is_not_installed_does_not_start_and_says_how_to_install_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS
    )
    expected = "callback URLs need aiohttp, which is not installed: pip install 'toolbus[server]'"
    assert (ran.returncode, ran.stdout.strip()) == (0, expected), ran.stderr


def test_a_started_bus_has_loaded_nothing_that_only_some_requests_need() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS)
    assert (ran.returncode, ran.stdout.strip()) == (0, "[]"), ran.stderr
