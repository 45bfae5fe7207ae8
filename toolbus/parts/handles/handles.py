"""Replaces large results by their beginning and a link, and links in arguments by what they stand for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call import Call, Interceptor
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.calls.refusals import Refused, must_fit
from toolbus.bus.catalog.argument_repair import noted
from toolbus.bus.catalog.entry import Declaration, Handler, is_operators
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.schema import load_arguments
from toolbus.errors import Code
from toolbus.parts.handles.reading import count_lines
from toolbus.parts.handles.result_store import HANDLE, URI, Gone, ResultStore, Stored
from toolbus.parts.handles.settings import ResultRules
from toolbus.parts.tasks.task import owner_of
from toolbus.protocol.tool import Result
from toolbus.v1 import tool_pb2 as pb

READER = "read_result"  # the tool that takes handles as they are
BEGINNING = 2_000  # characters of a result that its caller gets at once
JSON_TYPE, TEXT_TYPE, BINARY_TYPE = "application/json", "text/plain", "application/octet-stream"


class Handles(Interceptor):
    """The large results of one bus: an `Interceptor`.

    Attributes:
        counts: results that became handles, handles that were arguments.
    """

    def __init__(self, rules: ResultRules, store: ResultStore, dispatcher: Dispatcher, policy: Policy) -> None:
        self._rules = rules
        self._least = rules.least // 4  # characters: of a shorter text no result becomes a handle
        self._store = store
        self._dispatcher = dispatcher
        self._policy = policy
        self.counts = {"results": 0, "arguments": 0}
        self._streams: dict[str, Stream] = {}  # the outputs that come in chunks, by the id of the call

    def __repr__(self) -> str:
        return f"<Handles {self._store!r}>"

    # -- results -----------------------------------------------------------------------------------------------------

    def after(self, handler: Handler, results: Iterable[pb.ToolResult], now: float) -> Iterable[pb.ToolResult]:
        """Shortens the large ones of some results."""
        results = list(results)
        for result in results:
            stream = self._streams.pop(result.call_id, None) if self._streams else None
            if stream is not None and stream.stored is not None:
                self._end_stream(stream, result)
            if (len(result.output_json) > self._least or result.content) and not result.is_error:
                call: Call | None = handler.pending.get(result.call_id)
                if call is not None and call.active and call.parent is None:  # tools get whole results
                    self._shorten(call, result)
        return results

    def progress(self, call: Call, message: pb.ToolProgress) -> None:
        """Stores the chunks of an output as they come, once they are large: its caller can read them before its end."""
        if not message.output_chunk or call.parent is not None:
            return
        bound = self._bound_of(call)
        if not bound or self._policy.is_untrusted(call.entry.source):  # a secret may be in two chunks
            return
        stream = self._streams.setdefault(call.id, Stream(call))
        chunk = message.output_chunk.encode()
        if stream.stored is not None:
            if not stream.is_lost:
                stream.is_lost = not self._store.grow(stream.stored, chunk)
            return
        stream.pieces.append(chunk)
        stream.size += len(chunk)
        if stream.size > bound:
            stream.stored = self._add(_owner(call), call, TEXT_TYPE, b"")
            stream.is_lost = stream.stored is None or not self._store.grow(stream.stored, b"".join(stream.pieces))
            stream.pieces.clear()
            if not stream.is_lost and stream.stored is not None and not message.message:
                message.message = f"the output is stored as it comes: {stream.stored.uri}"

    def sweep(self) -> None:
        """Completes the streams of calls that have ended without a result; what had come can still be read."""
        for id, stream in list(self._streams.items()):
            if not stream.call.active:
                del self._streams[id]
                if stream.stored is not None and isinstance(stream.stored.content, bytearray):
                    self._store.finish(stream.stored, bytes(stream.stored.content))

    def _end_stream(self, stream: Stream, result: pb.ToolResult) -> None:
        """Completes what came in chunks: by the whole output, which its handle then stands for, or for a failure."""
        stored, call = stream.stored, stream.call
        assert stored is not None  # only such streams are ended
        content = bytes(stored.content) if isinstance(stored.content, bytearray) else b""
        text, mime_type = _text_of(result.output_json)
        if not result.is_error and mime_type == TEXT_TYPE:
            content = text.encode()
        self._store.finish(stored, content)
        if result.is_error and not stream.is_lost:
            result.content.append(_link(stored))
        elif not stream.is_lost and content and mime_type == TEXT_TYPE and len(content) > self._bound_of(call):
            result.output_json = json.dumps(_beginning(text, stored))
            result.content.append(_link(stored))
            self.counts["results"] += 1

    def _bound_of(self, call: Call) -> int:
        """Returns above which size a result of a call becomes a handle; 0: never."""
        entry = call.entry
        if is_operators(entry.source) or call.declaration.tool.output_schema_json:
            return 0  # a caller that knows the output's schema relies on it
        return self._rules.bound(entry.name, entry.source)

    def _shorten(self, call: Call, result: pb.ToolResult) -> None:
        entry, bound = call.entry, self._bound_of(call)
        if not bound:
            return
        texts = [len(result.output_json), *(block.ByteSize() for block in result.content)]
        if max(texts) <= bound and len(result.output_json.encode()) <= bound:
            return
        tripwire = self._dispatcher.seams.tripwire
        is_untrusted = tripwire is not None and self._policy.is_untrusted(entry.source)
        if is_untrusted and tripwire.check_result(entry.name, result) is not None:  # type: ignore[union-attr]
            return  # it is blocked later, with all of it
        owner = _owner(call)
        links: list[pb.ContentBlock] = []
        blocks = list(Result.from_wire(result).content_beside_output())  # without repeats of the output
        text, mime_type = _text_of(result.output_json)
        if len(text.encode()) > bound:
            stored = self._add(owner, call, mime_type, text.encode())
            if stored is not None:
                result.output_json = json.dumps(_beginning(text, stored))
                links.append(_link(stored))
        for index, block in enumerate(blocks):
            content, mime_type = _content_of(block)
            stored = self._add(owner, call, mime_type, content) if len(content) > bound else None
            if stored is not None:
                shown = _beginning(content.decode(), stored) if stored.mime_type == TEXT_TYPE else f"[{_where(stored)}]"
                blocks[index] = pb.ContentBlock(text=pb.TextContent(text=shown))
                links.append(_link(stored))
        if links:
            self.counts["results"] += len(links)
            call.arguments_json = noted(call.arguments_json, f"{len(links)} large parts of the result became handles")
            del result.content[:]
            result.content.extend((*blocks, *links))

    def _add(self, owner: str, call: Call, mime_type: str, content: bytes) -> Stored | None:
        return self._store.add(owner, call.entry.source, call.entry.name, mime_type, content)

    # -- arguments ---------------------------------------------------------------------------------------------------

    def before(self, calls: list[Call], now: float) -> list[Call]:
        """Replaces handles in arguments; a call whose handle is gone is refused."""
        passed = []
        for call in calls:
            if URI in call.arguments_json:
                try:
                    self._fill(call)
                except Refused as refused:
                    self._dispatcher.endings.refuse(call, refused.error, time.monotonic())
                    continue
            passed.append(call)
        return passed

    def _fill(self, call: Call) -> None:
        user = call.context.user_id if call.context is not None else ""
        declaration = call.declaration.as_declared
        text = self.expand(call.root.caller.principal, user, declaration, call.arguments_json)
        if text is call.arguments_json:
            return
        checker = declaration.checker
        if checker is not None and not checker.is_valid(arguments := load_arguments(text)):
            raise Refused(Code.INVALID_ARGUMENTS, f"with the results behind its handles: {checker.explain(arguments)}")
        must_fit(text, call.context, 0, call.entry.name, call.handler.max_item_bytes)
        more = max(len(text) - len(call.arguments_json), 0)
        call.size += more  # it counts towards what the bus holds, as if the caller had sent it
        self._dispatcher.in_flight.held += more
        call.caller.budget.held += more
        call.arguments_json = noted(text, "handles in the arguments were replaced by their results")

    def expand(self, principal: Principal, user_id: str, declaration: Declaration, text: str) -> str:
        """Returns arguments with the results that handles stand for: each argument that is exactly a handle.

        A result that is JSON is given as a value, except to an argument that the schema declares as a text.

        Raises:
            Refused: a handle cannot be read by the caller, or is not text.
        """
        if URI not in text or declaration.tool.name == READER:
            return text
        try:
            arguments = load_arguments(text)
        except ValueError:
            return text
        given = arguments.items() if isinstance(arguments, dict) else ()
        named = {name: value for name, value in given if isinstance(value, str) and HANDLE.fullmatch(value)}
        if not named:
            return text
        properties = declaration.tool.parameters.get("properties") or {}
        for name, handle in named.items():
            try:
                stored = self._store.find(handle, owner_of(user_id, principal.account))
                if not stored.is_text:
                    raise Refused(Code.INVALID_ARGUMENTS, f"{name} is a handle of {stored.mime_type}, which is no text")
                content = self._store.read(stored).decode()
            except Gone as gone:
                raise Refused(Code.INVALID_ARGUMENTS, f"{name}: {gone}") from None
            is_value = stored.mime_type == JSON_TYPE and not _takes_text(properties.get(name))
            arguments[name] = json.loads(content) if is_value else content
            self.counts["arguments"] += 1
        return json.dumps(arguments, separators=(",", ":"))


@dataclass(slots=True)
class Stream:
    """The output of a call that comes in chunks.

    Attributes:
        pieces: what has come, until it is large enough to be stored.
        size: of these, in bytes.
        stored: where further chunks go; None before.
        is_lost: whether it was dropped for a quota.
    """

    call: Call
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    stored: Stored | None = None
    is_lost: bool = False


def _owner(call: Call) -> str:
    return owner_of(call.context.user_id if call.context is not None else "", call.caller.principal.account)


def _takes_text(schema: Any) -> bool:
    declared = schema.get("type") if isinstance(schema, dict) else None
    return declared == "string" or (isinstance(declared, list) and "string" in declared)


def _text_of(output_json: str) -> tuple[str, str]:
    """Returns what is stored of an output, and its type: a text as it is, anything else as JSON."""
    if output_json[:1] == '"':
        try:
            text = json.loads(output_json)
            text.encode()
            return text, TEXT_TYPE
        except ValueError:  # a lone surrogate: it stays JSON
            pass
    return output_json, JSON_TYPE


def _content_of(block: pb.ContentBlock) -> tuple[bytes, str]:
    """Returns what is stored of a content block, and its type; nothing of a link."""
    if block.HasField("text"):
        return block.text.text.encode(), TEXT_TYPE
    for kind in ("image", "audio"):
        if block.HasField(kind):
            data = getattr(block, kind)
            return data.data, data.mime_type or BINARY_TYPE
    resource = block.resource  # empty where the block is a link
    if resource.HasField("text"):
        return resource.text.encode(), TEXT_TYPE
    return resource.data, resource.mime_type or BINARY_TYPE


def _where(stored: Stored) -> str:
    what = "read it with read_result, or give the handle alone as an argument of another tool"
    return f"{stored.size} bytes are stored as {stored.uri}: {what}"


def _beginning(text: str, stored: Stored) -> str:
    return (
        f"{text[:BEGINNING]}\n[this is the beginning of {len(text)} characters in {count_lines(text)} lines; all "
        f"{_where(stored)}]"
    )


def _link(stored: Stored) -> pb.ContentBlock:
    name, size = f"result of {stored.tool}", f"{stored.size} bytes"
    link = pb.ResourceLink(uri=stored.uri, name=name, description=size, mime_type=stored.mime_type)
    return pb.ContentBlock(resource_link=link)
