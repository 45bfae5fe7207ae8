"""Reads and writes the tokens of mounts for MCP servers: one private file for each mount.

A file holds the result of OAuth: the tokens, the registered client, and where tokens are refreshed. Only
the process that logs in or refreshes writes it; the bus reads the token and when it expires.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbus.bus.keys.private_files import make_directory, read_private, write_private
from toolbus.errors import SetupError

FOLDER = "mcp-tokens"  # in the data directory


@dataclass(frozen=True, slots=True)
class Tokens:
    """The parts of a file that the bus uses.

    Attributes:
        url: of the server that the tokens are for.
        access: the current token; "" without one.
        expires_at: in seconds since the epoch; 0 if unknown.
        can_refresh: whether a new token needs no user.
    """

    url: str
    access: str
    expires_at: float
    can_refresh: bool


def token_path(directory: Path, name: str) -> Path:
    """Returns the path of a mount's tokens.

    Args:
        directory: the data directory.
    """
    return directory / FOLDER / f"{name}.json"


def read_document(path: Path) -> dict[str, Any]:
    """Returns the content of a file; empty if it does not exist or has another form.

    Raises:
        SetupError: another user can read it, or owns it.
    """
    if not path.exists():
        return {}
    content, _ = read_private(path)
    try:
        document = json.loads(content)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Replaces a file.

    Raises:
        SetupError: it cannot be written.
    """
    make_directory(path.parent)
    write_private(path, json.dumps(document, indent=1).encode())


def tokens_of(document: Mapping[str, Any]) -> Tokens | None:
    """Returns the tokens of a file; None if it has none."""
    tokens, url = document.get("tokens"), document.get("url")
    if not isinstance(tokens, dict) or not isinstance(url, str):
        return None
    access, expires_at = tokens.get("access_token"), document.get("expires_at")
    return Tokens(
        url,
        access if isinstance(access, str) and access.isascii() and access.isprintable() else "",
        float(expires_at) if isinstance(expires_at, (int, float)) else 0.0,
        bool(tokens.get("refresh_token")),
    )


def remove_tokens(directory: Path, name: str) -> None:
    """Removes the tokens of a mount, if it has any.

    Raises:
        SetupError: the file cannot be removed.
    """
    try:
        token_path(directory, name).unlink(missing_ok=True)
    except OSError as error:
        raise SetupError(f"{token_path(directory, name)} cannot be removed: {error.strerror}") from None
