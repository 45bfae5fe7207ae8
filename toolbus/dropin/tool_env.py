"""Builds `env`, the second parameter of `execute(args, env)`: the user whom a call is made for, and where.

All of it comes from the host's context of the call, nothing from the arguments, so a model cannot claim to be another
user. It is read-only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from toolbus.errors import ToolBusError
from toolbus.functions.scope import ToolScope
from toolbus.tool import level_of

_KINDS = ("plugins", "tools", "recent_calls", "stats")


def env_of(scope: ToolScope) -> Mapping[str, Any]:
    """Returns what a tool may know about its call: the host's attributes, and these keys, which are always set.

    - `user_id`: the user whom the call is made for; "" if the host named none, and then assume no user;
    - `user`, `speaker`: their name, and who spoke; a missing one is taken from the other, then from `user_id`;
    - `level`: the access level as a whole number; 0, the lowest, if it is missing or not a number;
    - `channel`, `mode`: where and how the conversation takes place; "" if the host did not set it;
    - `member`: the council member that the call is made for; None outside a council;
    - `messages`: the end of the conversation, oldest first, each with `role`, `content` and `name`;
    - `deadline`: when the caller stops waiting, by `time.monotonic()`; None if there is no deadline;
    - `bus`: functions that return what this user may see of the bus: `plugins()`, `tools()`, `recent_calls()`,
      `stats()`; for plain functions; an async one calls the tool `toolbus:this_bus` itself;
    - `attributes`: everything that the host set, unchanged, each a text.
    """
    attributes = scope.context.attributes
    user_id = scope.context.user_id
    messages = scope.context.messages
    return MappingProxyType(
        {
            **attributes,
            "user_id": user_id,
            "user": attributes.get("user") or attributes.get("speaker") or user_id,
            "speaker": attributes.get("speaker") or attributes.get("user") or user_id,
            "level": level_of(attributes),
            "channel": attributes.get("channel", ""),
            "mode": attributes.get("mode", ""),
            "member": None if scope.context.member is None else MappingProxyType(dict(scope.context.member)),
            "messages": tuple(
                MappingProxyType({"role": each.role, "content": each.content, "name": each.name}) for each in messages
            ),
            "deadline": scope.deadline,
            "bus": _bus(scope),
            "attributes": MappingProxyType(dict(attributes)),
        }
    )


def _bus(scope: ToolScope) -> Mapping[str, Callable[[], Any]]:
    kinds = _KINDS if scope.can_call else ()
    return MappingProxyType({kind: functools.partial(_introspect, scope, kind) for kind in kinds})


def _introspect(scope: ToolScope, kind: str) -> Any:
    result = scope.call_sync("toolbus:this_bus", {"kind": kind})
    if result.error is not None:
        raise ToolBusError(f"the bus did not answer env['bus'][{kind!r}]: {result.error.message}")
    return result.output
