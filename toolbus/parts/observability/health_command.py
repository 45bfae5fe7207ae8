"""Implements ``toolbus plugins health``: asks a bus for its health and that of its sources, by grpc.health.v1."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, Metadata
from toolbus.cli.help_text import epilog

EPILOG = epilog(
    (
        "toolbus plugins health",
        "toolbus plugins health toolbus.source.weather",
        "toolbus plugins health --watch --json",
    ),
    """
    Uses grpc.health.v1. The services of a bus are '' (the whole bus), toolbus.v1.ToolBusService, and
    toolbus.source.NAME for each source.

    `toolbus top` shows the sources with their sessions, how full these are, and what fails, live; `toolbus console`
    opens a page that shows the same.
    """,
    "0 serving, 1 not serving or unknown service, 2 wrong usage, 3 no bus found, 130 after Ctrl-C.",
)


def health(
    service: Annotated[
        str | None, typer.Argument(metavar="SERVICE", help="Name of one service (default: all).")
    ] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    watch: Annotated[bool, typer.Option("--watch", help="Continue, and print each change.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document; with --watch, JSON lines.")] = False,
) -> None:
    """Show whether the bus and its sources are serving."""
    try:
        import grpc_health.v1.health_pb2  # noqa: F401  # missing without the server extra
    except ModuleNotFoundError:
        terminal.fail("health needs grpcio-health-checking, which is not installed: pip install 'toolbus[server]'")

    def request(channel: Any, metadata: Metadata) -> bool:
        if watch:
            return _watch(channel, metadata, service or "", as_json)
        return _check(channel, metadata, service, as_json)

    if not bus_client.query(BusTarget(bus, credential), request):
        raise typer.Exit(terminal.REFUSED)


def _check(channel: Any, metadata: Metadata, service: str | None, as_json: bool) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    stub = health_pb2_grpc.HealthStub(channel)
    options = {"timeout": bus_client.REPLY_SECONDS, "metadata": metadata}
    if service is None:
        listed = stub.List(health_pb2.HealthListRequest(), **options).statuses
        statuses = {name: _status_name(listed[name].status) for name in sorted(listed)}
    else:
        request = health_pb2.HealthCheckRequest(service=service)
        statuses = {service: _status_name(stub.Check(request, **options).status)}
    if as_json:
        terminal.print_json(statuses)
    else:
        rows = [(name or "(the whole)", status.lower()) for name, status in statuses.items()]
        terminal.print_table(("SERVICE", "STATUS"), rows)
    return statuses.get(service or "") == "SERVING"


def _watch(channel: Any, metadata: Metadata, service: str, as_json: bool) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    request = health_pb2.HealthCheckRequest(service=service)
    for change in health_pb2_grpc.HealthStub(channel).Watch(request, metadata=metadata):
        status = _status_name(change.status)
        terminal.print_outcome(status.lower(), {"service": service, "status": status}, as_json, line=True)
    return False  # a watch ends only if the server ends it


def _status_name(status: int) -> str:
    from grpc_health.v1 import health_pb2

    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    return name
