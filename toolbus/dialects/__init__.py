"""How providers of language models write tools, calls and results."""

from toolbus.dialects.conversation import Answered, Answers, Delta, Message, ModelCall, Turn
from toolbus.dialects.dialect import Dialect, EndpointError, TurnStream
from toolbus.dialects.dialect_names import DIALECTS, find_dialect
from toolbus.dialects.export import Export, LeftOut
from toolbus.dialects.realtime_dialect import CallsCancelled, RealtimeDialect, RealtimeParser
from toolbus.dialects.schemas.losses import Loss

__all__ = [
    # finding one
    "find_dialect",
    "DIALECTS",
    # the common shape
    "Dialect",
    "RealtimeDialect",
    "TurnStream",
    "RealtimeParser",
    # out: tools
    "Export",
    "Loss",
    "LeftOut",
    # in: what a model said
    "Turn",
    "ModelCall",
    "Delta",
    "CallsCancelled",
    "EndpointError",
    # a conversation
    "Message",
    "Answers",
    "Answered",
]
