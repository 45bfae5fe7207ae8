"""A plugin of an API, with a real API, a real bus and a real host."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.stage import free_ports
from tests.parts.openapi.pet_server import KEY, PNG, State, pet_shop
from tests.support.waiting import HANG_SECONDS, WAIT_SECONDS, within
from toolbus.errors import Code, PeerLost, SetupError
from toolbus.openapi import env, from_openapi
from toolbus.sdk.host import Host
from toolbus.testing import running_bus

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def shop() -> Iterator[str]:
    with pet_shop() as url:
        yield url


async def _in_flight(host: Host, name: str) -> None:
    while not any(tool.in_flight for tool in await host.list() if tool.name == name):
        await asyncio.sleep(0.01)


def _start(port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.parts.openapi.pet_server", str(port)], cwd=ROOT)


@asynccontextmanager
async def offered(document: Any, **options: Any) -> AsyncIterator[Host]:
    """Yields a host of a bus on which the API's plugin runs."""
    async with running_bus() as bus:
        plugin = from_openapi(document, address=bus.grpc_addresses[0], **options)
        async with plugin, Host(bus.grpc_addresses[0]) as host:
            await within(plugin.ready())
            yield host


async def test_an_api_is_a_plugin_in_one_line_and_offers_what_only_reads(shop: str) -> None:
    async with offered(f"{shop}/openapi.json", deny="readLocked*") as host:
        tools = {tool.name: tool for tool in await host.list()}
        assert sorted(tools) == [
            *("getBusy", "getLarge", "getMoved", "getPet", "getPicture", "getSecret", "getSlow", "listPets"),
        ]
        assert tools["listPets"].tool.annotations.read_only
        assert tools["listPets"].tool.description == "List Pets\nLists the pets."
        result = await host.call("listPets", {"tags": ["a b", "c&d"], "limit": 2, "x-trace": "t1", "visit": "v;1"})
        assert result.unwrap() == {"tags": ["a b", "c&d"], "limit": 2, "trace": "t1", "visit": "v%3B1"}
        assert (await host.call("getPet", {"pet_id": "Ä 1?x=2#y"})).output == {"id": "Ä 1?x=2#y"}


async def test_a_value_of_the_path_reaches_no_other_operation(shop: str) -> None:
    async with offered(f"{shop}/openapi.json", allow="getPet") as host:
        for pet_id in ("7/secret", "..", "7\\secret", "."):
            result = await host.call("getPet", {"pet_id": pet_id})
            assert result.is_error
            assert "may not be . or .. or hold a slash" in result.text


async def test_bodies_of_every_kind_arrive(shop: str) -> None:
    allow = ("addPet", "deletePet", "send*")
    async with offered(f"{shop}/openapi.json", allow=allow) as host:
        pet = {"name": "Rex", "owner": {"name": "Ann", "pets": [{"name": "Tom"}]}}
        added = (await host.call("addPet", {"body": pet})).unwrap()
        assert added["owner"]["pets"][0]["name"] == "Tom"
        assert (await host.call("deletePet", {"pet_id": "1"})).unwrap() == {"status": 204}
        form = await host.call("sendForm", {"body": {"name": "a&b=c", "times": 3}})
        assert form.unwrap() == {"name": "a&b=c", "times": 3}
        file = {"filename": "x.txt", "text": "hello"}
        sent = await host.call("sendFile", {"body": {"file": file, "note": "n"}})
        assert sent.unwrap() == {"filename": "x.txt", "size": 5, "note": "n"}
        assert (await host.call("sendText", {"body": "two words"})).unwrap() == "two words"
        refused = await host.call("addPet", {"body": {"name": 7}})
        assert refused.error is not None
        assert refused.error.code is Code.INVALID_ARGUMENTS  # the bus checks against the document's schema


async def test_errors_say_what_the_api_said(shop: str) -> None:
    async with offered(f"{shop}/openapi.json", max_response_bytes=100_000) as host:
        missing = await host.call("getPet", {"pet_id": "none"})
        assert missing.is_error
        assert missing.text == 'HTTP 404 Not Found: {"detail":"no pet none"}\n{"status":404}'
        busy = await host.call("getBusy", {})
        assert busy.output == {"status": 429, "retry_after": "7"}
        assert "try again after 7 s" in busy.text
        large = await host.call("getLarge", {})
        assert large.is_error
        assert "more than 100000 bytes: ask for less" in large.text
        assert len(large.text) < 2_000


