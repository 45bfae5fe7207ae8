"""Declares the capabilities of an MCP client, and the channel for messages to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")  # of logging, RFC 5424


@dataclass(frozen=True, slots=True)
class ClientCapabilities:
    """The capabilities that a client declares.

    Attributes:
        accepts: the questions that it accepts, in words of `ToolCall.accepts`.
        extensions: the names of extensions of the protocol.
    """

    accepts: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()

    @classmethod
    def of(cls, capabilities: Mapping[str, Any]) -> ClientCapabilities:
        """Reads the capabilities that a client declares."""
        accepts = {name for name in ("sampling", "roots") if isinstance(capabilities.get(name), Mapping)}
        elicitation = capabilities.get("elicitation")
        if isinstance(elicitation, Mapping):
            kinds = {kind for kind in ("form", "url") if isinstance(elicitation.get(kind), Mapping)}
            accepts |= {f"elicitation.{kind}" for kind in kinds or {"form"}}
        extensions = capabilities.get("extensions")
        return cls(frozenset(accepts), frozenset(extensions if isinstance(extensions, Mapping) else ()))


class Channel(Protocol):
    """Sends messages to the client of a request, before its response."""

    @property
    def takes_messages(self) -> bool:
        """Whether messages reach the client; over HTTP it must accept streams."""

    def send(self, message: bytes) -> None:
        """Sends a message, at once or when the client reads; never waits."""
