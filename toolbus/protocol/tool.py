"""Defines the records that all of toolbus shares: Tool, Result, Progress; and the rules of their names.

Values with their rules: nothing here knows sessions, sockets or registries. Both the bus and the SDK import it, so it
needs only protobuf. On a stream calls and results stay wire messages, which are faster to make; these records are for
what is stored or handed to programs.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from toolbus.common.text import dump_json, is_utf8, join_surrogates, parse_json, quote
from toolbus.errors import CallError as CallError
from toolbus.errors import CallFailed, Code, InvalidTool, SetupError, Stage
from toolbus.protocol.limits import KIB as KIB
from toolbus.protocol.limits import MIB as MIB
from toolbus.protocol.limits import Limits as Limits
from toolbus.protocol.questions import MAX_NEED, MAX_NEEDS, NEEDS_INPUT, explain_questions
from toolbus.v1 import tool_pb2 as pb

# JSON is rewritten token by token, not parsed and serialized again: integers of any size and the spelling of numbers
# survive. Strings lose their `\u` escapes, which cost a model several tokens a character, NaN and Infinity become null,
# and half a surrogate pair becomes U+FFFD, since a request that holds one cannot be sent.

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'  # in runs: ten times as fast as character by character
_TOKEN = re.compile(_STRING + r"|[ \t\r\n]+|-?Infinity|NaN", re.DOTALL)
_NO_BRACKETS = re.compile(_STRING + r'|[^"\[\]{}]+', re.DOTALL)
_MAX_LEVELS = 200  # of an object that is passed on: serializing it takes a stack frame or more a level
FAILED = "the tool reported a failure"


def repeats_failure(output: Any, failure: str) -> bool:
    """Tells whether an output already contains the error message of the call."""
    if not isinstance(output, dict) or "error" not in output:
        return False
    error = output["error"]
    return failure == (error if isinstance(error, str) else dump_json(error))


def output_text(output_json: str) -> str:
    """Returns an output as text: a string unquoted, other JSON compact, invalid JSON unchanged."""
    if not _is_json(output_json):
        return join_surrogates(output_json) or "null"
    compact = _compact(output_json)
    return str(json.loads(compact)) if compact.startswith('"') else compact


def parsed_output(text: str) -> Any:
    """Returns the value of a JSON text, or the text itself where it is invalid JSON or nested too deeply."""
    if not _is_json(text) or _levels(text) > _MAX_LEVELS:
        return join_surrogates(text) or None
    return json.loads(_compact(text), parse_int=_integer, parse_float=_float)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def _levels(text: str) -> int:
    """Returns how deep JSON is nested."""
    deepest = level = 0
    for bracket in _NO_BRACKETS.sub("", text):
        level += 1 if bracket in "[{" else -1
        deepest = max(deepest, level)
    return deepest


def _compact(text: str) -> str:
    """Returns JSON text without white space, without needless escapes, and with null for NaN and Infinity."""
    return _TOKEN.sub(_compact_token, text)


def _compact_token(match: re.Match[str]) -> str:
    token = match[0]
    if token[0] == '"':
        if "\\" not in token:
            return join_surrogates(token)
        return json.dumps(join_surrogates(json.loads(token)), ensure_ascii=False)
    return "" if token.isspace() else "null"


def _integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # Python refuses to read more than 4,300 digits
        return digits


def _float(digits: str) -> float | str:
    value = float(digits)
    return value if math.isfinite(value) else digits


def block_text(block: pb.ContentBlock) -> str:
    """Returns a content block as a line: text unchanged, of anything else its type and size."""
    match block.WhichOneof("kind"):
        case "text":
            return block.text.text
        case "image":
            return f"[{block.image.mime_type or 'image'}, {len(block.image.data)} bytes]"
        case "audio":
            return f"[{block.audio.mime_type or 'audio'}, {len(block.audio.data)} bytes]"
        case "resource_link":
            link = block.resource_link
            return f"[{', '.join(filter(None, (link.mime_type, link.name, link.description, link.uri)))}]"
        case "resource":
            resource = block.resource
            if resource.WhichOneof("body") != "data":
                return resource.text
            return f"[{', '.join(filter(None, (resource.mime_type, resource.uri)))}, {len(resource.data)} bytes]"
        case _:
            return "[content of a kind that this version does not know]"


# MCP servers send an output twice: as structured content, and as texts for clients that do not read it. These are the
# JSON of the output or of its parts, its strings, or its lines. A text that says anything else, such as a summary, is
# no repetition.

_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*)\n?```", re.DOTALL)
_PYTHON: Mapping[str, tuple[Any, ...]] = {"True": (True,), "False": (False,), "None": (None,)}  # as `str` writes them


def _without_repeats(
    blocks: tuple[pb.ContentBlock, ...], output: Any, failure: str, *, keep_annotated: bool = False
) -> tuple[pb.ContentBlock, ...]:
    """Returns content without the texts that an output or a failure repeats."""
    texts = [block.text.text for block in blocks if block.WhichOneof("kind") == "text"]
    if not texts:
        return blocks
    joined = ["\n".join(texts).strip(), "".join(texts).strip()]
    forms = {text: _forms(text) for text in texts}
    wanted = {_key(form): form for text in texts for form in forms[text]} | {_key(text): text for text in joined}
    found = _found(output, wanted)
    if failure:
        found.add(_key(failure.strip()))
    repeated = {text for text in texts if any(_key(form) in found for form in forms[text])}
    if any(_key(text) in found for text in joined if text):
        repeated.update(texts)
    for whole in filter(None, (failure, _only_text(output))):
        repeated.update(_pieces(texts, whole))

    def repeats(block: pb.ContentBlock) -> bool:
        is_plain = block.WhichOneof("kind") == "text" and not (keep_annotated and block.annotations_json)
        return is_plain and block.text.text in repeated

    return tuple(block for block in blocks if not repeats(block))


def _forms(text: str) -> list[Any]:
    """Returns the values that a text may stand for: itself, and the value that it is the JSON of."""
    plain = text.strip()
    fenced = _FENCE.fullmatch(plain)
    forms: list[Any] = [plain, *_PYTHON.get(plain, ())]
    for each in (plain, fenced[1]) if fenced else (plain,):
        if _is_json(each) and _levels(each) <= _MAX_LEVELS:
            value = json.loads(each, parse_int=_integer, parse_float=_float)
            forms.append(value.strip() if isinstance(value, str) else value)
    return forms


def _found(output: Any, wanted: Mapping[str, Any]) -> set[str]:
    """Returns the keys of those wanted values that an output is or holds.

    A number, true, false or null counts only where it is the output, all of a wrapper, or an entry of its list: deeper
    in an object it stands for something of its own.
    """
    found: set[str] = set()
    sizes = {(type(value), len(value)) for value in wanted.values() if isinstance(value, (dict, list))}

    def visit(value: Any, is_wrapped: bool) -> None:
        if isinstance(value, (dict, list)):
            if (type(value), len(value)) in sizes:
                found.add(_key(value))
            if isinstance(value, list) and all(isinstance(each, str) for each in value):
                found.add("\n".join(value).strip())
            for each in value.values() if isinstance(value, dict) else value:
                visit(each, is_wrapped and (isinstance(value, list) or len(value) == 1))
        elif isinstance(value, str):
            found.add(value.strip())
        elif is_wrapped:
            found.add(_key(value))

    visit(output, True)
    return found & wanted.keys()


def _pieces(texts: list[str], whole: str) -> list[str]:
    """Returns the first texts if a whole text is what they are joined to, else none."""
    place = 0
    for count, text in enumerate(texts, 1):
        if not whole.startswith(text, place):
            return []
        place += len(text)
        if not whole[place:].strip():
            return texts[:count]
        place += whole.startswith("\n", place)
    return []


def _key(value: Any) -> str:
    """Returns what values that say the same have in common: a text itself, anything else as JSON behind a mark."""
    return value if isinstance(value, str) else "\0" + json.dumps(value, sort_keys=True)


def _only_text(output: Any) -> str | None:
    """Returns the text that is all that an output holds, in an object with one key or by itself; else None."""
    if isinstance(output, dict) and len(output) == 1:
        output = next(iter(output.values()))
    return output if isinstance(output, str) else None


def _is_text(output: Any, text: str) -> bool:
    """Tells whether an output says no more than a text: it is the text, wraps it, or is the value of its JSON."""
    only = _only_text(output)
    if only is not None and not (isinstance(output, dict) and "error" in output):
        return only.strip() == text.strip()
    return isinstance(output, (dict, list)) and _key(output) in map(_key, _forms(text))


PROTOCOL_VERSIONS = (1,)

# Names as they may be written into a URL path and every provider's function name (REST-60).
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
SOURCE = re.compile(r"[A-Za-z0-9_.:-]{1,128}", re.ASCII)
PLUGIN_PREFIX = "plugin:"  # of the source of a plugin that has an id (REST-51)
INSTANCE = re.compile(r"[!-~]{0,128}", re.ASCII)  # printable ASCII without blanks: it appears in logs
USER_KEYS = frozenset({"userId", "__userId", "__user_id"})  # set by hosts of extension systems, never by a model
MAX_NAME = 64
MAX_ROLE = 128  # characters of a role that is added or waited for
MAX_CALL_ID = 128
DEFAULT_TIMEOUT_SECONDS = 30.0
MAX_TIMEOUT_SECONDS = 300.0
MAX_LEVEL = 2**32 - 1  # of access, as the wire carries it
TASK_SECONDS = 86_400.0  # how long a call that became a task may go on

_MAX_DIGITS = 18  # of a level: more are not a level, and Python refuses to read thousands of digits


def explain_instance(text: str) -> str:
    """Returns why a text cannot be the instance of a session, and how to fix it."""
    return (
        f"instance {quote(text)} ({len(text)} characters) breaks the rule [!-~]{{0,128}}: use at most 128 printable "
        "ASCII characters without blanks, best 32 random hexadecimal digits"
    )


def level_of(attributes: Mapping[str, str]) -> int:
    """Returns the access level that a host states in the attributes of a context.

    It is 0, the lowest, if the host states none, or a text that is not a whole number.
    """
    text = attributes.get("level", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else 0


@dataclass(frozen=True, slots=True)
class Annotations:
    """What calling a tool may do; None where its author has not stated it."""

    read_only: bool | None = None
    idempotent: bool | None = None
    destructive: bool | None = None
    open_world: bool | None = None


_NO_ANNOTATIONS = Annotations()
_TEXTS = (
    "name",
    "description",
    "parameters_json",
    "role",
    "callback_url",
    "display_name",
    "metadata_json",
    "output_schema_json",
)
_TOO_DEEP = "is nested too deep: flatten the schema, a bus takes 64 levels"
HINTS = ("read_only", "idempotent", "destructive", "open_world")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call, as its author declared it. Field meanings: proto/toolbus/v1/tool.proto.

    Attributes:
        hints_trusted: whether the annotations are believed; those of mounted servers and guarded sources are only
            shown. Not on the wire.

    Raises:
        InvalidTool: from the constructor, naming every broken rule.
    """

    name: str
    description: str = ""
    parameters_json: str = '{"type":"object"}'
    role: str | None = None
    timeout_seconds: float = 0.0
    idle_timeout_seconds: float = 0.0
    callback_url: str = ""
    display_name: str = ""
    annotations: Annotations = _NO_ANNOTATIONS
    validate: bool | None = None
    no_background: bool = False
    allow_repeat: bool = False
    council_eligible: bool = False
    inline_available: bool = False
    direct_reply: bool = False
    metadata_json: str = ""
    min_level: int = 0
    no_repair: bool = False
    output_schema_json: str = ""
    always_background: bool = False
    needs: tuple[str, ...] = ()
    hints_trusted: bool = True
    validate_output: bool = False
    no_defaults: bool = False
    schema_hash: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        faults = self._faults()
        shown = quote(self.name)
        parameters = _read_schema(shown, "parameters_json", self.parameters_json, faults)
        if self.output_schema_json:
            _read_schema(shown, "output_schema_json", self.output_schema_json, faults)
        if faults:
            raise InvalidTool(faults)
        try:
            digest = _hash(self.name, self.description, parameters)
        except RecursionError:  # JSON that can just be parsed may be too deep to be written
            raise InvalidTool([f"tool {quote(self.name)}: parameters_json {_TOO_DEEP}"]) from None
        object.__setattr__(self, "schema_hash", digest)

    def _faults(self) -> list[str]:
        shown = quote(self.name)
        faults = []
        if not 1 <= len(self.name) <= MAX_NAME:
            faults.append(f"tool name {shown} has {len(self.name)} characters: give it 1 to {MAX_NAME}")
        for label, value in (
            ("timeout_seconds", self.timeout_seconds),
            ("idle_timeout_seconds", self.idle_timeout_seconds),
        ):
            if not 0 <= value <= MAX_TIMEOUT_SECONDS:  # NaN fails this too
                faults.append(
                    f"tool {shown}: {label} is {value:g}, it must be from 0 (not given) to {MAX_TIMEOUT_SECONDS:g}"
                )
        if type(self.min_level) is not int or not 0 <= self.min_level <= MAX_LEVEL:
            faults.append(
                f"tool {shown}: min_level is {self.min_level!r:.40}, it must be a whole number from 0 (everybody) to "
                f"{MAX_LEVEL}"
            )
        faults += [
            f"tool {shown}: {label} holds half of a surrogate pair, which UTF-8 cannot carry: send the whole character"
            for label in _TEXTS
            if not is_utf8(getattr(self, label) or "")
        ]
        if len(self.needs) > MAX_NEEDS or not all(0 < len(word) <= MAX_NEED and is_utf8(word) for word in self.needs):
            faults.append(
                f"tool {shown}: needs has {len(self.needs)} words, it may have {MAX_NEEDS} of 1 to {MAX_NEED} "
                "characters, such as elicitation.form"
            )
        return faults

    @property
    def output_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the output, parsed anew at each access; None without one."""
        return json.loads(self.output_schema_json) if self.output_schema_json else None

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of the arguments, parsed anew at each access."""
        parsed: dict[str, Any] = json.loads(self.parameters_json)
        return parsed

    @property
    def reads_only(self) -> bool:
        """Whether running the tool changes nothing, as far as its source is believed."""
        return self.hints_trusted and self.annotations.read_only is True

    @property
    def repeatable(self) -> bool:
        """Whether running the tool twice does no more than running it once."""
        return self.hints_trusted and bool(self.annotations.idempotent or self.annotations.read_only)

    def renamed(self, name: str) -> Tool:
        """Returns the tool as listed under another name, with the hash of its declaration."""
        if name == self.name:
            return self
        other: Tool = copy.copy(self)  # not replace(): a listed name is longer, and the hash is the declaration's
        object.__setattr__(other, "name", name)
        return other

    @classmethod
    def from_wire(cls, message: pb.Tool, limits: Limits) -> Tool:
        """Reads a declared tool and copies it out of its frame.

        Raises:
            InvalidTool: naming every rule that it breaks, size limits included.
        """
        shown = quote(message.name)
        faults = []
        if not NAME.fullmatch(message.name):
            faults.append(f"tool name {shown} breaks the rule [A-Za-z0-9_.-]{{1,64}}: rename the tool")
        size = len(message.parameters_json.encode())
        if size > limits.schema_bytes:
            faults.append(
                f"tool {shown}: parameters_json has {size} bytes, more than the limit "
                f"schema_bytes = {limits.schema_bytes}: shorten the schema"
            )
        for label in ("output_schema_json", "metadata_json"):
            size = len(getattr(message, label).encode())
            if size > limits.schema_bytes:
                faults.append(
                    f"tool {shown}: {label} has {size} bytes, more than the limit "
                    f"schema_bytes = {limits.schema_bytes}: shorten it"
                )
        size = len(message.description.encode())
        if size > limits.description_bytes:
            faults.append(
                f"tool {shown}: description has {size} bytes, more than the limit "
                f"description_bytes = {limits.description_bytes}: shorten it"
            )
        if faults:
            raise InvalidTool(faults)
        return cls(
            parameters_json=message.parameters_json or '{"type":"object"}',
            role=message.role or None,
            annotations=_annotations(message.annotations) if message.HasField("annotations") else _NO_ANNOTATIONS,
            validate=message.validate if message.HasField("validate") else None,
            needs=tuple(message.needs) if message.needs else (),
            **{name: getattr(message, name) for name in _SAME_ON_THE_WIRE},
        )

    def to_wire(self) -> pb.Tool:
        """Returns the wire form; unset fields stay unset."""
        message = pb.Tool(
            parameters_json=self.parameters_json,
            role=self.role,
            validate=self.validate,
            needs=self.needs,
            **{name: value for name in _SAME_ON_THE_WIRE if (value := getattr(self, name))},
        )
        if self.annotations != _NO_ANNOTATIONS:
            message.annotations.CopyFrom(
                pb.ToolAnnotations(**{hint: getattr(self.annotations, hint) for hint in HINTS})
            )
        return message


