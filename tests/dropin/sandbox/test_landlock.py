from __future__ import annotations

import sys

import pytest

from toolbus.dropin.sandbox.landlock import Files, LandlockMissing, Net, Rules, Scope, handled, restrict


@pytest.mark.parametrize(
    ("abi", "files", "net", "scope"),
    [
        (1, (1 << 13) - 1, 0, 0),
        (2, (1 << 14) - 1, 0, 0),
        (3, (1 << 15) - 1, 0, 0),
        (4, (1 << 15) - 1, 3, 0),
        (5, (1 << 16) - 1, 3, 0),
        (6, (1 << 16) - 1, 3, 3),
        (7, (1 << 16) - 1, 3, 3),
        (99, (1 << 16) - 1, 3, 3),
    ],
)
def test_each_abi_is_asked_for_the_rights_that_it_knows(abi: int, files: int, net: int, scope: int) -> None:
    assert handled(abi) == (Files(files), Net(net), Scope(scope))


@pytest.mark.parametrize(("platform", "said"), [("darwin", "darwin has none"), ("win32", "win32 has none")])
def test_a_platform_without_landlock_is_named(monkeypatch: pytest.MonkeyPatch, platform: str, said: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(LandlockMissing, match=said):
        restrict(Rules((), (), ()))


def test_a_machine_with_other_numbers_for_its_system_calls_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "alpha")
    with pytest.raises(LandlockMissing, match="not known for alpha"):
        restrict(Rules((), (), ()))
