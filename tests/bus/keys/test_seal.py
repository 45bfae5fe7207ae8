"""Sealed texts: what a client brings back is what it was given, or refused."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from toolbus.bus.keys.seal import KEY_FILE, BrokenSeal, Sealer
from toolbus.errors import SetupError

KEY = b"k" * 32


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_sealed_text_gives_back_its_content() -> None:
    sealer = Sealer(KEY)
    for content in (b"", b"x", bytes(range(256)) * 64):
        assert sealer.open(sealer.seal(content, "state", "tool"), "state", "tool") == content


def test_a_sealed_text_fits_into_a_header_and_a_url() -> None:
    text = Sealer(KEY).seal(bytes(range(256)), "session")
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")


@pytest.mark.parametrize(
    "bound", [("state", "other"), ("cursor", "tool"), ("state",), ("state", "tool", ""), ("statetool",), ()]
)
def test_a_text_sealed_for_one_purpose_is_refused_for_another(bound: tuple[str, ...]) -> None:
    sealer = Sealer(KEY)
    with pytest.raises(BrokenSeal):
        sealer.open(sealer.seal(b"content", "state", "tool"), *bound)
    with pytest.raises(BrokenSeal):
        sealer.verify(sealer.sign("task_1", "state", "tool"), *bound)


def test_each_changed_character_breaks_the_seal() -> None:
    sealer = Sealer(KEY)
    for sealed, opening in ((sealer.seal(b"ab", "x"), sealer.open), (sealer.sign("task_1", "x"), sealer.verify)):
        for place, character in enumerate(sealed):
            changed = sealed[:place] + ("B" if character != "B" else "C") + sealed[place + 1 :]
            with pytest.raises(BrokenSeal):
                opening(changed, "x")


@pytest.mark.parametrize("text", ["", ".", "a", "a.", ".a", "ä.ö", "a b.c", "\ud800.x", "A" * 100_000])
def test_a_text_that_was_never_sealed_is_refused(text: str) -> None:
    for opening in (Sealer(KEY).open, Sealer(KEY).verify):
        with pytest.raises(BrokenSeal):
            opening(text, "x")


def test_a_sealed_text_expires() -> None:
    clock = Clock()
    sealer = Sealer(KEY, clock)
    sealed, lasting = sealer.seal(b"state", "x", seconds=3600), sealer.seal(b"state", "x")
    clock.now += 3599
    assert sealer.open(sealed, "x") == b"state"
    clock.now += 2
    with pytest.raises(BrokenSeal, match="expired"):
        sealer.open(sealed, "x")
    clock.now += 10**9
    assert sealer.open(lasting, "x") == b"state"


def test_a_signed_text_can_be_read_by_people() -> None:
    signed = Sealer(KEY).sign("task_1", "task", "user")
    assert signed.startswith("task_1.")
    assert Sealer(KEY).verify(signed, "task", "user") == "task_1"


def test_what_was_sealed_before_a_restart_is_valid_after_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    sealed = Sealer.of(data).seal(b"session", "x")
    assert Sealer.of(data).open(sealed, "x") == b"session"
    assert stat.S_IMODE((data / KEY_FILE).stat().st_mode) == 0o600


def test_buses_without_a_data_directory_have_keys_of_their_own() -> None:
    with pytest.raises(BrokenSeal):
        Sealer.of(None).open(Sealer.of(None).seal(b"x", "x"), "x")


def test_a_key_that_others_may_read_or_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    Sealer.of(data)
    key = data / KEY_FILE
    key.chmod(0o644)
    with pytest.raises(SetupError, match="chmod 600"):
        Sealer.of(data)
    key.chmod(0o600)
    key.write_bytes(b"short")
    with pytest.raises(SetupError, match="delete it"):
        Sealer.of(data)
