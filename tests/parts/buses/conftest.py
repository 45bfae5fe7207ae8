"""The bus that the tests of the command use."""

from tests.support.served_bus import bus_and_plugin, unused_address

__all__ = ["bus_and_plugin", "unused_address"]
