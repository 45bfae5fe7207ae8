"""The HTTP application: the contract's endpoints, calls, events, health, and the document that describes them.

``/healthz`` says that the process runs and its loop turns, ``/readyz`` whether calls are taken. The one place where
exceptions become HTTP stands here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_plus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline

import toolbus
from toolbus.bus.gateway import (
    call_routes,
    council_routes,
    event_stream,
    export_routes,
    record_routes,
    task_routes,
    tool_routes,
)
from toolbus.bus.gateway.access import AccessGuard
from toolbus.bus.gateway.admission import Admission
from toolbus.bus.gateway.parts import GatewayParts
from toolbus.bus.loopback import mask
from toolbus.errors import STATUS, ToolBusError

log = logging.getLogger("toolbus.http")

MAX_ECHO = 1024  # characters of a refused text that its error repeats
_DESCRIPTION = """
Tools for language models, registered with a callback URL by plugins of any language and called by hosts.

Whoever can use gRPC has more: one connection that registers tools and runs them. Everything here is for loopback only.
"""


def application(parts: GatewayParts) -> FastAPI:
    """Returns the application over one bus."""
    app = FastAPIOffline(
        title="toolbus",
        summary="A tool bus for LLM applications",
        description=_DESCRIPTION,
        version=toolbus.__version__,
        redoc_url=None,
        strict_content_type=False,  # REST-10
        license_info={"name": "Apache-2.0"},
        openapi_tags=[
            {"name": "tools", "description": "What is offered."},
            {"name": "models", "description": "Offering it to a model."},
            {"name": "calls", "description": "Calling it."},
            {"name": "tasks", "description": "Calls that take longer than their caller waits."},
            {"name": "council", "description": "Members that run tools before the model is asked."},
            {"name": "bus", "description": "The bus itself."},
            {"name": "health", "description": "For probes."},
        ],
        exception_handlers={RequestValidationError: _invalid, ToolBusError: _refused, Exception: _fault},
    )

    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """Says that the process runs."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["health"], responses={503: {"description": "The bus is draining."}})
    async def readyz() -> Response:
        """Says whether calls are taken."""
        ready = parts.core.takes_calls
        return JSONResponse({"status": "ready" if ready else "draining"}, status_code=200 if ready else 503)

    for routes in (tool_routes, event_stream, export_routes, call_routes, task_routes):
        app.include_router(routes.router(parts))
    if parts.council is not None:
        app.include_router(council_routes.router(parts.council))
    app.include_router(record_routes.router(parts))
    app.add_middleware(Admission)
    app.add_middleware(AccessGuard, max_bytes=parts.core.limits.http_body_bytes)
    return app


# -- exceptions become HTTP ----------------------------------------------------------------------------------------


async def _invalid(request: Request, problem: Exception) -> Response:
    """Answers a request that breaks rules (REST-2)."""
    assert isinstance(problem, RequestValidationError)
    found = [{key: _echoed(value) for key, value in error.items() if key != "url"} for error in problem.errors()]
    return _answer(422, {"detail": found})


async def _refused(request: Request, problem: Exception) -> Response:
    """Answers what the bus refuses on purpose."""
    status = next((http for kind, (_, http) in STATUS.items() if isinstance(problem, kind)), 500)
    if status == 500:
        return await _fault(request, problem)
    return _answer(status, {"detail": mask(str(problem))})


async def _fault(request: Request, problem: Exception) -> Response:
    log.error("a fault of the bus method=%s path=%s", request.method, request.url.path, exc_info=problem)
    return _answer(500, {"detail": "a fault of the bus; its log has the details"})


def _answer(status: int, content: Mapping[str, Any]) -> Response:
    body = json.dumps(content, separators=(",", ":"))  # ASCII: what is echoed may hold half of a surrogate pair
    return Response(body, status_code=status, media_type="application/json")


def _echoed(value: Any, depth: int = 0) -> Any:
    """Returns part of a request as it may be echoed: short, in JSON's own types, without passwords (REST-8)."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        # A form, where JSON was meant, hides colon and @ behind percent signs.
        shown = mask(unquote_plus(value) if "%3a" in value.lower() else value)
        return shown if len(shown) <= MAX_ECHO else f"{shown[:MAX_ECHO]}…"
    if depth > 8:
        return "…"
    if isinstance(value, Mapping):
        return {mask(str(key))[:MAX_ECHO]: _echoed(each, depth + 1) for key, each in list(value.items())[:64]}
    if isinstance(value, Sequence):
        return [_echoed(each, depth + 1) for each in value[:64]]
    return {}  # an exception, as FastAPI itself shows one
