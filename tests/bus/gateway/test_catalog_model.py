"""The contract as a dict of dicts, played beside a running bus: whatever is registered, listed, called, withdrawn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.bus.gateway.on_thread import bus_on_thread
from tests.support.examples import examples
from tests.support.waiting import WAIT_SECONDS

ROLES = ("a", "b", "c")
NAMES = ("one", "two", "three", "天 気", "a/b\n", "plugin:x:one")
SOURCES = ("external", "plugin:x", "s")

names = st.sampled_from(NAMES)
sources = st.sampled_from(SOURCES)
roles = st.sampled_from((None, "", *ROLES))

Role = dict[str, tuple[str, str]]  # name → (source, callback URL), in the order of the listing


class _Echo(BaseHTTPRequestHandler):
    """Answers every call with the path that it came to."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"output":"%s"}' % self.path.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def echo() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Catalog(RuleBasedStateMachine):
    """Registers, withdraws, calls, and compares."""

    http: httpx.Client
    plugin: str
    numbers = itertools.count(1)  # of URLs and roles: none comes twice

    def __init__(self) -> None:
        super().__init__()
        self.roles: dict[str, Role] = {role: {} for role in ROLES}
        self.to_come: Role = {}  # what a new role begins with (REST-12)

    def teardown(self) -> None:
        for source in SOURCES:
            self.post("/api/tools/clear", {"source": source})
        for role in list(self.roles)[len(ROLES) :]:
            self.post("/api/bus/role_remove", {"role": role})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def tables(self, role: str | None) -> list[Role]:
        """Where a request for a role counts: there, or everywhere and in roles to come."""
        return [self.roles[role]] if role else [*self.roles.values(), self.to_come]

    @rule(name=names, source=sources, role=roles)
    def register(self, name: str, source: str, role: str | None) -> None:
        url = f"{self.plugin}/{next(self.numbers)}"
        answer = self.post("/api/tools/register", {"name": name, "source": source, "role": role, "callback_url": url})
        for table in self.tables(role):
            table[name] = (source, url)  # an assignment keeps the place (REST-5)
        affected = [role] if role else list(self.roles)
        assert answer == {"ok": True, "registered": name, "affected_roles": affected, "failed_roles": []}

    @rule(name=names, role=roles)
    def unregister(self, name: str, role: str | None) -> None:
        affected = [each for each, table in self.roles.items() if name in table and (not role or role == each)]
        for table in self.tables(role):
            table.pop(name, None)
        answer = self.post("/api/tools/unregister", {"name": name, "role": role})
        removed = bool(affected)
        wanted = {"ok": True, "removed": removed, "name": name, "affected_roles": affected, "failed_roles": []}
        assert answer == wanted

    @rule(source=sources, role=roles)
    def clear(self, source: str, role: str | None) -> None:
        counts = {
            each: sum(owner == source for owner, _ in table.values())
            for each, table in self.roles.items()
            if not role or role == each
        }
        for table in self.tables(role):
            for name in [name for name, (owner, _) in table.items() if owner == source]:
                del table[name]
        answer = self.post("/api/tools/clear", {"source": source, "role": role})
        affected = [each for each, count in counts.items() if count]
        assert answer == {
            "ok": True,
            "removed": sum(counts.values()),
            "source": source,
            "affected_roles": affected,
            "failed_roles": [],
        }

    @rule()
    def add_role(self) -> None:
        role = f"role {next(self.numbers)}"
        assert self.post("/api/bus/role_add", {"role": role})["output"] == [*self.roles, role]
        self.roles[role] = dict(self.to_come)

    @rule(name=names, role=roles)
    def invoke(self, name: str, role: str | None) -> None:
        tables = [self.roles[role]] if role else list(self.roles.values())
        owner = next((table[name] for table in tables if name in table), None)
        answer = self.post("/api/tools/invoke", {"name": name, "role": role, "arguments": {}})
        if owner is None:
            assert answer["error"]["code"] == "NOT_FOUND"
        else:
            assert (answer["is_error"], self.plugin + answer["output"]) == (False, owner[1])

    @invariant()
    def listings_agree(self) -> None:
        wanted = {
            role: [
                {"name": name, "description": "", "source": source, "callback_url": url, "is_remote": True}
                for name, (source, url) in table.items()
            ]
            for role, table in self.roles.items()
        }
        listed = self.http.get("/api/tools").json()
        assert listed == {"ok": True, "tools_by_role": wanted}
        assert list(listed["tools_by_role"]) == list(self.roles)
        one = list(self.roles)[-1]
        assert self.http.get("/api/tools", params={"role": one}).json()["tools_by_role"] == {one: wanted[one]}


@pytest.mark.hypothesis
@pytest.mark.timeout(300)
def test_the_gateway_behaves_like_a_dict_of_dicts() -> None:
    with bus_on_thread(roles=ROLES) as bus, echo() as plugin:
        address = f"http://{bus.http_address}"
        with httpx.Client(base_url=address, trust_env=False, verify=False, timeout=WAIT_SECONDS) as http:

            class Connected(Catalog):
                pass

            Connected.http, Connected.plugin = http, plugin
            run_state_machine_as_test(
                Connected,
                settings=settings(max_examples=examples(5), stateful_step_count=30, derandomize=True, database=None),
            )
