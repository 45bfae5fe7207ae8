"""Makes tools that can be offered and run: one (`ToolSpec`), those of an object (`collect`) or a plugin (`ToolSet`).

`spec_of` joins the options of `llm_tool` with the signature of the function: the `Tool` for the bus, and how `runner`
runs it.
"""

from __future__ import annotations

import decimal
import enum
import functools
import inspect
import json
import logging
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, TypeVar, Unpack, overload

from toolbus.common.text import quote
from toolbus.functions import conversion, hints
from toolbus.functions.hints import parameters_schema, signature_of, without_property
from toolbus.functions.scope import ToolScope
from toolbus.protocol.json_schema import properties_of
from toolbus.protocol.limits import Limits
from toolbus.protocol.tool import (
    DEFAULT_TIMEOUT_SECONDS,
    HINTS,
    MAX_LEVEL,
    MAX_TIMEOUT_SECONDS,
    NAME,
    Annotations,
    Tool,
)

log = logging.getLogger(__name__)

_DESCRIPTION_BYTES = Limits().description_bytes


# `declaration` checks the values.
class ToolTraits(TypedDict, total=False):
    """The options of a tool besides its name, description and schema. None of them is required.

    Attributes:
        timeout: seconds a call may take, more than 0 and at most 300; 30 by default.
        role: the persona that it is for; None or empty means all.
        idempotent: running twice does no more than running once, so a lost call may be sent again.
        read_only: running changes nothing, so a lost call may be sent again.
        destructive: running may destroy something.
        open_world: running reaches beyond this machine.
        display_name: a name for people.
        idle_timeout: seconds without progress or result that end a call; None means no such limit.
        validate: whether the bus checks arguments against the schema; None means that it does.
        no_repair: the bus does not repair arguments that break the schema.
        no_defaults: the bus does not fill in the defaults that the schema declares.
        no_background: a host must wait for the result.
        allow_repeat: the guard against repeated identical calls lets it pass.
        council_eligible: members of a council may be offered it.
        inline_available: the main model may be offered it outside a council.
        direct_reply: the result is the reply to the user.
        min_level: the access level that a user needs, as the host states it; 0 means all users.
        metadata: any JSON object for hosts.
        output_schema: JSON Schema of the output, or True: the return annotation's. Hosts and MCP clients see it.
        validate_output: whether the bus refuses results that break it.
        needs: the questions that its caller must be able to answer (`elicitation.form`, `sampling` …); other calls are
            refused before they run.
        always_background: a call becomes a task at once if its caller accepts tasks.
    """

    timeout: float
    role: str | None
    idempotent: bool | None
    read_only: bool | None
    destructive: bool | None
    open_world: bool | None
    display_name: str
    idle_timeout: float | None
    validate: bool | None
    no_repair: bool
    no_defaults: bool
    no_background: bool
    allow_repeat: bool
    council_eligible: bool
    inline_available: bool
    direct_reply: bool
    min_level: int
    metadata: Mapping[str, Any] | None
    output_schema: dict[str, Any] | bool | None
    validate_output: bool
    needs: Sequence[str]
    always_background: bool


class ToolOptions(ToolTraits, total=False):
    """All options of a tool. None of them is required.

    Attributes:
        name: its name for models, `[A-Za-z0-9_.-]{1,64}`; the function's by default, and if it is `""`.
        description: tells a model when to use it; the docstring's first paragraph by default.
        parameters: JSON Schema of the arguments; read from the type hints by default.
    """

    name: str | None
    description: str | None
    parameters: dict[str, Any] | None


OPTION_NAMES = ("name", "description", "parameters", *ToolTraits.__annotations__)


def check_option_names(tool: object, names: Iterable[str]) -> None:
    """Checks that all options exist.

    Args:
        tool: the tool's name, for the message.

    Raises:
        TypeError: one does not; the text lists those that do.
    """
    for name in names:
        if name not in OPTION_NAMES:
            known = ", ".join(OPTION_NAMES)
            raise TypeError(
                f"tool {quote(str(tool))}: {quote(name)} is not an option of a tool; the options are {known}"
            )


