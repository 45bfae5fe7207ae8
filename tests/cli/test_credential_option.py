"""``--credential``: commands on a bus that asks for a key, and what they say to one that they cannot reach."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from tests.sdk.played_bus import PlayedStream, played_bus
from tests.support.certificates import Authority, server_credentials
from tests.support.processes import toolbus, toolbus_process

AUTHORITY = Authority()
TLS = server_credentials(AUTHORITY.server("127.0.0.1"))
MTLS = server_credentials(AUTHORITY.server("127.0.0.1"), AUTHORITY)
CLIENT = AUTHORITY.client("chat")


@pytest.fixture
def credential(tmp_path: Path) -> Path:
    file = tmp_path / "chat.toolbus"
    file.touch(0o600)
    values = {"token": "tbk_1_PAW", "ca": AUTHORITY.pem, "certificate": CLIENT.certificate, "key": CLIENT.key}
    file.write_text("".join(f'{key} = """{value}"""\n' for key, value in values.items()), "utf-8")
    return file


def name_address(credential: Path, address: str) -> None:
    credential.write_text(f'address = "{address}"\n' + credential.read_text("utf-8"), "utf-8")


async def accept(stream: PlayedStream) -> None:
    await stream.accept()
    while await stream.read() is not None:
        pass


async def test_a_command_proves_who_it_is_with_the_file_that_it_is_given(credential: Path) -> None:
    async with played_bus(accept, tls=MTLS) as bus:
        where = ("--bus", f"mtls:{bus.address}", "--credential", credential)
        listed = await asyncio.to_thread(toolbus, "list", "--json", *where)
        health = await asyncio.to_thread(toolbus, "health", *where)
    assert (listed.returncode, health.returncode) == (0, 0), listed.stderr + health.stderr
    assert bus.keys == [(rpc, "Bearer tbk_1_PAW") for rpc in ("Invoke", "List", "Health.List")]


async def test_a_command_takes_credential_and_address_from_the_environment(credential: Path) -> None:
    async with played_bus(accept, tls=TLS) as bus:
        name_address(credential, f"tls:{bus.address}")
        variables = {"TOOLBUS_CREDENTIAL": str(credential)}
        listed = await asyncio.to_thread(toolbus, "list", "--json", **variables)
        plain = await asyncio.to_thread(toolbus, "list", TOOLBUS_ADDRESS=bus.address, **variables)
    assert listed.returncode == 0, listed.stderr
    assert bus.keys == [(rpc, "Bearer tbk_1_PAW") for rpc in ("Invoke", "List")]
    assert f"write tls:{bus.address}" in plain.stderr  # the address of the environment wins over that of the file


@pytest.mark.parametrize("command", ["list", "health"])
async def test_a_command_says_what_is_wrong_with_its_connection_at_once(credential: Path, command: str) -> None:
    async with played_bus(accept, tls=MTLS) as bus:
        plain = await asyncio.to_thread(toolbus_process, command, "--bus", bus.address)
        bare = await asyncio.to_thread(toolbus, command, "--bus", f"tls:{bus.address}")
    async with played_bus(accept) as bus:
        where = ("--bus", f"tls:{bus.address}", "--credential", credential)
        encrypted = await asyncio.to_thread(toolbus, command, *where)
    assert f"toolbus: the server at {plain.args[-1]} speaks TLS" in plain.stderr
    assert "write mtls:" in plain.stderr
    assert plain.stderr.count("\n") == 1
    assert "not signed by" in bare.stderr
    assert "does not speak TLS" in encrypted.stderr
    assert [plain.returncode, bare.returncode, encrypted.returncode] == [3, 3, 3]


async def test_a_key_that_the_bus_does_not_accept_is_reported_in_its_words(credential: Path) -> None:
    async def refuse(stream: PlayedStream) -> None:
        await stream.read_until("attach")
        await stream.end(grpc.StatusCode.UNAUTHENTICATED, "the key 1 was revoked on 2026-11-20")

    async with played_bus(refuse, tls=TLS) as bus:
        ended = await asyncio.to_thread(toolbus, "list", "--bus", f"tls:{bus.address}", "--credential", credential)
    assert ended.returncode == 1
    assert ended.stderr == f"toolbus: the key 1 was revoked on 2026-11-20 (the credential {credential})\n"


def test_a_credential_that_cannot_be_used_is_wrong_usage(credential: Path) -> None:
    credential.chmod(0o644)
    ended = toolbus("list", "--credential", credential)
    assert ended.returncode == 2
    assert f"chmod 600 {credential}" in ended.stderr
    assert toolbus("run", credential, "--credential", credential).returncode == 2
    missing = toolbus("list", "--bus", "mtls:127.0.0.1:1")
    assert (missing.returncode, "TOOLBUS_CREDENTIAL" in missing.stderr) == (2, True)


def test_drop_in_tools_are_not_run_for_a_bus_on_another_machine(credential: Path, tmp_path: Path) -> None:
    ended = toolbus("run", tmp_path, "--bus", "tls:bus.example:1", "--credential", credential)
    assert ended.returncode == 2
    assert "tls:bus.example:1 is another one: run them there" in ended.stderr
