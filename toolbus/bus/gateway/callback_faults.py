"""Defines how an exchange with a callback URL can fail; needs no HTTP client."""

from __future__ import annotations


class ExchangeFault(Exception):
    """An exchange that brought no whole response; its text is the reason."""


class NotConnected(ExchangeFault):
    """No program accepted a connection, so nothing was sent.

    Attributes:
        out_of_sockets: whether this process had no socket left.
        untrusted: whether the program has no certificate that this machine trusts.
    """

    def __init__(self, reason: str, *, out_of_sockets: bool, untrusted: bool) -> None:
        super().__init__(reason)
        self.out_of_sockets = out_of_sockets
        self.untrusted = untrusted


class NotHttp(ExchangeFault):
    """The answer is not an HTTP response."""
