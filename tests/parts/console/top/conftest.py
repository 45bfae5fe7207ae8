"""The buses that the tests of the command line share."""

from tests.cli.conftest import bus, bus_and_plugin, unused_address

__all__ = ["bus", "bus_and_plugin", "unused_address"]
