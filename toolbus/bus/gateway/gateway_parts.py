"""Holds what the endpoints of the HTTP application reach: the core of the bus and the rooms beside the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from toolbus.bus.callback_url import CallbackUrl
from toolbus.bus.catalog.changes import Outcome
from toolbus.bus.core import Core
from toolbus.bus.gateway.registrations import Registrations
from toolbus.bus.local import LocalCaller
from toolbus.bus.tasks import owner_of
from toolbus.council.council_service import CouncilService
from toolbus.errors import NotOffered
from toolbus.tool import Tool

SOURCE = "http"  # the source of calls over HTTP


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """What the endpoints reach.

    Attributes:
        registrations: where tools with a callback URL are registered; None where the bus takes none.
        own_url: where the application is served: a callback there would call itself.
        council: None where the bus has no council room.
    """

    core: Core
    registrations: Registrations | None
    own_url: CallbackUrl
    council: CouncilService | None

    def caller(self, *, is_admin: bool = False) -> LocalCaller:
        """Makes the caller of one request; cancelling its wait cancels the call."""
        return LocalCaller(SOURCE, self.core.dispatcher, is_admin=is_admin)

    def register(self, source: str, tool: Tool, target: CallbackUrl) -> Outcome:
        """Registers a tool with a callback URL: `Registrations.register`.

        Raises:
            NotOffered: the bus takes none.
        """
        if self.registrations is None:
            raise NotOffered("this bus takes no tools with a callback_url: register over gRPC, in a session")
        return self.registrations.register(source, tool, target)

    def persist(self) -> None:
        """Persists what was registered or withdrawn.

        Raises:
            NotKept: it could not be written; it holds until the bus stops.
        """
        if self.registrations is not None:
            self.registrations.persist(strict=True)

    def task_owner(self, user_id: str) -> str:
        """Returns the owner of a user's tasks; with "" that of clients that name no user over HTTP."""
        return owner_of(user_id, SOURCE)
