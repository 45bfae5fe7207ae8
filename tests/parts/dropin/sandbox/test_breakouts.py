"""Every attempt of `breakouts.py` to leave the sandbox, with both layers and with each alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from tests.parts.dropin.sandbox import trial
from tests.parts.dropin.sandbox.breakouts import ALL, Breakout
from toolbus.parts.dropin.sandbox.landlock import LandlockKernel, LandlockMissing

pytestmark = pytest.mark.thorough


def _has_landlock() -> bool:
    try:
        return LandlockKernel().abi() >= 6
    except LandlockMissing:
        return False


needs_landlock = pytest.mark.skipif(not _has_landlock(), reason="this kernel's Landlock is missing or too old")


def _attempts(layer: str) -> list[Breakout]:
    return [breakout for breakout in ALL if layer in breakout.layers]


@cache
def _outcomes_of_both() -> Mapping[str, str]:
    return trial.try_all(trial.BOTH)


@cache
def _outcomes_of(layer: str) -> Mapping[str, str]:
    """Returns what the attempts came to that this layer alone has to stop."""
    return trial.try_all({"audit": trial.AUDIT_ALONE, "landlock": trial.LANDLOCK_ALONE}[layer], _attempts(layer))


def _name(breakout: Breakout) -> str:
    return breakout.name


@needs_landlock
@pytest.mark.parametrize("breakout", ALL, ids=_name)
def test_both_layers_together_stop_every_attempt(breakout: Breakout) -> None:
    outcome = _outcomes_of_both()[breakout.name]
    assert trial.stopped_by(outcome) in trial.STOPPED, outcome


@pytest.mark.parametrize("breakout", _attempts("audit"), ids=_name)
def test_audit_hooks_alone_stop_every_attempt_in_python(breakout: Breakout) -> None:
    outcome = _outcomes_of("audit")[breakout.name]
    assert trial.stopped_by(outcome) in trial.STOPPED - {"Landlock"}, outcome


@needs_landlock
@pytest.mark.parametrize("breakout", _attempts("landlock"), ids=_name)
def test_landlock_alone_stops_what_the_kernel_can_see(breakout: Breakout) -> None:
    outcome = _outcomes_of("landlock")[breakout.name]
    assert trial.stopped_by(outcome) in trial.STOPPED - {"audit hook"}, outcome
