"""Runs one handler and makes exactly one Result of it.

A returned value becomes the output, an exception (SystemExit included) the tool's error, a cancelled handler a
CANCELLED result. Tracebacks go to the log of the plugin, never onto the wire. The module knows no connection:
`run_handler` runs any handler, in a task of its own. For thousands of calls a second there are `run_plain` and
`run_async`, which do only what one kind of handler needs.

A handler may return (REST-62), checked in this order:

- `Reply`, `Ok`, `Err`: as documented there;
- a `Result`, from calling another tool: passed on, its failure as this tool's, its questions too;
- a dict with a true `is_error`, or with `is_error` and `output`: an envelope. `error` is the tool's text, `output` the
  output; without `output` the other keys are the output, null if there are none;
- a dict with `output` and `images` (`data_b64`, `mime`, `vision_prompt`), as newer N.E.K.O. plugins return pictures:
  the output, and each picture below its text;
- content blocks (`text`, `image` …), alone or as a list: content, with a null output;
- anything else: the output.

A generator yields chunks, each a str: each is reported as progress at once, and joined they are the output.
Arguments that the function cannot take end in INVALID_ARGUMENTS before it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from toolbus.common.text import repair_utf8, shorten
from toolbus.errors import Code, NotAudited, NotKept, RequestError, Stage
from toolbus.functions.conversion import WrittenNumber
from toolbus.functions.reply import Err, Ok, Reply, dump_output, pictures_of
from toolbus.functions.scope import InputNeeded, ToolScope
from toolbus.functions.tool_spec import HandlerKind, ToolSpec
from toolbus.protocol.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger(__name__)

_JSON_TYPES = frozenset((dict, str, int, float, bool, type(None)))  # of the values of most handlers
_read = json.JSONDecoder().raw_decode
_read_exact = json.JSONDecoder(parse_float=WrittenNumber).raw_decode

MAX_MESSAGE = 4096  # characters of an exception's text that are sent: a model needs a sentence, not a dump

Outcome = str | Result
"""The end of a call: the JSON text of its output, for nearly all that succeed, or a whole result."""

RunSync = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function of no arguments off the loop; `functools.partial(loop.run_in_executor, pool)` is one."""


class CallLost(Exception):
    """Ends a call with UNAVAILABLE: what its handler had handed it on to has ended, and the tool is not at fault.

    Args:
        ran: whether it may have begun; else a retry is safe whatever the tool does.
        retry_after: seconds until it can succeed.
    """

    def __init__(self, text: str, *, ran: bool, retry_after: float = 0.0) -> None:
        super().__init__(text)
        self.ran = ran
        self.retry_after = retry_after


async def run_handler(
    spec: ToolSpec, arguments: Mapping[str, Any] | str, scope: ToolScope, run_sync: RunSync
) -> Result:
    """Runs a tool once. Never raises, except for GeneratorExit if the coroutine itself is closed.

    If the task that runs this is cancelled, it returns a CANCELLED result, so it must be the outermost of its task.
    A sync handler cannot be interrupted: it can only check its scope.

    Args:
        arguments: parsed, or the JSON text of the call.
        run_sync: runs a sync handler off the loop.
    """
    if spec.is_async:
        outcome = await run_async(spec, arguments, scope)
    else:
        try:
            ended = await run_sync(lambda: run_plain(spec, arguments, scope))
        except GeneratorExit:
            raise
        except BaseException as problem:
            ended = _failed(spec, scope, problem)
            scope.end()
        outcome = await finish_plain(spec, scope, ended) if isinstance(ended, Unfinished) else ended
    return Result(scope.call_id, outcome) if isinstance(outcome, str) else outcome


async def run_async(spec: ToolSpec, arguments: Mapping[str, Any] | str, scope: ToolScope) -> Outcome:
    """Runs an async handler, as `run_handler` does."""
    try:
        if scope.cancel_reason is not None:
            scope.raise_if_cancelled()  # before its first step
        keywords = _keywords(spec, arguments, scope)
        if isinstance(keywords, Result):
            return keywords
        running = spec.handler(keywords) if spec.takes_dict else spec.handler(**keywords)
        returned = await (running if spec.kind is HandlerKind.ASYNC else _drain_async(running, scope))
        return _finish(spec, scope, returned)
    except GeneratorExit:
        raise
    except BaseException as problem:
        return _failed(spec, scope, problem)
    finally:
        scope.end()


