"""Runs a bridge on standard input and output, which belong to its client alone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from toolbus.mcp_bridge.bridge import Bridge
from toolbus.mcp_bridge.links import SOCKET_FILE, Link, NoBus, PipeLink, TakeEnd, TakeLine


def default_data_dir() -> Path:
    """Returns the data directory of a bus that names none: the same as `platformdirs` has it for ``toolbus serve``."""
    if given := os.environ.get("TOOLBUS_DATA_DIR"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "toolbus"
    return Path(os.environ.get("XDG_DATA_HOME", "").strip() or Path.home() / ".local" / "share") / "toolbus"


def run(profile: str, url: str, data_dir: Path) -> None:
    """Bridges standard input and output until the input ends.

    Args:
        profile: "" for the default one.
        url: of the endpoint; "" for the socket in the data directory, and HTTP where there is none.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing but messages may reach the client
    writing = threading.Lock()

    def write(line: bytes) -> None:
        try:
            with writing:
                out.write(line)
                out.flush()
        except OSError:
            os._exit(0)  # the client has gone

    def connect(take: TakeLine, end: TakeEnd) -> Link:
        path = data_dir / SOCKET_FILE
        if not url and path.exists():
            return PipeLink(path, take, end)
        raise NoBus(f"there is no {path}")

    bridge = Bridge(connect, write, profile)
    bridge.connect_once()
    threading.Thread(target=bridge.run, name="connect", daemon=True).start()
    for line in sys.stdin.buffer:
        if line.strip():
            bridge.take(line)
    bridge.finish()
    os._exit(0)  # at once: no thread has anything left to do
