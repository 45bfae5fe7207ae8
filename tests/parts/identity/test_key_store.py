"""Tests changes of keys: what they write, what they refuse, several at once, and a kill at every moment."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bus.keys.keys_directory import ADDRESS, DAY, KeysDirectory, calls
from tests.bus.keys.tls_handshake import client_context, handshake
from tests.support.examples import examples
from tests.support.processes import ROOT, environment
from tests.support.waiting import HANG_SECONDS
from toolbus.bus.access.identity import NAME, Scopes
from toolbus.bus.keys.keyring import Keyring
from toolbus.bus.keys.keys_file import CA, SERVER
from toolbus.common.reader import Reader
from toolbus.errors import SetupError
from toolbus.parts.identity.authority import validity_of
from toolbus.parts.identity.key_store import CA_KEY, CROSSED, CredentialRequest, KeyStore
from toolbus.parts.identity.scope_texts import Template, template
from toolbus.sdk.credential import Credential

KINDS: tuple[Template, ...] = ("plugin", "host", "operator", "reader")


def test_a_credential_has_all_that_a_peer_needs_and_only_its_owner_may_read_it(keys: KeysDirectory) -> None:
    made = keys.add("chat")
    assert set(made) == {"id", "name", "address", "expires", "token", "ca", "certificate", "key"}
    assert (made["name"], made["address"]) == ("chat", ADDRESS)
    assert made["token"].startswith(f"tbk_{made['id']}_")
    assert len(made["token"]) == 13 + 43
    for name in ("ca", "certificate", "key"):
        assert made[name].startswith("-----BEGIN ")
    assert made["expires"].timestamp() == keys.clock.now + 90 * DAY
    assert (keys.folder / "chat.toolbus").stat().st_mode & 0o777 == 0o600
    kept = b"".join(path.read_bytes() for path in keys.path.iterdir())
    assert made["token"][13:].encode() not in kept
    assert made["key"].encode() not in kept


def test_all_files_are_ours_alone_and_comments_stay(keys: KeysDirectory) -> None:
    keys.add("chat", calls("get_*"))
    keys.edit('call = ["get_*"]', 'call = ["get_*"]  # as agreed with Ann')
    keys.renew("chat")
    keys.store.revoke("chat")
    keys.store.init(["bus.example", "new.example"], "tls:new.example:1")
    keys.add("other")
    text = keys.file.read_text("utf-8")
    assert text.startswith("# Identities of this bus")
    assert 'call = ["get_*"]  # as agreed with Ann\n' in text
    assert text.count("revoked = 2027-01-15\n") == 4
    assert {path.stat().st_mode & 0o777 for path in keys.path.iterdir()} == {0o600}
    assert {path.name for path in keys.path.iterdir()} == {"ca.key", CA, "keys.toml", SERVER, "lock"}


def test_scopes_are_the_same_after_they_were_added(keys: KeysDirectory) -> None:
    for kind in KINDS:
        keys.add(kind, template(kind, "weather*"))
    identities = keys.ring().identities
    for kind in KINDS:
        assert identities[kind].as_table() == template(kind, "weather*").as_table()


@given(
    st.from_regex(NAME, fullmatch=True),
    st.dictionaries(
        st.sampled_from(["attach", "call", "users"]), st.lists(st.text(min_size=1, max_size=9), max_size=3)
    ),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(10))
def test_any_identity_is_read_as_it_was_added(keys: KeysDirectory, name: str, table: dict[str, list[str]]) -> None:
    if name in keys.store.read().identities:
        return
    scopes = Scopes.read(Reader(table))
    made = keys.add(name, scopes)
    identity = keys.ring().identity_of_token(made["token"])
    assert identity.name == name
    assert identity.scopes is not None
    assert identity.scopes.as_table() == scopes.as_table()


def test_revoke_takes_an_identity_a_credential_or_a_key(keys: KeysDirectory) -> None:
    first, second = keys.add("chat"), keys.renew("chat")
    assert [key.id for key in keys.store.revoke(f"{first['id']}-cert")] == [f"{first['id']}-cert"]
    assert [key.id for key in keys.store.revoke(first["id"])] == [f"{first['id']}-token"]
    assert {key.id for key in keys.store.revoke("chat")} == {f"{second['id']}-token", f"{second['id']}-cert"}
    assert keys.store.revoke("chat") == []
    with pytest.raises(SetupError, match=r"unknown identity or key 'chta': did you mean chat\?"):
        keys.store.revoke("chta")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda keys: keys.add("a b"), "the name 'a b' breaks the rule"),
        (
            lambda keys: keys.add("chat"),
            "identity 'chat' is there already: make it a new credential with `toolbus keys",
        ),
        (lambda keys: keys.renew("chta"), r"unknown identity 'chta': did you mean chat\?"),
        (lambda keys: keys.renew("chat", days=0), "--days is 0, it must be above 0 and at most 3652"),
        (lambda keys: keys.renew("chat", days=float("nan")), "--days is nan"),
        (lambda keys: keys.add(next(iter(keys.store.read().keys))), "is the id of a key: choose another"),
        (
            lambda keys: keys.store.renew("chat", CredentialRequest(keys.file)),
            "keys.toml is there already: name another file with",
        ),
        (
            lambda keys: keys.store.renew("chat", CredentialRequest(keys.path / "no" / "f")),
            "cannot be written: No such file",
        ),
        (
            lambda keys: keys.store.renew("chat", CredentialRequest(keys.path / "f", address="bus")),
            "the address 'bus' is not tls:",
        ),
        (
            lambda keys: keys.store.renew("chat", CredentialRequest(keys.path / "f", address="mtls:bus:1")),
            "is not one of the server's certificate, which is for bus.example, localhost, 127.0.0.1: add --name bus",
        ),
        (lambda keys: keys.store.init(["a b"]), "the name 'a b' is neither a host name nor an IP address"),
        (lambda keys: keys.store.finish_rotation(), "no rotation is under way: begin one with"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(keys: KeysDirectory, change, error: str) -> None:  # type: ignore[no-untyped-def]
    keys.add("chat")
    before = {path: path.read_bytes() for path in sorted(keys.folder.rglob("*")) if path.is_file()}
    with pytest.raises(SetupError, match=error):
        change(keys)
    assert {path: path.read_bytes() for path in sorted(keys.folder.rglob("*")) if path.is_file()} == before


def test_without_name_or_address_it_says_which_option_is_missing(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys")
    with pytest.raises(SetupError, match="name the bus: --name HOST"):
        store.init([])
    store.init(["bus.example"])
    with pytest.raises(SetupError, match="the address of the bus is not known: give --address mtls:HOST:PORT"):
        store.add("chat", Scopes(), CredentialRequest(tmp_path / "f"))
    assert not (tmp_path / "f").exists()


def test_a_file_in_a_form_that_cannot_be_changed_safely_is_left_alone(keys: KeysDirectory) -> None:
    text = 'identities = {chat = {call = ["*"]}}\n[server]\nnames = ["bus.example"]\naddress = "tls:bus.example:1"\n'
    keys.write(text)
    with pytest.raises(
        SetupError, match=r"cannot be changed safely: write each identity and key as a table of its own"
    ):
        keys.add("other")
    assert keys.file.read_text() == text
    keys.renew("chat")
    assert set(keys.store.read().identities) == {"chat"}


def test_a_second_init_keeps_the_authority_and_what_it_is_not_given(keys: KeysDirectory) -> None:
    made = keys.add("chat")
    file, created = keys.store.init([])
    assert (file.names, file.address, created) == (("bus.example",), ADDRESS, False)
    assert keys.ring().identity_of_token(made["token"]).name == "chat"
    assert keys.ring().server_certificate().roots.decode() == made["ca"]


def test_a_rotation_is_finished_when_each_identity_is_renewed_though_its_old_credential_has_not_expired(
    keys: KeysDirectory,
) -> None:
    old = keys.add("chat")
    keys.add("bot")
    keys.store.rotate()
    keys.renew("chat")
    with pytest.raises(SetupError, match="credentials of bot know only the old root"):
        keys.store.finish_rotation()
    keys.store.revoke("bot")
    assert {key.id for key in keys.store.finish_rotation()} == {f"{old['id']}-token", f"{old['id']}-cert"}


def test_a_rotation_is_finished_when_no_credential_needs_the_old_root(keys: KeysDirectory) -> None:
    old = keys.add("chat")
    ring = keys.ring()
    keys.store.rotate()
    assert ring.reload().server
    assert ring.server_certificate().roots.count(b"BEGIN") == ring.server_certificate().chain.count(b"BEGIN") == 2
    with pytest.raises(SetupError, match="a rotation is under way"):
        keys.store.rotate()
    with pytest.raises(SetupError, match="credentials of chat know only the old root, and would stop working: renew"):
        keys.store.finish_rotation()
    new = keys.renew("chat")
    assert new["ca"].count("BEGIN") == 2
    keys.store.revoke(old["id"])
    assert keys.store.finish_rotation() == []
    assert ring.reload().server
    assert ring.server_certificate().roots.count(b"BEGIN") == ring.server_certificate().chain.count(b"BEGIN") == 1
    assert not (keys.path / CROSSED).exists()
    assert keys.add("later")["ca"].count("BEGIN") == 1


def test_a_forced_end_of_a_rotation_names_what_stopped_working(keys: KeysDirectory) -> None:
    old = keys.add("chat")
    keys.store.rotate()
    stopped = keys.store.finish_rotation(force=True)
    assert {key.id for key in stopped} == {f"{old['id']}-token", f"{old['id']}-cert"}


def test_a_certificate_that_is_renewed_during_a_rotation_is_accepted_by_the_old(keys: KeysDirectory) -> None:
    keys.store.rotate()
    keys.clock.now += 61 * DAY
    assert keys.store.renew_server()[0]
    ring = keys.ring()
    assert ring.server_certificate().chain.count(b"BEGIN") == 2


@pytest.mark.parametrize("is_running", [False, True])
def test_a_certificate_that_was_made_while_the_clock_was_ahead_is_renewed_when_it_is_right_again(
    keys: KeysDirectory, is_running: bool
) -> None:
    right, ring = keys.clock.now, keys.ring()
    keys.clock.now = right + 60 * DAY
    assert ring.renew_if_due(keys.store)
    ring.reload()
    ahead = ring.server_certificate().chain
    keys.clock.now = right
    ring = ring if is_running else keys.ring()
    assert ring.renew_if_due(keys.store)
    ring.reload()
    assert ring.server_certificate().chain != ahead
    begin, end = validity_of(ring.server_certificate().chain)
    assert begin <= right < end
    assert not ring.renew_if_due(keys.store)


def test_without_the_authoritys_key_nothing_is_issued_and_revocation_works(keys: KeysDirectory) -> None:
    keys.add("chat")
    (keys.path / CA_KEY).unlink()
    for change in (lambda: keys.renew("chat"), keys.store.rotate, lambda: keys.store.init([])):
        with pytest.raises(SetupError, match=r"ca.key is not here, and only it can issue"):
            change()
    assert len(keys.store.revoke("chat")) == 2
    assert keys.store.issuing_root() == ""


def test_many_at_once_lose_nothing(keys: KeysDirectory) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: keys.add(f"bot{number}"), range(24)))
    ring = keys.ring()
    assert [ring.identity_of_token(each["token"]).name for each in made] == [f"bot{number}" for number in range(24)]


# A child for each moment: it ends itself before the n-th file is opened for writing, moved or removed.
KILLS = """
import json, os, shutil, sys
from pathlib import Path
from toolbus.parts.identity.scope_texts import template
from toolbus.parts.identity.key_store import KeyStore, CredentialRequest
from toolbus.bus.keys.keyring import Keyring

