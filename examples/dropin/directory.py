"""`directory`: which service has which port, from IANA's registry; and whether something answers on this machine.

The data are `data/directory.json`, an extract of a registry that is in the public domain (CC0), as
`data/make_directory.py` makes it. A probe is one TCP connection to 127.0.0.1, and needs the grant
`"connect": ["127.0.0.1:<port>"]` in `_manifest.json`. Without it the tool answers all the same, and says that it could
not look.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from _common import cut, definition, limit_of, matching, refused, text_of, whole_number, wrong_mode

Service: TypeAlias = dict[str, Any]

DATA = json.loads((Path(__file__).parent / "data" / "directory.json").read_text(encoding="utf-8"))
SERVICES: list[Service] = DATA["services"]

DEFAULT_LIMIT, MOST = 10, 30
OTHERS_NAMED = 5  # of a lookup with several hits
PROBE_SECONDS = 0.3  # a port of this machine answers in under a millisecond, or is filtered
PROBES = 3  # ports of one lookup
REMEMBERED_SECONDS = 30.0  # that a port which was closed is not asked again

LOOKUP, LIST = "lookup", "list"
KINDS = ("recent", "oldest", "port", "reliable", "name")
BELONGS_TO = {
    **dict.fromkeys(("name", "port", "probe"), (LOOKUP,)),
    **dict.fromkeys(("kind", "protocol", "assignee", "document", "about"), (LIST,)),
}
DO_NOT_INVENT = "Tell the user so. Do not give a port or a name from memory."

_closed: dict[int, float] = {}  # port → when it was found closed


def directory(args: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, Any]:
    """Looks one service up, or lists some."""
    mode = _mode(args)
    refusal = wrong_mode(args, "directory", ("mode", mode), BELONGS_TO)
    if refusal is not None:
        return refusal
    return _lookup(args) if mode == LOOKUP else _list(args)


def _mode(args: Mapping[str, Any]) -> str:
    """Returns the mode; small models leave it out, or write what they look for into it."""
    asked = text_of(args, "mode").lower()
    if asked in (LOOKUP, LIST):
        return asked
    return LOOKUP if text_of(args, "name") or text_of(args, "port") else LIST


def _lookup(args: Mapping[str, Any]) -> dict[str, Any]:
    name, port_text = text_of(args, "name"), text_of(args, "port")
    if not name and not port_text:
        return refused(
            "mode='lookup' needs `name` (such as 'ssh') or `port` (such as 22): call directory again with one."
        )
    port = whole_number(port_text)
    if port_text and (port is None or not 0 < port < 65536):
        return refused(f"`port` is {port_text!r:.40}, it must be a whole number from 1 to 65535: correct it.")
    found = _meant(name, port)
    answer: dict[str, Any] = {"mode": LOOKUP, "total": len(found)}
    if not found:
        wanted = " ".join(filter(None, (name[:80], f"port {port}" if port else "")))
        return answer | {"note": f"The directory has no service for {wanted!r}. {DO_NOT_INVENT}"}
    answer["service"] = _described(found[0])
    if len(found) > 1:
        answer["others"] = [f"{each['name']} (port {each['port']})" for each in found[1 : 1 + OTHERS_NAMED]]
    if text_of(args, "probe").lower() in ("true", "1", "yes"):
        answer["live"] = _live(each for each in found if each["name"] == found[0]["name"])
    return answer


def _meant(name: str, port: int | None) -> list[Service]:
    """Returns what a name or a port means, best first: names before descriptions."""
    at_port = [each for each in SERVICES if port is None or each["port"] == port]
    if not name:
        return at_port
    return matching(at_port, name, lambda each: [each["name"]]) or matching(
        at_port, name, lambda each: [each.get("description", "")]
    )


def _list(args: Mapping[str, Any]) -> dict[str, Any]:
    kind = text_of(args, "kind").lower()
    note = ""
    if kind not in KINDS:
        note = f"There is no kind {kind[:40]!r}, so this is kind 'recent'." if kind else ""
        kind = KINDS[0]
    found = _sorted([each for each in SERVICES if _fits(each, args)], kind)
    limit = limit_of(args, DEFAULT_LIMIT, MOST)
    answer = {"mode": LIST, "kind": kind} | cut(
        [_described(each) for each in found], limit, "services", counted_as="total"
    )
    if not found:
        note = f"No service of the directory fits these filters. {DO_NOT_INVENT}"
    return answer | ({"note": note} if note else {})


def _fits(service: Service, args: Mapping[str, Any]) -> bool:
    """Whether a service fits every filter that was given."""
    protocol = text_of(args, "protocol").lower()
    if protocol and protocol not in service["protocols"]:
        return False
    said = {
        "assignee": service.get("assignee", ""),
        "document": " ".join(service.get("documents", ())),
        "about": f"{service['name']} {service.get('description', '')}",
    }
    return all(text_of(args, key).casefold().replace("rfc ", "rfc") in text.casefold() for key, text in said.items())


def _sorted(services: list[Service], kind: str) -> list[Service]:
    """Returns services in the order of a kind. What has no date comes last in both orders of time."""
    if kind in ("recent", "oldest"):
        dated = sorted((each for each in services if _date(each)), key=_date, reverse=kind == "recent")
        return dated + [each for each in services if not _date(each)]
    orders: dict[str, Callable[[Service], Any]] = {
        "port": lambda each: each["port"],
        "reliable": lambda each: _reliability(each)[0],
        "name": lambda each: each["name"].casefold(),
    }
    return sorted(services, key=orders[kind])


def _date(service: Service) -> str:
    return str(service.get("changed") or service.get("registered") or "")


def _described(service: Service) -> dict[str, Any]:
    """Returns a service as a model is shown it."""
    shown = {key: service[key] for key in ("name", "port", "protocols", "description", "assignee") if key in service}
    return shown | {"dated": _date(service) or "unknown", "reliability": _reliability(service)[1]}


def _reliability(service: Service) -> tuple[int, str]:
    """Returns how far the port can be counted on, best first, and why."""
    if service.get("misuse"):
        return 3, f"contested: {service['misuse']}"
    if service.get("replaced_by"):
        return 2, f"replaced: use the name {service['replaced_by']}"
    if service.get("documents"):
        return 0, f"good: specified in {', '.join(service['documents'])}"
    return 1, "fair: registered, but the registry names no RFC"


def _live(services: Iterable[Service]) -> dict[str, Any]:
    """Tries a service's ports on this machine, until one answers."""
    ports = [each["port"] for each in services if "tcp" in each["protocols"]][:PROBES]
    if not ports:
        return {"state": "not tried", "said": "The service has no TCP port, so there is nothing to connect to."}
    asked = []
    for port in ports:
        if time.monotonic() - _closed.get(port, -REMEMBERED_SECONDS) < REMEMBERED_SECONDS:
            continue
        asked.append(port)
        try:
            socket.create_connection(("127.0.0.1", port), PROBE_SECONDS).close()
        except PermissionError:
            return {
                "state": "not permitted",
                "said": f"This tool may not connect to 127.0.0.1:{port}, so nobody knows whether it answers. The "
                f'operator permits it with "connect": ["127.0.0.1:{port}"] for directory.py in _manifest.json.',
            }
        except OSError:
            _closed[port] = time.monotonic()
        else:
            _closed.pop(port, None)
            return {
                "state": "open",
                "said": f"Something answers on 127.0.0.1:{port}. Which program it is was not asked.",
            }
    shown = ", ".join(map(str, ports))
    if not asked:
        return {"state": "closed", "said": f"Port {shown} of 127.0.0.1 was closed moments ago, and not asked again."}
    return {"state": "closed", "said": f"Nothing answers on port {shown} of 127.0.0.1."}


