"""Persists the declarations of mounted servers, their era, and the fingerprints that are trusted.

So the tools of a server are offered before its process has started, and a change is noticed across restarts. A row
belongs to a mount and its command line: another program under the same name is another server. After `save` has
returned, the row survives a kill -9 (a write-ahead log, `synchronous=NORMAL`: a power cut may lose the last moments).

A damaged file is moved aside, with an error in the log: servers can list their declarations again. The approvals are
lost then, so servers with `pin = "block"` wait for an approval (see `is_new`). A row with a wrong checksum is left out.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolbus.bus.pins.pins import FingerprintFile
from toolbus.bus.storage.database import checksum_of, time_bytes

log = logging.getLogger("toolbus.mounts")

FILE = "mcp.db"
APPLICATION_ID = 0x5442746D  # "TBtm"
MAX_COMMANDS = 4  # command lines of one mount that are stored
KINDS = ("tools", "prompts", "resources", "templates")

# Script i lifts a file from version i to i + 1. Never edit one that was released.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE servers (
        mount TEXT NOT NULL,
        command TEXT NOT NULL,  -- digest of its command line
        peer TEXT NOT NULL,  -- what it said of itself, its era included, as JSON
        declarations TEXT NOT NULL,  -- lists by kind, as JSON
        saved REAL NOT NULL,
        checksum INTEGER NOT NULL,  -- of the columns above
        PRIMARY KEY (mount, command)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE fingerprints (
        mount TEXT NOT NULL,
        command TEXT NOT NULL,
        subject TEXT NOT NULL,
        approved TEXT NOT NULL,  -- the text that is trusted; empty: none yet
        pending TEXT NOT NULL,  -- the text that is declared instead; empty: none
        checksum INTEGER NOT NULL,  -- of the columns above
        PRIMARY KEY (mount, command, subject)
    ) STRICT, WITHOUT ROWID;
    """,
    "ALTER TABLE fingerprints RENAME COLUMN mount TO source;",  # as in other files of fingerprints
)
_PUT_SERVER = (
    "INSERT OR REPLACE INTO servers (mount, command, peer, declarations, saved, checksum) VALUES (?,?,?,?,?,?)"
)


@dataclass(frozen=True, slots=True)
class StoredServer:
    """The declarations of a server at its last run.

    Attributes:
        peer: era, version, capabilities, instructions: the fields of `ServerInfo`.
        declarations: entries of its lists, by kind; see `KINDS`.
    """

    peer: Mapping[str, Any] = field(default_factory=dict)
    declarations: Mapping[str, list[Any]] = field(default_factory=dict)


class MountManifest(FingerprintFile):
    """The file of mounts in one data directory: declarations and fingerprints."""

    application_id = APPLICATION_ID
    migrations = MIGRATIONS
    contents = "mounts"
    lost = (
        "servers list their tools again; the approvals of mounts are lost, those with pin = block wait for "
        "`toolbus approve`"
    )

    def load(self, mount: str, command: str) -> StoredServer | None:
        """Returns the declarations of a server; None if none are stored, or the row is damaged.

        Args:
            command: the digest of its command line (`MountEntry.command_digest`).
        """
        with self._guard:
            row = self._connection.execute(
                "SELECT peer, declarations, saved, checksum FROM servers WHERE mount = ? AND command = ?",
                (mount, command),
            ).fetchone()
        if row is None:
            return None
        peer, declarations, saved, checksum = row
        try:
            if checksum != _server_checksum(mount, command, peer, declarations, saved):
                raise ValueError("its checksum is wrong")
            return StoredServer(json.loads(peer), json.loads(declarations))
        except ValueError as error:
            log.error("%s: the row of mount %s is damaged and left out: %s", self.path, mount, error)
            return None

    def save(self, mount: str, command: str, remembered: StoredServer) -> None:
        """Persists the declarations of a server.

        Raises:
            sqlite3.Error: they could not be written; the earlier ones stay.
        """
        peer, declarations = (json.dumps(dict(each)) for each in (remembered.peer, remembered.declarations))
        saved = time.time()
        checksum = _server_checksum(mount, command, peer, declarations, saved)
        with self._transaction() as connection:
            connection.execute(_PUT_SERVER, (mount, command, peer, declarations, saved, checksum))
            old = connection.execute(
                "SELECT command FROM servers WHERE mount = ? ORDER BY saved DESC LIMIT -1 OFFSET ?",
                (mount, MAX_COMMANDS),
            ).fetchall()
            stale = [(mount, each) for (each,) in old]
            connection.executemany("DELETE FROM servers WHERE mount = ? AND command = ?", stale)
            connection.executemany("DELETE FROM fingerprints WHERE source = ? AND command = ?", stale)

    def is_new(self, mount: str, command: str) -> bool:
        """Tells whether a server without fingerprints is new; it is not after the file was damaged."""
        return not self.was_damaged and self.load(mount, command) is None


def _server_checksum(mount: str, command: str, peer: str, declarations: str, saved: float) -> int:
    return checksum_of(mount.encode(), command.encode(), peer.encode(), declarations.encode(), time_bytes(saved))
