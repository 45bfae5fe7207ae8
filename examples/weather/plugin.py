"""Offers sunrise, sunset and local time of cities, as a plugin class.

The form is that of N.E.K.O. plugins; only the import line is toolbus's. Nothing is made up and nothing is fetched:
`astral` computes the sun's position and brings the coordinates of some 400 cities.

    toolbus run examples/weather/plugin.py
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Callable, Iterator
from typing import Any
from zoneinfo import ZoneInfo

from astral import LocationInfo
from astral.geocoder import all_locations, database
from astral.sun import sunrise, sunset

from toolbus.sdk import NekoPluginBase, Ok, lifecycle, llm_tool, neko_plugin

CITY = {"type": "string", "description": "City name in English, e.g. 'Tokyo' or 'London, England'"}
DATE = {"type": "string", "format": "date", "description": "Day as YYYY-MM-DD; today in that city where it is left out"}


@neko_plugin(id="weather")
class WeatherPlugin(NekoPluginBase):
    """Tools for sunrise, sunset and local time of a city."""

    def __init__(self, ctx: Any = None) -> None:
        super().__init__(ctx)
        self._cities: dict[str, LocationInfo] = {}  # by folded name, and by name and region; filled at startup

    @lifecycle(id="startup")
    async def startup(self, **_: Any) -> Ok:
        """Loads the cities."""
        for city in all_locations(database()):
            self._cities.setdefault(city.name.casefold(), city)
            self._cities[f"{city.name}, {city.region}".casefold()] = city
        return Ok({"status": "ready", "cities": self._count()})

    @llm_tool(
        name="get_sun_times",
        description="Sunrise, sunset and length of the day in a city, on a given day or today.",
        parameters={
            "type": "object",
            "properties": {"city": CITY, "date": DATE},
            "required": ["city"],
            "additionalProperties": False,
        },
    )
    async def get_sun_times(self, *, city: str, date: str = "") -> Any:
        """Computes both moments; near the poles they may not exist."""
        location = self._cities.get(city.strip().casefold())
        if location is None:
            return self._unknown(city)
        zone = ZoneInfo(location.timezone)
        try:
            day = datetime.date.fromisoformat(date) if date else datetime.datetime.now(zone).date()
        except ValueError:
            return _refusal("BAD_DATE", f"date is {date!r}, it must be a day as YYYY-MM-DD, e.g. 2024-06-21")
        rise, fall = (_moment(which, location, day, zone) for which in (sunrise, sunset))
        answer: dict[str, Any] = {
            "city": f"{location.name}, {location.region}",
            "date": day.isoformat(),
            "timezone": location.timezone,
            "sunrise": rise and rise.strftime("%H:%M:%S"),
            "sunset": fall and fall.strftime("%H:%M:%S"),
        }
        if rise and fall and rise < fall:
            answer["daylight"] = str(fall - rise).split(".")[0]
        elif rise is None and fall is None:
            answer["note"] = "the sun neither rises nor sets there on that day"
        return answer

    @llm_tool(
        name="get_local_time",
        description="Date and time in a city, now.",
        parameters={
            "type": "object",
            "properties": {"city": CITY},
            "required": ["city"],
            "additionalProperties": False,
        },
    )
    async def get_local_time(self, *, city: str) -> Any:
        """Reads the clock in the city's time zone."""
        location = self._cities.get(city.strip().casefold())
        if location is None:
            return self._unknown(city)
        now = datetime.datetime.now(ZoneInfo(location.timezone))
        return {
            "city": f"{location.name}, {location.region}",
            "local_time": now.strftime("%Y-%m-%d %H:%M:%S"),
            "weekday": now.strftime("%A"),
            "timezone": location.timezone,
            "utc_offset": now.strftime("%z"),
        }

    def _unknown(self, city: str) -> dict[str, Any]:
        near = list(dict.fromkeys(self._near(city)))
        hint = f"did you mean {' or '.join(near)}?" if near else "try the capital of its country."
        return _refusal(
            "CITY_NOT_FOUND", f"there is no city {city[:80]!r} in the list of {self._count()}: {hint}", near
        )

    def _near(self, city: str) -> Iterator[str]:
        for name in difflib.get_close_matches(city.strip().casefold(), self._cities, n=3, cutoff=0.6):
            yield self._cities[name].name

    def _count(self) -> int:
        return len({id(city) for city in self._cities.values()})


def _moment(
    which: Callable[..., datetime.datetime], city: LocationInfo, day: datetime.date, zone: ZoneInfo
) -> datetime.datetime | None:
    try:
        return which(city.observer, date=day, tzinfo=zone)
    except ValueError:  # polar day or polar night
        return None


def _refusal(code: str, sentence: str, near: list[str] | None = None) -> dict[str, Any]:
    """Returns an error of the tool itself: data for the model, not an exception."""
    return {"output": {"reason": sentence, **({"near_matches": near} if near else {})}, "is_error": True, "error": code}
