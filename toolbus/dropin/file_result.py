"""What a drop-in tool's return or raise becomes, so that a model reads what it would read from the tool itself.

- a str is the text as it is, anything else its JSON, None is `null`;
- a raise is `{"error": "tool exec: …"}`, an unknown name `{"error": "unknown tool: …"}`: both are outputs, with the
  typed error beside them;
- a dict with an `error` that says something is a *soft error*: the tool's own output, unchanged, and marked as an
  error, so that providers which show failures as such do. A number is no such word: a measurement has an `error` too.

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

from toolbus.errors import Code, Stage
from toolbus.functions.reply import Err, Ok, Reply, dump_output
from toolbus.functions.tool_spec import HandlerKind, ToolSpec
from toolbus.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger(__name__)

_MAX_TEXT = 4000  # characters of a failure: a model needs a sentence, not a dump
_OF_THE_SDK = (Reply, Ok, Err, Result, pb.ContentBlock)
_CHUNKS = (HandlerKind.GENERATOR, HandlerKind.ASYNC_GENERATOR)


def answering(spec: ToolSpec) -> ToolSpec:
    """Returns a tool whose handler no longer raises, and returns what this module says.

    Generators are left to the SDK: their chunks have been shown before they could fail.
    """
    if spec.kind in _CHUNKS:
        return spec
    run = _async_run if spec.kind is HandlerKind.ASYNC else _sync_run
    return replace(spec, handler=run(spec.tool.name, spec.handler))


def unknown_tool(name: str) -> Result:
    """Returns the result of a call of a tool that is not there."""
    return _failure(f"unknown tool: {name}", Code.NOT_FOUND, Stage.NOT_DISPATCHED)


def _sync_run(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **arguments: Any) -> Any:
        try:
            returned = handler(*given, **arguments)
            return _awaited(name, returned) if inspect.isawaitable(returned) else _answer(returned)
        except BaseException as problem:
            return _raised(name, problem)

    return run


def _async_run(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
    async def run(*given: Any, **arguments: Any) -> Any:
        try:
            return _answer(await handler(*given, **arguments))
        except BaseException as problem:
            return _raised(name, problem)

    return run


async def _awaited(name: str, returned: Any) -> Any:
    """Waits for what a plain function handed back: a lambda or a decorator round an async one."""
    try:
        return _answer(await returned)
    except BaseException as problem:
        return _raised(name, problem)


def _answer(returned: Any) -> Any:
    if isinstance(returned, _OF_THE_SDK) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        return returned
    if isinstance(returned, dict) and "is_error" in returned:
        return returned
    if isinstance(returned, list | tuple) and any(isinstance(each, pb.ContentBlock) for each in returned):
        return returned
    output = dump_output(returned)
    word = _soft_error(returned)
    if not word:
        return Result(output_json=output)
    return Result(output_json=output, is_error=True, error=CallError(Code.TOOL, word, Stage.ACCEPTED))


def _soft_error(returned: Any) -> str:
    """Returns a tool's own word for its failure; "" where it reports none."""
    word = returned.get("error") if isinstance(returned, dict) else None
    if not word or (isinstance(word, int | float) and word is not True):
        return ""
    return word if isinstance(word, str) else dump_output(word)


def _raised(name: str, problem: BaseException) -> Result:
    """Returns the result of a handler that raised; the end of its task is the SDK's to answer, and is raised on."""
    if isinstance(problem, asyncio.CancelledError | GeneratorExit):
        raise problem
    log.warning("tool %s failed", name, exc_info=problem)
    return _failure(f"tool exec: {_text(problem)}", Code.TOOL, Stage.ACCEPTED, type(problem).__name__)


def _text(problem: BaseException) -> str:
    """Returns what an exception says; with its class where that alone says nothing, as a KeyError's key."""
    kind = type(problem).__name__
    try:
        told = str(problem)
    except Exception:  # an exception whose own text raises
        told = ""
    if isinstance(problem, MemoryError):
        return f"{kind}: the process has no memory left: hold less at once, or grant more memory_mb in _manifest.json"
    if isinstance(problem, FileNotFoundError) and "temporary directory" in told:
        return 'tools have no temporary folder: grant the file a folder, under "write" in _manifest.json'
    return f"{kind}: {told}" if told and isinstance(problem, KeyError) else told or kind


def _failure(text: str, code: Code, stage: Stage, reason: str = "") -> Result:
    clean = text.encode("utf-8", "replace").decode()
    shown = clean if len(clean) <= _MAX_TEXT else clean[: _MAX_TEXT - 1] + "…"
    error = CallError(code, shown, stage, reason=reason)
    return Result(output_json=dump_output({"error": shown}), is_error=True, error=error)
