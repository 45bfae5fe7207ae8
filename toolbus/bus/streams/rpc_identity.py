"""Passes the identity of who makes an RPC from the check before it to the RPC itself."""

from __future__ import annotations

from contextvars import ContextVar

from toolbus.bus.access.identity import Identity

# Without a default: an RPC that no check came before ends in an error instead of passing for a trusted one.
_IDENTITY: ContextVar[Identity] = ContextVar("toolbus.rpc_identity")


def set_rpc_identity(identity: Identity) -> None:
    """Sets who made the RPC that the current task serves."""
    _IDENTITY.set(identity)


def rpc_identity() -> Identity:
    """Returns who made the RPC that the current task serves.

    Raises:
        LookupError: nothing has checked it.
    """
    return _IDENTITY.get()
