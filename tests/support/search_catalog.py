"""Declares a small catalog for tests of the search."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolbus.parts.models.search import ToolIndex
from toolbus.protocol.tool import Tool


def tool(name: str, description: str = "", **parameters: str) -> Tool:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    return Tool(name, description, json.dumps({"type": "object", "properties": properties}))


CATALOG = (
    tool("get_weather", "Current conditions at a place.", city="Which town", units="celsius or fahrenheit"),
    tool("getWeatherForecast", "Conditions of the coming days."),
    tool("send_email", "Sends a message to an address.", to="the recipient"),
    tool("calendar.today", "What is planned for the day."),
    tool("notes:find", "Looks through saved notes."),
    tool("search_flights", "Finds connections between airports."),
    tool("repo_issues", "Lists open issues of a GitHub repository."),
    tool("查询天气", "查询一个城市的天气预报"),
    tool("播放音乐", "播放一首歌曲"),
    tool("yotei", "カレンダーに予定を追加します"),
    tool("kensaku", "ウェブで情報を検索する"),
    tool("nalssi", "오늘의 날씨를 알려줍니다"),
)
INDEX = ToolIndex(CATALOG)


def names(answer: dict[str, Any]) -> list[str]:
    return [result["name"] for result in answer["results"]]


CONCEPTS = (
    ("weather", "umbrella", "天气", "날씨를"),
    ("email", "boss"),
    ("calendar", "plan", "カレンダー"),
    ("note",),
    ("flight",),
    ("issue", "github"),
    ("音乐", "song"),
    ("検索",),
)


def concepts(texts: Sequence[str]) -> list[list[float]]:
    """Embeds texts by the concepts that they name; a little of everything, since no text means nothing."""
    return [[0.01 + sum(text.lower().count(word) for word in words) for words in CONCEPTS] for text in texts]
