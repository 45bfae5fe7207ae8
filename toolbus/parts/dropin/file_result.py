"""Turns what a drop-in tool returns or raises into a result, as a model reads it.

- a str is the text as it is, anything else is its JSON, None is `null`;
- an exception is `{"error": "tool exec: …"}`, an unknown name `{"error": "unknown tool: …"}`: both are outputs, with
  the typed error beside them;
- a dict whose `error` is a text or true is a *soft error*: the tool's own output, unchanged, and marked as an error, so
  that providers which show failures do so. A number is not: a measurement has an `error` too.

What the SDK gives a meaning of its own (`Reply`, `Ok`, `Err`, `Result`, content, `is_error` envelopes, chunks of a
generator) keeps it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from toolbus.common.text import repair_utf8, shorten
from toolbus.errors import Code, Stage
from toolbus.functions.reply import Err, Ok, Reply, dump_output
from toolbus.functions.runner import CallLost
from toolbus.functions.tool_spec import HandlerKind, ToolSpec
from toolbus.parts.dropin.manifest import FILE
from toolbus.protocol.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.dropin.file_result")

_MAX_ERROR = 4000  # characters of an error: a model needs a sentence, not a dump
_SDK_TYPES = (Reply, Ok, Err, Result, pb.ContentBlock)
_CHUNKS = (HandlerKind.GENERATOR, HandlerKind.ASYNC_GENERATOR)


def answering(spec: ToolSpec) -> ToolSpec:
    """Returns a tool whose handler never raises, and returns results as this module describes.

    Generators are left to the SDK: their chunks are delivered before they can fail.
    """
    if spec.kind in _CHUNKS:
        return spec
    run = _async_run if spec.kind is HandlerKind.ASYNC else _sync_run
    return replace(spec, handler=run(spec.tool.name, spec.handler))


def unknown_tool(name: str) -> Result:
    """Returns the result of a call of a tool that does not exist."""
    return _failure(f"unknown tool: {name}", Code.NOT_FOUND, Stage.NOT_DISPATCHED)


def failed_tool(text: str, reason: str) -> Result:
    """Returns the result of a tool that raised this text.

    Args:
        reason: the name of what it raised.
    """
    return _failure(f"tool exec: {text}", Code.TOOL, Stage.ACCEPTED, reason)


def _sync_run(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    def run(*positional: Any, **arguments: Any) -> Any:
        try:
            returned = handler(*positional, **arguments)
            return _awaited(name, returned) if inspect.isawaitable(returned) else _as_result(returned)
        except BaseException as error:
            return _error_result(name, error)

    return run


def _async_run(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*positional: Any, **arguments: Any) -> Any:
        try:
            return _as_result(await handler(*positional, **arguments))
        except BaseException as error:
            return _error_result(name, error)

    return run


async def _awaited(name: str, returned: Any) -> Any:
    """Awaits what a plain function returned: a lambda or a decorator around an async one."""
    try:
        return _as_result(await returned)
    except BaseException as error:
        return _error_result(name, error)


def _as_result(returned: Any) -> Any:
    if isinstance(returned, _SDK_TYPES) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        return returned
    if isinstance(returned, dict) and "is_error" in returned:
        return returned
    if isinstance(returned, list | tuple) and any(isinstance(each, pb.ContentBlock) for each in returned):
        return returned
    output = dump_output(returned)
    message = _soft_error(returned)
    if not message:
        return Result(output_json=output)
    return Result(output_json=output, is_error=True, error=CallError(Code.TOOL, message, Stage.ACCEPTED))


def _soft_error(returned: Any) -> str:
    """Returns the error text of a tool's own output; empty if it reports no error."""
    error = returned.get("error") if isinstance(returned, dict) else None
    if not error or (isinstance(error, int | float) and error is not True):
        return ""
    return error if isinstance(error, str) else dump_output(error)


def _error_result(name: str, error: BaseException) -> Result:
    """Returns the result of a handler that raised; what the SDK has a meaning for is raised again."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit | CallLost):
        raise error
    log.warning("tool %s failed", name, exc_info=error)
    return failed_tool(_error_text(error), type(error).__name__)


def _error_text(error: BaseException) -> str:
    """Returns the text of an exception; with its class if the text alone says nothing, like the key of a KeyError."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # an exception whose own text raises
        text = ""
    if isinstance(error, MemoryError):
        return f"{kind}: the process reached its memory limit: hold less at once, or grant more memory_mb in {FILE}"
    if isinstance(error, FileNotFoundError) and "temporary directory" in text:
        return f'the file has no temporary folder: grant it a folder, under "write" in {FILE}'
    return f"{kind}: {text}" if text and isinstance(error, KeyError) else text or kind


def _failure(text: str, code: Code, stage: Stage, reason: str = "") -> Result:
    message = shorten(repair_utf8(text), _MAX_ERROR)
    error = CallError(code, message, stage, reason=reason)
    return Result(output_json=dump_output({"error": message}), is_error=True, error=error)
