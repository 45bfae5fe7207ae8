"""Runs calls by callback URL: each call is one POST to the URL that a plugin registered (REST-40 to REST-43).

`Callbacks` does the network part for all callback handlers (see callback_handler.py): the exchanges, through
`CallbackClient`, and the probes of origins that are offline or whose plugins are not confirmed yet.

The deadline of a call is the dispatcher's. It cancels the exchange at any step, so that one limit holds for
connecting, sending and reading together (REST-41).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolbus.bus.calls.call import Call
from toolbus.bus.calls.call_log import call_fields
from toolbus.bus.catalog.entry import Handler
from toolbus.bus.core import Core
from toolbus.bus.gateway import callback_messages, callback_proof
from toolbus.bus.gateway.callback_context import context_headers, trace_headers
from toolbus.bus.gateway.callback_faults import ExchangeFault, NotConnected, NotHttp
from toolbus.bus.gateway.callback_handler import CallbackHandler, Exchanges, Origin
from toolbus.common.local_users import refusal_of
from toolbus.errors import INTERNAL_DETAIL, Code, Stage
from toolbus.protocol.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.bus.gateway.callback_client import CallbackClient
    from toolbus.bus.gateway.callback_request import CallbackResponse

log = logging.getLogger("toolbus.callbacks")

FAILURES_TO_OFFLINE = 3  # REST-43
FIRST_PROBE_SECONDS = 0.25
MAX_PROBE_SECONDS = 30.0
PROBE_SHARE = 0.1  # of the time that an origin was offline: the pause between two probes, up to MAX_PROBE_SECONDS
CONNECT_SECONDS = 2.0  # of a probe
LISTEN_SECONDS = 60.0  # until a registered plugin listens; after that its first result shows its socket
PROOF_SECONDS = 5.0  # for the answer to a challenge
BYTE_SECONDS = 2e-9  # of the loop that a byte of a large response takes, until its caller has it
LOAD_SECONDS = 1.0  # until the client is loaded: after the start of bus and plugin
PROBES = 64  # at the same time
NOT_FOUND = (404, 410)  # also of a tool that did not find what it looked for
ANSWERS_TO_WITHDRAWAL = 3  # in a row, where one answer may mean something else
OTHER_LISTENER = "another program may listen there than registered the tool: let its plugin register again"
NO_DESCRIPTORS = "the bus has no file descriptor left to find out who listens there: retry later"
NO_LISTENER = "no program listens there any more: let its plugin register again"


@dataclass(frozen=True, slots=True)
class CallbackSignals:
    """The functions that `Callbacks` calls after changes.

    Attributes:
        origin_changed: an origin went offline or came back online.
        confirmation_changed: handlers were confirmed, where the text is empty; or another program may listen at their
            URL, for the reason in the text.
        listener_changed: the plugin of an origin listens with a new socket.
        disowned: a tool is not its plugin's any more; the text is the plugin's answer.
    """

    origin_changed: Callable[[Origin], None]
    confirmation_changed: Callable[[Sequence[CallbackHandler], str], None]
    listener_changed: Callable[[Origin], None]
    disowned: Callable[[CallbackHandler, str], None]


class _LazyClient:
    """The client of one bus, loaded on a thread: loading takes a tenth of a second.

    Attributes:
        loaded: None before that.
    """

    def __init__(self, may_serve: Callable[[int], bool]) -> None:
        self.loaded: CallbackClient | None = None
        self._may_serve = may_serve
        self._preparing: asyncio.Task[None] | None = None  # None until `prepare`

    def prepare(self) -> None:
        """Loads the client soon, so that the first call need not wait."""
        if self._preparing is None:
            self._preparing = asyncio.get_running_loop().create_task(self._prepare(), name="toolbus callback client")

    async def _prepare(self) -> None:
        await asyncio.sleep(LOAD_SECONDS)
        await self.load()

    async def load(self) -> CallbackClient:
        """Returns the client."""
        if self.loaded is None:
            module = await asyncio.to_thread(importlib.import_module, "toolbus.bus.gateway.callback_client")
            if self.loaded is None:  # of several that waited, the first makes it
                self.loaded = module.CallbackClient(self._may_serve)
        return self.loaded

    async def close(self) -> None:
        """Closes every connection."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait((self._preparing,))
        if self.loaded is not None:
            await self.loaded.close()
            self.loaded = None


