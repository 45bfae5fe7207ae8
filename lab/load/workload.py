"""Declares the one tool that every contestant offers, its arguments and its result; and the quantile of all figures.

Arguments are small unless a size is given: what is measured then is the price of a call, not of its bytes. Imports
nothing of toolbus, since rivals' programs run without it.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable

TOOL_NAME = "forecast"
DESCRIPTION = "Tells the weather of a place for some days ahead."
PARAMETERS_JSON = (
    '{"type":"object","properties":{"place":{"type":"string","maxLength":80},"days":{"type":"integer","minimum":0,'
    '"maximum":4096},"note":{"type":"string"}},"required":["place","days"],"additionalProperties":false}'
)
OUTPUT_JSON = '{"celsius":21.5,"sky":"clear"}'
SUBJECT = f"tools.{TOOL_NAME}"  # of NATS
PLUGIN_LINE = b"plugin\n"  # the first line of a plugin that answers lines of text
LINE_BYTES = 2_000_000  # of lines of text, at most
MAX_IN_FLIGHT = 4096  # that a session takes


def arguments_json(slot: int, size: int = 0) -> str:
    """Returns arguments that fit the schema and differ from slot to slot, of so many bytes; 0 means about 30."""
    if not size:
        return f'{{"place":"Reykjavik","days":{slot}}}'
    begin = f'{{"place":"Reykjavik","days":{slot},"note":"'
    return f'{begin}{"x" * (size - len(begin) - 2)}"}}'


async def forecast(place: str, days: int, note: str = "") -> dict[str, object]:
    """Returns the result, as a function of a program."""
    return {"celsius": 21.5, "sky": "clear"}


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a middle that passes lines of text on."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port), limit=LINE_BYTES)


def quantile(figures: Iterable[float], share: float) -> float:
    """Returns the figure below which such a share of them lies; NaN where the list is empty."""
    ordered = sorted(figures)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else math.nan


def choose_transport(way: str) -> str:
    """Lets the SDK use the lane where a way ends with ``+lane``, else gRPC; returns the way without that."""
    way, plus, _ = way.partition("+lane")
    os.environ["TOOLBUS_LANE"] = "on" if plus else "off"
    return way
