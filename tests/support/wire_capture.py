"""Captures what a provider's official client sends: the JSON that leaves the process, and the tools in it.

Clients build objects of their own from a request, and what these do not know never reaches the model. One server on
loopback takes the requests of all clients and answers each with an error, since only the request matters.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.providers import anthropic, genai, genai_client, ollama, openai
from tests.support.waiting import within
from toolbus.dialects import Dialect, Export, Message, RealtimeDialect, find_dialect
from toolbus.protocol.tool import Tool

Json = dict[str, Any]

MODEL = "m"
QUESTION = "Which tools do you have?"


@dataclass(frozen=True, slots=True)
class SentTool:
    """A tool as it left the process.

    Attributes:
        name: on the wire.
        schema: of its arguments, in the provider's own form; None where nothing was sent.
        declaration: all of it.
    """

    name: str
    description: str
    schema: Json | None
    declaration: Json


@dataclass(frozen=True, slots=True)
class Sent:
    """What a client sent for some tools.

    Attributes:
        export: what the dialect said about them.
        body: the whole message.
        tools: those in the message, in their order.
    """

    export: Export
    body: Json
    tools: tuple[SentTool, ...]

    def tool(self, bus_name: str) -> SentTool | None:
        """Returns a tool by its name on the bus, None where it was not sent."""
        wire = self.export.names.to_wire.get(bus_name)
        return next((each for each in self.tools if each.name == wire), None)


class Capture:
    """Sends requests through the official clients to one server."""

    def __init__(self, url: str, bodies: list[Json]) -> None:
        self._url = url
        self._bodies = bodies  # that the server got, the newest last
        self._clients: dict[str, Any] = {}  # created on first use: to load one takes a second

    def sent(self, name: str, tools: Iterable[Tool], dialect: Dialect | RealtimeDialect | None = None) -> Sent:
        """Returns what leaves the process when a dialect offers tools.

        Args:
            name: of the dialect.
            dialect: an instance; a new one by default.
        """
        dialect = dialect or find_dialect(name)
        export = dialect.export(tools)
        body = json.loads(json.dumps(self.body(dialect, export)))
        return Sent(export, body, tuple(_TOOLS.get(name, _flat_or_nested)(body)))

    def body(self, dialect: Dialect | RealtimeDialect, export: Export) -> Json:
        """Returns the message that offers an export's tools."""
        if dialect.name == "mcp":
            return asyncio.run(within(_listed_by_mcp(export.tools)))
        if dialect.name == "gemini-live":
            assert isinstance(dialect, RealtimeDialect)
            return asyncio.run(within(self._live(dialect.session_update(export)["setup"])))
        if isinstance(dialect, RealtimeDialect):
            return dialect.session_update(export)
        request = dialect.request([Message("user", QUESTION)], export)
        return self.request(dialect.name, request)

    def request(self, name: str, request: Json) -> Json:
        """Returns the body that a client makes of a request of a dialect."""
        self._bodies.clear()
        send, refused = self._sender(name)
        try:
            send(request)
        except refused:
            pass
        (body,) = self._bodies
        return body

    def _sender(self, name: str) -> tuple[Callable[[Json], Any], type[Exception]]:
        if name not in self._clients:
            self._clients[name] = self._new_client(name)
        client = self._clients[name]
        match name:
            case "openai":
                return lambda request: client.chat.completions.create(model=MODEL, **request), openai.APIStatusError
            case "openai-responses":
                return lambda request: client.responses.create(model=MODEL, **request), openai.APIStatusError
            case "anthropic":
                return (
                    lambda request: client.messages.create(model=MODEL, max_tokens=9, **request),
                    anthropic.APIStatusError,
                )
            case "gemini":
                return lambda request: client.models.generate_content(model=MODEL, **request), genai.errors.APIError
            case _:
                return lambda request: client.chat(model=MODEL, **request), ollama.ResponseError

    def _new_client(self, name: str) -> Any:
        """Returns a client that tries once. Without `verify=False` each reads the system's certificates: 25 ms."""
        match name:
            case "openai" | "openai-responses":
                plain = openai.DefaultHttpxClient(verify=False)
                return openai.OpenAI(api_key="k", base_url=f"{self._url}/v1", max_retries=0, http_client=plain)
            case "anthropic":
                plain = anthropic.DefaultHttpxClient(verify=False)
                return anthropic.Anthropic(api_key="k", base_url=self._url, max_retries=0, http_client=plain)
            case "gemini":
                return genai_client(self._url)
            case _:
                return ollama.Client(host=self._url, verify=False)

    async def _live(self, setup: Json) -> Json:
        """Returns the first message of a session of Gemini Live."""
        from websockets.asyncio.server import ServerConnection, serve

        first: asyncio.Future[str | bytes] = asyncio.get_running_loop().create_future()

        async def accept(connection: ServerConnection) -> None:
            first.set_result(await connection.recv())
            await connection.send('{"setupComplete": {}}')
            await connection.wait_closed()

        async with serve(accept, "127.0.0.1", 0, ssl=_server_tls()) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            client = genai_client(f"https://127.0.0.1:{port}")
            async with client.aio.live.connect(model=MODEL, config=setup):
                body: Json = json.loads(await first)
            client.close()
        return body

    def close(self) -> None:
        """Closes the clients."""
        for client in self._clients.values():
            if hasattr(client, "close"):
                client.close()


