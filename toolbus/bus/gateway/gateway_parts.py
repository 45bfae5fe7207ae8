"""Holds the parts of the bus that the endpoints use: its core, and rooms other than the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from toolbus.bus.access.identity import Identity, Principal
from toolbus.bus.callback_url import CallbackUrl
from toolbus.bus.catalog.changes import ChangeOutcome
from toolbus.bus.core import Core
from toolbus.bus.gateway.registrations import Registrations, compile_by_rest
from toolbus.bus.gateway.remote_access import RemoteAccess
from toolbus.bus.local import LocalCaller
from toolbus.errors import NotOffered
from toolbus.protocol.tool import Tool

SOURCE = "http"  # the source of calls over HTTP; of an identity with its name
IDENTITY = "toolbus.identity"  # of an ASGI scope: who makes the request
LARGE = 8 * 1024  # bytes of a registration that is read on a thread, since it would hold the loop
MANY = 2_000  # entries of the catalog
SCOPE_KEY = "toolbus.parts"  # of an ASGI scope

T = TypeVar("T")


def parts_of(request: Request) -> GatewayParts:
    """Returns the parts of the bus that a request came to: all buses of a process share the endpoints."""
    parts: GatewayParts = request.scope[SCOPE_KEY]
    return parts


def principal_of(request: Request, user_id: str = "", level: int = 0) -> Principal:
    """Returns who makes a request.

    Args:
        user_id: on whose behalf, as the request says; "" where it names no user.
        level: that user's access level, as the request says.

    Raises:
        NotPermitted: the identity may not act for that user, or not state that level.
    """
    identity: Identity = request.scope[IDENTITY]
    identity.check_claims(user_id, level)
    return Principal(SOURCE if identity.scopes is None else f"{SOURCE}:{identity.name}", identity=identity)


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The parts of one bus.

    Attributes:
        registrations: where tools with a callback URL are registered; None where the bus takes none.
        own_url: where the application is served: a callback there would call itself; None over HTTPS only.
        remote: admits requests over HTTPS.
    """

    core: Core
    registrations: Registrations | None
    own_url: CallbackUrl | None
    remote: RemoteAccess
    _caches: dict[Callable[[], Any], Any] = field(default_factory=dict, init=False, repr=False)

    def cache(self, kind: Callable[[], T]) -> T:
        """Returns this bus's cache of a kind, empty at first."""
        if kind not in self._caches:
            self._caches[kind] = kind()
        cache: T = self._caches[kind]
        return cache

    def caller(self, request: Request, *, is_admin: bool = False) -> LocalCaller:
        """Makes the caller of one request; cancelling its wait cancels the call."""
        principal = principal_of(request)
        identity = principal.identity
        return LocalCaller(principal.source, self.core.calls.dispatcher, is_admin=is_admin, identity=identity)

    async def register(
        self, source: str, read: Callable[[], Tool], size: int, target: CallbackUrl, secret: str
    ) -> ChangeOutcome:
        """Registers a tool with a callback URL: `Registrations.register`. A large one is read on a thread.

        Args:
            read: returns the tool.
            size: of what is read, in bytes.

        Raises:
            NotOffered: the bus takes none.
        """
        if self.registrations is None:
            raise NotOffered("this bus takes no tools with a callback_url: register over gRPC, in a session")
        limits, compiled = self.core.config.limits, None
        if size > LARGE or '"pattern' in (tool := read()).parameters_json:
            tool, compiled = await self.core.calls.dispatcher.seams.budgets.compile(
                source, lambda: (each := read(), compile_by_rest(each, limits))
            )
        return self.registrations.register(source, tool, target, secret, compiled)

    async def read(self, read: Callable[[], T]) -> T:
        """Runs what reads a whole list of tools: on a thread where there are many, which would hold the loop."""
        if self.core.catalog.registry.size <= MANY:
            return read()
        return await asyncio.to_thread(read)

    def persist(self) -> None:
        """Persists changes of the registrations.

        Raises:
            NotKept: it could not be written; it holds until the bus stops.
        """
        if self.registrations is not None:
            self.registrations.persist(strict=True)
