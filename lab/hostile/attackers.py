"""The hostile programs, one for each kind of peer: ``python -m lab.hostile.attackers KIND SECONDS ADDRESSES``.

They get what a real one has: the addresses, as JSON, and a credential where the kind has one. What the bus answers is
not looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import os
import pwd
import sys
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import grpc
import uvloop
from aiohttp import web
from grpc_health.v1 import health_pb2
from grpc_health.v1 import health_pb2_grpc as health_grpc

from lab.hostile import offering_peer
from lab.hostile.offering_peer import PAUSE, Stream, again, attached
from lab.load.callbacks import serve_callbacks
from toolbus.sdk.credential import Credential, tls_credentials
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

IDLE = 1_000  # connections that say nothing
AT_ONCE = 16  # requests over HTTP
BOMB = gzip.compress(b" " * 50_000_000)
FLOOR_SECONDS = 0.002  # of work, and of rest
FOREIGN = {"Origin": "https://elsewhere.example", "Content-Type": "text/plain"}

Addresses = Mapping[str, str]


def _plain(addresses: Addresses) -> Any:
    return grpc.aio.insecure_channel(addresses["grpc"], options=(("grpc.use_local_subchannel_pool", 1),))


def _keyed(addresses: Addresses) -> Any:
    credential = Credential.read(addresses["credential"])
    credentials = grpc.composite_channel_credentials(
        tls_credentials(credential), grpc.access_token_call_credentials(credential.token)
    )
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.aio.secure_channel(addresses["tls"], credentials, options=options)


async def says_nothing(address: str) -> None:
    """Holds idle connections, and opens those again that the bus closes."""
    host, _, port = address.rpartition(":")
    open_ones: list[asyncio.StreamWriter] = []
    for number in itertools.count():
        with contextlib.suppress(OSError):
            open_ones.append((await asyncio.open_connection(host, int(port)))[1])
        if len(open_ones) > IDLE:
            open_ones.pop(0).close()
        await asyncio.sleep(0.1 if number > 2 * IDLE else PAUSE)


async def asks_over_http(url: str, method: str, path: str, **options: Any) -> None:
    """Sends one request again and again, several at a time."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> None:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.request(method, path, **options) as response:
                        await response.read()
                await asyncio.sleep(PAUSE)

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))


async def sends_slowly(address: str) -> None:
    """Sends heads of requests a byte at a time, on many connections."""
    host, _, port = address.rpartition(":")
    while True:
        writers = []
        for _ in range(100):
            with contextlib.suppress(OSError):
                writers.append((await asyncio.open_connection(host, int(port)))[1])
        for byte in b"POST /api/tools/invoke HTTP/1.1\r\nX: y":
            for writer in writers:
                with contextlib.suppress(OSError):
                    writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        for writer in writers:
            writer.close()


async def talks_nonsense(address: str) -> None:
    """Sends what is not of the protocol, with long heads, on a new connection each time."""
    host, _, port = address.rpartition(":")
    lines = b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5_000
    for number in itertools.count():
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(lines[number % 2])
            await asyncio.sleep(PAUSE)
            writer.close()


async def probes(addresses: Addresses) -> None:
    """Asks for the health of the bus, which everybody may, and watches it on ever more streams."""
    async with _plain(addresses) as connection:
        stub, watched = health_grpc.HealthStub(connection), []
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            watched.append(stub.Watch(health_pb2.HealthCheckRequest()))
            if len(watched) > IDLE:
                watched.pop(0).cancel()
            await asyncio.sleep(PAUSE)


async def other_user(addresses: Addresses, until: float) -> None:
    """Another user of the machine, whom the bus refuses."""
    if os.getuid() == 0:
        os.setuid(pwd.getpwnam("nobody").pw_uid)

    async def lists() -> None:
        async with _plain(addresses) as connection:
            stub = Stream(connection).stub
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stub.List(wire.ListRequest(), timeout=5)
                await asyncio.sleep(PAUSE)

    http = addresses["http"]
    acts = (
        lambda: says_nothing(addresses["grpc"]),
        lambda: says_nothing(http),
        lists,
        lambda: offering_peer.resets(lambda: _plain(addresses), "", ""),
        lambda: asks_over_http(f"http://{http}", "GET", "/api/tools"),
        lambda: probes(addresses),
        lambda: talks_nonsense(addresses["grpc"]),
    )
    await asyncio.gather(*(again(act, until) for act in acts))


async def page(addresses: Addresses, until: float) -> None:
    """A page in a browser of the bus's own user."""
    http = addresses["http"]
    url = f"http://{http}"
    acts = (
        lambda: says_nothing(http),
        lambda: sends_slowly(http),
        lambda: asks_over_http(url, "POST", "/api/tools/invoke", data=b"x" * 500_000, headers=FOREIGN),
        lambda: asks_over_http(url, "GET", "/api/tools/events", headers=FOREIGN),
        lambda: asks_over_http(url, "POST", "/mcp", data=b"{}", headers=FOREIGN),
        lambda: asks_over_http(url, "GET", "/openapi.json", headers={"Sec-Fetch-Site": "cross-site"}),
        lambda: talks_nonsense(http),
    )
    await asyncio.gather(*(again(act, until) for act in acts))


