"""The demo shows what it promises, is in nobody's way, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.processes import ROOT, alive, environment
from tests.support.waiting import until_sync

SECONDS = 40.0  # it starts seven processes, and waits for the heartbeat of one that is frozen


def test_the_demo_calls_every_kind_of_plugin_beside_any_other_bus_and_ends_with_all_it_started(tmp_path: Path) -> None:
    said, logged = tmp_path / "said", tmp_path / "logged"
    with open(said, "wb") as out, open(logged, "wb") as errors, subprocess.Popen(
        [sys.executable, "-m", "examples.demo"],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=errors,  # the lines of plugins, which come at any moment
        cwd=ROOT,
        env=environment({"XDG_DATA_HOME": str(tmp_path / "data")}),
        start_new_session=True,
    ) as demo:  # fmt: skip
        try:
            until_sync(
                lambda: "Ctrl-C ends everything." in said.read_text() or demo.poll() is not None,
                "its last line",
                SECONDS,
            )
            assert demo.poll() is None, said.read_text() + logged.read_text()
            started = [child.pid for child in psutil.Process(demo.pid).children(recursive=True)]
            demo.send_signal(signal.SIGINT)
            assert demo.wait(SECONDS) == 0
        finally:
            demo.kill()
    shown = said.read_text()
    answered = re.search(r"^roll_dice .*\n  answer after .*\n +(\{.*\})\n", shown, re.MULTILINE)
    assert answered is not None, shown
    assert re.fullmatch(r'\{"dice":"3d6\+2","rolls":\[\d,\d,\d\],"total":\d+\}', answered[1])
    _, killed, frozen = re.split("\n(?:kill -9|SIGSTOP) of a plugin in the middle of a call", shown)
    for section, back in ((killed, "the kill"), (frozen, "SIGCONT")):
        assert "\n  UNAVAILABLE after " in section, shown
        assert "\n  a retry is not safe: it may have run\n  another tool answers meanwhile" in section
        assert re.search(rf"\n  it answers again .* ms after {back}\n", section) is not None
    assert "says: I have looked it up" in shown
    ready = re.match(r"A bus: gRPC at 127\.0\.0\.1:(\d+), HTTP at 127\.0\.0\.1:(\d+)\n", shown)
    assert ready is not None, shown
    assert not {"48930", "48911"} & set(ready.groups())
    assert len(started) >= 6
    until_sync(lambda: not any(map(alive, started)), "the end of what it started")
    assert not (tmp_path / "data").exists(), "it keeps something"
