"""Holds one client and the bus that there is at the moment.

A client starts a bridge as it starts any server, often before the bus runs, and keeps it while buses come and go. So
the bridge answers the handshake and `ping` itself where no bus does, says in the instructions why there are no tools,
and tells the client that lists have changed as soon as a bus is there. A bus that comes back is told what the client
had said before. Requests that were on their way to a bus that went fail: nobody knows what became of them.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from toolbus.mcp.eras import META_SUBSCRIPTION, META_VERSION
from toolbus.mcp_bridge import own_answers
from toolbus.mcp_bridge.links import ATTACH, Link, NoBus, TakeEnd, TakeLine, log

Json = dict[str, Any]

HANDSHAKE_SECONDS = 0.9  # a client gets an answer to its handshake within 1 s, whatever the bus does
WAIT_SECONDS = 10.0  # how long requests wait for a bus that was there a moment ago: it may restart
CONNECT_SECONDS = 5.0  # for a bus to answer the bridge's own requests
FIRST_PAUSE, MAX_PAUSE = 0.05, 1.0  # between two attempts to find a bus
END_SECONDS = 2.0  # for answers that are on their way when the client has closed its end
TakeAnswer = Callable[[Json], None]

_OWN = "toolbus-bridge-"  # begins the ids of requests that the bridge makes itself


@dataclass(slots=True)
class PendingRequest:
    """A request of the client that is not answered yet.

    Attributes:
        line: as it came.
        message: the same, read.
        deadline: until when it waits for a bus; by the clock.
    """

    line: bytes
    message: Json
    deadline: float = 0.0

    @property
    def modern(self) -> bool:
        """Whether it speaks 2026-07-28."""
        meta = (self.message.get("params") or {}).get("_meta")
        return isinstance(meta, dict) and META_VERSION in meta


class OwnRequests:
    """What the bridge itself asks buses: the handshakes that it passes on and repeats."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = iter(range(1, sys.maxsize))
        self._pending: dict[str, TakeAnswer] = {}  # by id

    def __len__(self) -> int:
        return len(self._pending)

    def send(self, link: Link, method: str, params: Json, take: TakeAnswer) -> None:
        """Sends a request, whose answer is an object with `result` or `error`.

        Raises:
            OSError: the connection has ended.
        """
        with self._lock:
            id = f"{_OWN}{next(self._numbers)}"
            self._pending[id] = take
        try:
            link.send(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode())
        except OSError:
            with self._lock:
                self._pending.pop(id, None)
            raise

    def ask(self, link: Link, method: str, params: Json) -> Json:
        """Sends a request and returns its answer.

        Raises:
            OSError: the connection has ended.
            NoBus: the bus does not answer.
        """
        answers: list[Json] = []
        answered = threading.Event()

        def take(answer: Json) -> None:
            answers.append(answer)
            answered.set()

        self.send(link, method, params, take)
        if not answered.wait(CONNECT_SECONDS):
            raise NoBus(f"the bus at {link.where} does not answer")
        return answers[0]

    def answered(self, message: Json) -> bool:
        """Takes an answer; returns whether it is one of the bridge's requests."""
        id = message.get("id")
        if not isinstance(id, str) or not id.startswith(_OWN):
            return False
        with self._lock:
            take = self._pending.pop(id, None)
        if take is not None:
            take({key: message[key] for key in ("result", "error") if key in message})
        return True

    def fail(self, error: Json) -> bool:
        """Answers all with an error; returns whether there were any."""
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for take in pending:
            take({"error": error})
        return bool(pending)


