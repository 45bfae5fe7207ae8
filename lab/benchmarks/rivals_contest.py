"""Measures rivals: every way through the bus, and every other way to let a model's host call a tool.

Where there is a process in the middle its CPU time is charged to the calls, elsewhere that of the host.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.benchmarks import contest, dropins, gateway_contest
from lab.benchmarks.contest import Contestant, Plan
from lab.benchmarks.rooms import python_of
from lab.child import Child, ChildFailed
from lab.stage import Stage, address_of

FORGE_READY_SECONDS = 90.0  # its data base is made anew each time
FORGE_PASSWORD = "Ab1_" + "x" * 12
REQUEST_SECONDS = 30.0


def _none(stage: Stage, plan: Plan) -> tuple[None, str]:
    return None, "-"


def _stdio(stage: Stage, plan: Plan) -> tuple[None, str]:
    return None, "stdio"


def _fastapi(stage: Stage, plan: Plan) -> tuple[None, str]:
    return None, address_of(stage.module("benchmarks.fastapi_plugin").line(), "http")


def _mcp_server(stage: Stage, *arguments: str) -> tuple[Child, str]:
    server = stage.module("benchmarks.mcp_server", *arguments, python=python_of("fastmcp"))
    return server, address_of(server.line(), "http")


def _http(stage: Stage, plan: Plan) -> tuple[None, str]:
    return None, _mcp_server(stage, "http")[1]


def _proxy(stage: Stage, plan: Plan) -> tuple[Child, str]:
    _, url = _mcp_server(stage, "http")
    return _mcp_server(stage, "proxy", url)


def _contextforge(stage: Stage, plan: Plan) -> tuple[Child, str]:
    """Starts ContextForge with its defaults, but for the secrets without which it does not start, and one server."""
    _, upstream = _mcp_server(stage, "http")
    python = python_of("contextforge")
    secret = secrets.token_hex(24)
    folder = stage.folder()
    settings = {
        "JWT_SECRET_KEY": secret,
        "AUTH_ENCRYPTION_SECRET": secret,
        **dict.fromkeys(("PLATFORM_ADMIN_PASSWORD", "DEFAULT_USER_PASSWORD", "BASIC_AUTH_PASSWORD"), FORGE_PASSWORD),
        "DATABASE_URL": f"sqlite:///{folder}/mcp.db",
        "SSRF_ALLOW_LOCALHOST": "true",
        "LOG_LEVEL": "ERROR",
        "MCPGATEWAY_UI_ENABLED": "false",
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [str(Path(python).with_name("mcpgateway")), "--host", "127.0.0.1", "--port", str(port)]
    gateway = stage.start("mcpgateway", command, cwd=folder, **settings)
    ask_for_token = ["-m", "mcpgateway.utils.create_jwt_token", "-u", "admin@example.com", "-e", "600", "-s", secret]
    token = stage.start("create_jwt_token", [python, *ask_for_token], cwd=folder, **settings).line()
    url = f"http://127.0.0.1:{port}"
    _wait_for(f"{url}/health", gateway)
    body = {"name": "bench", "url": upstream, "transport": "STREAMABLEHTTP"}
    _request(f"{url}/gateways", body, token)
    return gateway, f"{url}/rpc#{token}"


def _wait_for(url: str, child: Child) -> None:
    ends_at = time.monotonic() + FORGE_READY_SECONDS
    while True:
        try:
            _request(url)
            return
        except (OSError, ChildFailed) as error:
            if time.monotonic() > ends_at or child.has_ended:
                raise ChildFailed(f"{child.name} did not become ready: {error}. {child.errors()}") from None
        time.sleep(0.1)


def _request(url: str, body: dict[str, Any] | None = None, token: str = "") -> bytes:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=REQUEST_SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise ChildFailed(f"{url} answered HTTP {error.code}: {error.read()[:500]!r}") from None


COMPLETE = ("toolbus", "relay")  # what they cannot do is a fault; what others cannot do is a result

CONTESTANTS = {
    contestant.name: replace(contestant, partial=contestant.name not in COMPLETE)
    for contestant in (
        contest.CONTESTANTS["toolbus"],
        Contestant("in_process", _none, ("load.rest_host", "in_process")),
        replace(gateway_contest.CONTESTANTS["rest_grpc"], name="rest"),
        gateway_contest.CONTESTANTS["callback"],
        dropins.CONTESTANTS["dropin"],
        contest.CONTESTANTS["relay"],
        contest.CONTESTANTS["nats"],
        Contestant("fastmcp_http", _http, ("benchmarks.mcp_host",), host_room="fastmcp", rooms=("fastmcp",)),
        Contestant("fastmcp_stdio", _stdio, ("benchmarks.mcp_host",), host_room="fastmcp", rooms=("fastmcp",)),
        Contestant("fastmcp_proxy", _proxy, ("benchmarks.mcp_host",), host_room="fastmcp", rooms=("fastmcp",)),
        Contestant("contextforge", _contextforge, ("load.rest_host", "json_rpc"), rooms=("fastmcp", "contextforge")),
        Contestant("httpx", _fastapi, ("load.rest_host", "httpx")),
    )
}
