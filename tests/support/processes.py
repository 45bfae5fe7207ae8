"""Starts real processes for tests, waits for what they print, and ends them by their own process id."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self
from unittest import mock

import psutil

from tests.support.fork_server import Forked, fork
from tests.support.waiting import HANG_SECONDS, WAIT_SECONDS, until_sync
from toolbus.cli import main

ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """Tells whether a process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# For processes whose memory, modules or time a test looks at: without the measurement of `make coverage`.
UNMEASURED = {"COVERAGE_PROCESS_CONFIG": ""}


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a test's process: ours without variables that the command line reads."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TOOLBUS_", "NEKO_", "MAIN_SERVER"))}
    return {**kept, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **more}


def toolbus_process(*words: str | Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "toolbus.cli", *map(str, words)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=environment(env),
        check=False,
    )


def toolbus(*words: str | Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end in this process, which takes a tenth of what a process of its own does.

    Commands that set up their process (``serve``, ``run``) get one all the same. For commands that ask a bus of the
    test's own event loop, call it on a thread.
    """
    if words and words[0] in ("serve", "run"):
        return _toolbus_fork(*words, **env)
    arguments = ["toolbus", *map(str, words)]
    streams = [io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8")]
    streams += [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
    with (
        mock.patch.dict(os.environ, environment(env), clear=True),
        mock.patch.multiple(sys, argv=arguments, stdin=streams[0], stdout=streams[1], stderr=streams[2]),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code
    out, err = (stream.buffer.getvalue().decode() for stream in streams[1:])
    return subprocess.CompletedProcess(arguments, code if isinstance(code, int) else int(code is not None), out, err)


def script(file: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python file to its end, as a fork of a process that has imported most of toolbus."""
    return _toolbus_fork(file, *words, **env)


def _toolbus_fork(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    with TemporaryDirectory() as folder, Running(Path(folder), *words, **env) as running:
        code = running.code()
        return subprocess.CompletedProcess(["toolbus", *map(str, words)], code, running.out, running.err)


class Running:
    """A ``toolbus`` command that keeps running; its output goes to files.

    Use ``async with`` where the bus that it needs to end well runs on the test's own event loop.
    """

    def __init__(self, folder: Path, *words: str | Path, **env: str) -> None:
        self._out = folder / f"{Path(words[0]).stem}-{time.monotonic_ns()}.out"
        self._err = self._out.with_suffix(".err")
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            command = self._command(words)
            if command is None:
                self.process: Forked | subprocess.Popen[bytes] = fork(list(map(str, words)), environment(env), out, err)
            else:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environment(env),
                    start_new_session=True,
                )

    def _command(self, words: tuple[str | Path, ...]) -> list[str | Path] | None:
        """Returns a command to start instead; None for `toolbus` with these words."""
        return None

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def says(self, text: str) -> None:
        """Waits until it has printed a text, on either stream."""
        until_sync(
            lambda: text in self.out or text in self.err or self.process.poll() is not None,
            f"{text!r} in the output",
        )
        assert text in self.out or text in self.err, f"ended with {self.process.poll()}: {self.out}{self.err}"

    def says_or_ends(self, text: str) -> None:
        """Waits for a text, and kills the process if it does not come: for use before `__enter__`."""
        try:
            self.says(text)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def code(self) -> int:
        """Waits for its end; returns the exit code."""
        return self.process.wait(WAIT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)
