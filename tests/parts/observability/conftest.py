"""The buses that the tests of commands share."""

from tests.support.served_bus import bus, bus_and_plugin, recording_bus

__all__ = ["bus", "bus_and_plugin", "recording_bus"]
