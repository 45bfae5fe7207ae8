"""`directory` looks services up in IANA's registry, and ports up on this machine."""

from __future__ import annotations

import csv
import io
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.examples.dropin.conftest import FOLDER, Folder, load

HEADER = (
    "Service Name,Port Number,Transport Protocol,Description,Assignee,Contact,Registration Date,Modification Date,"
    "Reference,Service Code,Unauthorized Use Reported,Assignment Notes\n"
)
SAMPLE = HEADER + (
    ",4,tcp,Unassigned,,,,,,,,\n"
    "alpha,22,tcp,The Alpha\n"
    "alpha,22,sctp,Other text,[Somebody_Else],,,,,,,\n"
    'whoispp,63,tcp,"whois++ IANA assigned this well-formed service name as a replacement for ""whois++"".",'
    "[Ann_Lee],[Ann_Lee],,,,,,\n"
    'whois++,63,tcp,whois++,,,,,,,,"This entry is an alias to ""whoispp"".\nThis entry is now historic."\n'
    "finger,79,tcp,Finger,,,,,,,Unauthorized use\n"
    "radius,1812,udp,RADIUS,,,2001-02-03,2004-05-06,[RFC2865][Someone],,,\n"
    "unknown,2000,tcp,Nobody needs it,,,,,,,,\n"
    "mysql,3306,tcp,MySQL,,,,,,,,\n"
    "range,6000-6063,tcp,A range,,,,,,,,\n"
)


def services() -> list[dict[str, Any]]:
    """Answers for the real ones."""
    return [
        {"name": "ssh", "port": 22, "protocols": ["tcp"], "description": "Secure Shell", "documents": ["RFC4251"]},
        {"name": "ssh-mgmt", "port": 17235, "protocols": ["tcp", "udp"], "description": "SSH Tectia Manager"},
        {"name": "radius", "port": 1812, "protocols": ["udp"], "description": "RADIUS", "documents": ["RFC2865"]}
        | {"registered": "2001-02-03", "changed": "2004-05-06", "assignee": "Carl Rigney"},
        {"name": "www", "port": 80, "protocols": ["tcp"], "description": "World Wide Web", "replaced_by": "http"},
        {"name": "finger", "port": 79, "protocols": ["tcp"], "misuse": "used by others", "registered": "1990-01-01"},
    ]


@pytest.fixture
def few(folder: Folder) -> Folder:
    folder.modules["directory"].SERVICES[:] = services()
    return folder


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def names(answer: dict[str, Any]) -> list[str]:
    return [each["name"] for each in answer["services"]]


@pytest.mark.parametrize(
    ("args", "mode"),
    [
        *(({"mode": "lookup", "name": "ssh"}, "lookup"), ({"mode": "LIST"}, "list"), ({}, "list")),
        *(({"name": "ssh"}, "lookup"), ({"port": 22}, "lookup"), ({"kind": "oldest"}, "list")),
        *(({"mode": "find", "name": "ssh"}, "lookup"), ({"mode": "search", "protocol": "tcp"}, "list")),
    ],
)
def test_a_missing_or_wrong_mode_is_inferred_from_the_arguments(few: Folder, args: Any, mode: str) -> None:
    assert few.call("directory", args)["mode"] == mode


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"mode": "lookup", "name": "ssh", "protocol": "tcp"}, "protocol"),
        ({"mode": "list", "name": "ssh"}, "name"),
        ({"mode": "list", "probe": True}, "probe"),
    ],
)
def test_an_argument_of_the_other_mode_is_refused_with_the_call_to_make_instead(
    few: Folder, args: Any, key: str
) -> None:
    other = "list" if args["mode"] == "lookup" else "lookup"
    assert few.call("directory", args)["error"] == (
        f"`{key}` does not go with mode={args['mode']!r}. Call directory again with mode={other!r} and the same "
        f"`{key}`, or leave `{key}` out."
    )


def test_empty_values_of_models_are_not_refused(few: Folder) -> None:
    assert few.call("directory", {"mode": "list", "name": "", "port": 0, "probe": False})["total"] == 5
    assert few.call("directory", {"mode": "lookup", "name": "ssh", "port": 0, "limit": 10})["total"] == 1


