"""``toolbus health`` and ``drain``: what operators ask a running bus."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, JsonOption
from toolbus.cli.call_command import administer
from toolbus.cli.manual import manual

HEALTH_MANUAL = manual(
    ("toolbus health", "toolbus health toolbus.source.weather", "toolbus health --watch --json"),
    """
    Speaks grpc.health.v1. Services of a bus are '' (the bus as a whole), toolbus.v1.ToolBusService, and
    toolbus.source.NAME for each source.
    """,
    "0 serving, 1 not serving or no such service, 2 wrong usage, 3 no bus there, 130 after Ctrl-C.",
)
DRAIN_MANUAL = manual(
    ("toolbus drain weather", "toolbus drain"),
    """
    A drained session takes no new calls, finishes those it has and closes; a plugin that was drained does not come
    back by itself. Without a source the bus itself drains and then ends.
    """,
    "0 done, 1 the bus said no (no session of that source, say), 2 wrong usage, 3 no bus there.",
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


def drain(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Whose sessions (default: the whole bus).")
    ] = None,
    bus: BusOption = None,
    grace_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="How long calls in flight may take; only with SOURCE.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Have a source, or the whole bus, finish its calls and leave."""
    if source is not None and not source:
        terminal.fail("SOURCE is empty: name one, or leave it out to drain the whole bus", terminal.USAGE)
    if grace_seconds is not None and source is None:
        terminal.fail("--grace-seconds goes with SOURCE; a whole bus takes its own drain_seconds", terminal.USAGE)
    arguments: dict[str, Any] = {"source": source or ""}
    if grace_seconds is not None:
        arguments["grace_seconds"] = grace_seconds
    found = administer(bus, "drain", arguments)
    if as_json:
        terminal.say_json(found)
    elif source is None:
        print(f"draining the bus (sessions: {found['sessions']})")
    elif found["sessions"]:
        print(f"draining {source} (sessions: {found['sessions']})")
    if source is not None and not found["sessions"]:
        terminal.fail(f"no session of source {source!r} is attached: `toolbus list` shows the sources")
