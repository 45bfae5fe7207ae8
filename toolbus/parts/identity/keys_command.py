"""Implements ``toolbus keys``: the identities of a bus, the credentials that prove them, and who issues these."""

from __future__ import annotations

import hashlib
import shlex
import ssl
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import SOURCE, JsonOption
from toolbus.cli.data_directory import DataDirOption, data_directory
from toolbus.cli.help_text import epilog

if TYPE_CHECKING:
    from toolbus.bus.access.identity import Scopes
    from toolbus.bus.keys.keys_file import KeyRecord, KeysFile
    from toolbus.parts.identity.key_store import CredentialRequest, KeyStore, Made
    from toolbus.sdk.credential import Credential


_CODES = "0 done, 1 refused (a file is missing, broken or open to others; a name is unknown or taken), 2 wrong usage."
EPILOG = epilog(
    (
        "toolbus keys init --name bus.team.example --address mtls:bus.team.example:48931",
        "toolbus keys add chat --host",
        "toolbus keys add weather --plugin 'weather*'",
        "toolbus keys list --json",
        "toolbus keys renew chat",
        "toolbus keys revoke chat",
    ),
    """
    An identity is what a peer is on a bus beyond this machine, with scopes that say what it may do. A credential is one
    file that proves it: address, token and certificate. Give it to the program as TOOLBUS_CREDENTIAL=FILE.

    The commands work on the keys directory itself, not over the bus: run them where the bus runs, as its user. The
    directory is --keys, else TOOLBUS_KEYS, else `keys` in the data directory (--data-dir, TOOLBUS_DATA_DIR). A running
    bus takes changes over within a second. Scopes are in its file keys.toml, and may be edited there.
    """,
    _CODES,
)
INIT_EPILOG = epilog(
    (
        "toolbus keys init --name bus.team.example --address mtls:bus.team.example:48931",
        "toolbus keys init --name bus.team.example --name 10.0.0.7",
    ),
    """
    Makes a certificate authority (10 years), the server's certificate (90 days; the bus renews it after 60) and
    keys.toml. A second run changes neither the authority nor the keys: it sets names and address if they are given,
    and renews the server's certificate.

    ca.key is the private key of the authority. A user who has it can issue credentials; store a copy elsewhere. Without
    it the bus continues, but its certificate is not renewed, and no key can be added.
    """,
    _CODES,
)
ADD_EPILOG = epilog(
    (
        "toolbus keys add chat --host",
        "toolbus keys add weather --plugin 'weather*' -o weather.toolbus",
        "toolbus keys add ann --operator --days 30 --address tls:bus.team.example:48932",
    ),
    """
    --plugin offers tools as sources that match the pattern, and calls tools only as part of a call that it answers.
    --host sees and calls every tool, for every user, up to level 89. --operator may do everything. --reader sees tools,
    records of calls and metrics, and calls nothing. Narrow that in keys.toml.

    The file is the only copy of its token and private key: the bus stores their SHA-256. It is 0600; hand it over as
    you would a password.
    """,
    _CODES,
)
LIST_EPILOG = epilog(("toolbus keys list", "toolbus keys list --json"), "", _CODES)
RENEW_EPILOG = epilog(
    ("toolbus keys renew chat", "toolbus keys renew chat --days 30 -o chat.toolbus"),
    """
    The previous credential stays valid until it expires, so that programs can change over; end it with `toolbus keys
    revoke ID`. The new file replaces one of the same name.
    """,
    _CODES,
)
REVOKE_EPILOG = epilog(
    ("toolbus keys revoke chat", "toolbus keys revoke 4f2a91c0", "toolbus keys revoke 4f2a91c0-token"),
    """
    NAME revokes every live credential of an identity, ID one credential (token and certificate), or one key of it. A
    running bus ends its sessions within a second. The identity stays: `toolbus keys renew` gives it a new credential.
    """,
    _CODES,
)
ROTATE_EPILOG = epilog(
    ("toolbus keys rotate-ca", "toolbus keys rotate-ca --finish"),
    """
    Adds a root to the authority, which issues from now on; both are trusted. Then renew each credential that `toolbus
    keys list` shows as live with an old root, and hand it over. --finish drops the old root. It refuses while an
    identity has live credentials of the old root alone, unless --force ends them; other old ones stay valid for
    the sessions that they opened, and cannot open new ones.
    """,
    _CODES,
)

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", epilog=EPILOG, add_completion=False,
    help="Make, list and revoke keys for programs on other machines.",
)  # fmt: skip

KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys", metavar="DIR", envvar="TOOLBUS_KEYS", show_envvar=False,
        help="The keys directory (default: keys in the data directory).",
    ),
]  # fmt: skip
DaysOption = Annotated[float, typer.Option("--days", metavar="N", help="How many days the credential is valid.")]
AddressOption = Annotated[
    str | None, typer.Option("--address", metavar="ADDR", help="tls:, mtls: or https:// address of the bus.")
]
OutOption = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="FILE", help="Write the credential here (default: NAME.toolbus).")
]


@app.command(epilog=INIT_EPILOG)
@terminal.refusing()
def init(
    name: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Host name or IP address of the bus; may be repeated.")
    ] = None,
    address: AddressOption = None,
    keys: KeysOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the keys of a bus: authority, server certificate, keys.toml."""
    directory = keys_directory(keys, data_dir)
    file, created = _store(directory).init(name or (), address or "")
    from toolbus.parts.identity.authority import all_names  # after the store, which says so if a library is missing

    if as_json:
        made = {"directory": str(directory), "names": list(file.names), "address": file.address, "created": created}
        terminal.print_json(made)
        return
    terminal.print_lines(f"{'made' if created else 'renewed'} the keys in {directory}")
    terminal.print_lines(f"the server's certificate is for {', '.join(all_names(file.names))}")
    if file.address:
        terminal.print_lines(f"credentials get the address {file.address}")
    terminal.print_lines("next: toolbus keys add NAME --host (or --plugin PATTERN, --operator, --reader)")


@app.command(epilog=ADD_EPILOG)
@terminal.refusing()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the identity.")],
    plugin: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Offers tools, as sources that match: weather*.")
    ] = None,
    host: Annotated[bool, typer.Option("--host", help="Calls tools.")] = False,
    operator: Annotated[bool, typer.Option("--operator", help="May do everything.")] = False,
    reader: Annotated[bool, typer.Option("--reader", help="Sees tools, records and metrics.")] = False,
    days: DaysOption = 90,
    address: AddressOption = None,
    out: OutOption = None,
    keys: KeysOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add an identity, and write its credential file."""
    if [bool(plugin), host, operator, reader].count(True) != 1:
        terminal.fail("use exactly one of --plugin PATTERN, --host, --operator and --reader", terminal.USAGE)
    request = _credential_request(name, out, days, address)
    scopes = _scopes(name, plugin or "", "host" if host else "operator" if operator else "reader")
    made = _store(keys_directory(keys, data_dir)).add(name, scopes, request)
    _show_made(made, scopes, as_json)


