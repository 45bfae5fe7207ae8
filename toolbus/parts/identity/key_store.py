"""Changes the keys of a bus: makes them, adds and renews identities' keys, revokes them, rotates the authority.

For ``toolbus keys`` and the bus's own tools. Each change holds the lock of the directory and replaces files as a whole;
comments in ``keys.toml`` stay. Writes are ordered so that a kill between two of them leaves keys that work. A running
bus reads changed files by itself (`keyring`).
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from toolbus.bus.access.identity import NAME, Scopes, day_of
from toolbus.bus.keys.keys_file import CA, FILE, SERVER, TOKEN_PREFIX, KeyRecord, KeysFile, parse_keys
from toolbus.bus.keys.private_files import locked, make_directory, prepared, read_private, write_private
from toolbus.common.text import list_names, nearest, quote
from toolbus.errors import SetupError
from toolbus.parts.identity.authority import (
    DAYS,
    RENEW_BEFORE_DAYS,
    Authority,
    Issued,
    all_names,
    moment_of,
    names_of,
    validity_of,
)

try:
    import tomlkit
except ImportError as error:
    raise SetupError(f"keys need more libraries ({error}): run `pip install 'toolbus[keys]'`") from None

CA_KEY = "ca.key"  # private key of the issuing root: its holder can issue keys; the bus needs it only to renew
CROSSED = "crossed.pem"  # while the authority rotates: the new root as the old one certifies it
MAX_DAYS = 3652
DAY = 86_400.0
_ADDRESS = re.compile(r"(?:tls:|mtls:|https://)([^:/]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})/?")

_HEADER = """\
# Identities of this bus, and the keys that prove them. `toolbus keys` writes this file; it may also be edited while the
# bus runs: scopes apply within a second, and `revoked = 2027-01-31` in a key's table ends its sessions.

"""


@dataclass(frozen=True, slots=True)
class CredentialRequest:
    """How a credential is to be made.

    Attributes:
        file: where it is written.
        days: how long it is valid.
        address: of the bus; "" means the one in the keys directory.
        overwrite: whether the file may exist already.
    """

    file: Path
    days: float = DAYS
    address: str = ""
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A new credential.

    Attributes:
        id: of both its keys, which are `ID-token` and `ID-cert`.
        expires: in seconds since the epoch.
    """

    name: str
    id: str
    file: Path
    address: str
    expires: float