class Unfinished(NamedTuple):
    """The value of a plain function that still has to be awaited: a lambda or decorator around an async function.

    Attributes:
        returned: an awaitable or an async generator.
    """

    returned: Any


def run_plain(spec: ToolSpec, arguments: Mapping[str, Any] | str, scope: ToolScope) -> Outcome | Unfinished:
    """Runs a plain function from beginning to end, on this thread. Never raises.

    It catches everything, because a future does not pass on some exceptions (StopIteration, SystemExit).
    """
    try:
        if scope.cancel_reason is not None:
            scope.raise_if_cancelled()  # it may have waited for a thread
        keywords = _keywords(spec, arguments, scope)
        if isinstance(keywords, Result):
            outcome: Outcome = keywords
        else:
            returned = spec.handler(keywords) if spec.takes_dict else spec.handler(**keywords)
            if type(returned) not in _JSON_TYPES:
                if inspect.isgenerator(returned):
                    returned = _drain(returned, scope)
                if inspect.isawaitable(returned) or inspect.isasyncgen(returned):
                    return Unfinished(returned)
            outcome = _finish(spec, scope, returned)
    except BaseException as problem:
        outcome = _failed(spec, scope, problem)
    scope.end()
    return outcome


async def finish_plain(spec: ToolSpec, scope: ToolScope, unfinished: Unfinished) -> Outcome:
    """Awaits the value of a plain function, as `run_handler` does."""
    returned = unfinished.returned
    try:
        if scope.cancel_reason is not None and (task := asyncio.current_task()) is not None:
            task.cancel(scope.cancel_reason)  # it was cancelled while the function ran, and ends at its first wait
        return _finish(spec, scope, await (_drain_async(returned, scope) if inspect.isasyncgen(returned) else returned))
    except GeneratorExit:
        raise
    except BaseException as problem:
        return _failed(spec, scope, problem)
    finally:
        scope.end()


def _keywords(spec: ToolSpec, arguments: Mapping[str, Any] | str, scope: ToolScope) -> dict[str, Any] | Result:
    """Returns the handler's keyword arguments, or an error result if they do not fit."""
    keywords: dict[str, Any] | None
    if isinstance(arguments, str):
        try:
            # Half the time of `json.loads`, but accepts no blanks around the value.
            keywords, end = _read_exact(arguments) if spec.exact else _read(arguments)
            if end != len(arguments) or type(keywords) is not dict:
                keywords = _parse(arguments, spec)
        except (ValueError, RecursionError):
            keywords = _parse(arguments, spec)
    else:
        keywords = dict(arguments)
    if keywords is None:
        return _refused(scope, f"the arguments of {spec.tool.name} are not a JSON object: send one", "")
    if spec.prepare is not None:
        keywords = spec.prepare(keywords, scope)
    keys = keywords.keys()
    if not spec.required <= keys or (spec.names is not None and not keys <= spec.names):
        return _refused(scope, f"TypeError: {_misfit(spec, keywords)}", "TypeError")
    others = () if spec.rest is None else ((each, spec.rest) for each in keys - spec.declared)
    for name, convert in (*spec.converters, *others) if others else spec.converters:
        if name in keywords:
            try:
                keywords[name] = convert(keywords[name])
            except Exception as problem:
                return _misconverted(scope, name, keywords[name], problem)
    for name, make in spec.defaults:
        if name not in keywords:
            keywords[name] = make()
    if spec.scope:
        keywords[spec.scope] = scope
    return keywords


def _misconverted(scope: ToolScope, name: str, value: Any, problem: Exception) -> Result:
    kind, text = type(problem).__name__, str(problem)
    if hasattr(problem, "error_count") and callable(errors := getattr(problem, "errors", None)):
        # The text of pydantic 2 has URLs.
        faults = errors(include_url=False, include_context=False, include_input=False)
        text = "; ".join(": ".join(filter(None, (".".join(map(str, each["loc"])), each["msg"]))) for each in faults)
    elif isinstance(value, str) and value[:80] not in text:
        text = f"{value!r:.80}: {text}"
    return _refused(scope, f"{kind}: argument {name!r}: {text}", kind)


