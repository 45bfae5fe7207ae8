"""Reads the rules and the scenarios, and checks that the player can play them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from toolbus.parts.conformance.certificates import ACCESS

HERE = Path(__file__).parent
LEVELS = ("must", "should")
ROLES = ("plugin", "host", "remote")
COMMON_KEYS = ("on", "within", "not_before", "rule")  # that every step may have in addition to its verb
# The verbs of steps, each with further keys.
VERBS: Mapping[str, tuple[str, ...]] = {
    "accept": ("with", "metadata", "answers_cancels"),
    "stream": ("metadata",),
    "no_stream": (),
    "send": ("unknown",),
    "expect": ("messages", "in_order"),
    "declared": ("with", "meanwhile"),
    "quiet": (),
    "read": (),
    "end": ("text",),
    "expect_half_close": (),
    "expect_exit": (),
    "leave": (),
    "signal": (),
    "restart": (),
    "wait": (),
    "port": (),
    "attempts": (),
    "cut": (),
    "goaway": (),
    "stall": (),
    "drive": (),
    "outcome": (),
    "rpc": ("request", "response", "status", "text", "metadata"),
    "renew": (),
    "shown": ("times",),
    "best_of": ("at_most", "steps"),
}


class ScenarioError(ValueError):
    """A rule or a scenario is not well formed; a fault of this program, never of the client."""


@dataclass(frozen=True, slots=True)
class ProtocolRule:
    """One rule of the protocol.

    Attributes:
        id: for example `CALL-9`.
        level: `must` or `should`.
        role: `plugin`, `host`, or `remote` for clients that reach a bus on another machine.
        says: the rule, in a sentence.
        anchor: its section of docs/protocol.md.
    """

    id: str
    level: str
    role: str
    says: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """One exchange with a client.

    Attributes:
        name: a sentence with the outcome.
        rules: the ids of the rules that it tests.
        steps: in order.
        unix: whether the address is a unix socket.
        access: how clients reach the bus, one of `certificates.ACCESS`.
        mode: of the credential file.
        late_headers: whether the response headers come only with the first message, as older buses send them.
    """

    name: str
    rules: tuple[str, ...]
    steps: tuple[Mapping[str, Any], ...]
    unix: bool = False
    access: str = "none"
    mode: int = 0o600
    late_headers: bool = False


@cache
def rules() -> Mapping[str, ProtocolRule]:
    """Returns all rules by their ids, in the order of the file."""
    document = tomllib.loads((HERE / "rules.toml").read_text(encoding="utf-8"))
    by_id: dict[str, ProtocolRule] = {}
    for each in document["rule"]:
        rule = ProtocolRule(**each)
        if rule.id in by_id or rule.level not in LEVELS or rule.role not in ROLES:
            raise ScenarioError(f"rules.toml: {rule} has an id that is taken, or an unknown level or role")
        by_id[rule.id] = rule
    return by_id


@cache
def scenarios() -> tuple[Scenario, ...]:
    """Returns all scenarios for clients, in the order of the file.

    Raises:
        ScenarioError: one names an unknown rule or verb; the text says where.
    """
    lines = (HERE / "peer.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(_scenario(json.loads(line)) for line in lines if line)


def bus_scenarios() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "bus.jsonl").read_text(encoding="utf-8").splitlines()]


def verb_of(step: Mapping[str, Any]) -> str:
    return next(verb for verb in VERBS if verb in step)


def _scenario(read: dict[str, Any]) -> Scenario:
    read = repeated(read)
    name = read["scenario"]
    if unknown := read.keys() - {"scenario", "rules", "steps", "unix", "access", "mode", "late_headers"}:
        raise ScenarioError(f"the scenario {name!r} has {sorted(unknown)}, which are unknown keys")
    steps = tuple(read["steps"])
    named = {*read["rules"], *(step["rule"] for step in _all(steps) if "rule" in step)}
    if not read["rules"] or (unknown := named - rules().keys()):
        raise ScenarioError(
            f"the scenario {name!r} names no rule, or {sorted(unknown)}, which rules.toml does not have"
        )
    for step in _all(steps):
        verbs = [verb for verb in VERBS if verb in step]
        if len(verbs) != 1 or (unknown := step.keys() - {*COMMON_KEYS, verbs[0], *VERBS[verbs[0]]}):
            raise ScenarioError(f"the scenario {name!r} has a step that no player can play: {step}")
    access = read.get("access", "none")
    if access not in ACCESS:
        raise ScenarioError(f"the scenario {name!r} has the access {access!r}; there are {', '.join(ACCESS)}")
    mode = int(read.get("mode", "600"), 8)
    return Scenario(
        name, tuple(read["rules"]), steps, bool(read.get("unix")), access, mode, bool(read.get("late_headers"))
    )


def _all(steps: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for step in steps:
        yield step
        yield from _all(step.get("steps", ()))


def repeated(value: Any) -> Any:
    """Expands the short forms of a scenario.

    In a list {"$times": n, "item": …} stands for n items, in which `<n>` in texts and {"$number": true} are the
    number of the item. {"$repeat": text, "times": n} is a repeated text, with `before` and `after` around it.
    """
    if isinstance(value, dict):
        if "$repeat" in value:
            return f"{value.get('before', '')}{value['$repeat'] * value['times']}{value.get('after', '')}"
        return {key: repeated(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    written: list[Any] = []
    for item in value:
        if isinstance(item, dict) and "$times" in item:
            written += [_numbered(item["item"], number) for number in range(1, item["$times"] + 1)]
        else:
            written.append(repeated(item))
    return written


def _numbered(value: Any, number: int) -> Any:
    if value == {"$number": True}:
        return number
    if isinstance(value, dict):
        return {key: _numbered(item, number) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbered(item, number) for item in value]
    return value.replace("<n>", str(number)) if isinstance(value, str) else value