# The decorator checks all options at once (REST-60) and returns the function itself, so that programs can still call
# it. `tool_spec` turns a decorated function into a tool that can be offered and run.

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "__llm_tool__"
# Options that go into the record as they are.
_UNCHECKED = (
    *("display_name", "validate", "no_repair", "no_background", "allow_repeat", "council_eligible"),
    *("inline_available", "direct_reply", "validate_output", "always_background", "no_defaults"),
)
_NO_OUTPUT_HINT = (
    "output_schema=True reads the return annotation, which does not describe the output: annotate a dataclass, "
    "TypedDict, pydantic model, list or dict, or give a JSON Schema as output_schema"
)


@dataclass(frozen=True)
class LlmToolMeta:
    """The options of a decorated function, checked; readable as `function.__llm_tool__`."""

    name: str
    function: Callable[..., Any] = field(repr=False, compare=False)
    description: str = ""
    declared_json: str | None = None  # the schema that the author gave; None if it comes from the type hints
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    role: str | None = None
    idle_timeout: float = 0.0
    display_name: str = ""
    annotations: Annotations = field(default_factory=Annotations)
    validate: bool | None = None
    no_background: bool = False
    allow_repeat: bool = False
    council_eligible: bool = False
    inline_available: bool = False
    direct_reply: bool = False
    metadata_json: str = ""
    min_level: int = 0
    no_repair: bool = False
    no_defaults: bool = False
    output_schema_json: str = ""
    output_from_hints: bool = False  # whether the return annotation is the schema of the output
    validate_output: bool = False
    needs: tuple[str, ...] = ()
    always_background: bool = False

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of the arguments. Hints are read at first use, when all names that they use are defined."""
        if self.declared_json is None:
            return hints.parameters_schema(self.function)
        parsed: dict[str, Any] = json.loads(self.declared_json)
        return parsed

    @property
    def output_schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the output; None without one.

        Raises:
            TypeError: the return annotation, which is the schema here, does not describe the output.
        """
        if self.output_from_hints:
            schema = hints.output_schema(self.function)
            if not schema:
                raise TypeError(f"tool {self.name!r}: {_NO_OUTPUT_HINT}")
            return schema
        parsed: dict[str, Any] | None = json.loads(self.output_schema_json) if self.output_schema_json else None
        return parsed

    @property
    def timeout_seconds(self) -> float:
        """The same as `timeout`, by its name on the wire."""
        return self.timeout


def describe(function: Callable[..., Any], **options: Unpack[ToolOptions]) -> LlmToolMeta:
    """Checks the options of a tool and returns them as one record.

    Raises:
        ValueError: a name or a time breaks its rule, or JSON cannot hold a schema.
        TypeError: an option does not exist, or a value has the wrong type.
    """
    if not callable(function):
        raise TypeError(f"llm_tool is put on a function, not on {function!r}: write @llm_tool(name=…) above a def")
    name = options.get("name")
    if name is None:
        name = getattr(function, "__name__", "") or type(function).__name__
    _check_name(name)
    check_option_names(name, options)
    for label, value in (
        ("description", options.get("description") or ""),
        ("display_name", options.get("display_name", "")),
        ("role", options.get("role") or ""),
    ):
        if not isinstance(value, str):
            raise TypeError(f"llm_tool {name!r}: {label} must be a str, not {type(value).__name__}")
    parameters, metadata, output = options.get("parameters"), options.get("metadata"), options.get("output_schema")
    if options.get("validate_output") and not output:
        raise ValueError(
            f"llm_tool {name!r}: validate_output checks results against output_schema, which is missing: give a JSON "
            "Schema, or output_schema=True for the return annotation"
        )
    needs = options.get("needs", ())
    if isinstance(needs, str) or not all(isinstance(word, str) for word in needs):
        raise TypeError(f"llm_tool {name!r}: needs must be a list of texts, such as ['elicitation.form']")
    idle_timeout = options.get("idle_timeout")
    values: dict[str, Any] = {**options}
    return LlmToolMeta(
        name=name,
        function=function,
        description=options.get("description") or hints.description_of(function),
        declared_json=None if parameters is None else _dump(name, "parameters", parameters, dict),
        timeout=_check_seconds(name, "timeout", options.get("timeout", DEFAULT_TIMEOUT_SECONDS)),
        role=options.get("role") or None,
        idle_timeout=0.0 if idle_timeout is None else _check_seconds(name, "idle_timeout", idle_timeout),
        annotations=Annotations(**{hint: values.get(hint) for hint in HINTS}),
        metadata_json="" if metadata is None else _dump(name, "metadata", metadata, Mapping),
        output_schema_json=""
        if output is None or isinstance(output, bool)
        else _dump(name, "output_schema", output, dict),
        output_from_hints=output is True,
        needs=tuple(needs),
        min_level=_check_level(name, options.get("min_level", 0)),
        **{option: values[option] for option in _UNCHECKED if option in values},
    )


