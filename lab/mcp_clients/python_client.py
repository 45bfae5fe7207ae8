"""Drives one MCP client library for Python by lines of JSON: `python python_client.py KIND URL`.

It runs in an environment of its own, with that library alone, so it imports nothing of this repository.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import importlib
import importlib.metadata
import json
import sys
import threading
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


class OpenaiAgents:
    """A server of the OpenAI Agents SDK; calls are made as its runner makes them for a model."""

    def __init__(self, url: str) -> None:
        module = importlib.import_module("agents.mcp")
        self.invoke = module.MCPUtil.invoke_mcp_tool
        self.server = module.MCPServerStreamableHttp({"url": url}, message_handler=_count)

    async def open(self, stack: contextlib.AsyncExitStack) -> str:
        await stack.enter_async_context(self.server)
        return ""

    async def list(self) -> int:
        return len(await self.server.list_tools())

    async def call(self, name: str) -> dict[str, Any]:
        context = importlib.import_module("agents").RunContextWrapper(None)
        [tool] = [each for each in await self.server.list_tools() if each.name == name]
        return {"text": str(await self.invoke(self.server, tool, context, "{}")), "failed": None}


class ToolRegistry:
    """A registry of toolregistry: a new one for each list, since tools are registered once."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self, stack: contextlib.AsyncExitStack) -> str:
        return ""

    async def _registry(self) -> Any:
        registry = importlib.import_module("toolregistry").ToolRegistry()
        await registry.register_async(self.url, source="mcp", persistent=False)
        return registry

    async def list(self) -> int:
        return len((await self._registry()).get_available_tools())

    async def call(self, name: str) -> dict[str, Any]:
        tool = (await self._registry()).get_tool(name)
        return {"text": str(await tool.arun({})), "failed": None}


class OpenaiBridge:
    """The client of mcp-openai-bridge, which needs a 1.x of the official SDK."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = importlib.import_module("mcp_openai_bridge.mcp_client").McpClient()

    async def open(self, stack: contextlib.AsyncExitStack) -> str:
        await self.client.connect_http(self.url)
        stack.push_async_callback(self.client.close)
        return ""

    async def list(self) -> int:
        server = importlib.import_module("mcp_openai_bridge.server")
        return len(await server.build_tools_cache(self.client))

    async def call(self, name: str) -> dict[str, Any]:
        return _read(await self.client.call_tool(name, {}))


class GoogleGenai:
    """Google's client with a session of the official SDK in a config that is a dict, before a model that calls once."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.wanted = ""  # the tool that the model calls; empty: none
        self.requests: list[dict[str, Any]] = []  # that reached the model

    async def open(self, stack: contextlib.AsyncExitStack) -> str:
        mcp = importlib.import_module("mcp")
        module = importlib.import_module("mcp.client.streamable_http")
        read, write, *_ = await stack.enter_async_context(module.streamable_http_client(self.url))
        self.session = await stack.enter_async_context(mcp.ClientSession(read, write, message_handler=_count))
        answer = await self.session.initialize()
        genai = importlib.import_module("google.genai")
        options = {"base_url": f"http://127.0.0.1:{self._model(stack)}"}
        self.client = genai.Client(api_key="k", http_options=options)
        return str(getattr(answer, "protocol_version", None) or answer.protocolVersion)

    def _model(self, stack: contextlib.AsyncExitStack) -> int:
        ours = self

        class Model(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                ours.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answered = any("functionResponse" in part for part in ours.requests[-1]["contents"][-1]["parts"])
                part: Any = {"text": "done"}
                if ours.wanted and not answered:
                    part = {"functionCall": {"name": ours.wanted, "args": {}}}
                body = json.dumps({"candidates": [{"content": {"role": "model", "parts": [part]}}]}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        return int(server.server_address[1])

    async def _generate(self, wanted: str) -> dict[str, Any]:
        self.wanted, self.requests = wanted, []
        config = {"tools": [self.session]}
        await self.client.aio.models.generate_content(model="m", contents="hello", config=config)
        return self.requests[-1]

    async def list(self) -> int:
        declared = (await self._generate("")).get("tools") or [{}]
        return sum(len(each.get("functionDeclarations", ())) for each in declared)

    async def call(self, name: str) -> dict[str, Any]:
        part = (await self._generate(name))["contents"][-1]["parts"][0]
        answer = part["functionResponse"]["response"]
        return {"text": json.dumps(answer), "failed": '"isError": true' in json.dumps(answer) or "error" in answer}


KINDS: dict[str, Any] = {
    "openai-agents": OpenaiAgents,
    "toolregistry": ToolRegistry,
    "mcp-openai-bridge": OpenaiBridge,
    "google-genai": GoogleGenai,
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
