"""The contest of the REST gateway: calls that end in a callback, and calls that begin as a request.

`aiohttp` and `httpx` post to the plugin themselves: the limit of the client that the bus uses too, and what the bus
takes over from. `embedded` is a bus in the process of its host, so it has as many processes as those two; `callback`,
`rest_callback` and `rest_grpc` go through a bus in a process of its own.
"""

from __future__ import annotations

from lab.benchmarks.children import Child, Nursery, address, grpc_address
from lab.benchmarks.contest import Contestant, Plan, bus_command


def start_gateway(nursery: Nursery, plan: Plan, *kept: str) -> tuple[Child, str, str]:
    """Starts a bus with HTTP and returns it with its gRPC address and the URL of its HTTP, once it is ready.

    Args:
        kept: the options that say what survives a restart; by default nothing does.
    """
    listening = ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
    bus = nursery.start("toolbus", bus_command(plan, *listening, *(kept or ("--ephemeral",))))
    ready = bus.line()
    return bus, grpc_address(ready), f"http://{address(ready, 'http')}"


def start_plugin(nursery: Nursery, *bus: str) -> tuple[Child, str]:
    """Starts the plugin and returns it with its callback URL.

    Args:
        bus: the URL of the bus that the plugin registers with; without one it only answers.
    """
    plugin = nursery.module("callback_plugin", *bus)
    return plugin, address(plugin.line(), "http")


def _plugin_alone(nursery: Nursery, plan: Plan) -> tuple[Child, str]:
    return start_plugin(nursery)


def _callback(nursery: Nursery, plan: Plan) -> tuple[Child, str]:
    bus, grpc, http = start_gateway(nursery, plan)
    start_plugin(nursery, http)
    return bus, grpc


def _rest_callback(nursery: Nursery, plan: Plan) -> tuple[Child, str]:
    bus, _, http = start_gateway(nursery, plan)
    start_plugin(nursery, http)
    return bus, http


def _rest_grpc(nursery: Nursery, plan: Plan) -> tuple[Child, str]:
    bus, grpc, http = start_gateway(nursery, plan)
    nursery.module("load_plugin", grpc).line()
    return bus, http


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("aiohttp", _plugin_alone, ("rest_host", "aiohttp")),
        Contestant("aiohttp_json", _plugin_alone, ("rest_host", "aiohttp_json")),
        Contestant("httpx", _plugin_alone, ("rest_host", "httpx")),
        Contestant("embedded", _plugin_alone, ("rest_host", "embedded")),
        Contestant("callback", _callback, ("load_host",)),
        Contestant("rest_callback", _rest_callback, ("rest_host", "invoke")),
        Contestant("rest_grpc", _rest_grpc, ("rest_host", "invoke")),
    )
}
