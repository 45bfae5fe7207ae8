"""Plans which tools of the bus a main server should have, and under which names (REST-3, REST-51).

Pure: listings in, registrations out. It knows neither the state of the main server nor the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import quote

from toolbus.bus.callback_url import CallbackUrl, parse_callback_url
from toolbus.bus.catalog.entry import Entry, ToolListing
from toolbus.bus.catalog.registry import is_public
from toolbus.parts.moving.upstream.ownership import Registration
from toolbus.protocol.tool import DEFAULT_TIMEOUT_SECONDS, MAX_NAME, MAX_TIMEOUT_SECONDS, PLUGIN_PREFIX, Tool

CALLBACK_PATH = "/api/llm-tools/callback/"  # REST-50
# Our own timeout ends the call first, with a useful error; the main server's would only say `ReadTimeout:` (REST-53).
MARGIN_SECONDS = 2.0

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]", re.ASCII)  # what model providers refuse in a function's name
_DOTS = (".", "..")  # every HTTP client removes these from a path

_SAME_HOST = frozenset({"localhost", "127.0.0.1", "::1", "::ffff:127.0.0.1"})

Key = tuple[str, str | None]  # name at the main server, role; None is all roles
Fingerprint = tuple[str, str, str, float]  # the content of a registration, for comparing


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTool:
    """One registration that the main server should have.

    Attributes:
        name: at the main server.
        entries: the tool's entries, one for each of our roles that has it.
    """

    name: str
    role: str | None
    source: str
    callback_url: str
    tool: Tool
    entries: list[Entry] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.name, self.role

    @property
    def timeout_seconds(self) -> float:
        """How long the main server should wait for our response."""
        return min(MAX_TIMEOUT_SECONDS, (self.tool.timeout_seconds or DEFAULT_TIMEOUT_SECONDS) + MARGIN_SECONDS)

    @property
    def fingerprint(self) -> Fingerprint:
        return self.source, self.callback_url, self.tool.schema_hash, self.timeout_seconds

    def registration(self, role: str | None) -> Registration:
        """Returns its registration at the main server; the role may be narrower than its own."""
        return Registration(self.name, role, self.source, self.callback_url)

    def body(self, role: str | None, via: str) -> bytes:
        """Returns the body that registers it; the schema is in it byte for byte as its author wrote it.

        Args:
            role: may be narrower than its own.
            via: the name of this bus, by which buses detect tools that would go round in a circle.
        """
        fields = {
            "name": self.name,
            "description": self.tool.description,
            "callback_url": self.callback_url,
            "role": role,
            "source": self.source,
            "timeout_seconds": self.timeout_seconds,
            "via": [via],
        }
        return f'{json.dumps(fields)[:-1]}, "parameters": {self.tool.parameters_json}}}'.encode()


@dataclass(frozen=True, slots=True, eq=False)
class UpstreamPlan:
    """What the main server should have.

    Attributes:
        tools: in the order in which they should be registered.
        by_name: the same, by name and then by role, None first: a registration for all roles replaces those for one
            role (REST-5), so those have to follow it.
        refused: tools that cannot be registered there, with the reason.
        sources: of all planned tools, by their names at the main server.
    """

    tools: dict[Key, PlannedTool] = field(default_factory=dict)
    by_name: dict[str, dict[str | None, PlannedTool]] = field(default_factory=dict)
    refused: dict[Entry, str] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)


def make_plan(listings: Iterable[ToolListing], callback_base: str, upstream: str) -> UpstreamPlan:
    """Decides which tools the main server should have.

    Args:
        listings: in catalog order; the same tool may come several times, once for each role.
        callback_base: scheme and authority of our own gateway.
        upstream: the URL of the main server. Tools that came from it are not sent back.
    """
    plan = UpstreamPlan()
    main_server = parse_callback_url(upstream)
    offered = [listing for listing in listings if _is_offered(listing, main_server)]
    # An unchanged name has precedence over one that had to be spelled in another way, however late it came.
    owners = {listing.tool.name: listing.tool.name for listing in offered if not _is_qualified(listing)}
    for listing in offered:
        name, refusal = _name(listing, owners)
        if not refusal:
            refusal = _add(plan, listing, name, callback_base)
        if refusal:
            plan.refused[listing.entry] = refusal
    for name, by_role in plan.by_name.items():
        plan.by_name[name] = dict(sorted(by_role.items(), key=lambda item: item[0] is not None))
    return plan


def _is_offered(listing: ToolListing, main_server: CallbackUrl) -> bool:
    entry, tool = listing.entry, listing.tool
    if not is_public(listing) or (entry.current is None and entry.suspended is not None):
        return False
    if tool.callback_url and _leads_to(parse_callback_url(tool.callback_url), main_server):
        return False
    return not _came_from_a_bus(tool)


def _leads_to(target: CallbackUrl, server: CallbackUrl) -> bool:
    """Returns whether a callback leads to a server that may listen on every common address of this machine."""
    hosts = {target.host, server.host}
    return target.port == server.port and (len(hosts) == 1 or hosts <= _SAME_HOST)


def _came_from_a_bus(tool: Tool) -> bool:
    if '"via"' not in tool.metadata_json:
        return False
    try:
        metadata = json.loads(tool.metadata_json)
    except (ValueError, RecursionError):
        return False
    return isinstance(metadata, dict) and bool(metadata.get("via"))


def _is_qualified(listing: ToolListing) -> bool:
    return listing.tool.name != listing.entry.bare_name


def _name(listing: ToolListing, owners: dict[str, str]) -> tuple[str, str]:
    """Returns the name at the main server, and why it is refused, or ""."""
    listed = listing.tool.name
    name = _UNFIT.sub("_", listed) if _is_qualified(listing) else listed
    if len(name) > MAX_NAME:
        return name, (
            f"its name there would be {name!r}, {len(name)} characters of at most {MAX_NAME}: "
            "shorten the name of the tool or of its source"
        )
    owner = owners.setdefault(name, listed)
    if owner != listed:
        return name, f"its name there would be {name!r}, which {owner!r} has already: rename one of them"
    return name, ""


def _add(plan: UpstreamPlan, listing: ToolListing, name: str, callback_base: str) -> str:
    """Adds a registration to the plan. Returns why it is refused, or ""."""
    tool, entry = listing.tool, listing.entry
    plugin = listing.source.removeprefix(PLUGIN_PREFIX)
    for label, part in (("source", plugin), ("name", entry.bare_name)):
        if not part or part in _DOTS:
            return f"its {label} {part!r} cannot stand in a callback URL: give it another {label}"
    url = f"{callback_base.rstrip('/')}{CALLBACK_PATH}{quote(plugin, safe='')}/{quote(entry.bare_name, safe='')}"
    if tool.role is not None:  # a source may have one tool for each role under one name
        url += f"?role={quote(tool.role, safe='')}"
    planned = PlannedTool(name, tool.role, f"{PLUGIN_PREFIX}{plugin}", url, tool)
    known = plan.tools.setdefault(planned.key, planned)
    if known.fingerprint != planned.fingerprint:
        role = "all roles" if tool.role is None else f"role {tool.role!r}"
        return f"{name!r} is offered for {role} by source {known.source!r} too, with other fields: keep one of them"
    known.entries.append(entry)
    plan.by_name.setdefault(name, {})[tool.role] = known
    plan.sources.add(known.source)
    return ""
