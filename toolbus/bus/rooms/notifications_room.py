"""Offers the tool with which plugins notify users outside a call, and persists how far the numbers of the bus are."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from toolbus.bus.access.budgets import LONG_BYTES
from toolbus.bus.access.identity import Principal, principal_of
from toolbus.bus.core import Core, Room
from toolbus.bus.storage.store import Kind
from toolbus.common.text import dump_json, quote
from toolbus.errors import InvalidRequest, NotPermitted
from toolbus.sdk import ToolScope, llm_tool

log = logging.getLogger("toolbus")

# Catalog revisions and notification numbers begin with the time, and rise over restarts also where the clock went back.
# So a number is stored that is above all in use, and the next one long before it is reached. Each is about 1,000
# seconds of the clock ahead: after a kill the numbers are ahead of it for that long.
NUMBERS = Kind("numbers", needed=False, without="begin the numbers of the catalog and of notifications with the time")
REVISIONS_AHEAD = 1_000_000
NOTIFICATIONS_AHEAD = 1_000_000_000


class NotificationsRoom(Room):
    """The notifications of one bus: `NotificationBoard` passes them on."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._board = core.sessions.presence.notifications
        self._stored: dict[str, int] | None = None  # the numbers in the store; None before it is open
        core.signals.on_change.append(self._store_numbers)

    async def open(self) -> None:
        """Lets the numbers go on after those of earlier runs."""
        stored = self.core.program.store.load(NUMBERS)
        numbers = {name: number for name, number in stored.items() if isinstance(number, int)}
        self.core.catalog.registry.begin_after(numbers.get("revision", 0))
        self._board.begin_after(numbers.get("notification", 0))
        self._stored = {}
        self._store_numbers()

    def _store_numbers(self) -> None:
        """Stores numbers that are far above those in use, when they come near to the stored ones."""
        if self._stored is None:
            return
        uses = (
            ("revision", self.core.catalog.registry.revision, REVISIONS_AHEAD),
            ("notification", self._board.newest, NOTIFICATIONS_AHEAD),
        )
        due = {name: now + ahead for name, now, ahead in uses if self._stored.get(name, 0) < now + ahead // 2}
        if due:
            self._write(due)

    def _write(self, numbers: dict[str, int]) -> None:
        if self._stored is not None:
            self._stored |= numbers
        try:
            self.core.program.store.write(NUMBERS, numbers)
        except Exception as problem:  # of any database; the next start then begins with the time
            log.warning("the numbers of the catalog and of notifications cannot be stored: %s", problem)

    def tools(self) -> Iterable[Callable[..., Any]]:
        """Returns the tool that notifies."""
        return [self.notify]

    async def stop(self) -> None:
        """Ends the streams of followers, and stores the numbers as they are."""
        self._board.close()
        if self._stored is not None:
            self._write({"revision": self.core.catalog.registry.revision, "notification": self._board.newest})
            self._stored = None

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
        self._board.take_rate(source, time.monotonic())  # first: what is refused should cost little
        data_json = "" if data is None else dump_json(data)
        if self.core.catalog.policy.is_untrusted(source):
            content = dump_json([text, data])  # a text may be JSON too
            check = partial(self._check_secrets, source, content)
            budgets = self.core.calls.dispatcher.seams.budgets
            await budgets.beside(source, check) if len(content) > LONG_BYTES else check()
        hosts = self._board.publish(source, user, text, data_json)
        self._store_numbers()
        return {"number": self._board.newest, "hosts": hosts}

    def _check_secrets(self, source: str, content: str) -> None:
        tripwire = self.core.calls.dispatcher.seams.tripwire
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
