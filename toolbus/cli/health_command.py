"""Implements ``toolbus health``: asks a bus for its health and that of its sources, by grpc.health.v1."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption
from toolbus.cli.help_text import manual

MANUAL = manual(
    ("toolbus health", "toolbus health toolbus.source.weather", "toolbus health --watch --json"),
    """
    Speaks grpc.health.v1. Services of a bus are '' (the bus as a whole), toolbus.v1.ToolBusService, and
    toolbus.source.NAME for each source.
    """,
    "0 serving, 1 not serving or no such service, 2 wrong usage, 3 no bus there, 130 after Ctrl-C.",
)


def health(
    service: Annotated[str | None, typer.Argument(metavar="SERVICE", help="One service (default: all).")] = None,
    bus: BusOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, and show each change.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; with --watch, JSON lines.")] = False,
) -> None:
    """Ask how the bus and its sources are."""
    try:
        import grpc_health.v1.health_pb2  # noqa: F401  # before anything is asked
    except ModuleNotFoundError:
        terminal.fail("health needs grpcio-health-checking, which is not installed: pip install 'toolbus[server]'")

    def question(channel: Any) -> bool:
        return _watch(channel, service or "", as_json) if watch else _ask(channel, service, as_json)

    if not bus_client.ask(bus, question):
        raise typer.Exit(terminal.REFUSED)


def _ask(channel: Any, service: str | None, as_json: bool) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub = health_pb2_grpc.HealthStub(channel)
    if service is None:
        listed = stub.List(health_pb2.HealthListRequest(), timeout=bus_client.ANSWER_SECONDS).statuses
        found = {name: _word(listed[name].status) for name in sorted(listed)}
    else:
        request = health_pb2.HealthCheckRequest(service=service)
        found = {service: _word(stub.Check(request, timeout=bus_client.ANSWER_SECONDS).status)}
    if as_json:
        terminal.say_json(found)
    else:
        terminal.table(("SERVICE", "STATUS"), [(name or "(the whole)", word.lower()) for name, word in found.items()])
    return found.get(service or "") == "SERVING"


def _watch(channel: Any, service: str, as_json: bool) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    changes = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
    for change in changes:
        word = _word(change.status)
        if as_json:
            terminal.say_json({"service": service, "status": word}, line=True)
        else:
            print(word.lower(), flush=True)
    return False  # a watch ends only where the server ends it


def _word(status: int) -> str:
    from grpc_health.v1 import health_pb2

    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    return name
