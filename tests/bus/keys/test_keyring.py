"""Tests whom a token or certificate proves, what a refusal says, and how changes of the files are taken over."""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bus.keys.keys_directory import DAY, KeysDirectory, calls
from toolbus.bus.access.identity import Identity
from toolbus.bus.keys.keyring import NOTHING, Changed, Keyring
from toolbus.bus.keys.keys_file import CA, SERVER
from toolbus.errors import SetupError, Unauthenticated


def fingerprint(pem: str) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


def refusal(ring: Keyring, token: str) -> str:
    with pytest.raises(Unauthenticated) as caught:
        ring.identity_of_token(token)
    assert token[-20:] not in str(caught.value)
    return str(caught.value)


def test_token_and_certificate_of_a_credential_prove_the_same_identity(keys: KeysDirectory) -> None:
    made = keys.add("chat")
    ring = keys.ring()
    by_token = ring.identity_of_token(made["token"])
    by_certificate = ring.identity_of_certificate(fingerprint(made["certificate"]))
    assert (by_token.name, by_token.key, by_token.how) == ("chat", f"{made['id']}-token", "token")
    assert (by_certificate.name, by_certificate.key, by_certificate.how) == ("chat", f"{made['id']}-cert", "cert")
    assert by_token.scopes is by_certificate.scopes
    assert by_token.expires == by_certificate.expires == made["expires"].timestamp()


def test_an_unknown_key_is_refused_with_what_to_do(keys: KeysDirectory) -> None:
    ring = keys.ring()
    stranger = "tbk_0123abcd_" + "s" * 43
    assert refusal(ring, stranger).startswith("the token 0123abcd is not a key of this bus: ")
    assert "toolbus keys add" in refusal(ring, "eyJ" + "x" * 50)
    assert "this token is not a key" in refusal(ring, "half a surrogate \ud83d and more than 20 characters")
    with pytest.raises(Unauthenticated, match=r"this certificate \(SHA-256 aaaaaaaaaaaaaaaa…\) is not a key"):
        ring.identity_of_certificate("a" * 64)


@given(st.text())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_proves_anything_by_chance(keys: KeysDirectory, token: str) -> None:
    with pytest.raises(Unauthenticated):
        keys.ring().identity_of_token(token)


def test_an_expired_key_is_refused_with_its_day_and_the_command(keys: KeysDirectory) -> None:
    made = keys.add("chat", days=30)
    ring = keys.ring()
    session = ring.identity_of_token(made["token"])
    keys.clock.now += 30 * DAY - 1
    assert ring.identity_of_token(made["token"]) is session
    keys.clock.now += 1
    said = f"key {made['id']}-token of identity 'chat' expired on 2027-02-14: renew it with `toolbus keys renew chat`"
    assert refusal(ring, made["token"]) == said
    with pytest.raises(Unauthenticated, match="expired on 2027-02-14"):
        ring.identity_of_certificate(fingerprint(made["certificate"]))
    with pytest.raises(Unauthenticated, match="expired on 2027-02-14"):
        ring.current(session)


def test_a_revoked_key_is_refused_with_its_day_once_the_ring_was_reloaded(keys: KeysDirectory) -> None:
    made, other = keys.add("chat"), keys.add("other")
    ring = keys.ring()
    session = ring.identity_of_token(made["token"])
    keys.store.revoke("chat")
    assert ring.reload() == Changed(keys=frozenset({f"{made['id']}-token", f"{made['id']}-cert"}))
    text = f"key {made['id']}-token of identity 'chat' was revoked on 2027-01-15"
    assert refusal(ring, made["token"]).startswith(text)
    with pytest.raises(Unauthenticated, match="was revoked on 2027-01-15"):
        ring.current(session)
    assert ring.identity_of_token(other["token"]).name == "other"