def change(name, folder):
    store = KeyStore(folder / "keys")
    if name == "init":
        store.init(["bus.example"], "mtls:bus.example:1")
    elif name == "add":
        store.add("chat", template("host"), CredentialRequest(folder / "chat.toolbus"))
    elif name == "renew":
        store.renew("chat", CredentialRequest(folder / "chat.toolbus", overwrite=True))
    elif name == "revoke":
        store.revoke("chat")
    elif name == "rotate":
        store.rotate()
    elif name == "finish":
        store.finish_rotation(force=True)

def child(name, folder, moment):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        opened = event == "open" and str(folder) in str(arguments[0]) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if opened or event in ("os.rename", "os.remove"):
            seen += 1
            if seen == moment:
                os._exit(9)
    sys.addaudithook(hook)
    change(name, folder)
    os._exit(0)

base, counts = Path(sys.argv[1]), {}
done = base / "0"
(done / "keys").mkdir(parents=True, mode=0o700)
for number, name in enumerate(("init", "add", "renew", "rotate", "revoke", "finish"), 1):
    for moment in range(1, 200):
        folder = base / f"{name}-{moment}"
        shutil.copytree(done, folder)
        pid = os.fork()
        if pid == 0:
            child(name, folder, moment)
        killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        if not killed:
            break
    counts[name] = moment
    done = folder
