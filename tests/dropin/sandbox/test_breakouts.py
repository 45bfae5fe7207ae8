"""Every way out of `breakouts.py`, with both layers and with each alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from tests.dropin.sandbox import trial
from tests.dropin.sandbox.breakouts import ALL, Breakout
from toolbus.dropin.sandbox.landlock import LandlockMissing, _Kernel


def _has_landlock() -> bool:
    try:
        return _Kernel().abi() >= 6
    except LandlockMissing:
        return False


needs_landlock = pytest.mark.skipif(not _has_landlock(), reason="this kernel's Landlock is missing or too old")


@cache
def _outcomes(*layers: tuple[str, bool]) -> Mapping[str, str]:
    return trial.try_all(dict(layers))


def _tries(layer: str) -> list[Breakout]:
    return [breakout for breakout in ALL if layer in breakout.layers]


def _name(breakout: Breakout) -> str:
    return breakout.name


@needs_landlock
@pytest.mark.parametrize("breakout", ALL, ids=_name)
def test_both_layers_together_stop_every_attempt(breakout: Breakout) -> None:
    outcome = _outcomes()[breakout.name]
    assert trial.by_whom(outcome) in trial.STOPPED, outcome


@pytest.mark.parametrize("breakout", _tries("audit"), ids=_name)
def test_audit_hooks_alone_stop_every_attempt_in_python(breakout: Breakout) -> None:
    outcome = _outcomes(("landlock", False))[breakout.name]
    assert trial.by_whom(outcome) in trial.STOPPED - {"Landlock"}, outcome


@needs_landlock
@pytest.mark.parametrize("breakout", _tries("landlock"), ids=_name)
def test_landlock_alone_stops_what_the_kernel_can_see(breakout: Breakout) -> None:
    outcome = _outcomes(("audit", False))[breakout.name]
    assert trial.by_whom(outcome) in trial.STOPPED - {"audit hook"}, outcome
