"""Offers the council of a bus to programs without Python, in JSON's own types: runs, retries, events.

It owns one council with its history and retained runs, the newest runs for retries, and the watchers. The HTTP gateway
passes requests in and results out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

from toolbus.common.cancellation import is_being_cancelled
from toolbus.common.mailbox import Mailbox
from toolbus.common.newest import NewestCacheBySize
from toolbus.common.reader import Reader, read_file
from toolbus.common.text import quote
from toolbus.errors import InvalidRequest, PeerLost, SetupError
from toolbus.functions.call_context import CallContext, ContextMessage
from toolbus.parts.council.council import Council
from toolbus.parts.council.deliberation import (
    CouncilEvent,
    CouncilHistory,
    Deliberation,
    OnEvent,
    Scene,
    context_messages,
    message_of,
)
from toolbus.parts.council.inline_tools import InlineTools
from toolbus.parts.council.prompt_tool import PromptTool, bundled_prompt_tools, read_prompt_tools
from toolbus.parts.council.settings import API_KEY_VARIABLE, CouncilSettings, SidecarSettings
from toolbus.parts.council.sidecar import LanguageModel, sidecar_model
from toolbus.parts.council.tool_runner import no_model
from toolbus.parts.models.dialects.wire_names import NameRule
from toolbus.protocol.tool import MIB


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run as a client requested it.

    Attributes:
        council: with the settings and members of this run.
        ignored: the unknown keys of the request.
    """

    council: Council
    messages: tuple[ContextMessage, ...]
    scene: Scene
    user_id: str
    attributes: Mapping[str, str]
    regenerates: bool
    ignored: tuple[str, ...]


@dataclass(slots=True)
class FinishedRun:
    """A run that has ended.

    Attributes:
        deliberation: replaced by each retry.
        retry_lock: held by a running retry, so that two retries do not overwrite each other's outcomes.
        ended: when the first run ended, in seconds since the epoch.
    """

    request: RunRequest
    deliberation: Deliberation
    retry_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: float = field(default_factory=time.time)

    def described(self) -> dict[str, Any]:
        """Returns the entry of a list of runs, without results."""
        run = self.deliberation
        members = [outcome.member_name for outcome in run.outcomes] or [skipped.member_id for skipped in run.skipped]
        return {
            "runId": run.run_id,
            "chatId": self.request.scene.chat_id,
            "ended": round(self.ended, 3),
            "members": list(dict.fromkeys(members)),
            "totalDurationMs": round(run.seconds * 1000),
            "successCount": len(run.outcomes) - len(run.failed),
            "failedCount": len(run.failed),
            "skippedCount": len(run.skipped),
        }

    @property
    def characters(self) -> int:
        """The number of characters that it holds in memory."""
        request = self.request
        texts = [each.content for each in request.messages]
        texts += [request.scene.persona, request.scene.character, request.scene.world_info]
        texts += request.attributes.values()
        for member in request.council.settings.members:
            texts += [member.role, member.definition, member.personality, member.behavior, *member.tools]
        return sum(map(len, texts)) + self.deliberation.characters


MAX_WAITING = 100  # events that one watcher has not read yet
LOST = "COUNCIL_EVENTS_LOST"


class Watcher(Mailbox[Mapping[str, Any]]):
    """The events of all chats or of one, as they happen, in JSON's form. Iterate over it, and close it at the end.

    A watcher that is too slow loses the oldest events. It gets an event `LOST` with their count before the next event.
    """

    def __init__(self, chat_id: str, on_close: Callable[[Watcher], object]) -> None:
        """Creates a watcher.

        Args:
            chat_id: of the events; "" means all chats.
            on_close: called when it is closed.
        """
        super().__init__(
            MAX_WAITING,
            on_close=lambda: on_close(self),
            on_lost=lambda count: {"event": LOST, "chatId": chat_id, "count": count},
        )
        self._chat_id = chat_id

    def put(self, item: Mapping[str, Any]) -> int:
        """Adds an event of the watcher's chat; others are ignored."""
        return super().put(item) if self._chat_id in ("", item["chatId"]) else 0