def test_a_renewed_credential_works_beside_the_old_one(keys: KeysDirectory) -> None:
    old = keys.add("chat")
    ring = keys.ring()
    before = ring.identity_of_token(old["token"])
    new = keys.renew("chat")
    assert ring.reload() == NOTHING
    assert ring.identity_of_token(new["token"]).scopes is before.scopes
    assert ring.identity_of_token(old["token"]) is before


def test_what_did_not_change_is_the_same_object_after_a_reload(keys: KeysDirectory) -> None:
    made = keys.add("chat")
    ring = keys.ring()
    before, server = ring.identity_of_token(made["token"]), ring.server_certificate()
    keys.add("other")
    ring.reload()
    assert ring.server_certificate() is server
    assert ring.identity_of_token(made["token"]) is before
    assert ring.current(before) is before


def test_narrowed_scopes_name_the_identity_and_its_sessions_find_their_new_scopes(keys: KeysDirectory) -> None:
    made = keys.add("chat", calls("*"))
    ring = keys.ring()
    session = ring.identity_of_token(made["token"])
    keys.edit('call = ["*"]', 'call = ["get_*"]  # since the accident')
    assert ring.reload() == Changed(identities=frozenset({"chat"}))
    now = ring.current(session)
    assert now is ring.identity_of_token(made["token"])
    assert now.scopes is not None
    assert not now.scopes.call.match("delete")
    assert now.scopes.call.match("get_weather")


def test_an_identity_that_is_removed_ends_its_keys(keys: KeysDirectory) -> None:
    made = keys.add("chat", calls("*"))
    ring = keys.ring()
    session = ring.identity_of_token(made["token"])
    keys.edit('[identities.chat]\ncall = ["*"]\n', "")
    changed = ring.reload()
    assert changed.identities == {"chat"}
    assert changed.keys == {f"{made['id']}-token", f"{made['id']}-cert"}
    assert "an operator removed that identity" in refusal(ring, made["token"])
    with pytest.raises(Unauthenticated, match="removed that identity"):
        ring.current(session)


def test_a_key_that_is_removed_or_ends_sooner_is_named(keys: KeysDirectory) -> None:
    made = keys.add("chat")
    ring = keys.ring()
    session = ring.identity_of_token(made["token"])
    keys.edit(made["expires"].strftime("expires = %Y-%m-%dT%H:%M:%SZ"), "expires = 2027-01-20")
    assert ring.reload() == Changed(keys=frozenset({f"{made['id']}-token"}))
    assert ring.current(session).expires == 1_800_403_200.0
    text = keys.file.read_text("utf-8")
    start = text.index(f"[keys.{made['id']}-token]")
    keys.write(text[:start] + text[text.index(f"[keys.{made['id']}-cert]") :])
    assert ring.reload() == Changed(keys=frozenset({f"{made['id']}-token"}))
    with pytest.raises(Unauthenticated, match="was removed from the bus"):
        ring.current(session)


