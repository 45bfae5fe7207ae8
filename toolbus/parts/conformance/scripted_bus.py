"""Plays the bus on a real gRPC server: streams and requests wait here for the steps of a scenario.

The rules of every scenario are checked on the way, by `Always`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from toolbus.common.text import refuse_constant
from toolbus.parts.conformance.certificates import server_credentials
from toolbus.parts.conformance.match import Mismatch, items_of, mapped
from toolbus.parts.conformance.proxy import Proxy, reserved
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc

MESSAGE_ITEMS = 128
ITEM_BYTES = 1024 * 1024  # of a message of several items
MESSAGE_BYTES = 16 * 1024 * 1024  # of any message, where the answer to the attach names no other limit
RESULT_BYTES = 4 * 1024 * 1024  # of a result, likewise
ID_CHARACTERS = 128
IDENTITY = ("protocol_version", "source", "instance", "token")  # the same in each attach of a stream
INSTANCE = re.compile(r"[!-~]{16,128}")  # 128 random bits, in any form


class Always:
    """The state of one stream for the checks of every scenario.

    Attributes:
        pending: the ids of calls that the client got and has not answered.
        attached: whether the attach was answered.
    """

    def __init__(self) -> None:
        self.pending: set[str] = set()
        self.attached = False
        self._calls: set[str] = set()  # ids of all calls that the client made here
        self._beats: set[str] = set()  # sequences of heartbeats that are not yet echoed
        self._echoes: set[str] = set()  # sequences of heartbeats with `from_peer` that the bus sent
        self._attach: Mapping[str, Any] = {}  # the first one
        self._drained = False  # whether the client has sent its drain
        self._result_bytes, self._message_bytes = RESULT_BYTES, MESSAGE_BYTES

    def sent(self, message: wire.InvokeResponse) -> None:
        """Records the calls, heartbeats and limits that a message of the bus has for the client."""
        self.pending.update(call.call_id for call in message.calls)
        if message.HasField("heartbeat"):
            (self._echoes if message.heartbeat.from_peer else self._beats).add(str(message.heartbeat.sequence))
        if message.HasField("attached"):
            self.attached = True
            limits = message.attached.limits
            self._result_bytes = limits.result_bytes or RESULT_BYTES
            self._message_bytes = limits.message_bytes or MESSAGE_BYTES

    def message(self, request: wire.InvokeRequest, items: int, number: int) -> tuple[str, str]:
        """Checks a message as a whole; returns the rule that it breaks and why, "" if it breaks none."""
        size = request.ByteSize()
        if not 1 <= items <= MESSAGE_ITEMS:
            return "FRAME-1", f"a message of {items} items: a message has 1 to {MESSAGE_ITEMS}"
        if items > 1 and size > ITEM_BYTES:
            return "FRAME-2", f"a message of {size} bytes: one of several items has up to {ITEM_BYTES}"
        if size > self._message_bytes:
            why = f"a message of {size} bytes ends the stream: the limit message_bytes is {self._message_bytes}"
            return "CALL-14", why
        if number == 1 and not request.HasField("attach"):
            return "OPEN-1", "the first message has no attach"
        if number > 1 and request.HasField("attach") and not self.attached:
            return "OPEN-1", "a second attach before the first was answered"
        sizes = [(each.call_id, each.output_json, each.content) for each in request.results]
        sizes += [(each.call_id, each.output_chunk, each.content) for each in request.progress]
        for call_id, text, content in sizes:
            payload = len(text.encode()) + sum(part.ByteSize() for part in content)
            if payload > self._result_bytes:
                return "CALL-14", f"{payload} bytes of call {call_id!r}: the limit result_bytes is {self._result_bytes}"
        return "", ""

    def item(self, field: str, item: Any) -> None:
        """Checks one item; items have to come in their order.

        Raises:
            Mismatch: it breaks a rule, which the error names.
        """
        match field:
            case "attach":
                self._check_attach(item)
            case "results" | "progress":
                self._check_answer(field, item)
            case "calls":
                self._check_call(item)
            case "cancels" if item["call_id"] not in self._calls:
                _broken("CALL-2", f"a cancel for a call that the client has not made on this stream: {item}")
            case "heartbeat":
                self._check_heartbeat(item)
            case "drain":
                if self._drained:
                    _broken("BYE-1", "a second drain of the client")
                self._drained = True

    def _check_attach(self, attach: Mapping[str, Any]) -> None:
        if not INSTANCE.fullmatch(attach["instance"]):
            _broken("OPEN-4", f"the instance is {attach['instance']!r}: it must have 128 random bits, in hexadecimal")
        for name in IDENTITY if self._attach else ():
            if attach[name] != (before := self._attach[name]):
                _broken("OPEN-9", f"an attach with the {name} {attach[name]!r} after {before!r}: it ends the stream")
        if self._drained:
            _broken("OPEN-9", "an attach after the client's own drain: it ends the stream")
        self._attach = self._attach or attach

    def _check_answer(self, field: str, item: Mapping[str, Any]) -> None:
        if item["call_id"] not in self.pending:
            rule = "CALL-1" if field == "results" else "CALL-12"
            _broken(rule, f"{field} for a call that this stream does not have, or that was answered: {item}")
        if field == "progress":
            return
        self.pending.remove(item["call_id"])
        if item["output_json"] and not is_json(item["output_json"]):
            _broken("CALL-3", f"the output is not JSON: {item['output_json'][:200]!r}")
        error = item.get("error", {})
        cancelled = error.get("code") == "ERROR_CODE_CANCELLED"  # no caller reads it
        if item["is_error"] and not cancelled and not item["output_json"] and not error.get("message"):
            _broken("CALL-7", f"a failed call has neither a message nor an output: {item}")

    def _check_call(self, call: Mapping[str, Any]) -> None:
        call_id, parent = call["call_id"], call["parent_call_id"]
        if not 1 <= len(call_id) <= ID_CHARACTERS:
            _broken("NEST-6", f"an id of {len(call_id)} characters: it has 1 to {ID_CHARACTERS}")
        if call_id in self._calls:
            _broken("NEST-6", f"the id {call_id!r} was used for a second call of this stream")
        if parent and parent not in self.pending:
            _broken("NEST-5", f"a nested call of {parent!r}, which is not in flight on this stream: {call}")
        if call["arguments_json"] and not is_json(call["arguments_json"]):
            _broken("CALL-3", f"the arguments of a call are not JSON: {call['arguments_json'][:200]!r}")
        self._calls.add(call_id)

    def _check_heartbeat(self, beat: Mapping[str, Any]) -> None:
        sequence = beat["sequence"]
        if beat["from_peer"]:
            if sequence in self._echoes:
                _broken("FRAME-10", f"the echo of a heartbeat of the client's own was sent back: {beat}")
        elif sequence not in self._beats:
            _broken("FRAME-9", f"an echo that no heartbeat asked for, or a second one: {beat}")
        else:
            self._beats.remove(sequence)


def is_json(text: str) -> bool:
    """Tells whether a text is JSON, which has neither NaN nor Infinity."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except ValueError:
        return False
    return True


