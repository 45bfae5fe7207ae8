"""``toolbus keys``: what each command writes, prints and refuses."""

from __future__ import annotations

import json
import ssl
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Running, toolbus
from toolbus.bus.keys.keyring import Keyring

Keys = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Runs ``toolbus keys``, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return lambda *words, **env: toolbus("keys", *words, TOOLBUS_DATA_DIR="data", **env)


@pytest.fixture
def made(keys: Keys) -> Keys:
    """The same with an authority for bus.example."""
    assert keys("init", "--name", "bus.example", "--address", "mtls:bus.example:48931").returncode == 0
    return keys


def as_json(ended: subprocess.CompletedProcess[str]) -> Any:
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_bus_that_is_named_as_this_machine_is_named_once(keys: Keys) -> None:
    init = keys("init", "--name", "LocalHost", "--address", "mtls:127.0.0.1:48931")
    assert "the server's certificate is for localhost, 127.0.0.1\n" in init.stdout


def test_from_nothing_to_a_credential_in_two_commands(keys: Keys, tmp_path: Path) -> None:
    init = keys("init", "--name", "bus.example", "--address", "mtls:bus.example:48931")
    assert (init.returncode, init.stderr) == (0, "")
    assert init.stdout == (
        "made the keys in data/keys\n"
        "the server's certificate is for bus.example, localhost, 127.0.0.1\n"
        "credentials get the address mtls:bus.example:48931\n"
        "next: toolbus keys add NAME --host (or --plugin PATTERN, --operator, --reader)\n"
    )
    add = keys("add", "chat", "--host")
    assert add.returncode == 0
    first, *may, last = add.stdout.splitlines()
    assert first.startswith("wrote chat.toolbus: identity chat, credential ")
    assert may == [
        "  It attaches as the sources chat, chat:*, host:*, toolbus-cli.",
        "  It offers no tools.",
        "  It sees and calls every tool.",
        "  It speaks for every user, up to access level 89.",
        "  It does not administer the bus.",
    ]
    assert last == "use it with: TOOLBUS_CREDENTIAL=chat.toolbus toolbus list"
    token = (tmp_path / "chat.toolbus").read_text("utf-8").partition('token = "')[2].partition('"')[0]
    assert Keyring(tmp_path / "data" / "keys").identity_of_token(token).name == "chat"
    assert token not in add.stdout


def test_each_kind_of_identity_starts_with_its_scopes(made: Keys) -> None:
    for name, words in (
        ("weather", ("--plugin", "weather*")),
        ("ann", ("--operator",)),
        ("eye", ("--reader",)),
    ):
        answer = as_json(made("add", name, *words, "--json"))
        assert answer["name"] == name
        assert answer["file"] == f"{name}.toolbus"
    identities = as_json(made("list", "--json"))["identities"]
    assert identities["weather"] == {"attach": ["weather*", "run.*"], "offer": ["*"]}
    assert identities["ann"]["administer"] == ["*"]
    assert identities["eye"]["in_flight"] == 0


def test_a_reader_is_told_the_way_that_it_has(made: Keys) -> None:
    """It has no stream, so the commands refuse its credential."""
    assert made("add", "eye", "--reader").stdout.splitlines()[-1] == (
        "use it over HTTPS: toolbus console --bus https://HOST:PORT --credential eye.toolbus, or toolbus keys export "
        "eye --pem DIRECTORY for other programs"
    )


def test_list_shows_every_key_and_its_state(made: Keys, tmp_path: Path) -> None:
    made("add", "chat", "--host")
    key = as_json(made("list", "--json"))["keys"][0]
    assert (key["identity"], key["kind"], key["state"], key["old_root"]) == ("chat", "token", "live", False)
    assert "sha256" not in key
    assert [line.split()[:1] for line in made("list").stdout.splitlines()] == [
        ["KEY"], [key["id"]], [key["id"].replace("token", "cert")],
    ]  # fmt: skip
    made("revoke", "chat")
    assert "revoked 20" in made("list").stdout
    file = tmp_path / "data" / "keys" / "keys.toml"
    file.write_text(file.read_text("utf-8") + "\n[identities.new]\n", "utf-8")
    assert made("list").stdout.splitlines()[-1].split() == ["-", "new", "-", "-", "-", "no", "key"]


def test_revoke_says_what_it_ended_and_ends_nothing_twice(made: Keys) -> None:
    made("add", "chat", "--host")
    renewed = as_json(made("renew", "chat", "--days", "1", "--json"))
    by_id = made("revoke", renewed["id"])
    lines = "revoked {0}-token of identity chat\nrevoked {0}-cert of identity chat\n"
    assert (by_id.returncode, by_id.stdout) == (0, lines.format(renewed["id"]))
    assert len(as_json(made("revoke", "chat", "--json"))["revoked"]) == 2
    again = made("revoke", "chat")
    assert (again.returncode, again.stdout) == (0, "chat has no live key: nothing to revoke\n")