@overload
def llm_tool(function: F, /) -> F: ...
@overload
def llm_tool(**options: Unpack[ToolOptions]) -> Callable[[F], F]: ...
def llm_tool(function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]) -> Any:
    """Makes a function or method a tool that models may call. Returns the function itself.

    Args:
        options: described in `ToolOptions`, none of them required.

    Raises:
        ValueError: a name or a time that breaks its rule.
        TypeError: `parameters` is not a dict, an option does not exist, or the decorated object cannot be called.
    """
    if options.get("name") == "":
        del options["name"]  # the function's name, as in N.E.K.O.
    if function is not None:
        return _mark(function, options)
    # Checks the options on the line where they are written; without a name it is the function's, not known yet.
    describe(lambda: None, **options if options.get("name") else {**options, "name": "unnamed"})
    return lambda function: _mark(function, options)


def meta_of(function: object) -> LlmToolMeta | None:
    """Returns the record that `llm_tool` attached to a function or method; None without one."""
    meta = getattr(function, ATTRIBUTE, None) or getattr(getattr(function, "__func__", None), ATTRIBUTE, None)
    return meta if isinstance(meta, LlmToolMeta) else None


def _mark(function: Any, options: ToolOptions) -> Any:
    inner = getattr(function, "__func__", function)  # a staticmethod or classmethod below the decorator
    setattr(function, ATTRIBUTE, describe(inner, **options))
    return function


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"llm_tool name must be a str, not {type(name).__name__}")
    if not NAME.fullmatch(name):
        raise ValueError(f"tool name {name[:80]!r} breaks the rule [A-Za-z0-9_.-]{{1,64}}: pass another as name=")


def _check_seconds(name: str, label: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"tool {name!r}: {label} must be a number of seconds, not {type(value).__name__}")
    if not 0 < value <= MAX_TIMEOUT_SECONDS:  # NaN fails this too
        raise ValueError(
            f"tool {name!r}: {label} is {value:g} s, it must be more than 0 and at most {MAX_TIMEOUT_SECONDS:g}: "
            "longer work belongs in the background"
        )
    return float(value)


def _check_level(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"tool {name!r}: min_level is {value!r:.40}, it must be a whole number")
    if not 0 <= value <= MAX_LEVEL:
        raise ValueError(f"tool {name!r}: min_level is {value}, it must be from 0 (all users) to {MAX_LEVEL}")
    return value


def _dump(name: str, label: str, value: object, kind: type) -> str:
    if not isinstance(value, kind):
        raise TypeError(f"tool {name!r}: {label} must be a dict, not {type(value).__name__}")
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(f"tool {name!r}: {label} cannot be written as JSON: {problem}") from None


# The fields that a declaration and the tool made of it have in common.
_SAME_NAMES = {each.name for each in fields(LlmToolMeta)} & {each.name for each in fields(Tool)} - {"description"}


