"""Lists and calls the tools of a registry on behalf of one user, for a tool loop or a realtime session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from toolbus.functions.call_context import CallContext
from toolbus.tool import Progress, Result, Tool
from toolbus.tools.backend import Backend

POLL_SECONDS = 0.05  # between looks at the revision: changes come from any thread, and need no lock this way


class RegistrySource:
    """A `toolbus.loop.ToolSource` of one user.

    Args:
        call: `ToolRegistry.call_result`.
        ctx: passed to handlers that have a parameter of that name.
    """

    def __init__(self, backend: Backend, call: Callable[..., Awaitable[Result]], user_id: str, ctx: Any) -> None:
        self._backend = backend
        self._call = call
        self._user_id = user_id
        self._ctx = ctx

    def __repr__(self) -> str:
        return f"<RegistrySource tools={len(self._backend.listings(self._user_id))} user={self._user_id!r}>"

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        """Returns the revision and the tools that the user may call."""
        revision = self._backend.registry.revision
        return revision, [listing.tool for listing in self._backend.listings(self._user_id)]

    async def call(
        self,
        name: str,
        arguments_json: str,
        *,
        context: CallContext | None,
        schema_hash: str,
        timeout: float | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Result:
        """Calls a tool; a context without a user gets this source's."""
        return await self._call(
            name,
            arguments_json,
            self._user_id,
            self._ctx,
            context=context,
            schema_hash=schema_hash,
            timeout=timeout,
            on_progress=on_progress,
        )

    async def changes(self) -> AsyncIterator[int]:
        """Yields the revision, then each newer one."""
        known = -1
        while True:
            revision = self._backend.registry.revision
            if revision != known:
                known = revision
                yield revision
            await asyncio.sleep(POLL_SECONDS)
