"""Bodies of requests as fuzzers and careless clients send them (REST-2 to REST-8, REST-10, REST-12): never a 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.bus.gateway.calling import client
from tests.faults.raw_peer import RawPeer, tool
from tests.support.waiting import WAIT_SECONDS
from toolbus.bus import Bus
from toolbus.protocol.tool import Limits
from toolbus.testing import running_bus

URL = "http://127.0.0.1:9/tool"
SECRET_URL = "http://user:hunter2@127.0.0.1:9/tool"
GOOD = {"name": "n", "callback_url": URL}
HALF = "\ud800"  # of a surrogate pair; JSON may hold it as an escape
LISTED = ["name", "description", "source", "callback_url", "is_remote"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Gateway:
    """A bus with the roles ``a`` and ``b`` and a client of its gateway."""

    bus: Bus
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, kind: str | None = "application/json") -> httpx.Response:
        """Posts a body, as it is or as JSON; whatever is answered must be JSON and no fault of the bus."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if kind is None else {"Content-Type": kind}
        answer = await self.http.post(path, content=data, headers=headers)
        assert answer.status_code < 500, (data[:200], answer.text)
        assert answer.headers["content-type"] == "application/json"
        answer.json()
        return answer

    async def register(self, **fields: Any) -> httpx.Response:
        """Registers the good tool with other fields."""
        return await self.post("/api/tools/register", {**GOOD, **fields})

    async def names(self, role: str) -> list[str]:
        """The names that a role lists."""
        listed = (await self.http.get("/api/tools", params={"role": role})).json()["tools_by_role"][role]
        return [each["name"] for each in listed]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one() -> AsyncIterator[Gateway]:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0, roles=("a", "b")) as bus, client(bus) as http:
        yield Gateway(bus, http)


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(one: Gateway) -> Gateway:
    """The same bus, with nothing registered by others."""
    for source in {each["source"] for tools in (await _lists(one)).values() for each in tools}:
        await one.post("/api/tools/clear", {"source": source})
    return one


async def _lists(gateway: Gateway) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = (await gateway.http.get("/api/tools")).json()["tools_by_role"]
    return found


def _places(answer: httpx.Response) -> list[list[str]]:
    return [error["loc"] for error in answer.json()["detail"]]


# -- what is read as JSON (REST-10) ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (None, 200),
        ("", 200),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/vnd.x+json", 200),
        ("text/plain", 422),
        ("application/x-www-form-urlencoded", 422),
        ("multipart/form-data", 422),
        ("application/jsonx", 422),
        ("json", 422),
        (";", 422),
    ],
)
async def test_a_body_is_read_as_json_unless_it_says_otherwise(gateway: Gateway, kind: str | None, status: int) -> None:
    answer = await gateway.post("/api/tools/register", GOOD, kind)
    assert answer.status_code == status
    assert status == 200 or _places(answer) == [["body"]]


@pytest.mark.parametrize("path", ["register", "unregister", "clear", "invoke"])
async def test_a_body_null_counts_as_no_body(gateway: Gateway, path: str) -> None:
    missing = {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}
    for body in (b"null", b""):
        answer = await gateway.post(f"/api/tools/{path}", body)
        assert (answer.status_code, answer.json()) == (422, {"detail": [missing]})


def _nested(levels: int, field: str = "parameters") -> bytes:
    return b'{"name":"n","callback_url":"%s","%s":%s1%s}' % (
        URL.encode(),
        field.encode(),
        b'{"a":' * levels,
        b"}" * levels,
    )


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (b"", {422}),
        (b"null", {422}),
        (b"[]", {422}),
        (b'"text"', {422}),
        (b"{", {422}),
        (b'{"name":"n",}', {422}),
        (b'{"name":"\xff","callback_url":"x"}', {400, 422}),
        (b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), {200}),
        (json.dumps(GOOD).encode("utf-16"), {200}),
        (json.dumps(GOOD).encode("utf-32"), {200}),
        (b"[" * 100_000, {400, 422}),
        (_nested(100_000), {400, 422}),
        (_nested(800), {422}),
        (_nested(800, "junk"), {200}),
        (_nested(800, "via"), {200}),
        (_nested(800, "name"), {422}),
        (_nested(63), {200}),
        (b'{"name":"n","callback_url":"http://127.0.0.1","timeout_seconds":' + b"9" * 10_000 + b"}", {400, 422}),
        (b'{"name":"n","callback_url":"http://127.0.0.1","timeout_seconds":' + b"9" * 4_000 + b"}", {422}),
        (b'{"name":"n","callback_url":"http://127.0.0.1","parameters":{"x":' + b"9" * 10_000 + b"}}", {400, 422}),
        (b'{"name":"n","callback_url":"http://127.0.0.1","parameters":{"x":' + b"9" * 4_000 + b"}}", {200}),
        (b'{"name":"n","callback_url":"http://127.0.0.1","parameters":{"x":1e999}}', {422}),
        (b'{"name":"n","name":"m","callback_url":"http://127.0.0.1"}', {200}),
    ],
    ids=lambda case: str(case)[:40],
)
async def test_json_at_its_limits_is_answered(gateway: Gateway, body: bytes, statuses: set[int]) -> None:
    assert (await gateway.post("/api/tools/register", body)).status_code in statuses
    assert (await gateway.post("/api/tools/invoke", body)).status_code in {*statuses, 200, 422}
    await gateway.post("/api/llm-tools/callback/p/t", body)
    await gateway.post("/api/bus/nothing", body)


