"""Tests which rights each Landlock ABI handles, and where Landlock is missing."""

from __future__ import annotations

import sys

import pytest

from toolbus.parts.dropin.sandbox.landlock import Files, LandlockMissing, Net, Rules, Scope, handled, restrict


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
def test_each_abi_handles_the_rights_that_it_knows(abi: int, files: int, net: int, scope: int) -> None:
    assert handled(abi) == (Files(files), Net(net), Scope(scope))


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_error_names_a_platform_without_landlock(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(LandlockMissing, match=f"{platform} does not have it"):
        restrict(Rules((), (), ()))


def test_a_machine_with_other_system_call_numbers_is_not_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "alpha")
    with pytest.raises(LandlockMissing, match="not known for alpha"):
        restrict(Rules((), (), ()))
