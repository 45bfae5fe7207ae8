"""How providers of language models write tools, calls and results."""

from toolbus.dialects.lookup import DIALECTS, find_dialect
from toolbus.dialects.schemas.losses import Loss
from toolbus.dialects.shape import (
    Answered,
    Answers,
    CallsCancelled,
    Delta,
    Dialect,
    EndpointError,
    Export,
    LeftOut,
    Message,
    ModelCall,
    RealtimeDialect,
    RealtimeParser,
    Turn,
    TurnStream,
)

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
