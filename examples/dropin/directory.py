"""Looks up network services and their ports in IANA's registry, and whether one answers on this machine: `directory`.

The data are `data/directory.json`, an extract of a registry in the public domain (CC0), made by
`data/make_directory.py`. A probe is one TCP connection to 127.0.0.1, and needs the grant
`"connect": ["127.0.0.1:<port>"]` in `_manifest.json`. Without the grant the tool still answers, and says that
it may not connect.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from _common import cut, definition, limit_of, matching, refuse, text_of, whole_number, wrong_mode

if TYPE_CHECKING:  # the loader gives each file this function
    from toolbus.dropin import register_tool

Service: TypeAlias = dict[str, Any]

DATA = json.loads((Path(__file__).parent / "data" / "directory.json").read_text(encoding="utf-8"))
SERVICES: list[Service] = DATA["services"]

DEFAULT_LIMIT, MAX_ROWS = 10, 30
MAX_OTHERS = 5  # further hits that a lookup names
PROBE_SECONDS = 0.3  # a port of this machine answers in under a millisecond, or is filtered
MAX_PROBES = 3  # ports of one lookup
CLOSED_SECONDS = 30.0  # for which a closed port is not probed again

LOOKUP, LIST = "lookup", "list"
KINDS = ("recent", "oldest", "port", "reliable", "name")
BELONGS_TO = {
    **dict.fromkeys(("name", "port", "probe"), (LOOKUP,)),
    **dict.fromkeys(("kind", "protocol", "assignee", "document", "about"), (LIST,)),
}
DO_NOT_INVENT = "Tell the user so. Do not give a port or a name from memory."

_closed: dict[int, float] = {}  # port → when a probe found it closed


def directory(args: Mapping[str, Any], env: Mapping[str, Any]) -> dict[str, Any]:
    """Looks up one service, or lists some."""
    mode = _mode(args)
    refusal = wrong_mode(args, "directory", ("mode", mode), BELONGS_TO)
    if refusal is not None:
        return refusal
    return _lookup(args) if mode == LOOKUP else _list(args)


def _mode(args: Mapping[str, Any]) -> str:
    """Returns the mode; small models leave it out, or write their query into it."""
    mode = text_of(args, "mode").lower()
    if mode in (LOOKUP, LIST):
        return mode
    return LOOKUP if text_of(args, "name") or text_of(args, "port") else LIST


def _lookup(args: Mapping[str, Any]) -> dict[str, Any]:
    name, port_text = text_of(args, "name"), text_of(args, "port")
    if not name and not port_text:
        return refuse(
            "mode='lookup' needs `name` (such as 'ssh') or `port` (such as 22): call directory again with one."
        )
    port = whole_number(port_text)
    if port_text and (port is None or not 0 < port < 65536):
        return refuse(f"`port` is {port_text!r:.40}, it must be a whole number from 1 to 65535: correct it.")
    services = _matches(name, port)
    answer: dict[str, Any] = {"mode": LOOKUP, "total": len(services)}
    if not services:
        query = " ".join(filter(None, (name[:80], f"port {port}" if port else "")))
        return answer | {"note": f"The directory has no service for {query!r}. {DO_NOT_INVENT}"}
    answer["service"] = _described(services[0])
    if len(services) > 1:
        answer["others"] = [f"{each['name']} (port {each['port']})" for each in services[1 : 1 + MAX_OTHERS]]
    if text_of(args, "probe").lower() in ("true", "1", "yes"):
        answer["live"] = _live(each for each in services if each["name"] == services[0]["name"])
    return answer


def _matches(name: str, port: int | None) -> list[Service]:
    """Returns the services that match a name or a port, best first: names before descriptions."""
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
    services = _sorted([each for each in SERVICES if _fits(each, args)], kind)
    limit = limit_of(args, DEFAULT_LIMIT, MAX_ROWS)
    answer = {"mode": LIST, "kind": kind} | cut(
        [_described(each) for each in services], limit, "services", counted_as="total"
    )
    if not services:
        note = f"No service of the directory fits these filters. {DO_NOT_INVENT}"
    return answer | ({"note": note} if note else {})


def _fits(service: Service, args: Mapping[str, Any]) -> bool:
    """Tells whether a service matches every filter."""
    protocol = text_of(args, "protocol").lower()
    if protocol and protocol not in service["protocols"]:
        return False
    texts = {
        "assignee": service.get("assignee", ""),
        "document": " ".join(service.get("documents", ())),
        "about": f"{service['name']} {service.get('description', '')}",
    }
    return all(text_of(args, key).casefold().replace("rfc ", "rfc") in text.casefold() for key, text in texts.items())


def _sorted(services: list[Service], kind: str) -> list[Service]:
    """Returns services in the order of a kind. Those without a date come last in both orders of time."""
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
    """Returns a service as the model sees it."""
    shown = {key: service[key] for key in ("name", "port", "protocols", "description", "assignee") if key in service}
    return shown | {"dated": _date(service) or "unknown", "reliability": _reliability(service)[1]}


def _reliability(service: Service) -> tuple[int, str]:
    """Returns how reliable the port is, 0 for the best, and why."""
    if service.get("misuse"):
        return 3, f"contested: {service['misuse']}"
    if service.get("replaced_by"):
        return 2, f"replaced: use the name {service['replaced_by']}"
    if service.get("documents"):
        return 0, f"good: specified in {', '.join(service['documents'])}"
    return 1, "fair: registered, but the registry names no RFC"


def _live(services: Iterable[Service]) -> dict[str, Any]:
    """Probes a service's ports on this machine, until one answers."""
    ports = [each["port"] for each in services if "tcp" in each["protocols"]][:MAX_PROBES]
    if not ports:
        return {"state": "not tried", "said": "The service has no TCP port, so there is nothing to connect to."}
    probed = []
    for port in ports:
        if time.monotonic() - _closed.get(port, -CLOSED_SECONDS) < CLOSED_SECONDS:
            continue
        probed.append(port)
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
    if not probed:
        return {"state": "closed", "said": f"Port {shown} of 127.0.0.1 was closed moments ago, and not asked again."}
    return {"state": "closed", "said": f"Nothing answers on port {shown} of 127.0.0.1."}


register_tool(
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
            "limit": {"type": "integer", "description": f"rows to show, 1 to {MAX_ROWS}. Default 10."},
        },
    ),
)
