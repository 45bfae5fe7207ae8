"""Runs one plugin: ``python -m toolbus.processes.plugin_process PATH``, started and supervised by `toolbus run`.

It loads the file or folder (or after ``-m`` an installed package) and runs the plugin until a signal ends it, and ends
when its supervisor does, which sends secret variables over standard input, since ``/proc/PID/environ`` shows the
environment with which a process was started. The exit code 0 means that the plugin ended by itself, `CANNOT_START` that
a restart would not help, any other that it died.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import runpy
import signal
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from typing import Any

from toolbus.processes.program_starter import CANNOT_START, MODULE_VARIABLE, SUPERVISOR_VARIABLE, killed_with_parent

ENTRIES_VARIABLE = "TOOLBUS_OFFER_ENTRIES"  # "1" makes methods with plugin_entry tools
REPORT_VARIABLE = "_REPORT_PIPE"  # to which the names of the offered tools are written, as a line of JSON
_POLL_SECONDS = 0.5


class SpawnedImports:
    """Finds the plugin's module in processes that it starts by spawn of `multiprocessing`, which import it by name."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns the module's file; None for any other."""
        known, _, file = os.environ.get(MODULE_VARIABLE, "").partition("=")
        return importlib.util.spec_from_file_location(name, file) if name == known else None


if __name__ == "__mp_main__":  # in such a process
    sys.meta_path.append(SpawnedImports)


def end_with(supervisor: int) -> None:
    """Makes this process end when its supervisor does.

    On Linux the kernel kills it; elsewhere, or if the kernel refuses, a thread watches for a new parent.
    """
    if not killed_with_parent():
        threading.Thread(target=_watch_parent, args=(supervisor,), name="toolbus lifeline", daemon=True).start()
    if os.getppid() != supervisor:  # it ended before prctl took effect
        os._exit(1)


def _watch_parent(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(_POLL_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # this process leads its group


def main(arguments: list[str] | None = None) -> int:
    """Runs the plugin of PATH, or after ``-m`` of a package; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    supervisor = os.environ.pop(SUPERVISOR_VARIABLE, "")
    if supervisor:
        end_with(int(supervisor))
        os.environ.update(json.loads(sys.stdin.read() or "{}"))
    if len(arguments) not in (1, 2):
        print("usage: python -m toolbus.processes.plugin_process PATH", file=sys.stderr)
        return 2
    from toolbus.errors import PeerLost, RequestError, SetupError

    *option, plugin = arguments
    try:
        if option:
            sys.argv[1:] = []
            runpy.run_module(plugin, run_name="__main__", alter_sys=True)
        else:
            _run_file(plugin)
    except (SetupError, RequestError) as error:
        print(error, file=sys.stderr)
        return CANNOT_START
    except PeerLost as error:  # replaced by another plugin, or drained by an operator: not to be restarted
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 0


def _run_file(path: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    from toolbus.processes.loader import load_plugin
    from toolbus.sdk.plugin_client import Plugin  # before a module of the author's can hide a standard one

    loaded = load_plugin(path, entries=os.environ.get(ENTRIES_VARIABLE) == "1")
    plugin = loaded.plugin
    if loaded.owner is not None:
        plugin = Plugin.from_object(loaded.owner, source=loaded.source)
    plugin = plugin or Plugin(loaded.source, tools=loaded.tools)
    pipe = os.environ.pop(REPORT_VARIABLE, "")
    if not plugin.closed:  # else the file has called `run` itself while it was loaded
        plugin.run(
            (lambda: os.write(int(pipe), json.dumps([spec.tool.name for spec in plugin.tools]).encode() + b"\n"))
            if pipe
            else None
        )


if __name__ == "__main__":
    sys.exit(main())
