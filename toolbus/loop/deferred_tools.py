"""What one conversation is shown of a catalog too large to be shown whole.

`Deferred` starts with a few tools and adds those that the model asks for: it offers two tools of its own,
`search_tools` and `request_tool_injection`, and answers them. It does not know where tools come from or how they are
called.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from toolbus.search import (
    MAX_RESULTS,
    MODES,
    REQUEST_TOOL_INJECTION,
    SEARCH_TOOLS,
    IndexCache,
    ToolIndex,
    search_tool,
    sendable,
)
from toolbus.tool import Annotations, Result, Tool

MAX_INJECTED_AT_ONCE = 20
MAX_CORRECTED = 5  # unknown names that get near ones: comparing with 1,000 names takes 5 ms


def injection_tool() -> Tool:
    """Returns the declaration of `request_tool_injection`."""
    names = {
        "type": "array",
        "items": {"type": "string"},
        "minItems": 1,
        "maxItems": MAX_INJECTED_AT_ONCE,
        "description": f"Names exactly as {SEARCH_TOOLS} returned them",
    }
    return Tool(
        name=REQUEST_TOOL_INJECTION,
        description=(
            f"Add tools to your list by name. Call this after {SEARCH_TOOLS} found a tool that you need; "
            "you can call the added tools from your next turn on. "
            "Do NOT call it for tools that are in your list already, and never with a name that you guessed. "
            "It runs nothing: the task is not done until you call the added tool itself."
        ),
        parameters_json=json.dumps({"type": "object", "properties": {"names": names}, "required": ["names"]}),
        annotations=Annotations(idempotent=True, destructive=False),
    )


class Deferred:
    """What one conversation in deferred mode is offered. For one thread at a time.

    The order is made for prompt caches: what was offered before stays in front, what was asked for comes after it. A
    tool that leaves the catalog is not offered, and is again when it comes back.

    Args:
        pinned: names that are offered from the start, whenever the catalog has them.
        cache: shared by the conversations of a program, so that a catalog is indexed once; None: one of its own.
    """

    def __init__(self, pinned: Iterable[str] = (), *, cache: IndexCache | None = None) -> None:
        self.pinned = frozenset(pinned)
        self._injected: dict[str, None] = {}  # names, in the order they were asked for
        self._own = {tool.name: tool for tool in (search_tool(), injection_tool())}
        self._tools: dict[str, Tool] = {}  # the catalog that `offered` was last given
        self._cache = cache or IndexCache()

    def __repr__(self) -> str:
        return f"Deferred({len(self.pinned)} pinned, {len(self._injected)} injected of {len(self._tools)} tools)"

    @property
    def injected(self) -> tuple[str, ...]:
        """The names that were asked for, in that order."""
        return tuple(self._injected)

    def offered(self, tools: Iterable[Tool]) -> list[Tool]:
        """Returns what the model is to see of a catalog, which `search` and `inject` then work on.

        The two tools of this mode come first, then the pinned ones in the order of the catalog, then the injected
        ones. A tool of the catalog that has the name of one of the two cannot be reached.
        """
        self._tools = {}
        for tool in tools:
            if tool.name not in self._own:
                self._tools.setdefault(tool.name, tool)
        pinned = [tool for name, tool in self._tools.items() if name in self.pinned]
        injected = [self._tools[name] for name in self._injected if name in self._tools]
        return [*self._own.values(), *pinned, *injected]

    def search(self, arguments: Mapping[str, Any] | str) -> Result:
        """Answers a call of `search_tools`; arguments may be what the model wrote, as JSON text."""
        try:
            query, options = _search_arguments(_object(arguments))
        except ValueError as problem:
            return _refused(str(problem))
        return _answer(self._index().search(query, **options))

    def inject(self, arguments: Mapping[str, Any] | str) -> Result:
        """Answers a call of `request_tool_injection`; arguments may be what the model wrote, as JSON text."""
        try:
            names = _injection_arguments(_object(arguments))
        except ValueError as problem:
            return _refused(str(problem))
        injected: list[str] = []
        already: list[str] = []
        unknown: dict[str, list[str]] = {}  # with the names that were perhaps meant
        for name in names:
            if name in self._own or (name in self._tools and (name in self.pinned or name in self._injected)):
                already.append(name)
            elif name in self._tools:
                injected.append(name)
            else:
                unknown[sendable(name, 200)] = self._near(name[:200]) if len(unknown) < MAX_CORRECTED else []
        self._injected.update(dict.fromkeys(injected))
        answer = {"injected": injected, "already_offered": already, "unknown": unknown}
        if injected or already:
            return _answer({"success": True, **answer})
        why = f"no tool has such a name: take one that stands beside it under unknown, or one that {SEARCH_TOOLS} found"
        return _answer({"success": False, "error": why, **answer})

    def _index(self) -> ToolIndex:
        revision = tuple((tool.name, tool.schema_hash) for tool in self._tools.values())
        return self._cache.index_of(revision, self._tools.values())

    def _near(self, name: str) -> list[str]:
        """Returns names that are written alike, else those that share a word."""
        alike = difflib.get_close_matches(name, self._tools, n=3)
        return alike or [hit["name"] for hit in self._index().search(name, top_k=3)["results"]]


def _object(arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """Returns a model's arguments; null counts as not given, because some providers make every parameter required."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"the arguments are no JSON ({problem}): send one JSON object") from None
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments are {reprlib.repr(arguments)}, they must be one JSON object")
    return {name: value for name, value in arguments.items() if value is not None}


def _search_arguments(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    options = {name: given[name] for name in ("mode", "top_k", "include_parameters") if name in given}
    query, top_k = given.get("query", ""), options.get("top_k", 10)
    if not isinstance(query, str):
        raise ValueError(
            f"query is {reprlib.repr(query)}, it must be a string: say in a few words what the tool should do"
        )
    if not isinstance(options.get("mode", ""), str):
        raise ValueError(f"mode is {reprlib.repr(options['mode'])}, it must be one of {', '.join(MODES)}")
    if isinstance(top_k, bool) or not (isinstance(top_k, int) or (isinstance(top_k, float) and top_k.is_integer())):
        raise ValueError(f"top_k is {reprlib.repr(top_k)}, it must be an integer from 1 to {MAX_RESULTS}")
    if not isinstance(options.get("include_parameters", False), bool):
        raise ValueError(
            f"include_parameters is {reprlib.repr(options['include_parameters'])}, it must be true or false"
        )
    return query, {**options, "top_k": int(top_k)}


def _injection_arguments(given: Mapping[str, Any]) -> list[str]:
    """Returns the names that are asked for, each once; one name may stand there without its list."""
    if "names" not in given:
        raise ValueError(f"names is missing: give a list of tool names, taken from what {SEARCH_TOOLS} found")
    names = given["names"]
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"names is {reprlib.repr(names)}, it must be a list of tool names: take them from what {SEARCH_TOOLS} found"
        )
    names = list(dict.fromkeys(names))
    if len(names) > MAX_INJECTED_AT_ONCE:
        raise ValueError(
            f"names has {len(names)} names, at most {MAX_INJECTED_AT_ONCE} are added at once: name the ones you need"
        )
    return names


def _refused(why: str) -> Result:
    return _answer({"success": False, "error": why})


def _answer(output: Mapping[str, Any]) -> Result:
    return Result(output_json=json.dumps(output, ensure_ascii=False), is_error=not output["success"])
