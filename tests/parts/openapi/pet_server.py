"""A real API on loopback, with the document that FastAPI writes for it; ``pet_server.py PORT`` serves it alone."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import Body, Cookie, Depends, FastAPI, File, Form, Header, HTTPException, Query, Request, UploadFile
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from fastapi.security import APIKeyHeader, APIKeyQuery
from pydantic import BaseModel

from tests.support.waiting import WAIT_SECONDS

KEY = "k-7f3a9c51"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


class Owner(BaseModel):
    name: str
    pets: list[Pet] = []


class Pet(BaseModel):
    name: str
    weight: float | None = None
    owner: Owner | None = None  # which has pets: the schema contains itself


class State:
    """What tests look at: slow requests that have begun, and those whose client left."""

    begun = threading.Event()
    left = threading.Event()


app = FastAPI(title="Pet Shop", version="1")


@app.get("/pets", operation_id="listPets", tags=["pets"])
def list_pets(
    tags: Annotated[list[str], Query()] = [],  # noqa: B006  # as FastAPI's documentation writes it
    limit: int = 10,
    x_trace: Annotated[str | None, Header()] = None,
    visit: Annotated[str | None, Cookie()] = None,
) -> dict[str, Any]:
    """Lists the pets."""
    return {"tags": tags, "limit": limit, "trace": x_trace, "visit": visit}


@app.get("/pets/{pet_id}", operation_id="getPet", tags=["pets"])
def get_pet(pet_id: str) -> dict[str, str]:
    if pet_id == "none":
        raise HTTPException(404, f"no pet {pet_id}")
    return {"id": pet_id}


@app.get("/pets/{pet_id}/secret", operation_id="getSecret")
def get_secret(pet_id: str) -> str:
    return "seen"


@app.post("/pets", operation_id="addPet", status_code=201)
def add_pet(pet: Pet) -> Pet:
    return pet


@app.delete("/pets/{pet_id}", operation_id="deletePet", status_code=204)
def delete_pet(pet_id: str) -> None: ...


@app.post("/form", operation_id="sendForm")
def send_form(name: Annotated[str, Form()], times: Annotated[int, Form()]) -> dict[str, Any]:
    return {"name": name, "times": times}


@app.post("/files", operation_id="sendFile")
async def send_file(file: Annotated[UploadFile, File()], note: Annotated[str, Form()] = "") -> dict[str, Any]:
    return {"filename": file.filename, "size": len(await file.read()), "note": note}


@app.post("/text", operation_id="sendText")
def send_text(words: Annotated[str, Body(media_type="text/plain")]) -> str:
    return words


@app.get("/locked", operation_id="readLocked")
def read_locked(key: Annotated[str, Depends(APIKeyHeader(name="X-Key", scheme_name="byHeader"))]) -> str:
    if key != KEY:
        raise HTTPException(401, f"the key {key} is not known")
    return "open"


@app.get("/locked-query", operation_id="readLockedQuery")
def read_locked_query(key: Annotated[str, Depends(APIKeyQuery(name="key", scheme_name="byQuery"))]) -> bool:
    return key == KEY


@app.get("/picture", operation_id="getPicture")
def get_picture() -> Response:
    return Response(PNG, media_type="image/png")


@app.get("/large", operation_id="getLarge")
def get_large() -> PlainTextResponse:
    return PlainTextResponse("x" * 3_000_000)


@app.get("/busy", operation_id="getBusy")
def get_busy() -> Response:
    return Response("come back", 429, {"Retry-After": "7"}, "text/plain")


@app.get("/moved", operation_id="getMoved")
def get_moved(to: str) -> RedirectResponse:
    return RedirectResponse(to)


@app.get("/slow", operation_id="getSlow")
async def get_slow(request: Request) -> str:
    State.begun.set()
    while not await request.is_disconnected():
        await asyncio.sleep(0.01)
    State.left.set()
    return ""


Owner.model_rebuild()


@contextmanager
def pet_shop(port: int = 0) -> Iterator[str]:
    """Serves the API on a thread; yields its URL."""
    listening = socket.create_server(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), name="pet shop", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