@pytest.mark.parametrize(
    "field", ["name", "description", "parameters", "callback_url", "role", "source", "timeout_seconds"]
)
@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
async def test_constants_that_json_lacks_are_refused_in_every_field(
    gateway: Gateway, field: str, constant: str
) -> None:
    body = json.dumps({**GOOD, field: "@"}).replace('"@"', constant).encode()
    answer = await gateway.post("/api/tools/register", body)
    assert (answer.status_code, _places(answer)) == (422, [["body", field]])
    inside = json.dumps({**GOOD, "parameters": {"x": ["@"]}}).replace('"@"', constant).encode()
    answer = await gateway.post("/api/tools/register", inside)
    assert (answer.status_code, _places(answer)) == (422, [["body", "parameters"]])


@pytest.mark.parametrize("field", ["name", "description", "callback_url", "role", "source"])
async def test_half_of_a_surrogate_pair_is_refused_in_every_text(gateway: Gateway, field: str) -> None:
    answer = await gateway.register(**{field: f"a{HALF}"})
    assert (answer.status_code, _places(answer)) == (422, [["body", field]])


async def test_half_of_a_surrogate_pair_elsewhere_is_accepted(gateway: Gateway) -> None:
    fields: list[dict[str, Any]] = [{"parameters": {HALF: HALF}}, {"via": [HALF]}, {HALF: HALF}]
    for each in fields:
        assert (await gateway.register(**each)).status_code == 200
    for path, body in (
        ("unregister", {"name": HALF}),
        ("unregister", {"name": "n", "role": HALF}),
        ("clear", {"source": HALF}),
        ("clear", {"source": "x", "role": HALF}),
        ("invoke", {"name": HALF}),
        ("invoke", {"name": "n", "role": HALF}),
        ("invoke", {"name": "nowhere", "call_id": HALF, "schema_hash": HALF}),
        ("invoke", {"name": "nowhere", "arguments": {HALF: HALF}, "context": {"user_id": HALF, "member": {HALF: 1}}}),
        ("invoke", {"name": "nowhere", "arguments": HALF, "context": {"attributes": {HALF: HALF}}}),
    ):
        await gateway.post(f"/api/tools/{path}", body)
    assert (await gateway.http.get("/api/tools")).status_code == 200


# -- fields (REST-3) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["x" * 64, "天" * 64, "🛠" * 64, "a b", " ", "a/b", "../x", "a\nb", "\0", "a:b", "<b>", "a\u202eb", "{}"]
)
async def test_a_name_is_any_1_to_64_characters_and_is_listed_as_it_is(gateway: Gateway, name: str) -> None:
    answer = await gateway.register(name=name, source="name")
    assert answer.json()["registered"] == name
    assert await gateway.names("a") == [name]
    answer = await gateway.post("/api/tools/unregister", {"name": name})
    assert answer.json() == {
        "ok": True,
        "removed": True,
        "name": name,
        "affected_roles": ["a", "b"],
        "failed_roles": [],
    }


@pytest.mark.parametrize("name", ["", "x" * 65, "天" * 65, 1, None, ["n"]])
async def test_any_other_name_is_refused(gateway: Gateway, name: Any) -> None:
    for path in ("register", "unregister"):
        answer = await gateway.post(f"/api/tools/{path}", {**GOOD, "name": name})
        assert (answer.status_code, _places(answer)) == (422, [["body", "name"]])


