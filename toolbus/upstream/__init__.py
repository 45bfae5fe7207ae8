"""Another host's main server: our tools offered to it by its own REST contract."""

from toolbus.upstream.sync import Upstream

__all__ = ["Upstream"]
