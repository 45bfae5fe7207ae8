"""Implements ``toolbus call``: reads the arguments from the command line, calls one tool, and prints the result."""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from mimetypes import guess_extension
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption, LevelOption, UserOption
from toolbus.cli.help_text import epilog
from toolbus.common.terminal_input import read_line
from toolbus.common.text import clean_line, parse_json
from toolbus.protocol.input_requests import InvalidInput, check_answer
from toolbus.protocol.questions import CANCELLED, DECLINED, FORM, Answer, Question

if TYPE_CHECKING:
    from toolbus.functions.call_context import CallContext
    from toolbus.protocol.tool import CallError, Result
    from toolbus.sdk import Host
    from toolbus.v1 import tool_pb2 as pb

ReadLine = Callable[[str], Awaitable[str | None]]  # gets the prompt; None: the end of the input, Ctrl-D

_TYPES = {"integer": "whole number", "number": "number", "boolean": "yes or no", "array": "several, with commas"}


async def ask_person(question: Question, read: ReadLine = read_line) -> Answer:
    """Returns what a person answers to a form; an empty required field or Ctrl-D declines."""
    if question.needs != FORM:
        return CANCELLED
    terminal.print_note(f"the tool asks: {question.message}")
    schema = question.schema
    fields, required = schema.get("properties") or {}, schema.get("required") or ()
    if not fields:
        text = await read("  accept? (yes or no; Enter: no)")
        return Answer() if (text or "").strip().lower() in _YES else DECLINED
    content: dict[str, Any] = {}
    for name, field in fields.items():
        while True:
            text = await read(_prompt(name, field, name in required))
            if text is None:
                return DECLINED
            if not text.strip():
                if "default" in field:
                    content[name] = field["default"]
                elif name in required:
                    return DECLINED
                break
            value = _value(text, field)
            fault = _fault(question, name, field, value)
            if not fault:
                content[name] = value
                break
            terminal.print_lines(f"  {fault}", sys.stderr)
    return Answer(content=content)


