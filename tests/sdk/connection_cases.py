from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lab.stage import free_ports
from toolbus.sdk.plugin_client import Plugin


def free_address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def plugin_with(address: str, *functions: Callable[..., Any], source: str = "calc", **options: Any) -> Plugin:
    plugin = Plugin(source, address=address, **options)
    for function in functions:
        plugin.add_tool(function)
    return plugin


def add(a: int, b: int) -> int:
    return a + b