@app.command(epilog=RENEW_EPILOG)
@terminal.refusing()
def renew(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the identity.")],
    days: DaysOption = 90,
    address: AddressOption = None,
    out: OutOption = None,
    keys: KeysOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a new credential file for an identity."""
    from dataclasses import replace

    store = _store(keys_directory(keys, data_dir))
    made = store.renew(name, replace(_credential_request(name, out, days, address), overwrite=True))
    _show_made(made, store.read().identities[name], as_json)


@app.command("list", epilog=LIST_EPILOG)
@terminal.refusing()
def list_(keys: KeysOption = None, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """List the keys, and identities without one."""
    store = _store(keys_directory(keys, data_dir))
    file, issuing, now = store.read(), store.issuing_root(), time.time()
    if as_json:
        rows = [{**key.described(now), "old_root": _is_old(key, issuing)} for key in file.keys.values()]
        identities = {name: scopes.as_table() for name, scopes in file.identities.items()}
        terminal.print_json({"identities": identities, "keys": rows})
        return
    with_key = {key.identity for key in file.keys.values()}
    rows_shown = [_row(key, file, issuing, now) for key in file.keys.values()]
    rows_shown += [("-", name, "-", "-", "-", "no key") for name in file.identities if name not in with_key]
    terminal.print_table(("KEY", "IDENTITY", "KIND", "CREATED", "EXPIRES", "STATE"), rows_shown)


@app.command(epilog=REVOKE_EPILOG)
@terminal.refusing()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME|ID", help="Name of an identity, or id as in `keys list`.")],
    keys: KeysOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """End the keys of an identity, or one credential."""
    revoked = _store(keys_directory(keys, data_dir)).revoke(name)
    if as_json:
        terminal.print_json({"revoked": [key.id for key in revoked]})
    for key in revoked if not as_json else ():
        terminal.print_lines(f"revoked {key.id} of identity {key.identity}")
    if not revoked and not as_json:
        terminal.print_lines(f"{name} has no live key: nothing to revoke")


@app.command("rotate-ca", epilog=ROTATE_EPILOG)
@terminal.refusing()
def rotate_ca(
    finish: Annotated[bool, typer.Option("--finish", help="Drop the old root.")] = False,
    force: Annotated[bool, typer.Option("--force", help="With --finish: even if credentials stop working.")] = False,
    keys: KeysOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace the root of the authority, in two steps."""
    if force and not finish:
        terminal.fail("--force goes with --finish", terminal.USAGE)
    store = _store(keys_directory(keys, data_dir))
    if finish:
        stopped = store.finish_rotation(force=force)
        if as_json:
            terminal.print_json({"root": store.issuing_root(), "stopped": [key.id for key in stopped]})
            return
        terminal.print_lines("only the new root is trusted now")
        for key in stopped:
            terminal.print_lines(f"good for open sessions only: {key.id} of identity {key.identity}")
        return
    root, old = store.rotate(), sorted({key.identity for key in _live_keys(store.read())})
    if as_json:
        terminal.print_json({"root": root, "renew": old})
        return
    terminal.print_lines(f"root {root} issues from now on; the old one is trusted too")
    for name in old:
        terminal.print_lines(f"renew: toolbus keys renew {name}")
    terminal.print_lines("then: toolbus keys rotate-ca --finish")


def keys_directory(keys: Path | None, data_dir: Path | None) -> Path:
    """Returns the keys directory that the options name."""
    return keys.expanduser() if keys is not None else data_directory(data_dir) / "keys"


def _store(directory: Path) -> KeyStore:
    from toolbus.parts.identity.key_store import KeyStore

    return KeyStore(directory)


def _credential_request(name: str, out: Path | None, days: float, address: str | None) -> CredentialRequest:
    from toolbus.parts.identity.key_store import MAX_DAYS, CredentialRequest

    if not 0 < days <= MAX_DAYS:
        terminal.fail(f"--days is {days:g}, it must be above 0 and at most {MAX_DAYS}", terminal.USAGE)
    return CredentialRequest(out or Path(f"{name}.toolbus"), days, address or "")


def _scopes(name: str, pattern: str, kind: Any) -> Scopes:
    """Returns the scopes of a new identity.

    A host attaches under its name, or the names that SDK and commands use; a plugin's key is for its `toolbus run` too.
    """
    from dataclasses import replace

    from toolbus.bus.access.identity import Globs
    from toolbus.bus.catalog.entry import RUN_SOURCES
    from toolbus.parts.identity.scope_texts import template

    if pattern:
        return replace(template("plugin", pattern), attach=Globs(dict.fromkeys((pattern, f"{RUN_SOURCES}*"))))
    if kind == "host":
        return replace(template("host"), attach=Globs([name, f"{name}:*", "host:*", SOURCE]))
    return template(kind)


def _show_made(made: Made, scopes: Scopes, as_json: bool) -> None:
    from toolbus.bus.access.identity import day_of
    from toolbus.parts.identity.scope_texts import scope_sentences

    allowed = scope_sentences(scopes)
    if as_json:
        terminal.print_json({**asdict(made), "file": str(made.file), "may": allowed})
        return
    until = day_of(made.expires)
    terminal.print_lines(f"wrote {made.file}: identity {made.name}, credential {made.id}, good until {until}")
    print_sentences(allowed)
    if scopes.attach:
        command = "python PLUGIN.py" if scopes.offer and not scopes.call else "toolbus list"
        terminal.print_lines(f"use it with: TOOLBUS_CREDENTIAL={shlex.quote(str(made.file))} {command}")
    else:  # the commands have a stream
        file = shlex.quote(str(made.file))
        terminal.print_lines(
            f"use it over HTTPS: toolbus console --bus https://HOST:PORT --credential {file}, or "
            f"toolbus keys export {shlex.quote(made.name)} --pem DIRECTORY for other programs"
        )


def print_sentences(sentences: Sequence[str]) -> None:
    """Prints what an identity may do."""
    for sentence in sentences:
        terminal.print_lines(f"  {sentence}")


def _live_keys(file: KeysFile) -> list[KeyRecord]:
    return [key for key in file.keys.values() if key.state(time.time()) == "live"]


def _row(key: KeyRecord, file: KeysFile, issuing: str, now: float) -> tuple[str, ...]:
    from toolbus.bus.access.identity import day_of

    state = key.state(now)
    if key.revoked:
        state = f"revoked {key.revoked}"
    elif state == "live" and key.identity not in file.identities:
        state = "no identity"
    elif state == "live" and _is_old(key, issuing):
        state = "live, old root"
    return key.id, key.identity, key.kind, key.created, day_of(key.expires), state


def _is_old(key: KeyRecord, issuing: str) -> bool:
    return bool(issuing) and key.root != issuing


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


@app.command(epilog=SHOW_EPILOG)
@terminal.refusing()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Credential file.")],
    keys: KeysOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a credential file is for, without its secrets."""
    from toolbus.parts.identity.scope_texts import scope_sentences
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


@app.command(epilog=EXPORT_EPILOG)
@terminal.refusing()
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
