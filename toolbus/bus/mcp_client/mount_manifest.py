"""Persists what is known of mounted servers: what they declared, in which era they spoke, what of it is trusted.

So the tools of a server are offered before its process has started, and a change is noticed across restarts. What is
known belongs to a mount and its command line: another program under the same name is another server. What `save`
returned from survives a kill -9 (a write-ahead log, `synchronous=NORMAL`: a power cut may lose the last moments).

A damaged file is moved aside, with an error in the log: servers can say again what they declare. What was trusted is
gone then, so that servers with `pin = "block"` wait for an approval (`is_new` says so). A row whose checksum fails is
left out by itself.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from toolbus.bus.pins.fingerprint_file import FingerprintFile
from toolbus.bus.storage.database import checksum_of, time_bytes

log = logging.getLogger("toolbus.mcp_client")

FILE = "mcp.db"
APPLICATION_ID = 0x5442746D  # "TBtm"
MAX_COMMANDS = 4  # command lines that are remembered of one mount
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
class Remembered:
    """What a server said when it was last asked.

    Attributes:
        peer: about itself: era, version, capabilities, instructions; a JSON object whose keys are its writer's.
        declarations: objects as the protocol has them, by kind, see `KINDS`.
    """

    peer: Mapping[str, Any] = field(default_factory=dict)
    declarations: Mapping[str, list[Any]] = field(default_factory=dict)


class MountManifest(FingerprintFile):
    """The file of mounts in one data directory: what servers said, beside their fingerprints."""

    application_id = APPLICATION_ID
    migrations = MIGRATIONS
    contents = "mounts"
    lost = (
        "servers are asked again; what was approved of mounts is gone, those with pin = block wait for "
        "`toolbus approve`"
    )

    def load(self, mount: str, command: str) -> Remembered | None:
        """Returns what a server said last; None where it was never asked, or its row is damaged.

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
                raise ValueError("its checksum fails")
            return Remembered(json.loads(peer), json.loads(declarations))
        except ValueError as error:
            log.error("what %s holds of mount %s is damaged and left out: %s", self.path, mount, error)
            return None

    def save(self, mount: str, command: str, remembered: Remembered) -> None:
        """Persists what a server said.

        Raises:
            sqlite3.Error: it could not be written; what was known before stays.
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
        """Tells whether a server that has no fingerprints is seen for the first time, and was not merely forgotten."""
        return not self.was_damaged and self.load(mount, command) is None


def _server_checksum(mount: str, command: str, peer: str, declarations: str, saved: float) -> int:
    return checksum_of(mount.encode(), command.encode(), peer.encode(), declarations.encode(), time_bytes(saved))
