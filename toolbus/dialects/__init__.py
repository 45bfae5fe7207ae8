"""Translates tools, calls and results into the formats of the providers of language models, and back."""

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
