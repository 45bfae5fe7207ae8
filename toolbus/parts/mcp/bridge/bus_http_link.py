"""Connects a bridge with the HTTP endpoint of a bus: for a bus without a socket, or at a given address.

Each message is a POST on a thread of its own; a legacy client's notifications come over one GET. It is imported only
when it is needed, since `http.client` takes as much memory as the rest of the bridge.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from toolbus.common.local_users import server_owner
from toolbus.parts.mcp.bridge.bridge_socket import ATTACH
from toolbus.parts.mcp.bridge.links import NoBus, TakeEnd, TakeLine, log, params_of
from toolbus.parts.mcp.messages import headers as mcp_headers
from toolbus.parts.mcp.messages.eras import META_VERSION, NEWEST

Json = dict[str, Any]

CONNECT_SECONDS = 5.0
RESUME_SECONDS = 0.5  # before a stream is resumed: the bus closes long ones, to be polled
MAX_RESUMES = 5  # of one stream
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_EVENTS = "text/event-stream"


class BusHttpLink:
    """The endpoint of a bus.

    Args:
        url: of the endpoint, without a profile.
        moves: whether the next connection leads to another bus while this one drains.

    Raises:
        NoBus: no bus answers there.
    """

    def __init__(self, url: str, take: TakeLine, end: TakeEnd, *, moves: bool = False) -> None:
        self.where = url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise NoBus(f"{url} is not the address of an endpoint: it looks like http://127.0.0.1:48911/mcp")
        self._parts = parts
        self._path = parts.path.rstrip("/") or "/mcp"
        self._take = take
        self._end = end
        self._moves = moves
        self._lock = threading.Lock()
        self._ended = False
        self._session = ""  # the session of a legacy client; "" before its handshake
        self._version = ""  # the protocol version of that session
        self._settled = threading.Event()  # cleared while that handshake is pending: what follows needs its session
        self._settled.set()
        self.running: dict[str, tuple[http.client.HTTPConnection, Json]] = {}  # by id of request, with the request
        self.unsent: set[str] = set()  # ids of requests that were not connected yet
        self._marks: dict[str, dict[str, tuple[str, ...]]] = {}  # arguments that go into headers, by tool
        try:
            self._connect().close()
        except OSError as error:
            raise NoBus(f"{url}: {error.strerror or error}") from None

    def send(self, line: bytes) -> None:
        """Sends a message, without waiting for its answer."""
        message: Json = json.loads(line)
        params, method = params_of(message), message.get("method", "")
        if method == "initialize":
            self._settled.clear()
        if method == ATTACH:
            self._attach(message["id"], params.get("profile") or "")
            return
        if method == "notifications/cancelled":
            id = json.dumps(params.get("requestId"))
            with self._lock:
                self.unsent.discard(id)
                running = self.running.pop(id, None)
            if running is not None and _is_modern(running[1]):
                _shut(running[0])  # the closed connection cancels the request
                return
        if method == "notifications/initialized" or "id" not in message or not method:
            self._exchange(line, message)  # in the order of the client
            if method == "notifications/initialized":
                self._start(self._listen)
            return
        self._plan(message)
        self._start(self._exchange, line, message)

    def _plan(self, request: Json) -> None:
        """Notes a request that is about to be sent.

        Raises:
            ConnectionError: the connection has ended.
        """
        with self._lock:
            if self._ended:
                raise ConnectionError("the bus has disconnected")
            self.unsent.add(json.dumps(request["id"]))

    def leave(self, why: str) -> bool:
        """Ends the connection for further requests, if a new one leads to another bus; returns whether it does."""
        if self._moves:
            self._gone(why)
        return self._moves

    def close(self) -> None:
        """Closes the connection; pending requests get no answer."""
        self._ended = True
        with self._lock:
            running, self.running = list(self.running.values()), {}
        for connection, _ in running:
            _shut(connection)

    def _start(self, work: Any, *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="request", daemon=True).start()

    def _attach(self, id: str, profile: str) -> None:
        """Checks that the profile exists, with a request to its endpoint."""
        if profile:
            self._path = f"{self._path}/{profile}"
        meta = {META_VERSION: NEWEST, "io.modelcontextprotocol/clientCapabilities": {}}
        request = {"jsonrpc": "2.0", "id": id, "method": "server/discover", "params": {"_meta": meta}}
        self._plan(request)
        self._exchange(json.dumps(request).encode(), request)
        if self._ended:
            raise ConnectionError("the bus has disconnected")

    def _connect(self) -> http.client.HTTPConnection:
        """Connects; on this machine only to a program of this user or root.

        Raises:
            OSError: nothing listens there, or a program of another user.
        """
        host, is_plain = self._parts.hostname or "", self._parts.scheme == "http"
        kind = http.client.HTTPConnection if is_plain else http.client.HTTPSConnection
        connection = kind(host, self._parts.port, timeout=CONNECT_SECONDS)
        connection.connect()
        if is_plain and host in LOOPBACK:
            owner = server_owner(connection.sock.getsockname()[:2], connection.sock.getpeername()[:2])
            if owner not in (None, 0, os.geteuid()):
                connection.close()
                raise ConnectionRefusedError(f"it belongs to the user with uid {owner}")
        connection.sock.settimeout(None)
        return connection

    def _headers(self, message: Json) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": f"application/json, {_EVENTS}"}
        params, method = params_of(message), message.get("method", "")
        version = params_of(params, "_meta").get(META_VERSION)
        if not version:
            if self._session and method != "initialize":
                headers |= {mcp_headers.SESSION: self._session, mcp_headers.VERSION: self._version}
            return headers
        headers |= {mcp_headers.VERSION: str(version), mcp_headers.METHOD: method}
        name = params.get(mcp_headers.NAMED_BY.get(method, ""))
        if isinstance(name, str):
            headers[mcp_headers.NAME] = mcp_headers.write_value(name)
        if method == "tools/call" and name in self._marks:
            headers |= mcp_headers.param_headers(self._marks[name], params_of(params, "arguments"))
        return headers

    def _exchange(self, line: bytes, message: Json) -> None:
        """Makes one POST, and passes its answer on."""
        id = json.dumps(message.get("id"))
        is_request = "method" in message and "id" in message
        begins = message.get("method") == "initialize"
        if not begins and not _is_modern(message):
            self._settled.wait(CONNECT_SECONDS)
        try:
            connection = self._connect()
        except OSError as error:
            self._gone(str(error))
            return
        with self._lock:
            if is_request and (self._ended or id not in self.unsent):  # another bus gets it, or it was cancelled
                connection.close()
                return
            if is_request:
                self.unsent.discard(id)
                self.running[id] = connection, message
        try:
            try:
                connection.request("POST", self._path, line, self._headers(message))
                response = connection.getresponse()
                if begins and (session := response.getheader(mcp_headers.SESSION)):
                    self._session = session
                self._read(response, message)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            with self._lock:
                was_pending = self.running.pop(id, None) is not None
            if not is_request or was_pending:
                self._gone(str(error) or type(error).__name__)
        finally:
            with self._lock:
                self.running.pop(id, None)
            if begins:
                self._settled.set()

    def _read(self, response: http.client.HTTPResponse, message: Json) -> None:
        if response.getheader("Content-Type", "").startswith(_EVENTS):
            last, answered = self._events(response, message)
            for _ in range(MAX_RESUMES):
                if answered or not last or not self._session:
                    break
                time.sleep(RESUME_SECONDS)
                if not self._is_pending(message):
                    return
                before = last
                last, answered = self._resume(last, message)
                last = last or before
            if not answered and self._is_pending(message):
                raise ConnectionError("the stream of a request has ended without its answer")
            return
        body = response.read()
        if not body.strip():
            return
        answer = json.loads(body)
        if answer.get("id") is None and "id" in message:
            answer["id"] = message["id"]  # the bus could not read the id, or knows neither session nor profile
        self._learn(message, answer)
        self._take(json.dumps(answer).encode())

    def _is_pending(self, message: Json) -> bool:
        """Tells whether a request is not cancelled."""
        with self._lock:
            return json.dumps(message.get("id")) in self.running

    def _resume(self, last: str, message: Json) -> tuple[str, bool]:
        connection = self._connect()
        try:
            headers = {**self._headers({}), "Accept": _EVENTS, "Last-Event-ID": last}
            connection.request("GET", self._path, headers=headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ConnectionError(f"the stream of a request was lost: HTTP {response.status}")
            return self._events(response, message)
        finally:
            connection.close()

    def _events(self, response: http.client.HTTPResponse, message: Json) -> tuple[str, bool]:
        """Passes on the events of a stream; returns the last event's id, and whether the answer was among them."""
        data: list[bytes] = []
        last, answered = "", False
        for raw in response:
            field, _, value = raw.rstrip(b"\r\n").partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data.append(value)
            elif field == b"id":
                last = value.decode("latin-1")
            elif not raw.strip() and data:
                text, data = b"\n".join(data), []
                if not text.strip():
                    continue
                event = json.loads(text)
                if "method" not in event and event.get("id") == message.get("id"):
                    answered = True
                    self._learn(message, event)
                self._take(json.dumps(event).encode())
        return last, answered

    def _learn(self, message: Json, answer: Json) -> None:
        """Stores the parts of an answer that later requests need: the session's version, headers of tools."""
        result = answer.get("result")
        if not isinstance(result, dict):
            return
        if message.get("method") == "initialize":
            self._version = str(result.get("protocolVersion", ""))
            self._settled.set()
        elif message.get("method") == "tools/list":
            for tool in result.get("tools", ()):
                with contextlib.suppress(ValueError):
                    self._marks[tool["name"]] = mcp_headers.marked(tool.get("inputSchema") or {})

    def _listen(self) -> None:
        """Passes on the notifications of a legacy session until the bus disconnects."""
        last = ""
        while not self._ended:
            try:
                connection = self._connect()
                try:
                    headers = {**self._headers({}), "Accept": _EVENTS, **({"Last-Event-ID": last} if last else {})}
                    connection.request("GET", self._path, headers=headers)
                    response = connection.getresponse()
                    if response.status != 200:
                        log(f"the bus at {self.where} gives no notifications: HTTP {response.status}")
                        return
                    last = self._events(response, {"id": object()})[0] or last
                finally:
                    connection.close()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._gone(str(error) or type(error).__name__)
                return
            if not self._ended:
                self._gone("the bus has closed the stream of notifications")
                return

    def _gone(self, why: str) -> None:
        """Ends the connection. The bus still answers what it runs, except streams of changes: the next one has them."""
        with self._lock:
            self._ended = True
            listens = [id for id, (_, each) in self.running.items() if each["method"] == "subscriptions/listen"]
            connections = [self.running.pop(id)[0] for id in listens]
        for connection in connections:
            _shut(connection)
        self._end(self, why)


def _is_modern(message: Json) -> bool:
    return META_VERSION in params_of(params_of(message), "_meta")


def _shut(connection: http.client.HTTPConnection) -> None:
    """Ends a connection that another thread reads."""
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(2)
