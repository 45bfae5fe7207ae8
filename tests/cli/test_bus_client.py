"""Finding a bus: addresses, exit code 3, and options that are not UTF-8."""

import socket

import pytest

from tests.support.processes import toolbus


@pytest.mark.parametrize(
    "words", [("list",), ("watch",), ("tools",), ("call", "x"), ("health",), ("calls",), ("drain", "x")]
)
def test_no_bus_is_exit_code_3_with_how_to_start_one(words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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