def _refused(scope: ToolScope, message: str, reason: str) -> Result:
    """Returns the result of a call whose arguments the function cannot take: it has not run."""
    error = CallError(Code.INVALID_ARGUMENTS, _cut(message), Stage.NOT_DISPATCHED, reason=_cut(reason))
    return Result(scope.call_id, "null", is_error=True, error=error)


def _parse(text: str, spec: ToolSpec) -> dict[str, Any] | None:
    """Returns the object of a JSON text; None if the text is something else."""
    try:
        value = json.loads(text, parse_float=WrittenNumber if spec.exact else None) if text else {}
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _misfit(spec: ToolSpec, keywords: Mapping[str, Any]) -> str:
    missing = sorted(spec.required - keywords.keys())
    unexpected = sorted(keywords.keys() - (keywords.keys() if spec.names is None else spec.names))
    parts = [f"is missing {', '.join(map(repr, missing))}"] if missing else []
    parts += [f"takes no argument {', '.join(map(repr, unexpected))}"] if unexpected else []
    takes = f" (it takes {', '.join(sorted(spec.names)) or 'none'})" if spec.names is not None else ""
    return f"{spec.tool.name}() {' and '.join(parts)}{takes}"


def _drain(chunks: Generator[Any, Any, Any], scope: ToolScope) -> str:
    texts: list[str] = []
    try:
        while True:
            scope.raise_if_cancelled()
            texts.append(_chunk(next(chunks), scope))
    except StopIteration as end:
        if end.value is not None:
            raise TypeError("a generator's chunks are its output, it must not return a value: yield it") from None
        return "".join(texts)
    finally:
        chunks.close()


async def _drain_async(chunks: AsyncGenerator[Any, Any], scope: ToolScope) -> str:
    async with contextlib.aclosing(chunks):
        return "".join([_chunk(each, scope) async for each in chunks])


def _chunk(each: Any, scope: ToolScope) -> str:
    if not isinstance(each, str):
        raise TypeError(f"a generator yields chunks of text, not {type(each).__name__}: yield str, or return the value")
    scope.progress(chunk=each)
    return each


def _finish(spec: ToolSpec, scope: ToolScope, returned: Any) -> Outcome:
    """Returns the outcome of a call from the value of its handler.

    Raises:
        TypeError: JSON cannot hold it.
    """
    kind = type(returned)
    if kind is dict:
        if "is_error" not in returned and "images" not in returned:
            return dump_output(returned, with_bytes=spec.bytes_output)
    elif kind in _JSON_TYPES:
        return dump_output(returned)
    if isinstance(returned, Ok):
        returned = returned.value
    if isinstance(returned, Result):
        return _passed_on(scope, returned)
    if isinstance(returned, Reply):
        content = _blocks(returned)
        output = dump_output(returned.output)
        if returned.error or returned.is_error:
            return _tool_error(scope, returned.error, output, content)
        return Result(scope.call_id, output, content=content)
    if isinstance(returned, Err):
        return _tool_error(scope, returned.error, "null")
    if isinstance(returned, dict) and "images" in returned and (pictures := pictures_of(returned)) is not None:
        if returned.get("is_error"):
            return _tool_error(scope, returned.get("error"), dump_output(returned["output"]), pictures)
        return Result(scope.call_id, dump_output(returned["output"]), content=pictures)
    if isinstance(returned, dict) and "is_error" in returned and (returned["is_error"] or "output" in returned):
        rest = {key: each for key, each in returned.items() if key not in ("is_error", "error")}
        output = dump_output(returned.get("output", rest or None))
        if not returned["is_error"]:
            return Result(scope.call_id, output)
        return _tool_error(scope, returned.get("error"), output)
    if isinstance(returned, pb.ContentBlock):
        returned = [returned]
    if isinstance(returned, list | tuple) and returned and all(isinstance(each, pb.ContentBlock) for each in returned):
        return Result(scope.call_id, content=tuple(returned))
    return dump_output(returned, with_bytes=spec.bytes_output)


