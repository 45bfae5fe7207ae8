"""Runs the council of a bus, for hosts that use it over HTTP."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from toolbus.bus.core import Core, Room
from toolbus.parts.council.settings import BusCouncil

if TYPE_CHECKING:
    from toolbus.parts.council.service import CouncilService

log = logging.getLogger("toolbus")


class CouncilRoom(Room):
    """The council of one bus, loaded for a council file, or at the first request."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._service: CouncilService | None = None  # None until it is loaded
        self._stopped = False

    def provides(self) -> Iterable[object]:
        """Returns itself: the endpoints ask it for the council."""
        return (self,)

    def routes(self) -> Iterable[str]:
        """Names the endpoints of the council."""
        is_used = self.core.config.http != "off" or self.core.config.part(BusCouncil).council is not None
        return ("toolbus.parts.council.routes:router",) if is_used else ()

    async def open(self) -> None:
        """Reads the council file, if the configuration names one.

        Raises:
            SetupError: naming the file and its fault.
        """
        config = self.core.config
        if config.part(BusCouncil).council is None:
            return
        if config.http == "off":
            log.warning("hosts reach the council over HTTP only, and HTTP is off: turn it on with --http")
        self._service = self._made()

    async def find(self) -> CouncilService:
        """Returns the council; a thread loads it for the first host, so that the loop does not stand still."""
        if self._service is None:
            await asyncio.to_thread(importlib.import_module, "toolbus.parts.council.service")
        if self._service is None:  # of several hosts that waited, the first makes it
            self._service = self._made()
            if self._stopped:
                self._service.close()
        return self._service

    def _made(self) -> CouncilService:
        from toolbus.parts.council.service import CouncilService

        return CouncilService.of_file(self.core.program.local, self.core.config.part(BusCouncil).council)

    async def stop(self) -> None:
        """Ends every run; hosts that wait for one are answered."""
        self._stopped = True
        if self._service is not None:
            self._service.close()
