"""Asks the model that a host lends (`lent_model`): the tool ``host:generate``.

A plugin needs the permission ``generation`` to call it. How deep requests nest is bounded by the bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from toolbus.functions.scope import ToolScope
from toolbus.protocol.tool import Result
from toolbus.sdk.outgoing_calls import future_call

if TYPE_CHECKING:
    from toolbus.sdk.connection import Connection

Mode = Literal["quiet", "raw"]
HOST_SOURCE = "host"  # the source of the tools that hosts lend; the bus never lists them
TOOL = f"{HOST_SOURCE}:generate"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A plugin's request to a lent model.

    Attributes:
        messages: oldest first, each with ``role`` (system, user, assistant) and ``content``, a text.
        mode: ``quiet``: the host adds its own instructions and settings; ``raw``: the messages as they are.
        max_tokens: of the answer; never more than the host lends.
        temperature: as providers define it; None: the host's own.
        stop: texts at which the answer ends.
        model: which model the plugin would prefer; "" for the host's. The host need not follow.
        scope: the call, with the user and the deadline.
    """

    messages: tuple[Mapping[str, str], ...]
    mode: Mode
    max_tokens: int
    temperature: float | None
    stop: tuple[str, ...]
    model: str
    scope: ToolScope


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer of a lent model.

    Attributes:
        text: the answer.
        model: the provider's name of the model; "" if the host does not state it.
        stop_reason: why the answer ended, in the provider's words; "" if the host does not state it.
        usage: tokens, by the provider's names; empty if the host does not state them.
    """

    text: str
    model: str = ""
    stop_reason: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)


class Generate(Protocol):
    """A host's model: any async callable that answers a request."""

    def __call__(self, request: GenerationRequest, /) -> Awaitable[Generation | str]: ...


def request_of(messages: str | Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``host:generate``.

    Args:
        messages: a text is one message of the user.
        options: ``mode``, ``max_tokens``, ``temperature``, ``stop``, ``model``; None leaves one to the host.
    """
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return {"messages": listed, **{name: value for name, value in options.items() if value is not None}}


def generation_of(result: Result) -> Generation:
    """Returns the answer of ``host:generate``.

    Raises:
        CallFailed: the call failed.
    """
    output: Mapping[str, Any] = result.unwrap()
    return Generation(output["text"], output["model"], output["stop_reason"], output["usage"])


async def ask(caller: Connection | ToolScope, arguments: Mapping[str, Any], timeout: float | None) -> Generation:
    """Asks a lent model, as part of a call where ``caller`` is its scope; see `Plugin.generate`."""
    if isinstance(caller, ToolScope):
        return generation_of(await caller.call(TOOL, arguments, timeout=timeout))
    return generation_of(await asyncio.wrap_future(future_call(caller, TOOL, arguments, timeout)))
