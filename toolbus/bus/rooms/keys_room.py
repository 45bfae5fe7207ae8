"""Reloads the keys of a running bus: a revoked key or changed scopes are in force within a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from toolbus.bus.access.identity import Scopes
from toolbus.bus.core import Core, Room
from toolbus.bus.keys.keyring import Changed, Renewer
from toolbus.bus.keys.keys_file import FILE, KeyRecord
from toolbus.common.text import list_names


class KeysRoom(Room):
    """Follows the files of the keys."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._scopes: Mapping[str, Scopes] = {} if core.sessions.keyring is None else core.sessions.keyring.identities
        core.sessions.doorman.on_refresh.append(self._refreshed)
        core.calls.dispatcher.seams.current = core.sessions.doorman.current

    async def start(self) -> None:
        """Begins to follow the files."""
        if self.core.sessions.keyring is not None:
            self.repeat(self.core.program.timings.keys_seconds, self._read_again, "reloaded its keys")

    async def stop(self) -> None:
        """Stops following the files."""
        await self.core.sessions.doorman.close()

    async def _read_again(self) -> None:
        keyring, renewer = self.core.sessions.keyring, self.core.rooms.provider(Renewer)
        if keyring is not None and renewer is not None:
            await asyncio.to_thread(keyring.renew_if_due, renewer)
        await self.core.sessions.doorman.refresh()

    def _refreshed(self, changed: Changed) -> None:
        """Puts changes into force; called after every read of the files, since a key may also have expired."""
        core = self.core
        core.sessions.presence.refresh_identities(core.sessions.doorman.current, time.monotonic())
        assert core.sessions.keyring is not None  # without keys nothing is refreshed
        for key_id in sorted(changed.keys):
            self._record(core.sessions.keyring.keys.get(key_id), key_id)
        before, after = self._scopes, core.sessions.keyring.identities
        self._scopes = after
        names = [name for name in changed.identities if name in before]
        if names:
            core.catalog.view.scopes_changed([(before[name], after.get(name, Scopes())) for name in names])
            core.signals.catalog_changed()
        if changed.identities:
            core.audit.record("identities", target=list_names(sorted(changed.identities), 10), why=f"changed in {FILE}")
        core.signals.keys_changed(server=changed.server)

    def _record(self, key: KeyRecord | None, key_id: str) -> None:
        """Records that a key was revoked or changed in the file of the keys."""
        if key is None:
            self.core.audit.record("key.revoke", target=key_id, why=f"removed from {FILE}")
        elif key.revoked:
            self.core.audit.record("key.revoke", target=key_id, why=f"of identity {key.identity}, on {key.revoked}")
        else:
            self.core.audit.record("key.renew", target=key_id, why=f"of identity {key.identity}, changed in {FILE}")