class HandlerKind(enum.Enum):
    """How a handler has to be run."""

    SYNC = "sync"
    ASYNC = "async"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool and how to run it.

    Attributes:
        tool: the declaration, for the bus and models.
        handler: the function, bound to its object if it has one.
        kind: how it has to be run.
        scope: the name of the parameter that gets the `ToolScope`; empty without one.
        names: the keywords that it takes; None if it takes any.
        required: the keywords that it requires.
        converters: functions by argument that convert it to the hinted type, if the schema came from hints.
        rest: converts each argument that is none of `declared`, for a function with `**kwargs`; None changes none.
        declared: the names of the parameters for arguments.
        exact: whether fractions are read so that a `Decimal` made of them has all digits.
        bytes_output: whether the return annotation has bytes, which then are written as base64.
        defaults: functions by argument that make its default, for arguments without a default in Python.
        takes_dict: whether the handler takes all arguments as one dict (`ToolDefinition`) instead of as keywords.
        prepare: changes the arguments before they are checked and converted; None changes nothing.
        is_async: whether cancelling a call cancels a task; a sync handler can only check its scope.
    """

    tool: Tool
    handler: Callable[..., Any] = field(compare=False)
    kind: HandlerKind
    scope: str = ""
    names: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    converters: tuple[tuple[str, conversion.Converter], ...] = ()
    rest: conversion.Converter | None = None
    declared: frozenset[str] = frozenset()
    exact: bool = False
    bytes_output: bool = False
    defaults: tuple[tuple[str, Callable[[], Any]], ...] = ()
    takes_dict: bool = False
    prepare: Callable[[dict[str, Any], ToolScope], dict[str, Any]] | None = field(default=None, compare=False)
    is_async: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_async", self.kind in (HandlerKind.ASYNC, HandlerKind.ASYNC_GENERATOR))


def spec_of(handler: Callable[..., Any], meta: LlmToolMeta | None = None, *, takes_dict: bool = False) -> ToolSpec:
    """Returns the specification of a decorated function or bound method, or of any callable with its record.

    Raises:
        TypeError: the function is not decorated, or has parameters that no keyword can fill.
        InvalidTool: the record makes no tool.
    """
    meta = meta or meta_of(handler)
    if meta is None:
        raise TypeError(f"{handler!r} is not a tool: put @llm_tool above it")
    signature = hints.signature_of(handler)
    if signature.unfillable and not takes_dict:
        written, where = signature.unfillable[0], getattr(handler, "__qualname__", handler)
        if written.startswith("*"):
            raise TypeError(
                f"tool {meta.name!r}: no argument can fill {written}, since arguments come by name: take a list in the "
                f"signature of {where}, as in {written[1:]}: list[str]"
            )
        raise TypeError(
            f"tool {meta.name!r}: parameter {written.removesuffix(', /')!r} is positional-only, but arguments come by "
            f"name: remove the '/' from the signature of {where}"
        )
    declared = () if meta.declared_json is None else properties_of(meta.parameters)
    scope = signature.scope
    if scope in declared:
        scope = ""  # the author declared an argument of that name: it is the model's
    names = frozenset(each.name for each in signature.parameters) | ({signature.scope} - {scope, ""})
    from_hints = meta.declared_json is None and not takes_dict
    tool = _tool(meta, meta.declared_json or json.dumps(hints.parameters_schema(handler), ensure_ascii=False))
    if meta.output_from_hints:
        tool = replace(tool, output_schema_json=json.dumps(meta.output_schema, ensure_ascii=False))
    return ToolSpec(
        tool=tool,
        handler=handler,
        kind=_kind(handler),
        scope=scope,
        names=None if signature.any_keyword or takes_dict else names,
        required=frozenset()
        if takes_dict
        else frozenset(each.name for each in signature.parameters if each.default is inspect.Parameter.empty),
        declared=names,
        defaults=() if takes_dict else signature.defaults,
        takes_dict=takes_dict,
        bytes_output=conversion.holds(signature.hints.get("return"), bytes),
        **(conversions_of(signature, meta.name) if from_hints else {}),
    )


def spec_of_method(method: Callable[..., Any]) -> ToolSpec:
    """Returns the specification of a decorated method; its function, with ``self`` first, is read once per process.

    Every bus offers the same two dozen methods, and reading their hints takes ten milliseconds.
    """
    function = getattr(method, "__func__", None)
    return spec_of(method) if function is None else replace(_spec_of_function(function), handler=method)


_spec_of_function = functools.lru_cache(spec_of)


def collect(owner: object) -> list[ToolSpec]:
    """Returns an object's decorated methods, base classes first, in the order of the source.

    A method that overrides another takes its place in that order; if it has no decorator, the tool is removed.
    Properties are not evaluated.
    """
    metas: dict[str, LlmToolMeta | None] = {}
    for kind in reversed(type(owner).__mro__):
        for name, raw in vars(kind).items():
            meta = None if isinstance(raw, property | type) else meta_of(raw)
            if meta is not None or name in metas:
                metas[name] = meta
    return [spec_of(getattr(owner, name), meta) for name, meta in metas.items() if meta is not None]


class ToolSet:
    """The tools that one plugin offers, in order; safe from any thread.

    Attributes:
        on_change: called after each change, without the lock and on the thread that made it, with the tool's name and
            its spec, or None for a withdrawn tool. None until a connection listens.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[str, ToolSpec | None], None] | None = None
        self._lock = threading.Lock()
        self._specs: dict[str, ToolSpec] = {}

    def __repr__(self) -> str:
        return f"<ToolSet of {len(self._specs)}: {', '.join(list(self._specs)[:10])}>"

    def __iter__(self) -> Iterator[ToolSpec]:
        return iter(list(self._specs.values()))

    def __len__(self) -> int:
        return len(self._specs)

    def get(self, name: str) -> ToolSpec | None:
        """Returns a tool by its bare name; None if there is no such tool."""
        return self._specs.get(name)

    def add(self, spec: ToolSpec, *, replace: bool = False) -> bool:
        """Offers a tool; returns False, and changes nothing, if the name is taken and not to be replaced."""
        with self._lock:
            if not replace and spec.tool.name in self._specs:
                return False
            self._specs[spec.tool.name] = spec
        self._notify(spec.tool.name, spec)
        return True

    def remove(self, name: str) -> bool:
        """Withdraws a tool; returns whether it existed."""
        with self._lock:
            existed = self._specs.pop(name, None) is not None
        if existed:
            self._notify(name, None)
        return existed

    def _notify(self, name: str, spec: ToolSpec | None) -> None:
        if self.on_change is not None:
            self.on_change(name, spec)


