"""What changed between two declarations of a tool, in words for the caller that knows the older one."""

from __future__ import annotations

from toolbus.tool import Tool


def explain_change(before: Tool | None, after: Tool) -> str:
    """Returns ": what changed", or nothing where the older declaration is no longer known."""
    if before is None:
        return ""
    parts = []
    if before.description != after.description:
        parts.append("its description")
    old, new = before.parameters, after.parameters
    required = set(_names(new.get("required")))
    said: set[str] = set()  # arguments that came or went, whose being required is no more news
    for keyword in ("properties", "required"):
        was, now = old.get(keyword), new.get(keyword)
        was_names, now_names = set(_names(was)) - said, set(_names(now)) - said
        came, went = now_names - was_names, was_names - now_names
        parts += [f"new {'required ' if name in required else ''}argument {name!r}" for name in sorted(came)]
        noun = "argument" if keyword == "properties" else "required argument"
        parts += [f"no {noun} {name!r} any more" for name in sorted(went)]
        said |= came | went
        if isinstance(was, dict) and isinstance(now, dict):
            parts += [f"other rules for {name!r}" for name in sorted(was_names & now_names) if was[name] != now[name]]
    if not parts and old != new:
        parts.append("its parameters")
    return ": " + ", ".join(parts) if parts else ""


def _names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, dict | list) else []
