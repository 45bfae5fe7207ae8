"""A legacy plugin that can be away, and what tests of kept registrations ask of a bus."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import httpx

from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.common.local_users import listener_id
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb


class CallbackPlugin:
    """A port that belongs to the test for as long as the block lasts, and answers only while it is open.

    It runs on threads of its own, so that it answers whatever the test waits for. Every connection and every byte that
    arrives is counted: a probe must not send any.

    Attributes:
        connections: how many were accepted.
        requests: the head (lower case) and the body of each.
        answers: status line and body of what it answers at a path, where that is not the arguments of the call.
        prove: what it answers to a GET: its headers, made of the head of the request.
    """

    def __init__(self) -> None:
        self.connections = 0
        self.bytes = 0
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, tuple[str, bytes]] = {}
        self.prove: Callable[[str], str] = lambda head: ""
        self._listener = self._bound(0)  # bound and not listening: refuses, and nobody else gets the port
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()  # connections
        self._threads: list[threading.Thread] = []

    @staticmethod
    def _bound(port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        return listener

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        self._listener.close()

    def url(self, path: str = "run", user: str = "") -> str:
        """Where a tool of this plugin is called."""
        return f"http://{user}127.0.0.1:{self.port}/{path}"

    @property
    def listener_id(self) -> str:
        """The kernel's id of the socket that listens now."""
        return listener_id(("127.0.0.1", self.port))

    def come(self) -> Self:
        """Accepts connections from now on."""
        self._listener.listen(64)
        self._start(self._accept)
        return self

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Neither accepts nor refuses: the queue of its connections is full."""
        self._listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        try:
            for each in waiting:
                each.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    each.connect(("127.0.0.1", self.port))
            yield
        finally:
            for each in waiting:
                each.close()

    def leave(self) -> None:
        """Accepts no more and drops what is open."""
        with contextlib.suppress(OSError):  # it never listened
            self._listener.shutdown(socket.SHUT_RDWR)
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
        self._threads.clear()
        self._listener.close()
        self._listener = self._bound(self.port)

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # shut down
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.add(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            heard = b""
            while piece := connection.recv(65536):
                self.bytes += len(piece)
                heard += piece
                head, end, rest = heard.partition(b"\r\n\r\n")
                if not end:
                    continue
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                if len(rest) >= length:
                    connection.sendall(self._answer(head.decode(), rest[:length]))
                    heard = rest[length:]
        self._open.discard(connection)

    def _answer(self, head: str, body: bytes) -> bytes:
        self.requests.append((head.lower(), json.loads(body or b"{}")))
        if head.startswith("GET "):
            return f"HTTP/1.1 204 No Content\r\n{self.prove(head)}\r\n".encode()
        output = json.dumps({"output": self.requests[-1][1]["arguments"]}).encode()
        status, said = self.answers.get(head.split(" ")[1].removeprefix("/"), ("200 OK", output))
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(said)}\r\n\r\n".encode() + said


class Legacy:
    """Asks a bus as plugins and operators do, by REST and by gRPC; refusals are failures of the test."""

    def __init__(self, *, http: str | None = None, grpc_address: str = "") -> None:
        self._http = (
            httpx.AsyncClient(base_url=f"http://{http}", trust_env=False, verify=False, timeout=WAIT_SECONDS)
            if http
            else None
        )
        self._channel = grpc.aio.insecure_channel(grpc_address, (("grpc.use_local_subchannel_pool", 1),))
        self.stub: Any = rpc.ToolBusServiceStub(self._channel)

    @classmethod
    def of(cls, bus: Bus) -> Self:
        """Asks a bus of this process."""
        return cls(http=bus.http_address, grpc_address=bus.grpc_addresses[0])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)
        if self._http is not None:
            await self._http.aclose()

    async def post(self, verb: str, **body: Any) -> httpx.Response:
        """Posts to the contract's endpoint of a verb."""
        assert self._http is not None
        return await self._http.post(f"/api/tools/{verb}", json=body)

    async def send(self, verb: str, body: bytes, content_type: str) -> httpx.Response:
        """Posts bytes to the contract's endpoint of a verb."""
        assert self._http is not None
        return await self._http.post(f"/api/tools/{verb}", content=body, headers={"Content-Type": content_type})

    async def ask(self, verb: str, **body: Any) -> dict[str, Any]:
        """As `post`; it has to be done."""
        answer = await self.post(verb, **body)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        assert said["ok"], said
        return said

    async def listed(self) -> dict[str, list[str]]:
        """The names that are offered, by role."""
        assert self._http is not None
        said = (await self._http.get("/api/tools")).json()
        return {role: [tool["name"] for tool in tools] for role, tools in said["tools_by_role"].items()}

    async def register(self, source: str, *tools: Any) -> wire.RegisterResponse:
        """Registers callback tools over gRPC."""
        answer: wire.RegisterResponse = await self.stub.Register(wire.RegisterRequest(source=source, tools=tools))
        return answer


Start = Callable[..., AbstractAsyncContextManager[Bus]]


def starting(folder: Path) -> Start:
    """Returns what starts buses of some roles on a data directory, one after the other."""

    def start(*roles: str, **settings: Any) -> AbstractAsyncContextManager[Bus]:
        fixed: dict[str, Any] = {"data_dir": folder, "http": "127.0.0.1:0", "grace_seconds": 0}
        return running_bus(**{**fixed, "roles": roles or ("A", "B"), **settings})

    return start


def callback_tool(name: str, plugin: CallbackPlugin, **fields: Any) -> pb.Tool:
    """A tool to be registered over gRPC."""
    return pb.Tool(name=name, callback_url=plugin.url(name), **fields)


def catalog(bus: Bus, *, away: bool = True) -> dict[str, list[tuple[str, str]]]:
    """Name and source of each tool, by role and in order; those that are away too."""
    return {
        role: [(item.tool.name, item.source) for item in bus.list(role, include_offline=away)]
        for role in bus.registry.roles
    }


def names(bus: Bus, role: str | None = None, *, away: bool = True) -> list[str]:
    """The names of the catalog, in order."""
    return [item.tool.name for item in bus.list(role, include_offline=away)]


def no_text_has(secret: str, texts: Iterable[str]) -> None:
    """Checks that a secret stands nowhere."""
    for text in texts:
        assert secret not in text, text
