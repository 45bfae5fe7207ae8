"""Drives one MCP client library for Python by lines of JSON: `python python_client.py KIND URL`.

It runs in an environment of its own, with that library alone, so it imports nothing of this repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import sys
from typing import Any

changes = 0


async def _count(message: Any) -> None:
    """Counts notifications of changed lists."""
    global changes
    if "list_changed" in (shown := repr(message)) or "ListChanged" in shown:
        changes += 1


def _read(result: Any) -> dict[str, Any]:
    failed = getattr(result, "is_error", getattr(result, "isError", None))
    texts = [getattr(block, "text", "") for block in getattr(result, "content", None) or ()]
    return {"text": "\n".join(texts) or repr(result), "failed": failed}


class Sdk:
    """The official SDK, and FastMCP, whose client is like it."""

    def __init__(self, module: str, url: str) -> None:
        more = {} if module == "mcp" else {"timeout": 30}
        self.client = importlib.import_module(module).Client(url, message_handler=_count, **more)

    async def open(self, stack: contextlib.AsyncExitStack) -> str:
        """Connects; returns the revision."""
        await stack.enter_async_context(self.client)
        version = getattr(self.client, "protocol_version", None)
        return str(version or getattr(getattr(self.client, "initialize_result", None), "protocolVersion", ""))

    async def list(self) -> int:
        """Lists once; returns how many tools there are."""
        listed = await self.client.list_tools()
        return len(getattr(listed, "tools", listed))

    async def call(self, name: str) -> dict[str, Any]:
        """Calls a tool without arguments."""
        more = {"raise_on_error": False} if type(self.client).__module__.startswith("fastmcp") else {}
        return _read(await self.client.call_tool(name, {}, **more))


class PydanticAi:
    """The toolset of pydantic-ai."""

    def __init__(self, url: str) -> None:
        self.tools = importlib.import_module("pydantic_ai.mcp").MCPToolset(url, message_handler=_count)

    async def open(self, stack: contextlib.AsyncExitStack) -> str:
        await stack.enter_async_context(self.tools)
        return ""

    async def list(self) -> int:
        return len(await self.tools.list_tools())

    async def call(self, name: str) -> dict[str, Any]:
        return {"text": str(await self.tools.direct_call_tool(name, {})), "failed": None}


class LangChain:
    """The adapters of LangChain: a session for each list and each call."""

    def __init__(self, url: str) -> None:
        client = importlib.import_module("langchain_mcp_adapters.client").MultiServerMCPClient
        self.client = client({"bus": {"transport": "streamable_http", "url": url}})

    async def open(self, stack: contextlib.AsyncExitStack) -> str:
        return ""

    async def list(self) -> int:
        return len(await self.client.get_tools())

    async def call(self, name: str) -> dict[str, Any]:
        [tool] = [each for each in await self.client.get_tools() if each.name == name]
        return {"text": str(await tool.ainvoke({})), "failed": None}


KINDS: dict[str, Any] = {
    "mcp": lambda url: Sdk("mcp", url),
    "fastmcp": lambda url: Sdk("fastmcp", url),
    "pydantic-ai-slim": PydanticAi,
    "langchain-mcp-adapters": LangChain,
}


async def _do(client: Any, line: str) -> dict[str, Any]:
    asked = json.loads(line)
    try:
        match asked["do"]:
            case "list":
                return {"tools": await client.list()}
            case "call":
                return dict(await client.call(asked["name"]))
        return {"changes": changes}
    except BaseException as error:  # groups of exceptions too: they are what is measured
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            raise
        return {"error": f"{type(error).__name__}: {error}"[:300]}


async def main(kind: str, url: str) -> None:
    """Answers each line of the standard input with one."""
    client = KINDS[kind](url)
    async with contextlib.AsyncExitStack() as stack:
        revision = await client.open(stack)
        print(json.dumps({"version": importlib.metadata.version(kind), "revision": revision}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await _do(client, line)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
