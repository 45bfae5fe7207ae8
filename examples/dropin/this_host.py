"""`this_host`: what runs on this bus, as far as the caller may see it.

The tool asks nobody by itself. It reads `env["bus"]`, a mapping of four functions without parameters, each of which
answers for the caller of this very call:

- `plugins()`: a list of `{"source", "state", "sessions", "in_flight"}`;
- `tools()`: a list of `{"name", "source", "description", "read_only"}`, those that the caller may call;
- `recent_calls()`: a list of `{"name", "source", "user_id", "outcome", "seconds", "ended", "arguments_size",
  "output_size"}`, newest first, with `ended` in seconds since the epoch;
- `stats()`: `{"sessions", "outcomes"}` of the whole bus, and perhaps `up_seconds` and `held_bytes`.

What it is given it filters once more: a plugin of which the caller may call nothing is not shown, other users' calls
and the counts of the whole bus are for operators. Where there is no such mapping, it says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from _common import cut, definition, is_operator, limit_of, matching, refused, size_text, span_text, text_of, wrong_mode

Row: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]

DEFAULT_LIMIT, MOST = 20, 50
MAX_DESCRIPTION = 160  # characters: what a tool is for, not how it is called

KINDS = ("plugins", "tools", "stats", "recent_calls")
BELONGS_TO = {"name": ("plugins", "tools"), "plugin": ("tools", "recent_calls"), "outcome": ("recent_calls",)}


class Sight:
    """What one caller sees of the bus."""

    def __init__(self, env: Mapping[str, Any]) -> None:
        self.all = is_operator(env)
        self.user_id = text_of(env, "user_id")
        self._bus: Mapping[str, Callable[[], Any]] = env["bus"]

    def tools(self) -> list[Row]:
        """Returns the tools that the caller may call; the bus has filtered them."""
        return list(self._bus["tools"]())

    def plugins(self) -> list[Row]:
        """Returns the plugins with the number of the caller's tools; without any, only operators see them."""
        counts = Counter(each["source"] for each in self.tools())
        every = [{**each, "tools": counts[each["source"]]} for each in self._bus["plugins"]()]
        return [each for each in every if self.all or each["tools"]]

    def recent_calls(self) -> list[Row]:
        """Returns the calls made for the caller, but those of looking; nobody's where it is not said who that is."""
        rows = [each for each in self._bus["recent_calls"]() if not _own(each)]
        return [each for each in rows if self.all or (self.user_id and each.get("user_id") == self.user_id)]

    def stats(self) -> Row:
        """Returns the counts of the whole bus."""
        found: Row = self._bus["stats"]()
        return found


def this_host(args: Mapping[str, Any], env: Mapping[str, Any]) -> Answer:
    """Shows one kind of thing."""
    kind = text_of(args, "kind").lower() or "tools"
    if kind not in KINDS:
        return refused(f"There is no kind {kind[:40]!r}. Call this_host again with one of: {', '.join(KINDS)}.")
    refusal = wrong_mode(args, "this_host", ("kind", kind), BELONGS_TO)
    if refusal is not None:
        return refusal
    if not env.get("bus"):
        return refused("this_host cannot see the bus from here. Tell the user so; calling it again does not help.")
    return {"kind": kind} | _SHOWN[kind](Sight(env), args)


def _plugins(sight: Sight, args: Mapping[str, Any]) -> Answer:
    rows = _named(sight.plugins(), args, "source")
    shown = [
        {
            "plugin": each["source"],
            "state": each.get("state", "unknown"),
            "connections": each.get("sessions", 0),
            "calls_running": each.get("in_flight", 0),
            "tools": each["tools"],
        }
        for each in rows
    ]
    return _listed(shown, args, "plugins")


def _tools(sight: Sight, args: Mapping[str, Any]) -> Answer:
    rows, plugin = sight.tools(), text_of(args, "plugin")
    if plugin:
        sources = matching(sorted({each["source"] for each in rows}), plugin, lambda source: [source])
        if not sources:  # whether it is hidden or not there at all is not told
            fallback = {"_note": f"No plugin {plugin[:60]!r} is here. These are the plugins that there are."}
            return {"kind": "plugins"} | _plugins(sight, {"limit": args.get("limit")}) | fallback
        rows = [each for each in rows if each["source"] in sources]
    shown = [
        {
            "name": each["name"],
            "plugin": each["source"],
            "does": _short(each.get("description", "")),
            "only_reads": bool(each.get("read_only")),
        }
        for each in _named(rows, args, "name")
    ]
    return _listed(shown, args, "tools")


