"""The parts of the bus that the HTTP application reaches, handed to it by whoever wires the rooms."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from toolbus.bus.callback_url import CallbackUrl
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.changes import CatalogChanges
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.gateway.registrations import Registrations
from toolbus.bus.streams.withdrawal import Withdrawal
from toolbus.tool import Limits, Progress, Result
from toolbus.v1 import tool_pb2 as pb

SOURCE = "http"  # whose the calls over HTTP are


class Asker(Protocol):
    """Makes calls for one request; cancelling the wait cancels the call."""

    async def call(self, call: pb.ToolCall, on_progress: Callable[[Progress], object] | None = None) -> Result: ...


class Task(Protocol):
    """A call that outlived its caller's patience, as it is now."""

    @property
    def task_id(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def running(self) -> bool: ...
    @property
    def started(self) -> float: ...
    @property
    def ended(self) -> float | None: ...
    @property
    def result(self) -> Result | None: ...
    def described(self, now: float) -> dict[str, Any]: ...


class TaskEvents(Protocol):
    """Tasks as they end; closed by whoever asked for them."""

    def __aiter__(self) -> AsyncIterator[Task]: ...
    def close(self) -> None: ...


class Tasks(Protocol):
    """The tasks of the bus. Somebody else's task is as if there were none: None, or False."""

    def now(self) -> float: ...
    def list_tasks(self, user_id: str) -> Sequence[Task]: ...
    def get_result(self, task_id: str, user_id: str | None = None) -> Task | None: ...
    async def await_result(self, task_id: str, timeout: float = ..., user_id: str | None = None) -> Task | None: ...
    def cancel(self, task_id: str, user_id: str | None = None) -> bool: ...
    def set_output_redirect(self, task_id: str, target: str | None, user_id: str | None = None) -> bool: ...
    def events(self, user_id: str | None = None, *, results: bool = True) -> TaskEvents: ...


# A run that was asked for and begins when it is called; it is told whom to tell of events.
CouncilRun: TypeAlias = Callable[[Callable[[Mapping[str, Any]], object] | None], Awaitable[dict[str, Any]]]


class CouncilEvents(Protocol):
    """What councils do, as it happens; closed by whoever asked for it."""

    def __aiter__(self) -> AsyncIterator[Mapping[str, Any]]: ...
    def close(self) -> None: ...


class Council(Protocol):
    """The council of the bus, in JSON's own types. A run that is not kept is None."""

    def described(self) -> dict[str, Any]: ...
    async def tools(self, user_id: str, attributes: Mapping[str, str]) -> list[dict[str, Any]]: ...
    def begin(self, said: Mapping[str, Any]) -> CouncilRun: ...
    def begin_retry(
        self, run_id: str, only: Iterable[tuple[str, str]] | None, unknown: Iterable[str]
    ) -> CouncilRun | None: ...
    def find(self, run_id: str) -> dict[str, Any] | None: ...
    def watch(self, chat_id: str) -> CouncilEvents: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What the application asks of the bus.

    Attributes:
        view: what is shown of the registry, to whom.
        registrations: where tools with a callback URL are registered.
        withdrawal: where tools are unregistered and cleared.
        own: where the application is served: a callback there would call itself.
        asker: makes an asker for one request, with or without the right to call the bus's own tools.
        watch: yields the changes of the catalog since a revision.
        is_running: whether a source is attached, or has tools that are online.
        ready: whether the bus takes calls.
        ending: whether the bus stops, and with it every stream of events.
        task_owner: returns whose tasks those of a user are; with "" those of programs that name none over HTTP.
    """

    registry: Registry
    view: CatalogView
    registrations: Registrations
    withdrawal: Withdrawal
    limits: Limits
    own: CallbackUrl
    asker: Callable[[bool], Asker]
    watch: Callable[[int], AsyncIterator[CatalogChanges]]
    is_running: Callable[[str], bool]
    ready: Callable[[], bool]
    ending: Callable[[], bool]
    records: CallRecords
    tasks: Tasks
    task_owner: Callable[[str], str]
    council: Council
