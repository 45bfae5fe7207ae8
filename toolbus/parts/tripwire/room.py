"""Has the dispatcher of a bus block secrets of untrusted sources."""

from __future__ import annotations

from toolbus.bus.core import Core, Room
from toolbus.parts.tripwire.settings import TripwireSettings
from toolbus.parts.tripwire.tripwire import Tripwire


class TripwireRoom(Room):
    """The tripwire of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        settings = core.config.part(TripwireSettings)
        core.calls.dispatcher.seams.tripwire = Tripwire(settings.tripwire, settings.tripwire_allow)  # type: ignore[arg-type]
