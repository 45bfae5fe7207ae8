"""The host on an HTTP client alone, on this machine and over HTTPS with a credential."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bus.keys.keys_directory import KeysDirectory
from tests.support.processes import ROOT, environment
from toolbus import Bus, Config

HOST = ROOT / "clients" / "rest" / "host.py"


async def host(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HOST), *words]
    env = environment(variables)
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture
def keys(tmp_path: Path) -> KeysDirectory:
    return KeysDirectory(tmp_path, time.time())


async def test_the_rest_host_lists_and_calls_with_and_without_a_credential(keys: KeysDirectory) -> None:
    made = keys.add("chat")
    file = keys.folder / "chat.toolbus"
    async with Bus(Config(grpc=("127.0.0.1:0",), http="127.0.0.1:0", https="127.0.0.1:0", keys=keys.path)) as bus:

        @bus.tool
        def add(a: int, b: int) -> int:
            """Adds."""
            return a + b

        for url, variables in (
            (f"http://{bus.http_address}", {}),
            (f"https://{bus.https_address}", {"TOOLBUS_CREDENTIAL": str(file)}),
        ):
            called = await host("add", '{"a": 1, "b": 2}', MAIN_SERVER=url, **variables)
            assert called.returncode == 0, called.stderr
            assert called.stdout.splitlines()[-1] == "3"
            assert "add (" in called.stdout

        keys.store.revoke(made["id"])
        for _ in range(50):
            refused = await host(MAIN_SERVER=f"https://{bus.https_address}", TOOLBUS_CREDENTIAL=str(file))
            if refused.returncode:
                break
    assert refused.returncode == 1
    assert "was revoked" in refused.stderr


async def test_the_rest_host_sends_no_token_in_plain_text_to_another_machine(keys: KeysDirectory) -> None:
    keys.add("chat")
    file = keys.folder / "chat.toolbus"
    refused = await host(MAIN_SERVER="http://10.0.0.5:1", TOOLBUS_CREDENTIAL=str(file))
    assert "not sent to http://10.0.0.5:1 in plain text" in refused.stderr
    file.chmod(0o644)
    assert f"chmod 600 {file}" in (await host(TOOLBUS_CREDENTIAL=str(file))).stderr