def _kind(handler: Any) -> HandlerKind:
    target = handler
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not isinstance(target, type):
        target = getattr(target, "__call__", target)  # noqa: B004  # an object with an async __call__
    if inspect.isasyncgenfunction(target):
        return HandlerKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(target):
        return HandlerKind.ASYNC
    return HandlerKind.GENERATOR if inspect.isgeneratorfunction(target) else HandlerKind.SYNC


class Conversions(TypedDict, total=False):
    """How a `ToolSpec` converts arguments; described there."""

    converters: tuple[tuple[str, conversion.Converter], ...]
    rest: conversion.Converter | None
    exact: bool


def conversions_of(signature: hints.Signature, tool: str, *, without: str = "") -> Conversions:
    """Returns how the arguments of a signature are converted.

    Args:
        tool: its name, for the error.
        without: a parameter that is not an argument.

    Raises:
        TypeError: the hint of an argument does not say what the function gets for each value.
    """
    converters: list[tuple[str, conversion.Converter]] = []
    own_hints = {each.name: signature.hints.get(each.name, Any) for each in signature.parameters}
    own_hints.pop(without, None)
    try:
        for name, hint in own_hints.items():
            if (own := conversion.converter(hint)) is not None:
                converters.append((name, own))
        name = "**"
        rest = conversion.converter(signature.rest)
    except conversion.AmbiguousUnion as problem:
        raise TypeError(f"tool {tool!r}: argument {name!r}: {problem}") from None
    exact = any(conversion.holds(hint, decimal.Decimal) for hint in (*own_hints.values(), signature.rest))
    return {"converters": tuple(converters), "rest": rest, "exact": exact}


