"""Finding a bus: addresses, exit code 3, and options that are not UTF-8."""

import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from lab.stage import free_ports
from tests.support.other_user import CAN_BE_NOBODY, NOBODY
from tests.support.processes import toolbus
from tests.support.waiting import WAIT_SECONDS
from toolbus.cli.bus_client import BusTarget, query


@pytest.mark.parametrize(
    "words", [("list",), ("watch",), ("tools",), ("call", "x"), ("health",), ("calls",), ("drain", "x")]
)
def test_no_bus_is_exit_code_3_with_how_to_start_one(words: tuple[str, ...]) -> None:
    (port,) = free_ports(1)
    ended = toolbus(*words, "--bus", f"127.0.0.1:{port}")
    assert ended.returncode == 3
    assert f"no bus at 127.0.0.1:{port}" in ended.stderr
    assert "toolbus serve" in ended.stderr
    assert toolbus(*words, "--bus", "unix:/nowhere.sock").returncode == 3


def test_an_invalid_address_is_wrong_usage() -> None:
    for address in ("localhost", "127.0.0.1:x", "unix:", "127.0.0.1:0"):
        ended = toolbus("list", "--bus", address)
        assert ended.returncode == 2
        assert repr(address) in ended.stderr


COMMANDS = (
    *(("export", "--dialect", "mcp"), ("search", "x"), ("tasks",), ("tasks", "await", "x"), ("permissions",)),
    *(("permit", "tools", "x", "--nobody"), ("calls", "--follow")),
)


@pytest.mark.parametrize("words", COMMANDS)
def test_no_bus_is_exit_code_3(words: tuple[str, ...], unused_address: str) -> None:
    ended = toolbus(*words, "--bus", unused_address)
    assert ended.returncode == 3
    assert f"no bus at {unused_address}" in ended.stderr


@pytest.mark.parametrize("words", [("list", "--user"), ("call", "x", "--user"), ("export", "--dialect", "mcp")])
def test_options_that_are_not_utf_8_are_wrong_usage(words: tuple[str, ...], bus: str) -> None:
    ended = toolbus(*words, "\udcff", "--bus", bus)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "toolbus: '\\udcff' is not UTF-8: write it in the terminal's encoding\n"


@pytest.mark.skipif(not CAN_BE_NOBODY, reason="only root can give a socket to another user")
@pytest.mark.parametrize(
    ("words", "owner"),
    [*((words, NOBODY) for words in (("list",), ("health",), ("call", "x"))), (("health",), os.geteuid())],
)
def test_a_command_warns_of_a_program_of_another_user(words: tuple[str, ...], owner: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        os.fchown(listening.fileno(), owner, -1)
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        def end_connections() -> None:
            with suppress(OSError):
                while True:
                    listening.accept()[0].close()

        thread = threading.Thread(target=end_connections)
        thread.start()
        ended = toolbus(*words, "--bus", address)
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(WAIT_SECONDS)
    assert (f"the program that listens at {address} belongs to" in ended.stderr) is (owner == NOBODY)
    assert ended.returncode == 3


@pytest.mark.parametrize("owner", [NOBODY, None])
def test_a_request_to_a_program_of_another_user_carries_no_token(
    owner: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    credential = tmp_path / "key.toml"
    credential.write_text('token = "PAW"\n')
    credential.chmod(0o600)
    monkeypatch.setattr("toolbus.sdk.reconnect.foreign_owner", lambda address: owner)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = BusTarget(f"127.0.0.1:{listening.getsockname()[1]}", credential)
        metadata = query(target, lambda channel, metadata: metadata)
    assert bool(metadata) is (owner is None)
    assert ("no token of a credential is sent to it" in capsys.readouterr().err) is (owner is not None)
