"""Describes one tool of a Python program by its handler, and turns it into a tool of the bus.

`ToolDefinition` is the class that programs of two systems construct: Stargazer's, whose handlers take the arguments as
keywords and may ask for the caller's context, and N.E.K.O.'s, whose handlers take them as one dict (REST-63).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from toolbus.functions.declaration import describe
from toolbus.functions.hints import parameters_schema, signature_of, without_property
from toolbus.functions.tool_options import ToolOptions, ToolTraits
from toolbus.functions.tool_spec import ToolSpec, converters_of, spec_of
from toolbus.normal_schema import properties_of

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
            own = tuple(each for each in converters_of(signature_of(handler)) if each[0] != CTX)
            spec = replace(spec, converters=own)
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
