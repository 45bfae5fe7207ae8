"""Offers two tools with the generated stubs alone: converts units, measures texts. Needs only grpcio and protobuf.

python clients/python/units.py [ADDRESS]
"""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import sys
from collections import Counter
from typing import Any

from peer import Call, Peer, Refused

# unit → (quantity, factor to the quantity's base unit, offset added after the factor). Factors: SI brochure, and for
# the pound, foot, gallon … their exact legal definitions of 1959 and 1983.
UNITS: dict[str, tuple[str, float, float]] = {
    "m": ("length", 1.0, 0.0),
    "km": ("length", 1000.0, 0.0),
    "cm": ("length", 0.01, 0.0),
    "mm": ("length", 0.001, 0.0),
    "in": ("length", 0.0254, 0.0),
    "ft": ("length", 0.3048, 0.0),
    "mi": ("length", 1609.344, 0.0),
    "nmi": ("length", 1852.0, 0.0),
    "kg": ("mass", 1.0, 0.0),
    "g": ("mass", 0.001, 0.0),
    "lb": ("mass", 0.45359237, 0.0),
    "oz": ("mass", 0.028349523125, 0.0),
    "l": ("volume", 1.0, 0.0),
    "ml": ("volume", 0.001, 0.0),
    "gal": ("volume", 3.785411784, 0.0),
    "K": ("temperature", 1.0, 0.0),
    "C": ("temperature", 1.0, 273.15),
    "F": ("temperature", 5 / 9, 459.67 * 5 / 9),
    "s": ("time", 1.0, 0.0),
    "min": ("time", 60.0, 0.0),
    "h": ("time", 3600.0, 0.0),
    "d": ("time", 86400.0, 0.0),
}

CONVERT = {
    "type": "object",
    "properties": {
        "value": {"type": "number", "description": "The number to convert."},
        "from": {"type": "string", "description": "Its unit: " + ", ".join(UNITS)},
        "to": {"type": "string", "description": "The unit wanted, of the same quantity."},
    },
    "required": ["value", "from", "to"],
    "additionalProperties": False,
}
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string", "description": "The text to measure."}},
    "required": ["text"],
    "additionalProperties": False,
}


async def convert_units(arguments: dict[str, Any], call: Call) -> Any:
    """Converts a number between two units of one quantity."""
    names = arguments["from"], arguments["to"]
    for name in names:
        if name not in UNITS:
            raise ValueError(f"unknown unit {name!r}; known are: {', '.join(UNITS)}")
    (quantity, factor, offset), (other, other_factor, other_offset) = (UNITS[name] for name in names)
    if quantity != other:
        raise ValueError(f"{names[0]} measures {quantity} and {names[1]} measures {other}: there is no conversion")
    value = (arguments["value"] * factor + offset - other_offset) / other_factor
    return {"value": float(f"{value:.12g}"), "unit": names[1], "quantity": quantity}


async def text_statistics(arguments: dict[str, Any], call: Call) -> Any:
    """Counts what a text is made of."""
    text = arguments["text"]
    words = re.findall(r"[^\W_]+(?:['\u2019-][^\W_]+)*", text.lower())
    return {
        "characters": len(text),
        "words": len(words),
        "different_words": len(set(words)),
        "sentences": len(re.findall(r"[.!?…]+(?=\s|$)", text)),
        "most_frequent": dict(Counter(words).most_common(5)),
        "reading_seconds": round(len(words) / 238 * 60, 1),  # 238 words a minute: Brysbaert 2019
    }


async def main() -> int:
    """Serves until a signal comes or the bus refuses."""
    peer = Peer(sys.argv[1] if len(sys.argv) > 1 else "", "units")
    peer.tool("Convert a number from one unit to another (length, mass, volume, temperature, time).", CONVERT)(
        convert_units
    )
    peer.tool("Count characters, words and sentences of a text, with its most frequent words.", TEXT)(text_statistics)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, peer.drain)
    try:
        await peer.run()
    except Refused as refusal:
        print(f"the bus at {peer.address} refused this plugin: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    logging.basicConfig(format="%(name)s: %(message)s")
    sys.exit(asyncio.run(main()))