def _broken(rule: str, text: str) -> NoReturn:
    raise Mismatch(text, rule)


TRACED_CHARACTERS = 400  # of each message
TRACED_MESSAGES = 60
RECEIVED_BYTES = 64 * 1024 * 1024  # more than any message of a client may have
# Unknown fields, one of each wire type: a number, 8 bytes, a text, 4 bytes.
UNKNOWN = b"\xc0\x3e\x07\xc9\x3e12345678\xd2\x3e\x05later\xdd\x3e1234"
# How a bus answers a call that its caller cancels.
CANCELLED: Mapping[str, Any] = {
    "is_error": True,
    "error": {"code": "ERROR_CODE_CANCELLED", "stage": "CALL_STAGE_DISPATCHED", "message": "cancelled"},
}
RESPONSES: dict[str, type[Any]] = {
    "Register": wire.RegisterResponse,
    "Unregister": wire.UnregisterResponse,
    "Clear": wire.ClearResponse,
    "List": wire.ListResponse,
}


class Transcript:
    """The newest messages of a scenario, in a form for people."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.lines: deque[str] = deque(maxlen=TRACED_MESSAGES)

    def add(self, arrow: str, line: str, event: Any) -> None:
        """Records a message of the client (→), a message to it (←) or an action of the scenario (!)."""
        text = " ".join(str(event).split())
        text = text if len(text) <= TRACED_CHARACTERS else f"{text[:TRACED_CHARACTERS]}…"
        self.lines.append(f"{time.monotonic() - self._began:7.3f} {line} {arrow} {text}")


@dataclass(frozen=True, slots=True)
class Arrived:
    """One event on a stream.

    Attributes:
        field: the field of the message, or `half_close`, or `fault` for a message that breaks a rule of every scenario.
        item: the value, in protobuf's JSON mapping.
        message: the number of the message on its stream, from 1.
    """

    field: str
    item: Any
    message: int
    rule: str = ""


class ClientStream:
    """One stream of the client."""

    def __init__(self, line: Line, context: Any) -> None:
        self._line = line
        self._context = context
        self._port = int(context.peer().rpartition(":")[2])
        self.metadata = dict(context.invocation_metadata())
        self.ending: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()  # status and text
        self.arrived: asyncio.Queue[Arrived] = asyncio.Queue()
        self.always = Always()
        self.reads = asyncio.Event()  # set while the bus reads
        self.reads.set()
        self.session_id = f"{line.next_session():032x}"
        self.over = False  # whether either side has ended its direction
        self.silent = True  # whether the client has sent no message
        self.answers_cancels = False  # whether calls that the client cancels end at once, as a bus ends them
        self._writing = asyncio.Lock()  # grpcio fails a write during another: steps and answers to cancels write

    async def read(self, requests: AsyncIterator[wire.InvokeRequest]) -> None:
        """Splits messages into items, in the order in which a bus reads them."""
        number = 0
        if self._context.time_remaining() is not None:
            self._fault("OPEN-3", "the RPC Invoke has a deadline: it would end every stream", 0)
        try:
            async for request in requests:
                number += 1
                self.silent = False
                items = items_of(request)
                shown = json_format.MessageToDict(request, preserving_proto_field_name=True)
                self._line.trace.add("→", self._line.name, shown or "an empty message")
                rule, why = self.always.message(request, len(items), number)
                if rule:
                    self._fault(rule, why, number)
                for field, item in items:
                    self.arrived.put_nowait(Arrived(field, item, number))
                if self.answers_cancels and request.cancels:
                    await self._answer_cancels(each.call_id for each in request.cancels)
                await self.reads.wait()
        except grpc.RpcError:
            pass
        self.arrived.put_nowait(Arrived("half_close", None, number))

    async def _answer_cancels(self, call_ids: Iterable[str]) -> None:
        with contextlib.suppress(Mismatch):  # the client has ended the stream, and a step finds that
            await self.send({"results": [{"call_id": each, **CANCELLED} for each in call_ids]})

    def _fault(self, rule: str, text: str, number: int) -> None:
        self.arrived.put_nowait(Arrived("fault", text, number, rule))

    async def send(self, frame: dict[str, Any], *, unknown: bool = False) -> None:
        """Sends a message, and records it for the checks of every scenario.

        Args:
            unknown: adds a field that the client cannot know to the message and to each message in it.

        Raises:
            Mismatch: the client has ended the stream.
        """
        message = json_format.ParseDict(frame, wire.InvokeResponse())
        if unknown:
            _add_unknown(message)
        try:
            async with self._writing:
                self.always.sent(message)
                self._line.trace.add("←", self._line.name, frame)
                await self._context.write(message)
        except Exception:  # grpcio raises undocumented exceptions here, CancelledError of a future among them
            raise Mismatch("the client has ended the stream; it should have stayed") from None

    def take(self, arrived: Arrived) -> None:
        """Checks an event against the rules of every scenario.

        Raises:
            Mismatch: it breaks a rule, which the error names.
        """
        if arrived.field == "fault":
            raise Mismatch(arrived.item, arrived.rule)
        self.always.item(arrived.field, arrived.item)
        self.over = self.over or arrived.field == "half_close"

    def cut(self) -> None:
        """Resets the connection that carries it."""
        self.over = True
        self._line.proxy.cut(self._port)

    def send_away(self) -> None:
        """Ends the connection that carries it with GOAWAY."""
        self.over = True
        self._line.proxy.send_away(self._port)

    def end(self, status: str, text: str) -> None:
        """Ends the stream from the bus's side."""
        self.over = True
        if not self.ending.done():
            self._line.trace.add("!", self._line.name, f"the stream ends with {status} {text}")
            self.ending.set_result((status, text))


