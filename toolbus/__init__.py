"""toolbus: a tool bus for LLM applications.

The public names, each loaded from its own module when it is first used: importing the package loads nothing,
so a plugin does not pay for the server. ``Bus`` and ``Config`` need ``pip install 'toolbus[server]'``.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolbus.bus import Bus, Config
    from toolbus.common.version import VERSION as __version__
    from toolbus.errors import (
        AlreadyAttached,
        CallFailed,
        Code,
        InvalidRequest,
        InvalidTool,
        LimitExceeded,
        NotApproved,
        NotAudited,
        NotKept,
        NotOffered,
        NotPermitted,
        PeerLost,
        ProtocolError,
        RequestError,
        SessionGone,
        SetupError,
        Stage,
        ToolBusError,
        Unauthenticated,
        UnknownRole,
        VersionMismatch,
    )
    from toolbus.protocol.tool import CallError, Result, Tool
    from toolbus.sdk import Host, Plugin, SyncHost, llm_tool

# grpcio can restart itself in the child of a fork. Each child then pings on the parent's connections, which the other
# side ends for "too many pings": a tool that starts processes would lose its plugin's connection. grpcio reads the
# variable when it starts, after this package is imported by whatever uses it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__all__ = [
    "__version__",
    # toolbus.sdk: offering tools and calling them
    "Plugin", "Host", "SyncHost", "llm_tool",
    # toolbus.protocol.tool: tools and results
    "Tool", "Result", "CallError",
    # toolbus.bus: the bus in this process
    "Bus", "Config",
    # toolbus.errors: codes and stages of failed calls, then exceptions
    "Code", "Stage", "ToolBusError", "RequestError", "InvalidTool", "InvalidRequest", "ProtocolError",
    "VersionMismatch", "UnknownRole", "SessionGone", "NotApproved", "NotPermitted", "Unauthenticated",
    "AlreadyAttached", "LimitExceeded", "NotOffered", "NotAudited", "NotKept", "PeerLost", "CallFailed",
    "SetupError",
]  # fmt: skip

_HOMES = {
    "Bus": "bus.wiring", "Config": "bus.config",
    "Host": "sdk", "Plugin": "sdk", "SyncHost": "sdk", "llm_tool": "sdk",
    "CallError": "protocol.tool", "Result": "protocol.tool", "Tool": "protocol.tool",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'toolbus' has no public name {name!r}; it has {', '.join(__all__)}")
    if name == "__version__":
        return importlib.import_module("toolbus.common.version").VERSION
    home = f"toolbus.{_HOMES.get(name, 'errors')}"
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "toolbus":
            raise
        raise ModuleNotFoundError(
            f"toolbus.{name} needs {missing.name}, which is not installed: pip install 'toolbus[server]'",
            name=missing.name,
        ) from missing
    value = getattr(module, name)
    globals()[name] = value  # further accesses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