async def plugin_key(addresses: Addresses, until: float) -> None:
    """A plugin of another machine, with a key."""
    await offering_peer.attack(lambda: _keyed(addresses), "weather", "", until - time.monotonic())


async def host_key(addresses: Addresses, until: float) -> None:
    """A host of another machine, with a key."""
    subscribe = (wire.SUBSCRIPTION_CATALOG, wire.SUBSCRIPTION_NOTIFICATIONS)

    def channel() -> Any:
        return _keyed(addresses)

    async def watches() -> None:
        async with channel() as connection:
            streams = [Stream(connection, reads=False) for _ in range(50)]
            for number, stream in enumerate(streams):
                await stream.attach(f"host:w{number}", subscribe=subscribe)
            await asyncio.sleep(3600)

    async def floods() -> None:
        text = json.dumps({"number": 1, "more": "x" * 50_000})
        async with attached(channel, "host:chat", "") as (stream, _):
            for number in itertools.count():
                texts = [text if each % 8 == 0 else '{"number":1}' for each in range(128)]
                calls = [
                    pb.ToolCall(call_id=f"{number}-{each}", name="pour", arguments_json=arguments)
                    for each, arguments in enumerate(texts)
                ]
                await stream.send(calls=calls)
                await asyncio.sleep(0.02)

    async def follows() -> None:
        async with attached(channel, "host:fickle", "", instance="fickle") as (stream, _):
            for number in itertools.count():
                attach = wire.Attach(protocol_version=1, source="host:fickle", instance="fickle")
                attach.subscribe.extend(subscribe if number % 2 else ())
                await stream.send(attach=attach)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await stream.stub.List(wire.ListRequest(include_offline=True, include_refused=True), timeout=5)
                await asyncio.sleep(PAUSE)

    acts = (
        watches,
        floods,
        follows,
        lambda: offering_peer.answers_nobody(channel, "host:nobody", ""),
        lambda: offering_peer.calls(channel, "host:caller", ""),
        lambda: offering_peer.stays(channel, "host:many", ""),
        lambda: offering_peer.comes_and_goes(channel, "host:chat2", ""),
        lambda: offering_peer.resets(channel, "", ""),
    )
    await asyncio.gather(*(again(act, until) for act in acts))


async def callback(addresses: Addresses, until: float) -> None:
    """A plugin over HTTP, which answers with what is long, slow or nothing that one can read."""
    kinds = itertools.count()

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        match next(kinds) % 6:
            case 0:
                return web.Response(body=b"x" * 5_000_000)
            case 1:
                return web.Response(body=b"[" * 1_000_000, content_type="application/json")
            case 2:
                response = web.StreamResponse()
                await response.prepare(request)
                for _ in range(100):
                    await response.write(b" ")
                    await asyncio.sleep(0.02)
                return response
            case 3:
                return web.Response(body=BOMB, headers={"Content-Encoding": "gzip"}, content_type="application/json")
            case 4:
                many = {f"X-{each}": "y" * 4_000 for each in range(100)}
                return web.Response(status=302, headers={"Location": "/", **many})
            case _:
                return web.json_response({"output": "x" * 3_000_000, "is_error": False})

    server = await serve_callbacks(answer)
    url = f"http://{addresses['http']}"
    async with aiohttp.ClientSession(url) as session:

        def body(name: str, number: int) -> dict[str, Any]:
            schema = offering_peer.wide(number, 2000)
            return {"name": name, "description": "-", "parameters": schema, "callback_url": server.url, "source": "cb"}

        async def registers() -> None:
            for number in itertools.count():
                async with session.post("/api/tools/register", json=body(f"t{number % 40}", number)) as response:
                    await response.read()
                await asyncio.sleep(PAUSE)

        async def registered() -> None:
            async with session.post("/api/tools/register", json=body("called", 0)) as response:
                await response.read()
            call = {"name": "called", "arguments": {}}
            await asks_over_http(url, "POST", "/api/tools/invoke", json=call)

        async def watches() -> None:  # and does not read
            host, _, port = addresses["http"].rpartition(":")
            opened = [await asyncio.open_connection(host, int(port), limit=1) for _ in range(50)]
            for _, writer in opened:
                writer.write(f"GET /api/tools/events HTTP/1.1\r\nHost: {addresses['http']}\r\n\r\n".encode())
            await asyncio.sleep(3600)

        await asyncio.gather(*(again(act, until) for act in (registers, registered, watches)))
    await server.runner.cleanup()


async def floor(addresses: Addresses, until: float) -> None:
    """Nobody: a program that never comes near the bus and takes as much of the machine as the others do."""
    while time.monotonic() < until:
        began = time.thread_time()
        while time.thread_time() < began + FLOOR_SECONDS:
            json.dumps(FOREIGN)
        await asyncio.sleep(FLOOR_SECONDS)


KINDS = {each.__name__: each for each in (other_user, page, plugin_key, host_key, callback, floor)}

if __name__ == "__main__":
    kind, seconds, given = sys.argv[1:]
    print("ready", flush=True)
    uvloop.run(KINDS[kind](json.loads(given), time.monotonic() + float(seconds)))