@pytest.mark.parametrize(
    ("args", "found", "others"),
    [
        ({"name": "SSH"}, "ssh", []),
        ({"name": "ss"}, "ssh", ["ssh-mgmt (port 17235)"]),
        ({"name": "the radius service"}, "radius", []),
        ({"name": "tectia"}, "ssh-mgmt", []),
        ({"name": "world wide web server"}, "www", []),
        ({"port": 80}, "www", []),
        ({"port": "1812"}, "radius", []),
        ({"name": "ss", "port": 17235}, "ssh-mgmt", []),
    ],
)
def test_a_service_is_looked_up_by_name_then_part_then_description_or_by_port(
    few: Folder, args: Any, found: str, others: list[str]
) -> None:
    answer = few.call("directory", args)
    assert answer["service"]["name"] == found
    assert answer["total"] == 1 + len(others)
    assert answer.get("others", []) == others


@pytest.mark.parametrize(("args", "wanted"), [({"name": "zebra"}, "zebra"), ({"port": 5}, "port 5")])
def test_a_lookup_that_finds_nothing_tells_the_model_not_to_invent(few: Folder, args: Any, wanted: str) -> None:
    assert few.call("directory", args) == {
        "mode": "lookup",
        "total": 0,
        "note": f"The directory has no service for {wanted!r}. Tell the user so. Do not give a port or a name from "
        "memory.",
    }


def test_a_lookup_needs_something_to_look_up_and_a_port_that_there_can_be(few: Folder) -> None:
    assert "needs `name` (such as 'ssh') or `port`" in few.call("directory", {"mode": "lookup"})["error"]
    for port in (70000, -1, "http", 2.5):
        assert "must be a whole number from 1 to 65535" in few.call("directory", {"port": port})["error"]


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (None, ["radius", "finger", "ssh", "ssh-mgmt", "www"]),
        ("recent", ["radius", "finger", "ssh", "ssh-mgmt", "www"]),
        ("oldest", ["finger", "radius", "ssh", "ssh-mgmt", "www"]),
        ("port", ["ssh", "finger", "www", "radius", "ssh-mgmt"]),
        ("reliable", ["ssh", "radius", "ssh-mgmt", "www", "finger"]),
        ("name", ["finger", "radius", "ssh", "ssh-mgmt", "www"]),
    ],
)
def test_a_list_comes_in_the_order_of_its_kind_and_what_has_no_date_last(
    few: Folder, kind: str | None, order: list[str]
) -> None:
    answer = few.call("directory", {"mode": "list", "kind": kind})
    assert names(answer) == order
    assert answer["kind"] == (kind or "recent")


def test_an_unknown_kind_becomes_the_default_with_a_note(few: Folder) -> None:
    answer = few.call("directory", {"mode": "list", "kind": "popular"})
    assert answer["kind"] == "recent"
    assert answer["note"] == "There is no kind 'popular', so this is kind 'recent'."


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({"protocol": "UDP"}, ["ssh-mgmt", "radius"]),
        ({"assignee": "rigney"}, ["radius"]),
        ({"document": "RFC 2865"}, ["radius"]),
        ({"about": "web"}, ["www"]),
        ({"protocol": "tcp", "about": "ssh"}, ["ssh", "ssh-mgmt"]),
    ],
)
def test_filters_are_all_applied(few: Folder, filters: dict[str, str], found: list[str]) -> None:
    answer = few.call("directory", {"mode": "list", **filters})
    assert sorted(names(answer)) == sorted(found)
    assert answer["total"] == len(found)
    assert "note" not in answer


def test_filters_without_a_match_tell_the_model_not_to_invent(few: Folder) -> None:
    answer = few.call("directory", {"mode": "list", "protocol": "dccp"})
    assert (answer["total"], answer["services"]) == (0, [])
    assert answer["note"] == (
        "No service of the directory fits these filters. Tell the user so. Do not give a port or a name from memory."
    )


@pytest.mark.parametrize(("limit", "shown"), [(None, 10), (0, 1), (3, 3), (99, 30)])
def test_10_rows_are_shown_and_never_more_than_30_and_the_total_counts_all(
    folder: Folder, limit: int | None, shown: int
) -> None:
    answer = folder.call("directory", {"mode": "list", "protocol": "tcp", "limit": limit})
    assert (answer["shown"], len(answer["services"])) == (shown, shown)
    assert answer["total"] > 700


def test_reliability_is_a_text(few: Folder) -> None:
    listed = few.call("directory", {"mode": "list", "kind": "name"})["services"]
    assert {each["name"]: each["reliability"] for each in listed} == {
        "ssh": "good: specified in RFC4251",
        "radius": "good: specified in RFC2865",
        "ssh-mgmt": "fair: registered, but the registry names no RFC",
        "www": "replaced: use the name http",
        "finger": "contested: used by others",
    }


