"""Admits HTTPS requests of other machines: by key, by scope, and no page of another site.

Each request needs a key. When a key ends, the requests that it began end too: a stream of events would otherwise go on.
"""

from __future__ import annotations

import asyncio

from starlette.types import Scope

from toolbus.bus.access.doorman import Doorman
from toolbus.bus.access.identity import LOCAL, Identity
from toolbus.bus.gateway.http_connection import CERTIFICATE, PROBES
from toolbus.bus.gateway.scope_guard import check_path
from toolbus.bus.loopback import is_own_origin, mask
from toolbus.errors import NotPermitted, Unauthenticated
from toolbus.text import quote

_OPEN_PATHS = frozenset(path.decode() for path in PROBES)  # they tell nothing but that the bus runs


class RemoteAccess:
    """Who may come in over HTTPS."""

    def __init__(self, doorman: Doorman) -> None:
        self._doorman = doorman
        self._open: dict[asyncio.Task[object], Identity] = {}  # requests that are being answered

    async def admit(self, scope: Scope) -> Identity:
        """Returns who makes a request.

        Raises:
            Unauthenticated: no key proves an identity.
            NotPermitted: its scopes do not hold what the path needs, or a page of another site asks.
            NotOffered: there is no such path for it.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        for name, value in headers:
            origin = value.decode("latin-1")
            if name == b"origin" and not (hosts and is_own_origin(origin, hosts[0], "https", scope["server"][1])):
                raise NotPermitted(
                    f"the Origin header is {quote(mask(origin))}, which is not the address of this listener: no page "
                    "of another site may use the bus; a program sends no Origin"
                )
        if scope["path"] in _OPEN_PATHS:
            return LOCAL
        given = [value.decode("latin-1") for name, value in headers if name == b"authorization"]
        if len(given) > 1:
            raise Unauthenticated("the request has two Authorization headers: send one")
        client = scope.get("client") or ("unknown", 0)
        peer = f"{client[0]}:{client[1]}"
        identity = await self._doorman.identify(given[0] if given else None, scope.get(CERTIFICATE), peer)
        check_path(identity, scope["method"], scope["path"])
        return identity

    def begin(self, identity: Identity) -> None:
        """Says that the current task answers a request of an identity."""
        task = asyncio.current_task()
        if task is not None and identity.scopes is not None:
            self._open[task] = identity
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._open.pop(task, None)

    def refresh(self) -> None:
        """Ends the requests of keys that are no longer in force."""
        for task, identity in list(self._open.items()):
            try:
                if self._doorman.current(identity).scopes is not identity.scopes:
                    task.cancel()  # a stream shows what its scopes allowed when it began
            except Unauthenticated:
                task.cancel()