def _add_unknown(message: Message) -> None:
    for _, value in message.ListFields():
        for each in value if isinstance(value, Sequence) else (value,):
            if isinstance(each, Message):
                _add_unknown(each)
    message.MergeFromString(UNKNOWN)


@dataclass(slots=True)
class UnaryRequest:
    """A unary request of the client that waits for its answer."""

    method: str
    message: Any
    metadata: Mapping[str, str | bytes]
    answer: asyncio.Future[tuple[str, Any]]  # a status, and the response or a text


class Line(rpc.ToolBusServiceServicer):
    """One address of the scripted bus: a server behind a proxy; scenarios call it "plugin" or "host".

    Args:
        access: how clients reach it, one of `certificates.ACCESS`.
        late_headers: whether response headers come only with the first message.

    Attributes:
        streams: those that the client has opened and no step has taken yet.
        requests: unary requests that no step has taken yet.
    """

    def __init__(self, name: str, proxy: Proxy, trace: Transcript, access: str, *, late_headers: bool) -> None:
        self.name = name
        self.proxy = proxy
        self.trace = trace
        self.streams: asyncio.Queue[ClientStream] = asyncio.Queue()
        self.requests: asyncio.Queue[UnaryRequest] = asyncio.Queue()
        self.current: ClientStream | None = None  # the one that the scenario plays on
        self.instance = ""  # of its attaches, the same in all of them
        self.others: set[str] = set()  # instances of processes before
        self._access, self._late_headers = access, late_headers
        self._all: list[ClientStream] = []
        self._sessions = 0x5E55101D5E55101D << 64  # rises with each stream
        options = [("grpc.max_receive_message_length", RECEIVED_BYTES), ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options)
        self._holder = reserved()
        self._port = 0

    async def start(self) -> None:
        """Begins to take streams in."""
        rpc.add_ToolBusServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call,unused-ignore]
        credentials = server_credentials(self._access)
        address = "{}:{}".format(*self._holder.getsockname())
        if credentials is None:
            self._port = self._server.add_insecure_port(address)
        else:
            self._port = self._server.add_secure_port(address, credentials)
        await self._server.start()
        await self.proxy.open(self._port)

    async def stop(self) -> None:
        """Ends everything at once."""
        await self.proxy.stop()
        for stream in self._all:
            stream.ending.cancel()
        await self._server.stop(0)
        self._holder.close()

    def forget(self) -> None:
        """Forgets the instance and the streams of a client process that was restarted."""
        self.others.add(self.instance)
        self.instance, self.current = "", None
        while not self.streams.empty():
            self.streams.get_nowait()

    def next_session(self) -> int:
        """Returns the id of a new session, as a number."""
        self._sessions += 1
        return self._sessions

    async def set_port(self, how: str) -> None:
        """Opens its port, closes it, or lets it reset each connection."""
        self.trace.add("!", self.name, f"the port is {how}")
        if how == "closed":
            await self.proxy.close()
            return
        if how == "refusing":
            self.proxy.cut()
        await self.proxy.open(self._port, refusing=how == "refusing")

    async def Invoke(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Passes the stream to the scenario, and ends it with the scenario's status."""
        stream = ClientStream(self, context)
        self._all.append(stream)
        if not self._late_headers:
            await context.send_initial_metadata(())  # fails if its client has given it up already
        self.streams.put_nowait(stream)
        reading = asyncio.create_task(stream.read(request_iterator))
        try:
            status, text = await stream.ending
        finally:
            stream.over = True
            reading.cancel()
            if stream.silent:
                stream.arrived.put_nowait(Arrived("gone", None, 0))
        if status != "OK":
            await context.abort(grpc.StatusCode[status], text)

    async def _unary(self, method: str, message: Any, context: Any) -> Any:
        shown = mapped(message)
        self.trace.add("→", self.name, f"{method} {shown}")
        metadata = dict(context.invocation_metadata())
        request = UnaryRequest(method, shown, metadata, asyncio.get_running_loop().create_future())
        self.requests.put_nowait(request)
        status, answer = await request.answer
        self.trace.add("←", self.name, f"{method} {status} {answer}")
        if status != "OK":
            await context.abort(grpc.StatusCode[status], answer)
        return json_format.ParseDict(answer, RESPONSES[method]())

    async def Register(self, request: Any, context: Any) -> Any:
        return await self._unary("Register", request, context)

    async def Unregister(self, request: Any, context: Any) -> Any:
        return await self._unary("Unregister", request, context)

    async def Clear(self, request: Any, context: Any) -> Any:
        return await self._unary("Clear", request, context)

    async def List(self, request: Any, context: Any) -> Any:
        return await self._unary("List", request, context)