def _server_tls() -> ssl.SSLContext:
    """Returns TLS for a server on loopback: sessions of Gemini Live are never opened without."""
    from tests.support.certificates import Authority

    pair = Authority().server("127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(pair.certificate + pair.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


@contextmanager
def capturing() -> Iterator[Capture]:
    """Runs the server and yields what sends to it."""
    bodies: list[Json] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # clients keep their connection

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = b'{"error": {"message": "only what was sent matters"}}'
            self.send_response(400)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    capture = Capture(f"http://127.0.0.1:{server.server_address[1]}", bodies)
    try:
        yield capture
    finally:
        capture.close()
        server.shutdown()
        server.server_close()
        thread.join()


async def _listed_by_mcp(tools: Iterable[Mapping[str, Any]]) -> Json:
    """Returns the answer to `tools/list` as the SDK's client hands it to its program."""
    from mcp.client.session import ClientSession
    from mcp.shared.memory import create_client_server_memory_streams
    from mcp.shared.message import SessionMessage
    from mcp.types import JSONRPCResponse

    initialized = {
        "protocolVersion": "2025-11-25",
        "capabilities": {"tools": {}},
        "serverInfo": {"name": "bus", "version": "1"},
    }
    results: dict[str, Json] = {"initialize": initialized, "tools/list": {"tools": list(tools)}}
    async with create_client_server_memory_streams() as (client_streams, (requests, answers)):

        async def serve() -> None:
            async for request in requests:
                message: Any = getattr(request, "message", None)
                if getattr(message, "id", None) is not None:
                    answer = JSONRPCResponse(jsonrpc="2.0", id=message.id, result=results[message.method])
                    await answers.send(SessionMessage(answer))

        serving = asyncio.create_task(serve())
        async with ClientSession(*client_streams) as session:
            await session.initialize()
            listed = await session.list_tools()
        serving.cancel()
    body: Json = listed.model_dump(mode="json", by_alias=True, exclude_none=True)
    return body


def _flat_or_nested(body: Json) -> Iterator[SentTool]:
    """Yields the tools of all who speak as OpenAI does, and of Ollama."""
    for each in body.get("session", body).get("tools", ()):
        function = each.get("function", each)
        yield SentTool(function["name"], function.get("description") or "", function.get("parameters"), each)


def _of_anthropic(body: Json) -> Iterator[SentTool]:
    for each in body.get("tools", ()):
        yield SentTool(each["name"], each.get("description", ""), each["input_schema"], each)


def _of_gemini(body: Json) -> Iterator[SentTool]:
    for group in body.get("setup", body).get("tools", ()):
        for each in group["functionDeclarations"]:
            schema = each.get("parameters_json_schema", each.get("parameters"))
            yield SentTool(each["name"], each.get("description", ""), schema, each)


def _of_mcp(body: Json) -> Iterator[SentTool]:
    for each in body["tools"]:
        yield SentTool(each["name"], each.get("description", ""), each["inputSchema"], each)


_TOOLS: dict[str, Callable[[Json], Iterator[SentTool]]] = {
    "anthropic": _of_anthropic,
    "gemini": _of_gemini,
    "gemini-live": _of_gemini,
    "mcp": _of_mcp,
}