def _passed_on(scope: ToolScope, inner: Result) -> Result:
    """Returns another tool's result as this one's; its failure, of whatever code, becomes this tool's error.

    Raises:
        TypeError: the handler made it, of values that no result can hold.
    """
    for name in ("output_json", "input_requests_json", "request_state"):
        if not isinstance(text := getattr(inner, name), str):
            kind = type(text).__name__
            raise TypeError(f"Result.{name} is of type {kind}, not a text: return the value itself, or a Reply")
    content = _blocks(inner)
    if inner.error is None and not inner.is_error:
        return replace(inner, call_id=scope.call_id, is_error=False, content=content)
    error = inner.error or CallError(Code.TOOL, "")
    reason = error.reason or ("" if error.code is Code.TOOL else error.code.name)
    message = error.message or error.code.name
    return _error(scope, Code.TOOL, _cut(message), reason, inner.output_json, content)


def _blocks(owner: Reply | Result) -> tuple[pb.ContentBlock, ...]:
    content: Any = owner.content  # an author's
    for each in content:
        if not isinstance(each, pb.ContentBlock):
            where, kind = type(owner).__name__, type(each).__name__
            raise TypeError(f"{where}.content holds a {kind}: make its parts with text(), image(), link() …")
    return tuple(content)


def _tool_error(scope: ToolScope, error: Any, output: str, content: tuple[pb.ContentBlock, ...] = ()) -> Result:
    """Returns the result of a tool that failed; its own text is the message and the reason."""
    if isinstance(error, BaseException):
        return _error(scope, Code.TOOL, _sentence(error), type(error).__name__, output, content)
    text = error if isinstance(error, str) else "" if error is None else dump_output(error)
    message = _cut(text) or "the tool reported an error without a text"
    return _error(scope, Code.TOOL, message, text, output, content)


def _failed(spec: ToolSpec, scope: ToolScope, problem: BaseException) -> Result:
    """Returns the result of a handler that raised; a group of one exception, or of questions, counts as the first."""
    raised, leaves = problem, _leaves(problem)
    if len(leaves) == 1 or all(isinstance(each, InputNeeded) for each in leaves):
        problem = leaves[0]
    if isinstance(problem, InputNeeded):
        try:
            return _passed_on(scope, problem.result(scope.call_id))
        except (TypeError, ValueError) as fault:
            problem = TypeError(f"a question cannot be written as JSON: {fault}")
    if isinstance(problem, asyncio.CancelledError):
        why = scope.cancel_reason or "its handler was cancelled inside the plugin"
        return _error(scope, Code.CANCELLED, f"the call of {spec.tool.name} was cancelled: {why}")
    if isinstance(problem, CallLost):
        stage = Stage.ACCEPTED if problem.ran else Stage.NOT_DISPATCHED
        safe = not problem.ran or spec.tool.repeatable
        after = problem.retry_after
        error = CallError(Code.UNAVAILABLE, _cut(str(problem)), stage, retry_safe=safe, retry_after_seconds=after)
        return Result(scope.call_id, "null", is_error=True, error=error)
    away = isinstance(problem, NotKept | NotAudited)  # the tool is not at fault: the disk, or what the buses share
    refuses = away or isinstance(problem, RequestError)  # the text explains it
    level = logging.DEBUG if refuses else logging.WARNING
    log.log(level, "tool %s failed in call %s", spec.tool.name, scope.call_id, exc_info=None if refuses else raised)
    return _error(scope, Code.UNAVAILABLE if away else Code.TOOL, _sentence(problem), type(problem).__name__)


def _sentence(problem: BaseException) -> str:
    try:
        text = str(problem)
    except Exception:  # an exception whose own text raises
        text = ""
    if isinstance(problem, BaseExceptionGroup):  # its text has only their number
        text += f": {'; '.join(map(_sentence, _leaves(problem)))}"
    return _cut(f"{type(problem).__name__}: {text}" if text else type(problem).__name__)


def _leaves(problem: BaseException) -> list[BaseException]:
    """Returns the exceptions of a group, or any other exception itself."""
    inside = problem.exceptions if isinstance(problem, BaseExceptionGroup) else ()
    return [leaf for each in inside for leaf in _leaves(each)] or [problem]


def _cut(text: str) -> str:
    return shorten(repair_utf8(text), MAX_MESSAGE)


def _error(
    scope: ToolScope,
    code: Code,
    message: str,
    reason: str = "",
    output: str = "null",
    content: tuple[pb.ContentBlock, ...] = (),
) -> Result:
    error = CallError(code, message, Stage.ACCEPTED, reason=_cut(reason))
    return Result(scope.call_id, output, is_error=True, error=error, content=content)
