"""Lists the targets. A target is a module with a `TARGET`, imported only where it is run."""

from __future__ import annotations

from importlib import import_module

from lab.fuzz.target import Target

NAMES = ("frames", "responses", "json_texts", "schemas", "callback_urls", "manifests", "settings", "deltas")


def load(name: str) -> Target:
    """Returns a target: one of ours, or by its dotted name a module of another package.

    Raises:
        KeyError: there is no such target.
    """
    if name not in NAMES and "." not in name:
        raise KeyError(name)
    target = import_module(name if "." in name else f"lab.fuzz.{name}").TARGET
    if not isinstance(target, Target):
        raise KeyError(name)
    return target
