"""Makes the scopes of new identities, and says in sentences what scopes allow: for the commands of keys."""

from __future__ import annotations

from typing import Literal

from toolbus.bus.access.identity import ALL, Globs, Scopes
from toolbus.protocol.tool import MAX_LEVEL

HOST_LEVEL = 89  # the highest level of a host's template: at 90 users see what belongs to other users
Template = Literal["plugin", "host", "operator", "reader"]


def template(kind: Template, pattern: str = ALL) -> Scopes:
    """Returns the scopes that an identity of a kind starts with.

    Args:
        kind: ``plugin`` offers tools and calls only as part of a call that it answers; ``host`` calls every tool for
            every user; ``operator`` may do everything; ``reader`` sees tools, records and metrics, and calls nothing.
        pattern: the sources as which it may attach.
    """
    every = Globs([ALL])
    sources = Globs([pattern])
    if kind == "plugin":
        return Scopes(attach=sources, offer=every)
    if kind == "host":
        return Scopes(attach=sources, call=every, users=every, level=HOST_LEVEL)
    if kind == "reader":
        return Scopes(call=every, administer=frozenset({"calls", "metrics"}), in_flight=0)
    return Scopes(sources, every, every, users=every, level=MAX_LEVEL, administer=frozenset({ALL}))


def scope_sentences(scopes: Scopes) -> list[str]:
    return [
        _attach(scopes),
        f"It offers {_named(scopes.offer, 'tools', 'no tools', 'tools of any name')}.",
        _calls(scopes),
        *([] if scopes.roles.all else [f"It sees the tools of {_named(scopes.roles, 'roles', 'no role', '')} only."]),
        _users(scopes),
        _administer(scopes),
        *_limits(scopes),
    ]


def _attach(scopes: Scopes) -> str:
    if not scopes.attach:
        return "It attaches as no source: it has no stream."
    return f"It attaches as {_named(scopes.attach, 'sources', '', 'any source')}."


def _calls(scopes: Scopes) -> str:
    if not scopes.call:
        return "It calls tools only as part of a call that it answers."
    tools = _named(scopes.call, "tools", "", "every tool")
    never = f", but not {_list(scopes.never)}" if scopes.never else ""
    if scopes.in_flight == 0:
        return f"It sees {tools}{never}, and calls none."
    return f"It sees and calls {tools}{never}."


def _users(scopes: Scopes) -> str:
    users = _named(scopes.users, "users", "no user", "every user")
    return f"It speaks for {users}, up to access level {scopes.level}."


def _administer(scopes: Scopes) -> str:
    if ALL in scopes.administer:
        return "It administers everything of the bus."
    verbs = ", ".join(sorted(scopes.administer))
    return f"It administers {verbs}." if verbs else "It does not administer the bus."


def _limits(scopes: Scopes) -> list[str]:
    sentences = []
    if scopes.rate is not None:
        sentences.append(f"It makes at most {scopes.rate:g} calls a second.")
    if scopes.in_flight:
        sentences.append(f"It has at most {scopes.in_flight} calls at the same time.")
    if scopes.sessions is not None:
        sentences.append(f"It has at most {scopes.sessions} streams at the same time.")
    return sentences


def _named(globs: Globs, what: str, none: str, every: str) -> str:
    if not globs:
        return none
    return every if globs.all and every else f"the {what} {_list(globs)}"


def _list(globs: Globs) -> str:
    return ", ".join(globs.patterns)
