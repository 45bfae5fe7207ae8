"""Connects one client with the bus that currently runs, across restarts of the bus.

A client starts a bridge like any other server, often before the bus runs. So the bridge answers the handshake and
`ping` itself while no bus does, gives the reason in the instructions, and notifies the client of changed lists as soon
as it has connected to a bus. It repeats the client's handshake and subscriptions to each new bus. Calls that a bus
refuses since it drains, and requests that no bus can have read, wait for the next one; those that a bus had when its
connection ended, and does not answer all the same, fail with stage UNKNOWN.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from toolbus.parts.mcp.bridge import own_answers
from toolbus.parts.mcp.bridge.bridge_socket import ATTACH
from toolbus.parts.mcp.bridge.links import Link, NoBus, TakeEnd, TakeLine, log, params_of
from toolbus.parts.mcp.messages.eras import LIST_CHANGES, META_SUBSCRIPTION, META_VERSION

Json = dict[str, Any]

HANDSHAKE_SECONDS = 0.9  # a client gets an answer to its handshake within 1 s, even if the bus does not answer
WAIT_SECONDS = 10.0  # how long requests wait after a bus has disconnected: it may restart
CONNECT_SECONDS = 5.0  # how long a bus may take to answer the bridge's own requests
FIRST_PAUSE, MAX_PAUSE = 0.05, 1.0  # seconds between two attempts to connect to a bus
END_SECONDS = 2.0  # how long pending answers may take after the client has closed its end
TakeAnswer = Callable[[Json], None]

_OWN = "toolbus-bridge-"  # prefix of the ids of the bridge's own requests


@dataclass(slots=True)
class PendingRequest:
    """A message of the client; a request is pending until it is answered.

    Attributes:
        line: the text of the message.
        message: the parsed message.
        deadline: until when it waits for a bus; by the clock.
        link: by which it was sent last; None before.
    """

    line: bytes
    message: Json
    deadline: float = 0.0
    link: Link | None = None

    @property
    def method(self) -> str:
        """Its method; "" in a response."""
        method = self.message.get("method")
        return method if isinstance(method, str) else ""

    @property
    def params(self) -> Json:
        """Its params; empty if they are not an object."""
        return params_of(self.message)

    @property
    def key(self) -> str:
        """Its id as JSON: 1 and "1" are different ids."""
        return json.dumps(self.message.get("id"))

    @property
    def modern(self) -> bool:
        """Whether it is of protocol 2026-07-28."""
        return META_VERSION in params_of(self.params, "_meta")


class OwnRequests:
    """The bridge's own pending requests to a bus: attach, and handshakes that it passes on or repeats."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = iter(range(1, sys.maxsize))
        self._pending: dict[str, TakeAnswer] = {}  # by id

    def __len__(self) -> int:
        return len(self._pending)

    def send(self, link: Link, method: str, params: Json, take: TakeAnswer) -> None:
        """Sends a request; `take` gets its answer, an object with `result` or `error`.

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
        """Takes a response; returns whether it answers one of the bridge's own requests."""
        id = message.get("id")
        if not isinstance(id, str) or not id.startswith(_OWN):
            return False
        with self._lock:
            take = self._pending.pop(id, None)
        if take is not None:
            take({key: message[key] for key in ("result", "error") if key in message})
        return True

    def fail(self, error: Json) -> bool:
        """Answers all with an error; returns whether any were pending."""
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for take in pending:
            take({"error": error})
        return bool(pending)


