"""Tests certificates with the TLS of the standard library: who accepts whom, during a rotation too."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from tests.bus.keys.tls_handshake import client_context, handshake, server_context
from toolbus.errors import SetupError
from toolbus.parts.identity.authority import Authority, all_names, names_of, validity_of

NOW = 1_800_000_000.0
DAY = 86_400.0
AUTHORITY = Authority.create(NOW)[0]
# The codes of OpenSSL for why a certificate was refused (x509_vfy.h).
WRONG_PURPOSE, WRONG_HOST = 26, 62


@pytest.fixture
def now() -> float:
    """The machine's time: TLS checks the dates."""
    return time.time()


def test_client_and_server_accept_each_other_under_every_name(tmp_path: Path, now: float) -> None:
    authority, _ = Authority.create(now)
    server, client = authority.server(["Bus.Example", "10.0.0.7", "[fd00::7]"], now), authority.client("chat", now)
    accepting = server_context(tmp_path, server, authority.root_pems)
    calling = client_context(tmp_path, authority.root_pems, client)
    for host in ("bus.example", "10.0.0.7", "fd00::7", "localhost", "127.0.0.1"):
        assert handshake(calling, accepting, host) == client.fingerprint
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        handshake(calling, accepting, "other.example")
    assert refused.value.verify_code == WRONG_HOST


def test_a_servers_certificate_is_not_a_clients_nor_the_other_way_round(tmp_path: Path, now: float) -> None:
    authority, _ = Authority.create(now)
    server, client = authority.server(["bus.example"], now), authority.client("chat", now)
    accepting = server_context(tmp_path, server, authority.root_pems)
    with pytest.raises(ssl.SSLError):
        handshake(client_context(tmp_path, authority.root_pems, server), accepting, "bus.example")
    false_server = server_context(tmp_path, client, authority.root_pems)
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        handshake(client_context(tmp_path, authority.root_pems, client), false_server, "bus.example")
    assert refused.value.verify_code == WRONG_PURPOSE


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path, now: float) -> None:
    ours, theirs = Authority.create(now)[0], Authority.create(now)[0]
    accepting = server_context(tmp_path, ours.server(["bus.example"], now), ours.root_pems)
    calling = client_context(tmp_path, ours.root_pems, theirs.client("chat", now))
    with pytest.raises(ssl.SSLError):
        handshake(calling, accepting, "bus.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_context(tmp_path, theirs.root_pems), accepting, "bus.example")


def test_during_a_rotation_old_and_new_peers_accept_each_other(tmp_path: Path, now: float) -> None:
    old, _ = Authority.create(now)
    rotated, key = old.rotated(now)
    assert len(rotated.roots) == 2
    assert rotated.root_id != old.root_id
    accepting = server_context(tmp_path, rotated.server(["bus.example"], now), rotated.root_pems, rotated.crossed)
    for issuer in (old, rotated):
        client = issuer.client("chat", now)
        calling = client_context(tmp_path, issuer.root_pems, client)
        assert handshake(calling, accepting, "bus.example") == client.fingerprint
    finished = Authority(key, rotated.only_current())
    only_new = client_context(tmp_path, finished.root_pems, rotated.client("chat", now))
    assert handshake(only_new, accepting, "bus.example")
    without = server_context(tmp_path, finished.server(["bus.example"], now), finished.root_pems)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client_context(tmp_path, old.root_pems), without, "bus.example")


def test_a_root_lives_for_ten_years_and_what_it_issues_never_longer() -> None:
    authority, _ = Authority.create(NOW)
    assert (validity_of(authority.root_pems)[1] - NOW) // DAY == 3652
    assert authority.server(["a"], NOW).expires == NOW + 90 * DAY
    assert authority.client("a", NOW, 0.5).expires == NOW + DAY / 2
    assert authority.client("a", NOW, 9999).expires == validity_of(authority.root_pems)[1]


def test_a_clients_certificate_names_its_identity() -> None:
    issued = Authority.create(NOW)[0].client("chat", NOW)
    certificate = x509.load_pem_x509_certificate(issued.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["toolbus:chat"]


@pytest.mark.parametrize("name", ["http://bus", "bus:48931", "a b", "-a", "", "1.2.3", "a" * 64, "a." * 127, "*", "ü"])
def test_a_name_that_is_not_a_host_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(SetupError, match="neither a host name nor an IP address: write it as peers dial it"):
        Authority.create(NOW)[0].server([name], NOW)


@given(st.text())
def test_any_name_gets_into_the_certificate_or_is_refused(name: str) -> None:
    try:
        issued = AUTHORITY.server([name], NOW)
    except SetupError:
        return
    assert names_of(issued.certificate) == all_names([name])


def test_a_key_that_does_not_fit_is_refused() -> None:
    (one, key), (other, _) = Authority.create(NOW), Authority.create(NOW)
    assert Authority(key, other.root_pems + one.root_pems).root_id == one.root_id
    with pytest.raises(SetupError, match=r"ca.key belongs to no root in ca.pem: restore both from one copy"):
        Authority(key, other.root_pems)
    for broken in (b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"):
        with pytest.raises(SetupError, match=r"cannot be read .*: restore ca.key and ca.pem from a copy"):
            Authority(broken, one.root_pems)


def test_a_cross_certificate_of_another_root_than_the_issuing_one_is_left_out() -> None:
    old, key = Authority.create(NOW)
    rotated, _ = old.rotated(NOW)
    assert Authority(key, rotated.root_pems, rotated.crossed).crossed == b""