print(json.dumps(counts))
"""


def _connects(credential: Credential, server: Path) -> bool:
    """Tells whether who has a credential accepts the server."""
    accepting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepting.load_cert_chain(server)
    accepting.load_verify_locations(server.with_name(CA))
    accepting.verify_mode = ssl.CERT_REQUIRED
    file = server.with_name("client.pem")
    file.write_text(credential.key + credential.certificate)
    calling = client_context(server.parent, credential.ca.encode())
    calling.load_cert_chain(file)
    return bool(handshake(calling, accepting, "bus.example"))


def test_a_kill_at_any_moment_leaves_keys_that_work_and_the_same_command_ends_the_change(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, env=environment({}), timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    moments: dict[str, int] = json.loads(ran.stdout)
    for name, count in moments.items():
        assert count > 3
        for moment in range(1, count):
            folder = tmp_path / f"{name}-{moment}"
            store = KeyStore(folder / "keys")
            if name != "init":
                Keyring(folder / "keys")
            store.init(["bus.example"], "mtls:bus.example:1")
            ring = Keyring(folder / "keys")
            for path in folder.glob("*.toolbus"):
                credential = Credential.read(path)
                if name not in ("revoke", "finish"):
                    assert ring.identity_of_token(credential.token).name == "chat"
                if name != "finish":
                    assert _connects(credential, folder / "keys" / SERVER)
            if name == "add" and "chat" not in ring.identities:
                store.add("chat", Scopes(), CredentialRequest(folder / "again.toolbus"))
            elif name != "init":
                store.renew("chat", CredentialRequest(folder / "again.toolbus"))
            assert not list((folder / "keys").glob(".*"))