class Repeated:
    """The messages of a client that each new bus gets again: they settle its session and its subscriptions.

    Args:
        notify: sends the client a notification.
    """

    def __init__(self, own: OwnRequests, notify: Callable[[Json], None]) -> None:
        self._own = own
        self._notify = notify
        self._requests: dict[str, PendingRequest] = {}  # by subject
        self._unlisted: list[PendingRequest] = []  # subscriptions that the bus refused: no mount lists the resource yet

    def remember(self, request: PendingRequest) -> None:
        uri = request.params.get("uri")
        match request.method:
            case "notifications/initialized" | "logging/setLevel" as method:
                self._requests[method] = request
            case "resources/subscribe":
                self._requests[f"resource {uri}"] = request
            case "resources/unsubscribe":
                self._requests.pop(f"resource {uri}", None)

    def send(self, link: Link) -> None:
        """Sends all to a new bus."""
        self._unlisted = []
        self._send(link, self._requests.values())

    def resources_changed(self, link: Link) -> None:
        """Sends the subscriptions again that the bus refused."""
        refused, self._unlisted = self._unlisted, []
        self._send(link, [each for each in refused if each in self._requests.values()])

    def _send(self, link: Link, requests: Iterable[PendingRequest]) -> None:
        for each in requests:
            if "id" in each.message:  # the client has an answer already, and gets no second one
                self._own.send(link, each.method, each.params, partial(self._answered, each))
            else:
                link.send(each.line)

    def _answered(self, request: PendingRequest, answer: Json) -> None:
        if request.method != "resources/subscribe":
            return
        if "error" in answer:
            self._unlisted.append(request)
        else:  # it may have been updated before
            self._notify({"method": "notifications/resources/updated", "params": {"uri": request.params.get("uri")}})


