"""Searches one target in a process of its own.

``python -m lab.fuzz.child TARGET PACKAGE [libFuzzer's options and folders]``: the branches of the package lead the
search; the target's own are left alone.

libFuzzer never returns: it ends the process, with a status other than 0 where there is a finding.
"""

from __future__ import annotations

import sys

import atheris

from lab.fuzz.target import load


def main() -> None:
    """Searches until libFuzzer has had enough."""
    name, package, *options = sys.argv[1:]
    with atheris.instrument_imports(include=[package]):
        target = load(name)
        # What a target brings into play later, inside a function, is imported now or would not be instrumented.
        for seed in target.seeds():
            target.run(seed)
    atheris.Setup([sys.argv[0], f"-max_len={target.max_bytes}", *options], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
