"""Leads from the root of the HTTP port to the console, or says that it is off."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from toolbus.bus.gateway.gateway_parts import parts_of
from toolbus.parts.console.settings import ConsoleSettings

_OFF = "this is the HTTP port of a toolbus; its console is off: drop console = false from its configuration"


def router() -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def root(request: Request) -> Response:
        if parts_of(request).core.config.part(ConsoleSettings).console:
            return RedirectResponse("/console/")
        return JSONResponse({"detail": _OFF}, 404)

    return routes
