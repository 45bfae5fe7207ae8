"""Runs a bridge on standard input and output, which carry nothing but messages of its client."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

from toolbus.parts.mcp.bridge.bridge import Bridge
from toolbus.parts.mcp.bridge.bridge_socket import SOCKET_FILE
from toolbus.parts.mcp.bridge.links import Link, NoBus, PipeLink, TakeEnd, TakeLine

DEFAULT_URL = "http://127.0.0.1:48911/mcp"  # where a bus listens by default


def default_data_dir() -> Path:
    """Returns the default data directory of ``toolbus serve``, which gets it from `platformdirs`."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "toolbus"
    return Path(os.environ.get("XDG_DATA_HOME", "").strip() or Path.home() / ".local" / "share") / "toolbus"


ASK_SECONDS = 5.0


def endpoint_of(bus: str) -> str:
    """Returns the MCP endpoint of the bus at an address; of several, of one that answers.

    Raises:
        NoBus: none answers, or it serves no HTTP on this machine.
    """
    from toolbus.errors import ToolBusError
    from toolbus.sdk import SyncHost

    try:
        with SyncHost(bus, source="mcp") as host:
            digest = host.call("toolbus:digest", timeout=ASK_SECONDS)
    except ToolBusError as error:
        raise NoBus(str(error)) from None
    if digest.error is not None:
        raise NoBus(f"the bus at {bus}: {digest.error.message}")
    http = digest.output["addresses"]["http"]
    if not http:
        raise NoBus(f"the bus at {bus} serves no HTTP: name its data directory with --data-dir, or drop --http off")
    return f"http://{http}/mcp"


def run(profile: str, url: str, data_dir: str, bus: str = "") -> None:
    """Bridges standard input and output until the input ends.

    Args:
        profile: "" for the default one.
        url: of the endpoint; "" for the socket in the data directory, or HTTP if the socket does not exist.
        data_dir: of the only bus to connect to; "" for the default one.
        bus: its gRPC address, or several, of which one that answers is asked for its endpoint at each connect.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing but messages may reach the client
    writing = threading.Lock()
    path = (Path(data_dir) if data_dir else default_data_dir()) / SOCKET_FILE
    has_sockets = hasattr(socket, "AF_UNIX")

    def write(line: bytes) -> None:
        try:
            with writing:
                out.write(line)
                out.flush()
        except OSError:
            os._exit(0)  # the client has disconnected

    def connect(take: TakeLine, end: TakeEnd) -> Link:
        if not (url or bus) and has_sockets and (data_dir or path.exists()):
            return PipeLink(path, take, end)
        from toolbus.parts.mcp.bridge.bus_http_link import BusHttpLink

        try:
            return BusHttpLink(endpoint_of(bus) if bus else url or DEFAULT_URL, take, end, moves=bool(bus))
        except NoBus as error:
            raise NoBus(str(error) if url or bus else f"{path} does not exist, and {error}") from None

    bridge = Bridge(connect, write, profile)
    bridge.connect_once()
    threading.Thread(target=bridge.run, name="connect", daemon=True).start()
    for line in sys.stdin.buffer:
        if line.strip():
            bridge.take(line)
    bridge.finish()
    os._exit(0)  # at once: no other thread has work left
