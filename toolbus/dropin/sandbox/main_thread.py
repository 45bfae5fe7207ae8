"""The main thread of a sandboxed process: it waits for signals, and no tool's code ever runs on it.

Only the main thread can set signal handlers, and a handler sees the frames of what it interrupts, the audit hook's too.
A tool that cannot run there cannot get at the hook that way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

_ASKED = {signal.SIGTERM, signal.SIGINT}
_OVER = signal.SIGUSR1
_FAILED = 70  # EX_SOFTWARE of sysexits.h


def beside_main(work: Callable[[], int], stop: Callable[[str], object]) -> NoReturn:
    """Runs everything on a second thread, and ends the process with the exit code that it returns.

    To be called after `apply`, on the main thread, before there are others: they inherit which signals are blocked.

    Args:
        work: loads the tools and runs the plugin until that has ended.
        stop: called on the main thread with the name of the first SIGTERM or SIGINT; has ``work`` return. It must be
            a function that no tool can replace, and touch nothing of theirs. A second signal ends the process at once.
    """
    code = _FAILED

    def run() -> None:
        nonlocal code
        try:
            code = work()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os.kill(os.getpid(), _OVER)

    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ASKED, _OVER})
    threading.Thread(target=run, name="toolbus tools", daemon=True).start()
    heard = signal.sigwait({*_ASKED, _OVER})
    if heard != _OVER:
        stop(signal.Signals(heard).name)
        heard = signal.sigwait({*_ASKED, _OVER})
        if heard != _OVER:
            code = 128 + heard
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not by return: that would run what tools registered with atexit, here
