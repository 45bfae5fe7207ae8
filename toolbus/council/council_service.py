"""Offers the council of a bus to programs without Python, in JSON's own types: runs, retries, events.

It owns one council with its history and retained runs, the newest runs for retries, and the watchers. The HTTP gateway
passes requests in and results out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

from toolbus.cancellation import is_being_cancelled
from toolbus.council.available_tools import no_model
from toolbus.council.council import Council
from toolbus.council.council_events import CouncilEvent, OnEvent
from toolbus.council.council_file import CouncilFile
from toolbus.council.council_history import CouncilHistory
from toolbus.council.council_run import FinishedRun, RunRequest
from toolbus.council.council_settings import CouncilSettings
from toolbus.council.council_watcher import Watcher
from toolbus.council.deliberation import Deliberation
from toolbus.council.inline_tools import InlineTools
from toolbus.council.scene import Scene, context_messages, message_of
from toolbus.dialects.wire_names import NameRule
from toolbus.errors import InvalidRequest, PeerLost, SetupError
from toolbus.functions.call_context import CallContext
from toolbus.newest import NewestCacheBySize
from toolbus.text import quote
from toolbus.tool import MIB

MAX_RUNS = 100  # that can be retried
MAX_CHARACTERS = 32 * MIB  # of these runs; the newest stays even if it has more
MAX_IGNORED = 20  # keys that a response names
_INLINE = (
    "the mode is inline: the main model calls the tools itself: POST /api/council/inline offers them, in Python "
    "toolbus.council.InlineTools"
)
_ALL_SKIPPED = "no tool of the members that take part exists: see skipped for the reasons"

log = logging.getLogger("toolbus.extension")

Body = Mapping[str, Any]
OnJsonEvent = Callable[[Body], object]  # called with events in JSON's form
Start = Callable[[OnJsonEvent | None], Awaitable[dict[str, Any]]]
T = TypeVar("T")


class CouncilService:
    """Runs the council of a bus for its clients. Belongs to one event loop."""

    def __init__(
        self, tools: Any, council_file: CouncilFile | None = None, *, max_characters: int = MAX_CHARACTERS
    ) -> None:
        """Creates a service.

        Args:
            tools: as for `Council`.
            council_file: the parts of the council; None means no members, no model, and the bundled prompt tools.
            max_characters: of the runs that can be retried.

        Raises:
            SetupError: as for `Council`.
        """
        council_file = council_file or CouncilFile()
        self._sidecar = council_file.sidecar
        self._has_model = council_file.model is not None
        self._council = Council(
            tools,
            council_file.settings,
            model=council_file.model,
            sidecar=council_file.sidecar,
            prompt_tools=council_file.prompt_tools,
            history=CouncilHistory(),
        )
        self._runs = NewestCacheBySize[str, FinishedRun](MAX_RUNS, max_characters, lambda run: run.characters)  # by id
        self._watchers: set[Watcher] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @classmethod
    def of_file(cls, tools: Any, path: Path | None) -> Self:
        """Creates the service of a council file; None means without one.

        Raises:
            SetupError: names the file and its error.
        """
        if path is None:
            return cls(tools)
        council_file = CouncilFile.load(path)
        try:
            return cls(tools, council_file)
        except SetupError as error:
            raise SetupError(f"{path}: {error}") from None

    def __repr__(self) -> str:
        counts = f"runs={len(self._runs)} running={len(self._running)} watchers={len(self._watchers)}"
        return f"<CouncilService {self._council!r} {counts}>"

    def described(self) -> dict[str, Any]:
        """Returns the current settings and members, in the form that a run takes."""
        settings = _fields_of(self._council.settings)
        members = settings.pop("members")
        reason = "" if self._has_model else no_model(self._sidecar)
        return {
            "settings": settings,
            "members": [_fields_of(member) for member in members],
            "sidecar": {**_fields_of(self._sidecar), "available": self._has_model, "reason": reason},
        }

    async def tools(self, user_id: str = "", attributes: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Returns the tools that can be assigned to members, on behalf of a user."""
        return [tool.described() for tool in await self._council.available(user_id, attributes or {})]

    def begin(self, body: Body) -> Start:
        """Checks a request. Returns a function that runs the council.

        Args:
            body: `messages`; optional are `chat_id`, `persona`, `character`, `world_info`, `user_id`, `attributes`,
                `members` and `settings` (instead of the current ones), `regenerates`; under `unknown` the names of the
                request's other keys.

        Raises:
            SetupError: names the error in members or settings, and its place in the body.
        """
        chat_id = body.get("chat_id", "")
        ignored = _shown_keys(body.get("unknown", ()))
        request = RunRequest(
            # Without the name of a chat, clients would get each other's earlier results.
            council=self._changed(body, ignored, remembers=bool(chat_id)),
            messages=tuple(message_of(each) for each in body["messages"]),
            scene=Scene(chat_id, *(body.get(name, "") for name in ("persona", "character", "world_info"))),
            user_id=body.get("user_id", ""),
            attributes=body.get("attributes") or {},
            regenerates=body.get("regenerates", False),
            ignored=tuple(ignored[:MAX_IGNORED]),
        )
        if ignored:
            log.warning("a council request: unknown keys are ignored: %s", ", ".join(request.ignored))
        return partial(self._run, request)

    def begin_retry(
        self, run_id: str, only: Iterable[tuple[str, str]] | None = None, unknown: Iterable[str] = ()
    ) -> Start | None:
        """Checks a retry. Returns a function that runs the failed tools again; None for an unknown run.

        Args:
            only: which of the failed tools, as (member id, tool); None means all.
            unknown: names of unknown keys of the request.

        Raises:
            SetupError: `only` is empty or names a tool that did not fail.
        """
        if (run := self._runs.get(run_id)) is None:
            return None
        chosen = None if only is None else tuple(only)
        try:
            run.deliberation.chosen(chosen)
        except SetupError as error:
            raise SetupError(str(error), ("only",)) from None
        return partial(self._retry, run, chosen, tuple(_shown_keys(unknown)))

    def inline(self, body: Body, rule: NameRule) -> tuple[InlineTools, CallContext, list[str]]:
        """Returns the members' tools for the main model, the context of its calls, and the request's unknown keys.

        Args:
            body: `members` and `settings` instead of the current ones, `messages`, `persona`, `character`,
                `world_info`, `user_id`, `attributes`, and `unknown`, all optional.
            rule: which names the model's provider accepts.

        Raises:
            SetupError: names the error in members or settings, and its place in the body.
        """
        ignored = _shown_keys(body.get("unknown", ()))
        council = self._changed(body, ignored, remembers=False)
        user_id, attributes = body.get("user_id", ""), body.get("attributes") or {}
        scene = Scene("", *(body.get(name, "") for name in ("persona", "character", "world_info")))
        messages = context_messages(body.get("messages") or (), council.settings, scene)
        context = CallContext(user_id=user_id, attributes=attributes, messages=messages)
        try:
            return council.inline(user_id, attributes, rule=rule), context, ignored[:MAX_IGNORED]
        except InvalidRequest as error:
            raise SetupError(str(error), ("members",)) from None

    def find(self, run_id: str) -> dict[str, Any] | None:
        """Returns the result of a run; None for an unknown run."""
        run = self._runs.get(run_id)
        return _response(run.deliberation) if run is not None else None

    def runs(self) -> list[dict[str, Any]]:
        """Returns an entry for each stored run, the newest first."""
        runs = sorted(self._runs.values(), key=lambda run: run.ended, reverse=True)
        return [run.described() for run in runs]

    def watch(self, chat_id: str = "") -> Watcher:
        """Returns the events of all chats, or of one, from now on; the caller closes it."""
        watcher = Watcher(chat_id, self._watchers.discard)
        self._watchers.add(watcher)
        if self._closed:
            watcher.close()
        return watcher

    def close(self) -> None:
        """Cancels the runs and closes the watchers; may be called again."""
        self._closed = True
        for task in self._running:
            task.cancel()
        for watcher in tuple(self._watchers):
            watcher.close()

    # -- runs --------------------------------------------------------------------------------------------------------

    async def _run(self, request: RunRequest, on_event: OnJsonEvent | None) -> dict[str, Any]:
        deliberation = await self._unless_closed(
            request.council.run(
                request.messages,
                scene=request.scene,
                user_id=request.user_id,
                attributes=request.attributes,
                regenerates=request.regenerates,
                on_event=self._publisher(on_event),
            )
        )
        if deliberation is not None:
            self._runs[deliberation.run_id] = FinishedRun(request, deliberation)
            return _response(deliberation, request.ignored)
        inactive = {"ok": True, "active": False, "results": [], "reason": _inactive_reason(request.council.settings)}
        return _with_ignored(inactive, request.ignored)

    async def _retry(
        self,
        run: FinishedRun,
        only: tuple[tuple[str, str], ...] | None,
        ignored: tuple[str, ...],
        on_event: OnJsonEvent | None,
    ) -> dict[str, Any]:
        request = run.request
        async with run.retry_lock:
            if only is not None:  # another retry may have succeeded meanwhile
                failed = run.deliberation.chosen(None)
                only = tuple(pair for pair in only if pair in failed)
                if not only:
                    return _response(run.deliberation, ignored)
            run.deliberation = await self._unless_closed(
                request.council.retry(
                    run.deliberation,
                    request.messages,
                    only,
                    scene=request.scene,
                    user_id=request.user_id,
                    attributes=request.attributes,
                    on_event=self._publisher(on_event),
                )
            )
            self._runs[run.deliberation.run_id] = run
            return _response(run.deliberation, ignored)

    def _changed(self, body: Body, ignored: list[str], *, remembers: bool) -> Council:
        """Returns the council with the settings and members of a request.

        Args:
            ignored: gets the places of unknown keys.

        Raises:
            SetupError: as for `begin`.
        """
        changes = dict(body.get("settings") or {})
        for key in changes:
            if str(key).lower() == "members":
                rule = "settings: members are a field of the body, not of the settings: move them there"
                raise SetupError(rule, ("settings", key))
        if body.get("members") is not None:
            changes["members"] = body["members"]
        unknown: list[str] = []
        try:
            council = self._council.changed(self._council.settings.changed(changes, unknown), remembers=remembers)
        except SetupError as error:
            if error.loc[:1] != ("members",):
                error.loc = "settings", *error.loc
            raise
        ignored += sorted(
            (key if key.startswith("members[") else f"settings.{key}" for key in unknown),
            key=lambda key: key.startswith("members["),
        )
        return council

    async def _unless_closed(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine that `close` cancels.

        Raises:
            PeerLost: the service was closed.
        """
        task = asyncio.ensure_future(work)
        self._running.add(task)
        if self._closed:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed and not is_being_cancelled():
                raise PeerLost("the bus stopped, and the run with it: try again when the bus is back") from None
            raise
        finally:
            self._running.discard(task)

    def _publisher(self, on_event: OnJsonEvent | None) -> OnEvent:
        """Returns the handler that sends each event to the watchers and to the client of the run."""

        def publish(event: CouncilEvent) -> object:
            body = event.described()
            for watcher in self._watchers:
                watcher.put(body)
            return on_event(body) if on_event is not None else None

        return publish


def _response(deliberation: Deliberation, ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    response = {"ok": True, "active": bool(deliberation.outcomes), **deliberation.described()}
    if not deliberation.outcomes:
        response["reason"] = _ALL_SKIPPED
    return _with_ignored(response, ignored)


def _with_ignored(response: dict[str, Any], ignored: tuple[str, ...]) -> dict[str, Any]:
    return {**response, "ignored": list(ignored)} if ignored else response


def _inactive_reason(settings: CouncilSettings) -> str:
    """Returns why no member took part, a sentence."""
    if settings.mode == "inline":
        return _INLINE
    if not settings.members:
        return "the council has no members: give the run some, or the council file"
    if not any(member.tools for member in settings.members):
        return "no member has tools: assign some"
    return "the dice chose no member: a member takes part as often as its chance says"


def _shown_keys(names: Iterable[str]) -> list[str]:
    """Returns keys for a message: limited in number and length, and without line ends."""
    return [quote(name)[1:-1] for name in islice(names, MAX_IGNORED)]


def _fields_of(record: Any) -> dict[str, Any]:
    """Returns a record's fields by name, as its reader takes them."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