# Fields whose wire form differs: it has an unset state, or none at all.
_OTHER_ON_THE_WIRE = {"parameters_json", "role", "annotations", "validate", "needs", "hints_trusted", "schema_hash"}
_SAME_ON_THE_WIRE = tuple(each.name for each in fields(Tool) if each.name not in _OTHER_ON_THE_WIRE)


@dataclass(frozen=True, slots=True)
class Result:
    """How a call ended. Every call ends in exactly one.

    Attributes:
        output_json: what the tool returned, as JSON text.
        is_error: whether the model should read this as a failure.
        error: set where a call failed, by the tool (code TOOL) or on its way (any other code).
        content: parts in addition to the output, as wire messages of their own.
        input_requests_json: the questions of a tool that cannot go on without answers; "" where it is done. The output
            is meaningless where there are questions.
        request_state: goes back to the tool with the answers.
    """

    call_id: str = ""
    output_json: str = "null"
    is_error: bool = False
    error: CallError | None = None
    content: tuple[pb.ContentBlock, ...] = ()
    input_requests_json: str = ""
    request_state: str = ""

    @property
    def output(self) -> Any:
        """The output, parsed anew at each access.

        Raises:
            ValueError: the plugin sent something that is not JSON, or is nested too deep to be read.
        """
        try:
            return json.loads(self.output_json or "null")
        except RecursionError:
            raise ValueError("the output is nested too deep to be read: have the tool return it flatter") from None

    @property
    def asks(self) -> bool:
        """Whether the tool has questions before it can go on: then the result is neither a success nor a failure."""
        return bool(self.input_requests_json)

    @property
    def text(self) -> str:
        """The text for a model: the error, then the output, a text without quotes, then the content, line by line.

        Or the tool's questions. Images and other data are described by their type and size. An output whose own `error`
        is the message of the failure stands alone, so that no message is repeated.
        """
        output, blocks = self.shown
        failure = self.failure
        parts = [failure] if failure and not repeats_failure(parsed_output(self.output_json), failure) else []
        parts += [output] if output else []
        parts += [block_text(block) for block in blocks]
        return "\n".join(parts) if parts else output_text(self.output_json)

    @property
    def shown(self) -> tuple[str, tuple[pb.ContentBlock, ...]]:
        """The output as text and the content as a model gets them beside the failure, each text once.

        Content that repeats the output or the failure is left out. Where the output only wraps one text of the content
        (`{"result": "sunny"}`), it is that text. The output is "" where it is null or repeats the failure.
        """
        failure = self.failure
        if not self.content and not failure:
            return ("" if self.output_json in ("", "null") else output_text(self.output_json)), ()
        value = parsed_output(self.output_json)
        blocks = _without_repeats(self.content, value, failure)
        if self.output_json in ("", "null") or (failure and _is_text(value, failure)):
            return "", blocks
        text, texts = _only_text(value), [block.text.text for block in self.content if block.HasField("text")]
        wraps = text is not None and (text.strip() in map(str.strip, texts) or _pieces(texts, text))
        shown = text if text is not None and wraps else output_text(self.output_json)
        return ("" if shown in ("null", failure) else shown), blocks

    def content_beside_output(self) -> tuple[pb.ContentBlock, ...]:
        """Returns the content without texts that repeat the output or the failure; an annotated text stays."""
        if not self.content:
            return ()
        return _without_repeats(self.content, parsed_output(self.output_json), self.failure, keep_annotated=True)

    @property
    def failure(self) -> str:
        """Why the call failed, "" where it did not; for a model, questions without answers are a failure."""
        if self.asks:
            return explain_questions("the tool", self.input_requests_json)
        if self.error is None:
            return FAILED if self.is_error else ""
        return join_surrogates(self.error.message) or (FAILED if self.error.code is Code.TOOL else self.error.code.name)

    def unwrap(self) -> Any:
        """Returns the output.

        Raises:
            CallFailed: where the call failed, or the tool asks something first.
        """
        if self.asks:
            raise CallFailed(CallError(Code.TOOL, self.text, Stage.ACCEPTED, reason=NEEDS_INPUT))
        if self.error is not None:
            raise CallFailed(self.error)
        if self.is_error:
            raise CallFailed(CallError(Code.TOOL, self.output_json, Stage.ACCEPTED))
        return self.output

    @classmethod
    def from_wire(cls, message: pb.ToolResult) -> Result:
        """Copies a result out of its frame."""
        result: Result = _NEW(cls)  # with the slots set one by one: in half the time of a frozen class's own way
        _set_call_id(result, message.call_id)
        _set_output(result, message.output_json or "null")
        _set_is_error(result, message.is_error)
        _set_error(result, CallError.from_wire(message.error) if "error" in message else None)
        content = message.content
        _set_content(result, _copies(content) if content else ())  # iterating over nothing takes 3 µs
        _set_requests(result, message.input_requests_json)
        _set_state(result, message.request_state)
        return result

    def to_wire(self) -> pb.ToolResult:
        """Returns the wire form."""
        return pb.ToolResult(
            call_id=self.call_id,
            output_json="" if self.input_requests_json else self.output_json,
            is_error=self.is_error,
            error=self.error.to_wire() if self.error else None,
            content=self.content,
            input_requests_json=self.input_requests_json,
            request_state=self.request_state,
        )


