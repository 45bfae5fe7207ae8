"""Checks the scopes of an identity for each HTTP path; a path without a rule does not exist for it.

A rule names the verb that a path needs. The user of a request, and the tools that it lists or calls, are checked where
its parameters are known. Programs of this machine need no rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from toolbus.bus.access.identity import Identity
from toolbus.errors import NotOffered, NotPermitted

ANY = ""  # every identity may use it, and sees there what its scopes reach

# Method, path as the application declares it, and the verb of the scope `administer` that it needs.
RULES: tuple[tuple[str, str, str], ...] = (
    ("GET", "/healthz", ANY),
    ("GET", "/metrics", "metrics"),
    ("GET", "/readyz", ANY),
    ("GET", "/api/tools", ANY),
    ("GET", "/api/tools/events", ANY),
    ("GET", "/api/tools/export", ANY),
    ("GET", "/api/tools/search", ANY),
    ("POST", "/api/tools/invoke", ANY),
    ("POST", "/api/tools/unregister", "catalog"),
    ("POST", "/api/tools/clear", "catalog"),
    ("GET", "/api/tasks", ANY),
    ("GET", "/api/tasks/events", ANY),
    ("GET", "/api/tasks/{task_id}", ANY),
    ("GET", "/api/tasks/{task_id}/await", ANY),
    ("DELETE", "/api/tasks/{task_id}", ANY),
    ("GET", "/api/notifications", ANY),
    ("GET", "/api/calls", "calls"),
    # The dispatcher checks the verb of the tool that is called.
    ("POST", "/api/bus/{name}", ANY),
    # A council calls tools in the bus's own name.
    ("GET", "/api/council", "council"),
    ("GET", "/api/council/tools", "council"),
    ("GET", "/api/council/events", "council"),
    ("GET", "/api/council/runs", "council"),
    ("GET", "/api/council/runs/{run_id}", "council"),
    ("POST", "/api/council/run", "council"),
    ("POST", "/api/council/retry", "council"),
    ("POST", "/api/council/inline", "council"),
    ("POST", "/api/council/inline/invoke", "council"),
    ("GET", "/api/console/me", ANY),
    ("GET", "/api/console/stream", "calls"),
    ("POST", "/api/console/code", "calls"),
    # The profile and the scopes decide which tools it lists and calls there.
    ("POST", "/mcp", ANY),
    ("GET", "/mcp", ANY),
    ("DELETE", "/mcp", ANY),
    ("POST", "/mcp/{profile}", ANY),
    ("GET", "/mcp/{profile}", ANY),
    ("DELETE", "/mcp/{profile}", ANY),
    ("GET", "/docs", ANY),
    ("GET", "/openapi.json", ANY),
    ("GET", "/static-offline-docs/{file}", ANY),
)
# Paths without a key: files of the package, which hold nothing of the bus, and the login of browsers.
NO_KEY: tuple[tuple[str, str], ...] = (
    ("GET", "/console"),
    ("GET", "/console/"),
    ("GET", "/console/{file:rest}"),
    ("POST", "/api/console/login"),
)
# Paths that only programs of this machine may use, and why.
LOCAL_ONLY = {
    "/api/tools/register": "callback URLs are of the bus's own machine: register over gRPC, in a session",
    "/api/tasks/{task_id}/redirect": "results are posted to URLs of the bus's own machine: follow /api/tasks/events",
    "/api/llm-tools/callback/{plugin_id}/{tool_name:rest}": "it is for a main server on the bus's own machine",
}


def _pattern(path: str) -> re.Pattern[str]:
    literal = (re.escape(part) for part in re.split(r"\{[^}]*\}", path))
    last = ".+" if path.endswith(":rest}") else "[^/]+"
    return re.compile(last.join(literal) if path.endswith(":rest}") else "[^/]+".join(literal), re.DOTALL)


_RULES = [(method, _pattern(path), verb) for method, path, verb in RULES]
_NO_KEY = [(method, _pattern(path)) for method, path in NO_KEY]
_LOCAL_ONLY = [(_pattern(path), why) for path, why in LOCAL_ONLY.items()]


def needs_key(method: str, path: str) -> bool:
    """Tells whether a request needs a key."""
    method = "GET" if method == "HEAD" else method
    return not any(each == method and pattern.fullmatch(path) for each, pattern in _NO_KEY)


def check_path(identity: Identity, method: str, path: str) -> None:
    """Checks a request of an identity.

    Raises:
        NotPermitted: its scopes lack what the path needs, or the path is for this machine only.
        NotOffered: no rule names the path.
    """
    if identity.scopes is None:
        return
    for pattern, why in _LOCAL_ONLY:
        if pattern.fullmatch(path):
            raise NotPermitted(f"{path} is not served beyond the bus's own machine: {why}")
    verb = _verb_of(_RULES, "GET" if method == "HEAD" else method, path)
    if verb is None:
        raise NotOffered(f"there is no {method} {path}")
    if verb:
        identity.check_verb(verb, f"{method} {path}")


def _verb_of(rules: Iterable[tuple[str, re.Pattern[str], str]], method: str, path: str) -> str | None:
    # The first rule wins: /api/tasks/events is not a task.
    return next((verb for each, pattern, verb in rules if each == method and pattern.fullmatch(path)), None)