async def test_a_qualified_name_may_be_longer_where_a_tool_is_withdrawn(gateway: Gateway) -> None:
    answer = await gateway.post("/api/tools/unregister", {"name": f"{'s' * 128}:{'n' * 64}"})
    assert (answer.status_code, answer.json()["removed"]) == (200, False)
    for name in (f"{'s' * 129}:n", f"s:{'n' * 65}", f"two words:{'n' * 64}"):
        refused = (await gateway.post("/api/tools/unregister", {"name": name})).status_code == 422
        assert refused == (len(name) > 64), name


@pytest.mark.parametrize("seconds", ["30", True, "1e2", 300, "300", 0.001, 1e-320, " 5 "])
async def test_a_timeout_is_taken_as_a_number_however_it_is_written(gateway: Gateway, seconds: Any) -> None:
    assert (await gateway.register(timeout_seconds=seconds)).status_code == 200


@pytest.mark.parametrize("seconds", [0, -1, False, 300.0000001, "301", "nan", "inf", "-0", "", "0x10", None, [], {}])
async def test_any_other_timeout_is_refused(gateway: Gateway, seconds: Any) -> None:
    answer = await gateway.register(timeout_seconds=seconds)
    assert (answer.status_code, _places(answer)) == (422, [["body", "timeout_seconds"]])


@pytest.mark.parametrize("role", [None, ""])
async def test_no_role_and_an_empty_one_mean_all(gateway: Gateway, role: str | None) -> None:
    assert (await gateway.register(role=role)).json()["affected_roles"] == ["a", "b"]
    assert await gateway.names("b") == ["n"]
    assert (await gateway.post("/api/tools/unregister", {"name": "n", "role": role})).json()["removed"] is True


async def test_all_errors_are_listed_in_the_order_of_the_fields(gateway: Gateway) -> None:
    answer = await gateway.register(
        timeout_seconds=0, source=1, role=2, callback_url="http://evil.example", parameters=3, description=4, name=""
    )
    fields = ["name", "description", "parameters", "callback_url", "role", "source", "timeout_seconds"]
    assert _places(answer) == [["body", field] for field in fields]


async def test_unknown_fields_are_ignored(gateway: Gateway) -> None:
    answer = await gateway.register(handler="x", id=1, **{"": None, "__proto__": {}, "model_config": {}})
    assert answer.json()["ok"] is True


@pytest.mark.parametrize("path", ["register", "unregister", "clear"])
async def test_an_unknown_role_is_reported_only_when_the_fields_are_valid(gateway: Gateway, path: str) -> None:
    good = {**GOOD, "source": "s", "role": "nobody"}
    answer = await gateway.post(f"/api/tools/{path}", good)
    assert (answer.status_code, answer.json()) == (404, {"detail": "unknown role: nobody"})
    wrong = {**good, "name": "", "source": ""}
    assert (await gateway.post(f"/api/tools/{path}", wrong)).status_code == 422


async def test_an_unknown_role_is_refused_in_a_listing(gateway: Gateway) -> None:
    for role in ("nobody", "A", " a", "a\0", "x" * 10_000):
        answer = await gateway.http.get("/api/tools", params={"role": role})
        assert answer.status_code == 404
        assert len(answer.text) < 1000
    assert list((await gateway.http.get("/api/tools?role=")).json()["tools_by_role"]) == ["a", "b"]


async def test_the_source_of_the_bus_is_refused(gateway: Gateway) -> None:
    for path in ("register", "clear"):
        answer = await gateway.post(f"/api/tools/{path}", {**GOOD, "source": "toolbus"})
        assert answer.status_code == 403
        assert "the bus's own" in answer.json()["detail"]
    assert (await gateway.post("/api/tools/unregister", {"name": "toolbus:drain"})).status_code in (200, 403)
    assert (await gateway.post("/api/bus/stats", {})).json()["is_error"] is False


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("parameters", {"d": "x" * 262_144}, "schema_bytes = 262144"),
        ("parameters", json.loads("[" * 70 + "]" * 70), "schema_depth = 64"),
    ],
    ids=["schema", "depth"],
)
async def test_what_is_over_a_limit_is_refused_with_the_field_and_the_limit(
    gateway: Gateway, field: str, value: Any, limit: str
) -> None:
    value = {"d": value} if isinstance(value, list) else value
    answer = await gateway.register(**{field: value})
    assert (answer.status_code, _places(answer)) == (422, [["body", field]])
    assert limit in answer.json()["detail"][0]["msg"]