# The file is TOML or JSON. `settings.py` reads members and settings, `sidecar.py` the model's settings. The model's API
# key comes from the environment and never from a file.

_SIDECARS = ("sidecar", "sidecarSettings", "sidecar_settings")
_TOOLS_SETTINGS = ("toolsSettings", "tools_settings")


@dataclass(frozen=True, slots=True)
class CouncilFile:
    """The parts of a council.

    Attributes:
        sidecar: the settings of the model.
        model: None if the settings name no model.
        prompt_tools: those of files, then the bundled ones, which are used if a name occurs twice.
    """

    settings: CouncilSettings = field(default_factory=CouncilSettings)
    sidecar: SidecarSettings = field(default_factory=SidecarSettings)
    model: LanguageModel | None = field(default=None, repr=False)
    prompt_tools: tuple[PromptTool, ...] = field(default_factory=bundled_prompt_tools, repr=False)

    @classmethod
    def load(cls, path: Path, environ: Mapping[str, str] = os.environ) -> CouncilFile:
        """Reads a file, and the files that it names.

        Args:
            environ: the environment, with the API key of the model in `API_KEY_VARIABLE`.

        Raises:
            SetupError: naming the file, the value, the rule and how to fix it.
        """
        return read_file(path, lambda content: _read(content, path.parent, environ))


def _read(content: Any, folder: Path, environ: Mapping[str, str]) -> CouncilFile:
    entries = Reader(content, "the council file").entries()
    sidecar = _sidecar(content)
    named = entries.pop("connections", None)
    connections = {} if named is None else {name: each.text() for name, each in named.entries().items()}
    prompt_tools = _prompt_tools(entries.pop("prompt_tools", None), folder)
    bundled = entries.pop("bundled", None)
    return CouncilFile(
        settings=CouncilSettings.read({key: each.value for key, each in entries.items() if key not in _SIDECARS}),
        sidecar=sidecar,
        model=sidecar_model(sidecar, api_key=environ.get(API_KEY_VARIABLE), connections=connections),
        prompt_tools=(*prompt_tools, *(bundled_prompt_tools() if bundled is None or bundled.flag() else ())),
    )


def _sidecar(content: Mapping[str, Any]) -> SidecarSettings:
    """Returns the settings of the model from a file's content, under any of the keys that hosts use."""
    described = {name: content[name] for name in _SIDECARS if content.get(name) is not None}
    for name in _TOOLS_SETTINGS:
        tools_settings = content.get(name)
        if isinstance(tools_settings, Mapping) and tools_settings.get("sidecar") is not None:
            described[f"{name}.sidecar"] = tools_settings["sidecar"]
    if len(described) > 1:
        raise SetupError(f"the model is described under {' and '.join(described)}, which mean the same: remove one")
    return SidecarSettings.read(next(iter(described.values()), {}))


def _prompt_tools(reader: Reader | None, folder: Path) -> tuple[PromptTool, ...]:
    """Reads the named files; a broken tool is logged, a file without a valid tool is refused."""
    tools: list[PromptTool] = []
    for name in reader.names() if reader is not None else ():
        path = folder / name
        if not path.exists():
            raise SetupError(f"prompt_tools: {path} does not exist: write it, or name a file or folder that does")
        read = read_prompt_tools(path)
        if not read.tools:
            why = "; ".join(read.problems) or f"{path} has no prompt tools: name the file or folder that has them"
            raise SetupError(f"prompt_tools: {why}")
        tools += read.tools
    return tuple(tools)


MAX_RUNS = 100  # that can be retried
MAX_CHARACTERS = 32 * MIB  # of these runs; the newest stays even if it has more
MAX_IGNORED = 20  # keys that a response names
_INLINE = (
    "the mode is inline: the main model calls the tools itself: POST /api/council/inline offers them, in Python "
    "toolbus.extension.InlineTools"
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
