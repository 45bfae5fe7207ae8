"""Serves recorded answers of a model on loopback over real HTTP, and records the requests.

They were written down after what each provider documents and what users of each server report, shortened, with ids of
our own; none was captured from a provider. The first line of each file says after what.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

Json = dict[str, Any]

FOLDER = Path(__file__).parent / "recorded"
FLAVOURS = tuple(sorted(file.stem for file in FOLDER.glob("*.jsonl")))
CONTENT_TYPES = {"sse": "text/event-stream", "named sse": "text/event-stream", "ndjson": "application/x-ndjson"}


@dataclass(frozen=True)
class Recording:
    """How one server writes a call (``one``), ``two`` calls, and the ``text`` of a last answer.

    Attributes:
        origin: where it comes from.
        flavour: what is particular about it.
        path: where the server expects requests.
        frames: how events are written: ``sse``, ``named sse`` or ``ndjson``.
        last: what follows the last event; "" where nothing does.
        refusal: status and body with which it says that it takes no tools.
        ids: of the two calls; empty where it gives none.
        goes_back: objects that the request after a call has to hold, each with at least these keys.
        answers: the events of each answer, by its name.
    """

    dialect: str
    origin: str
    flavour: str
    path: str
    frames: str
    last: str
    refusal: Json
    ids: list[str]
    goes_back: list[Json]
    answers: dict[str, list[Json]] = field(default_factory=dict)

    @classmethod
    def read(cls, flavour: str) -> Recording:
        head, *lines = map(json.loads, (FOLDER / f"{flavour}.jsonl").read_text("utf-8").splitlines())
        recording = cls(**head)
        for line in lines:
            recording.answers.setdefault(line["answer"], []).append(line["event"])
        return recording

    def written(self, answer: str) -> Iterator[bytes]:
        """Yields an answer as it stands on the wire, event by event."""
        for event in self.answers[answer]:
            text = json.dumps(event, ensure_ascii=False)
            match self.frames:
                case "sse":
                    yield f"data: {text}\n\n".encode()
                case "named sse":
                    yield f"event: {event['type']}\ndata: {text}\n\n".encode()
                case _:
                    yield f"{text}\n".encode()
        if self.last:
            yield f"data: {self.last}\n\n".encode()


@dataclass(frozen=True)
class Breaks:
    """An answer of which only the first events are sent; then the server says nothing more, is gone, or ends it."""

    answer: str
    events: int
    how: Literal["hangs", "dies", "ends"]


@dataclass(frozen=True)
class Refuses:
    """An answer that is an error."""

    status: int
    body: Any


Step = str | Breaks | Refuses


class ModelServer:
    """Answers each request with the next step: the name of an answer, `Breaks` or `Refuses`."""

    def __init__(self, recording: Recording, *steps: Step) -> None:
        self.recording = recording
        self.steps = list(steps)
        self.requests: list[Json] = []
        self.url = ""  # until it listens
        self.hanging = asyncio.Event()  # it has stopped in the middle of an answer
        self.left = asyncio.Event()  # the client closed the connection meanwhile

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body: Json = await request.json()
        self.requests.append(body)
        if not self.steps:
            return web.json_response({"error": {"message": "the model was asked once too often"}}, status=410)
        step = self.steps.pop(0)
        if isinstance(step, Refuses):
            return web.json_response(step.body, status=step.status)
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPES[self.recording.frames]})
        await response.prepare(request)
        name, most = (step, None) if isinstance(step, str) else (step.answer, step.events)
        for event in list(self.recording.written(name))[:most]:
            await response.write(event)
        if isinstance(step, Breaks) and step.how != "ends":
            await self._break(request, step)
        else:
            await response.write_eof()
        return response

    async def _break(self, request: web.Request, step: Breaks) -> None:
        if step.how == "dies":
            assert request.transport is not None
            request.transport.abort()
            return
        self.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


@asynccontextmanager
async def serving(flavour: str, *steps: Step) -> AsyncIterator[ModelServer]:
    """Runs a server on a free port."""
    server = ModelServer(Recording.read(flavour), *steps)
    application = web.Application()
    application.router.add_post(server.recording.path, server.answer)
    # Cancelled when the client hangs up, which is how a server notices that nobody reads.
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()


def holds(value: Any, expected: Mapping[str, Any]) -> bool:
    """Tells whether JSON holds, at any depth, an object with at least the wanted keys."""
    if isinstance(value, dict):
        return all(value.get(key) == each for key, each in expected.items()) or any(
            holds(each, expected) for each in value.values()
        )
    return isinstance(value, list) and any(holds(each, expected) for each in value)
