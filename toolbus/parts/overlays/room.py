"""Reads the overlays of a bus, again whenever their file changes, and offers retired tools that nobody else offers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from toolbus.bus.catalog.entry import Entry
from toolbus.bus.core import Core, Room
from toolbus.bus.keys.private_files import Stamp, stamp_of
from toolbus.common.text import clean_line
from toolbus.errors import SetupError
from toolbus.functions.tool_spec import llm_tool, spec_of
from toolbus.parts.overlays.overlays import Overlays
from toolbus.parts.overlays.settings import Overlay, OverlaySettings, read_overlay_file

log = logging.getLogger("toolbus.overlays")

SOURCE = "toolbus.overlays"  # of retired tools that nobody else offers
LOOK_SECONDS = 0.5  # between two looks at the file


class OverlaysRoom(Room):
    """The overlays of one bus; without a file, tools are offered as they are declared."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._file = core.config.part(OverlaySettings).overlays
        self._state: Stamp = None  # of the file as it was read last; None where it cannot be read
        self._retired: dict[str, Overlay] = {}  # the retired tools that the bus offers, by name
        self._overlays: Overlays | None = None  # None without a file
        if self._file is not None:
            self._state = stamp_of(self._file)
            registry, dispatcher = core.catalog.registry, core.calls.dispatcher
            overlays = Overlays(read_overlay_file(self._file), registry, dispatcher, core.config.limits)
            registry.overlay, self._overlays = overlays.apply, overlays
            dispatcher.seams.interceptors = (*dispatcher.seams.interceptors, overlays)

    def provides(self) -> Iterable[object]:
        """Returns itself, for explanations."""
        return [self]

    async def start(self) -> None:
        """Offers retired tools, and begins to look at the file."""
        if self._overlays is not None and self._file is not None:
            self._offer_retired(self._overlays)
            self.repeat(LOOK_SECONDS, partial(self._look, self._overlays, self._file), "looked at the overlays")

    def explain(self, entry: Entry) -> Iterator[tuple[str, bool | None, str]]:
        """Yields the step of a call that an overlay adds."""
        explained = self._overlays.explained(entry) if self._overlays is not None else ""
        if explained:
            yield "overlay", None, f"the operator changes {explained}"

    def _look(self, overlays: Overlays, file: Path) -> None:
        state = stamp_of(file)
        if state != self._state:
            self._state = state
            self._read_again(overlays, file)
        self._offer_retired(overlays)

    def _read_again(self, overlays: Overlays, file: Path) -> None:
        try:
            changed = overlays.change(read_overlay_file(file))
        except SetupError as error:
            log.error("the overlays stay as they were: %s", clean_line(str(error)))
            return
        except Exception:
            log.exception("a fault of the bus: the overlays may be in force in part")
            return
        if changed:
            log.info("overlays changed: %s", clean_line(", ".join(changed)))
            self.core.program.local.catalog_changed()

    def _offer_retired(self, overlays: Overlays) -> None:
        """Offers the tools that have a static answer and no other source; takes those back that have none any more."""
        local, registry = self.core.program.local, self.core.catalog.registry
        wanted: dict[str, Overlay] = {}
        for key, overlay in overlays.of.items():
            source, _, name = key.rpartition(":")
            if overlay.has_answer and not registry.entries_of(source, name):
                wanted[overlay.name or name] = overlay
        for name in [name for name, overlay in self._retired.items() if wanted.get(name) != overlay]:
            local.remove_tool(name, SOURCE)
            del self._retired[name]
        for name in wanted.keys() - self._retired.keys():
            if registry.find(name) is None:
                local.offer(SOURCE, spec_of(_answering(name, wanted[name])))
                self._retired[name] = wanted[name]


def _answering(name: str, overlay: Overlay) -> Any:
    def retired(**arguments: Any) -> Any:
        return overlay.answer

    description = overlay.description or "This tool is retired; it says what to use instead."
    parameters = {"type": "object"}
    return llm_tool(name=name, description=description, parameters=parameters, read_only=True)(retired)
