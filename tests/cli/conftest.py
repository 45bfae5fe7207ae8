"""Buses that the tests of the command line share, one for each process of the test runner."""

import socket
from collections.abc import Iterator

import pytest

from tests.bus.gateway.free_port import free_port
from tests.cli.served_bus import CALLBACK, PLUGIN, RECORDED_PLUGIN, address_of, start_bus, start_grpc_bus
from tests.support.processes import Running, toolbus
from tests.support.waiting import until_sync


@pytest.fixture(scope="session")
def bus_and_plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Running]]:
    """A bus's address, and the process of `PLUGIN`."""
    folder = tmp_path_factory.mktemp("bus")
    file = folder / "weather.py"
    file.write_text(PLUGIN)
    with (
        start_bus(folder, "--grpc", "127.0.0.1:0", "--http", "off") as serving,
        Running(folder, "run", file, TOOLBUS_ADDRESS=address_of(serving)) as plugin,
    ):
        until_sync(lambda: "refuse" in toolbus("list", "--bus", address_of(serving)).stdout, "the plugin's tools")
        yield address_of(serving), plugin


@pytest.fixture(scope="session")
def bus(bus_and_plugin: tuple[str, Running]) -> str:
    """The address of a bus with the tools of `PLUGIN`."""
    return bus_and_plugin[0]


@pytest.fixture(scope="session")
def recording_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bus that records contents, with the tools of `RECORDED_PLUGIN`."""
    folder = tmp_path_factory.mktemp("bus")
    (folder / "weather.py").write_text(RECORDED_PLUGIN, "utf-8")
    with (
        start_grpc_bus(folder, "--ephemeral", "--record-contents", "--offer", "tasks", "--offer", "search") as serving,
        Running(folder, "run", folder / "weather.py", TOOLBUS_ADDRESS=address_of(serving)) as plugin,
    ):
        plugin.says("with 5 tools")
        yield address_of(serving)


@pytest.fixture
def unused_address() -> str:
    """An address where no server listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def dead_url() -> Iterator[str]:
    """A callback URL where no server listens."""
    with free_port() as port:
        yield CALLBACK.format(port)
