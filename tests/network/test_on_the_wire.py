"""Tests what a listener between two machines sees of a bus: TLS, and none of what is said. Needs root: ``make
network``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.capture import Direction, frames, is_tls, streams
from tests.network.hidden_words import ARGUMENT, PLUGIN, RESULT, TOOL, USER
from tests.network.namespaces import Namespace, RunningThere, two_namespaces
from tests.support.processes import toolbus
from toolbus.sdk import Credential

pytestmark = pytest.mark.network
HERE = Path(__file__).parent
PLAIN_PORT = 48930
SAID_IN_THE_CLEAR = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
    for word in sys.argv[2:]:
        line.sendto(word.encode(), (sys.argv[1], 9))
"""
ATTACH_IN_THE_CLEAR = """
import sys
from toolbus import SetupError, SyncHost
try:
    with SyncHost(sys.argv[1]) as host:
        host.ready()
except SetupError as error:
    print(error)
"""


class Site:
    """A bus in one namespace, peers in another, and a recording of the line between them."""

    def __init__(self, folder: Path, here: Namespace, there: Namespace, recorder: RunningThere) -> None:
        self.folder = folder
        self.here = here
        self.there = there
        self._recorder = recorder
        self.recording = folder / "recording"

    def keys(self, *words: str) -> None:
        ended = toolbus("keys", *words, "--data-dir", self.folder / "data")
        assert ended.returncode == 0, ended.stderr

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.toolbus"

    @property
    def hidden(self) -> list[bytes]:
        """What must not be seen: tokens and their secret parts, names, arguments, results."""
        tokens = [Credential.read(self.file(name)).token for name in (PLUGIN, "chat")]
        words = [*tokens, *(token.rpartition("_")[2] for token in tokens), PLUGIN, TOOL, ARGUMENT, RESULT, USER]
        return [word.encode() for word in words]

    def recorded(self) -> dict[Direction, bytes]:
        """Ends the recording, and returns what each direction of each connection carried."""
        self._recorder.process.terminate()
        self._recorder.process.wait()
        return streams(self.recording)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with (
        two_namespaces() as (here, there),
        RunningThere(
            *(there, tmp_path, "python", str(HERE / "sniffer.py"), there.device, str(tmp_path / "recording"))
        ) as recorder,
    ):
        recorder.says("recording")
        site = Site(tmp_path, here, there, recorder)
        site.keys("init", "--name", here.address, "--address", f"mtls:{here.address}:{PLAIN_PORT + 1}")
        site.keys("add", PLUGIN, "--plugin", PLUGIN, "-o", str(site.file(PLUGIN)))
        site.keys("add", "chat", "--host", "-o", str(site.file("chat")))
        yield site


def test_a_listener_on_the_line_sees_no_token_no_argument_and_no_name_of_a_tool(site: Site) -> None:
    address = site.here.address
    words = ("--grpc", f"tls:{address}:0", "--grpc", f"mtls:{address}:0", "--http", "off")
    with RunningThere(site.here, site.folder, "serve", *words, TOOLBUS_DATA_DIR=str(site.folder / "data")) as bus:
        bus.says("toolbus ready")
        addresses = re.findall(r"m?tls:[0-9.]+:[0-9]+", bus.out)
        peers = site.there.run(HERE / "peers.py", str(site.file(PLUGIN)), str(site.file("chat")), *addresses)
        assert peers == "answered\n"
    recorded = site.recorded()
    ports = {int(address.rpartition(":")[2]) for address in addresses}
    assert {port for each in recorded for port in (each.source[1], each.to[1])} >= ports
    assert sum(map(len, recorded.values())) > 20_000
    for direction, content in recorded.items():
        assert is_tls(content), direction
        assert [word for word in site.hidden if word in content] == []
    everything = b"".join(frames(site.recording))
    assert [word for word in site.hidden if word in everything] == []


def test_the_recording_shows_what_is_said_in_the_clear(site: Site) -> None:
    program = site.folder / "said.py"
    program.write_text(SAID_IN_THE_CLEAR)
    site.there.run(program, site.here.address, *(word.decode() for word in site.hidden))
    site.recorded()
    everything = b"".join(frames(site.recording))
    assert [word for word in site.hidden if word not in everything] == []


def test_the_sdk_sends_nothing_where_its_token_would_be_seen(site: Site) -> None:
    address = f"{site.here.address}:{PLAIN_PORT}"
    program = site.folder / "attach.py"
    program.write_text(ATTACH_IN_THE_CLEAR)
    for name, value in (("TOOLBUS_CREDENTIAL", str(site.file("chat"))), ("TOOLBUS_TOKEN", "token-of-a-source")):
        assert "would be sent there in plain text: write tls:" in site.there.run(program, address, **{name: value})
    ended = site.there.toolbus("list", "--bus", address, TOOLBUS_CREDENTIAL=str(site.file("chat")))
    assert ended.returncode == 2
    assert "would be sent there in plain text: write tls:" in ended.stderr
    assert [each for each in site.recorded() if PLAIN_PORT in (each.source[1], each.to[1])] == []


def test_a_bus_does_not_listen_to_the_line_without_keys(site: Site) -> None:
    for address, code in ((f"{site.here.address}:0", 2), ("0.0.0.0:0", 2), (f"tls:{site.here.address}:0", 1)):
        ended = site.here.toolbus("serve", "--grpc", address, "--http", "off", "--data-dir", str(site.folder / "none"))
        assert (ended.returncode, ended.stdout) == (code, "")
        assert "toolbus keys init" in ended.stderr
