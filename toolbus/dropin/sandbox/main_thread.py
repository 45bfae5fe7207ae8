"""The main thread of a sandboxed process: it does nothing, for good, so no tool's code ever runs on it.

Only the main thread can set signal handlers, and a handler sees the frames of what it interrupts, the audit hook's too.
A tool that cannot run there cannot get at the hook that way. Code need not be called to run: what a tool puts into a
module in place of a function runs where that is called, a finalizer on whichever thread happens to collect garbage. So
the main thread waits in one native call, while other threads run the tools and hear the signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_ASKED = {signal.SIGTERM, signal.SIGINT}
_FAILED = 70  # EX_SOFTWARE of sysexits.h


def run_beside_main(work: Callable[[], int], stop: Callable[[str], object]) -> NoReturn:
    """Runs everything on other threads, and ends the process with the exit code that ``work`` returns.

    To be called after `apply`, on the main thread, before there are others: they inherit which signals are blocked.

    Args:
        work: loads the tools and runs the plugin until that has ended.
        stop: called with the name of the first SIGTERM or SIGINT, on a thread of its own, perhaps before ``work`` has
            got far; has ``work`` return. A second signal ends the process at once.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would run here
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED)
    gate, parked = threading.Semaphore(0), threading.Lock()
    threading.Thread(target=_work, args=(gate, work), name="toolbus tools", daemon=True).start()
    threading.Thread(target=_listen, args=(gate, stop), name="toolbus signals", daemon=True).start()
    parked.acquire()
    wait = parked.acquire
    gate.release(2)
    while True:  # nobody releases it; another thread ends the process
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
        os._exit(code)  # not by return: that would run what tools registered with atexit, on the main thread


def _listen(gate: threading.Semaphore, stop: Callable[[str], object]) -> None:
    gate.acquire()
    heard = signal.sigwait(_ASKED)
    try:
        stop(signal.Signals(heard).name)
        heard = signal.sigwait(_ASKED)
    finally:
        os._exit(128 + heard)
