"""The unit for systemd: what it starts, what it confines, and what systemd says to it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.files import SETTINGS, UNIT, check_command, own_copy, unit
from tests.support.waiting import HANG_SECONDS
from toolbus.bus.serve_settings import settle

_UNIT = unit(UNIT)


def test_it_starts_a_bus_with_the_settings_beside_it() -> None:
    (command,) = _UNIT["ExecStart"]
    program, *words = shlex.split(command)
    assert program == "/opt/toolbus/bin/toolbus"
    check_command(words)
    assert words[words.index("--config") + 1] == f"/etc/toolbus/{SETTINGS.name}"


def test_its_state_directory_is_the_data_directory_and_only_its_user_may_enter_it() -> None:
    (directory,) = _UNIT["StateDirectory"]
    assert _UNIT["Environment"] == [f"TOOLBUS_DATA_DIR=/var/lib/{directory}"]
    assert _UNIT["StateDirectoryMode"] == ["0700"]
    (user,) = (
        line for line in (UNIT.parent / "toolbus-sysusers.conf").read_text("utf-8").splitlines() if line[0] == "u"
    )
    assert shlex.split(user)[:3] == ["u", _UNIT["User"][0], "-"]
    assert f"/var/lib/{directory}" in user


def test_a_drain_ends_before_systemd_kills(tmp_path: Path) -> None:
    drain = settle({}, {}, own_copy(SETTINGS, tmp_path)).config.drain_seconds
    assert float(_UNIT["TimeoutStopSec"][0]) > drain


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("ProtectSystem", "strict"),
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("MemoryDenyWriteExecute", "yes"),
        ("RestrictNamespaces", "yes"),
        ("PrivateDevices", "yes"),
        ("ProtectHome", "yes"),
        ("PrivateTmp", "yes"),
    ],
)
def test_it_is_confined(setting: str, value: str) -> None:
    assert _UNIT[setting] == [value]


def test_the_bus_can_ask_the_kernel_which_user_a_connection_belongs_to() -> None:
    assert "AF_NETLINK" in _UNIT["RestrictAddressFamilies"][0].split()
    assert "PrivateUsers" not in _UNIT  # in a user namespace the kernel does not say it
    assert "PrivateNetwork" not in _UNIT


def test_systemd_finds_no_fault_in_it(tmp_path: Path) -> None:
    # Where systemd is not installed, every setting is at least one that a later systemd knows by its spelling.
    assert all(name.isalpha() and name[0].isupper() for name in _UNIT)
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text("utf-8").replace("/opt/toolbus/bin/toolbus", sys.executable), "utf-8")
    checked = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, timeout=HANG_SECONDS)
    faults = [line for line in checked.stderr.splitlines() if UNIT.name in line]
    assert (checked.returncode, faults) == (0, [])
