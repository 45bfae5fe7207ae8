"""Runs JavaScript in an engine without files, network and processes: one scope, its calls, its limits."""

from toolbus.parts.dropin.javascript.engine import EXTRA, Engine, EngineLimits, ScriptError, random_key
from toolbus.parts.dropin.javascript.remedies import ANNOUNCES, ignored_text, with_remedy

__all__ = [
    "ANNOUNCES",
    "Engine",
    "EngineLimits",
    "EXTRA",
    "ScriptError",
    "ignored_text",
    "random_key",
    "with_remedy",
]
