"""SandboxGrants of a sandboxed process: their rules and defaults, and what every process may read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from toolbus.errors import SetupError
from toolbus.parts.dropin.sandbox import SandboxGrants
from toolbus.parts.dropin.sandbox.sandbox_grants import bus_endpoint, readable_everywhere


@pytest.mark.parametrize(
    ("grants", "error"),
    [
        ({"write": (Path("queue.db"),)}, "'queue.db', it must be an absolute path"),
        ({"read": (Path("../x"),)}, "it must be an absolute path"),
        ({"connect": (("", 80),)}, "'' port 80"),
        ({"connect": (("127.0.0.1", 0),)}, "port 0, it must be"),
        ({"connect": (("127.0.0.1", 65536),)}, "from 1 to 65535"),
        ({"memory_bytes": 1}, "memory_bytes to 1, it must be 16777216 or more"),
        ({"cpu_seconds_per_call": 0}, "cpu_seconds_per_call to 0"),
        ({"file_bytes": 0}, "file_bytes to 0"),
    ],
)
def test_a_grant_that_breaks_a_rule_is_refused_with_value_and_rule(grants: dict[str, Any], error: str) -> None:
    with pytest.raises(SetupError, match=error):
        SandboxGrants(**grants)


def test_nothing_is_granted_by_default() -> None:
    assert (SandboxGrants().write, SandboxGrants().read, SandboxGrants().connect) == ((), (), ())


def test_python_and_its_packages_are_readable_and_homes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", os.path.expanduser("~"), os.getcwd(), *sys.path])
    readable = readable_everywhere()
    assert Path(sys.base_prefix) in readable
    assert Path("/dev/urandom") in readable
    assert not {Path("/etc/ssl"), Path("/etc/ssl/private"), Path("/etc/pki"), Path("/etc/pki/tls")} & set(readable)
    assert not {Path("/"), Path.home(), Path("/tmp"), Path("/etc"), Path("/proc"), Path.cwd()} & set(readable)


@pytest.mark.parametrize(
    ("bus", "endpoint"),
    [("127.0.0.1:48930", ("127.0.0.1", 48930)), ("[::1]:1", ("::1", 1)), ("unix:/nowhere/bus", "/nowhere/bus")],
)
def test_the_address_of_the_bus_is_split_into_host_and_port_or_path(bus: str, endpoint: object) -> None:
    assert bus_endpoint(bus) == endpoint


@pytest.mark.parametrize("bus", ["", "unix:", "localhost", ":1", "localhost:http"])
def test_an_invalid_address_of_the_bus_is_refused(bus: str) -> None:
    with pytest.raises(SetupError, match="must be HOST:PORT or unix:PATH"):
        bus_endpoint(bus)
