"""The buses that the tests of commands share."""

from tests.support.served_bus import recording_bus, unused_address

__all__ = ["recording_bus", "unused_address"]
