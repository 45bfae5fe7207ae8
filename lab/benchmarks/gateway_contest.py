"""Measures the REST gateway: calls that end in a callback, and calls that begin as a request.

`aiohttp` and `httpx` post to the plugin themselves: the limit of the client that the bus uses too, and the client that
the bus replaces. `embedded` is a bus in the process of its host, so it has as many processes as those two; `callback`,
`rest_callback` and `rest_grpc` go through a bus in a process of its own.
"""

from __future__ import annotations

from lab.benchmarks.contest import LOOPBACK, Contestant, Plan
from lab.child import Child
from lab.stage import Stage, address_of


def start_plugin(stage: Stage, bus: str = "-") -> tuple[Child, str]:
    """Starts the plugin and returns it with its callback URL.

    Args:
        bus: the URL of the bus that the plugin registers with; by default its callers know the URL.
    """
    plugin = stage.module("load.plugin", bus, "--way", "callback")
    return plugin, address_of(plugin.line(), "http")


def _only_plugin(stage: Stage, plan: Plan) -> tuple[Child, str]:
    return start_plugin(stage)


def _callback(stage: Stage, plan: Plan) -> tuple[Child, str]:
    bus, grpc, http = plan.bus(stage, http=LOOPBACK)
    start_plugin(stage, http)
    return bus, grpc


def _rest_callback(stage: Stage, plan: Plan) -> tuple[Child, str]:
    bus, _, http = plan.bus(stage, http=LOOPBACK)
    start_plugin(stage, http)
    return bus, http


def _rest_grpc(stage: Stage, plan: Plan) -> tuple[Child, str]:
    bus, grpc, http = plan.bus(stage, http=LOOPBACK)
    stage.module("load.plugin", grpc).line()
    return bus, http


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("aiohttp", _only_plugin, ("load.rest_host", "aiohttp")),
        Contestant("aiohttp_json", _only_plugin, ("load.rest_host", "aiohttp_json")),
        Contestant("httpx", _only_plugin, ("load.rest_host", "httpx")),
        Contestant("embedded", _only_plugin, ("load.rest_host", "embedded")),
        Contestant("callback", _callback, ("load.stream_host",)),
        Contestant("rest_callback", _rest_callback, ("load.rest_host", "invoke")),
        Contestant("rest_grpc", _rest_grpc, ("load.rest_host", "invoke")),
    )
}
