"""The one tool that every contestant carries: its declaration, its arguments and its result.

Arguments are small on purpose: what is measured is the price of a call, not of its bytes.
"""

from __future__ import annotations

TOOL_NAME = "forecast"
DESCRIPTION = "Tells the weather of a place for some days ahead."
PARAMETERS_JSON = (
    '{"type":"object","properties":{"place":{"type":"string","maxLength":80},'
    '"days":{"type":"integer","minimum":0,"maximum":4096}},"required":["place","days"],"additionalProperties":false}'
)
OUTPUT_JSON = '{"celsius":21.5,"sky":"clear"}'
MAX_IN_FLIGHT = 4096


def arguments_json(slot: int) -> str:
    """Returns about 30 bytes of arguments that fit the schema and differ from slot to slot."""
    return f'{{"place":"Reykjavik","days":{slot}}}'


async def forecast(place: str, days: int) -> dict[str, object]:
    """Returns the result, as a function of a program."""
    return {"celsius": 21.5, "sky": "clear"}