async def test_a_picture_is_content(shop: str) -> None:
    async with offered(f"{shop}/openapi.json", allow="getPicture") as host:
        result = await host.call("getPicture", {})
        assert result.output == {"content_type": "image/png", "bytes": len(PNG)}
        assert (result.content[0].image.data, result.content[0].image.mime_type) == (PNG, "image/png")


async def test_a_redirect_is_followed_within_the_origin_only(shop: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        async with offered(f"{shop}/openapi.json", allow="getMoved") as host:
            assert (await host.call("getMoved", {"to": "/pets/7"})).output == {"id": "7"}
            elsewhere = f"http://127.0.0.1:{other.getsockname()[1]}/pets/7"
            refused = await host.call("getMoved", {"to": elsewhere})
            assert "HTTP 307 Temporary Redirect: redirects to another place are not followed" in refused.text
        with pytest.raises(BlockingIOError):
            other.accept()


async def test_credentials_go_where_the_document_says_and_nowhere_else(
    shop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOP_KEY", KEY)
    auth = {"byHeader": env("SHOP_KEY"), "byQuery": env("SHOP_KEY")}
    with caplog.at_level(logging.INFO):
        async with offered(f"{shop}/openapi.json", auth=auth) as host:
            assert "X-Key" not in str([tool.tool.parameters_json for tool in await host.list()])
            assert (await host.call("readLocked", {})).output == "open"
            assert (await host.call("readLockedQuery", {})).output is True
            monkeypatch.setenv("SHOP_KEY", "wrong-key")
            refused = await host.call("readLocked", {})
            assert refused.text == 'HTTP 401 Unauthorized: {"detail":"the key *** is not known"}\n{"status":401}'
    assert KEY not in caplog.text


async def test_each_kind_of_credential_arrives_beside_what_the_model_writes() -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        writer.close()

    schemes = {
        "basic": {"type": "http", "scheme": "basic"},
        "cookie": {"type": "apiKey", "in": "cookie", "name": "sid"},
        "query": {"type": "apiKey", "in": "query", "name": "key"},
    }
    parameters = [{"name": "page", "in": place} for place in ("cookie", "query")] + [{"name": "X-Key", "in": "header"}]
    operation = {"operationId": "go", "parameters": parameters, "security": [{name: [] for name in schemes}]}
    document = {"openapi": "3.1.0", "paths": {"/x": {"get": operation}}, "components": {"securitySchemes": schemes}}
    auth = {"basic": "u:p", "cookie": "c1", "query": "q&1"}
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with offered(document, base_url=url, auth=auth, headers={"X-Key": "h1"}) as host:
        assert (await host.call("go", {"page": "1", "page_query": "2"})).unwrap() == {"status": 204}
        await host.call("go", {"page": "1; sid=mine"})
    server.close()
    first, second = (head.decode().split("\r\n") for head in heads)
    assert first[0] == "GET /x?page=2&key=q%261 HTTP/1.1"
    assert {"Authorization: Basic dTpw", "X-Key: h1", "Cookie: page=1; sid=c1"} <= {*first}
    assert "Cookie: page=1%3B%20sid%3Dmine; sid=c1" in second


async def test_an_operation_whose_credential_is_missing_is_left_out_with_the_reason(shop: str) -> None:
    plugin = from_openapi(f"{shop}/openapi.json")
    assert plugin.api is not None
    reasons = {each.name: each.reason for each in plugin.api.left_out}
    assert reasons["readLocked"] == "it needs the credential 'byHeader': pass auth="
    assert reasons["deletePet"] == "DELETE may change something: name it in allow"
    await plugin.close()


async def test_a_cancelled_call_closes_its_request(shop: str) -> None:
    State.begun.clear()
    State.left.clear()
    async with offered(f"{shop}/openapi.json", allow="getSlow") as host:
        call = asyncio.ensure_future(host.call("getSlow", {}))
        assert await asyncio.to_thread(State.begun.wait, WAIT_SECONDS)
        call.cancel()
        assert await asyncio.to_thread(State.left.wait, WAIT_SECONDS)


async def test_more_requests_than_allowed_wait_at_their_host(shop: str) -> None:
    async with offered(f"{shop}/openapi.json", allow=("getSlow", "getPet"), max_in_flight=1) as host:
        call = asyncio.ensure_future(host.call("getSlow", {}))
        await within(_in_flight(host, "getSlow"))
        refused = await host.call("getPet", {"pet_id": "7"}, timeout=0.5)  # it tries again until then
        assert refused.error is not None
        assert refused.error.code is Code.OVERLOADED
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_a_slow_api_ends_the_call_at_its_timeout(shop: str) -> None:
    async with offered(f"{shop}/openapi.json", allow="getSlow", timeout=0.2) as host:
        result = await host.call("getSlow", {})
        assert f"{shop} has not answered within 0.2 s" in result.text


@pytest.mark.timeout(180)
async def test_the_order_of_starts_does_not_matter_and_a_killed_api_fails_calls_until_it_is_back() -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"

    async with running_bus() as bus:
        plugin = from_openapi(f"{url}/openapi.json", allow=("getPet", "getSlow"), address=bus.grpc_addresses[0])
        assert plugin.api is None
        async with plugin, Host(bus.grpc_addresses[0]) as host:
            running = _start(port)
            try:
                await within(plugin.ready())
                assert (await host.call("getPet", {"pet_id": "7"})).output == {"id": "7"}
                in_flight = asyncio.ensure_future(host.call("getSlow", {}))
                await within(_in_flight(host, "getSlow"))
                running.send_signal(signal.SIGKILL)
                running.wait(WAIT_SECONDS)
                assert f"{url} cannot be reached" in (await within(in_flight)).text
                result = await host.call("getPet", {"pet_id": "7"})
                assert f"{url} cannot be reached" in result.text
                with pet_shop(port):
                    assert (await host.call("getPet", {"pet_id": "8"})).output == {"id": "8"}
            finally:
                running.kill()
                running.wait(WAIT_SECONDS)


async def test_a_document_that_turns_out_to_be_of_no_use_ends_the_plugin() -> None:
    (port,) = free_ports(1)
    async with running_bus() as bus:
        plugin = from_openapi(f"http://127.0.0.1:{port}/openapi.json", address=bus.grpc_addresses[0])

        async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>")
            writer.close()

        await plugin.start()
        server = await asyncio.start_server(page, "127.0.0.1", port)
        try:
            with pytest.raises(SetupError, match="is a page of HTML"):
                await within(plugin.ended())
        finally:
            await plugin.close()
            server.close()
            await server.wait_closed()


async def test_a_plugin_that_is_closed_before_its_document_came_ends_in_order() -> None:
    (port,) = free_ports(1)
    async with running_bus() as bus:
        plugin = from_openapi(f"http://127.0.0.1:{port}/openapi.json", address=bus.grpc_addresses[0])
        await plugin.start()
        ended, ready = asyncio.create_task(plugin.ended()), asyncio.create_task(plugin.ready())
        await asyncio.sleep(0)  # both wait
        await plugin.close()
        _, problem = await within(asyncio.gather(ended, ready, return_exceptions=True))
    assert isinstance(problem, PeerLost)
    assert ended.exception() is None


def test_importing_toolbus_loads_neither_httpx_nor_yaml_nor_grpc() -> None:
    script = (
        "import sys, toolbus, toolbus.openapi; toolbus.openapi.read_api; toolbus.Plugin;"
        "print(sorted({'httpx', 'yaml', 'grpc'} & {*sys.modules}))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=HANG_SECONDS)
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


def test_a_document_without_operations_says_so() -> None:
    with pytest.raises(SetupError, match="no operation can be offered: the document has none, in `paths`"):
        from_openapi({"openapi": "3.1.0", "info": {}, "paths": {}}, base_url="http://127.0.0.1:1")


def test_a_plugin_that_could_send_no_request_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(SetupError, match=r"run `pip install 'toolbus\[openapi\]'`"):
        from_openapi({"openapi": "3.1.0", "info": {}, "paths": {"/a": {"get": {}}}}, base_url="http://127.0.0.1:1")
