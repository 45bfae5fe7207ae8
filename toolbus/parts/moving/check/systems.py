"""Lists the systems that `toolbus dev check` knows.

A system is one file with its rules and one line here. Rules for Python ask a `SourceFile` (`imports`, `classes`,
`tree`), those for JavaScript look at its `code_of`.
"""

from __future__ import annotations

from toolbus.parts.moving.check.neko_rules import NEKO
from toolbus.parts.moving.check.source_file import System
from toolbus.parts.moving.check.spindle_rules import SPINDLE
from toolbus.parts.moving.check.stargazer_rules import STARGAZER
from toolbus.parts.moving.check.synchronet_rules import SYNCHRONET

SYSTEMS: dict[str, System] = {system.name: system for system in (NEKO, STARGAZER, SPINDLE, SYNCHRONET)}
