"""Makes directory.json, the services of the directory tool, from IANA's registry.

    curl -O https://www.iana.org/assignments/service-names-port-numbers/service-names-port-numbers.csv
    python make_directory.py service-names-port-numbers.csv

All 6,000 services would take 1 MB: it includes those of system ports, those that an RFC describes, and some that are
widely used.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ORIGIN = {
    "title": "IANA Service Name and Transport Protocol Port Number Registry, an extract",
    "url": "https://www.iana.org/assignments/service-names-port-numbers/",
    "licence": "CC0-1.0 (https://www.iana.org/help/licensing-terms)",
}
SYSTEM_PORTS = range(1, 1024)
WELL_KNOWN = {
    *("amqp", "amqps", "couchdb", "docker", "docker-s", "epmd", "etcd-client", "etcd-server", "git", "http-alt"),
    *("ipp", "memcache", "mongodb", "mqtt", "ms-sql-s", "ms-wbt-server", "mysql", "openvpn", "pcsync-https"),
    *("postgresql", "puppet", "redis", "secure-mqtt", "socks", "svn", "zabbix-agent"),
}
WELL_FORMED = re.compile(r'\s*IANA assigned this well-formed service name as a replacement for "[^"]*"\.')
REPLACED = re.compile(r'This (?:entry is an alias to|is a duplicate of the) "([^"]+)"')
DOCUMENT = re.compile(r"\[((?:RFC)\d+)\]")
DATES = ("registered", "changed")
# The second one is an older name of the column.
MISUSE = ("Unauthorized Use Reported", "Known Unauthorized Uses")


def read_services(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Returns the services to include, by port and name, each with its protocols."""
    result: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        name, port, protocol = row["Service Name"], row["Port Number"], row["Transport Protocol"]
        if not name or not port.isdecimal():  # unassigned, a range, or a name without a port
            continue
        key = (int(port), name)
        if key not in result:
            result[key] = _service(row)
        if protocol and protocol not in result[key]["protocols"]:
            result[key]["protocols"].append(protocol)
    return [result[key] for key in sorted(result) if _is_included(result[key])]


def as_text(services: list[dict[str, Any]]) -> str:
    """Returns the file: one line for each service, so that diffs show single services; dated as the newest entry."""
    date = max((service.get(key, "") for service in services for key in DATES), default="")
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in services)
    return f'{{"origin": {json.dumps(ORIGIN | {"date": date})},\n"services": [\n{lines}\n]}}\n'


def _service(row: Mapping[str, str]) -> dict[str, Any]:
    """Returns a service from its first row; rows of other protocols may have other assignees."""
    assignee = row["Assignee"].replace("[", "").replace("]", "").replace("_", " ")
    replaced = REPLACED.match(" ".join(row["Assignment Notes"].split()))
    service: dict[str, Any] = {
        "name": row["Service Name"],
        "port": int(row["Port Number"]),
        "protocols": [],
        "description": " ".join(WELL_FORMED.sub("", row["Description"]).split()),
        "assignee": " ".join(assignee.split()),
        "registered": row["Registration Date"],
        "changed": row["Modification Date"],
        "documents": DOCUMENT.findall(row["Reference"]),
        "misuse": " ".join(next((row[column] for column in MISUSE if row.get(column)), "").split()),
        "replaced_by": replaced[1] if replaced else "",
    }
    return {key: value for key, value in service.items() if value or key == "protocols"}


def _is_included(service: Mapping[str, Any]) -> bool:
    return service["port"] in SYSTEM_PORTS or "documents" in service or service["name"] in WELL_KNOWN


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8", newline="") as file:
        directory = read_services(csv.DictReader(file))
    Path(__file__).with_name("directory.json").write_text(as_text(directory), encoding="utf-8")
