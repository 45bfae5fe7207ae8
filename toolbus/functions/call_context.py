"""Defines the context of a call: the user, the council member, the end of the conversation.

The host states it and the handler reads it; a model cannot set any of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from toolbus.tool import dump_arguments
from toolbus.v1 import tool_pb2 as pb


@dataclass(frozen=True, slots=True)
class ContextMessage:
    """One message of the conversation in which the call was made."""

    role: str
    content: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class CallContext:
    """The context of a call, as the host states it; a model cannot set any of it.

    Attributes:
        user_id: the user for whom the call is made; empty if unknown.
        attributes: any further texts by name (channel, locale …).
        member: the council member for whom the call is made; None outside a council.
        messages: the end of the conversation, oldest first.
        traceparent: W3C trace context; empty without one.
        unplanned: whether a council makes the call without planned arguments, which the bus then does not check.
    """

    user_id: str = ""
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    member: Mapping[str, Any] | None = None
    messages: tuple[ContextMessage, ...] = ()
    traceparent: str = ""
    unplanned: bool = False

    @classmethod
    def from_wire(cls, message: pb.CallContext) -> CallContext:
        """Copies a context out of its message; a member that is not a JSON object becomes None."""
        try:
            member = json.loads(message.member_json) if message.member_json else None
        except (ValueError, RecursionError):
            member = None
        return cls(
            user_id=message.user_id,
            attributes=MappingProxyType(dict(message.attributes)),
            member=MappingProxyType(member) if isinstance(member, dict) else None,
            messages=tuple(ContextMessage(each.role, each.content, each.name) for each in message.messages),
            traceparent=message.traceparent,
            unplanned=message.unplanned,
        )

    def to_wire(self) -> pb.CallContext:
        """Returns the wire form."""
        return pb.CallContext(
            user_id=self.user_id,
            attributes=self.attributes,
            member_json=dump_arguments(dict(self.member)) if self.member is not None else "",
            messages=[pb.ContextMessage(role=m.role, content=m.content, name=m.name) for m in self.messages],
            traceparent=self.traceparent,
            unplanned=self.unplanned,
        )


NO_CONTEXT = CallContext()