def cut_description(name: str, text: str, limit: int = _DESCRIPTION_BYTES) -> str:
    """Returns the description of a tool; one that a bus would refuse for its length is cut, with a warning."""
    if len(text.encode(errors="replace")) <= limit:
        return text
    log.warning("tool %s: its description is cut to the limit description_bytes = %d: shorten it", name, limit)
    return text.encode(errors="replace")[: limit - 3].decode(errors="ignore") + "…"


def _tool(meta: LlmToolMeta, parameters_json: str) -> Tool:
    return Tool(
        description=cut_description(meta.name, meta.description),
        parameters_json=parameters_json,
        timeout_seconds=meta.timeout,
        idle_timeout_seconds=meta.idle_timeout,
        **{name: getattr(meta, name) for name in _SAME_NAMES},
    )


# `ToolDefinition` is the class that programs of two systems construct: Stargazer's, whose handlers take the arguments
# as keywords and may ask for the caller's context, and N.E.K.O.'s, whose handlers take them as one dict (REST-63).

CTX = "ctx"  # the parameter that gets the caller's context; models never see it
EXTERNAL = "external"  # the source of a tool whose metadata do not name one
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class RunningCall:
    """The call that the current task runs.

    Attributes:
        ctx: the context that its caller passed as ``ctx``.
        user_id: the user for whom it is made; the tool's own calls are made for the same user.
        depth: how many calls of tools are nested here, this one included.
    """

    ctx: Any = None
    user_id: str = ""
    depth: int = 0


# The task of a call inherits it from the task that started the call.
running_call: ContextVar[RunningCall] = ContextVar("toolbus_running", default=RunningCall())  # noqa: B039  # frozen


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One tool with its handler.

    Attributes:
        name: its name for models, `[A-Za-z0-9_.-]{1,64}`.
        description: tells a model when to use it.
        parameters: JSON Schema of the arguments; None reads it from the handler's hints, or means no arguments if the
            handler takes a dict.
        handler: async or plain; takes the arguments as keywords, or as one dict (see `takes_dict`).
        no_background: its calls never become tasks: the caller waits for the result.
        allow_repeat: the guard against repeated identical calls ignores it.
        metadata: for programs, not for models; `source` in it names the source.
        dict_handler: whether the handler takes one dict; None reads its signature.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    handler: Callable[..., Any] | None = None
    no_background: bool = False
    allow_repeat: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dict_handler: bool | None = field(default=None, kw_only=True)

    @property
    def source(self) -> str:
        """Whose tool it is; `external` if the metadata do not state it."""
        return str(self.metadata.get("source") or EXTERNAL)

    @property
    def takes_dict(self) -> bool:
        """Whether the handler takes all arguments as one dict.

        It does if its only required parameter is hinted as a dict, or has no hint and is not a property of the schema;
        also if its signature cannot be read. A handler with a parameter `ctx` takes keywords.
        """
        return _takes_dict(self.handler, self.parameters) if self.dict_handler is None else self.dict_handler

    def for_models(self) -> ToolDefinition:
        """Returns the definition without the parameter ``ctx``, which no model may fill."""
        if self.takes_dict or not _takes_ctx(self.handler):
            return self
        parameters = without_property(self.parameters, CTX)
        return self if parameters is self.parameters else replace(self, parameters=parameters)

    def spec(self, **options: Unpack[ToolTraits]) -> ToolSpec:
        """Returns the specification to offer and run it.

        Args:
            options: described in `ToolTraits`. Without ``timeout`` a call may take as long as its caller waits, unless
                the handler takes a dict. The flags of this definition win over those of the options.

        Raises:
            TypeError, ValueError: an option breaks its rule, or the handler is missing.
        """
        handler, takes_dict = self.handler, self.takes_dict
        if handler is None:
            raise TypeError(
                f"ToolDefinition {self.name!r:.80} has no handler: pass handler=, a function that takes the arguments"
            )
        parameters = self.for_models().parameters
        if not isinstance(parameters, dict | None):
            raise TypeError(
                f"tool {self.name!r:.80}: parameters must be a dict, not {type(parameters).__name__}: give a JSON "
                'Schema, {"type": "object"} for a tool that takes anything'
            )
        from_hints = parameters is None and not takes_dict
        if parameters is None:
            given = {"type": "object", "properties": {}} if takes_dict else parameters_schema(handler)
            parameters = without_property(given, CTX) if not takes_dict and _takes_ctx(handler) else given
        described: ToolOptions = {
            "no_defaults": True,  # the systems with such definitions fill none in, and a handler may tell
            **options,
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
            "no_background": self.no_background,
            "allow_repeat": self.allow_repeat,
        }
        if self.metadata:
            described["metadata"] = self.metadata
        meta = describe(handler, **described)
        if not takes_dict and "timeout" not in options:
            meta = replace(meta, timeout=0.0)
        spec = spec_of(handler, meta, takes_dict=takes_dict)
        if from_hints:
            spec = replace(spec, **conversions_of(signature_of(handler), self.name, without=CTX))
        if takes_dict or not _takes_ctx(handler):
            return spec
        required = inspect.signature(handler).parameters[CTX].default is inspect.Parameter.empty
        spec = replace(spec, required=spec.required - {CTX}, names=None if spec.names is None else spec.names - {CTX})
        return with_ctx(spec, has_default=not required)


