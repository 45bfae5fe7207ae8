"""Finds and exports the tools of a bus for hosts with a language model: its search, and its endpoints over HTTP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.access.identity import principal_of
from toolbus.bus.core import Core, Room
from toolbus.common.text import quote
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.models.dialects.names import find_dialect
from toolbus.parts.models.search import SEARCH_TOOLS, IndexCache, search_arguments, search_tool
from toolbus.protocol.tool import Tool, level_of

MAX_LOSSES = 3  # of a dialect that are shown


# The description of a tool loop's own search promises that found tools can be added; this one's host may not do that.
SEARCH_DESCRIPTION = (
    "Find tools by what they do, best first. Call this when the task needs something that none of your tools does. "
    "Do NOT call it when one of your tools fits, nor to look up facts, files or web pages: it finds tools. "
    "A tool that it found can be called by its name only if your host offers it to you; if it does not, tell the user "
    "which tool is missing. If no result fits, there is no such tool: try other words once, then say that you cannot "
    "do it. Never invent a tool."
)


class ModelsRoom(Room):
    """The indexes and exports of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.indexes = IndexCache(core.program.embedder)
        # The schema names the modes of this bus. The arguments are checked by the search itself, whose errors say
        # how a missing mode is installed.
        declare = llm_tool(
            name=SEARCH_TOOLS,
            description=SEARCH_DESCRIPTION,
            parameters=search_tool(self.indexes.modes).parameters,
            validate=False,
        )
        self._search_tools = declare(functools.partial(self._search))

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the search, for operators."""
        return [self._search_tools]

    def offered(self, group: str) -> Iterable[Callable[..., Any]]:
        """Returns the search, for models of a bus that offers the group `search`."""
        return [self._search_tools] if group == "search" else []

    def provides(self) -> Iterable[object]:
        """Returns the indexes, and what tells how a dialect writes a tool."""
        return (self, self.indexes)

    def routes(self) -> Iterable[str]:
        """Names the endpoints for exports and searches."""
        return ("toolbus.parts.models.export_routes:router",)

    def exported(self, tool: Tool, dialect: str) -> tuple[bool, str]:
        """Tells whether a dialect can express a tool, and what a model sees of it or why it sees nothing.

        Raises:
            InvalidRequest: no dialect has that name.
        """
        export = find_dialect(dialect).export([tool])
        if export.left_out:
            return False, f"{dialect} cannot express it: {export.left_out[0].why}"
        losses = [f"{loss.keyword}: {loss.why}" for loss in export.losses]
        more = f"; and {len(losses) - MAX_LOSSES} more" if len(losses) > MAX_LOSSES else ""
        loses = f"; its schema loses {'; '.join(losses[:MAX_LOSSES])}{more}" if losses else ""
        return True, f"{dialect} offers it as {quote(export.names.to_wire[tool.name])}{loses}"

    def _search(self, scope: ToolScope, **arguments: Any) -> dict[str, Any]:
        """Finds tools that the caller may call. Runs on a thread: a new catalog takes a while to be indexed."""
        query, options = search_arguments({name: value for name, value in arguments.items() if value is not None})
        user_id, level = scope.context.user_id, level_of(scope.context.attributes)
        principal, view = principal_of(scope), self.core.catalog.view
        # The same key as that of a search over HTTP without a role, so that both use one index.
        key = ("", user_id if view.permissions else "", level, principal.identity.scopes)
        index = self.indexes.index_of_blocks(key, view.listed(None, user_id, level, principal=principal).blocks)
        return index.search(query, **options)
