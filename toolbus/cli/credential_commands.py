"""Implements ``toolbus keys show`` and ``export``: what a credential file holds, without secrets, and as PEM files."""

from __future__ import annotations

import hashlib
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import JsonOption
from toolbus.cli.data_directory import DataDirOption
from toolbus.cli.help_text import epilog
from toolbus.cli.keys_command import KeysOption, keys_directory, print_sentences, refusing

if TYPE_CHECKING:
    from toolbus.bus.keys.keys_file import KeyRecord, KeysFile
    from toolbus.sdk.credential import Credential

SHOW_EPILOG = epilog(
    ("toolbus keys show chat.toolbus", "toolbus keys show chat.toolbus --json"),
    """
    Prints no secret: neither the token nor the private key. Where the keys directory is on this machine too, it also
    says what the identity may do, and whether the credential is still in force; elsewhere only the bus knows that.
    """,
    "0 done, 1 refused (the file is missing, broken or open to others), 2 wrong usage.",
)
EXPORT_EPILOG = epilog(
    ("toolbus keys export chat --pem chat-pem/", "toolbus keys export /etc/toolbus/chat.toolbus --pem chat-pem/"),
    """
    For clients that take PEM files: ca.pem (what signs the bus's certificate), cert.pem and key.pem (of this peer) and
    token (sent as `authorization: Bearer TOKEN`). They are 0600, in a directory of 0700, and replace those of before.
    """,
    "0 done, 1 refused (a file is missing, broken or open to others, or cannot be written), 2 wrong usage.",
)
SUFFIX = ".toolbus"


@refusing
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Credential file.")],
    keys: KeysOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a credential file is for, without its secrets."""
    from toolbus.bus.access.scope_text import scope_sentences
    from toolbus.sdk.credential import Credential

    credential = Credential.read(file)
    issued = _issued_keys(keys_directory(keys, data_dir))
    scopes = issued.identities.get(credential.name) if issued is not None else None
    shown = {**_described(credential, issued), "may": None if scopes is None else scope_sentences(scopes)}
    if as_json:
        terminal.print_json(shown)
        return
    expired = "expired on" if credential.has_expired else "good until"
    terminal.print_lines(f"identity {credential.name or 'unnamed'} at {credential.address or 'any address'}")
    terminal.print_lines(f"{expired} {credential.day or 'an unknown day'}")
    for name in ("token", "certificate"):
        if (digest := shown[f"{name}_sha256"]) is not None:
            state = shown[f"{name}_state"]
            terminal.print_lines(f"{name} with SHA-256 {digest}{f': {state}' if state else ''}")
    if scopes is None:
        terminal.print_lines("only the bus knows what it may do: its keys are not on this machine")
    else:
        print_sentences(shown["may"])


@refusing
def export(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="Credential file, or NAME for NAME.toolbus.")],
    pem: Annotated[Path, typer.Option(metavar="DIR", help="Write the PEM files here.")],
    as_json: JsonOption = False,
) -> None:
    """Write a credential as PEM files."""
    from toolbus.bus.keys.private_files import make_directory, write_private
    from toolbus.sdk.credential import Credential

    file = Path(name)
    credential = Credential.read(file if file.exists() else Path(f"{name}{SUFFIX}"))
    make_directory(pem)
    written = []
    for part, content in (
        ("ca.pem", credential.ca),
        ("cert.pem", credential.certificate),
        ("key.pem", credential.key),
        ("token", credential.token),
    ):
        if content:
            write_private(pem / part, content.encode())
            written.append(str(pem / part))
    if as_json:
        terminal.print_json({"name": credential.name, "files": written})
    else:
        for path in written:
            terminal.print_lines(f"wrote {path}")


def _issued_keys(directory: Path) -> KeysFile | None:
    """Returns the keys of the bus; None where they are on another machine, or of another user."""
    from toolbus.bus.keys.keys_file import FILE, parse_keys
    from toolbus.bus.keys.private_files import read_private

    path = directory / FILE
    try:
        if not path.exists():
            return None
    except OSError:  # of another user
        return None
    return parse_keys(read_private(path)[0], str(path))


def _described(credential: Credential, issued: KeysFile | None) -> dict[str, Any]:
    digests = {
        "token": hashlib.sha256(credential.token.encode()).hexdigest() if credential.token else None,
        "certificate": _fingerprint(credential.certificate) if credential.certificate else None,
    }
    by_digest = {key.sha256: key for key in issued.keys.values()} if issued is not None else {}
    states = {
        f"{kind}_state": _state(by_digest.get(digest), issued is not None) if digest else None
        for kind, digest in digests.items()
    }
    return {
        "name": credential.name,
        "address": credential.address,
        "expires": credential.expires.isoformat() if credential.expires is not None else None,
        "expired": credential.has_expired,
        **{f"{kind}_sha256": digest for kind, digest in digests.items()},
        **states,
    }


def _state(key: KeyRecord | None, is_known: bool) -> str | None:
    if key is None:
        return "unknown to the bus of this machine" if is_known else None
    return f"{key.state(time.time())} (key {key.id})"


def _fingerprint(pem: str) -> str:
    end = "-----END CERTIFICATE-----"
    first = pem.partition(end)[0] + end
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first.strip())).hexdigest()
