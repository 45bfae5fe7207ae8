"""Runs `toolbus top` on a terminal of its own, as an operator does."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS, until_sync


class OnTerminal:
    """`toolbus top` on a terminal of its own."""

    def __init__(self, *words: str, **env: str) -> None:
        self._terminal, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toolbus.cli", "top", *words],
            stdin=end,
            stdout=end,
            stderr=end,
            env=environment({"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30", **env}),
            start_new_session=True,
        )
        os.close(end)
        os.set_blocking(self._terminal, False)
        self._text = b""

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._terminal)

    @property
    def text(self) -> str:
        """What it has written so far."""
        try:
            while part := os.read(self._terminal, 65_536):
                self._text += part
        except OSError:  # nothing new, or it has ended
            pass
        return self._text.decode("utf-8", "replace")

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def code(self) -> int:
        until_sync(lambda: self.text and self.process.poll() is not None, "the end")
        return self.process.wait(WAIT_SECONDS)
