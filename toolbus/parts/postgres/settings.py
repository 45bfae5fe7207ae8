"""Declares the database that a bus shares with others."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from toolbus.common.setting import TEXT, CheckedRecord, Option, setting
from toolbus.common.text import quote
from toolbus.errors import SetupError

SCHEMES = ("postgresql", "postgres")


def _check_url(name: str, url: str | None) -> None:
    if url is None:
        return
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    if scheme not in SCHEMES:
        shown = url.partition(":")[0]  # what follows may hold a password
        raise SetupError(
            f"{name} begins with {quote(shown, 40)}, it must be the URL of a Postgres database: write for example "
            "postgresql://toolbus@db.internal/toolbus, or leave it out: the data directory is used then"
        )


@dataclass(frozen=True, slots=True, repr=False)
class StorageSettings(CheckedRecord):
    """Where the settings and results are that several buses share."""

    storage: str | None = setting(
        None,
        TEXT,
        "the URL of a Postgres database in which several buses [share their settings](../start/shared-settings.md); a "
        "password belongs into the variable",
        check=_check_url,
        option=Option("Share settings and results with other buses, in this Postgres database.", "URL"),
        shown="the data directory",
    )

    def __repr__(self) -> str:
        return f"<StorageSettings {'postgresql' if self.storage else 'data directory'}>"  # a URL may hold a password

    @property
    def needed_room(self) -> str:
        """The room that revoked keys need; "" without a database."""
        return "PostgresRoom" if self.storage else ""

    @property
    def store(self) -> str:
        """What makes the store of a bus; "": the core does."""
        return "toolbus.parts.postgres.shared_store:shared_store" if self.storage else ""
