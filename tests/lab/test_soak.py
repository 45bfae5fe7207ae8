"""The soak itself: steady series pass, growing ones do not, and a short run sees what is planted in it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lab.chart import svg
from lab.judge import Verdict, fifths, growth, slope, thinned
from lab.soak.__main__ import main
from lab.soak.page import chart, page
from lab.soak.sample import Record, Sample
from lab.soak.tally import LEDGER
from lab.soak.verdict import judge, warm_up
from tests.lab.test_chaos import output_of, started_in
from tests.support.processes import ROOT, alive, environment
from tests.support.waiting import until_sync

pytestmark = pytest.mark.lab

SECONDS = 1800
START_MB = 90.0
Shape = Callable[[float], float]


def series(shape: Shape, *, noise: float = 0.002, seconds: int = SECONDS) -> list[Sample]:
    """A soak whose memory is START_MB times a shape; the shape gets the share of the soak that has passed."""
    rng = random.Random(1)
    return [
        Sample(
            at=float(second),
            rss_mb=START_MB * (shape(second / seconds) + rng.gauss(0.0, noise)),
            pss_mb=START_MB,
            uss_mb=START_MB,
            files=40 + rng.randrange(5),
            threads=15,
            cpu=0.3,
            calls=300,
            visits=17,
            p50_ms=1.0 + rng.random(),
            p99_ms=5.0,
        )
        for second in range(1, seconds + 1)
    ]


def record(samples: list[Sample]) -> Record:
    held = {"sessions": 2, "tools": 6, "files": 30}
    return Record(float(len(samples)), samples, before=held, after=dict(held))


def verdict(samples: list[Sample], what: str = "memory") -> Verdict:
    return next(finding for finding in judge(record(samples)) if finding.what == what)


def spike(at: float) -> float:
    return 1.5 if 0.5 < at < 0.55 else 1.0


def filling(at: float) -> float:
    """Caches that are full when the warm-up ends."""
    return 0.7 + 3.0 * min(at, 0.1)


def sawtooth(at: float) -> float:
    """Garbage that is collected every three minutes."""
    return 1.0 + 0.03 * ((at * 10) % 1.0)


STEADY: dict[str, Shape] = {
    "flat": lambda at: 1.0,
    "a growth of one percent": lambda at: 1.0 + 0.01 * at,
    "one spike": spike,
    "an arena more of the allocator": lambda at: 1.0 if at < 0.5 else 1.012,
    "caches that fill in the warm-up": filling,
    "garbage that comes and goes": sawtooth,
    "shrinking": lambda at: 1.0 - 0.1 * at,
}
GROWING: dict[str, Shape] = {
    "a growth of three percent": lambda at: 1.0 + 0.03 * at,
    "a step of three percent": lambda at: 1.0 if at < 0.6 else 1.03,
    "a leak that begins late": lambda at: 1.0 + max(0.0, at - 0.6) * 0.2,
    "a leak under garbage": lambda at: sawtooth(at) + 0.03 * at,
}


@pytest.mark.parametrize("shape", STEADY.values(), ids=STEADY)
def test_a_steady_series_is_good(shape: Shape) -> None:
    assert verdict(series(shape)).good


@pytest.mark.parametrize("shape", GROWING.values(), ids=GROWING)
def test_a_growing_series_is_broken(shape: Shape) -> None:
    assert not verdict(series(shape)).good


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02])
def test_noise_of_the_allocator_neither_hides_nor_makes_a_leak(noise: float) -> None:
    assert verdict(series(STEADY["a growth of one percent"], noise=noise)).good
    assert not verdict(series(GROWING["a growth of three percent"], noise=noise)).good


def test_a_short_soak_is_judged_loosely() -> None:
    growing = GROWING["a growth of three percent"]
    assert verdict(series(growing, seconds=60)).good
    assert not verdict(series(growing, seconds=400)).good
    assert not verdict(series(lambda at: 1.0 + at, seconds=60)).good


def test_the_slope_says_what_a_leak_makes_of_the_whole_time_and_the_fifths_see_steps() -> None:
    leak = [(float(x), 100.0 + 0.01 * x) for x in range(1001)]
    step = [(float(x), 100.0 + (x > 700)) for x in range(1001)]
    assert slope(leak) == pytest.approx(10.0, rel=0.02)
    assert fifths(leak) == pytest.approx(8.0, rel=0.02)
    assert fifths(step) == 1.0
    assert growth(step) == 1.0
    assert growth([(0.0, 1.0)]) == 0.0


def test_points_are_joined_to_medians_of_neighbours() -> None:
    assert thinned([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)], 2) == [(0.5, 2.0), (2.0, 5.0)]
    assert len(thinned([(float(x), 0.0) for x in range(1001)], 120)) <= 120
    assert thinned([], 5) == []


def test_the_warm_up_is_a_fifth_and_three_minutes_at_most() -> None:
    assert (warm_up(100.0), warm_up(600.0), warm_up(1800.0)) == (20.0, 120.0, 180.0)


def changed(samples: list[Sample], name: str, shape: Shape) -> list[Sample]:
    """Samples in which one figure follows a shape."""
    return [Sample(**{**asdict(each), name: shape(each.at / SECONDS)}) for each in samples]


@pytest.mark.parametrize(
    ("name", "what", "steady", "growing"),
    [
        ("files", "files", lambda at: 40 + (at > 0.5) * 8, lambda at: 40 + int(20 * at)),
        ("threads", "threads", lambda at: 15 + (at > 0.5) * 2, lambda at: 15 + int(8 * at)),
    ],
)
def test_files_and_threads_must_not_grow(name: str, what: str, steady: Shape, growing: Shape) -> None:
    samples = series(STEADY["flat"])
    assert verdict(changed(samples, name, steady), what).good
    assert not verdict(changed(samples, name, growing), what).good


def test_what_is_still_held_once_all_have_gone_and_each_fault_breaks_a_soak() -> None:
    good = record(series(STEADY["flat"]))
    assert all(finding.good for finding in judge(good))
    good.after["tools"] += 1
    assert [finding.what for finding in judge(good) if not finding.good] == ["tools, all gone"]
    good.after["tools"] -= 1
    good.after["files"] += 10
    assert all(finding.good for finding in judge(good))
    good.after["files"] += 1
    assert [finding.what for finding in judge(good) if not finding.good] == ["files, all gone"]
    good.after["files"] = 30
    good.fault("a call ended in INTERNAL")
    assert [finding.what for finding in judge(good) if not finding.good] == ["faults"]


def test_how_much_slower_calls_become_is_a_figure_that_a_busy_machine_hardly_changes() -> None:
    rng = random.Random(2)
    what = "p50 of the best seconds"

    def busy(at: float) -> float:
        return 2.0 + rng.random() + (at > 0.4) * rng.choice((0.0, 200.0))

    def rise(shape: Shape) -> float:
        shown = verdict(changed(series(STEADY["flat"]), "p50_ms", shape), what)
        assert (shown.good, shown.word) == (True, "")
        return float(shown.measured.split()[0])

    assert rise(busy) < 0.5
    assert rise(lambda at: busy(at) + 3.0 * at) > 2.0


def test_a_soak_without_samples_or_calls_is_not_good() -> None:
    assert not all(finding.good for finding in judge(Record(10.0)))
    silent = changed(series(STEADY["flat"]), "p50_ms", lambda at: 0.0)
    assert not verdict(silent, "samples with calls over the stream").good


def test_a_soak_that_left_something_out_is_not_good() -> None:
    whole = record(series(STEADY["flat"]))
    assert all(finding.good for finding in judge(whole))
    whole.kinds = {"watcher"}
    assert [finding.measured for finding in judge(whole) if not finding.good] == ["watcher"]


@pytest.mark.parametrize("count", [0, 1, 30, 1800])
def test_a_picture_and_a_page_are_made_of_any_number_of_samples(count: int) -> None:
    samples = series(STEADY["flat"])[:count]
    drawn = ElementTree.fromstring(svg(chart(samples, "python -m lab.soak <&>")))
    lines = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 10
    assert all(len(line.attrib["points"].split()) <= 240 for line in lines)
    shown = record(samples)
    assert "soak.svg" in page(shown, judge(shown), "python -m lab.soak", "soak.svg")


# -- real ones -----------------------------------------------------------------------------------------------------


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lab.soak", "--rate", "60", "--folder", str(folder / "logs"), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment({}),
        start_new_session=True,
    )


def outcome(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Returns exit code, JSON and output of a soak."""
    file = folder / "outcome.json"
    process = start(folder, "--json", str(file), *words)
    text = output_of(process)
    return process.returncode, json.loads(file.read_text()) if file.exists() else {}, text


