"""The buses that the tests of the command share."""

from tests.support.served_bus import recording_bus

__all__ = ["recording_bus"]
