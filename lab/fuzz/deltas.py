"""Puts answers together from any events that providers stream: each is a turn that can be sent and called from.

Events are valid ones of a provider in any order, cut and changed. An answer may break off or be refused in a sentence;
it may not break the program otherwise, show half of a character, or call what was never offered.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lab.fuzz.choices import Choices
from lab.fuzz.json_texts import has_half
from lab.fuzz.target import Target, hold
from toolbus.dialects import Dialect, EndpointError, find_dialect
from toolbus.parts.models.dialects.wire_names import NameTable

ODD: dict[type, tuple[Any, ...]] = {  # what may stand where something of that type stood
    str: ("", "x", "\ud800", "echo", '{"a":', "no such word"),
    int: (0, 1, -1, 2**70),
    bool: (True, False),
    list: ([], None),
    dict: ({}, None),
}


@cache
def events() -> dict[str, list[dict[str, Any]]]:
    """Returns valid events by the name of their dialect, in an order in which they make an answer."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, Path(__file__).with_suffix(".jsonl").read_text("utf-8").splitlines()):
        found.setdefault(line["dialect"], []).append(line["event"])
    return found


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns every place in an event at which something else may stand: (container, key)."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [each for key in keys for each in ((value, key), *_places(value[key]))]


def _event(choose: Choices, valid: Sequence[dict[str, Any]]) -> Any:
    event = copy.deepcopy(choose.pick(valid))
    change = choose.byte()
    if change % 4 == 3:
        container, key = choose.pick(_places(event))
        if change & 4:
            del container[key]
        else:
            container[key] = choose.pick(ODD[type(container[key])])
    return event


def run(data: bytes) -> None:
    choose = Choices(data)
    name = choose.pick([*events()])
    dialect = find_dialect(name)
    hold(isinstance(dialect, Dialect), f"{name} has no answers")
    assert isinstance(dialect, Dialect)
    names = NameTable.build(["echo"], dialect.name_rule)
    stream = dialect.stream(names)
    try:
        while choose:
            for delta in stream.feed(_event(choose, events()[name])):
                hold(not has_half(delta.text), f"half of a character was shown: {delta.text!r}")
        turn = stream.finish()
    except EndpointError:
        return
    except TypeError as refusal:
        hold("is not an answer of a model" in str(refusal), f"a refusal without a sentence: {refusal!r}")
        return
    for call in turn.calls:
        texts: list[Any] = [call.id, call.name, call.arguments_json]
        hold(all(isinstance(each, str) for each in texts), f"{call!r} cannot be made")
        hold(call.known == (call.wire_name == "echo"), f"{call!r} was never offered")


def seeds() -> Iterator[bytes]:
    """Each provider's events in order, and each with something odd in it."""
    for number, valid in enumerate(events().values()):
        yield bytes([number, *(value for event in range(len(valid)) for value in (event, 0))])
        for event in range(len(valid)):
            yield bytes([number, event, 3, 1, event, event, 7, 2])


TARGET = Target(
    "deltas",
    "any events of a provider become a turn or are refused, and only what was offered is called",
    run,
    seeds,
    256,
)
