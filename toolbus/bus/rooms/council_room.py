"""Runs the council of a bus, for hosts that ask over HTTP."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from toolbus.bus.core import Core, Room

if TYPE_CHECKING:
    from toolbus.council.council_service import CouncilService

log = logging.getLogger("toolbus")


class CouncilRoom(Room):
    """The council of one bus, loaded only where HTTP or a council file asks for it."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.service: CouncilService | None = None  # None: hosts cannot ask, and no file is to be checked

    async def open(self) -> None:
        """Reads the council file.

        Raises:
            SetupError: naming the file and what is wrong in it.
        """
        config = self.core.config
        if config.http == "off" and config.council is None:
            return
        from toolbus.council.council_service import CouncilService

        if config.http == "off":
            log.warning("hosts reach the council over HTTP only, and HTTP is off: turn it on with --http")
        self.service = CouncilService.of_file(self.core.local, config.council)

    async def stop(self) -> None:
        """Ends every run; hosts that wait for one are answered."""
        if self.service is not None:
            self.service.close()
