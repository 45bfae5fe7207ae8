"""Adds the host's fields to the calls of extensions, and defines the record that their handlers get.

A model cannot set these fields: values that it writes under their names are removed or replaced. The user of a call is
never in its arguments.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from toolbus.functions.call_context import ContextMessage
from toolbus.functions.hints import without_property
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolSpec
from toolbus.tool import USER_KEYS

CONTEXT = "context"
DEADLINE = "__deadlineMs"

# The fields of a council member, with the values for those that the host has not sent.
_MEMBER_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "memberId": "",
        "itemId": "",
        "packId": "",
        "packName": "",
        "name": "",
        "role": "",
        "chance": 100,
        "avatarUrl": None,
        "definition": "",
        "personality": "",
        "behavior": "",
        "genderIdentity": 3,  # any
    }
)
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "toolName": "tool_name",
        "args": "args",
        "requestId": "request_id",
        "councilMember": "council_member",
        "contextMessages": "context_messages",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class ToolInvocation(Mapping[str, Any]):
    """One call, as a handler for all tools gets it: a mapping with the keys that extensions know.

    Attributes:
        tool_name: `toolName`, the registered name, without the source.
        args: the model's arguments, with the host's `context` and `__deadlineMs`.
        request_id: `requestId`, the caller's id of the call.
        council_member: `councilMember`, the member that makes the call, with exactly twelve fields; None outside a
            council.
        context_messages: `contextMessages`, the conversation as the host sent it, each with role and content, and
            perhaps a name; None if it sent none.
        scope: progress, cancellation, calls of other tools, the user. Not in the mapping.
    """

    tool_name: str
    args: dict[str, Any]
    request_id: str
    council_member: Mapping[str, Any] | None
    context_messages: list[dict[str, str]] | None
    scope: ToolScope

    @classmethod
    def of(cls, arguments: Mapping[str, Any], scope: ToolScope, *, keeps_context: bool = False) -> ToolInvocation:
        """Returns the record of a call for its handlers.

        Args:
            keeps_context: as for `with_host_fields`.
        """
        member = scope.context.member
        return cls(
            tool_name=scope.tool,
            args=with_host_fields(arguments, scope, keeps_context=keeps_context),
            request_id=scope.request_id,
            council_member=None if member is None else council_member(member),
            context_messages=[_message(each) for each in scope.context.messages] or None,
            scope=scope,
        )

    def __getitem__(self, key: str) -> Any:
        return getattr(self, _KEYS[key])

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)


def with_host_fields(arguments: Mapping[str, Any], scope: ToolScope, *, keeps_context: bool = False) -> dict[str, Any]:
    """Returns arguments with the host's fields, and without fields that only a host may set.

    Args:
        keeps_context: whether the model may write `context` if the host sent none: the tool declares it.
    """
    fields = {key: value for key, value in arguments.items() if key not in USER_KEYS and key != DEADLINE}
    if scope.context.messages:
        fields[CONTEXT] = context_text(scope.context.messages)
    elif not keeps_context:
        fields.pop(CONTEXT, None)
    if (left := scope.time_left()) < math.inf:
        fields[DEADLINE] = round((time.time() + left) * 1000)
    return fields


def taking_host_fields(spec: ToolSpec) -> ToolSpec:
    """Returns a tool whose handler gets `context` and `__deadlineMs` as arguments, if it takes them.

    Its schema does not show them to a model.
    """
    host_fields = {CONTEXT, DEADLINE}
    schema = spec.tool.parameters
    for field in host_fields:
        schema = without_property(schema, field)
    tool = dataclasses.replace(spec.tool, parameters_json=json.dumps(schema, ensure_ascii=False))
    unwanted = frozenset() if spec.names is None else host_fields - spec.names

    def prepare(arguments: dict[str, Any], scope: ToolScope) -> dict[str, Any]:
        fields = with_host_fields(arguments, scope)
        return {key: value for key, value in fields.items() if key not in unwanted}

    return dataclasses.replace(spec, tool=tool, prepare=prepare)


def council_member(member: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a member with exactly twelve fields, with defaults for those that the host has not sent."""
    fields = _MEMBER_FIELDS.items()
    return MappingProxyType({key: other if member.get(key) is None else member[key] for key, other in fields})


def context_text(messages: Iterable[ContextMessage]) -> str:
    """Returns messages as one text, with blank lines between them, each but the system's with its role before it."""
    return "\n\n".join(each.content if each.role == "system" else f"{each.role}: {each.content}" for each in messages)


def _message(message: ContextMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    return fields | {"name": message.name} if message.name else fields