class Bridge:
    """One client, and the bus that there is at the moment.

    Args:
        connect: makes a connection, which gives its lines to the first argument and its end to the second.
        write: gives the client a line.
        profile: what the client sees.
    """

    def __init__(
        self,
        connect: Callable[[TakeLine, TakeEnd], Link],
        write: Callable[[bytes], None],
        profile: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._write = write
        self._profile = profile
        self._clock = clock
        self._lock = threading.RLock()
        self._wake = threading.Event()  # set where the thread that connects has something to do
        self._link: Link | None = None  # None while there is no bus
        self._lost_at: float | None = None  # when the last bus went; None before the first
        self._why = "no bus was found yet"  # why there is none
        self._requests: dict[str, PendingRequest] = {}  # that the bus has, by id as JSON
        self._waiting: list[PendingRequest] = []  # for a bus
        self._own = OwnRequests()
        self._initialize: Json | None = None  # the params of the client's handshake; None before one
        self._repeated: dict[str, PendingRequest] = {}  # what a new bus is told again, by what it is about
        self._acknowledged: set[str] = set()  # ids of `subscriptions/listen` whose client was told that they are open
        self._swallow: set[str] = set()  # those whose next acknowledgement it is not told
        self._known: dict[str, Json] = {}  # the last answers to the handshake, by method
        self._offline = False  # whether the client was answered without a bus
        self._ended = False

    # -- the client ----------------------------------------------------------------------------------------------

    def take(self, line: bytes) -> None:
        """Takes a line of the client."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._reply(
                {
                    "id": None,
                    "error": {"code": -32700, "message": "the line is not a JSON object: send one message a line"},
                }
            )
            return
        request = PendingRequest(line, message)
        method = message.get("method")
        if method in ("initialize", "server/discover") and "id" in message:
            self._shake_hands(request, method)
        elif method == "ping" and "id" in message and not request.modern:
            self._reply({"id": message["id"], "result": {}})
        else:
            self._remember(request)
            self._pass_on(request)

    def _shake_hands(self, request: PendingRequest, method: str) -> None:
        """Answers a handshake: as the bus does, or as it is known where the bus takes too long or there is none."""
        id, params = request.message["id"], request.message.get("params") or {}
        answered = threading.Event()  # by whoever comes first

        def answer(answer: Json | None) -> None:
            with self._lock:
                if answered.is_set():
                    return
                answered.set()
                if answer is not None and "result" in answer:
                    self._known[method] = answer["result"]
                if answer is None:
                    self._offline = True
                    answer = {"result": own_answers.handshake(method, params, self._known.get(method, {}), self._why)}
            self._reply({**answer, "id": id})

        with self._lock:
            if method == "initialize":
                self._initialize = params
            link = self._link
        if link is None:
            answer(None)
            return
        try:
            self._own.send(link, method, params, answer)
        except OSError as error:
            self.ended(link, str(error))
            answer(None)
            return
        timer = threading.Timer(HANDSHAKE_SECONDS, answer, (None,))
        timer.daemon = True
        timer.start()

    def _remember(self, request: PendingRequest) -> None:
        """Keeps what a bus that comes later has to be told again."""
        message, params = request.message, request.message.get("params") or {}
        with self._lock:
            match message.get("method"):
                case "notifications/initialized" | "logging/setLevel" as method:
                    self._repeated[method] = request
                case "resources/subscribe":
                    self._repeated[f"resource {params.get('uri')}"] = request
                case "resources/unsubscribe":
                    self._repeated.pop(f"resource {params.get('uri')}", None)
                case "notifications/cancelled":
                    id = json.dumps(params.get("requestId"))
                    self._requests.pop(id, None)
                    self._acknowledged.discard(id)
                    self._waiting = [each for each in self._waiting if json.dumps(each.message.get("id")) != id]

    def _pass_on(self, request: PendingRequest) -> None:
        with self._lock:
            link, message = self._link, request.message
            is_request = "method" in message and "id" in message
            if link is None:
                if not is_request:
                    return
                request.deadline = (self._lost_at + WAIT_SECONDS) if self._lost_at is not None else 0.0
                if message["method"] == "subscriptions/listen":
                    self._listen_offline(request)
                elif request.deadline > self._clock():
                    self._waiting.append(request)
                    self._wake.set()
                else:
                    self._answer_offline(request)
                return
            if is_request:
                self._requests[json.dumps(message["id"])] = request
        try:
            link.send(request.line)
        except OSError as error:
            self.ended(link, str(error))

    def _listen_offline(self, request: PendingRequest) -> None:
        """Opens a stream of notifications that the next bus fills."""
        id = json.dumps(request.message["id"])
        self._offline = True
        self._requests[id] = request
        self._acknowledged.add(id)
        wanted = (request.message.get("params") or {}).get("notifications") or {}
        self._tell(request, "notifications/subscriptions/acknowledged", notifications=wanted)

    def _answer_offline(self, request: PendingRequest) -> None:
        """Answers a request where there is no bus."""
        self._offline = True
        message, method = request.message, request.message["method"]
        if method in own_answers.LISTS:
            self._reply({"id": message["id"], "result": own_answers.empty_list(method, request.modern)})
        else:
            text = f"There is no bus: {self._why}. Start one with toolbus serve; nothing has run."
            self._fail(request, text, "NOT_DISPATCHED", retry_safe=True)

    def _fail(self, request: PendingRequest, text: str, stage: str, *, retry_safe: bool) -> None:
        """Answers a request that no bus answers."""
        self._reply(own_answers.failure(request.message, request.modern, text, stage, retry_safe=retry_safe))

    def _tell(self, listen: PendingRequest, method: str, **params: Any) -> None:
        params["_meta"] = {META_SUBSCRIPTION: listen.message["id"]}
        self._reply({"method": method, "params": params})

    def _reply(self, message: Json) -> None:
        self._write(json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode() + b"\n")

    def finish(self) -> None:
        """Waits a moment for what the client still expects, and ends: it has closed its end."""
        give_up = time.monotonic() + END_SECONDS
        while time.monotonic() < give_up:
            with self._lock:
                open_ = [id for id in self._requests if id not in self._acknowledged]
                if not open_ and not self._own and not self._waiting:
                    break
            time.sleep(0.01)
        with self._lock:
            self._ended = True
            link = self._link
        if link is not None:
            link.close()

    # -- the bus -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Finds a bus, and the next one where it goes; runs on a thread of its own."""
        pause = FIRST_PAUSE
        while not self._ended:
            self._expire()
            if self._link is None:
                try:
                    self._open()
                    pause = FIRST_PAUSE
                except NoBus as none:
                    self._why = str(none)
                    pause = min(pause * 2, MAX_PAUSE)
            self._wake.clear()
            if self._link is None:
                time.sleep(pause)
            else:
                self._wake.wait()

    def connect_once(self) -> None:
        """Finds a bus if there is one; what there is not is looked for by `run`."""
        try:
            self._open()
        except NoBus as none:
            self._why = str(none)

    def ended(self, link: Link, why: str) -> None:
        """Takes that a connection has ended."""
        with self._lock:
            if self._link is not link:
                return
            self._link, self._lost_at, self._why = None, self._clock(), f"the bus at {link.where} has gone: {why}"
            lost = [each for id, each in self._requests.items() if not self._is_open_listen(id)]
            self._requests = {id: each for id, each in self._requests.items() if self._is_open_listen(id)}
        self._own.fail({"code": own_answers.INTERNAL, "message": why})
        for each in lost:
            self._fail(
                each, f"{self._why}. It had this request; how far it got is not known", "UNKNOWN", retry_safe=False
            )
        log(self._why)
        self._wake.set()

    def from_bus(self, line: bytes) -> None:
        """Takes a line of the bus."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            log(f"the bus sent a line that is not JSON: {line[:64]!r}")
            return
        id = message.get("id")
        if "method" in message:
            if self._is_swallowed(message):
                return
        elif self._own.answered(message):
            return
        elif id is None and "error" in message:
            if self._own.fail(message["error"]):  # it refuses the connection
                return
        else:
            with self._lock:
                key = json.dumps(id)
                if self._requests.pop(key, None) is None:
                    return  # it was answered by the bridge, or cancelled
                self._acknowledged.discard(key)
        self._write(line if line.endswith(b"\n") else line + b"\n")

    def _is_open_listen(self, id: str) -> bool:
        return self._requests[id].message.get("method") == "subscriptions/listen"

    def _is_swallowed(self, message: Json) -> bool:
        """Tells whether a notification is one that the client has had already: an acknowledgement, after a restart."""
        if message["method"] != "notifications/subscriptions/acknowledged":
            return False
        key = json.dumps(((message.get("params") or {}).get("_meta") or {}).get(META_SUBSCRIPTION))
        with self._lock:
            self._acknowledged.add(key)
            if key in self._swallow:
                self._swallow.discard(key)
                return True
        return False

    def _open(self) -> None:
        """Connects, and tells the bus what the client had said before.

        Raises:
            NoBus: there is none.
        """
        link = self._connect(self.from_bus, self.ended)
        try:
            attached = self._own.ask(link, ATTACH, {"profile": self._profile})
            if "error" in attached:
                raise NoBus(f"the bus at {link.where} refuses: {attached['error'].get('message')}")
            if self._initialize is not None:
                begun = self._own.ask(link, "initialize", self._initialize)
                if "result" in begun:
                    self._known["initialize"] = begun["result"]
            with self._lock:
                for request in self._repeated.values():
                    self._repeat(link, request)
                listens = [request for id, request in self._requests.items() if self._is_open_listen(id)]
                self._swallow |= {json.dumps(each.message["id"]) for each in listens} & self._acknowledged
                for request in listens:
                    link.send(request.line)
                waiting, self._waiting = self._waiting, []
                self._link = link
                tells = self._offline or self._lost_at is not None
                self._offline = False
        except OSError as error:
            link.close()
            raise NoBus(f"{link.where}: {error}") from None
        except NoBus:
            link.close()
            raise
        log(f"connected to the bus at {link.where}")
        if tells:
            self._tell_changes(listens)
        for request in waiting:
            self._pass_on(request)

    def _repeat(self, link: Link, request: PendingRequest) -> None:
        """Tells a bus what the client had told the one before; the answer is not the client's."""
        message = request.message
        if "id" in message:
            self._own.send(link, message["method"], message.get("params") or {}, lambda answer: None)
        else:
            link.send(request.line)

    def _tell_changes(self, listens: Iterable[PendingRequest]) -> None:
        """Tells the client that lists may have changed."""
        if self._initialize is not None:
            capabilities = self._known.get("initialize", {}).get("capabilities", {})
            for kind in own_answers.CHANGES:
                if (capabilities.get(kind) or {}).get("listChanged"):
                    self._reply({"method": f"notifications/{kind}/list_changed"})
        for listen in listens:
            wanted = (listen.message.get("params") or {}).get("notifications") or {}
            for kind, name in own_answers.CHANGES.items():
                if wanted.get(name):
                    self._tell(listen, f"notifications/{kind}/list_changed")

    def _expire(self) -> None:
        """Answers requests that have waited for a bus long enough."""
        now = self._clock()
        with self._lock:
            expired = [each for each in self._waiting if each.deadline <= now]
            self._waiting = [each for each in self._waiting if each.deadline > now]
            for each in expired:
                self._answer_offline(each)
