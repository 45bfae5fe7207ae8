"""Offers the keys of a bus to its operators, and lets tokens of configured issuers prove identities."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolbus.bus.access.identity import principal_of
from toolbus.bus.core import Core, Room
from toolbus.bus.keys.keys_file import CA, FILE, SERVER, parse_keys
from toolbus.bus.keys.private_files import read_private
from toolbus.errors import InvalidRequest, SetupError
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import llm_tool
from toolbus.parts.identity.settings import IssuerSettings

if TYPE_CHECKING:
    from toolbus.parts.identity.key_store import KeyStore

# Making a secret (`toolbus keys add` and `renew`) is not offered: it would pass the network and the records of calls.

_NO_DIRECTORY = "this bus stores nothing, so it has no keys: start it with a data directory"
_MAKE = "make keys with `toolbus keys init --name HOST`"


class IdentityRoom(Room):
    """The keys of one bus, and the issuers that it trusts.

    Raises:
        SetupError: from the constructor, if issuers are configured and the extra `jwt` is not installed.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._directory = core.config.keys_dir  # None where the bus persists nothing
        issuers, keyring = core.config.part(IssuerSettings).issuers, core.sessions.keyring
        if issuers and keyring is not None:
            from toolbus.parts.identity.issuers import Issuers  # the extra `jwt`, which others need not have

            core.sessions.doorman.issuers = Issuers(issuers, lambda: keyring.identities)

    def provides(self) -> Iterable[object]:
        """Returns what renews the server's certificate."""
        return [self] if self._directory is not None else []

    def tools(self) -> Iterable[Callable[..., Any]]:
        return [self.keys, self.key_revoke]

    @llm_tool(description="Lists the identities of peers elsewhere with their scopes, and the keys that prove them.")
    async def keys(self) -> dict[str, Any]:
        """Lists identities and keys; never a token or a private key, which the bus does not have.

        `certificates` says when the `server`'s own one and the newest `root` expire, in seconds since the epoch. A bus
        without keys answers with empty lists, and with a `note` on how to make some.
        """
        if self._directory is None:
            return {"identities": {}, "keys": [], "note": _NO_DIRECTORY}
        path = self._directory / FILE
        if not path.exists():
            return {"identities": {}, "keys": [], "note": f"{path} does not exist: {_MAKE}"}
        file = await asyncio.to_thread(lambda: parse_keys(read_private(path)[0], str(path)))
        ends = await asyncio.to_thread(_certificates, self._directory)
        return {
            "certificates": ends,
            "identities": {name: scopes.as_table() for name, scopes in file.identities.items()},
            "keys": [key.described(time.time()) for key in file.keys.values()],
        }

    @llm_tool(description="Revokes the keys of an identity, or one credential by its id; sessions that it proved end.")
    async def key_revoke(self, scope: ToolScope, name: str) -> dict[str, Any]:
        """Revokes keys.

        Args:
            name: of an identity, or the id of a credential or key.
        """
        with self.core.audit.operation("key.revoke", principal_of(scope), target=name):
            revoked = await asyncio.to_thread(lambda: self._store().revoke(name))
        return {"revoked": [key.id for key in revoked]}

    def renew_server(self) -> tuple[bool, float]:
        """Renews the server's certificate if it is due: `KeyStore.renew_server`."""
        return self._store().renew_server()

    def _store(self) -> KeyStore:
        """Loads what changes keys when it is needed: the extra `keys`, which a bus without keys need not have."""
        if self._directory is None:
            raise InvalidRequest(_NO_DIRECTORY)
        from toolbus.parts.identity.key_store import KeyStore

        return KeyStore(self._directory)


def _certificates(directory: Path) -> dict[str, float]:
    """Returns when the certificates of a bus expire, as far as they can be read here. Blocks."""
    try:
        from cryptography import x509
    except ImportError:  # the extra `keys`, which a bus need not have
        return {}
    ends = {}
    with contextlib.suppress(OSError, SetupError, ValueError):
        server = x509.load_pem_x509_certificate(read_private(directory / SERVER)[0])
        ends["server"] = server.not_valid_after_utc.timestamp()
        roots = x509.load_pem_x509_certificates(read_private(directory / CA)[0])
        ends["root"] = max(root.not_valid_after_utc.timestamp() for root in roots)
    return ends
