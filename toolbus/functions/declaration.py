"""Declares tools: the `llm_tool` decorator, and the record that it attaches to a function.

The decorator checks all options at once (REST-60) and returns the function itself, so that programs can still call it.
`tool_spec` turns a decorated function into a tool that can be offered and run.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, Unpack, overload

from toolbus.functions import hints
from toolbus.functions.tool_options import ToolOptions, check_option_names
from toolbus.tool import DEFAULT_TIMEOUT_SECONDS, HINTS, MAX_LEVEL, MAX_TIMEOUT_SECONDS, NAME, Annotations

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "__llm_tool__"
# Options that go into the record as they are.
_UNCHECKED = (
    *("display_name", "validate", "no_repair", "no_background", "allow_repeat", "council_eligible"),
    *("inline_available", "direct_reply", "validate_output", "always_background"),
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
