"""Another host's main server: our tools offered to it by its own REST contract."""

from toolbus.bus.upstream.sync import Upstream

__all__ = ["Upstream"]