class Bridge:
    """One client and its connection to a bus.

    Args:
        connect: connects to a bus; calls its first argument with each line, its second when the connection has ended.
        write: sends a line to the client.
        profile: of the client; "" for the default one.
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
        self._wake = threading.Event()  # wakes the thread that connects
        self._link: Link | None = None  # None while no bus is connected
        self._leaving = False  # whether that bus takes no more calls, since it is about to end
        self._lost_at: float | None = None  # when the last connection ended; None before the first
        self._why = "no bus was found yet"  # why no bus is connected
        self._requests: dict[str, PendingRequest] = {}  # those that were sent to the bus, by `key`
        self._waiting: list[PendingRequest] = []  # those that wait for a bus
        self._own = OwnRequests()
        self._initialize: Json | None = None  # the params of the client's `initialize`; None before it
        self._repeated = Repeated(self._own, self._reply)
        self._acknowledged: set[str] = set()  # keys of `subscriptions/listen` that the client has an acknowledgement of
        self._swallow: set[str] = set()  # keys of those whose next acknowledgement is a duplicate
        self._known: dict[str, Json] = {}  # the last results of handshakes, by method
        self._offline = False  # whether the client got an answer while no bus was connected
        self._ended = False

    # -- the client ----------------------------------------------------------------------------------------------

    def take(self, line: bytes) -> None:
        """Takes a line from the client."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            text = "the line is not a JSON object: send one message a line"
            self._reply({"id": None, "error": {"code": -32700, "message": text}})
            return
        request = PendingRequest(line, message)
        method = request.method
        if method in ("initialize", "server/discover") and "id" in message:
            self._shake_hands(request, method)
        elif method == "ping" and "id" in message and not request.modern:
            self._reply({"id": message["id"], "result": {}})
        else:
            self._remember(request)
            self._pass_on(request)

    def _shake_hands(self, request: PendingRequest, method: str) -> None:
        """Answers a handshake as the bus does, or from the last known answer if the bus is missing or too slow."""
        id, params = request.message["id"], request.params
        answered = threading.Event()  # the bus and the timer compete; the first one answers

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
            if link is None:  # answered before the thread that connects can go on, which then sends this handshake
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
        """Stores a message that later buses must get too; forgets what it ends or cancels."""
        with self._lock:
            self._repeated.remember(request)
            if request.method == "notifications/cancelled":
                id = json.dumps(request.params.get("requestId"))
                former = self._requests.pop(id, None)
                if former is not None and former.link is not None and former.link is not self._link:
                    with suppress(OSError):
                        former.link.send(request.line)
                self._acknowledged.discard(id)
                self._waiting = [each for each in self._waiting if each.key != id]

    def _pass_on(self, request: PendingRequest) -> None:
        with self._lock:
            link, message = self._link, request.message
            is_request = "method" in message and "id" in message
            if self._leaving and request.method == "tools/call":
                self._hold(request)
                return
            if link is None:
                if not is_request:
                    return
                request.deadline = (self._lost_at + WAIT_SECONDS) if self._lost_at is not None else 0.0
                if request.method == "subscriptions/listen":
                    self._listen_offline(request)
                elif request.deadline > self._clock():
                    self._waiting.append(request)
                    self._wake.set()
                else:
                    self._answer_offline(request)
                return
            if is_request:
                self._requests[request.key], request.link = request, link
        try:
            link.send(request.line)
        except OSError as error:
            with self._lock:  # it is not there where the end of the link was noticed first, and answered it
                unsent = self._requests.pop(request.key, None) is request
            self.ended(link, str(error))
            if unsent:
                self._pass_on(request)

    def _hold(self, request: PendingRequest) -> None:
        """Has a call wait for the next bus, since this one is about to end."""
        request.deadline = self._clock() + WAIT_SECONDS
        self._waiting.append(request)
        self._wake.set()  # the deadline is watched

    def _listen_offline(self, request: PendingRequest) -> None:
        """Opens a stream of notifications before a bus is connected; the next bus gets the request."""
        self._offline = True
        self._requests[request.key] = request
        self._acknowledged.add(request.key)
        kinds = params_of(request.params, "notifications")
        self._notify(request, "notifications/subscriptions/acknowledged", notifications=kinds)

    def _answer_offline(self, request: PendingRequest) -> None:
        """Answers a request while no bus is connected."""
        self._offline = True
        message, method = request.message, request.method
        if method in own_answers.LISTS:
            self._reply({"id": message["id"], "result": own_answers.empty_list(method, request.modern)})
        else:
            text = f"No bus is connected: {self._why}. Start one with toolbus serve; nothing has run."
            self._fail(request, text, "NOT_DISPATCHED", retry_safe=True)

    def _fail(self, request: PendingRequest, text: str, stage: str, *, retry_safe: bool) -> None:
        """Answers a request with a failure."""
        self._reply(own_answers.failure(request.message, request.modern, text, stage, retry_safe=retry_safe))

    def _notify(self, listen: PendingRequest, method: str, **params: Any) -> None:
        """Sends a notification on the stream of a `subscriptions/listen`."""
        params["_meta"] = {META_SUBSCRIPTION: listen.message["id"]}
        self._reply({"method": method, "params": params})

    def _reply(self, message: Json) -> None:
        self._write(json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode() + b"\n")

    def finish(self) -> None:
        """Waits a moment for pending answers, then closes the connection: the client has closed its end."""
        give_up = time.monotonic() + END_SECONDS
        while time.monotonic() < give_up:
            with self._lock:
                pending = self._requests.keys() - self._acknowledged
                if not pending and not self._own and not self._waiting:
                    break
            time.sleep(0.01)
        with self._lock:
            self._ended = True
            link = self._link
        if link is not None:
            link.close()

    # -- the bus -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Connects to a bus whenever none is connected; runs on a thread of its own."""
        pause = FIRST_PAUSE
        while not self._ended:
            self._expire()
            if self._link is None:
                pause = FIRST_PAUSE if self.connect_once() else min(pause * 2, MAX_PAUSE)
            self._wake.clear()
            if self._link is None:
                time.sleep(pause)
            else:
                self._wake.wait(MAX_PAUSE if self._waiting else None)

    def connect_once(self) -> bool:
        """Tries once to connect to a bus, and returns whether there is one; `run` tries again."""
        try:
            self._open()
        except NoBus as none:
            self._why = str(none)
            return False
        return True

    def ended(self, link: Link, why: str) -> None:
        """Notes that a connection has ended, and fails the requests that its bus had and does not answer."""
        text = f"the bus at {link.where} disconnected: {why}"
        with self._lock:
            if is_news := self._link is link:
                self._leaving = False
                self._link, self._lost_at, self._why = None, self._clock(), text
            mine = [each for each in self._requests.values() if each.link is link and each.key not in link.running]
            over = [each for each in mine if each.method != "subscriptions/listen"]
            for each in over:
                del self._requests[each.key]
        if is_news:
            self._own.fail({"code": own_answers.INTERNAL, "message": why})
            log(text)
            self._wake.set()
        for each in over:
            if each.key in link.unsent:
                self._pass_on(each)
            else:
                unknown = f"{text}. It had this request; how far it got is not known"
                self._fail(each, unknown, "UNKNOWN", retry_safe=False)

    def from_bus(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            log(f"the bus sent a line that is not JSON: {line[:64]!r}")
            return
        id = message.get("id")
        if "method" in message:
            if self._is_swallowed(message):
                return
            if message["method"] == "notifications/resources/list_changed":
                with self._lock, suppress(OSError):  # the next bus gets them all
                    if self._link is not None:
                        self._repeated.resources_changed(self._link)
        elif self._own.answered(message):
            return
        elif id is None and "error" in message:
            if self._own.fail(message["error"]):  # the bus refuses the connection
                return
        else:
            with self._lock:
                key = json.dumps(id)
                request = self._requests.pop(key, None)
                if request is None:
                    return  # the bridge has answered it, or the client has cancelled it
                self._acknowledged.discard(key)
            if own_answers.is_draining(message):
                self._refused(request)
                return
        self._write(line if line.endswith(b"\n") else line + b"\n")

    def _refused(self, request: PendingRequest) -> None:
        """Has a call that a draining bus refuses wait for the next one."""
        link = request.link
        with self._lock:
            if link is not None and link is self._link and not link.leave("it is draining"):
                self._leaving, self._why = True, "the bus is draining, and no other one was found"
                self._hold(request)
                return
        self._pass_on(request)

    def _is_open_listen(self, id: str) -> bool:
        return self._requests[id].method == "subscriptions/listen"

    def _is_swallowed(self, message: Json) -> bool:
        """Tells whether the client has this notification already: an acknowledgement, repeated after a restart."""
        if message["method"] != "notifications/subscriptions/acknowledged":
            return False
        key = json.dumps(params_of(params_of(message), "_meta").get(META_SUBSCRIPTION))
        with self._lock:
            self._acknowledged.add(key)
            if key in self._swallow:
                self._swallow.discard(key)
                return True
        return False

    def _open(self) -> None:
        """Connects, and repeats the client's handshake and subscriptions to the bus.

        Raises:
            NoBus: no bus answers, or it refuses this client.
        """
        link = self._connect(self.from_bus, self.ended)
        try:
            attached = self._own.ask(link, ATTACH, {"profile": self._profile})
            if "error" in attached:
                raise NoBus(f"the bus at {link.where} refuses: {attached['error'].get('message')}")
            settled: Json | None = None  # the handshake that this bus has
            while True:
                if (initialize := self._initialize) is not settled:
                    answer = self._own.ask(link, "initialize", initialize or {})
                    if "result" in answer:
                        self._known["initialize"] = answer["result"]
                    settled = initialize
                with self._lock:
                    if self._initialize is settled:  # else the client has shaken hands meanwhile
                        listens, waiting, lists_changed = self._begin(link)
                        break
        except (OSError, NoBus) as error:
            link.close()
            raise error if isinstance(error, NoBus) else NoBus(f"{link.where}: {error}") from None
        log(f"connected to the bus at {link.where}")
        if lists_changed:
            self._notify_changes(listens)
        for request in waiting:
            self._pass_on(request)

    def _begin(self, link: Link) -> tuple[list[PendingRequest], list[PendingRequest], bool]:
        """Makes a connection the current one; returns open listens, waiting requests, and whether lists may differ."""
        self._repeated.send(link)
        listens = [request for id, request in self._requests.items() if self._is_open_listen(id)]
        self._swallow |= {each.key for each in listens} & self._acknowledged
        for request in listens:
            request.link = link
            link.send(request.line)
        waiting, self._waiting = self._waiting, []
        self._link = link
        lists_changed = self._offline or self._lost_at is not None
        self._offline = False
        return listens, waiting, lists_changed

    def _notify_changes(self, listens: Iterable[PendingRequest]) -> None:
        """Notifies the client that lists may have changed."""
        if self._initialize is not None:
            capabilities = self._known.get("initialize", {}).get("capabilities", {})
            for kind in LIST_CHANGES:
                if (capabilities.get(kind) or {}).get("listChanged"):
                    self._reply({"method": f"notifications/{kind}/list_changed"})
        for listen in listens:
            kinds = params_of(listen.params, "notifications")
            for kind, name in LIST_CHANGES.items():
                if kinds.get(name):
                    self._notify(listen, f"notifications/{kind}/list_changed")

    def _expire(self) -> None:
        """Answers requests whose deadline has passed while they waited for a bus."""
        now = self._clock()
        with self._lock:
            expired = [each for each in self._waiting if each.deadline <= now]
            self._waiting = [each for each in self._waiting if each.deadline > now]
            for each in expired:
                self._answer_offline(each)