def _plain(field: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a field without null, which is an answer that is left out: of a type, an enum, or alternatives."""
    for key in ("anyOf", "oneOf"):
        rest = [
            each for each in field.get(key) or () if not (each.get("type") == "null" or each.get("const", 0) is None)
        ]
        if key in field and len(rest) == 1 and "const" not in rest[0]:
            return _plain({**{name: value for name, value in field.items() if name != key}, **rest[0]})
        if key in field:
            field = {**field, key: rest}
    if isinstance(types := field.get("type"), list):
        rest = [each for each in types if each != "null"]
        field = {**field, "type": rest[0] if len(rest) == 1 else rest}
    if None in (field.get("enum") or ()):
        field = {**field, "enum": [each for each in field["enum"] if each is not None]}
    return field


def _prompt(name: str, field: Mapping[str, Any], is_required: bool) -> str:
    field = _plain(field)
    choices = _choices(field)
    about = [str(field["description"])] if field.get("description") else []
    about += [_TYPES[kind]] if (kind := str(field.get("type"))) in _TYPES else []
    about += [f"one of {', '.join(choices)}"] if choices else []
    without = "decline" if is_required else "leave it out"
    about.append(f"Enter: {_shown(field['default']) if 'default' in field else without}")
    return f"  {field.get('title') or name} ({'; '.join(about)}):"


def _choices(field: Mapping[str, Any]) -> list[str]:
    """Returns what can be chosen, each with its title where it has one."""
    options = (
        _plain(field["items"]) if field.get("type") == "array" and isinstance(field.get("items"), Mapping) else field
    )
    names = options.get("enumNames") or ()
    listed = [
        f"{value} ({names[index]})" if index < len(names) else str(value)
        for index, value in enumerate(options.get("enum") or ())
    ]
    titled = [each for each in options.get("oneOf") or options.get("anyOf") or () if "const" in each]
    return listed or [
        f"{each['const']} ({each['title']})" if "title" in each else str(each["const"]) for each in titled
    ]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _value(text: str, field: Mapping[str, Any]) -> Any:
    """Returns a text as the field has it; as it is where it cannot be read so, which the rules of the form refuse."""
    word, field = text.strip(), _plain(field)
    match field.get("type"):
        case "boolean":
            return True if word.lower() in _YES else False if word.lower() in _NO else word
        case "array":
            return [each.strip() for each in word.split(",") if each.strip()]
        case "integer" | "number":
            try:
                return parse_json(word)
            except (ValueError, RecursionError):
                return word
        case _:
            return word if _choices(field) else text


def _fault(question: Question, name: str, field: Mapping[str, Any], value: Any) -> str:
    """Returns what is wrong with the value of one field; "" where it fits."""
    form = {"type": "object", "properties": {name: field}}
    alone = {"method": question.method, "params": {**question.params, "requestedSchema": form}}
    try:
        check_answer(alone, Answer(content={name: value}).to_json())
    except InvalidInput as error:
        return str(error)
    except (KeyError, TypeError):  # a type that forms do not have: the tool may know it
        return ""
    return ""


# What a value means is decided by the type that the tool's schema declares for its key: `city=2024` is a text where the
# schema says string. Where nothing is declared, a value that is JSON is read as JSON, and any other is a text.

MAX_REFERENCES = 32  # that are followed for one value; a schema may refer to itself
_KINDS = ("string", "integer", "number", "boolean", "array", "object", "null")
_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_BRANCHES = ("anyOf", "oneOf", "allOf")


@dataclass(frozen=True, slots=True)
class ArgumentWords:
    """The arguments of a command line, before the schema of their tool is known.

    Attributes:
        document: the JSON text before all pairs; empty without one.
        pairs: the values by their keys, as they were written.
    """

    document: str
    pairs: Mapping[str, str]

    @classmethod
    def read(cls, words: Sequence[str]) -> ArgumentWords:
        """Reads words; ends the command if they are not arguments."""
        first = words[0] if words and (words[0] == "-" or words[0].startswith(("{", "@"))) else ""
        pairs = _pairs(words[1 if first else 0 :], "argument")
        return cls(_document(first) if first else "", pairs)

    def text(self, schema: Mapping[str, Any] | None = None) -> str:
        """Returns the JSON text of the arguments.

        Args:
            schema: of the tool's arguments; None where it is not known.
        """
        if not self.pairs:
            return self.document or "{}"  # as it was written
        values = {key: typed_value(value, declared_types(schema or {}, key)) for key, value in self.pairs.items()}
        document = parse_json(self.document) if self.document else {}
        return json.dumps({**document, **values}, ensure_ascii=False)


async def schema_of(host: Host, name: str, role: str | None, context: CallContext | None) -> Mapping[str, Any] | None:
    """Returns the schema of a tool's arguments; None if the bus lists no such tool for this caller."""
    from toolbus.errors import RequestError

    try:
        listed = list(await host.list(role, names=(name,), context=context, include_offline=True))
        if not listed and ":" not in name:  # the bare name of a tool that is listed with its source
            everything = await host.list(role, context=context, include_offline=True)
            listed = [each for each in everything if each.tool.name.endswith(f":{name}")]
        elif not listed:  # of operators: the bus lists those of one source only
            source = name.rpartition(":")[0]
            listed = list(await host.list(role, names=(name,), source=source, context=context, include_offline=True))
        return listed[0].tool.parameters if listed else None
    except (RequestError, ValueError):  # the call says better what is wrong
        return None


def typed_value(text: str, types: frozenset[str]) -> Any:
    """Returns the value that a text on the command line stands for.

    Args:
        types: those that the schema declares; none where it declares no type.
    """
    from toolbus.protocol.json_schema import of_type

    try:
        value = parse_json(text)
    except (ValueError, RecursionError):
        return text
    if types and "string" in types and not any(of_type(value, kind) for kind in types):
        return text
    return value  # where it is of none of the types, the bus says so


def declared_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Returns the types that a schema declares for one argument; none where every type, or no type, is declared."""
    from toolbus.protocol.json_schema import SchemaFault, normal_form

    try:
        root = normal_form(dict(schema)).schema
    except SchemaFault:
        return frozenset()
    properties = root.get("properties")
    part = properties.get(key) if isinstance(properties, Mapping) else None
    types = frozenset(_types(root.get("additionalProperties") if part is None else part, root, [MAX_REFERENCES]))
    return frozenset() if types.issuperset(_KINDS) else types


def _types(schema: Any, root: Mapping[str, Any], left: list[int]) -> Iterator[str]:
    """Yields the types of a schema: its own, those of its values, else those of its branches and of its reference."""
    from toolbus.protocol.json_schema import pointed_at

    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    if declared is not None:
        yield from declared if isinstance(declared, list) else [declared]
        return
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    yield from (_TYPE_NAMES.get(type(value), "null") for value in values)
    if isinstance(reference := schema.get("$ref"), str) and left[0] > 0:
        left[0] -= 1
        yield from _types(pointed_at(root, reference[1:])[0] if reference.startswith("#") else None, root, left)
    for branch in (branch for keyword in _BRANCHES for branch in schema.get(keyword) or ()):
        types = list(_types(branch, root, left))
        yield from types or (_KINDS if branch in ({}, True) else ())


def _pairs(words: Sequence[str], what: str) -> dict[str, str]:
    """Returns the values of words by their keys; ends the command if one is not KEY=VALUE, or repeats a key."""
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        why = "" if key and equals else "is not KEY=VALUE; a JSON object, @FILE or - comes before all pairs"
        if key in pairs:
            why = f"sets {key} again: write a list as one value, {key}='[…]'"
        if why:
            terminal.fail(f"{what} {word!r} {why}", terminal.USAGE)
        pairs[key] = value
    return pairs


def _document(word: str) -> str:
    """Returns the text of a document that is an object of JSON; ends the command if it is not."""
    place, text = _opened(word)
    try:
        arguments = parse_json(text)
    except (ValueError, RecursionError) as error:
        terminal.fail(f"{place} is not JSON: {error}", terminal.USAGE)
    if not isinstance(arguments, dict):
        terminal.fail(
            f"{place} is not a JSON object: arguments have names, write for example city=Paris", terminal.USAGE
        )
    return text


def _opened(word: str) -> tuple[str, str]:
    """Returns the place of a document, for error texts, and its text."""
    if word == "-":
        return "standard input", sys.stdin.read()
    if not word.startswith("@"):
        return "the argument", word
    try:
        with open(word[1:], encoding="utf-8") as opened:
            return word[1:], opened.read()
    except (OSError, UnicodeDecodeError) as error:
        terminal.fail(f"cannot read {word[1:]}: {getattr(error, 'strerror', None) or error}", terminal.USAGE)


_YES, _NO = ("y", "yes", "true", "1"), ("n", "no", "false", "0")


EPILOG = epilog(
    (
        "toolbus call get_weather city=Paris days=3",
        """toolbus call get_weather '{"city": "Paris"}' --timeout 5 --json""",
        "toolbus call draw subject=cat --out pictures",
        """echo '{"a": 1}' | toolbus call add - b=2""",
        "toolbus call report year=2026 --user u-17 --background-after 5",
    ),
    """
    Arguments are a JSON object, @FILE or - (standard input), then KEY=VALUE pairs, which override it. The type that the
    tool's schema declares decides what a value is: city=2024 is a string where it says string. Otherwise a value that
    is JSON (3, true, null, [1,2], "3") is read as JSON, and any other value is a string. Ctrl-C cancels the call.

    The output is printed to standard output as JSON. An error is printed to standard error, with its code, the stage
    that the call had reached, whether it is safe to call again (retry_safe), and the limit that ended it. With --json
    both are in one document: output, is_error, error, content.

    On a terminal a tool that asks has its form filled in field by field, on standard error. Enter takes the default, or
    leaves a field out; an empty required field and Ctrl-D decline. Elsewhere, and with --json, it is an error.

    With --background-after a call that takes longer becomes a task and continues without this command. Its id is
    printed to standard output as plain text; with --json it is in the output as task_id. `toolbus tasks await ID` gets
    the result; it needs the same --user.
    """,
    "0 done, 1 the tool or the bus refused, 2 wrong usage, 3 no bus found, 130 cancelled by Ctrl-C.",
)
_TASK_KEYS = {"status", "task_id", "tool", "message"}  # of the output of a call that became a task
_EXPLAINED = {"NOT_FOUND", "UNAVAILABLE", "PERMISSION_DENIED"}  # about the tool, not the arguments


def call(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the tool, as in `toolbus list`.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENT...", help="A JSON object, @FILE or -, then KEY=VALUE (default: {})."),
    ] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Timeout of the call in seconds (default: that of the tool)."),
    ] = None,
    role: Annotated[
        str | None, typer.Option(metavar="NAME", help="Find the tool in this role only (default: all roles).")
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Add to the context of the call; may be repeated. user_id and traceparent are fields of the context, "
            "other keys are attributes.",
        ),
    ] = None,
    user: UserOption = None,
    level: LevelOption = None,
    background_after: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Continue the call as a task after this many seconds.")
    ] = None,
    progress: Annotated[
        bool | None,
        typer.Option(help="Print progress and chunks of output to standard error (default: on a terminal)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write images, audio and files of the result into a folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Call a tool and print what it returns."""
    words = ArgumentWords.read(arguments or [])
    pairs = _pairs(context or [], "--context")
    for option, key, value in (("--user", "user_id", user or None), ("--level", "level", level)):
        if value is not None and key in pairs:
            terminal.fail(f"{option} and --context {key}=… set the same field: remove one", terminal.USAGE)
        pairs |= {key: str(value)} if value is not None else {}
    check_seconds("--timeout", timeout)
    check_seconds("--background-after", background_after)
    options: dict[str, Any] = {"timeout": timeout, "role": role, "background_after": background_after}
    owner = pairs.get("user_id")
    if pairs:
        from toolbus.functions.call_context import CallContext

        options["context"] = CallContext(pairs.pop("user_id", ""), pairs, traceparent=pairs.pop("traceparent", ""))
    if progress or (progress is None and not as_json and sys.stderr.isatty()):
        options["on_progress"] = show_progress
    if not as_json and sys.stdin.isatty() and sys.stderr.isatty():
        options["on_input"] = ask_person
    result = bus_client.with_host(BusTarget(bus, credential), lambda host: _make(host, name, words, options))
    if out is not None:
        _write_content(result, out, name)
    task_id = None if as_json or background_after is None else _task_of(result)
    if task_id is None:
        show(result, as_json)
    else:
        terminal.print_lines(task_id)
        await_command = f"toolbus tasks await {task_id}" + (f" --user {shlex.quote(owner)}" if owner else "")
        terminal.print_note(f"{name} continues as a task: get its result with `{await_command}`")


async def _make(host: Host, name: str, words: ArgumentWords, options: dict[str, Any]) -> Result:
    schema = await schema_of(host, name, options["role"], options.get("context")) if words.pairs else None
    return await host.call(name, words.text(schema), **options)


def check_seconds(option: str, seconds: float | None) -> None:
    """Ends the command if an option is not a positive number of seconds."""
    if seconds is not None and not 0 < seconds < math.inf:
        terminal.fail(f"{option} is {seconds:g}, it must be a number of seconds above 0", terminal.USAGE)


def call_bus_tool(
    bus: BusTarget,
    name: str,
    arguments: Mapping[str, Any],
    user: str | None = None,
    level: int | None = None,
    source: str | None = None,
) -> Any:
    """Calls one of the bus's own tools and returns its output; ends the command if that fails."""
    context = bus_client.call_context(user, level)
    result = bus_client.with_host(bus, lambda host: host.call(f"toolbus:{name}", arguments, context=context), source)
    if result.is_error:
        show(result, as_json=False, of_bus=True)
    return result.output


Steps = Generator[Any, Any, None]


def operator(plan: Callable[..., Steps]) -> Callable[..., None]:
    """Makes a command of a generator, which yields twice: the tool with its arguments, and what shows the answer.

    The first yield returns the answer. What is shown is left out with --json, which prints the answer instead; what
    comes after the second yield happens in both cases.
    """

    @wraps(plan)
    def command(bus: BusOption, credential: CredentialOption, as_json: JsonOption, **words: Any) -> None:
        steps = plan(**words)
        tool, arguments = next(steps)
        answer = call_bus_tool(BusTarget(bus, credential), tool, arguments)
        show = steps.send(answer)
        if as_json:
            terminal.print_json(answer)
        else:
            show()
        next(steps, None)

    own = inspect.signature(plan, eval_str=True).parameters.values()
    before = [each for each in own if each.kind is not each.KEYWORD_ONLY]
    after = [each for each in own if each.kind is each.KEYWORD_ONLY]
    common = {"bus": (BusOption, None), "credential": (CredentialOption, None), "as_json": (JsonOption, False)}
    bus, credential, as_json = (
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in common.items()
    )
    parameters = [*before, bus, credential, *after, as_json]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


# -- the result --------------------------------------------------------------------------------------------------


def show(result: Result, as_json: bool, of_bus: bool = False) -> None:
    """Prints a result; ends the command if the call failed.

    Args:
        of_bus: whether it is of one of the bus's own tools, whose errors say all that there is to explain.
    """
    if as_json:
        terminal.print_json(_as_record(result))
    else:
        if not result.is_error or result.output_json not in ("", "null"):
            terminal.print_json(_parsed(result))
        show_content(result)
        if result.is_error:
            _show_error(result.error, explainable=not of_bus)
    if result.is_error:
        raise typer.Exit(terminal.REFUSED)


def show_content(result: Result) -> None:
    """Prints to standard error the content that a result has besides its output."""
    for block in result.content_beside_output():
        terminal.print_lines(_described(block), sys.stderr)


def _write_content(result: Result, folder: Path, name: str) -> None:
    """Writes the parts of a result that are no text into new files, and prints their names."""
    for number, block in enumerate(result.content, 1):
        part = getattr(block, block.WhichOneof("kind") or "text")
        if data := getattr(part, "data", b""):
            suffix = guess_extension(part.mime_type) or ".bin"
            file = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{number}{suffix}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with file.open("xb") as opened:
                    opened.write(data)
            except OSError as error:
                terminal.fail(f"{file} cannot be written: {error.strerror}: choose another folder")
            terminal.print_note(f"wrote {file}, {len(data)} bytes")


def _task_of(result: Result) -> str | None:
    """Returns the id of the task that a call became; None if the result is the tool's own."""
    output = _parsed(result)
    if not isinstance(output, dict) or output.keys() != _TASK_KEYS or output["status"] != "running":
        return None
    return clean_line(str(output["task_id"]))


def _show_error(error: CallError | None, explainable: bool) -> None:
    if error is None:
        terminal.print_note("the tool reported its output as an error")
        return
    fields = [f"code={error.code.name}", f"stage={error.stage.name}", f"retry_safe={str(error.retry_safe).lower()}"]
    if error.limit is not None:
        fields.append(f"limit={error.limit[0]}={error.limit[1]:g}")
    if error.retry_after_seconds:
        fields.append(f"retry_after_seconds={error.retry_after_seconds:g}")
    if error.reason and error.reason != error.message:
        fields.append(f"reason={error.reason}")
    terminal.print_note(error.message)
    terminal.print_lines(clean_line(" ".join(fields)), sys.stderr)
    if explainable and error.stage.name == "NOT_DISPATCHED" and error.code.name in _EXPLAINED:
        terminal.print_lines("`toolbus access explain NAME` says step by step why", sys.stderr)


def _as_record(result: Result) -> dict[str, Any]:
    error = None if result.error is None else result.error.described()
    return {"output": _parsed(result), "is_error": result.is_error, "error": error} | content_of(result)


def content_of(result: Result) -> dict[str, Any]:
    """Returns the content that a result has besides its output, for JSON; empty without content."""
    blocks = result.content_beside_output()
    return {"content": [_block(block) for block in blocks]} if blocks else {}


def _parsed(result: Result) -> Any:
    try:
        return result.output
    except (ValueError, RecursionError):  # a plugin that does not send JSON
        return result.output_json


def _block(block: pb.ContentBlock) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    kind = block.WhichOneof("kind")
    part = None if kind is None else getattr(block, kind)
    described: dict[str, Any] = {"kind": kind or "unknown"}
    if part is not None:
        described |= MessageToDict(part, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    if block.annotations_json:
        try:
            described["annotations"] = parse_json(block.annotations_json)
        except (ValueError, RecursionError):
            described["annotations"] = block.annotations_json
    return described


def _described(block: pb.ContentBlock) -> str:
    kind = block.WhichOneof("kind")
    if kind is None:
        return "(content of a kind that this version does not know)"
    part = getattr(block, kind)
    if kind == "resource_link":
        return f"{part.name} {part.uri}"
    data = getattr(part, "data", b"")
    if kind == "text" or (kind == "resource" and not data):
        return part.text if kind == "text" else f"{part.uri}\n{part.text}"
    about = f"{getattr(part, 'uri', kind)}, {part.mime_type or 'of an unknown type'}, {len(data)} bytes"
    return f"({about}; --json has it as base64, --out writes it)"


def show_progress(progress: Any) -> None:
    """Prints to standard error how far a call has got, and the next piece of its output."""
    if progress.message or progress.progress or progress.total:
        part = f"{progress.progress:g}" + (f"/{progress.total:g}" if progress.total else "")
        terminal.print_lines(f"… {part} {clean_line(progress.message)}".rstrip(), sys.stderr)
    if progress.chunk:
        terminal.print_chunk(progress.chunk)
