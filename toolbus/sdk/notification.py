"""Defines the notifications that plugins send to users outside calls, and sends them to the bus."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from toolbus.errors import CallFailed, Code, PeerLost, Stage
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk.outgoing_calls import future_call
from toolbus.v1 import tool_bus_service_pb2 as wire

if TYPE_CHECKING:
    from toolbus.sdk.connection import Connection

log = logging.getLogger(__name__)

NOTIFY_SECONDS = 10.0  # for the bus to take one, waiting for a connection included


Wants = Literal["reply", "context", "nothing"]


def wants_of(data: object) -> Wants:
    """Returns what a host should do with a notification, by the key `wants` of its data.

    `reply`: let the model answer it to the user now; `context`: give it to the model together with the user's next
    message; `nothing`, and every other value: at most show it. It is a request: a host that does less breaks no rule.
    """
    wants = data.get("wants") if isinstance(data, Mapping) else None
    return "reply" if wants == "reply" else "context" if wants == "context" else "nothing"


@dataclass(frozen=True, slots=True)
class Notification:
    """A message of a plugin to a user outside a call.

    Attributes:
        source: the plugin's, as the bus knows it.
        user: the user whom it is for; "" for everyone.
        text: the text for the user.
        data: JSON for programs; None without any.
        time_seconds: when the bus got it, since the epoch.
        number: rises with each notification, also over restarts of the bus.
        lost: how many notifications before it this host will not get: it read too slowly or was disconnected too long.
    """

    source: str
    user: str
    text: str
    data: Any
    time_seconds: float
    number: int
    lost: int = 0

    @property
    def wants(self) -> Wants:
        """What the host should do with it: see `wants_of`."""
        return wants_of(self.data)

    @classmethod
    def from_wire(cls, message: wire.Notification) -> Notification:
        """Copies it out of its message."""
        data = json.loads(message.data_json) if message.data_json else None
        return cls(
            message.source, message.user_id, message.text, data, message.time_seconds, message.number, message.lost
        )


def notify(connection: Connection, user: str, text: str, data: Any) -> Future[int]:
    """Sends a notification by each bus; the future's result is how many hosts got it, or an error of `Plugin.notify`.

    Raises:
        TypeError, ValueError: JSON cannot hold the data.
    """
    arguments: Mapping[str, Any] = {"user": user, "text": text, "data": data}
    hosts: Future[int] = Future()
    sent = [future_call(each, "toolbus:notify", arguments, NOTIFY_SECONDS) for each in connection.each]
    ended = itertools.count(1)

    def answer(done: Future[Result]) -> None:
        if next(ended) < len(sent):
            return
        counts: list[int] = []
        failures: list[CallFailed] = []
        for each in sent:
            try:
                counts.append(_hosts(each.result()))
            except CallFailed as failure:
                failures.append(failure)
        if counts:
            hosts.set_result(sum(counts))
        else:
            hosts.set_exception(failures[0])

    for each in sent:
        each.add_done_callback(answer)
    return hosts


def _hosts(result: Result) -> int:
    """Returns how many hosts got a notification.

    Raises:
        CallFailed: the call failed, or the bus is of another make and its output does not have the number.
    """
    try:
        return int(result.unwrap()["hosts"])
    except (KeyError, TypeError, ValueError):
        text = (
            f"the bus answered toolbus:notify with {result.output_json:.200}, which does not have the number of hosts"
        )
        raise CallFailed(CallError(Code.INTERNAL, text, Stage.ACCEPTED)) from None


def say(connection: Connection, text: str, data: Any) -> None:
    """Sends a notification for everyone and logs a failure; from any thread, without waiting."""

    def log_failure(sent: Future[int]) -> None:
        if problem := sent.exception():
            log.warning("a message of the plugin did not reach the bus: %s", problem)

    try:
        notify(connection, "", text, data).add_done_callback(log_failure)
    except (TypeError, ValueError, PeerLost) as problem:
        log.warning("a message of the plugin was not sent: %s", problem)