class KeyStore:
    """The keys directory of one bus, for changes. Its methods may block: never call them on an event loop.

    Args:
        directory: holds all files.
        clock: tells seconds since the epoch.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._clock = clock

    def read(self) -> KeysFile:
        """Returns the identities and keys.

        Raises:
            SetupError: the file is missing, broken, or others may read it; so in each method below.
        """
        return parse_keys(self._content(FILE), str(self._directory / FILE))

    # -- the authority and the server's certificate ------------------------------------------------------------------

    def init(self, names: Sequence[str], address: str = "") -> tuple[KeysFile, bool]:
        """Makes an authority and a server's certificate; an existing authority gets new names, address and certificate.

        Args:
            names: host names and IP addresses of the bus; empty means those of before.
            address: the default one of credentials; "" means that of before.

        Returns:
            The file that is in force, and whether the authority is new.
        """
        make_directory(self._directory)
        now = self._clock()
        with locked(self._directory):
            if (self._directory / FILE).exists():
                content, created = self._content(FILE), False
                before = parse_keys(content, str(self._directory / FILE))
                authority = self._authority()
            else:
                content, created, before = _HEADER.encode(), True, KeysFile()
                if not names:
                    raise SetupError("name the bus: --name HOST, as other machines dial it; may be repeated")
            after = replace(before, names=tuple(names) or before.names, address=address or before.address)
            if created:
                authority, key = Authority.create(now)
            server = authority.server(after.names, now)  # checks the names before anything is written
            _check_address(after.address, after.names)
            if created:
                self._write(CA_KEY, key)
                self._write(CA, authority.root_pems)
            self._write(SERVER, server.key + server.certificate + authority.crossed)
            with self._edit(content, after) as document:
                table = document.setdefault("server", tomlkit.table())
                table["names"] = list(after.names)
                if after.address:
                    table["address"] = after.address
        return after, created

    def renew_server(self) -> tuple[bool, float]:
        """Renews the server's certificate if it is due or not valid yet, or if its names are not those of the file.

        One that is not valid yet was made while the clock was ahead.

        Returns:
            Whether it was renewed, and when to check again, in seconds since the epoch.
        """
        now = self._clock()
        with locked(self._directory):
            names = self.read().names
            current = self._content(SERVER)
            begin, end = validity_of(_certificates(current))
            due = end - RENEW_BEFORE_DAYS * DAY
            if begin <= now < due and names_of(_certificates(current)) == all_names(names):
                return False, due
            authority = self._authority()
            server = authority.server(names, now)
            self._write(SERVER, server.key + server.certificate + authority.crossed)
        return True, max(server.expires - RENEW_BEFORE_DAYS * DAY, now + DAY)

    def rotate(self) -> str:
        """Adds a root, which issues from now on; the earlier ones stay trusted.

        Returns:
            The id of the new root.
        """
        with locked(self._directory):
            authority = self._authority()
            if len(authority.roots) > 1:
                raise SetupError(
                    "a rotation is under way: renew the credentials that `toolbus keys list` shows as old, then end "
                    "it with `toolbus keys rotate-ca --finish`"
                )
            names, now = self.read().names, self._clock()
            rotated, key = authority.rotated(now)
            server = rotated.server(names, now)
            # It is trusted before it issues, and the old root certifies it before its key is in force.
            self._write(CA, rotated.root_pems)
            self._write(CROSSED, rotated.crossed)
            self._write(CA_KEY, key)
            self._write(SERVER, server.key + server.certificate + rotated.crossed)
            return rotated.root_id

    def finish_rotation(self, *, force: bool = False) -> list[KeyRecord]:
        """Drops every root but the one that issues.

        Args:
            force: whether to do so although some identities have live keys of other roots only.

        Returns:
            The live keys of other roots: their sessions go on, but they make no new connections.
        """
        with locked(self._directory):
            authority, file, now = self._authority(), self.read(), self._clock()
            if len(authority.roots) == 1:
                raise SetupError("no rotation is under way: begin one with `toolbus keys rotate-ca`")
            old = old_keys(file, authority.root_id, now)
            live = [key for key in file.keys.values() if key.state(now) == "live"]
            names = sorted({key.identity for key in old} - {each.identity for each in live if each not in old})
            if names and not force:
                raise SetupError(
                    f"credentials of {list_names(names)} know only the old root, and would stop working: renew each "
                    "with `toolbus keys renew NAME` and hand it over, or end them with --force"
                )
            server = authority.server(file.names, now)
            self._write(SERVER, server.key + server.certificate)
            self._write(CA, authority.only_current())
            (self._directory / CROSSED).unlink(missing_ok=True)
            return old

    def issuing_root(self) -> str:
        """Returns the id of the root that issues; "" where the authority's key is on another machine."""
        return self._authority().root_id if (self._directory / CA_KEY).exists() else ""

    # -- identities' keys --------------------------------------------------------------------------------------------

    def add(self, name: str, scopes: Scopes, request: CredentialRequest) -> Made:
        """Adds an identity, and makes its first credential."""
        if not NAME.fullmatch(name):
            raise SetupError(f"the name {quote(name)} breaks the rule {NAME.pattern}: choose another")
        with locked(self._directory):
            content, file = self._content(FILE), self.read()
            if name in file.identities:
                raise SetupError(
                    f"identity {name!r} is there already: make it a new credential with `toolbus keys renew {name}`, "
                    f"or change what it may do in {self._directory / FILE}"
                )
            if name in {*file.keys, *map(_stem, file.keys)}:
                raise SetupError(f"the name {name!r} is the id of a key: choose another")
            after = replace(file, identities={**file.identities, name: scopes})
            new = {"identities": {name: scopes.as_table()}}
            return self._issue(name, request, content, after, new)

    def renew(self, name: str, request: CredentialRequest) -> Made:
        """Makes a new credential for an identity; the one before is valid until it expires or is revoked."""
        with locked(self._directory):
            content, file = self._content(FILE), self.read()
            if name not in file.identities:
                raise SetupError(_unknown(name, file.identities, "identity"))
            return self._issue(name, request, content, file, {})

    def revoke(self, name: str) -> list[KeyRecord]:
        """Revokes the live keys of an identity, of a credential (its id), or one key.

        Returns:
            The keys that were revoked.
        """
        with locked(self._directory):
            content, file, now = self._content(FILE), self.read(), self._clock()
            named = [key for key in file.keys.values() if name in (key.identity, key.id, _stem(key.id))]
            if not named and name not in file.identities:
                known = {*file.identities, *file.keys, *map(_stem, file.keys)}
                raise SetupError(_unknown(name, known, "identity or key"))
            live = [replace(key, revoked=day_of(now)) for key in named if key.state(now) == "live"]
            if live:
                after = replace(file, keys={**file.keys, **{key.id: key for key in live}})
                with self._edit(content, after) as document:
                    for key in live:
                        document["keys"][key.id]["revoked"] = moment_of(now).date()
            return live

    def _issue(
        self, name: str, request: CredentialRequest, content: bytes, after: KeysFile, new: dict[str, Any]
    ) -> Made:
        """Makes a credential, and appends its tables to the file."""
        if not 0 < request.days <= MAX_DAYS:
            raise SetupError(f"--days is {request.days:g}, it must be above 0 and at most {MAX_DAYS}")
        address = request.address or after.address
        if not address:
            raise SetupError(
                "the address of the bus is not known: give --address mtls:HOST:PORT, or have it remembered with "
                "`toolbus keys init --address mtls:HOST:PORT`"
            )
        _check_address(address, after.names)
        if request.file.exists() and not request.overwrite:
            raise SetupError(f"{request.file} is there already: name another file with -o, or remove it")
        authority, now = self._authority(), self._clock()
        issued = authority.client(name, now, request.days)
        stem = _new_id(after.keys)
        token = f"{TOKEN_PREFIX}{stem}_{secrets.token_urlsafe(32)}"
        common = {"created": day_of(now), "expires": issued.expires, "root": authority.root_id}
        records = [
            KeyRecord(f"{stem}-token", name, "token", hashlib.sha256(token.encode()).hexdigest(), **common),  # type: ignore[arg-type]
            KeyRecord(f"{stem}-cert", name, "certificate", issued.fingerprint, **common),  # type: ignore[arg-type]
        ]
        after = replace(after, keys={**after.keys, **{key.id: key for key in records}})
        new = {**new, "keys": {key.id: _key_table(key) for key in records}}
        credential = _credential(name, address, token, authority, issued)
        with prepared(request.file, credential) as complete:
            self._save(content.rstrip() + b"\n\n" + tomlkit.dumps(new).encode(), after)
            os.replace(complete, request.file)
        return Made(name, stem, request.file, address, issued.expires)

    # -- files -------------------------------------------------------------------------------------------------------

    def _content(self, name: str) -> bytes:
        return read_private(self._directory / name)[0]

    def _write(self, name: str, content: bytes) -> None:
        write_private(self._directory / name, content)

    def _authority(self) -> Authority:
        if not (self._directory / CA_KEY).exists():
            raise SetupError(
                f"{self._directory / CA_KEY} is not here, and only it can issue: do this where it is, and copy "
                f"{SERVER}, {CA} and {FILE} here; or copy it here for the moment"
            )
        crossed = self._content(CROSSED) if (self._directory / CROSSED).exists() else b""
        return Authority(self._content(CA_KEY), self._content(CA), crossed)

    @contextmanager
    def _edit(self, content: bytes, after: KeysFile) -> Iterator[Any]:
        document = tomlkit.parse(content.decode("utf-8-sig"))
        yield document
        self._save(tomlkit.dumps(document).encode(), after)

    def _save(self, content: bytes, expected: KeysFile) -> None:
        """Writes the file, after a check that it reads as expected."""
        place = str(self._directory / FILE)
        try:
            as_expected = _plain(parse_keys(content, place)) == _plain(expected)
        except SetupError:
            as_expected = False
        if not as_expected:
            raise SetupError(
                f"{place} is written in a form that cannot be changed safely: write each identity and key as a table "
                "of its own ([identities.NAME], [keys.ID]), or make this change by hand"
            )
        self._write(FILE, content)


