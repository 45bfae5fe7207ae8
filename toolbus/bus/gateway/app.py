"""Assembles the HTTP application: the routes of every endpoint, health, OpenAPI, and how exceptions become responses.

``/healthz`` shows that the process runs, ``/readyz`` whether the bus accepts calls. This is the one
place that maps exceptions to HTTP statuses.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote_plus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi_offline import FastAPIOffline
from starlette.types import ASGIApp, Receive, Scope, Send

from toolbus.bus.access.identity import Principal
from toolbus.bus.gateway import call_routes, catalog_event_routes, notification_routes, tool_routes
from toolbus.bus.gateway.access import AccessGuard, Admission
from toolbus.bus.gateway.call_routes import PlainRequests
from toolbus.bus.gateway.gateway_parts import IDENTITY, SCOPE_KEY, SOURCE, GatewayParts, parts_of
from toolbus.bus.loopback import mask
from toolbus.common.part import load
from toolbus.common.text import shorten
from toolbus.common.version import VERSION
from toolbus.errors import INTERNAL_DETAIL, NotPermitted, ToolBusError, http_status

# The page comes from FastAPI, its script and style from files of this machine. A script within the page is allowed by
# its hash, which is made from the same text: whatever else a browser found in the page would not run.

DOCS_PATH = "/docs"
ASSETS_PATH = "/static-offline-docs"

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@functools.cache
def docs_page() -> tuple[str, str]:
    """Returns the page as text, and its Content-Security-Policy."""
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="toolbus - Swagger UI",
        swagger_js_url=f"{ASSETS_PATH}/swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS_PATH}/swagger-ui.css",
        swagger_favicon_url=f"{ASSETS_PATH}/favicon.png",
    )
    html = bytes(page.body).decode()
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()) for script in _SCRIPT.findall(html)]
    scripts = " ".join(f"'sha256-{each.decode()}'" for each in hashes)
    rules = (
        "default-src 'none'",
        f"script-src 'self' {scripts}",
        "style-src 'self' 'unsafe-inline'",  # Swagger UI sets style attributes
        "img-src 'self' data:",  # its icons
        "connect-src 'self'",  # what its forms send
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return html, "; ".join(rules)


log = logging.getLogger("toolbus.http")

MAX_ECHO = 1024  # characters of a refused text that its error repeats
# A body `null` counts as none (REST-2).
MISSING = {"type": "missing", "loc": ["body"], "msg": "Field required", "input": None}
SECRET = "callback_secret"  # a field that no answer repeats
_SECRET = re.compile(rf"({SECRET}\W{{0,8}})[^\s\"'&,}}]+")  # the same in a body that was not read as JSON
_DESCRIPTION = """
Tools for language models, registered with a callback URL by plugins of any language and called by hosts.

Programs that can use gRPC have more: one connection that registers tools and runs them. Other machines need a key
(HTTPS).
"""


@runtime_checkable
class HttpLayer(Protocol):
    """What a room provides to stand around the whole application."""

    def around(self, application: ASGIApp) -> ASGIApp:
        """Returns the application with it."""


def application(parts: GatewayParts) -> ASGIApp:
    """Returns the application over one bus."""
    endpoints = endpoints_of(parts.core.rooms.routes())
    plain = PlainRequests(endpoints, parts, _internal_error)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        application = core.rooms.web.find(scope["path"]) if scope["type"] == "http" else None
        if application is not None:
            await application(scope, receive, send)
            return
        scope[SCOPE_KEY] = parts
        await plain(scope, receive, send)

    core = parts.core
    limit = core.config.limits.http_body_bytes
    guarded: ASGIApp = AccessGuard(
        Admission(serve), limit, core.sessions.neighbours, parts.remote, core.audit, core.calls.dispatcher.seams
    )
    for layer in core.rooms.providers(HttpLayer):
        guarded = layer.around(guarded)
    return guarded


def _describe(app: FastAPI) -> None:
    """Adds the description of every endpoint. FastAPI's own writes it anew for each request, in 10 ms."""
    writing = threading.Lock()  # once, in 0.1 s
    app.router.routes[:] = [each for each in app.router.routes if getattr(each, "path", "") != app.openapi_url]

    @functools.cache
    def document() -> bytes:
        return json.dumps(app.openapi()).encode()

    def described() -> bytes:
        with writing:
            return document()

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """Describes every endpoint."""
        return Response(await asyncio.to_thread(described), media_type="application/json")


