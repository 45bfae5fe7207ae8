"""Lends a host's model to plugins, and asks a lent one: the tool ``host:generate``.

A host that lends its model offers the tool in a session of its own, so that the session in which it calls for users is
as before. A plugin needs the permission ``generation`` to call it. Tokens, time and calls at once are bounded by the
lender, how deep requests nest by the bus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from toolbus.errors import SetupError
from toolbus.functions.reply import Err
from toolbus.functions.scope import ToolScope
from toolbus.sdk.outgoing_calls import future_call
from toolbus.tool import MAX_TIMEOUT_SECONDS, Result

if TYPE_CHECKING:
    from toolbus.sdk.connection import Connection
    from toolbus.sdk.connection_settings import ConnectionSettings
    from toolbus.sdk.plugin_client import Plugin

Mode = Literal["quiet", "raw"]
HOST_SOURCE = "host"  # of tools that hosts lend; the bus keeps them from listings
TOOL = f"{HOST_SOURCE}:generate"
MAX_TOKENS = 1024
LEND_SECONDS = 120.0
LENT_IN_FLIGHT = 4
MAX_MESSAGES = 256
_DESCRIPTION = (
    "Asks the host's language model. mode quiet: as the host asks it, with its own settings and instructions, without "
    "showing anything to the user; mode raw: with these messages alone."
)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a plugin asks of a lent model.

    Attributes:
        messages: oldest first, each with ``role`` (system, user, assistant) and ``content``, a text.
        mode: ``quiet``: the host adds its own instructions and settings; ``raw``: the messages as they are.
        max_tokens: of the answer; never above what the host lends.
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
        model: the provider's name of the model; "" where the host does not say.
        stop_reason: why it ended, in the provider's words; "" where the host does not say.
        usage: tokens, by the provider's names; empty where the host does not say.
    """

    text: str
    model: str = ""
    stop_reason: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)


class Generate(Protocol):
    """A host's model: any async callable that answers a request."""

    def __call__(self, request: GenerationRequest, /) -> Awaitable[Generation | str]: ...


async def lend(
    settings: ConnectionSettings, generate: Generate, max_tokens: int, timeout: float, max_in_flight: int
) -> Plugin:
    """Offers a host's model in a session of its own, with the settings of the host; returns what ends that.

    Raises:
        SetupError: a bound is out of range.
    """
    if not 1 <= max_tokens <= 1_000_000:
        raise SetupError(f"max_tokens is {max_tokens}: lend from 1 to 1,000,000 tokens an answer")
    if not 0 < timeout <= MAX_TIMEOUT_SECONDS:
        raise SetupError(f"timeout is {timeout:g}: give the model up to {MAX_TIMEOUT_SECONDS:g} seconds")
    from toolbus.sdk.plugin_client import Plugin  # a host that lends nothing does not load it

    plugin = Plugin(
        HOST_SOURCE,
        address=settings.address,
        max_in_flight=max_in_flight,
        qualified=True,
        token=settings.token,
        credential=settings.credential,
    )
    plugin.add_tool(
        _handler(generate, max_tokens),
        name="generate",
        description=_DESCRIPTION,
        parameters=_parameters(max_tokens),
        timeout=timeout,
    )
    await plugin.start()
    return plugin


def _handler(generate: Generate, most: int) -> Callable[..., Any]:
    async def handler(
        scope: ToolScope,
        messages: list[dict[str, str]],
        mode: Mode = "quiet",
        max_tokens: int = most,
        temperature: float | None = None,
        stop: tuple[str, ...] = (),
        model: str = "",
    ) -> Any:
        asked = GenerationRequest(tuple(messages), mode, max_tokens, temperature, tuple(stop), model, scope)
        answer: Any = await generate(asked)  # a program's own function: it may return anything
        if isinstance(answer, str):
            answer = Generation(answer)
        if not isinstance(answer, Generation):
            return Err(f"the host's model returned a {type(answer).__name__}: it must return a text or a Generation")
        return asdict(answer)

    return handler


def _parameters(max_tokens: int) -> dict[str, Any]:
    message = {
        "type": "object",
        "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
        "required": ["role", "content"],
    }
    return {
        "type": "object",
        "properties": {
            "messages": {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES},
            "mode": {"enum": ["quiet", "raw"]},
            "max_tokens": {"type": "integer", "minimum": 1, "maximum": max_tokens},
            "temperature": {"type": "number", "minimum": 0, "maximum": 2},
            "stop": {"type": "array", "items": {"type": "string"}, "maxItems": 16},
            "model": {"type": "string"},
        },
        "required": ["messages"],
        "additionalProperties": False,
    }


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
