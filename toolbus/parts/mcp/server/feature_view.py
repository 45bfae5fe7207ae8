"""Shows each client the prompts, resources and templates of mounted servers that it may see.

Prompts are named like tools: `MOUNT_NAME`. URIs are not changed, since results contain them too; a URI of several
mounts belongs to the first of them.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from toolbus.bus.access.identity import Identity
from toolbus.bus.catalog.policy import Policy
from toolbus.common.newest import NewestCache
from toolbus.parts.mcp.features import FeatureProvider, Features
from toolbus.parts.mcp.server.mcp_listing import ToolNames
from toolbus.parts.mcp.server.mcp_request import encode
from toolbus.parts.mcp.settings import Profile

log = logging.getLogger("toolbus.mcp")

MAX_NOTICES = 1_000  # logged URIs of several mounts
MAX_MATCHED = 4096  # characters of a URI or template; a longer one never matches
MAX_VARIABLES = 16  # of such a template
_VARIABLE = re.compile(r"\{([+#./;?&]?)[^{}]*\}")
_EXCLUDED = {"": "/?#", ".": "/?#", "/": "?#"}  # operator of a variable → characters that its value cannot have

Declaration = Mapping[str, Any]
# Kind → what names a declaration, and the capability of a mount that has some.
_KINDS = {
    "prompts": ("name", "prompts"),
    "resources": ("uri", "resources"),
    "templates": ("uriTemplate", "resources"),
}


class FeatureView:
    """The visible prompts, resources and templates of each profile."""

    def __init__(self, features: Features, policy: Policy, names: ToolNames) -> None:
        self._features = features
        self._policy = policy
        self._names = names
        self._noticed: NewestCache[str, None] = NewestCache(MAX_NOTICES)

    def __repr__(self) -> str:
        return f"<FeatureView of {self._features!r}>"

    def listed(self, kind: str, profile: Profile, identity: Identity) -> dict[str, tuple[FeatureProvider, Declaration]]:
        """Returns prompts by their names towards clients, resources by URI, or templates by theirs.

        A URI of several mounts is that of the first of them.
        """
        key, capability = _KINDS[kind]
        listed: dict[str, tuple[FeatureProvider, Declaration]] = {}
        for provider in self._features.providers:
            source = provider.source
            for declared in provider.declared(kind) if capability in provider.capabilities else ():
                name = declared.get(key)
                if not isinstance(name, str) or not name or not self._sees(profile, identity, name, provider):
                    continue
                if kind == "prompts":
                    name = self._names.name_of(profile, f"{source}:{name}", name, source)
                if name not in listed:
                    listed[name] = (provider, declared)
                elif kind != "prompts" and name not in self._noticed:
                    self._noticed[name] = None
                    first, text = listed[name][0].source, "%s has the resource %.200r of %s too: it is read from %s"
                    log.warning(text, source, name, first, first)
        return listed

    def instructing(
        self, profile: Profile, identity: Identity, sources_of_tools: Callable[[], Collection[str]]
    ) -> list[FeatureProvider]:
        """Returns the mounts that share their instructions and have something visible in the profile."""
        providers = [provider for provider in self._features.providers if provider.instructions]
        if not providers:
            return providers
        lists = (self.listed(kind, profile, identity) for kind in _KINDS)
        visible = {provider.source for listed in lists for provider, _ in listed.values()}
        visible.update(sources_of_tools())
        return [provider for provider in providers if provider.source in visible]

    def providers_of(self, profile: Profile, identity: Identity, uri: str) -> list[FeatureProvider]:
        """Returns the mounts that may have a resource, the most likely first.

        A URI may contain data that other servers must not see. So one that is listed belongs to the mount that lists
        it, and a template takes URIs of the scheme that it names only, and none of which another template says more
        before its first variable. A URI of neither may come from a result of a tool: mounts with URIs of its scheme
        get it. A template that begins with a variable counts if no other mount has resources.
        """
        resources, templates = (self.listed(kind, profile, identity) for kind in ("resources", "templates"))
        scheme = _scheme(uri)
        if uri in resources:
            owners = [resources[uri][0]]
        else:
            fitting = [
                (len(_literal(each)), owner)
                for each, (owner, _) in templates.items()
                if _scheme(_literal(each)) == scheme and ":" in _literal(each) and matches(each, uri)
            ]
            most = max((length for length, _ in fitting), default=0)
            owners = [owner for length, owner in fitting if length == most]
        if not owners:
            named = (*resources.items(), *((_literal(each), owner) for each, owner in templates.items()))
            owners = [owner for each, (owner, _) in named if ":" in each and _scheme(each) == scheme]
        having = [each for each in self._features.providers if "resources" in each.capabilities]
        if not owners and len(having) == 1 and any(matches(each, uri) for each in templates):
            owners = having
        return [each for each in dict.fromkeys(owners) if self._sees(profile, identity, uri, each)]

    def digest(self, kind: str, profile: Profile, identity: Identity) -> bytes:
        """Returns a digest of a list: `prompts`, or `resources` with their templates."""
        kinds = ("prompts",) if kind == "prompts" else ("resources", "templates")
        tables = [self.listed(each, profile, identity) for each in kinds]
        content = [[(name, declared) for name, (_, declared) in table.items()] for table in tables]
        return hashlib.sha256(encode(content)).digest()

    def _sees(self, profile: Profile, identity: Identity, name: str, provider: FeatureProvider) -> bool:
        """Tells whether a prompt or URI is visible, by the rules for tools of its mount."""
        source, role, scopes = provider.source, provider.role, identity.scopes
        listed = f"{source}:{name}"
        return (
            profile.has(listed, name, source)
            and self._policy.may_offer(source)
            and profile.level >= provider.min_level
            and (not role or profile.role in ("", role))
            and (scopes is None or scopes.reaches(listed, name, source, role or profile.role or None))
            and self._policy.admits(self._policy.permissions.rules_of(listed, name, source, role), profile.user)
        )


def matches(template: str, uri: str) -> bool:
    """Tells whether a URI may have been made from a template (RFC 6570).

    A regular expression could need unlimited time for the templates of a hostile server, so the set of all places where
    a part of the template may end is computed instead.
    """
    variables = list(_VARIABLE.finditer(template[:MAX_MATCHED]))
    if len(uri) > MAX_MATCHED or len(template) > MAX_MATCHED or len(variables) > MAX_VARIABLES:
        return False
    places, end = {0}, 0
    for variable in variables:
        places = _after_variable(uri, _after_text(uri, places, template[end : variable.start()]), variable[1])
        if not places:
            return False
        end = variable.end()
    return len(uri) in _after_text(uri, places, template[end:])


def _after_text(uri: str, places: Iterable[int], text: str) -> set[int]:
    return {place + len(text) for place in places if uri.startswith(text, place)}


def _after_variable(uri: str, places: Iterable[int], operator: str) -> set[int]:
    """Returns the places where a variable's value may end if it begins at one of some places."""
    excluded, starts = _EXCLUDED.get(operator, ""), operator in ("/", ".")  # these begin with their operator
    ends: set[int] = set()
    for place in sorted(places):
        ends.add(place)
        if starts and not uri.startswith(operator, place):
            continue
        while place < len(uri) and place + 1 not in ends and uri[place] not in excluded:
            place += 1
            ends.add(place)
    return ends


def _literal(template: str) -> str:
    """Returns what a template says before its first variable."""
    return template.partition("{")[0]


def _scheme(uri: str) -> str:
    return uri.partition(":")[0]
