"""`env`, the second parameter of `execute(args, env)`: who a tool is run for.

All of it comes from what the host said about the call, nothing from the arguments, so a model cannot claim to be
somebody else. It can be read only.
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
    """Returns what a tool may know about its call: the host's attributes, and over them these keys, always there.

    - `user_id`: who the call is made for; "" where the host did not say, and then nobody should be assumed;
    - `user`, `speaker`: their name, and who spoke; what is not said is taken from the other one, then from `user_id`;
    - `level`: the access level as a whole number; 0, the least, where it is not said or no number;
    - `channel`, `mode`: where and how the conversation runs; "" where it is not said;
    - `member`: the council member that the call is made for; None outside a council;
    - `messages`: the end of the conversation, oldest first, each with `role`, `content` and `name`;
    - `deadline`: when the caller stops waiting, by `time.monotonic()`; None where nobody said;
    - `bus`: functions that ask the bus what this very user may see of it: `plugins()`, `tools()`, `recent_calls()`,
      `stats()`; for plain functions, an async one calls the tool `toolbus:this_bus` itself;
    - `attributes`: everything that the host said, unchanged, each a text.
    """
    said = scope.context.attributes
    user_id = scope.context.user_id
    messages = scope.context.messages
    return MappingProxyType(
        {
            **said,
            "user_id": user_id,
            "user": said.get("user") or said.get("speaker") or user_id,
            "speaker": said.get("speaker") or said.get("user") or user_id,
            "level": level_of(said),
            "channel": said.get("channel", ""),
            "mode": said.get("mode", ""),
            "member": None if scope.context.member is None else MappingProxyType(dict(scope.context.member)),
            "messages": tuple(
                MappingProxyType({"role": each.role, "content": each.content, "name": each.name}) for each in messages
            ),
            "deadline": scope.deadline,
            "bus": _bus(scope),
            "attributes": MappingProxyType(dict(said)),
        }
    )


def _bus(scope: ToolScope) -> Mapping[str, Callable[[], Any]]:
    kinds = _KINDS if scope.can_call else ()
    return MappingProxyType({kind: functools.partial(_ask, scope, kind) for kind in kinds})


def _ask(scope: ToolScope, kind: str) -> Any:
    result = scope.call_sync("toolbus:this_bus", {"kind": kind})
    if result.error is not None:
        raise ToolBusError(f"the bus does not say what it has ({kind}): {result.error.message}")
    return result.output
