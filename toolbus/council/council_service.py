"""The council of a bus: what programs without Python ask for, in JSON's own types.

One council with its history and retained runs, the newest runs for retries, and whoever watches. Whoever offers this
to others, as the HTTP gateway does, hands in what it was sent and hands out what it gets.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

from toolbus.council.available_tools import no_model
from toolbus.council.cancellation import being_cancelled
from toolbus.council.context import Scene, message_of
from toolbus.council.council import Council
from toolbus.council.council_events import CouncilEvent, OnEvent
from toolbus.council.council_file import CouncilFile
from toolbus.council.council_result import Deliberation
from toolbus.council.council_settings import CouncilSettings
from toolbus.council.council_watcher import Watcher
from toolbus.council.history import CouncilHistory
from toolbus.errors import PeerLost, SetupError
from toolbus.functions.call_context import ContextMessage
from toolbus.text import quote
from toolbus.tool import MIB

MAX_RUNS = 100  # that are kept for retries
MAX_CHARACTERS = 32 * MIB  # of the runs that are kept, in all; the newest is kept whatever it has
MAX_IGNORED = 20  # keys that an answer names
_INLINE = (
    "the mode is inline: the main model calls the tools itself, which toolbus.council.InlineTools offers in Python"
)
_NOT_THERE = "none of the tools of those who take part is there: skipped says why"

log = logging.getLogger("toolbus.extension")

Said = Mapping[str, Any]
Tell = Callable[[Said], object]  # is told of events in JSON's form
Start = Callable[[Tell | None], Awaitable[dict[str, Any]]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A run as somebody asked for it.

    Attributes:
        council: with the settings and members of this run.
        ignored: keys of the request that mean nothing here.
    """

    council: Council
    messages: tuple[ContextMessage, ...]
    scene: Scene
    user_id: str
    attributes: Mapping[str, str]
    regenerates: bool
    ignored: tuple[str, ...]


@dataclass(slots=True)
class _Kept:
    """A run that has ended, with what a retry needs.

    Attributes:
        retrying: held by the retry that runs, so that none is lost to another.
    """

    asked: _Asked
    deliberation: Deliberation
    retrying: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def characters(self) -> int:
        """How much text it keeps in memory."""
        asked = self.asked
        texts = [each.content for each in asked.messages]
        texts += [asked.scene.persona, asked.scene.character, asked.scene.world_info, *asked.attributes.values()]
        for member in asked.council.settings.members:
            texts += [member.role, member.definition, member.personality, member.behavior, *member.tools]
        return sum(map(len, texts)) + self.deliberation.characters


