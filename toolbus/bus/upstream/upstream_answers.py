"""What a main server's answers mean (REST-2, REST-4, REST-8). Bytes of a stranger in, records out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

MAX_ECHO = 300  # characters of others' words in our sentences


class Trouble(Exception):
    """The other side cannot be asked, or does not speak the contract; the sentence says which."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tool as the other side lists it."""

    source: str
    callback_url: str
    description: str


@dataclass(frozen=True, slots=True)
class Theirs:
    """What the other side lists: its roles in order, and by name and role what it has."""

    roles: tuple[str, ...] = ()
    names: dict[str, dict[str, Held]] | None = None

    def holders(self, name: str) -> dict[str, Held]:
        """Who has a name, by role."""
        return (self.names or {}).get(name, {})


@dataclass(frozen=True, slots=True)
class Taken:
    """How a request ended.

    Attributes:
        ok: whether the other side did it, for one role at least.
        problem: what it said about what it did not do; "" for nothing.
        failed: roles that did not.
    """

    ok: bool
    problem: str = ""
    failed: frozenset[str] = frozenset()


def read_listing(status: int, body: bytes) -> Theirs:
    """Reads the answer of GET /api/tools.

    Raises:
        Trouble: it is no such answer.
    """
    answer = _parse(body)
    if status != 200 or not isinstance(answer, dict) or answer.get("ok") is not True:
        raise Trouble(f"GET /api/tools was answered with {_described(status, body, answer)}")
    by_role = answer.get("tools_by_role")
    if not isinstance(by_role, dict) or not all(isinstance(tools, list) for tools in by_role.values()):
        raise Trouble(f"GET /api/tools was answered without lists in tools_by_role: {clean(body)}")
    names: dict[str, dict[str, Held]] = {}
    for role, tools in by_role.items():
        for tool in tools:
            if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
                raise Trouble(f"GET /api/tools lists something that is no tool: {clean(tool)}")
            words = (str(tool.get(key) or "") for key in ("source", "callback_url", "description"))
            names.setdefault(tool["name"], {})[role] = Held(*words)
    return Theirs(tuple(by_role), names)


def read_change(status: int, body: bytes) -> Taken:
    """Reads the answer of a register, unregister or clear."""
    answer = _parse(body)
    if status != 200 or not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
        return Taken(False, _described(status, body, answer))
    failed = _failed(answer.get("failed_roles"))
    told = "; ".join(f"role {clean(role)!r}: {error}" for role, error in failed.items())
    if answer["ok"]:
        return Taken(True, f"not taken in every role: {told}" if failed else "", frozenset(failed))
    error = clean(answer["error"]) if answer.get("error") else ""
    reason = "; ".join(part for part in (error, told) if part)
    return Taken(False, reason or "ok is false, without a reason", frozenset(failed))


def clean(words: object) -> str:
    """Returns others' words fit for a line of a log: one line, printable, short."""
    text = words.decode("utf-8", "replace") if isinstance(words, bytes) else str(words)
    line = " ".join(text[: 4 * MAX_ECHO].split())
    line = "".join(letter if letter.isprintable() else "�" for letter in line)
    return line if len(line) <= MAX_ECHO else f"{line[: MAX_ECHO - 1]}…"


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        return None


def _failed(listed: Any) -> dict[str, str]:
    items = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    return {str(item.get("role")): clean(item.get("error") or "no reason given") for item in items}


def _described(status: int, body: bytes, answer: Any) -> str:
    """Returns what an answer says that is none of the contract's good ones."""
    detail = answer.get("detail") or answer.get("error") if isinstance(answer, dict) else None
    if isinstance(detail, list):  # REST-2: one for each field
        parts = [part for part in detail if isinstance(part, dict)]
        detail = "; ".join(f"{_place(part.get('loc'))}: {part.get('msg')}" for part in parts)
    if detail:
        return f"HTTP {status}: {clean(detail)}"
    if status == 200:
        return f"HTTP 200 and a body that is no answer of the contract: {clean(body) or 'nothing'}"
    return f"HTTP {status}: {clean(body)}" if body.strip() else f"HTTP {status}"


def _place(loc: Any) -> str:
    return ".".join(str(step) for step in loc if step != "body") if isinstance(loc, list) else "request"