def _recent_calls(sight: Sight, args: Mapping[str, Any]) -> Answer:
    plugin, outcome = text_of(args, "plugin").casefold(), text_of(args, "outcome").casefold()
    rows = [
        each
        for each in sight.recent_calls()
        if (not plugin or plugin == each["source"].casefold()) and _ended(outcome, each["outcome"])
    ]
    now = time.time()
    shown = [
        {
            "tool": each["name"],
            "plugin": each["source"],
            "outcome": each["outcome"],
            "took": span_text(each["seconds"]),
            "ended": f"{span_text(now - each['ended'])} ago",
            "arguments": size_text(each["arguments_size"]),
            "answer": size_text(each["output_size"]),
        }
        | ({"for_user": each.get("user_id") or "nobody named"} if sight.all else {})
        for each in rows
    ]
    answer = _listed(shown, args, "recent_calls")
    if not sight.all and not sight.user_id:
        answer["_note"] = "The host did not say who is asking, so no calls are shown."
    return answer


def _stats(sight: Sight, args: Mapping[str, Any]) -> Answer:
    plugins, tools = len(sight.plugins()), len(sight.tools())
    if not sight.all:
        calls = Counter(each["outcome"] for each in sight.recent_calls())
        note = "These count what this user may see. Counts of the whole bus are for operators."
        return {"plugins": plugins, "tools": tools, "your_recent_calls": dict(calls), "_note": note}
    found = sight.stats()
    outcomes = dict(found.get("outcomes", {}))
    answer = {
        "plugins": plugins,
        "tools": tools,
        "connected_programs": found.get("sessions", 0),
        "calls_since_start": sum(outcomes.values()),
        "outcomes": outcomes,
        "_note": "connected_programs are programs, not people.",
    }
    if "up_seconds" in found:
        answer["running_for"] = span_text(found["up_seconds"])
    if "held_bytes" in found:
        answer["memory_held"] = size_text(found["held_bytes"])
    return answer


_SHOWN: Mapping[str, Callable[[Sight, Mapping[str, Any]], Answer]] = {
    "plugins": _plugins,
    "tools": _tools,
    "stats": _stats,
    "recent_calls": _recent_calls,
}


def _named(rows: list[Row], args: Mapping[str, Any], key: str) -> list[Row]:
    """Returns the rows that the argument `name` means; all without one."""
    name = text_of(args, "name")
    return matching(rows, name, lambda row: [str(row[key])]) if name else rows


def _listed(shown: list[Answer], args: Mapping[str, Any], name: str) -> Answer:
    answer = cut(shown, limit_of(args, DEFAULT_LIMIT, MOST), name)
    if not shown:
        answer["_note"] = "Nothing here fits. Tell the user so, and do not make up names."
    return answer


def _own(call: Row) -> bool:
    """Whether a call was made to look at the bus: this tool's, and what it asked the bus itself."""
    name = call["name"].rpartition(":")[2]
    return name == "this_host" or (name == "this_bus" and call["source"] == "toolbus")


def _ended(wanted: str, outcome: str) -> bool:
    """Whether a call ended as asked: 'failed' is everything but OK."""
    return not wanted or (outcome != "OK" if wanted == "failed" else outcome.casefold() == wanted)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_DESCRIPTION else line[:MAX_DESCRIPTION].rsplit(" ", 1)[0] + " …"


register_tool(  # noqa: F821  # the loader gives every file this function
    name="this_host",
    execute=this_host,
    read_only=True,
    allow_repeat=True,
    definition=definition(
        "this_host",
        "What runs on this very system: its plugins, its tools, counts, and calls that ended lately. Call it for: "
        "'which tools do you have', 'what can you do', 'which plugins are running', 'what did you just call', 'did my "
        "last call fail', 'how busy is the bus'. `count` is how many there are, `shown` how many of them are listed: "
        "give `count` when asked how many. Do NOT call it to run a tool, to find out about other computers or the "
        "internet, or for the text of earlier answers.",
        {
            "kind": {"type": "string", "enum": list(KINDS), "description": "what to show. Default tools."},
            "name": {"type": "string", "description": "plugins and tools only: a name or a part of one"},
            "plugin": {"type": "string", "description": "tools and recent_calls only: of this plugin"},
            "outcome": {"type": "string", "description": "recent_calls only: 'OK', 'failed', or a code such as TOOL"},
            "limit": {"type": "integer", "description": f"rows to show, 1 to {MOST}. Default {DEFAULT_LIMIT}."},
        },
    ),
)