class CouncilService:
    """Runs the council of a bus for others. Everything belongs to one loop."""

    def __init__(self, tools: Any, told: CouncilFile | None = None) -> None:
        """Makes it.

        Args:
            tools: as for `Council`.
            told: what the council is made of; None means no members, no model, and the bundled prompt tools.

        Raises:
            SetupError: as for `Council`.
        """
        told = told or CouncilFile()
        self._sidecar = told.sidecar
        self._has_model = told.model is not None
        self._council = Council(
            tools,
            told.settings,
            model=told.model,
            sidecar=told.sidecar,
            prompt_tools=told.prompt_tools,
            history=CouncilHistory(),
        )
        self._runs: OrderedDict[str, _Kept] = OrderedDict()  # by run id, the newest last
        self._watchers: set[Watcher] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @classmethod
    def of_file(cls, tools: Any, path: Path | None) -> Self:
        """Makes it of a council file; None means without one.

        Raises:
            SetupError: naming the file, and what is wrong in it.
        """
        if path is None:
            return cls(tools)
        told = CouncilFile.load(path)
        try:
            return cls(tools, told)
        except SetupError as problem:
            raise SetupError(f"{path}: {problem}") from None

    def __repr__(self) -> str:
        counts = f"runs={len(self._runs)} running={len(self._running)} watchers={len(self._watchers)}"
        return f"<CouncilService {self._council!r} {counts}>"

    def described(self) -> dict[str, Any]:
        """Returns settings and members in force, spelled so that a run takes them as its own."""
        settings = _shown(self._council.settings)
        members = settings.pop("members")
        why = "" if self._has_model else no_model(self._sidecar)
        return {
            "settings": settings,
            "members": [_shown(member) for member in members],
            "sidecar": {**_shown(self._sidecar), "available": self._has_model, "reason": why},
        }

    async def tools(self, user_id: str = "", attributes: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Returns what members can be assigned for a user."""
        return [tool.described() for tool in await self._council.available(user_id, attributes or {})]

    def begin(self, said: Said) -> Start:
        """Returns what runs the council, when it is called.

        Args:
            said: `messages`, and what else there is of `chat_id`, `persona`, `character`, `world_info`, `user_id`,
                `attributes`, `members` and `settings` (instead of those in force), `regenerates`; under `unknown` the
                names of what else was said.

        Raises:
            SetupError: naming what is wrong in members or settings, and where in `said` it stands.
        """
        chat_id = said.get("chat_id", "")
        ignored = _shown_keys(said.get("unknown", ()))
        asked = _Asked(
            # Without a chat's name the earlier results of each client would be shown to all.
            council=self._changed(said, ignored, remembers=bool(chat_id)),
            messages=tuple(message_of(each) for each in said["messages"]),
            scene=Scene(chat_id, *(said.get(name, "") for name in ("persona", "character", "world_info"))),
            user_id=said.get("user_id", ""),
            attributes=said.get("attributes") or {},
            regenerates=said.get("regenerates", False),
            ignored=tuple(ignored[:MAX_IGNORED]),
        )
        if ignored:
            log.warning("a council request: unknown keys are ignored: %s", ", ".join(asked.ignored))
        return partial(self._run, asked)

    def begin_retry(
        self, run_id: str, only: Iterable[tuple[str, str]] | None = None, unknown: Iterable[str] = ()
    ) -> Start | None:
        """Returns what runs again what failed in a run, when it is called; None where no such run is kept.

        Args:
            only: those of the failed that are run again, as (member id, tool); None means all.
            unknown: names of what else the request said.

        Raises:
            SetupError: `only` names nothing, or what did not fail.
        """
        if (kept := self._runs.get(run_id)) is None:
            return None
        chosen = None if only is None else tuple(only)
        try:
            kept.deliberation.chosen(chosen)
        except SetupError as problem:
            raise SetupError(str(problem), ("only",)) from None
        return partial(self._retry, kept, chosen, tuple(_shown_keys(unknown)))

    def find(self, run_id: str) -> dict[str, Any] | None:
        """Returns what became of a run; None where no such run is kept."""
        kept = self._runs.get(run_id)
        return _answered(kept.deliberation) if kept is not None else None

    def watch(self, chat_id: str = "") -> Watcher:
        """Returns the events of all chats, or of one, from now on; whoever asks closes it."""
        watcher = Watcher(chat_id, self._watchers.discard)
        self._watchers.add(watcher)
        if self._closed:
            watcher.close()
        return watcher

    def close(self) -> None:
        """Ends what runs, and tells watchers no more; may be called again."""
        self._closed = True
        for task in self._running:
            task.cancel()
        for watcher in tuple(self._watchers):
            watcher.close()

    # -- runs --------------------------------------------------------------------------------------------------------

    async def _run(self, asked: _Asked, tell: Tell | None) -> dict[str, Any]:
        deliberation = await self._unless_closed(
            asked.council.run(
                asked.messages,
                scene=asked.scene,
                user_id=asked.user_id,
                attributes=asked.attributes,
                regenerates=asked.regenerates,
                on_event=self._told(tell),
            )
        )
        if deliberation is not None:
            self._keep(_Kept(asked, deliberation))
            return _answered(deliberation, asked.ignored)
        nothing = {"ok": True, "active": False, "results": [], "reason": _why_nobody(asked.council.settings)}
        return _and_ignored(nothing, asked.ignored)

    async def _retry(
        self, kept: _Kept, only: tuple[tuple[str, str], ...] | None, ignored: tuple[str, ...], tell: Tell | None
    ) -> dict[str, Any]:
        asked = kept.asked
        async with kept.retrying:
            if only is not None:  # another retry may have succeeded meanwhile
                failed = kept.deliberation.chosen(None)
                only = tuple(pair for pair in only if pair in failed)
                if not only:
                    return _answered(kept.deliberation, ignored)
            kept.deliberation = await self._unless_closed(
                asked.council.retry(
                    kept.deliberation,
                    asked.messages,
                    only,
                    scene=asked.scene,
                    user_id=asked.user_id,
                    attributes=asked.attributes,
                    on_event=self._told(tell),
                )
            )
            self._keep(kept)
            return _answered(kept.deliberation, ignored)

    def _changed(self, said: Said, ignored: list[str], *, remembers: bool) -> Council:
        """Returns the council with the settings and members of a request.

        Args:
            ignored: gets the places of unknown keys.

        Raises:
            SetupError: as for `begin`.
        """
        changes = dict(said.get("settings") or {})
        for key in changes:
            if str(key).lower() == "members":
                why = "settings: members stand beside the settings, not in them: move them there"
                raise SetupError(why, ("settings", key))
        if said.get("members") is not None:
            changes["members"] = said["members"]
        unknown: list[str] = []
        try:
            council = self._council.changed(self._council.settings.changed(changes, unknown), remembers=remembers)
        except SetupError as problem:
            if problem.loc[:1] != ("members",):
                problem.loc = "settings", *problem.loc
            raise
        ignored += sorted(
            (key if key.startswith("members[") else f"settings.{key}" for key in unknown),
            key=lambda key: key.startswith("members["),
        )
        return council

    async def _unless_closed(self, work: Coroutine[Any, Any, T]) -> T:
        """Does what cancelling this, or closing the service, ends.

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
            if self._closed and not being_cancelled():
                raise PeerLost("the bus stopped, and the run with it: ask again when it is back") from None
            raise
        finally:
            self._running.discard(task)

    def _told(self, tell: Tell | None) -> OnEvent:
        def on_event(event: CouncilEvent) -> object:
            said = event.described()
            for watcher in self._watchers:
                watcher.put(said)
            return tell(said) if tell is not None else None

        return on_event

    def _keep(self, kept: _Kept) -> None:
        self._runs[kept.deliberation.run_id] = kept
        self._runs.move_to_end(kept.deliberation.run_id)
        characters = sum(each.characters for each in self._runs.values())
        while len(self._runs) > 1 and (len(self._runs) > MAX_RUNS or characters > MAX_CHARACTERS):
            characters -= self._runs.popitem(last=False)[1].characters


def _answered(deliberation: Deliberation, ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    answer = {"ok": True, "active": bool(deliberation.outcomes), **deliberation.described()}
    if not deliberation.outcomes:
        answer["reason"] = _NOT_THERE
    return _and_ignored(answer, ignored)


def _and_ignored(answer: dict[str, Any], ignored: tuple[str, ...]) -> dict[str, Any]:
    return {**answer, "ignored": list(ignored)} if ignored else answer


def _why_nobody(settings: CouncilSettings) -> str:
    """Returns why nobody took part, a sentence."""
    if settings.mode == "inline":
        return _INLINE
    if not settings.members:
        return "there are no members: give the run some, or the council file"
    if not any(member.tools for member in settings.members):
        return "no member has tools: assign some"
    return "the dice left everybody out: chance says how likely a member takes part"


def _shown_keys(names: Iterable[str]) -> list[str]:
    """Returns keys as they may be shown: not too many, none too long, and without line ends."""
    return [quote(name)[1:-1] for name in islice(names, MAX_IGNORED)]


def _shown(record: Any) -> dict[str, Any]:
    """Returns a record's fields by their names, as its reader takes them."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
