"""Serves the console: its page at ``/console``, and digests of the bus for it and for `toolbus top`.

Its code is loaded by the first request, so a bus without watchers does not pay for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolbus.bus.access.identity import Identity
from toolbus.bus.core import Core, Room
from toolbus.bus.rooms.gateway_room import GatewayRoom
from toolbus.bus.rooms.streams_room import StreamsRoom
from toolbus.bus.web_paths import Application, Message, Receive, Send
from toolbus.errors import PeerLost
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.console.settings import ConsoleSettings
from toolbus.protocol.tool import Result

if TYPE_CHECKING:
    from toolbus.parts.console.app import Logins
    from toolbus.parts.console.feed import DigestFeed

MAX_WAIT_SECONDS = 60.0  # for a digest with news
PAGE = Path(__file__).parent / "page"


class ConsoleRoom(Room):
    """The console of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._began = time.time()
        self._feed: DigestFeed | None = None  # None until it is first needed
        self._app: Application | None = None  # the same
        self._made_logins: Logins | None = None  # the same

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the tool that answers with digests."""
        return [self.digest]

    def provides(self) -> Iterable[object]:
        """Returns itself, where browsers log in: it tells whom a cookie proves."""
        return (self,) if self._is_served and self.core.config.https is not None else ()

    @property
    def _is_served(self) -> bool:
        config = self.core.config
        return config.part(ConsoleSettings).console and (config.http != "off" or config.https is not None)

    def routes(self) -> Iterable[str]:
        """Names the route that leads to the page."""
        return ["toolbus.parts.console.root_route:router"]

    async def open(self) -> None:
        if not self._is_served:
            return
        from toolbus.parts.console.app import HOME, PAGE_PATH, POLICY

        self.core.rooms.web.add(PAGE_PATH, self._serve)
        self.core.rooms.web.add("/api/console", self._serve)
        self.core.rooms.web.policies[HOME] = POLICY

    async def stop(self) -> None:
        """Ends the streams of digests."""
        if self._feed is not None:
            self._feed.close()

    @llm_tool(
        description="Shows what goes on: calls, sources and sessions, counts; everything first, then what changed."
    )
    async def digest(self, since: int = -1, wait_seconds: float = 0.0) -> Result:
        """Returns a digest of the bus.

        Args:
            since: the number of the digest that is known; what changed since then is answered, or everything.
            wait_seconds: how long to wait for something new, at most 60.
        """
        from toolbus.parts.console.feed import Ended

        try:
            # A request that waits does not delay a shutdown: draining is news.
            body = await self._digests().after(since, min(max(0.0, wait_seconds), MAX_WAIT_SECONDS))
        except Ended:
            raise PeerLost("the bus stops") from None
        return Result("", body.decode())

    def identity_in(self, header: str) -> Identity | None:
        """Returns the identity that a Cookie header proves: `Logins.identity_in`."""
        return self._logins.identity_in(header)

    @property
    def _logins(self) -> Logins:
        if self._made_logins is None:
            from toolbus.parts.console.app import Logins

            config, shared = self.core.config, self.core.program.store.secret("mcp")
            self._made_logins = Logins(self.core.sessions.doorman, config.data_dir, shared=shared)
        return self._made_logins

    def _digests(self) -> DigestFeed:
        if self._feed is None:
            from toolbus.parts.console.feed import DigestFeed, Readings

            core = self.core
            self._feed = DigestFeed(
                core.calls.records,
                core.calls.metrics,
                Readings(core, self._addresses, self._began),
                core.program.timings,
            )
        return self._feed

    def _addresses(self) -> dict[str, Any]:
        streams, gateway = self.core.rooms.find(StreamsRoom), self.core.rooms.find(GatewayRoom)
        return {
            "grpc": list(streams.listeners.addresses) if streams is not None else [],
            "http": gateway.address if gateway is not None else None,
            "https": gateway.secure_address if gateway is not None else None,
        }

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        if self._app is None:
            from toolbus.parts.console.app import ConsoleApp

            core = self.core
            self._app = ConsoleApp(PAGE, self._digests(), self._logins, core.audit, core.config.bus_id)
        await self._app(scope, receive, send)