# -- passwords (REST-8) ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"name": "n", "callback_url": "http://user:hunter2@evil.example/"}, None),
        ({"name": "n", "callback_url": "http://user:hunter2@127.0.0.1:99999/"}, None),
        ({"name": "n", "callback_url": "ftp://user:hunter2@127.0.0.1/"}, None),
        ({"name": "n", "callback_url": "http://user:hunter2@@127.0.0.1/"}, None),
        ({"name": "n", "callback_url": "http://user:hunter2@127.0.0.1/ x"}, None),
        ({"callback_url": SECRET_URL}, None),
        ({"callback_url": SECRET_URL, "name": "n", "role": 1, "timeout_seconds": 0}, None),
        ({"name": "n", "callback_url": [SECRET_URL]}, None),
        ({"name": "n", "callback_url": {SECRET_URL: SECRET_URL}}, None),
        ({"name": SECRET_URL + "x" * 64, "callback_url": SECRET_URL}, None),
        ({"name": "n", "callback_url": URL, "role": SECRET_URL}, None),
        ([{"name": "n", "callback_url": SECRET_URL}], None),
        ({"name": "n", "callback_url": SECRET_URL}, "text/plain"),
        (b'{"name":"n","callback_url":"http:\\/\\/user:hunter2@127.0.0.1"}', "text/plain"),
        (b'{"name":"n","callback_url":"http://user:hunter2@127.0.0.1"', "application/json"),
        (b"name=n&callback_url=http%3A%2F%2Fuser%3Ahunter2%40127.0.0.1", "application/x-www-form-urlencoded"),
    ],
)
async def test_a_password_is_never_echoed(gateway: Gateway, body: Any, kind: str | None) -> None:
    answer = await gateway.post("/api/tools/register", body, kind)
    assert answer.status_code in (404, 422)
    assert "hunter2" not in answer.text


