"""The drop-in file of the contract suite: passes each call on to the test's process, which runs its `Work` there.

`DropinOffer` writes this text into a folder, with a line below it that says what is offered and where the test listens.
So everything that a tool file does by itself is done in its own sandboxed process: being loaded and offered, arguments
in, progress, cancels, answers and exceptions out. It imports nothing of the tests, which it may not read.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from toolbus.sdk import ToolScope

LOOK_SECONDS = 0.02  # how often a plain function looks whether its call was taken back


class Link:
    """The connection to the test's process: one for all calls, since open files are limited."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._writing = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[ToolScope, Future[Any]]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def __repr__(self) -> str:
        return f"<Link calls={len(self._calls)}>"

    def begin(self, scope: ToolScope, arguments: dict[str, Any]) -> tuple[int, Future[Any]]:
        """Passes a call on; returns its number and what it will answer."""
        number, future = next(self._numbers), Future[Any]()
        self._calls[number] = scope, future
        self._send("call", number, scope.tool, arguments, scope.context.to_wire().SerializeToString())
        return number, future

    def cancel(self, number: int) -> None:
        """Passes on that a call was taken back."""
        self._send("cancel", number)

    async def answer(self, number: int, future: Future[Any]) -> Any:
        """Waits for the answer of a call, as async functions do."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self.cancel(number)
            raise

    def _send(self, *message: Any) -> None:
        text = pickle.dumps(message)
        with self._writing:
            self._socket.sendall(len(text).to_bytes(4, "big") + text)

    def _read(self) -> None:
        with self._socket.makefile("rb") as stream:
            while head := stream.read(4):
                number, what, value = pickle.loads(stream.read(int.from_bytes(head, "big")))
                self._take(number, what, value)

    def _take(self, number: int, what: str, value: Any) -> None:
        scope, future = self._calls[number]
        if what == "progress":
            step, more = value
            scope.progress(step, **more)
            return
        del self._calls[number]
        if what == "later":
            value = self._calls[number] = scope, Future[Any]()
        if not future.set_running_or_notify_cancel():
            return
        if what == "raised":
            future.set_exception(value)
        else:
            future.set_result(value[1] if what == "later" else value)


def tools(port: int, works: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools of the file; of each work, `is_async` chooses the kind of function."""
    link = Link(port)

    async def run_async(ctx: ToolScope, **arguments: Any) -> Any:
        return await link.answer(*link.begin(ctx, arguments))

    def run_plain(ctx: ToolScope, **arguments: Any) -> Any:
        number, future = link.begin(ctx, arguments)
        reported = False
        while True:
            try:
                returned = future.result(LOOK_SECONDS)
                break
            except TimeoutError:
                if future.done():
                    raise
                if ctx.is_cancelled and not reported:
                    link.cancel(number)
                    reported = True
        return link.answer(number, returned) if isinstance(returned, Future) else returned

    handlers = {True: run_async, False: run_plain}
    return [
        {key: value for key, value in work.items() if key != "is_async"} | {"handler": handlers[work["is_async"]]}
        for work in works
    ]
