"""Every attempt of `breakouts.py` to leave the sandbox, with both layers and with each alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from tests.dropin.sandbox import trial
from tests.dropin.sandbox.breakouts import ALL, Breakout
from toolbus.dropin.sandbox.landlock import LandlockKernel, LandlockMissing


def _has_landlock() -> bool:
    try:
        return LandlockKernel().abi() >= 6
    except LandlockMissing:
        return False


needs_landlock = pytest.mark.skipif(not _has_landlock(), reason="this kernel's Landlock is missing or too old")


@cache
def _outcomes(*layers: tuple[str, bool]) -> Mapping[str, str]:
    return trial.try_all(dict(layers))


def _attempts(layer: str) -> list[Breakout]:
    return [breakout for breakout in ALL if layer in breakout.layers]


def _name(breakout: Breakout) -> str:
    return breakout.name


@needs_landlock
@pytest.mark.parametrize("breakout", ALL, ids=_name)
def test_both_layers_together_stop_every_attempt(breakout: Breakout) -> None:
    outcome = _outcomes()[breakout.name]
    assert trial.stopped_by(outcome) in trial.STOPPED, outcome


@pytest.mark.parametrize("breakout", _attempts("audit"), ids=_name)
def test_audit_hooks_alone_stop_every_attempt_in_python(breakout: Breakout) -> None:
    outcome = _outcomes(("landlock", False))[breakout.name]
    assert trial.stopped_by(outcome) in trial.STOPPED - {"Landlock"}, outcome


@needs_landlock
@pytest.mark.parametrize("breakout", _attempts("landlock"), ids=_name)
def test_landlock_alone_stops_what_the_kernel_can_see(breakout: Breakout) -> None:
    outcome = _outcomes(("audit", False))[breakout.name]
    assert trial.stopped_by(outcome) in trial.STOPPED - {"audit hook"}, outcome
