"""One tool, run for one member: the one place where whatever happens becomes an outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from toolbus.council.argument_planning import plan_arguments
from toolbus.council.available_tools import AvailableTool
from toolbus.council.cancellation import being_cancelled
from toolbus.council.council_result import TimedOut, ToolOutcome
from toolbus.council.council_settings import CouncilSettings
from toolbus.council.failure import FAILED, content_of, failure_of
from toolbus.council.language_model import LanguageModel
from toolbus.council.member import Member
from toolbus.council.prompt_tool import PromptTool, run_prompt_tool
from toolbus.council.sidecar import SidecarSettings
from toolbus.errors import Code, Stage, ToolBusError
from toolbus.functions.call_context import CallContext
from toolbus.loop.tool_source import ToolSource
from toolbus.text import join_surrogates
from toolbus.tool import CallError, Result, Tool, dump_arguments

log = logging.getLogger("toolbus.extension")

_TRUNCATED = "\n[truncated]"
_LATER_SECONDS = 1.0  # a bus answers in time by itself; this is for a source that does not
_HINT = " (a council calls tools without arguments, unless plan_arguments is on)"


class ToolRunner:
    """Runs tools by the settings of a council; keeps nothing between two of them."""

    def __init__(
        self, source: ToolSource, settings: CouncilSettings, model: LanguageModel | None, sidecar: SidecarSettings
    ) -> None:
        self._source = source
        self._settings = settings
        self._model = model  # None: prompt tools fail, and no arguments are planned
        self._sidecar = sidecar

    async def outcome(
        self, member: Member, assigned: str, tool: AvailableTool, context: CallContext, text: str
    ) -> ToolOutcome:
        """Runs a tool. Raises nothing but CancelledError, and that only where the task is cancelled.

        Args:
            assigned: the name under which the member has the tool.
            text: the context's messages as one.
        """
        began = time.perf_counter()
        content = error = ""
        timeout_seconds = 0.0
        try:
            content = cut(await self._content(member, tool, context, text), self._settings.result_bytes)
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            error = FAILED  # what the tool waited for broke off by itself
        except ToolBusError as problem:
            error = cut(str(problem), self._settings.result_bytes) or FAILED
            timeout_seconds = self._settings.timeout_seconds if isinstance(problem, TimedOut) else 0.0
        except (Exception, SystemExit) as problem:  # the last would end the host
            log.warning("tool %s of member %s failed", assigned, member.name, exc_info=True)
            error = cut(str(problem), self._settings.result_bytes) or FAILED
        declared = tool.tool if isinstance(tool.tool, PromptTool) else None
        return ToolOutcome(
            member_id=member.id,
            member_name=member.name,
            tool=assigned,
            display_name=tool.display_name,
            success=not error,
            content=content,
            error=error,
            seconds=time.perf_counter() - began,
            variable=declared.variable if declared is not None else "",
            deliberates=declared is None or declared.deliberates,
            timeout_seconds=timeout_seconds,
        )

    async def _content(self, member: Member, tool: AvailableTool, context: CallContext, text: str) -> str:
        """Returns what a tool says.

        Raises:
            ToolBusError: why it says nothing; besides, a source or a model may raise anything.
        """
        if isinstance(tool.tool, PromptTool) and self._model is not None:
            return await run_prompt_tool(tool.tool, member, text, self._settings, self._model, sidecar=self._sidecar)
        if not isinstance(tool.tool, Tool):
            raise ToolBusError(tool.reason)
        arguments = await self._arguments(tool.tool, member, text)
        seconds = self._settings.timeout_seconds
        try:
            async with asyncio.timeout(seconds + _LATER_SECONDS) as limit:
                result = await self._source.call(
                    tool.name,
                    arguments,
                    context=replace(context, member=member.described()),
                    schema_hash="",
                    timeout=seconds,
                )
        except TimeoutError:
            if not limit.expired():
                raise  # the source's own, whatever it means
            result = Result(error=CallError(Code.DEADLINE_EXCEEDED, "", Stage.UNKNOWN))
        if result.error is not None and result.error.code is Code.DEADLINE_EXCEEDED:
            raise TimedOut(tool.bare_name)
        if failure := failure_of(result, tool):
            unplanned = result.error is not None and result.error.code is Code.INVALID_ARGUMENTS and arguments == "{}"
            raise ToolBusError(failure + _HINT if unplanned else failure)
        return content_of(result)

    async def _arguments(self, tool: Tool, member: Member, text: str) -> str:
        if self._model is None or not self._settings.plan_arguments:
            return "{}"
        planned = await plan_arguments(
            tool,
            member,
            text,
            self._model,
            timeout_seconds=self._settings.timeout_seconds,
            sidecar=self._sidecar,
        )
        return dump_arguments(planned)


def cut(text: str, max_bytes: int) -> str:
    """Returns a text of at most so many bytes in UTF-8; one that is cut says so at its end."""
    encoded = join_surrogates(text).encode()
    if len(encoded) <= max_bytes:
        return join_surrogates(text)
    return encoded[: max_bytes - len(_TRUNCATED)].decode("utf-8", "ignore").rstrip() + _TRUNCATED
