"""Keeps the main thread of a sandboxed process idle, so that no tool's code ever runs on it.

Only the main thread can set signal handlers, and a handler sees the frames of what it interrupts, the audit hook's too.
Code that cannot run there cannot reach the hook that way. A tool's code can run without being called: a function that
it put into a module in place of another one runs where that is called, a finalizer on the thread that happens to
collect garbage. So the main thread waits in one native call, while other threads run the tools and take the signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_FAILED = 70  # EX_SOFTWARE of sysexits.h


def run_beside_main(work: Callable[[], int], stop: Callable[[str], object]) -> NoReturn:
    """Runs everything on other threads, and ends the process with the exit code that ``work`` returns.

    Call it after `apply`, on the main thread, before there are others: they inherit which signals are blocked.

    Args:
        work: loads the tools and runs the plugin until that has ended.
        stop: called with the name of the first SIGTERM or SIGINT, on a thread of its own, perhaps while ``work`` still
            starts; makes ``work`` return. A second signal ends the process at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would run on the main thread
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    gate, idle = threading.Semaphore(0), threading.Lock()
    threading.Thread(target=_work, args=(gate, work), name="toolbus tools", daemon=True).start()
    threading.Thread(target=_wait_for_signals, args=(gate, stop), name="toolbus signals", daemon=True).start()
    idle.acquire()
    wait = idle.acquire
    gate.release(2)
    while True:  # it is never released; another thread ends the process
        wait()


def _work(gate: threading.Semaphore, work: Callable[[], int]) -> None:
    gate.acquire()
    code = _FAILED
    try:
        code = work()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):  # a tool may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # a return would run what tools registered with atexit, on the main thread


def _wait_for_signals(gate: threading.Semaphore, stop: Callable[[str], object]) -> None:
    gate.acquire()
    number = signal.sigwait(_STOP_SIGNALS)
    try:
        stop(signal.Signals(number).name)
        number = signal.sigwait(_STOP_SIGNALS)
    finally:
        os._exit(128 + number)