@functools.lru_cache
def endpoints_of(homes: tuple[str, ...]) -> FastAPI:
    """Returns the endpoints, which all buses share: building them takes a third of a second.

    Args:
        homes: those of rooms (`Room.routes`).
    """
    app = FastAPIOffline(
        title="toolbus",
        summary="A tool bus for LLM applications",
        description=_DESCRIPTION,
        version=VERSION,
        docs_url=None,  # below: `FastAPIOffline` is here for the files that the page loads
        redoc_url=None,
        static_url=ASSETS_PATH,
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
        exception_handlers={
            RequestValidationError: _validation_response,
            ToolBusError: _error_response,
            Exception: _internal_error,
        },
    )

    @app.get(DOCS_PATH, include_in_schema=False)
    async def docs() -> Response:
        """Shows every endpoint with a form to try it."""
        return HTMLResponse(docs_page()[0])

    _describe(app)

    @app.head("/healthz", include_in_schema=False)  # some probes ask with HEAD
    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """Says that the process runs."""
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["health"], responses={503: {"description": "The bus is draining."}})
    async def readyz(request: Request) -> Response:
        """Says whether calls are taken."""
        ready = parts_of(request).core.takes_calls
        return JSONResponse({"status": "ready" if ready else "draining"}, status_code=200 if ready else 503)

    for routes in (tool_routes, catalog_event_routes, call_routes, notification_routes):
        app.include_router(routes.router())
    for home in homes:
        app.include_router(load(home)())
    return app


# -- exceptions become HTTP ----------------------------------------------------------------------------------------


async def _validation_response(request: Request, error: Exception) -> Response:
    """Returns the 422 for a request that breaks rules (REST-2)."""
    assert isinstance(error, RequestValidationError)
    faults = [
        MISSING
        if fault["type"] == "model_attributes_type" and fault["input"] is None and len(fault["loc"]) == 1
        else {key: _echo(value) for key, value in {**fault, **_hidden(fault)}.items() if key != "url"}
        for fault in error.errors()
    ]
    return _response(422, {"detail": faults})


def _hidden(fault: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the replacement of a fault's input where that is a secret."""
    return {"input": "***"} if SECRET in fault["loc"] else {}


async def _error_response(request: Request, error: Exception) -> Response:
    """Returns the response to a request that the bus refuses on purpose."""
    status = http_status(error)
    if status == 500:
        return await _internal_error(request, error)
    if isinstance(error, NotPermitted):
        principal, target = Principal(SOURCE, identity=request.scope[IDENTITY]), f"{request.method} {request.url.path}"
        parts_of(request).core.audit.record("denied", principal, target=target, outcome="refused", why=str(error))
    return _response(status, {"detail": mask(str(error))})


async def _internal_error(request: Request, error: Exception) -> Response:
    log.error("internal error method=%s path=%.80r", request.method, request.url.path, exc_info=error)
    return _response(500, {"detail": INTERNAL_DETAIL})


def _response(status: int, content: Mapping[str, Any]) -> Response:
    body = json.dumps(content, separators=(",", ":"))  # ASCII: what is echoed may hold half of a surrogate pair
    return Response(body, status_code=status, media_type="application/json")


def _echo(value: Any, depth: int = 0) -> Any:
    """Returns a part of a request as an error may repeat it: short, in JSON types, without passwords (REST-8)."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        # A form, where JSON was meant, hides colon and @ behind percent signs.
        text = unquote_plus(value) if "%3a" in value.lower() else value
        return shorten(_SECRET.sub(r"\1***", mask(text)), MAX_ECHO)
    if depth > 8:
        return "…"
    if isinstance(value, Mapping):
        shown = ((key, "***" if key == SECRET else each) for key, each in list(value.items())[:64])
        return {shorten(mask(str(key)), MAX_ECHO): _echo(each, depth + 1) for key, each in shown}
    if isinstance(value, Sequence):
        return [_echo(each, depth + 1) for each in value[:64]]
    return {}  # an exception, as FastAPI itself shows one
