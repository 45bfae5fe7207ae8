"""Tests the socket that a bridge and a bus share, at a path that is too long for the kernel."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from toolbus.parts.mcp.bridge.bridge_socket import SOCKET_FILE, foreign_uid, short_path


@pytest.mark.parametrize("length", [10, 107, 108, 200])
def test_a_socket_is_found_at_a_path_of_any_length(tmp_path: Path, length: int) -> None:
    folder = tmp_path / ("d" * max(1, length - len(os.fsencode(tmp_path)) - len(SOCKET_FILE) - 2))
    folder.mkdir()
    path = folder / SOCKET_FILE
    with (
        contextlib.closing(socket.socket(socket.AF_UNIX)) as listener,
        contextlib.closing(socket.socket(socket.AF_UNIX)) as client,
    ):
        with short_path(path) as short:
            listener.bind(short)
        listener.listen()
        with short_path(path) as short:
            client.connect(short)
        assert path.is_socket()
        assert foreign_uid(client) is None
