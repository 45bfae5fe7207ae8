from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.waiting import within
from toolbus.bus import Bus
from toolbus.sdk import Extension, Host, ToolInvocation
from toolbus.testing import running_bus

SEARCH = {
    "name": "search",
    "display_name": "Search memory",
    "description": "Searches.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    "council_eligible": True,
    "inline_available": True,
}


@asynccontextmanager
async def attached(*extensions: Extension, **settings: Any) -> AsyncIterator[tuple[Bus, Host]]:
    """Runs a bus with these extensions, and a host."""
    async with running_bus(**settings) as bus, Host(bus.grpc_addresses[0]) as host:
        for extension in extensions:
            object.__setattr__(extension._settings, "address", bus.grpc_addresses[0])
            await extension.start()
            await within(extension.ready())
        try:
            yield bus, host
        finally:
            for extension in extensions:
                await extension.close()


def memory(*handlers: Callable[[ToolInvocation], Any], **fields: Any) -> Extension:
    extension = Extension("memory")
    extension.register_tool(SEARCH, **fields)
    for handler in handlers:
        extension.on_invocation(handler)
    return extension
