"""Runs one tool for one member, and returns every result, error and timeout as an outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from toolbus.cancellation import is_being_cancelled
from toolbus.council.argument_planning import missing_required, plan_arguments
from toolbus.council.available_tools import AvailableTool
from toolbus.council.council_limits import COUNCIL_TIMINGS, CouncilTimings
from toolbus.council.council_settings import CouncilSettings
from toolbus.council.deliberation import TimedOut, ToolOutcome
from toolbus.council.language_model import LanguageModel
from toolbus.council.member import Member
from toolbus.council.prompt_tool import PromptTool, run_prompt_tool
from toolbus.council.sidecar_settings import SidecarSettings
from toolbus.errors import Code, Stage, ToolBusError
from toolbus.functions.call_context import CallContext
from toolbus.loop.tool_source import ToolSource
from toolbus.text import join_surrogates
from toolbus.tool import CallError, Result, Tool, dump_arguments

log = logging.getLogger("toolbus.extension")

FAILED = "Tool invocation failed"
_TRUNCATED = "\n[truncated]"
_HINT = " (a council calls tools without arguments, unless plan_arguments is on)"


class ToolRunner:
    """Runs tools by the settings of a council; it has no state between two runs."""

    def __init__(
        self,
        source: ToolSource,
        settings: CouncilSettings,
        model: LanguageModel | None,
        sidecar: SidecarSettings,
        timings: CouncilTimings = COUNCIL_TIMINGS,
    ) -> None:
        self._source = source
        self._settings = settings
        self._model = model  # None: prompt tools fail, and no arguments are planned
        self._sidecar = sidecar
        self._timings = timings

    async def run(
        self, member: Member, assigned: str, tool: AvailableTool, context: CallContext, text: str
    ) -> ToolOutcome:
        """Runs a tool and returns its outcome. Raises only CancelledError, if the task is being cancelled.

        Args:
            assigned: the name by which the tool is assigned.
            text: the context's messages as one.
        """
        started = time.perf_counter()
        content = error = ""
        timeout_seconds = 0.0
        try:
            content = truncate(await self._content(member, tool, context, text), self._settings.result_bytes)
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            error = FAILED  # a task for which the tool waited was cancelled
        except ToolBusError as failure:
            error = truncate(str(failure), self._settings.result_bytes) or FAILED
            timeout_seconds = self._settings.timeout_seconds if isinstance(failure, TimedOut) else 0.0
        except (Exception, SystemExit) as failure:  # SystemExit would end the host
            log.warning("tool %.80r of member %.80r failed", assigned, member.name, exc_info=True)
            error = truncate(str(failure), self._settings.result_bytes) or FAILED
        prompt_tool = tool.tool if isinstance(tool.tool, PromptTool) else None
        return ToolOutcome(
            member_id=member.id,
            member_name=member.name,
            tool=assigned,
            display_name=tool.display_name,
            success=not error,
            content=content,
            error=error,
            seconds=time.perf_counter() - started,
            variable=prompt_tool.variable if prompt_tool is not None else "",
            deliberates=prompt_tool is None or prompt_tool.deliberates,
            timeout_seconds=timeout_seconds,
        )

    async def _content(self, member: Member, tool: AvailableTool, context: CallContext, text: str) -> str:
        """Returns the result of a tool, as text.

        Raises:
            ToolBusError: why it has none; besides, a source or a model may raise anything.
        """
        if isinstance(tool.tool, PromptTool) and self._model is not None:
            return await run_prompt_tool(
                tool.tool,
                member,
                text,
                self._settings,
                self._model,
                sidecar=self._sidecar,
                backoff_seconds=self._timings.backoff_seconds,
            )
        if not isinstance(tool.tool, Tool):
            raise ToolBusError(tool.reason)
        arguments = await self._arguments(tool.tool, member, text)
        unplanned = self._model is None or not self._settings.plan_arguments
        seconds = self._settings.timeout_seconds
        try:
            async with asyncio.timeout(seconds + self._timings.extra_seconds) as limit:
                result = await self._source.call(
                    tool.name,
                    arguments,
                    context=replace(context, member=member.described(), unplanned=unplanned),
                    schema_hash="",
                    timeout=seconds,
                )
        except TimeoutError:
            if not limit.expired():
                raise  # of the source itself
            result = Result(error=CallError(Code.DEADLINE_EXCEEDED, "", Stage.UNKNOWN))
        if result.error is not None and result.error.code is Code.DEADLINE_EXCEEDED:
            raise TimedOut(tool.bare_name)
        if failure := failure_of(result, tool):
            lacking = unplanned and missing_required({}, tool.tool.parameters)
            raise ToolBusError(failure + _HINT if lacking else failure)
        return content_of(result)

    async def _arguments(self, tool: Tool, member: Member, text: str) -> str:
        if self._model is None or not self._settings.plan_arguments:
            return "{}"
        arguments = await plan_arguments(
            tool,
            member,
            text,
            self._model,
            timeout_seconds=self._settings.timeout_seconds,
            sidecar=self._sidecar,
        )
        return dump_arguments(arguments)


def truncate(text: str, max_bytes: int) -> str:
    """Returns a text of at most ``max_bytes`` in UTF-8; a truncated text ends with a note."""
    encoded = join_surrogates(text).encode()
    if len(encoded) <= max_bytes:
        return join_surrogates(text)
    return encoded[: max_bytes - len(_TRUNCATED)].decode("utf-8", "ignore").rstrip() + _TRUNCATED


def failure_of(result: Result, tool: AvailableTool) -> str:
    """Returns why a call failed, as hosts of role-play systems know it; "" if it did not fail."""
    error = result.error
    if error is None and not result.is_error:
        return ""
    if error is None or error.code is Code.TOOL:
        return (error.message if error is not None else "") or content_of(result) or FAILED
    if error.code is Code.DEADLINE_EXCEEDED:
        return str(TimedOut(tool.bare_name))
    if error.code is Code.UNAVAILABLE and error.stage is not Stage.NOT_DISPATCHED:
        return "Extension worker stopped"
    if error.code is Code.UNAVAILABLE and tool.source:  # without a source the message of the bus says more
        return f"Extension worker '{tool.source}' is not running"
    return error.message or error.code.name


def content_of(result: Result) -> str:
    """Returns the result of a tool as text; null is ""."""
    if result.output_json in ("", "null") and not result.content:
        return ""
    return replace(result, is_error=False, error=None).text