def old_keys(file: KeysFile, issuing: str, now: float) -> list[KeyRecord]:
    """Returns the live keys that another root than the current one issued."""
    return [key for key in file.keys.values() if key.root != issuing and key.state(now) == "live"]


def _check_address(address: str, names: Sequence[str]) -> None:
    if not address:
        return
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise SetupError(
            f"the address {quote(address)} is not tls:HOST:PORT, mtls:HOST:PORT or https://HOST:PORT: write for "
            "example mtls:bus.team.example:48931"
        )
    host = match[1].strip("[]").lower()
    if host not in all_names(names) and f"*.{host.partition('.')[2]}" not in all_names(names):
        raise SetupError(
            f"the address {quote(address)} is not one of the server's certificate, which is for "
            f"{list_names(all_names(names))}: add --name {host}"
        )


def _plain(file: KeysFile) -> tuple[Any, ...]:
    scopes = {name: scopes.as_table() for name, scopes in file.identities.items()}
    keys = {key.id: replace(key, expires=key.expires // 1) for key in file.keys.values()}
    return scopes, keys, tuple(file.names), file.address


def _key_table(key: KeyRecord) -> dict[str, Any]:
    return {
        "identity": key.identity,
        "kind": key.kind,
        "sha256": key.sha256,
        "created": datetime.fromisoformat(key.created).date(),
        "expires": moment_of(key.expires),
        "root": key.root,
    }


def _credential(name: str, address: str, token: str, authority: Authority, issued: Issued) -> bytes:
    """Returns the content of a credential file, as `toolbus.sdk` reads it."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"Proves identity {name} to a bus. Secret: it is all that proves to be {name}."))
    document["name"] = name
    document["address"] = address
    document["expires"] = moment_of(issued.expires)
    document["token"] = token
    for field, pem in (("ca", authority.root_pems), ("certificate", issued.certificate), ("key", issued.key)):
        document[field] = tomlkit.string(pem.decode("ascii"), multiline=True)
    text: str = tomlkit.dumps(document)
    return text.encode()


def _new_id(known: Collection[str]) -> str:
    stems = set(map(_stem, known))
    while (key_id := secrets.token_hex(4)) in stems:
        pass
    return key_id


def _stem(key_id: str) -> str:
    """Returns the id of the credential that a key belongs to."""
    return key_id.removesuffix("-token").removesuffix("-cert")


def _certificates(pem: bytes) -> bytes:
    return pem[pem.index(b"-----BEGIN CERTIFICATE-----") :]


def _unknown(name: str, known: Collection[str] | Mapping[str, Any], what: str) -> str:
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else "`toolbus keys list` shows them"
    return f"unknown {what} {quote(name)}: {hint}"
