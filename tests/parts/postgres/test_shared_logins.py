"""Logins of mounts: the same files at all buses that share a database, and a token that one of them renews."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until, within
from toolbus.bus import Bus
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.authorization import (
    LoginKeeper,
    TokenAuthorization,
    read_document,
    remove_tokens,
    token_path,
    users_path,
    write_document,
)
from toolbus.parts.mcp.client.transport import Challenge
from toolbus.parts.postgres.logins import LOGINS, SharedLogins
from toolbus.testing import running_bus

URL = "http://127.0.0.1:9/mcp"
HELPER = """
import json, sys, time
request = json.loads(sys.stdin.readline())
with open(request["path"]) as file:
    document = json.load(file)
with open(request["path"] + ".runs", "a") as runs:
    runs.write("run\\n")
time.sleep(0.3)
number = int(document["tokens"]["access_token"][1:]) + 1
document["tokens"]["access_token"] = f"t{number}"
with open(request["path"], "w") as file:
    json.dump(document, file)
print(json.dumps({"done": True}))
"""
Two = tuple[Bus, Bus]


def document(access: str) -> dict[str, Any]:
    return {"url": URL, "tokens": {"access_token": access, "refresh_token": "once"}, "expires_at": 0}


def home(bus: Bus) -> Path:
    assert bus.core.config.data_dir is not None
    return bus.core.config.data_dir


async def until_access(bus: Bus, access: str | None) -> None:
    def found() -> bool:
        tokens = read_document(token_path(home(bus), "far")).get("tokens")
        return (tokens and tokens["access_token"]) == access

    await until(found, f"the token {access}")


async def test_a_login_at_one_bus_is_one_at_all_and_so_is_its_end(buses: Two) -> None:
    here, there = buses
    write_document(token_path(home(here), "far"), document("t1"))
    await until_access(there, "t1")
    file = token_path(home(there), "far")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    write_document(file, document("t2"))
    await until_access(here, "t2")
    remove_tokens(home(here), "far")
    await until_access(there, None)
    of_user = users_path(home(here), "far") / "0123.json"
    write_document(of_user, document("u1"))
    await until(lambda: read_document(users_path(home(there), "far") / "0123.json") == document("u1"))


async def test_a_bus_that_was_away_takes_over_what_changed_and_keeps_what_it_alone_changed(
    url: str, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    async with running_bus(unix=True, storage=url, data_dir=a) as here:
        write_document(token_path(a, "far"), document("t1"))
        async with running_bus(unix=True, storage=url, data_dir=b) as there:
            await until_access(there, "t1")
        write_document(token_path(a, "far"), document("t2"))
        await until(lambda: here.core.program.store.load(LOGINS) != {})
    async with running_bus(unix=True, storage=url, data_dir=b) as there:
        await until_access(there, "t2")
    write_document(token_path(b, "far"), document("t3"))  # as `toolbus mounts add --login` does without a bus
    async with running_bus(unix=True, storage=url, data_dir=b), running_bus(unix=True, storage=url, data_dir=a) as here:
        await until_access(here, "t3")


async def test_a_token_that_two_buses_want_renewed_is_renewed_by_one_of_them(buses: Two, tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text(HELPER)
    write_document(token_path(home(buses[0]), "far"), document("t1"))
    await until_access(buses[1], "t1")
    authorizations = []
    for bus in buses:
        keeper = bus.core.rooms.provider(LoginKeeper)
        assert keeper is not None
        path = token_path(home(bus), "far")
        command = (sys.executable, str(helper))
        authorizations.append(TokenAuthorization("far", URL, path, command=command, keeper=keeper))
    refused = Challenge(401, (("WWW-Authenticate", "Bearer"),), b"", "Bearer t1")
    assert await within(asyncio.gather(*(each.renew(refused) for each in authorizations))) == [True, True]
    assert [await each.header() for each in authorizations] == ["Bearer t2", "Bearer t2"]
    runs = [Path(f"{token_path(home(bus), 'far')}.runs") for bus in buses]
    assert sum(len(each.read_text().splitlines()) for each in runs if each.exists()) == 1


@pytest.mark.parametrize("name", ["../evil.json", "mcp-tokens/../../evil.json", "/etc/evil.json", "keys/keys.toml"])
async def test_a_row_that_is_no_login_is_written_nowhere(buses: Two, name: str) -> None:
    here, there = buses
    store = there.core.program.store
    here.core.program.store.put(LOGINS, name, json.dumps(document("t1")))
    await until(lambda: name in store.load(LOGINS))
    logins = SharedLogins(store, home(there))  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="is no login"):
        logins._put(name, "x")
    logins.compare()
    assert not (home(there) / name).resolve().exists()
