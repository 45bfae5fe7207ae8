"""Puts the large results of a bus behind handles, and reads them for their owners: by a tool, and as MCP resources."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from toolbus.bus.access.identity import Principal, principal_of
from toolbus.bus.catalog.entry import Entry, is_operators
from toolbus.bus.core import Core, Room
from toolbus.errors import InvalidRequest
from toolbus.functions.reply import Err
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.handles.handles import Handles
from toolbus.parts.handles.reading import read_part
from toolbus.parts.handles.result_store import URI, Gone, ResultStore
from toolbus.parts.handles.settings import HandleSettings
from toolbus.parts.mcp.features import OnUpdate, Requester, features_of
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.tasks.task import owner_of

SWEEP_SECONDS = 30.0  # between two looks for results whose time has passed


class Resources:
    """The stored results, as resources of MCP: a `FeatureProvider`."""

    source = "toolbus.results"
    role = instructions = ""
    min_level = 0
    capabilities: Collection[str] = ("resources",)

    def __init__(self, store: ResultStore) -> None:
        self._store = store

    def declared(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Returns a template alone: a result is known to those who got its link."""
        description = "A large result of a tool, for the user who called it, until its time has passed."
        template = {"uriTemplate": f"{URI}{{id}}", "name": "large result", "description": description}
        return (template,) if kind == "templates" else ()

    async def request(self, method: str, params: Mapping[str, Any], asker: Requester) -> dict[str, Any]:
        """Reads a result as a whole.

        Raises:
            RpcError: the client has no such result.
        """
        uri, account = str(params.get("uri")), Principal(asker.source, identity=asker.identity).account
        try:
            stored = self._store.find(uri, owner_of(asker.user_id, account))
            content = await asyncio.to_thread(self._store.read, stored)
        except Gone as gone:
            raise RpcError(McpCode.INVALID_PARAMS, str(gone), {"uri": uri}) from None
        body = {"text": content.decode()} if stored.is_text else {"blob": base64.b64encode(content).decode()}
        return {"resultType": "complete", "contents": [{"uri": uri, "mimeType": stored.mime_type, **body}]}

    def subscribe(self, uri: str, on_update: OnUpdate) -> Callable[[], None]:
        """Reports nothing: a result does not change."""
        return lambda: None


class HandlesRoom(Room):
    """The handles of one bus; without a bound, no result becomes one."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._rules = core.config.part(HandleSettings).results
        dispatcher = core.calls.dispatcher
        folder = core.config.data_dir / "results" if core.config.data_dir is not None else None
        self._store = ResultStore(self._rules, folder)
        self._handles = Handles(self._rules, self._store, dispatcher, core.catalog.policy)
        if self._rules.least:
            dispatcher.seams.interceptors = (*dispatcher.seams.interceptors, self._handles)
            dispatcher.seams.expand = self._handles.expand

    def tools(self) -> Iterable[Callable[..., Any]]:
        return [self.read_result] if self._rules.least else []

    def offered(self, group: str) -> Iterable[Callable[..., Any]]:
        """Returns the tool that reads results, for models too."""
        return self.tools() if group == "results" else []

    def provides(self) -> Iterable[object]:
        """Returns itself, for explanations and metrics."""
        return [self]

    async def start(self) -> None:
        """Finds the results of earlier runs, and begins to drop those whose time has passed."""
        if self._rules.least:
            await asyncio.to_thread(self._store.open)
            features_of(self.core).add(Resources(self._store))
            self.repeat(SWEEP_SECONDS, self._sweep, "dropped results whose time has passed")

    async def stop(self) -> None:
        """Writes what is in memory into the data directory."""
        if self._rules.least:
            await self._store.close()

    def _sweep(self) -> None:
        self._store.expire()
        self._handles.sweep()

    @llm_tool(
        description="Reads more of a large result. Use it when a tool answered with the beginning of a result and a "
        "handle such as toolbus://results/…, and you need another part. Give one of: path, for a value in JSON; grep, "
        "for the lines that have a text; lines, for a range. Without them it reads from the beginning.",
        read_only=True,
    )
    async def read_result(
        self,
        scope: ToolScope,
        handle: Annotated[str, "The handle, as the tool wrote it."],
        path: Annotated[str, "Keys and indexes with dots between, such as items.0.name."] = "",
        lines: Annotated[str, "A range of lines from 1, such as 10-20 or 10-."] = "",
        grep: Annotated[str, "A text; only lines that have it are read, each with its number."] = "",
    ) -> Any:
        """Reads a part of a result of the caller's user."""
        try:
            stored = self._store.find(handle, owner_of(scope.context.user_id, principal_of(scope).account))
            if not stored.is_text:
                return Err(f"it is {stored.mime_type}, not text: give the handle to a tool, or read it as a resource")
            return await asyncio.to_thread(lambda: read_part(self._store.read(stored).decode(), path, lines, grep))
        except (Gone, InvalidRequest) as error:
            return Err(str(error))

    def explain(self, entry: Entry) -> Iterator[tuple[str, bool | None, str]]:
        """Yields the step of a call that handles add."""
        bound = self._rules.bound(entry.name, entry.source)
        if bound and not is_operators(entry.source):
            checked = ", but it declares an output schema, so they stay whole" * bool(entry.tool.output_schema_json)
            yield "large results", None, f"results above {bound} bytes become handles{checked}"

    def counters(self) -> Iterator[tuple[str, str, list[tuple[dict[str, str], int]]]]:
        """Yields counters for the metrics: name, help, and the number by labels."""
        numbers = [({"use": use}, number) for use, number in self._handles.counts.items()]
        yield "toolbus_handles", "Results that became handles, and handles that were arguments.", numbers
