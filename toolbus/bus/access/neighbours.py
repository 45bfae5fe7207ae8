"""Decides which users of this machine may use the bus over loopback: ``neighbours`` of the configuration.

The kernel says which user a connection belongs to, so programs need no secret. The user is looked up for each
connection and never cached by a peer's address, because ports are used again. Unix sockets are protected by their
directory instead.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import weakref
from collections.abc import Callable, Sequence

from toolbus.common.local_users import Address, kernel_socket, owner_of, show_user, unmapped_uid
from toolbus.common.text import quote
from toolbus.errors import SetupError

log = logging.getLogger("toolbus")

SELF, ANY = "self", "any"
DEFAULT = (SELF,)
ROOT = 0
MAX_LOGGED = 1_000  # users whose first refusal is logged

OwnerOf = Callable[[Address, Address], int | None]


class Neighbours:
    """The users that may use one bus over loopback.

    Args:
        allowed: ``self``, ``any``, names of users, uids; the bus's own user and root are always allowed.
        ask: returns the uid of one end of a connection, by its own address and that of the other end.

    Raises:
        SetupError: from the constructor; an item is not a user of this machine.
    """

    def __init__(self, allowed: Sequence[str] = DEFAULT, *, ask: OwnerOf | None = None) -> None:
        if ask is None:
            # Open from now on: whoever uses up the descriptors of the bus keeps no other peer from being known.
            kernel = kernel_socket()
            ask = functools.partial(owner_of, kernel=kernel)
            if kernel is not None:
                weakref.finalize(self, kernel.close)
        self._ask = ask
        self._own = os.geteuid()
        self._unmapped = unmapped_uid()
        users = allowed_uids(allowed)
        self._allowed = None if users is None else users | {self._own, ROOT}  # None: everyone
        self._logged: set[int | None] = set()  # users whose refusal the log has

    @property
    def everyone(self) -> bool:
        """Whether every user of this machine may use the bus."""
        return self._allowed is None

    def check_system(self) -> None:
        """Looks up the user of a connection of its own. Allows everyone where the system does not know it."""
        if self._allowed is None:
            return
        try:
            owner = self._owner_of_own_connection()
        except OSError:  # perhaps another user has used up the ports: this shows nothing about the system
            return
        if owner != self._own or owner == self._unmapped:
            self._allowed = None
            log.warning(
                "this system does not say which user a connection belongs to, so every user of this machine may use "
                "the bus: to keep others out, listen on a unix socket only (--grpc unix:PATH --http off)"
            )

    def _owner_of_own_connection(self) -> int | None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            return self.uid_of(client.getsockname(), server.getsockname())

    def uid_of(self, peer: Address, listener: Address) -> int | None:
        """Returns the uid of a peer, by its address and the one of ours that it is connected to.

        None where the system does not say: its program has ended, or has closed the connection.
        """
        return self._ask(peer[:2], listener[:2])

    def allows(self, uid: int | None) -> bool:
        """Whether a user may use the bus."""
        return self._allowed is None or uid in self._allowed

    def refusal(self, uid: int | None) -> str:
        """Returns why a user may not use the bus, and how to fix it; empty where it may. The first one is logged."""
        if self._allowed is None or (uid in self._allowed and uid != self._unmapped):
            return ""
        users = " and ".join(show_user(each) for each in sorted(self._allowed, reverse=True))
        again = (
            f"only {users} may use this bus: connect again as one of them, or start the bus with neighbours = any "
            "(--neighbours any)"
        )
        if uid is None:
            text = f"this system does not say whose this connection was, since its program has closed it, and {again}"
        elif uid == self._unmapped:
            text = f"the program that made this connection belongs to another user namespace, and {again}"
        else:
            text = (
                f"this connection belongs to {show_user(uid)}, but only {users} may use this bus: run the program as "
                f"one of them, or add {uid} to `neighbours` of the bus (--neighbours {uid})"
            )
        if uid not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(uid)
            if uid is None:
                log.info(
                    "did not serve a connection, logged once: its program ended, or gave up while the bus was busy"
                )
            else:
                log.warning("refused a neighbour, logged once for each user: %s", text)
        return text


def allowed_uids(allowed: Sequence[str]) -> frozenset[int] | None:
    """Returns the uids of a list of users; None for everyone.

    Raises:
        SetupError: an item is not a user of this machine.
    """
    uids = frozenset(_uid(each) for each in allowed if each not in (SELF, ANY))
    return None if ANY in allowed else uids


def _uid(user: str) -> int:
    if user.isascii() and user.isdigit():
        if int(user) < 2**32 - 1:
            return int(user)
        raise SetupError(f"neighbours names the uid {quote(user)}: a uid is from 0 to {2**32 - 2}")
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise SetupError(
            f"neighbours names {quote(user)}, which is not a user of this machine: use 'self', 'any', the name of a "
            "user or a uid"
        ) from None
