"""Declaring tools: the `llm_tool` decorator, and what it leaves on a function.

The decorator checks everything at once (REST-60) and returns the function itself, so that a tool can still be called
as what it is. What becomes of a decorated function is the part of `tool_spec`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from toolbus.functions import hints
from toolbus.tool import DEFAULT_TIMEOUT_SECONDS, MAX_LEVEL, MAX_TIMEOUT_SECONDS, NAME, Annotations

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "__llm_tool__"


@dataclass(frozen=True)
class LlmToolMeta:
    """What `llm_tool` was told about a function; readable as `function.__llm_tool__`."""

    name: str
    function: Callable[..., Any] = field(repr=False, compare=False)
    description: str = ""
    declared_json: str | None = None  # the schema that was given, None where the type hints decide
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

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of the arguments. Hints are read at first use, when names defined later exist."""
        if self.declared_json is None:
            return hints.parameters_schema(self.function)
        parsed: dict[str, Any] = json.loads(self.declared_json)
        return parsed

    @property
    def timeout_seconds(self) -> float:
        """The same as `timeout`, by its name on the wire."""
        return self.timeout


def describe(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str = "",
    parameters: dict[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    role: str | None = None,
    idempotent: bool | None = None,
    read_only: bool | None = None,
    destructive: bool | None = None,
    open_world: bool | None = None,
    display_name: str = "",
    idle_timeout: float | None = None,
    validate: bool | None = None,
    no_background: bool = False,
    allow_repeat: bool = False,
    council_eligible: bool = False,
    inline_available: bool = False,
    direct_reply: bool = False,
    min_level: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> LlmToolMeta:
    """Checks what is said about a tool and returns it as one record; the arguments are `llm_tool`'s.

    Raises:
        ValueError: a name or a time that breaks its rule, or a schema that JSON cannot hold.
        TypeError: an argument of the wrong kind.
    """
    if not callable(function):
        raise TypeError(f"llm_tool is put on a function, not on {function!r}: write @llm_tool(name=…) above a def")
    if name is None:
        name = getattr(function, "__name__", "") or type(function).__name__
    _check_name(name)
    for label, value in (("description", description), ("display_name", display_name), ("role", role or "")):
        if not isinstance(value, str):
            raise TypeError(f"llm_tool {name!r}: {label} must be a str, not {type(value).__name__}")
    return LlmToolMeta(
        name=name,
        function=function,
        description=description or hints.description_of(function),
        declared_json=None if parameters is None else _dump(name, "parameters", parameters, dict),
        timeout=_check_seconds(name, "timeout", timeout),
        role=role or None,
        idle_timeout=_check_seconds(name, "idle_timeout", idle_timeout) if idle_timeout is not None else 0.0,
        display_name=display_name,
        annotations=Annotations(read_only, idempotent, destructive, open_world),
        validate=validate,
        no_background=no_background,
        allow_repeat=allow_repeat,
        council_eligible=council_eligible,
        inline_available=inline_available,
        direct_reply=direct_reply,
        metadata_json="" if metadata is None else _dump(name, "metadata", metadata, Mapping),
        min_level=_check_level(name, min_level),
    )


@overload
def llm_tool(function: F, /) -> F: ...
@overload
def llm_tool(
    *,
    name: str | None = None,
    description: str = "",
    parameters: dict[str, Any] | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    role: str | None = None,
    idempotent: bool | None = None,
    read_only: bool | None = None,
    destructive: bool | None = None,
    open_world: bool | None = None,
    display_name: str = "",
    idle_timeout: float | None = None,
    validate: bool | None = None,
    no_background: bool = False,
    allow_repeat: bool = False,
    council_eligible: bool = False,
    inline_available: bool = False,
    direct_reply: bool = False,
    min_level: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Callable[[F], F]: ...
def llm_tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Makes a function or method a tool that models may call. Returns the function itself.

    Args:
        name: what models call it, `[A-Za-z0-9_.-]{1,64}`; the function's name where it is not given.
        description: tells a model when to use it; the docstring's first paragraph where it is empty.
        parameters: JSON Schema of the arguments; read from the type hints where it is not given.
        timeout: seconds a call may take, more than 0 and at most 300.
        role: the persona that it is for; None or empty means all.
        idempotent: running twice does no more than running once, so a lost call may be sent again.
        read_only: running changes nothing, so a lost call may be sent again.
        destructive: running may destroy something.
        open_world: running reaches beyond this machine.
        display_name: a name for people.
        idle_timeout: seconds without progress or result that end a call; None means no such limit.
        validate: whether the bus checks arguments against the schema; None means that it does.
        no_background: a host must wait for the result.
        allow_repeat: the guard against repeated identical calls lets it pass.
        council_eligible: members of a council may be offered it.
        inline_available: the main model may be offered it outside a council.
        direct_reply: the result is shown to the user as it is.
        min_level: the access level that a user needs to be offered it, as the host says it; 0 means everybody.
        metadata: anything for hosts, as JSON.

    Raises:
        ValueError: a name or a time that breaks its rule.
        TypeError: `parameters` is no dict, or the decorator stands on something that cannot be called.
    """
    if function is not None:
        return _mark(function, options)
    # Checks the options on the line where they are written; the name is the function's where none is given.
    describe(lambda: None, **(options | ({} if options.get("name") is not None else {"name": "unnamed"})))
    return lambda function: _mark(function, options)


def meta_of(function: object) -> LlmToolMeta | None:
    """Returns what `llm_tool` left on a function or method; None where it left nothing."""
    meta = getattr(function, ATTRIBUTE, None) or getattr(getattr(function, "__func__", None), ATTRIBUTE, None)
    return meta if isinstance(meta, LlmToolMeta) else None


def _mark(function: Any, options: Mapping[str, Any]) -> Any:
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
        raise ValueError(f"tool {name!r}: min_level is {value}, it must be from 0 (everybody) to {MAX_LEVEL}")
    return value


def _dump(name: str, label: str, value: object, kind: type) -> str:
    if not isinstance(value, kind):
        raise TypeError(f"tool {name!r}: {label} must be a dict, not {type(value).__name__}")
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(f"tool {name!r}: {label} cannot be written as JSON: {problem}") from None
