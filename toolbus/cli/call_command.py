"""``toolbus call``: one call of one tool, from the words of the command line to the result."""

from __future__ import annotations

import json
import math
import shlex
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, JsonOption, LevelOption, UserOption
from toolbus.cli.help_text import manual

if TYPE_CHECKING:
    from toolbus.functions.call_context import CallContext
    from toolbus.tool import CallError, Result
    from toolbus.v1 import tool_pb2 as pb

MANUAL = manual(
    (
        "toolbus call get_weather city=Paris days=3",
        """toolbus call get_weather '{"city": "Paris"}' --timeout 5 --json""",
        "toolbus call summarize @request.json --progress",
        """echo '{"a": 1}' | toolbus call add - b=2""",
        "toolbus call report year=2026 --user u-17 --background-after 5",
    ),
    """
    Arguments are a JSON object, @FILE or - (standard input), and then KEY=VALUE pairs, which win over it. A value
    counts as JSON where it is JSON (3, true, null, [1,2], "3"), else as a string. Ctrl-C cancels the call.

    The output goes to standard output as JSON. An error goes to standard error, with its code, how far the call had
    got (stage), whether it is safe to call again (retry_safe), and the limit that ended it. With --json both are in
    one document: output, is_error, error, content.

    With --background-after a call that takes longer becomes a task and goes on without this command. Its id goes to
    standard output, as it is and not as JSON; with --json it stands in the output as task_id. `toolbus tasks await ID`
    gets the result, with the same --user.
    """,
    "0 done, 1 the tool or the bus said no, 2 wrong usage, 3 no bus there, 130 cancelled by Ctrl-C.",
)
_ENVELOPE = {"status", "task_id", "tool", "message"}  # the keys of what a call is answered with that became a task


