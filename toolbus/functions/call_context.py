"""Defines the context of a call: the user, the council member, the end of the conversation.

The host states it and the handler reads it; a model cannot set any of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from toolbus.common.text import dump_json, escape_surrogates
from toolbus.protocol.questions import FORM
from toolbus.protocol.tool import dump_arguments
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


# Every way of calling (`Host.call`, `Bus.call`, `ToolScope.call` …) takes them as keywords and hands them on as this
# one record.
class Inputs(NamedTuple):
    """The questions of a tool that a call accepts, and its answers.

    Attributes:
        accepts: the kinds that its caller can answer: `elicitation.form`, `elicitation.url`, `sampling`, `roots`.
        answers: to the questions of the call before, by key, as the Model Context Protocol defines them.
        state: the `request_state` that came with the questions.
    """

    accepts: tuple[str, ...] = (FORM,)
    answers: Mapping[str, Any] = {}
    state: str = ""


class CallOptions(NamedTuple):
    """The options of a call besides the tool's name and arguments.

    A named tuple, since calls make one each: a frozen dataclass takes 1.0 µs, this 0.3.

    Attributes:
        timeout: seconds; None means the tool's own.
        role: considers only the tools of this role; None considers all.
        context: the call's context as a message; only hosts may state it.
        schema_hash: of the declaration that the caller knows; the call is refused once the tool has changed. Empty
            accepts any declaration.
        background_after: seconds after which the call becomes a task, whose id is then the result; None means never.
        parent_call_id: the call that this one is part of; empty for a call of its own.
        inputs: the questions that the caller can answer, and its answers; None if it can answer nothing.
        traceparent, tracestate: the span of the call, as W3C trace context; empty without one.
    """

    timeout: float | None = None
    role: str | None = None
    context: pb.CallContext | None = None
    schema_hash: str = ""
    background_after: float | None = None
    parent_call_id: str = ""
    inputs: Inputs | None = None
    traceparent: str = ""
    tracestate: str = ""

    @classmethod
    def of(
        cls,
        timeout: float | None,
        role: str | None,
        context: CallContext | None,
        schema_hash: str,
        background_after: float | None,
        inputs: Inputs | None = None,
    ) -> CallOptions:
        """Returns the options of a caller; for none `NO_OPTIONS`, which costs a call nothing."""
        if inputs is not None:
            stated = (context or NO_CONTEXT).to_wire()  # the bus reads inputs only with a context
            return cls(timeout, role, stated, schema_hash, background_after, inputs=inputs)
        if context is not None:
            return cls(timeout, role, context.to_wire(), schema_hash, background_after)
        if timeout is None and role is None and not schema_hash and background_after is None:
            return NO_OPTIONS
        return cls(timeout, role, None, schema_hash, background_after)

    def to_wire(self, name: str, arguments_json: str) -> pb.ToolCall:
        """Returns the call of a tool as a message without a call_id."""
        message = pb.ToolCall(name=escape_surrogates(name), arguments_json=escape_surrogates(arguments_json))
        if self.timeout is not None:
            message.timeout_seconds = self.timeout
        self.fill(message)
        return message

    def fill(self, message: pb.ToolCall) -> None:
        """Sets the options in a message, except for the timeout: part of it may have passed."""
        if self.role:
            message.role = self.role
        if self.schema_hash:
            message.schema_hash = self.schema_hash
        if self.background_after is not None:
            message.background_after_seconds = self.background_after
        if self.context is not None:
            message.context.CopyFrom(self.context)
        if self.parent_call_id:
            message.parent_call_id = self.parent_call_id
        if self.traceparent:
            message.traceparent = self.traceparent
            message.tracestate = self.tracestate
        if self.inputs is not None:
            message.accepts.extend(self.inputs.accepts)
            if self.inputs.answers:
                message.input_responses_json = dump_json(self.inputs.answers)
            message.request_state = self.inputs.state

    @property
    def size(self) -> int:
        """About how many bytes the options take in a message, without those that are always small."""
        size = self.context.ByteSize() if self.context is not None else 0
        if self.inputs is not None:
            size += len(dump_json(self.inputs.answers)) + len(self.inputs.state)
        size += len(self.traceparent) + len(self.tracestate)
        return size


NO_OPTIONS = CallOptions()
