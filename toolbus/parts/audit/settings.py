"""Declares the settings of a bus for its audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolbus.common.setting import FLAG, CheckedRecord, setting
from toolbus.errors import SetupError


@dataclass(frozen=True, slots=True)
class AuditSettings(CheckedRecord):
    """Whether a bus has an audit, and what is in it."""

    audit: bool = setting(True, FLAG, "writes an [audit](audit.md) in the data directory, if there is one")
    audit_required: bool = setting(False, FLAG, "refuses acts that the audit cannot record")
    audit_calls: bool = setting(False, FLAG, "the audit also has calls, without arguments and outputs")

    @property
    def needed_room(self) -> str:
        """The room that records what has to be recorded; "" where nothing has to."""
        return "AuditRoom" if self.audit_required else ""

    def check_beside(self, config: Any) -> None:
        """Checks what depends on other settings of the bus.

        Raises:
            SetupError: the audit cannot do what is required of it.
        """
        for name in ("audit_required", "audit_calls"):
            if getattr(self, name) and not self.audit:
                raise SetupError(f"{name} contradicts audit = false: drop one")
            if getattr(self, name) and config.data_dir is None:
                raise SetupError(f"{name} needs a data directory, where the audit is written: set data_dir")