def with_ctx(spec: ToolSpec, *, has_default: bool) -> ToolSpec:
    """Returns a tool whose handler gets the context of its caller, see `RunningCall`, as ``ctx``.

    If the call has no context, for example because another program made it, the handler gets its `ToolScope`.

    Args:
        has_default: whether ``ctx`` has a default, which is used if a caller in this process passes no context.
    """
    handler, scope = spec.handler, spec.scope or CTX

    def run(**arguments: Any) -> Any:
        call = running_call.get()
        if call.ctx is not None:
            arguments[CTX] = call.ctx
        elif has_default and call.depth:
            arguments.pop(CTX, None)
        else:
            arguments[CTX] = arguments[scope]
        return handler(**arguments)

    return replace(spec, handler=run, scope=scope)


def _takes_ctx(handler: Callable[..., Any] | None) -> bool:
    """Tells whether a handler takes the caller's context: it has a parameter ``ctx`` that is not for a `ToolScope`."""
    ctx = _parameters(handler).get(CTX)
    if handler is None or ctx is None or ctx.kind not in _BY_KEYWORD:
        return False
    return ctx.annotation is inspect.Parameter.empty or signature_of(handler).scope != CTX


def _takes_dict(handler: Callable[..., Any] | None, parameters: Any) -> bool:
    own = _parameters(handler)
    if handler is None or CTX in own:  # only handlers with keywords get it
        return False
    if not own:
        return not _has_signature(handler)
    required = [each for each in own.values() if each.default is inspect.Parameter.empty and each.kind not in _VARIABLE]
    any_keyword = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in own.values())
    if len(required) != 1 or required[0].kind not in _POSITIONAL or any_keyword:
        return False
    declared = properties_of(parameters).get(required[0].name)
    signature = signature_of(handler)
    hint = signature.hints.get(required[0].name, Any)
    origin = typing.get_origin(hint) or hint
    if isinstance(origin, type) and issubclass(origin, Mapping):  # unless one argument is such an object itself
        return not isinstance(declared, dict) or declared.get("type") not in (None, "object")
    return origin in (Any, object) and declared is None and required[0].name != signature.scope


def _has_signature(handler: Callable[..., Any]) -> bool:
    try:
        inspect.signature(handler)
    except ValueError:  # a builtin
        return False
    except TypeError:  # not callable, which is refused later
        return True
    return True


def _parameters(handler: Any) -> Mapping[str, inspect.Parameter]:
    """Returns a handler's parameters; empty if it has no signature, or is not callable."""
    try:
        return inspect.signature(handler).parameters
    except (TypeError, ValueError):
        return {}
