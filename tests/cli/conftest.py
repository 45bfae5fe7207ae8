"""The buses that the tests of commands share."""

from tests.support.served_bus import bus, bus_and_plugin, dead_url, recording_bus, unused_address

__all__ = ["bus", "bus_and_plugin", "dead_url", "recording_bus", "unused_address"]
