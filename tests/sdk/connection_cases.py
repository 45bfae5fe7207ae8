from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from toolbus.sdk.plugin_client import Plugin


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def plugin_with(address: str, *functions: Callable[..., Any], source: str = "calc", **options: Any) -> Plugin:
    plugin = Plugin(source, address=address, **options)
    for function in functions:
        plugin.add_tool(function)
    return plugin


def add(a: int, b: int) -> int:
    return a + b
