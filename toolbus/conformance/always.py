"""Checks the rules of every scenario on each stream of a client, and names the rule that a message breaks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from toolbus.conformance.match import Mismatch
from toolbus.v1 import tool_bus_service_pb2 as wire

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
            return (
                "CALL-14",
                f"a message of {size} bytes ends the stream: the limit message_bytes is {self._message_bytes}",
            )
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
            if attach[name] != self._attach[name]:
                text = (
                    f"a later attach with the {name} {attach[name]!r}, not {self._attach[name]!r}: it ends the stream"
                )
                _broken("OPEN-9", text)
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

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def _broken(rule: str, text: str) -> NoReturn:
    raise Mismatch(text, rule)