register_tool(  # noqa: F821  # the loader gives every file this function
    name="directory",
    execute=directory,
    read_only=True,
    definition=definition(
        "directory",
        "Network services and their ports, from IANA's registry. Call it for: 'which port does X use', 'what runs on "
        "port 5432', 'who registered X', 'list services over sctp', 'which services does RFC 2865 define', 'is X "
        "running on this machine'. mode='lookup' finds one service by name or port, and with probe=true also tries "
        "this machine; mode='list' gives a filtered list, whose `total` counts all that fit. Do NOT call it for web "
        "sites, host names, or how to configure a program, and do NOT answer a port from memory when it finds nothing.",
        {
            "mode": {"type": "string", "description": "'lookup' or 'list'. Left out: lookup with a name or port."},
            "name": {"type": "string", "description": "lookup only: service name or words of its description, 'ssh'"},
            "port": {"type": "integer", "description": "lookup only: port number, 1 to 65535"},
            "probe": {"type": "boolean", "description": "lookup only: also try to connect to it on this machine"},
            "kind": {"type": "string", "description": f"list only: order, one of {', '.join(KINDS)}. Default recent."},
            "protocol": {"type": "string", "description": "list only: tcp, udp, sctp or dccp"},
            "assignee": {"type": "string", "description": "list only: part of the name of who registered it"},
            "document": {"type": "string", "description": "list only: the RFC that it is specified in, 'RFC2865'"},
            "about": {"type": "string", "description": "list only: a word of the name or description"},
            "limit": {"type": "integer", "description": f"rows to show, 1 to {MOST}. Default 10."},
        },
    ),
)