_NEW = object.__new__
(_set_call_id, _set_output, _set_is_error, _set_error, _set_content, _set_requests, _set_state) = (
    getattr(Result, each.name).__set__ for each in fields(Result)
)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a call.

    Attributes:
        progress: how much is done.
        total: how much there is to do, in the same unit; 0 means unknown.
        message: what is being done, for people.
        chunk: the next piece of an output that comes bit by bit.
        content: parts that are ready before the result.
    """

    progress: float = 0.0
    total: float = 0.0
    message: str = ""
    chunk: str = ""
    content: tuple[pb.ContentBlock, ...] = ()

    @classmethod
    def from_wire(cls, message: pb.ToolProgress) -> Progress:
        """Copies it out of its frame."""
        content = _copies(message.content)
        return cls(message.progress, message.total, message.message, message.output_chunk, content)


def dump_arguments(arguments: Mapping[str, Any] | str | None) -> str:
    """Returns arguments as JSON text; text is passed on as it is.

    Raises:
        TypeError, ValueError: where JSON cannot hold them (NaN included).
    """
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        return arguments
    return dump_json(arguments)


def _copies(blocks: Iterable[pb.ContentBlock]) -> tuple[pb.ContentBlock, ...]:
    """Copies content out of its frame, which would otherwise stay in memory with it."""
    copies = []
    for block in blocks:
        copy = pb.ContentBlock()
        copy.CopyFrom(block)
        copies.append(copy)
    return tuple(copies)


def is_source(text: str) -> bool:
    """Tells whether a text may name a source."""
    return SOURCE.fullmatch(text) is not None


def plugin_source(plugin_id: str) -> str:
    """Returns a plugin's source: its id with the prefix `plugin:`, set once and never doubled (REST-51).

    Raises:
        SetupError: the id makes no source.
    """
    bare = plugin_id
    while bare.startswith(PLUGIN_PREFIX):
        bare = bare.removeprefix(PLUGIN_PREFIX)
    if not bare or not is_source(PLUGIN_PREFIX + bare):
        longest = 128 - len(PLUGIN_PREFIX)
        raise SetupError(
            f"plugin id {plugin_id!r} breaks the rule [A-Za-z0-9_.:-]{{1,{longest}}}: set plugin_id to another"
        )
    return PLUGIN_PREFIX + bare


def is_role(text: str) -> bool:
    """Tells whether a text may name a role: printable characters, Chinese ones and blanks inside included."""
    return 0 < len(text) <= MAX_ROLE and text.isprintable() and text == text.strip()


def _hash(name: str, description: str, parameters: object) -> str:
    """Returns a fingerprint of a declaration, independent of the order of keys, of white space and of restarts."""
    canonical = json.dumps([name, description, parameters], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _read_schema(shown: str, label: str, text: str, faults: list[str]) -> object:
    """Parses the text of a schema; adds to the faults why it is none."""
    try:
        parsed: object = parse_json(text)
    except RecursionError:
        faults.append(f"tool {shown}: {label} {_TOO_DEEP}")
    except ValueError as error:
        faults.append(f"tool {shown}: {label} is not JSON: {error}; give it the text of a JSON Schema")
    else:
        if isinstance(parsed, dict):
            return parsed
        faults.append(f"tool {shown}: {label} is a JSON {_kind(parsed)}, it must be an object (a JSON Schema)")
    return None


def _kind(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _annotations(message: pb.ToolAnnotations) -> Annotations:
    set_ones = {descriptor.name: value for descriptor, value in message.ListFields()}
    return Annotations(**{hint: set_ones.get(hint) for hint in HINTS})
