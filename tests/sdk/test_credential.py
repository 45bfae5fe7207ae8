"""A credential file: what is read, what is refused and how, and that no secret is ever shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.processes import UNMEASURED, environment
from toolbus.errors import SetupError
from toolbus.sdk import Credential
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.connection_settings import ConnectionSettings, choose_address, find_credential

TOKEN = "tbk_1_PAWPAWPAWPAW"
AUTHORITY = Authority()
CLIENT = AUTHORITY.client("chat")
SECRETS = (TOKEN, CLIENT.key, "PRIVATE KEY-----\n")


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "chat.toolbus"
    file.write_text(text, "utf-8")
    file.chmod(mode)
    return file


def toml(**values: str) -> str:
    return "".join(f'{key} = """{value}"""\n' for key, value in values.items())


def whole(**values: str) -> str:
    pair = {"certificate": CLIENT.certificate, "key": CLIENT.key}
    return toml(**{"address": "mtls:bus.example:48931", "token": TOKEN, "ca": AUTHORITY.pem, **pair, **values})


def test_a_credential_is_one_file_with_all_that_a_peer_needs(tmp_path: Path) -> None:
    file = write(tmp_path, whole(name="chat") + "expires = 2027-01-31T12:00:00Z\n")
    credential = Credential.read(file)
    assert (credential.address, credential.name, credential.path) == ("mtls:bus.example:48931", "chat", file)
    assert (credential.token, credential.ca, credential.key) == (TOKEN, AUTHORITY.pem, CLIENT.key)
    assert credential.expires == datetime(2027, 1, 31, 12, tzinfo=UTC)
    assert credential.metadata == (("authorization", f"Bearer {TOKEN}"),)


@pytest.mark.parametrize(
    ("text", "day"),
    [("2027-01-31", "2027-01-31"), ('"2027-01-31"', "2027-01-31"), ('"2027-01-31T23:30:00-02:00"', "2027-02-01")],
)
def test_the_end_of_a_credential_may_be_a_day_or_a_time(tmp_path: Path, text: str, day: str) -> None:
    credential = Credential.read(write(tmp_path, toml(token=TOKEN) + f"expires = {text}\n"))
    assert (credential.day, credential.has_expired) == (day, False)


def test_a_credential_has_expired_from_its_end_on() -> None:
    ends = [datetime.now(UTC) + timedelta(seconds=left) for left in (60, -1)]
    assert [Credential(token=TOKEN, expires=end).has_expired for end in ends] == [False, True]
    assert not Credential(token=TOKEN).has_expired


def test_no_secret_is_in_the_repr(tmp_path: Path) -> None:
    credential = Credential.read(write(tmp_path, whole(name="chat")))
    assert not any(secret in repr(credential) for secret in SECRETS)
    assert "chat" in repr(credential)


@pytest.mark.skipif(os.name != "posix", reason="other systems have no mode")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_credential_that_others_can_reach_is_refused_with_the_command_that_fixes_it(
    tmp_path: Path, mode: int
) -> None:
    file = write(tmp_path, whole(), mode)
    with pytest.raises(SetupError, match=re.escape(f"mode {mode:04o}")) as refused:
        Credential.read(file)
    assert str(refused.value).endswith(f"chmod 600 {file}")
    assert not any(secret in str(refused.value) for secret in SECRETS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_credential_of_another_user_is_refused_with_the_command_that_fixes_it(tmp_path: Path) -> None:
    file = write(tmp_path, whole())
    os.chown(file, 65534, -1)
    with pytest.raises(SetupError, match=re.escape("belongs to user 65534, it must belong to this one (0)")):
        Credential.read(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["neither token nor certificate"]),
        ("token = 5\n", ["chat.toolbus: token", "not shown", "must be text"]),
        (f'token = "{TOKEN} with blanks"\n', ["token (not shown)", "blanks"]),
        (f'token = "{TOKEN}"\ntokne = "{TOKEN}"\n', ["unknown key tokne", "did you mean token"]),
        (f'token = "{TOKEN}', ["cannot be parsed"]),
        (toml(token=TOKEN, ca="not PEM"), ["ca (not shown)", "BEGIN CERTIFICATE"]),
        (toml(token=TOKEN, ca=AUTHORITY.pem[:-40]), ["ca (not shown)", "BEGIN CERTIFICATE"]),
        (toml(certificate=CLIENT.certificate), ["certificate and no key"]),
        (toml(token=TOKEN, key=CLIENT.key), ["key and no certificate"]),
        (toml(certificate=CLIENT.key, key=CLIENT.key), ["certificate (not shown)"]),
        (toml(certificate=CLIENT.certificate, key=CLIENT.key.replace("PRIVATE", "ENCRYPTED PRIVATE")), ["encrypted"]),
        (toml(token=TOKEN, address="bus.example"), ["'bus.example'", "mtls:HOST:PORT"]),
        (toml(token=TOKEN, name="a b"), ["name is 'a b'"]),
        (toml(token=TOKEN, expires="soon"), ["expires is 'soon'", "2027-01-31"]),
        (toml(token=TOKEN) + "expires = 5\n", ["expires is 5"]),
    ],
)  # fmt: skip
def test_a_value_that_breaks_its_rule_is_named_and_no_secret_is_shown(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(SetupError) as refused:
        Credential.read(write(tmp_path, text))
    message = str(refused.value)
    assert all(word in message for word in [*words, str(tmp_path)]), message
    assert not any(secret in message for secret in SECRETS)


def test_what_is_not_a_file_of_a_credentials_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"No such file.*toolbus keys add"):
        Credential.read(tmp_path / "none.toolbus")
    with pytest.raises(SetupError, match=r"is not a file|Is a directory"):
        Credential.read(tmp_path)
    with pytest.raises(SetupError, match="more than 262144 bytes"):
        Credential.read(write(tmp_path, "#" * 300_000))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SetupError, match="is not a file"):
        Credential.read(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("text", "target", "tls", "mtls"),
    [
        ("127.0.0.1:48930", "127.0.0.1:48930", False, False),
        ("unix:/run/bus.sock", "unix:/run/bus.sock", False, False),
        ("tls:bus.example:48931", "bus.example:48931", True, False),
        ("mtls:[::1]:48931", "[::1]:48931", True, True),
    ],
)
def test_an_address_says_how_the_bus_is_reached(text: str, target: str, tls: bool, mtls: bool) -> None:
    address = BusAddress.parse(text)
    assert (address.target, address.tls, address.mtls, str(address)) == (target, tls, mtls, text)


@pytest.mark.parametrize(
    "text", ["tls:48931", "mtls:", "tls:bus.example", "bus.example:0", "bus.example:65536", "b:x", "https://b:1", ""]
)
def test_what_is_not_an_address_is_refused_with_the_forms_that_there_are(text: str) -> None:
    with pytest.raises(SetupError, match=re.escape("HOST:PORT, tls:HOST:PORT, mtls:HOST:PORT or unix:PATH")):
        BusAddress.parse(text)


def test_a_given_address_wins_over_the_environment_and_that_over_the_credential(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    credential = Credential("tls:bus.example:1", TOKEN)
    assert choose_address("", credential).text == "tls:bus.example:1"
    monkeypatch.setenv("TOOLBUS_ADDRESS", "tls:bus.example:2")
    assert choose_address("", credential).text == "tls:bus.example:2"
    assert choose_address("tls:bus.example:3", credential).text == "tls:bus.example:3"


def test_a_given_credential_wins_over_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_credential(None) is None
    monkeypatch.setenv("TOOLBUS_CREDENTIAL", str(write(tmp_path, toml(token="of-the-environment"))))
    (found, given) = (find_credential(None), find_credential(Credential(token="given")))
    assert found is not None
    assert given is not None
    assert (found.token, given.token) == ("of-the-environment", "given")


@pytest.mark.parametrize(
    "address", ["bus.example:48930", "10.0.0.5:48930", "[2001:db8::1]:48930", "127.0.0.1.evil.example:1"]
)
def test_a_token_is_never_sent_over_plain_text_beyond_this_machine(address: str) -> None:
    with pytest.raises(SetupError, match=re.escape(f"write tls:{address}")):
        choose_address(address, Credential(token=TOKEN))
    choose_address(address, None)  # as before


def test_the_token_of_a_source_is_never_sent_over_plain_text_beyond_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(SetupError, match=r"the token of source 'calc' would be sent there in plain text: write tls:"):
        ConnectionSettings("calc", "10.0.0.5:48930", token=TOKEN)
    monkeypatch.setenv("TOOLBUS_TOKEN", TOKEN)
    with pytest.raises(SetupError, match="in plain text"):
        ConnectionSettings("calc", "bus.example:48930")
    for address in ("tls:bus.example:48930", "127.0.0.1:48930", "unix:/bus"):
        assert ConnectionSettings("calc", address).token == TOKEN
    monkeypatch.delenv("TOOLBUS_TOKEN")
    assert not ConnectionSettings("calc", "bus.example:48930").token


@pytest.mark.parametrize("address", ["127.0.0.1:48930", "127.8.0.1:1", "[::1]:48930", "localhost:48930", "unix:/bus"])
def test_a_token_may_be_sent_within_this_machine(address: str) -> None:
    assert choose_address(address, Credential(token=TOKEN)).text == address


def test_an_address_that_needs_a_certificate_is_refused_without_one() -> None:
    for credential in (None, Credential(token=TOKEN)):
        with pytest.raises(SetupError, match=r"client certificate.*toolbus keys add"):
            choose_address("mtls:bus.example:1", credential)


def test_a_credential_made_in_the_program_may_be_of_any_values_that_fit() -> None:
    values: dict[str, Any] = {"certificate": CLIENT.certificate, "key": CLIENT.key}
    assert "of this program" in repr(Credential(**values))


def test_a_peer_without_a_credential_loads_nothing_for_one() -> None:
    script = (
        "import sys\nfrom toolbus import Host, Plugin\nPlugin('x'), Host()\n"
        "names = ('tomllib', 'toolbus.sdk.credential', 'toolbus.parts.tls_probe.probe', 'cryptography')\n"
        "print([name for name in names if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(UNMEASURED),
        timeout=30,
        check=True,
    )
    assert ran.stdout.strip() == "[]"