def broken(answer: dict[str, Any]) -> set[str]:
    return {row["what"] for row in answer["verdict"] if row["verdict"] == "BROKEN"}


def test_a_short_soak_sees_every_kind_of_call_and_visit_and_no_fault(tmp_path: Path) -> None:
    picture = tmp_path / "soak.svg"
    code, answer, text = outcome(tmp_path, "--seconds", "2", "--svg", str(picture), "--write", "--pages", str(tmp_path))
    assert (code, broken(answer)) == (0, set()), text
    assert len(answer["samples"]) >= 10
    done = {what.rpartition(" ")[0] for what in answer["codes"]}
    assert {"stream", "callback", "rest", "nested", "left", "task", "plugin", "broken plugin", "watcher"} <= done
    assert picture.read_text() == (tmp_path / "soak.svg").read_text()
    assert "A soak, in figures" in (tmp_path / "soak-figures.md").read_text()


def test_ctrl_c_ends_a_soak_with_the_verdict_of_what_was_measured_here_that_of_a_planted_leak(tmp_path: Path) -> None:
    file = tmp_path / "outcome.json"
    process = start(tmp_path, "--broken", "leak", "--json", str(file), "--seconds", "30", "--rate", "20")
    ledger = tmp_path / "logs" / LEDGER.format("visits")
    until_sync(lambda: ledger.exists() and ledger.read_text().count('"broken plugin OK"') > 2, "visits that leak")
    process.send_signal(signal.SIGINT)
    text = output_of(process)
    assert process.returncode == 1, text
    assert {"files", "tools, all gone"} <= broken(json.loads(file.read_text())), text


def test_a_soak_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    process = start(tmp_path)
    visits = tmp_path / "logs" / LEDGER.format("visits")
    try:
        # A program that is only just starting is not in the care of the lifeline yet.
        until_sync(lambda: visits.exists() and visits.read_text(), "a visit, for which every program is needed")
        pids = started_in(tmp_path)
        assert len(pids) >= 4
    finally:
        process.send_signal(signal.SIGKILL)
    output_of(process)
    until_sync(lambda: not any(map(alive, pids)), f"the end of {pids}")


@pytest.mark.parametrize("words", [("--seconds", "0.5"), ("--rate", "0"), ("--minutes", "1", "--seconds", "1")])
def test_wrong_usage_is_reported(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "usage" in capsys.readouterr().err
