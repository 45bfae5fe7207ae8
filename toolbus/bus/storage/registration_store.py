"""Persists callback tools across restarts: the tools that were registered with a callback URL.

A registration is persisted when ``apply`` returns: a kill -9 of the bus loses nothing. A damaged one keeps the bus from
starting: tools must not vanish silently. Callback URLs are stored with their passwords and secrets. The registry is not
known here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolbus.bus.storage.database import checksum_of, time_bytes
from toolbus.bus.storage.store import Earlier, Kind, Store, earlier_database
from toolbus.common.text import dump_json, is_utf8
from toolbus.errors import InvalidRequest, InvalidTool
from toolbus.protocol.tool import Annotations, Tool

_TOOL_FIELDS = tuple(
    item.name for item in dataclasses.fields(Tool) if item.name not in ("schema_hash", "hints_trusted")
)
_ANNOTATIONS = tuple(item.name for item in dataclasses.fields(Annotations))

Offers = tuple[tuple[str | None, int], ...]


@dataclass(frozen=True, slots=True)
class StoredRegistration:
    """One registration by callback URL, as it is persisted.

    Attributes:
        key: identifies the registration; unique, made by the caller.
        source: any string, "" too.
        tool: its ``callback_url`` is the masked one.
        callback_url: with the password.
        checked: whether arguments are checked against the schema.
        offers: role, or None for roles still to come; place in the list, below 0 where it is not in that role's.
        answered_at: when its origin last answered, in seconds since the epoch.
        listener: the id of the socket that its plugin listens with; empty where it is not known.
        secret: its `callback_secret`; empty where its plugin set none.

    Raises:
        InvalidRequest: from the constructor; a text cannot be written as UTF-8.
    """

    key: str
    source: str
    tool: Tool
    callback_url: str = field(repr=False)
    checked: bool
    offers: Offers
    answered_at: float
    listener: str = ""
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        # Detected here and not by the encoder, whose exception would carry the text, password included.
        roles = "".join(role or "" for role, _ in self.offers)
        texts = (("key", self.key), ("source", self.source), ("callback_url", self.callback_url), ("role", roles))
        for label, text in texts:
            if not is_utf8(text):
                raise InvalidRequest(
                    f"{label} holds half of a surrogate pair, which UTF-8 cannot carry: send the whole character"
                )


class RegistrationStore:
    """The registrations in a store. Its methods may be called from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def load(self) -> list[StoredRegistration]:
        """Returns all registrations, by their lowest place; those without a place come last.

        Raises:
            SetupError: a row is damaged.
        """
        records = []
        for key, fields in self._store.load(REGISTRATIONS).items():
            try:
                tool, offers = _tool(fields["tool"]), tuple((role, int(place)) for role, place in fields["offers"])
                records.append(StoredRegistration(**{**fields, "key": key, "tool": tool, "offers": offers}))
            except (ValueError, TypeError, KeyError, AttributeError, InvalidRequest, InvalidTool) as error:
                raise self._store.damaged(REGISTRATIONS, error) from None
        return sorted(records, key=lambda each: min((place for _, place in each.offers if place >= 0), default=1 << 63))

    def apply(self, changed: Iterable[StoredRegistration], removed: Iterable[str]) -> None:
        """Deletes the removed keys, then inserts or replaces the changed registrations: see `Store.write`."""
        self._store.write(REGISTRATIONS, {each.key: _fields(each) for each in changed}, removed)


def _tool(fields: dict[str, Any]) -> Tool:
    """Reads a tool: a field of a newer minor version is ignored, a missing one has its default."""
    known = {name: fields[name] for name in _TOOL_FIELDS if name in fields}
    annotations, needs = known.pop("annotations", {}), tuple(known.pop("needs", ()))
    return Tool(**known, needs=needs, annotations=Annotations(**{name: annotations.get(name) for name in _ANNOTATIONS}))


def _fields(record: StoredRegistration) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    del fields["key"]
    del fields["tool"]["schema_hash"], fields["tool"]["hints_trusted"]  # follows from the others; is of mounts
    return fields


def _read_earlier(path: Path) -> Mapping[str, Any]:
    """Reads ``toolbus.db``, in which releases before ``bus.db`` had the registrations."""
    values: dict[str, Any] = {}
    with earlier_database(path, application_id=0x54427573, versions=2) as connection:
        offers: dict[str, list[tuple[str | None, int]]] = {}
        for key, role, place in connection.execute("SELECT key, role, place FROM offers ORDER BY key, number"):
            offers.setdefault(key, []).append((role, place))
        proofs: dict[str, tuple[str, str]] = {}
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
        for key, *texts, checksum in connection.execute("SELECT * FROM proofs") if "proofs" in tables else ():
            if checksum != checksum_of(dump_json([key, *texts]).encode()):
                raise ValueError("a row of proofs fails its checksum")
            proofs[key] = (texts[0], texts[1])
        for number, (key, source, tool, url, checked, checksum, answered_at, answered_checksum) in enumerate(
            connection.execute(
                "SELECT key, source, tool, callback_url, checked, checksum, answered_at, answered_checksum "
                "FROM registrations ORDER BY rowid"
            ),
            1,
        ):
            own = offers.pop(key, [])
            if checksum != checksum_of(dump_json([key, source, tool, url, checked, own]).encode()):
                raise ValueError(f"row {number} of registrations fails its checksum")
            if answered_checksum != checksum_of(time_bytes(answered_at)):
                raise ValueError(f"answered_at in row {number} of registrations fails its checksum")
            listener, secret = proofs.get(key, ("", ""))
            record = StoredRegistration(
                key, source, _tool(json.loads(tool)), url, bool(checked), tuple(own), answered_at, listener, secret
            )
            values[key] = _fields(record)
        if offers:
            raise ValueError("there are offers without their registration")
    return values


REGISTRATIONS = Kind(
    "registrations",
    needed=True,
    without="start with none (its tools then have to register again)",
    earlier=Earlier("toolbus.db", _read_earlier),
)
