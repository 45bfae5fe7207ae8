"""Measures a host in another language: ``python -m lab.load.program_host --program FILE ADDRESS``.

The program gets an address, a tool, its arguments, the calls in flight, and the seconds of warm-up and window. It
prints ``begun`` between the two, at the end its figures as JSON, and lives on until its standard input ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess

import psutil

from lab.load import windows, workload
from lab.load.windows import Cell, Window


def measure(options: argparse.Namespace, cell: Cell) -> Window:
    """Runs the program for one window."""
    arguments = workload.arguments_json(0, cell.size)
    lengths = (str(options.warm_up), str(options.seconds))
    command = (options.program, options.address, options.tool, arguments, str(cell.in_flight), *lengths)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        pids = {"middle": options.middle_pid, "host": program.pid, "plugin": options.plugin_pid}
        processes = {f"{name}_cpu_us": psutil.Process(pid) for name, pid in pids.items() if pid}
        assert program.stdout is not None  # a pipe
        if program.stdout.readline() != "begun\n":
            raise RuntimeError(f"{options.program} ended before its window")
        before = {name: windows.processor_seconds(process) for name, process in processes.items()}
        figures = json.loads(program.stdout.readline())
        calls = figures.pop("calls")
        spent = {
            name: (windows.processor_seconds(process) - before[name]) / calls * 1e6
            for name, process in processes.items()
        }
    return Window(in_flight=cell.in_flight, size=cell.size, **figures, **spent)


def main() -> None:
    parser = windows.options_of(__doc__)
    parser.add_argument("--program", required=True)
    parser.add_argument("--tool", default=workload.TOOL_NAME)
    options = parser.parse_args()
    for cell in options.cells:
        measure(options, cell).print()


if __name__ == "__main__":
    main()