class Callbacks:
    """The network part that the callback handlers of one bus share: connections, exchanges and probes.

    Attributes:
        may_serve: tells whether a user's programs may get calls, by uid. The port of a plugin that has ended may be
            taken by a program of another user.
    """

    def __init__(self, core: Core, signals: CallbackSignals) -> None:
        self.may_serve = core.sessions.neighbours.allows
        self.exchanges = Exchanges(self.start, self.cancel)
        self._dispatcher = core.calls.dispatcher
        self._limits = core.config.limits
        self._budgets = core.calls.dispatcher.seams.budgets
        self._signals = signals
        self._client = _LazyClient(self.may_serve)
        self._running: dict[Call, asyncio.Task[None]] = {}  # exchanges
        self._proving: dict[CallbackHandler, asyncio.Task[str]] = {}  # challenges in flight
        self._awaiting: dict[Origin, asyncio.Task[None]] = {}  # waits for plugins that registered before they listen

    def __repr__(self) -> str:
        return f"<Callbacks exchanges={len(self._running)}>"

    async def stop(self) -> None:
        """Cancels the exchanges that still run and closes every connection."""
        running = [*self._running.values(), *self._proving.values(), *self._awaiting.values()]
        for call in list(self._running):
            self.cancel(call)
        for task in (*self._proving.values(), *self._awaiting.values()):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    # -- exchanges -----------------------------------------------------------------------------------------------

    def start(self, handler: CallbackHandler, call: Call) -> None:
        """Starts the exchange for a call."""
        self._running[call] = asyncio.get_running_loop().create_task(self._run(handler, call))

    def cancel(self, call: Call) -> None:
        """Cancels the exchange for a call; its connection is closed, since a response may still come over it."""
        task = self._running.get(call)
        if task is not None:
            task.add_done_callback(functools.partial(self._cancelled, call))
            task.cancel()

    def _cancelled(self, call: Call, task: asyncio.Task[None]) -> None:
        """Ends the call of an exchange that was cancelled, perhaps before its first step."""
        self._running.pop(call, None)
        if call.id in call.handler.pending:
            self._end(call.handler, call, pb.ToolResult(is_error=True))

    async def _run(self, handler: CallbackHandler, call: Call) -> None:
        try:
            result = await self._exchange(handler, call)
        except Exception:
            names = call.call_id, call.entry.name, call.entry.source
            log.exception("a fault of the bus in a call", extra=call_fields(*names, call.caller.principal))
            result = _failure(Code.INTERNAL, INTERNAL_DETAIL, Stage.UNKNOWN)
        del self._running[call]
        self._end(handler, call, result)

    def _end(self, handler: Handler, call: Call, result: pb.ToolResult) -> None:
        result.call_id = call.id
        self._dispatcher.results(handler, [result], time.monotonic())

    async def _exchange(self, handler: CallbackHandler, call: Call) -> pb.ToolResult:
        """Posts one call and reads the response (REST-40, REST-42)."""
        name, origin = call.entry.bare_name, handler.origin
        body = callback_messages.callback_body(name, call.arguments_json, call.call_id)
        headers = context_headers(call) if handler.wants_context else {}
        headers |= trace_headers(call.trace) if call.trace is not None else {}
        if handler.secret:
            nonce = callback_proof.nonce()
            signature = callback_proof.signature(handler.secret, nonce, body)
            headers[callback_proof.SIGNATURE] = f"{nonce}:{signature}"
        try:
            doubt = await self._doubt(handler) if handler.secret or handler.is_restored else ""
            if doubt:
                message = f"tool {name!r}: nothing was sent to {origin}: {doubt}"
                return _failure(Code.UNAVAILABLE, message, Stage.NOT_DISPATCHED, retry_safe=True)
            client = self._client.loaded or await self._client.load()
            response = await client.post(handler, body, headers)
            try:
                origin.reset_failures()
                if not origin.online:  # it went offline while this call was in flight
                    self.bring_online(origin)
                return await self._result(client, handler, name, response)
            finally:
                response.release()
        except NotConnected as error:
            return self._not_connected(handler, name, error)
        except NotHttp as error:
            origin.reset_failures()
            return _failure(
                Code.UNAVAILABLE,
                f"tool {name!r}: {origin} sent something that is not an HTTP response ({error}); the tool may have "
                "run, so the call was not retried",
                Stage.DISPATCHED,
            )
        except ExchangeFault as error:
            return _failure(
                Code.UNAVAILABLE,
                f"tool {name!r}: the connection to {origin} broke before the response was complete ({error}); the "
                "tool may have run, so the call was not retried",
                Stage.DISPATCHED,
            )

    async def _result(
        self, client: CallbackClient, handler: CallbackHandler, name: str, response: CallbackResponse
    ) -> pb.ToolResult:
        """Reads a response (REST-42)."""
        limit = self._limits.callback_bytes
        spend, beside = self._budgets.spend, self._budgets.beside
        content = await client.read(response, limit, lambda size: spend(handler.source, size * BYTE_SECONDS))
        encoding = response.headers.get("Content-Encoding")
        if encoding and content:
            try:
                inflate = functools.partial(callback_messages.decompress, content, encoding, limit)
                large = len(content) > callback_messages.LARGE_COMPRESSED
                content = await beside(handler.source, inflate) if large else inflate()
            except ValueError as error:
                return _failure(Code.TOOL, f"tool {name!r} sent a response that {error}", Stage.ACCEPTED)
        if content is None:
            return _too_large(name, limit)
        charset = response.charset or "utf-8"
        read = functools.partial(callback_messages.read_response, response.status, content, charset, name)
        large = len(content) > callback_messages.LARGE_BODY
        result = await beside(handler.source, read) if large else read()
        self._note_answer(handler, response, result)
        return result

    def _note_answer(self, handler: CallbackHandler, response: CallbackResponse, result: pb.ToolResult) -> None:
        """Updates the registration by an answer: whether the plugin still has the tool."""
        reason, status = result.error.reason, response.status
        if reason == callback_messages.NOT_REGISTERED or status in NOT_FOUND:
            handler.not_found += 1
            if self._is_gone(handler, named=reason == callback_messages.NOT_REGISTERED):
                self._signals.disowned(handler, reason or f"HTTP {status}")
            return
        handler.not_found = 0
        if 200 <= status < 300 and reason not in callback_messages.NOT_THERE:
            # If its plugin was restarted in this run, this is the first result over a new connection. A look-up of
            # the socket at each answer would take as long as reading it.
            is_first = response.is_first_result()
            if not (handler.is_restored or handler.secret) and (is_first or not handler.listener):
                listener = handler.origin.listener()
                if listener and listener != handler.listener:
                    self._signals.listener_changed(handler.origin)  # at once: a kill of the bus must not lose it
            handler.has_answered = True

    def _is_gone(self, handler: CallbackHandler, *, named: bool) -> bool:
        """Tells whether an answer shows that a plugin has lost a tool that it had.

        A server that was started again, or that the bus has not seen since its own restart, does not have the tool if
        it says so before any result. A 404 after results may be about what the tool looked for: three in a row count.
        A tool without any result stays, since its URL may be wrong (REST-42), unless its server names the tool.

        Args:
            named: whether it answered TOOL_NOT_REGISTERED, which no tool means.
        """
        if named or handler.has_answered:
            known = named and (handler.is_restored or handler.has_answered)
            if known or handler.not_found >= ANSWERS_TO_WITHDRAWAL:
                return True
        listener = handler.origin.listener()
        if handler.listener and listener and listener != handler.listener:
            return True  # the first answers since it was started again: results before were another process's
        restarted = handler.server_restarted
        return restarted if named else (handler.is_restored or restarted) and not handler.has_answered

    async def _doubt(self, handler: CallbackHandler) -> str:
        """Returns why the program at a URL may not be the plugin of a tool; "" without a doubt."""
        listener = handler.origin.listener()
        if handler.recognizes(listener):
            return ""
        if listener is None:
            return NO_DESCRIPTORS
        doubt = await self._prove(handler) if handler.secret else OTHER_LISTENER if listener else NO_LISTENER
        if doubt:
            self._note_doubt(handler, doubt)
            self.probe(handler.origin)
        return doubt

    def _note_doubt(self, handler: CallbackHandler, doubt: str) -> None:
        """Notes whether the program at a handler's URL is its plugin, and notifies of a change."""
        if handler.is_confirmed is bool(doubt) or handler.doubt != doubt:
            handler.is_confirmed, handler.doubt = not doubt, doubt
            self._signals.confirmation_changed([handler], doubt)

    async def _prove(self, handler: CallbackHandler) -> str:
        """Returns the result of `_challenge`; calls that come meanwhile share it."""
        task = self._proving.get(handler)
        if task is None:
            task = self._proving[handler] = asyncio.get_running_loop().create_task(self._challenge(handler))
            task.add_done_callback(functools.partial(self._proved, handler))
        return await asyncio.shield(task)

    def _proved(self, handler: CallbackHandler, task: asyncio.Task[str]) -> None:
        self._proving.pop(handler, None)
        if not task.cancelled():
            task.exception()  # every call that waited for it may have ended

    async def _challenge(self, handler: CallbackHandler) -> str:
        """Lets the plugin prove that it knows the secret.

        Returns:
            Why the program there may not be the plugin; empty where it has proved that it is.

        Raises:
            NotConnected: no program accepts a connection.
        """
        client = self._client.loaded or await self._client.load()
        nonce, listener = callback_proof.nonce(), handler.origin.listener()
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                answer = await client.challenge(handler, nonce)
        except NotConnected:
            raise
        except (ExchangeFault, TimeoutError) as error:
            return f"the proof of its callback_secret did not come ({str(error) or type(error).__name__})"
        if not callback_proof.is_proof(answer, handler.secret, nonce, handler.target.text):
            return (
                f"the program that listens there did not prove in {callback_proof.PROOF} that it knows the "
                "callback_secret: let its plugin answer the challenge, or register again"
            )
        handler.proven_by = listener or ""
        return ""

    def _not_connected(self, handler: CallbackHandler, name: str, error: NotConnected) -> pb.ToolResult:
        origin, reason = handler.origin, str(error)
        if error.out_of_sockets:
            message = f"tool {name!r}: this machine has no socket left for the call ({reason}): retry later"
            return _failure(Code.OVERLOADED, message, Stage.NOT_DISPATCHED, retry_safe=True)
        if error.untrusted:
            message = f"tool {name!r}: {origin} has no certificate that this machine trusts ({reason})"
            return _failure(Code.UNAVAILABLE, message, Stage.NOT_DISPATCHED)
        self.count_failure(origin, reason)
        message = f"tool {name!r}: {origin} accepts no connection ({reason}): start its plugin, or retry later"
        return _failure(Code.UNAVAILABLE, message, Stage.NOT_DISPATCHED, retry_safe=True)

    # -- offline origins -----------------------------------------------------------------------------------------

    def count_failure(self, origin: Origin, reason: str) -> None:
        """Counts a connect failure; the third in a row takes the origin's tools offline (REST-43)."""
        origin.failures += 1
        origin.last_failure = reason
        if origin.online and origin.failures >= FAILURES_TO_OFFLINE:
            self.take_offline(origin)

    def take_offline(self, origin: Origin) -> None:
        """Takes the tools of an origin offline, and probes it until it accepts a connection."""
        origin.online = False
        self._signals.origin_changed(origin)
        self.probe(origin)

    def bring_online(self, origin: Origin) -> None:
        """Offers the confirmed tools of an origin again."""
        self._client.prepare()
        origin.failures = 0
        if not origin.online:
            self._check_listener(origin)
            origin.online = True
            self._signals.origin_changed(origin)
        if origin.probing is not None and not origin.waits():
            probing, origin.probing = origin.probing, None
            if probing is not asyncio.current_task():
                probing.cancel()

    def confirm(self, handlers: Sequence[CallbackHandler]) -> None:
        """Trusts the program that listens at the URLs of some handlers of one origin, as if it registered now."""
        for handler in handlers:
            handler.is_restored, handler.is_confirmed = False, True
            handler.listener = handler.origin.listener() or ""
        self._signals.confirmation_changed(handlers, "")

    def await_listener(self, origin: Origin) -> None:
        """Waits for a plugin that registered before it listens, so that its socket is known before its first result.

        Else its tools would not outlive a bus that is killed until then.
        """
        if origin not in self._awaiting:
            task = self._awaiting[origin] = asyncio.get_running_loop().create_task(self._await_listener(origin))
            task.add_done_callback(lambda _: self._awaiting.pop(origin, None))

    async def _await_listener(self, origin: Origin) -> None:
        began = time.monotonic()
        while origin.handlers and (waited := time.monotonic() - began) < LISTEN_SECONDS:
            if origin.listener():
                self._signals.listener_changed(origin)
                return
            await asyncio.sleep(max(waited * PROBE_SHARE, FIRST_PROBE_SECONDS))

    def _check_listener(self, origin: Origin) -> None:
        """Confirms the restored tools of the plugin that listens at an origin, and suspends those of another program.

        For tools with a secret only proofs count.
        """
        if (listener := origin.listener()) is None:
            return
        known: list[CallbackHandler] = []
        foreign: list[CallbackHandler] = []
        for handler in origin.handlers:
            recognized = handler.is_confirmed if handler.secret else handler.recognizes(listener)
            if recognized != handler.is_confirmed:
                (known if recognized else foreign).append(handler)
                handler.is_confirmed = recognized
        if known:
            self._signals.confirmation_changed(known, "")
        if foreign:
            self._signals.confirmation_changed(foreign, OTHER_LISTENER)

    async def probe_once(self, origins: Iterable[Origin]) -> None:
        """Probes many origins once, at the same time, and offers the tools of those that answer."""
        slots = asyncio.Semaphore(PROBES)

        async def probe(origin: Origin) -> None:
            async with slots:
                if await accepts_connections(origin.address, self.may_serve):
                    await self._bring_back(origin)

        await asyncio.gather(*map(probe, origins))

    async def _bring_back(self, origin: Origin) -> None:
        """Offers the tools of an origin that has accepted a connection."""
        listener = origin.listener()
        for handler in [each for each in origin.handlers if each.secret and not each.recognizes(listener)]:
            try:
                doubt = await self._prove(handler)
            except NotConnected:  # it has stopped meanwhile
                return
            self._note_doubt(handler, doubt)
        self._check_listener(origin)
        self.bring_online(origin)
        if origin.is_serving:
            origin.reset_failures()

    def probe(self, origin: Origin) -> None:
        """Begins to probe an origin, unless no probe could bring any of its tools back."""
        if origin.probing is None and origin.waits():
            origin.probing = asyncio.get_running_loop().create_task(self._probe_until_back(origin))

    async def _probe_until_back(self, origin: Origin) -> None:
        offline_since = time.monotonic()
        try:
            while origin.waits():
                if await accepts_connections(origin.address, self.may_serve):
                    await self._bring_back(origin)
                    if not origin.waits():
                        return
                backoff = (time.monotonic() - offline_since) * PROBE_SHARE
                backoff = min(max(backoff, FIRST_PROBE_SECONDS), MAX_PROBE_SECONDS)
                await asyncio.sleep(backoff * random.uniform(0.8, 1.2))  # else all are probed at the same time
        finally:
            if origin.probing is asyncio.current_task():
                origin.probing = None


async def accepts_connections(address: tuple[str, str, int], may_serve: Callable[[int], bool]) -> bool:
    """Probes an origin with a TCP connect, and checks its user. Sends nothing: a request might run a tool (REST-43)."""
    _, host, port = address
    for each in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(each, port)
            # A port from the system's own range may be given to this very socket, which then talks to itself.
            itself = writer.get_extra_info("sockname") == writer.get_extra_info("peername")
            refused = refusal_of(writer, may_serve)
            writer.close()
            if not itself and not refused:
                return True
    return False


def _too_large(name: str, limit: int) -> pb.ToolResult:
    message = f"tool {name!r} answered more than {limit} bytes (limit callback_bytes): ask for less"
    return _failure(Code.RESULT_TOO_LARGE, message, Stage.ACCEPTED, limit=("callback_bytes", limit))


def _failure(
    code: Code, message: str, stage: Stage, *, retry_safe: bool = False, limit: tuple[str, float] | None = None
) -> pb.ToolResult:
    return Result(is_error=True, error=CallError(code, message, stage, retry_safe, limit)).to_wire()
