"""Names a call in a line of the log: the fields that every line about a call has, without arguments and outputs.

They are fields of the record (``extra``), so that the JSON log has them as keys of their own: `call_id, tool, source,
identity, trace_id, seconds, outcome`, those that are known. Records of calls and the audit have the same `call_id`.
"""

from __future__ import annotations

from typing import Any

from toolbus.bus.access.identity import Principal
from toolbus.common.text import clean_line, shorten

MAX_SHOWN = 128  # characters of a value; the ids of tools are shorter


def call_fields(
    call_id: str,
    tool: str,
    source: str,
    principal: Principal,
    *,
    trace_id: str = "",
    seconds: float | None = None,
    outcome: str = "",
) -> dict[str, Any]:
    """Returns the fields of a line about a call: ``log.warning(text, extra=call_fields(…))``.

    Args:
        call_id: the id that the caller chose.
        source: whose tool it is; "" where none was found.
        principal: who called. Its identity is named, or its source where it is a program of this machine.
        trace_id: of a sampled call.
        seconds: how long it took; None while it runs.
        outcome: how it ended, as of its record.
    """
    identity = principal.identity.name or principal.source
    texts = {"call_id": call_id, "tool": tool, "source": source, "identity": identity, "trace_id": trace_id}
    fields: dict[str, Any] = {name: clean_line(shorten(text, MAX_SHOWN)) for name, text in texts.items() if text}
    if seconds is not None:
        fields["seconds"] = round(seconds, 6)
    return fields | ({"outcome": outcome} if outcome else {})
