"""Tests tokens of other issuers at the addresses of a bus: what they reach, and when their sessions end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.bus.keys.keys_directory import KeysDirectory, calls
from tests.parts.identity.played_issuer import RECORD, PlayedIssuer
from tests.support.waiting import WAIT_SECONDS, until
from toolbus.bus import Bus, Config
from toolbus.bus.access.identity import Globs
from toolbus.bus.serve_settings import settle
from toolbus.errors import SetupError
from toolbus.parts.identity.settings import Issuer
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc


class House:
    """A bus whose keys know the identity chat, an issuer, and a client."""

    def __init__(self, bus: Bus, keys: KeysDirectory, login: PlayedIssuer, root: bytes) -> None:
        self.bus = bus
        self.keys = keys
        self.login = login
        self._root = root

    def channel(self) -> grpc.aio.Channel:
        address = self.bus.grpc_addresses[1].partition(":")[2]
        name = (("grpc.ssl_target_name_override", "bus.example"),)
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(self._root), name)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    keys, login = KeysDirectory(tmp_path, time.time()), PlayedIssuer()
    login.now = time.time()
    keys.add("chat", replace(calls("add"), attach=Globs(["*"])))
    file = tmp_path / "jwks.json"
    file.write_bytes(login.jwks())
    issuer = Issuer(RECORD.issuer, RECORD.audience, str(file), {"bots": "chat"})
    port = "127.0.0.1:0"
    config = Config(grpc=(port, f"tls:{port}"), http="off", https=port, keys=keys.path, issuers=(issuer,))
    async with Bus(config) as bus:

        @bus.tool
        def add(a: int, b: int) -> int:
            return a + b

        @bus.tool
        def danger() -> str:
            return "boom"

        yield House(bus, keys, login, keys.ring().server_certificate().roots)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def test_a_token_of_the_issuer_reaches_what_its_group_may(house: House) -> None:
    async with house.channel() as channel:
        bus = rpc.ToolBusServiceStub(channel)
        listed = await bus.List(wire.ListRequest(), metadata=bearer(house.login.token()))
        assert [each.tool.name for each in listed.tools] == ["add"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await bus.List(wire.ListRequest(), metadata=bearer(house.login.token(groups=["strangers"])))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "is in none of the groups 'bots'" in str(refused.value.details())


async def test_the_token_counts_over_https_too(house: House) -> None:
    headers = {"Authorization": f"Bearer {house.login.token()}"}
    async with httpx.AsyncClient(
        base_url=f"https://{house.bus.https_address}", verify=False, headers=headers, timeout=WAIT_SECONDS
    ) as web:
        listed = (await web.get("/api/tools")).json()["tools_by_role"]["default"]
        assert [each["name"] for each in listed] == ["add"]
        broken = await web.get("/api/tools", headers={"Authorization": f"Bearer {house.login.token(aud='other')}"})
    assert broken.status_code == 401
    assert "is not for this bus" in broken.text


async def _read_to_end(stream: Any) -> None:
    while True:
        await stream.read()


async def test_a_session_of_a_token_ends_when_its_identity_is_removed(house: House) -> None:
    async with house.channel() as channel:
        stub: Any = rpc.ToolBusServiceStub(channel)  # the published types know no Invoke without an iterator
        stream = stub.Invoke(metadata=bearer(house.login.token()))
        attach = wire.Attach(protocol_version=1, source="chat")
        await stream.write(wire.InvokeRequest(attach=attach))
        attached = (await stream.read()).attached
        assert attached.identity == "chat/ann"
        assert 0 < attached.expires_seconds <= 3600
        house.keys.edit('[identities.chat]\nattach = ["*"]\ncall = ["add"]\n', "")
        with pytest.raises(grpc.aio.AioRpcError):
            await _read_to_end(stream)
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "identity 'chat', which keys.toml does not have" in await stream.details()


async def test_narrowed_scopes_apply_to_tokens_within_a_second(house: House) -> None:
    token = house.login.token()
    async with house.channel() as channel:
        bus = rpc.ToolBusServiceStub(channel)

        async def seen() -> list[str]:
            listed = await bus.List(wire.ListRequest(), metadata=bearer(token))
            return [each.tool.name for each in listed.tools]

        assert await seen() == ["add"]
        house.keys.edit('call = ["add"]', 'call = ["danger"]')
        await until(lambda: house.bus.core.sessions.keyring.identities["chat"].call.match("danger"), "the new scopes")  # type: ignore[union-attr]
        assert await seen() == ["danger"]


def test_the_configuration_file_names_issuers(tmp_path: Path) -> None:
    file = tmp_path / "toolbus.toml"
    table = '[[issuers]]\nissuer = "https://login.example"\naudience = "toolbus"\njwks = "https://login.example/keys"\n'
    file.write_text(f'grpc = ["tls:127.0.0.1:0"]\n{table}groups = {{ ops = "operator", bots = "chat" }}\n')
    assert settle({}, {}, file).config.issuers == (RECORD,)
    file.write_text(f'grpc = ["tls:127.0.0.1:0"]\n{table}')
    with pytest.raises(SetupError, match=r"toolbus.toml: issuers\[0\]: groups is empty"):
        settle({}, {}, file)
    file.write_text(f'{table}groups = {{ "*" = "chat" }}\n')
    with pytest.raises(SetupError, match="this bus has none of them: add one, or drop the issuers"):
        settle({}, {}, file)
