"""Lends a host's model to plugins, as the tool ``host:generate``.

The host offers the tool in a session of its own, so the session in which it calls for users does not change. The host
limits tokens, time and calls at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.reply import Err
from toolbus.functions.scope import ToolScope
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS
from toolbus.sdk.generation import HOST_SOURCE, Generate, Generation, GenerationRequest, Mode

if TYPE_CHECKING:
    from toolbus.sdk.connection_settings import ConnectionSettings
    from toolbus.sdk.plugin_client import Plugin

MAX_TOKENS = 1024
LEND_SECONDS = 120.0
LENT_IN_FLIGHT = 4
ATTACH_SECONDS = 10.0  # until the bus has the tool, so that the host's next call finds it
MAX_MESSAGES = 256
_DESCRIPTION = (
    "Asks the host's language model. mode quiet: as the host asks it, with its own settings and instructions, without "
    "showing anything to the user; mode raw: with these messages alone."
)


async def lend(
    settings: ConnectionSettings, generate: Generate, max_tokens: int, timeout: float, max_in_flight: int
) -> Plugin:
    """Offers a host's model in a session of its own, with the settings of the host; returns the plugin that does.

    Waits until the bus has the tool, 10 s at most.

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
    with contextlib.suppress(TimeoutError, ToolBusError):  # without a bus it is lent later; a refusal is in the log
        await asyncio.wait_for(plugin.ready(), ATTACH_SECONDS)
    return plugin


def _handler(generate: Generate, max_lent: int) -> Callable[..., Any]:
    async def handler(
        scope: ToolScope,
        messages: list[dict[str, str]],
        mode: Mode = "quiet",
        max_tokens: int = max_lent,
        temperature: float | None = None,
        stop: tuple[str, ...] = (),
        model: str = "",
    ) -> Any:
        request = GenerationRequest(tuple(messages), mode, max_tokens, temperature, tuple(stop), model, scope)
        answer: Any = await generate(request)  # a program's own function: it may return anything
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