async def test_a_password_is_never_listed_or_logged(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    assert (await gateway.register(callback_url=SECRET_URL)).status_code == 200
    assert (await _lists(gateway))["a"][0]["callback_url"] == "http://user:***@127.0.0.1:9/tool"
    called = await gateway.post("/api/tools/invoke", {"name": "n"})
    assert called.json()["is_error"] is True
    assert "hunter2" not in called.text + caplog.text


# -- one name in several roles (REST-5), and what a line says (REST-8) -------------------------------------------------


async def test_the_last_writer_wins_in_each_role_and_keeps_the_place(gateway: Gateway) -> None:
    for name in ("first", "n", "last"):
        await gateway.register(name=name, source="old")
    await gateway.register(source="one", role="b")
    assert [each["source"] for each in (await _lists(gateway))["a"]] == ["old", "old", "old"]
    assert [each["source"] for each in (await _lists(gateway))["b"]] == ["old", "one", "old"]
    await gateway.register(source="all")
    for tools in (await _lists(gateway)).values():
        assert [each["name"] for each in tools] == ["first", "n", "last"]
        assert [each["source"] for each in tools] == ["old", "all", "old"]
    await gateway.post("/api/tools/unregister", {"name": "n", "role": "a"})
    assert (await gateway.names("a"), await gateway.names("b")) == (["first", "last"], ["first", "n", "last"])
    cleared = await gateway.post("/api/tools/clear", {"source": "old"})
    assert cleared.json()["removed"] == 4  # once per role (REST-7)
    assert (await gateway.post("/api/tools/clear", {"source": "one"})).json()["removed"] == 0  # it does not come back


async def test_tools_of_every_kind_are_listed_with_the_same_keys(gateway: Gateway) -> None:
    async with RawPeer(gateway.bus.grpc_addresses[0]) as peer:
        await peer.attach("plugin", tool("by_grpc", description="d"))
        gateway.bus.tool(lambda: None, name="in_process", description="")
        await gateway.register(name="by_rest")
        tools = (await _lists(gateway))["a"]
        assert [list(each) for each in tools] == [LISTED] * 3
        assert [(each["name"], each["callback_url"], each["is_remote"]) for each in tools] == [
            ("by_grpc", None, True),
            ("in_process", None, False),
            ("by_rest", URL, True),
        ]
        gateway.bus.remove_tool("in_process")


# -- roles that are full, roles that come later (REST-4, REST-12) ------------------------------------------------------


async def test_a_full_role_fails_alone_and_when_all_are_full_nothing_is_registered() -> None:
    limits = Limits(tools_per_role=2)
    async with running_bus(http="127.0.0.1:0", roles=("a", "b"), limits=limits) as bus, client(bus) as http:
        gateway = Gateway(bus, http)
        await gateway.register(name="only a", role="a")
        await gateway.register(name="both")
        answer = (await gateway.register(name="third")).json()
        assert (answer["ok"], answer["affected_roles"], "error" in answer) == (True, ["b"], False)
        [failed] = answer["failed_roles"]
        assert failed["role"] == "a"
        kind, colon, message = failed["error"].partition(": ")
        assert (kind.isidentifier(), colon, "tools_per_role" in message) == (True, ": ", True)

        answer = (await gateway.register(name="nowhere")).json()
        assert list(answer) == ["ok", "registered", "affected_roles", "failed_roles", "error"]
        assert (answer["ok"], answer["affected_roles"]) == (False, [])
        assert [each["role"] for each in answer["failed_roles"]] == ["a", "b"]
        assert answer["error"] == "no role accepted the registration"
        assert (await gateway.register(name="both")).json()["ok"] is True  # replacing takes no more room

        await gateway.post("/api/bus/role_add", {"role": "later"})
        assert await gateway.names("later") == ["both", "third"]


async def test_a_registration_for_all_roles_reaches_roles_that_come_later() -> None:
    async with running_bus(http="127.0.0.1:0", roles=("a",)) as bus, client(bus) as http:
        gateway = Gateway(bus, http)
        await gateway.register(name="everywhere")
        await gateway.register(name="here", role="a")
        await gateway.post("/api/bus/role_add", {"role": "later"})
        assert await gateway.names("later") == ["everywhere"]
        await gateway.post("/api/tools/unregister", {"name": "everywhere"})
        await gateway.post("/api/bus/role_add", {"role": "last"})
        assert await gateway.names("last") == []


async def test_a_callback_to_the_bus_itself_is_refused(gateway: Gateway) -> None:
    port = str(gateway.bus.http_address).rpartition(":")[2]
    for host in ("127.0.0.1", "localhost"):
        answer = await gateway.register(callback_url=f"http://{host}:{port}/api/tools/invoke")
        assert answer.status_code == 422
        assert [error["loc"] for error in answer.json()["detail"]] == [["body", "callback_url"]]
    own = f"http://127.0.0.1:{port}/api/llm-tools/callback/weather/get_weather"  # the bus is its own main server
    assert (await gateway.register(callback_url=own)).json()["ok"]


async def test_the_names_of_the_buss_own_tools_are_refused(gateway: Gateway) -> None:
    for role in (None, "a"):
        answer = await gateway.register(name="toolbus:stats", role=role)
        assert answer.status_code == 403
        assert "'toolbus:stats'" in answer.json()["detail"]
    stats = (await gateway.post("/api/bus/stats", {})).json()
    assert (stats["is_error"], stats["output"]["roles"]) == (False, ["a", "b"])


async def test_without_roles_no_role_accepts_a_registration() -> None:
    async with running_bus(http="127.0.0.1:0", roles=()) as bus, client(bus) as http:
        gateway = Gateway(bus, http)
        answer = (await gateway.register()).json()
        assert (answer["ok"], answer["affected_roles"], answer["failed_roles"]) == (False, [], [])
        await gateway.post("/api/bus/role_add", {"role": "later"})
        assert await gateway.names("later") == []


# -- while the bus is busy (REST-11) -----------------------------------------------------------------------------------


async def test_a_registration_is_answered_within_5_seconds_while_calls_run_and_wait() -> None:
    running = asyncio.Semaphore(0)
    finish = asyncio.Event()

    async def wait() -> str:
        running.release()
        await finish.wait()
        return "done"

    async with running_bus(http="127.0.0.1:0", roles=("a", "b")) as bus, client(bus) as http:
        bus.tool(wait)
        calls = [asyncio.create_task(http.post("/api/tools/invoke", json={"name": "wait"})) for _ in range(50)]
        for _ in calls:
            await running.acquire()
        async with asyncio.timeout(WAIT_SECONDS):
            answer = await Gateway(bus, http).register()
        assert answer.json()["affected_roles"] == ["a", "b"]
        finish.set()
        assert not any(answer.json()["is_error"] for answer in await asyncio.gather(*calls))
