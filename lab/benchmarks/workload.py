"""The one tool that every contestant carries: its declaration, its arguments and its result.

Arguments are small unless a size is asked for: what is measured then is the price of a call, not of its bytes.
"""

from __future__ import annotations

TOOL_NAME = "forecast"
DESCRIPTION = "Tells the weather of a place for some days ahead."
PARAMETERS_JSON = (
    '{"type":"object","properties":{"place":{"type":"string","maxLength":80},'
    '"days":{"type":"integer","minimum":0,"maximum":4096},"note":{"type":"string"}},"required":["place","days"],"additionalProperties":false}'
)
OUTPUT_JSON = '{"celsius":21.5,"sky":"clear"}'
MAX_IN_FLIGHT = 4096


def arguments_json(slot: int, size: int = 0) -> str:
    """Returns arguments that fit the schema and differ from slot to slot, of so many bytes; 0 means about 30."""
    if not size:
        return f'{{"place":"Reykjavik","days":{slot}}}'
    begin = f'{{"place":"Reykjavik","days":{slot},"note":"'
    return f'{begin}{"x" * (size - len(begin) - 2)}"}}'


async def forecast(place: str, days: int, note: str = "") -> dict[str, object]:
    """Returns the result, as a function of a program."""
    return {"celsius": 21.5, "sky": "clear"}