def test_the_authority_is_rotated_in_two_steps(made: Keys) -> None:
    old = as_json(made("add", "chat", "--host", "--json"))["id"]
    begun = made("rotate-ca")
    assert begun.stdout.endswith("renew: toolbus keys renew chat\nthen: toolbus keys rotate-ca --finish\n")
    assert "live, old root" in made("list").stdout
    early = made("rotate-ca", "--finish")
    assert (early.returncode, early.stdout) == (1, "")
    assert "credentials of chat know only the old root" in early.stderr
    made("renew", "chat")
    assert made("rotate-ca", "--finish").stdout == (
        "only the new root is trusted now\n"
        f"good for open sessions only: {old}-token of identity chat\n"
        f"good for open sessions only: {old}-cert of identity chat\n"
    )
    made("revoke", old)
    assert as_json(made("rotate-ca", "--json"))["renew"] == ["chat"]
    assert len(as_json(made("rotate-ca", "--finish", "--force", "--json"))["stopped"]) == 2


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("add", "chat"), 2, "use exactly one of --plugin PATTERN, --host, --operator and --reader"),
        (("add", "chat", "--host", "--reader"), 2, "use exactly one of"),
        (("add", "chat", "--host", "--days", "0"), 2, "--days is 0, it must be above 0 and at most 3652"),
        (("rotate-ca", "--force"), 2, "--force goes with --finish"),
        (("add", "a b", "--host"), 1, "the name 'a b' breaks the rule"),
        (("add", "chat", "--host", "-o", "none/chat.toolbus"), 1, "none/chat.toolbus cannot be written: No such file"),
        (("renew", "nobody"), 1, "unknown identity 'nobody': `toolbus keys list` shows them"),
        (("revoke", "nobody"), 1, "unknown identity or key 'nobody'"),
        (("rotate-ca", "--finish"), 1, "no rotation is under way"),
        (
            ("list", "--data-dir", "elsewhere"),
            1,
            "elsewhere/keys/keys.toml does not exist: make keys with `toolbus keys",
        ),
        (("list", "--keys", "elsewhere"), 1, "elsewhere/keys.toml does not exist"),
    ],
)
def test_a_mistake_is_refused_with_what_to_do(made: Keys, words: tuple[str, ...], code: int, error: str) -> None:
    ended = made(*words)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert error in ended.stderr
    assert ended.stderr.startswith("toolbus: ")


def test_keys_that_others_may_read_are_refused_with_the_command(made: Keys, tmp_path: Path) -> None:
    (tmp_path / "data" / "keys" / "ca.key").chmod(0o644)
    ended = made("add", "chat", "--host")
    assert ended.returncode == 1
    assert "ca.key has mode 0644, others must have no access to it: run `chmod 600 data/keys/ca.key`" in ended.stderr
    assert not (tmp_path / "chat.toolbus").exists()


def test_commands_at_the_same_time_lose_nothing(made: Keys, tmp_path: Path) -> None:
    with ExitStack() as stack:
        added = [
            stack.enter_context(
                Running(tmp_path, "keys", "add", f"bot{number}", "--reader", "--data-dir", tmp_path / "data")
            )
            for number in range(6)
        ]
        assert [each.code() for each in added] == [0] * 6
    assert set(as_json(made("list", "--json"))["identities"]) == {f"bot{number}" for number in range(6)}


def test_show_tells_all_but_the_secrets(made: Keys, tmp_path: Path) -> None:
    made_chat = as_json(made("add", "chat", "--host", "--json"))
    shown = made("show", "chat.toolbus")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert lines[0] == "identity chat at mtls:bus.example:48931"
    assert lines[1].startswith("good until 2")
    assert lines[2].startswith("token with SHA-256 ")
    assert lines[2].endswith(f": live (key {made_chat['id']}-token)")
    assert lines[3].endswith(f": live (key {made_chat['id']}-cert)")
    assert lines[4:] == [f"  {sentence}" for sentence in made_chat["may"]]
    text = (tmp_path / "chat.toolbus").read_text("utf-8")
    token = text.partition('token = "')[2].partition('"')[0]
    for secret in (token, token[13:], "PRIVATE KEY"):
        assert secret not in shown.stdout
        assert secret not in made("show", "chat.toolbus", "--json").stdout
    assert made("show", "chat.toolbus", "--keys", "elsewhere").stdout.splitlines()[-1] == (
        "only the bus knows what it may do: its keys are not on this machine"
    )
    made("revoke", "chat")
    assert as_json(made("show", "chat.toolbus", "--json"))["token_state"].startswith("revoked (key ")


def test_show_compares_a_hand_made_entry_with_the_file(made: Keys, tmp_path: Path) -> None:
    made("add", "chat", "--host")
    shown = as_json(made("show", "chat.toolbus", "--json"))
    text = (tmp_path / "data" / "keys" / "keys.toml").read_text("utf-8")
    assert f'sha256 = "{shown["token_sha256"]}"' in text
    assert f'sha256 = "{shown["certificate_sha256"]}"' in text


def test_export_writes_what_other_clients_read(made: Keys, tmp_path: Path) -> None:
    made("add", "chat", "--host")
    exported = made("export", "chat", "--pem", "out")
    assert exported.stdout == "wrote out/ca.pem\nwrote out/cert.pem\nwrote out/key.pem\nwrote out/token\n"
    context = ssl.create_default_context(cafile=tmp_path / "out" / "ca.pem")
    context.load_cert_chain(tmp_path / "out" / "cert.pem", tmp_path / "out" / "key.pem")
    token = (tmp_path / "out" / "token").read_text()
    assert Keyring(tmp_path / "data" / "keys").identity_of_token(token).name == "chat"
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert (modes, (tmp_path / "out").stat().st_mode & 0o777) == ({0o600}, 0o700)
    assert len(as_json(made("export", "chat.toolbus", "--pem", "out", "--json"))["files"]) == 4


@pytest.mark.parametrize("command", ["show chat.toolbus", "export chat --pem out"])
def test_a_credential_that_is_missing_or_open_to_others_is_refused(made: Keys, tmp_path: Path, command: str) -> None:
    missing = made(*command.split())
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "chat.toolbus cannot be read" in missing.stderr
    made("add", "chat", "--host")
    (tmp_path / "chat.toolbus").chmod(0o644)
    open_to_others = made(*command.split())
    assert open_to_others.returncode == 1
    assert "chmod 600" in open_to_others.stderr
