"""A council: members that run tools before a main model is asked, and what became of it.

Stands above a source of tools and, where there is one, a language model; knows neither networks nor providers. A tool
that fails, in whatever way, is an outcome like any other: nothing but cancellation ends a run.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from toolbus.council.assigned_tools import assigned_tools, gone, warned
from toolbus.council.available_tools import AvailableTool, available_tools, by_any_name, no_model
from toolbus.council.cancellation import being_cancelled
from toolbus.council.context import NO_SCENE, Scene, context_messages
from toolbus.council.council_events import CouncilCompleted, CouncilStarted, MemberDone, OnEvent, ToolsFailed, tell
from toolbus.council.council_result import Deliberation, SkippedTool, ToolOutcome
from toolbus.council.council_settings import CouncilSettings
from toolbus.council.deliberation import deliberation_block, named_results
from toolbus.council.dice import Randomness, rolled
from toolbus.council.history import CouncilHistory
from toolbus.council.language_model import LanguageModel
from toolbus.council.member import Member
from toolbus.council.prompt_tool import PromptTool
from toolbus.council.regeneration import RetainedRuns, fingerprint
from toolbus.council.sidecar import SidecarSettings
from toolbus.council.tool_runner import ToolRunner
from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.call_context import CallContext, ContextMessage
from toolbus.loop.tool_source import ToolSource, source_of
from toolbus.sdk.invocation import context_text
from toolbus.tool import Tool

MAX_PARALLEL = 16  # tools at the same time, as of a tool loop: model servers refuse more

log = logging.getLogger("toolbus.extension")

Messages = Iterable[Mapping[str, Any] | ContextMessage]
_NO_ATTRIBUTES: Mapping[str, str] = MappingProxyType({})
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Run:
    """What is the same for all tools of a run.

    Attributes:
        members: of the council, whether they take part or not.
        text: the context's messages as one.
        mark: the fingerprint of what the outcome depends on; "" where no run is used again.
        began: by `time.perf_counter`.
    """

    run_id: str
    chat_id: str
    members: tuple[Member, ...]
    context: CallContext
    text: str
    mark: str
    on_event: OnEvent | None
    began: float = field(default_factory=time.perf_counter)


class Council:
    """Runs the tools of its members. Several runs may go on at the same time."""

    def __init__(
        self,
        tools: Any,
        settings: CouncilSettings,
        *,
        model: LanguageModel | None = None,
        sidecar: SidecarSettings | None = None,
        prompt_tools: Iterable[PromptTool] = (),
        rng: Randomness | None = None,
        history: CouncilHistory | None = None,
    ) -> None:
        """Makes a council.

        Args:
            tools: a `toolbus.Bus`, a `toolbus.Host`, or a `toolbus.loop.ToolSource`.
            model: answers prompt tools and plans arguments; None: prompt tools are listed as unavailable.
            sidecar: how that model is asked; None means the defaults.
            prompt_tools: of one name the last counts, so give the bundled ones after those of files.
            rng: what the dice are rolled with; None means chance.
            history: earlier results of the chats; None keeps none.

        Raises:
            SetupError: `tools` is no source of tools, or arguments are to be planned without a model.
        """
        self._sidecar = sidecar or SidecarSettings()
        _check_plans(settings, model, self._sidecar)
        self.settings = settings
        self._source = source_of(tools)
        self._offered = tools
        # A source is somebody's already; of a bus or a host each user may see other tools.
        self._asks_for_user = self._source is not tools and not hasattr(tools, "as_source")
        self._model = model
        self._prompt_tools = tuple(prompt_tools)
        self._rng: Randomness = rng or random.Random()
        self._history = history
        self._retained = RetainedRuns()

    def __repr__(self) -> str:
        mode, members = self.settings.mode, len(self.settings.members)
        return f"<Council {mode} members={members} prompt_tools={len(self._prompt_tools)} {self._source!r}>"

    def changed(self, settings: CouncilSettings, *, remembers: bool = True) -> Council:
        """Returns a council with other settings that shares all the rest with this one, runs that it retains too.

        Args:
            remembers: whether it shares the history; else it keeps none.

        Raises:
            SetupError: as for the constructor.
        """
        _check_plans(settings, self._model, self._sidecar)
        other = copy.copy(self)
        other.settings = settings
        other._history = self._history if remembers else None
        return other

    async def available(self, user_id: str = "", attributes: Mapping[str, str] = _NO_ATTRIBUTES) -> list[AvailableTool]:
        """Returns what members can be assigned, the bus's tools first.

        Args:
            user_id, attributes: on whose behalf; a user is shown what it may call.

        Raises:
            ToolBusError: the tools could not be listed.
        """
        source = self._source_for(CallContext(user_id=user_id, attributes=attributes))
        return list((await self._tools(source)).values())

    async def run(
        self,
        messages: Messages,
        *,
        scene: Scene = NO_SCENE,
        user_id: str = "",
        attributes: Mapping[str, str] = _NO_ATTRIBUTES,
        members: Iterable[Member] | None = None,
        run_id: str | None = None,
        regenerates: bool = False,
        on_event: OnEvent | None = None,
    ) -> Deliberation | None:
        """Rolls the dice and runs the tools of whoever takes part.

        Args:
            messages: the conversation, oldest first, as providers write it.
            scene: which chat it is, and texts that go before the messages.
            user_id, attributes: what tools may know of the circumstances.
            members: instead of those of the settings.
            run_id: for events and records; None draws one.
            regenerates: whether the reply is made again: the chat's last run may be used, if the settings say so, or
                else what it said is no earlier turn's any more.
            on_event: told what happens, sync or async; one that raises, or takes longer than 5 s, ends nothing.

        Returns:
            None where nobody takes part, and in inline mode, where the main model calls the tools; no events then.

        Raises:
            SetupError: two of `members` have one id.
        """
        if self.settings.mode == "inline":
            return None
        run = self._begun(messages, scene, user_id, attributes, members, run_id, on_event)
        if regenerates and run.mark and (found := self._retained.find(run.chat_id, run.mark)) is not None:
            return found[0] and replace(found[0], run_id=run.run_id, seconds=0.0, reused=True)
        if self._history is not None:
            self._history.begin(run.chat_id, run.run_id, replaces=regenerates)
        active = rolled(run.members, self._rng)
        if not active:
            self._keep(run, None)
            return None
        outcomes, skipped = await self._outcomes(run, active, again=False)
        warned(run.run_id, skipped)
        return await self._concluded(run, outcomes, outcomes, skipped=skipped)

    async def retry(
        self,
        deliberation: Deliberation,
        messages: Messages,
        only: Iterable[tuple[str, str]] | None = None,
        *,
        scene: Scene = NO_SCENE,
        user_id: str = "",
        attributes: Mapping[str, str] = _NO_ATTRIBUTES,
        members: Iterable[Member] | None = None,
        on_event: OnEvent | None = None,
    ) -> Deliberation:
        """Runs again what failed, without dice, and puts the outcomes in the places of the failed ones.

        A tool that is gone fails again, with a sentence that says so.

        Args:
            only: those of the failed that are run again, as (member id, tool); None means all.

        Raises:
            SetupError: `only` names nothing, or what did not fail; two of `members` have one id.
        """
        wanted = deliberation.chosen(only)
        if not wanted:
            return deliberation
        run = self._begun(messages, scene, user_id, attributes, members, deliberation.run_id, on_event)
        again = [
            replace(member, tools=tools)
            for member in run.members
            if (tools := tuple(tool for tool in member.tools if (member.id, tool) in wanted))
        ]
        fresh, _ = await self._outcomes(run, again, again=True)
        by_key = {outcome.key: outcome for outcome in fresh}
        for outcome in deliberation.failed:
            if outcome.key in wanted:
                by_key.setdefault(outcome.key, gone(outcome))
        merged = tuple(by_key.get(outcome.key, outcome) for outcome in deliberation.outcomes)
        return await self._concluded(run, merged, fresh, deliberation, skipped=deliberation.skipped)

    def _begun(
        self,
        messages: Messages,
        scene: Scene,
        user_id: str,
        attributes: Mapping[str, str],
        members: Iterable[Member] | None,
        run_id: str | None,
        on_event: OnEvent | None,
    ) -> _Run:
        settings = self.settings if members is None else replace(self.settings, members=tuple(members))
        told = context_messages(messages, settings, scene)
        context = CallContext(user_id=user_id, attributes=MappingProxyType(dict(attributes)), messages=told)
        retains = settings.retain_results_for_regens
        return _Run(
            run_id=run_id or uuid.uuid4().hex,
            chat_id=scene.chat_id,
            members=settings.members,
            context=context,
            text=context_text(told),
            mark=fingerprint(settings, self._sidecar, context) if retains else "",
            on_event=on_event,
        )

    def _source_for(self, context: CallContext) -> ToolSource:
        """Returns the tools as the user of a run may call them."""
        if not self._asks_for_user:
            return self._source
        whose = CallContext(user_id=context.user_id, attributes=context.attributes)  # no messages: they may be long
        return source_of(self._offered, context=whose)

    async def _tools(self, source: ToolSource) -> dict[str, AvailableTool]:
        seconds = self.settings.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                _, listed = await source.tools()
        except TimeoutError:
            raise ToolBusError(f"the tools were not listed within {seconds:g} seconds") from None
        return self._available(listed)

    def _available(self, listed: Iterable[Tool]) -> dict[str, AvailableTool]:
        lacks = no_model(self._sidecar) if self._model is None else ""
        return available_tools(listed, self._prompt_tools, no_model=lacks)

    async def _listed(self, source: ToolSource) -> tuple[dict[str, AvailableTool], str]:
        """Returns the tools of a run, and why those of the bus are not among them, "" where they are."""
        try:
            return await self._tools(source), ""
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            why = "listing the tools broke off"
        except Exception as problem:
            why = f"the tools cannot be listed: {problem}"
        log.warning("a council runs without the tools of the bus: %s", why)
        return self._available(()), why

    async def _outcomes(
        self, run: _Run, active: Sequence[Member], *, again: bool
    ) -> tuple[tuple[ToolOutcome, ...], tuple[SkippedTool, ...]]:
        """Runs all tools of some members. Returns outcomes, by members and their tools, and what is not there.

        Args:
            again: what is gone has failed then.
        """
        await tell(run.on_event, CouncilStarted(run.run_id, run.chat_id, len(active)))
        source = self._source_for(run.context)
        runner = ToolRunner(source, self.settings, self._model, self._sidecar)
        listed, unlisted = await self._listed(source)
        tools = by_any_name(listed)
        assigned, skipped = assigned_tools(active, tools, unlisted, again=again)
        gate = asyncio.Semaphore(MAX_PARALLEL)

        async def of_tool(member: Member, name: str, tool: AvailableTool) -> ToolOutcome:
            async with gate:
                return await runner.outcome(member, name, tool, run.context, run.text)

        async def of_member(member: Member) -> tuple[ToolOutcome, ...]:
            jobs = (partial(of_tool, member, name, tool) for name, tool in assigned[member.id])
            outcomes = tuple(await self._each(jobs))
            await tell(run.on_event, MemberDone(run.run_id, run.chat_id, member, outcomes))
            return outcomes

        of_members = await self._each(partial(of_member, member) for member in active)
        return tuple(outcome for outcomes in of_members for outcome in outcomes), tuple(skipped)

    async def _each(self, jobs: Iterable[Callable[[], Awaitable[_T]]]) -> list[_T]:
        """Does jobs one after the other or, if the settings say so, at the same time. Cancelling it cancels them."""
        if self.settings.parallel:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_done(job)) for job in jobs]
            return [task.result() for task in tasks]
        done = []
        for job in jobs:
            await asyncio.sleep(0)  # tools that never wait leave a cancellation no other place to come through
            done.append(await job())
            if being_cancelled():  # and some keep it to themselves
                raise asyncio.CancelledError
        return done

    async def _concluded(
        self,
        run: _Run,
        outcomes: tuple[ToolOutcome, ...],
        fresh: Iterable[ToolOutcome],
        before: Deliberation | None = None,
        *,
        skipped: tuple[SkippedTool, ...],
    ) -> Deliberation:
        """Puts a run's outcomes together, keeps what is to be kept, and says that it is over."""
        history = before.history if before is not None else ""
        if self._history is not None:
            if before is None:  # else its own results would be among the earlier ones
                history = self._history.block(run.chat_id, run.members)
            self._history.record(run.chat_id, run.members, fresh, run.run_id)
        seconds = time.perf_counter() - run.began + (before.seconds if before is not None else 0.0)
        deliberation = Deliberation(
            run_id=run.run_id,
            outcomes=outcomes,
            block=deliberation_block(outcomes),
            variables=named_results(outcomes),
            seconds=seconds,
            history=history,
            skipped=skipped,
        )
        self._keep(run, deliberation)
        failures = len(deliberation.failed)
        log.info(
            "council run %.80r ended results=%d failed=%d seconds=%.2f", run.run_id, len(outcomes), failures, seconds
        )
        await tell(run.on_event, CouncilCompleted(run.run_id, run.chat_id, seconds, len(outcomes)))
        if failed := deliberation.failed:
            await tell(run.on_event, ToolsFailed(run.run_id, run.chat_id, failed, len(outcomes) - len(failed)))
        return deliberation

    def _keep(self, run: _Run, outcome: Deliberation | None) -> None:
        if run.mark:
            self._retained.keep(run.chat_id, run.mark, outcome)


def _check_plans(settings: CouncilSettings, model: LanguageModel | None, sidecar: SidecarSettings) -> None:
    if settings.plan_arguments and model is None:
        why = "plan_arguments is on, and there is no model that plans"
        raise SetupError(f"{why}: turn it off, or give one ({no_model(sidecar)})", ("plan_arguments",))


async def _done(job: Callable[[], Awaitable[_T]]) -> _T:
    return await job()