def test_a_port_is_probed_on_request_only(few: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", None)
    assert "live" not in few.call("directory", {"name": "ssh", "probe": False})


def test_a_probe_finds_what_answers_on_this_machine(few: Folder, listening: int) -> None:
    few.modules["directory"].SERVICES[0]["port"] = listening
    live = few.call("directory", {"name": "ssh", "probe": True})["live"]
    assert live["state"] == "open"
    assert f"Something answers on 127.0.0.1:{listening}." in live["said"]


class Asked:
    """Stands for the network: notes which ports were tried, and answers on some."""

    def __init__(self, answering: set[int], refusing: OSError) -> None:
        self.ports: list[int] = []
        self._answering = answering
        self._refusing = refusing

    def __call__(self, address: tuple[str, int], timeout: float) -> socket.socket:
        host, port = address
        assert (host, timeout) == ("127.0.0.1", 0.3)
        self.ports.append(port)
        if port not in self._answering:
            raise self._refusing
        return socket.socket()


def four_ports(few: Folder) -> None:
    service = {"name": "many", "protocols": ["tcp"]}
    few.modules["directory"].SERVICES[:] = [{**service, "port": port} for port in (1, 2, 3, 4)]


def test_a_probe_ends_with_the_first_port_that_answers(few: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    four_ports(few)
    monkeypatch.setattr(socket, "create_connection", asked := Asked({2, 3}, ConnectionRefusedError()))
    assert few.call("directory", {"name": "many", "probe": True})["live"]["state"] == "open"
    assert asked.ports == [1, 2]


def test_a_probe_tries_three_ports_at_most_and_does_not_ask_closed_ones_again_for_30_s(
    few: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_ports(few)
    monkeypatch.setattr(socket, "create_connection", asked := Asked(set(), TimeoutError()))
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    ask = {"name": "many", "probe": True}
    assert few.call("directory", ask)["live"] == {
        "state": "closed",
        "said": "Nothing answers on port 1, 2, 3 of 127.0.0.1.",
    }
    clock[0] += 29
    assert few.call("directory", ask)["live"]["said"] == (
        "Port 1, 2, 3 of 127.0.0.1 was closed moments ago, and not asked again."
    )
    assert asked.ports == [1, 2, 3]
    clock[0] += 2
    few.call("directory", ask)
    assert asked.ports == [1, 2, 3] * 2


def test_a_probe_that_is_not_permitted_says_which_grant_it_needs(few: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", Asked(set(), PermissionError()))
    answer = few.call("directory", {"name": "ssh", "probe": True})
    assert answer["service"]["port"] == 22
    assert answer["live"]["state"] == "not permitted"
    assert '"connect": ["127.0.0.1:22"] for directory.py in _manifest.json' in answer["live"]["said"]


def test_a_service_without_a_tcp_port_is_not_probed(few: Folder) -> None:
    assert few.call("directory", {"name": "radius", "probe": True})["live"]["state"] == "not tried"


def test_the_registry_becomes_one_service_for_each_name_and_port() -> None:
    made = load(FOLDER / "data" / "make_directory.py").read_services(
        {key: value or "" for key, value in row.items()} for row in csv.DictReader(io.StringIO(SAMPLE, newline=""))
    )
    assert made == [
        {"name": "alpha", "port": 22, "protocols": ["tcp", "sctp"], "description": "The Alpha"},
        {"name": "whois++", "port": 63, "protocols": ["tcp"], "description": "whois++", "replaced_by": "whoispp"},
        {"name": "whoispp", "port": 63, "protocols": ["tcp"], "description": "whois++", "assignee": "Ann Lee"},
        {"name": "finger", "port": 79, "protocols": ["tcp"], "description": "Finger", "misuse": "Unauthorized use"},
        {"name": "radius", "port": 1812, "protocols": ["udp"], "description": "RADIUS", "registered": "2001-02-03"}
        | {"changed": "2004-05-06", "documents": ["RFC2865"]},
        {"name": "mysql", "port": 3306, "protocols": ["tcp"], "description": "MySQL"},
    ]


def test_the_bundled_directory_is_what_its_script_writes_and_has_well_known_services(folder: Folder) -> None:
    text = (FOLDER / "data" / "directory.json").read_text(encoding="utf-8")
    kept = json.loads(text)["services"]
    assert load(FOLDER / "data" / "make_directory.py").as_text(kept) == text
    assert kept == sorted(kept, key=lambda each: (each["port"], each["name"]))
    known = {"ssh": 22, "smtp": 25, "domain": 53, "http": 80, "https": 443, "mysql": 3306, "postgresql": 5432}
    for name, port in known.items():
        assert folder.call("directory", {"name": name})["service"]["port"] == port
