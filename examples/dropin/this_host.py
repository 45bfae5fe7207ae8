"""Shows what runs on this bus, as far as the caller may see it: the tool `this_host`.

It reads `env["bus"]`, a mapping of four functions without parameters, which answer for the caller of this call:

- `plugins()`: a list of `{"source", "state", "sessions", "in_flight"}`;
- `tools()`: a list of `{"name", "source", "description", "read_only"}`, those that the caller may call;
- `recent_calls()`: a list of `{"name", "source", "user_id", "outcome", "seconds", "ended", "arguments_size",
  "output_size"}`, newest first, with `ended` in seconds since the epoch;
- `stats()`: `{"sessions", "outcomes"}` of the whole bus, and perhaps `up_seconds` and `held_bytes`.

It filters once more: a plugin of which the caller may call nothing is not shown; other users' calls and the counts of
the whole bus are for operators. Without such a mapping it returns an error that says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from _common import cut, definition, is_operator, limit_of, matching, refuse, size_text, span_text, text_of, wrong_mode

if TYPE_CHECKING:  # the loader gives each file this function
    from toolbus.dropin import register_tool

Row: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]

DEFAULT_LIMIT, MAX_ROWS = 20, 50
MAX_DESCRIPTION = 160  # characters: enough to say what a tool does

KINDS = ("plugins", "tools", "stats", "recent_calls")
BELONGS_TO = {"name": ("plugins", "tools"), "plugin": ("tools", "recent_calls"), "outcome": ("recent_calls",)}


class BusView:
    """What one caller may see of the bus."""

    def __init__(self, env: Mapping[str, Any]) -> None:
        self.is_operator = is_operator(env)
        self.user_id = text_of(env, "user_id")
        self._bus: Mapping[str, Callable[[], Any]] = env["bus"]

    def tools(self) -> list[Row]:
        """Returns the tools that the caller may call; the bus has filtered them."""
        return list(self._bus["tools"]())

    def plugins(self) -> list[Row]:
        """Returns the plugins with the number of their tools for the caller; operators see those without any too."""
        counts = Counter(each["source"] for each in self.tools())
        plugins = [{**each, "tools": counts[each["source"]]} for each in self._bus["plugins"]()]
        return [each for each in plugins if self.is_operator or each["tools"]]

    def recent_calls(self) -> list[Row]:
        """Returns the calls made for the caller without those that read the bus; none without a user."""
        rows = [each for each in self._bus["recent_calls"]() if not _reads_bus(each)]
        return [each for each in rows if self.is_operator or (self.user_id and each.get("user_id") == self.user_id)]

    def stats(self) -> Row:
        """Returns the counts of the whole bus."""
        stats: Row = self._bus["stats"]()
        return stats


def this_host(args: Mapping[str, Any], env: Mapping[str, Any]) -> Answer:
    """Shows one kind of information."""
    kind = text_of(args, "kind").lower() or "tools"
    if kind not in KINDS:
        return refuse(f"There is no kind {kind[:40]!r}. Call this_host again with one of: {', '.join(KINDS)}.")
    refusal = wrong_mode(args, "this_host", ("kind", kind), BELONGS_TO)
    if refusal is not None:
        return refusal
    if not env.get("bus"):
        return refuse("this_host cannot see the bus from here. Tell the user so; calling it again does not help.")
    return {"kind": kind} | _SHOWN[kind](BusView(env), args)


def _plugins(view: BusView, args: Mapping[str, Any]) -> Answer:
    rows = _named(view.plugins(), args, "source")
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


def _tools(view: BusView, args: Mapping[str, Any]) -> Answer:
    rows, plugin = view.tools(), text_of(args, "plugin")
    if plugin:
        sources = matching(sorted({each["source"] for each in rows}), plugin, lambda source: [source])
        if not sources:  # a hidden plugin and an unknown one look the same
            fallback = {"_note": f"No plugin {plugin[:60]!r} is here. These are the plugins that there are."}
            return {"kind": "plugins"} | _plugins(view, {"limit": args.get("limit")}) | fallback
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


def _recent_calls(view: BusView, args: Mapping[str, Any]) -> Answer:
    plugin, outcome = text_of(args, "plugin").casefold(), text_of(args, "outcome").casefold()
    rows = [
        each
        for each in view.recent_calls()
        if (not plugin or plugin == each["source"].casefold()) and _has_outcome(each["outcome"], outcome)
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
        | ({"for_user": each.get("user_id") or "nobody named"} if view.is_operator else {})
        for each in rows
    ]
    answer = _listed(shown, args, "recent_calls")
    if not view.is_operator and not view.user_id:
        answer["_note"] = "The host did not say who is asking, so no calls are shown."
    return answer


def _stats(view: BusView, args: Mapping[str, Any]) -> Answer:
    plugins, tools = len(view.plugins()), len(view.tools())
    if not view.is_operator:
        calls = Counter(each["outcome"] for each in view.recent_calls())
        note = "These count what this user may see. Counts of the whole bus are for operators."
        return {"plugins": plugins, "tools": tools, "your_recent_calls": dict(calls), "_note": note}
    stats = view.stats()
    outcomes = dict(stats.get("outcomes", {}))
    answer = {
        "plugins": plugins,
        "tools": tools,
        "connected_programs": stats.get("sessions", 0),
        "calls_since_start": sum(outcomes.values()),
        "outcomes": outcomes,
        "_note": "connected_programs are programs, not people.",
    }
    if "up_seconds" in stats:
        answer["running_for"] = span_text(stats["up_seconds"])
    if "held_bytes" in stats:
        answer["memory_held"] = size_text(stats["held_bytes"])
    return answer


_SHOWN: Mapping[str, Callable[[BusView, Mapping[str, Any]], Answer]] = {
    "plugins": _plugins,
    "tools": _tools,
    "stats": _stats,
    "recent_calls": _recent_calls,
}


def _named(rows: list[Row], args: Mapping[str, Any], key: str) -> list[Row]:
    """Returns the rows that match the argument `name`; all rows without it."""
    name = text_of(args, "name")
    return matching(rows, name, lambda row: [str(row[key])]) if name else rows


def _listed(shown: list[Answer], args: Mapping[str, Any], name: str) -> Answer:
    answer = cut(shown, limit_of(args, DEFAULT_LIMIT, MAX_ROWS), name)
    if not shown:
        answer["_note"] = "Nothing here fits. Tell the user so, and do not make up names."
    return answer


def _reads_bus(call: Row) -> bool:
    """Tells whether a call was made to read the bus: by this tool, or by its requests to the bus."""
    name: str = call["name"].rpartition(":")[2]
    return name == "this_host" or (name, call["source"]) == ("this_bus", "toolbus")


def _has_outcome(outcome: str, filter_text: str) -> bool:
    """Tells whether an outcome matches the argument `outcome`: 'failed' is everything but OK."""
    return not filter_text or (outcome != "OK" if filter_text == "failed" else outcome.casefold() == filter_text)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_DESCRIPTION else line[:MAX_DESCRIPTION].rsplit(" ", 1)[0] + " …"


register_tool(
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
            "limit": {"type": "integer", "description": f"rows to show, 1 to {MAX_ROWS}. Default {DEFAULT_LIMIT}."},
        },
    ),
)
