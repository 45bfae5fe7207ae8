"""Holds that whatever shows a peer the catalog says who asks: a listing without a principal would show everything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from toolbus.bus.access.identity import OBSERVER, Principal, principal_of
from toolbus.functions.scope import ToolScope

BUS = Path(__file__).parents[3] / "toolbus" / "bus"
SHOWN_TO_PEERS = ("gateway", "operators", "streams", "tasks", "calls")
# The methods of the view and the signals that show tools → the position at which they take the principal.
SHOWING = {"listings": 9, "since": 1, "visible": 3, "own": 0, "hides_source": 2, "watch": 1}
OF_THE_VIEW = ("view", "_view", "signals")


def _calls() -> Iterator[tuple[str, ast.Call]]:
    for folder in SHOWN_TO_PEERS:
        for file in sorted((BUS / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHOWING:
                    owner = node.func.value
                    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                    if name in OF_THE_VIEW:
                        yield f"{file.relative_to(BUS)}:{node.lineno}", node


def test_every_part_that_shows_tools_to_peers_passes_its_principal() -> None:
    calls = list(_calls())
    without = [
        place
        for place, call in calls
        if not any(keyword.arg == "principal" for keyword in call.keywords)
        and len(call.args) <= SHOWING[call.func.attr]  # type: ignore[attr-defined]
    ]
    assert without == []
    assert len(calls) > 8  # the search finds what there is


def test_a_function_without_a_bus_has_a_principal_that_may_do_nothing() -> None:
    unknown = principal_of(ToolScope())
    assert not unknown.is_admin
    assert unknown.identity.scopes is not None
    assert not unknown.identity.scopes.reaches("t", "t", "s", None)


def test_a_function_of_the_bus_knows_who_made_the_outermost_call() -> None:
    desk = Principal("desk")
    assert principal_of(ToolScope(principal=desk)) is desk
    assert OBSERVER.of_source("desk") == desk
