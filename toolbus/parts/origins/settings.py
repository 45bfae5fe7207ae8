"""Declares the origins whose pages may be hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from toolbus.common.setting import TEXTS, CheckedRecord, Option, setting
from toolbus.common.text import quote
from toolbus.errors import SetupError

_ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?", re.ASCII)


def _check(name: str, origins: tuple[str, ...]) -> None:
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise SetupError(
                f"{name} has {quote(origin)}, which is no origin as browsers send it: write scheme, host and port, in "
                "lower case and without a path, such as http://localhost:5173"
            )


@dataclass(frozen=True, slots=True)
class OriginSettings(CheckedRecord):
    """The origins whose pages may be hosts over HTTP."""

    http_origins: tuple[str, ...] = setting(
        (),
        TEXTS,
        "the [origins](../start/typescript.md#browsers-and-edge-functions) whose web pages may list and call tools, "
        "such as `http://localhost:5173`",
        check=_check,
        option=Option("Let web pages of this origin list and call tools; may be repeated (default: none).", "ORIGIN"),
    )

    @property
    def needed_room(self) -> str:
        """The room that lets them; "" where there are none."""
        return "OriginsRoom" if self.http_origins else ""