def call(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tool, as `toolbus list` shows it.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENT...", help="JSON, @FILE or -, then KEY=VALUE; none means {}."),
    ] = None,
    bus: BusOption = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long the call may take (default: the tool's own).")
    ] = None,
    role: Annotated[str | None, typer.Option(metavar="NAME", help="Look only at tools of this role.")] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Tell the tool about the circumstances; may be repeated. user_id and traceparent are fields of their "
            "own, anything else is an attribute.",
        ),
    ] = None,
    user: UserOption = None,
    level: LevelOption = None,
    background_after: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Let it go on as a task after so long.")
    ] = None,
    progress: Annotated[
        bool, typer.Option("--progress", help="Show progress and chunks of output on standard error.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Call a tool and print what it returns."""
    text = read_arguments(arguments or [])
    pairs = [_pair(word, "--context") for word in context or []]
    if user and "user_id" in dict(pairs):
        terminal.fail("--user and --context user_id=… say the same: drop one", terminal.USAGE)
    if level is not None and "level" in dict(pairs):
        terminal.fail("--level and --context level=… say the same: drop one", terminal.USAGE)
    check_seconds("--timeout", timeout)
    check_seconds("--background-after", background_after)
    options: dict[str, Any] = {"timeout": timeout, "role": role, "background_after": background_after}
    pairs += [("user_id", user)] if user else []
    pairs += [("level", str(level))] if level is not None else []
    if pairs:
        options["context"] = _context(pairs)
    if progress:
        options["on_progress"] = _show_progress
    result = bus_client.with_host(bus, lambda host: host.call(name, text, **options))
    task_id = None if as_json or background_after is None else _task_of(result)
    if task_id is None:
        show(result, as_json)
    else:
        print(task_id)
        owner = dict(pairs).get("user_id")
        await_it = f"toolbus tasks await {task_id}" + (f" --user {shlex.quote(owner)}" if owner else "")
        print(terminal.clean(f"toolbus: {name} goes on as a task: `{await_it}` gets its result"), file=sys.stderr)


def check_seconds(option: str, seconds: float | None) -> None:
    """Ends the command where an option is no length of time."""
    if seconds is not None and not 0 < seconds < math.inf:
        terminal.fail(f"{option} is {seconds:g}, it must be a finite number of seconds, more than 0", terminal.USAGE)


def administer(
    bus: str | None, name: str, arguments: Mapping[str, Any], user: str | None = None, level: int | None = None
) -> Any:
    """Calls one of the bus's own tools and returns its output; ends the command where that fails."""
    context = bus_client.on_behalf(user, level)
    result = bus_client.with_host(bus, lambda host: host.call(f"toolbus:{name}", arguments, context=context))
    if result.is_error:
        show(result, as_json=False)
    return result.output


def read_arguments(words: Sequence[str]) -> str:
    """Returns the JSON text of the arguments; ends the command where the words make none."""
    if not words:
        return "{}"
    document = words[0] if words[0] == "-" or words[0].startswith(("{", "@")) else ""
    pairs = dict(_pair(word, "argument") for word in words[1 if document else 0 :])
    if not document:
        return _dumped(pairs)
    where, text = _document(document)
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as problem:
        terminal.fail(f"{where} is no JSON: {problem}", terminal.USAGE)
    if not isinstance(found, dict):
        terminal.fail(f"{where} is no JSON object: arguments have names, write for example city=Paris", terminal.USAGE)
    return _dumped({**found, **pairs}) if pairs else text  # as it was written, where nothing was added


def _document(word: str) -> tuple[str, str]:
    """Returns where a document stands, for error texts, and its text."""
    if word == "-":
        return "standard input", sys.stdin.read()
    if not word.startswith("@"):
        return "the argument", word
    try:
        with open(word[1:], encoding="utf-8") as opened:
            return word[1:], opened.read()
    except (OSError, UnicodeDecodeError) as problem:
        terminal.fail(f"cannot read {word[1:]}: {getattr(problem, 'strerror', None) or problem}", terminal.USAGE)


def _pair(word: str, what: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not key or not equals:
        terminal.fail(
            f"{what} {word!r} is not KEY=VALUE, nor a JSON object, @FILE or - before all pairs", terminal.USAGE
        )
    if what == "--context":
        return key, value
    try:
        return key, json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return key, value


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _dumped(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _context(pairs: Sequence[tuple[str, str]]) -> CallContext:
    from toolbus.functions.call_context import CallContext

    said = dict(pairs)
    user_id, traceparent = said.pop("user_id", ""), said.pop("traceparent", "")
    return CallContext(user_id=user_id, attributes=said, traceparent=traceparent)


# -- what comes back -------------------------------------------------------------------------------------------------


def show(result: Result, as_json: bool) -> None:
    """Prints a result; ends the command where the call failed."""
    if as_json:
        terminal.say_json(_as_record(result))
    else:
        if not result.is_error or result.output_json not in ("", "null"):
            terminal.say_json(_parsed(result))
        show_content(result)
        if result.is_error:
            _show_error(result.error)
    if result.is_error:
        raise typer.Exit(terminal.REFUSED)


def show_content(result: Result) -> None:
    """Says on standard error what a result holds beside its output."""
    for block in result.content:
        print(_described(block), file=sys.stderr)


def _task_of(result: Result) -> str | None:
    """Returns the id of the task that a call became; None where the result is the tool's own."""
    found = _parsed(result)
    if not isinstance(found, dict) or found.keys() != _ENVELOPE or found["status"] != "running":
        return None
    return terminal.clean(str(found["task_id"]))


def _show_error(error: CallError | None) -> None:
    if error is None:
        print("toolbus: the tool calls its output an error", file=sys.stderr)
        return
    said = [f"code={error.code.name}", f"stage={error.stage.name}", f"retry_safe={str(error.retry_safe).lower()}"]
    if error.limit is not None:
        said.append(f"limit={error.limit[0]}={error.limit[1]:g}")
    if error.retry_after_seconds:
        said.append(f"retry_after_seconds={error.retry_after_seconds:g}")
    if error.reason and error.reason != error.message:
        said.append(f"reason={terminal.clean(error.reason)}")
    print(f"toolbus: {terminal.utf8(error.message)}\n{' '.join(said)}", file=sys.stderr)


def _as_record(result: Result) -> dict[str, Any]:
    record: dict[str, Any] = {"output": _parsed(result), "is_error": result.is_error, "error": None}
    if (error := result.error) is not None:
        record["error"] = {
            "code": error.code.name,
            "stage": error.stage.name,
            "message": error.message,
            "retry_safe": error.retry_safe,
            "limit": {"name": error.limit[0], "value": error.limit[1]} if error.limit else None,
            "retry_after_seconds": error.retry_after_seconds,
            "reason": error.reason,
        }
    return record | content_of(result)


def content_of(result: Result) -> dict[str, Any]:
    """Returns what a result holds beside its output, as JSON shows it; empty where there is nothing."""
    return {"content": [_block(block) for block in result.content]} if result.content else {}


def _parsed(result: Result) -> Any:
    try:
        return result.output
    except (ValueError, RecursionError):  # a plugin that sends something else than JSON
        return result.output_json


def _block(block: pb.ContentBlock) -> dict[str, Any]:
    kind = block.WhichOneof("kind") or "unknown"
    match kind:
        case "text":
            return {"kind": kind, "text": block.text.text}
        case "image" | "audio":
            part = block.image if kind == "image" else block.audio
            return {"kind": kind, "mime_type": part.mime_type, "data": b64encode(part.data).decode()}
        case "resource_link":
            link = block.resource_link
            return {"kind": kind, "uri": link.uri, "name": link.name, "mime_type": link.mime_type}
        case _:
            return {"kind": kind}


def _described(block: pb.ContentBlock) -> str:
    match block.WhichOneof("kind"):
        case "text":
            return terminal.utf8(block.text.text)
        case "image" | "audio" as kind:
            part = block.image if kind == "image" else block.audio
            return f"({kind}, {terminal.clean(part.mime_type)}, {len(part.data)} bytes; --json prints it as base64)"
        case "resource_link":
            return terminal.clean(f"{block.resource_link.name} {block.resource_link.uri}")
        case _:
            return "(content of a kind that this version does not know)"


def _show_progress(progress: Any) -> None:
    if progress.message or progress.progress or progress.total:
        part = f"{progress.progress:g}" + (f"/{progress.total:g}" if progress.total else "")
        print(f"… {part} {terminal.clean(progress.message)}".rstrip(), file=sys.stderr, flush=True)
    if progress.chunk:
        print(terminal.utf8(progress.chunk), end="", file=sys.stderr, flush=True)
