"""Offers the tool with which plugins notify users outside a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from toolbus.bus.access.identity import Principal, principal_of
from toolbus.bus.calls.tripwire import Tripwire
from toolbus.bus.core import Core, Room
from toolbus.common.text import dump_json, quote
from toolbus.errors import InvalidRequest, NotPermitted
from toolbus.sdk import ToolScope, llm_tool


class NotificationsRoom(Room):
    """The notifications of one bus: `NotificationBoard` passes them on."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._board = core.presence.notifications

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the tool that notifies."""
        return [self.notify]

    async def stop(self) -> None:
        """Ends the streams of followers."""
        self._board.close()

    @llm_tool(
        description="Says something to a user outside a call: hosts that follow show it, or give it to the model."
    )
    async def notify(self, scope: ToolScope, text: str, user: str = "", data: Any = None) -> dict[str, Any]:
        """Notifies hosts.

        Args:
            text: what the user should read, 1 to 16,384 bytes.
            user: whom it is for; "" for everyone.
            data: JSON for programs, at most 262,144 bytes; null for none.

        Returns:
            ``number``, and ``hosts``: how many it was sent to; 0: no host follows, or none may see this user.
        """
        source = scope.caller_source
        _check_user(principal_of(scope), source, user)
        data_json = "" if data is None else dump_json(data)
        if self.core.policy.is_untrusted(source):
            self._check_secrets(source, dump_json([text, data]))  # a text may be JSON too
        hosts = self._board.publish(source, user, text, data_json, time.monotonic())
        return {"number": self._board.newest, "hosts": hosts}

    def _check_secrets(self, source: str, content: str) -> None:
        tripwire: Tripwire | None = self.core.dispatcher.tripwire
        blocked = tripwire.check("notify", content) if tripwire is not None else None
        if blocked:
            raise InvalidRequest(f"the notification of untrusted source {source!r} may hold a secret: {blocked}")


def _check_user(principal: Principal, source: str, user: str) -> None:
    """Checks which users an identity notifies: the text reaches users and the models of other hosts.

    An identity that may offer tools is a plugin, which may notify everyone, also from within a call.

    Raises:
        NotPermitted: the user is beyond its scopes.
    """
    scopes = principal.identity.scopes
    if scopes is None or scopes.offer or principal.source != source:
        return
    if not (scopes.users.match(user) if user else scopes.users.all):
        raise NotPermitted(
            f"{principal.identity.shown} may not notify {f'user {quote(user)}' if user else 'all users'}: it may "
            f"notify {scopes.users} (its scope users, which an operator of the bus sets)"
        )
