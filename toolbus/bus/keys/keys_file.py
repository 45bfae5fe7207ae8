"""Reads ``keys.toml``: the identities of a bus with their scopes, the keys that prove them, and names of the server.

People may edit the file while the bus runs. Nothing here opens it; an error names the place, the value, the rule and
how to fix it.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from typing import Any, Literal

from toolbus.bus.access.identity import Scopes, read_identities
from toolbus.common.reader import Keys, Reader
from toolbus.common.text import quote
from toolbus.errors import SetupError

FILE = "keys.toml"
CA = "ca.pem"  # beside it: the roots that are trusted
SERVER = "server.pem"  # the server's private key, its certificate, and the intermediate ones up to a root
TOKEN_PREFIX = "tbk_"
KINDS = ("token", "certificate")
KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Kind = Literal["token", "certificate"]


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key, which proves an identity.

    Attributes:
        id: as the file, the log and messages name it.
        identity: the one that it proves.
        sha256: of the token's text or of the certificate (DER), in hex.
        created: the day, "" if unknown.
        expires: when it ends, in seconds since the epoch; `math.inf` for never.
        revoked: the day on which it was revoked; "" before that.
        root: which root of the authority issued it, see `authority`; "" if unknown.
    """

    id: str
    identity: str
    kind: Kind
    sha256: str
    created: str = ""
    expires: float = math.inf
    revoked: str = ""
    root: str = ""

    def state(self, now: float) -> str:
        """Returns ``live``, ``expired`` or ``revoked``."""
        return "revoked" if self.revoked else "expired" if now >= self.expires else "live"

    def described(self, now: float) -> dict[str, Any]:
        """Returns the key as a row of a listing."""
        return {
            "id": self.id,
            "identity": self.identity,
            "kind": self.kind,
            "created": self.created,
            "expires": None if self.expires == math.inf else self.expires,
            "revoked": self.revoked or None,
            "state": self.state(now),
        }


@dataclass(frozen=True, slots=True)
class KeysFile:
    """The content of the file.

    Attributes:
        identities: the scopes of each by its name.
        keys: by id.
        names: host names and IP addresses of the server's certificate.
        address: where peers find the bus; "" if unknown.
    """

    identities: Mapping[str, Scopes] = field(default_factory=dict)
    keys: Mapping[str, KeyRecord] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    address: str = ""


def parse_keys(content: bytes, place: str) -> KeysFile:
    """Reads the content of a file.

    Args:
        place: names the file in errors.

    Raises:
        SetupError: naming the place, the value, the rule and how to fix it.
    """
    if not content.strip():
        raise SetupError(f"{place} is empty: restore it, or make keys anew with `toolbus keys init`")
    try:
        document = tomllib.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise SetupError(f"{place}: it is nested too deep: flatten it") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise SetupError(f"{place} is not TOML: {error}: correct that line") from None
    fields = Reader(document, place).record(_TABLES)
    server = fields.pop("server", {})
    _check_duplicates(fields.get("keys", {}), place)
    return KeysFile(**fields, **server)


# -- how values are read ---------------------------------------------------------------------------------------------


def _keys(reader: Reader) -> dict[str, KeyRecord]:
    keys: dict[str, KeyRecord] = {}
    for key_id, table in reader.entries().items():
        if not KEY_ID.fullmatch(key_id):
            raise SetupError(f"{table.place}: the id {quote(key_id)} breaks the rule {KEY_ID.pattern}: choose another")
        fields = table.record(_KEY)
        for name in ("identity", "kind", "sha256"):
            if name not in fields:
                raise SetupError(f"{table.place} has no {name}: add it, or remove the key")
        keys[key_id] = KeyRecord(key_id, **fields)
    return keys


def _check_duplicates(keys: Mapping[str, KeyRecord], place: str) -> None:
    first: dict[tuple[Kind, str], str] = {}
    for key in keys.values():
        other = first.setdefault((key.kind, key.sha256), key.id)
        if other != key.id:
            raise SetupError(f"{place}: keys {other} and {key.id} have one sha256: remove one of them")


def _sha256(reader: Reader) -> str:
    if not _SHA256.fullmatch(reader.text()):
        raise reader.error("it must be 64 hex digits in lower case", "copy it from `toolbus keys show FILE`")
    return reader.text()


def _moment(reader: Reader) -> float:
    """Returns a time in seconds since the epoch; a day counts from its beginning, a time without zone is UTC."""
    value = reader.value
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime.combine(value, time(), UTC).timestamp()
    raise reader.error("it must be a day or a time", "write it without quotes: 2027-02-20 or 2027-02-20T12:00:00Z")


def _day(reader: Reader) -> str:
    value = reader.value
    if isinstance(value, datetime):
        return value.date().isoformat()
    if isinstance(value, date):
        return value.isoformat()
    raise reader.error("it must be a day", "write it without quotes: 2027-02-20")


_KEY: Keys = {
    "identity": ("identity", Reader.text),
    "kind": ("kind", lambda reader: reader.choice(KINDS)),
    "sha256": ("sha256", _sha256),
    "created": ("created", _day),
    "expires": ("expires", _moment),
    "revoked": ("revoked", _day),
    "root": ("root", Reader.text),
}
_SERVER: Keys = {"names": ("names", Reader.names), "address": ("address", Reader.text)}
_TABLES: Keys = {
    "server": ("server", lambda reader: reader.record(_SERVER)),
    "identities": ("identities", read_identities),
    "keys": ("keys", _keys),
}
