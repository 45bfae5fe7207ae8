"""Translates tools, calls and results into the formats of the providers of language models, and back.

Each name is loaded from its own module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.lazy import lazily

if TYPE_CHECKING:
    from toolbus.dialects.conversation import Answered, Answers, Delta, Message, ModelCall, Turn, Usage
    from toolbus.dialects.dialect import Dialect, EndpointError, TurnStream
    from toolbus.dialects.dialect_names import DIALECTS, find_dialect
    from toolbus.dialects.export import Export, LeftOut
    from toolbus.dialects.realtime_dialect import CallsCancelled, RealtimeDialect, RealtimeParser
    from toolbus.dialects.schemas.losses import Loss

__all__ = [
    # by name
    "find_dialect",
    "DIALECTS",
    # base classes
    "Dialect",
    "RealtimeDialect",
    "TurnStream",
    "RealtimeParser",
    # out: tools
    "Export",
    "Loss",
    "LeftOut",
    # in: a model's answer
    "Turn",
    "ModelCall",
    "Usage",
    "Delta",
    "CallsCancelled",
    "EndpointError",
    # a conversation
    "Message",
    "Answers",
    "Answered",
]

_HOMES = {
    "dialects.conversation": (
        "Answered",
        "Answers",
        "Delta",
        "Message",
        "ModelCall",
        "Turn",
        "Usage",
    ),
    "dialects.dialect": (
        "Dialect",
        "EndpointError",
        "TurnStream",
    ),
    "dialects.dialect_names": (
        "DIALECTS",
        "find_dialect",
    ),
    "dialects.export": (
        "Export",
        "LeftOut",
    ),
    "dialects.realtime_dialect": (
        "CallsCancelled",
        "RealtimeDialect",
        "RealtimeParser",
    ),
    "dialects.schemas.losses": ("Loss",),
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