def test_a_broken_file_changes_nothing_and_is_logged_once(
    keys: KeysDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    made = keys.add("chat", calls("*"))
    ring = keys.ring()
    before = ring.identity_of_token(made["token"])
    keys.edit('call = ["*"]', "call = [7]")
    with caplog.at_level(logging.ERROR):
        assert [ring.reload() for _ in range(3)] == [NOTHING] * 3
    (record,) = caplog.records
    said = "stay in force: " + f"{keys.file}: identities.chat.call[0] is 7, it must be text: put it in quotes"
    assert record.getMessage().endswith(said)
    assert ring.identity_of_token(made["token"]) is before
    keys.edit("call = [7]", "call = []")
    assert ring.reload().identities == {"chat"}


@pytest.mark.parametrize("how", ["remove", "open", "empty", "link"])
def test_a_file_that_cannot_be_trusted_changes_nothing(
    keys: KeysDirectory, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = keys.add("chat")
    ring = keys.ring()
    if how == "remove":
        keys.file.unlink()
    elif how == "open":
        keys.file.chmod(0o640)
    elif how == "empty":
        keys.write("\n")
    else:
        keys.file.unlink()
        os.mkfifo(keys.file, 0o600)
    with caplog.at_level(logging.ERROR):
        assert [ring.reload(), ring.reload()] == [NOTHING] * 2
    assert len(caplog.records) == 1
    assert ring.identity_of_token(made["token"]).name == "chat"
    with pytest.raises(SetupError):
        keys.ring()


def test_a_file_that_is_written_in_place_is_read_once_it_has_rested(keys: KeysDirectory) -> None:
    made = keys.add("chat", calls("*"))
    ring = keys.ring()
    text = keys.file.read_text("utf-8").replace('call = ["*"]', "call = []")
    for content in (text[: text.index("[keys.")], text):  # the first, read at once, would end every key
        keys.file.write_text(content, "utf-8")
        os.utime(keys.file, (keys.clock.now, keys.clock.now))
        assert ring.reload() == NOTHING
    keys.clock.now += 0.2
    assert ring.reload() == Changed(identities=frozenset({"chat"}))
    assert ring.identity_of_token(made["token"]).name == "chat"


def test_the_servers_certificate_is_taken_over_when_it_is_renewed(keys: KeysDirectory) -> None:
    ring = keys.ring()
    before = ring.server_certificate()
    assert before.key.startswith(b"-----BEGIN PRIVATE KEY-----")
    assert before.chain.count(b"BEGIN CERTIFICATE") == before.roots.count(b"BEGIN CERTIFICATE") == 1
    keys.clock.now += 59 * DAY
    assert not ring.renew_if_due(keys.store)
    keys.clock.now += 2 * DAY
    assert ring.renew_if_due(keys.store)
    assert ring.server_certificate() is before
    assert ring.reload() == Changed(server=True)
    assert ring.server_certificate().chain != before.chain
    assert ring.server_certificate().roots == before.roots
    assert not ring.renew_if_due(keys.store)


def test_a_name_that_is_added_to_the_file_gets_into_the_certificate(keys: KeysDirectory) -> None:
    ring = keys.ring()
    assert not ring.renew_if_due(keys.store)
    keys.edit('names = ["bus.example"]', 'names = ["bus.example", "other.example"]')
    ring.reload()
    assert ring.renew_if_due(keys.store)


def test_without_the_authoritys_key_a_due_certificate_is_warned_about_once_a_day(
    keys: KeysDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    ring = keys.ring()
    (keys.path / "ca.key").unlink()
    assert not ring.renew_if_due(keys.store)
    keys.clock.now += 61 * DAY
    with caplog.at_level(logging.WARNING):
        assert [ring.renew_if_due(keys.store) for _ in range(3)] == [False] * 3
        assert len(caplog.records) == 1
        keys.clock.now += DAY
        assert not ring.renew_if_due(keys.store)
    assert "ca.key is not here, and only it can issue" in caplog.text


@pytest.mark.parametrize(("name", "content"), [(SERVER, b"nothing"), (CA, b"nothing"), (CA, b"\xff")])
def test_a_broken_certificate_does_not_replace_the_one_in_force(keys: KeysDirectory, name: str, content: bytes) -> None:
    ring = keys.ring()
    before = ring.server_certificate()
    (keys.path / name).unlink()
    (keys.path / name).write_bytes(content)
    (keys.path / name).chmod(0o600)
    assert ring.reload() == NOTHING
    assert ring.server_certificate() is before
    with pytest.raises(SetupError, match=r"cannot be used .*: make it anew with `toolbus keys init`"):
        keys.ring()


def test_a_lookup_takes_a_microsecond_and_no_file(keys: KeysDirectory) -> None:
    made = keys.add("chat")
    ring = keys.ring()
    for path in keys.path.iterdir():
        path.unlink()

    def lookups() -> float:
        start = time.process_time()
        for _ in range(1000):
            ring.identity_of_token(made["token"])
        return time.process_time() - start

    assert min(lookups() for _ in range(20)) < 0.01  # ten times what it takes
    assert isinstance(ring.identity_of_token(made["token"]), Identity)
