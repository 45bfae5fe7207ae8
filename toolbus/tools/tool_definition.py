"""Describes one tool of a Python program, as the registry shows it, and turns it into a tool of the bus."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Unpack

from toolbus.functions.declaration import describe
from toolbus.functions.hints import signature_of, without_property
from toolbus.functions.tool_options import ToolOptions, ToolTraits
from toolbus.functions.tool_spec import ToolSpec, spec_of

CTX = "ctx"  # the parameter that gets the caller's context and is never shown to a model
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class RunningCall:
    """The call that the current task runs.

    Attributes:
        ctx: the context that its caller passed as ``ctx``.
        user_id: on whose behalf; calls that the tool makes itself are made for the same user.
        depth: how many calls of tools are nested here, this one included.
    """

    ctx: Any = None
    user_id: str = ""
    depth: int = 0


# The task of a call inherits it from the task that started the call.
running_call: ContextVar[RunningCall] = ContextVar("toolbus_running", default=RunningCall())  # noqa: B039  # frozen


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """One tool, as Stargazer's registry shows it.

    Attributes:
        name: what models call it, `[A-Za-z0-9_.-]{1,64}`.
        description: tells a model when to use it.
        parameters: JSON Schema of the arguments.
        handler: takes the arguments as keywords; async or plain.
        no_background: its calls never become tasks: the caller waits for the result.
        allow_repeat: the guard against repeated identical calls ignores it.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    handler: Callable[..., Any]
    no_background: bool = False
    allow_repeat: bool = False

    def for_models(self) -> ToolDefinition:
        """Returns the definition without the parameter ``ctx``, which no model may fill."""
        parameters = without_property(self.parameters, CTX) if _takes_ctx(self.handler) else self.parameters
        return self if parameters is self.parameters else replace(self, parameters=parameters)

    def spec(self, **options: Unpack[ToolTraits]) -> ToolSpec:
        """Returns the specification to offer and run it.

        Args:
            options: described in `ToolTraits`. Without ``timeout`` a call may take as long as its caller waits. The
                flags of this definition count.

        Raises:
            TypeError, ValueError: naming the option that breaks its rule.
        """
        if not isinstance(self.parameters, dict):
            raise TypeError(
                f"tool {self.name!r:.80}: parameters must be a dict, not {type(self.parameters).__name__}: give a JSON "
                'Schema, {"type": "object"} for a tool that takes anything'
            )
        described: ToolOptions = {
            **options,
            "name": self.name,
            "description": self.description,
            "parameters": self.for_models().parameters,
            "no_background": self.no_background,
            "allow_repeat": self.allow_repeat,
        }
        meta = describe(self.handler, **described)
        spec = spec_of(self.handler, meta if "timeout" in options else replace(meta, timeout=0.0))
        if not _takes_ctx(self.handler):
            return spec
        return replace(
            spec,
            handler=_with_ctx(self.handler),
            scope="" if spec.scope == CTX else spec.scope,
            names=None if spec.names is None else spec.names - {CTX},
            required=spec.required - {CTX},
        )


def _takes_ctx(handler: Callable[..., Any]) -> bool:
    """Tells whether a handler takes the caller's context: it has a parameter ``ctx`` that is not for a `ToolScope`."""
    try:
        ctx = inspect.signature(handler).parameters.get(CTX)
    except (TypeError, ValueError):  # a builtin, or not callable: it has no signature
        return False
    if ctx is None or ctx.kind not in _BY_KEYWORD:
        return False
    return ctx.annotation is inspect.Parameter.empty or signature_of(handler).scope != CTX


def _with_ctx(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a handler that gets the caller's context; without one, the handler's own default or None."""
    required = inspect.signature(handler).parameters[CTX].default is inspect.Parameter.empty

    def run(**arguments: Any) -> Any:
        arguments.pop(CTX, None)  # a handler with **kwargs would otherwise get a model's
        ctx = running_call.get().ctx
        if ctx is not None or required:
            arguments[CTX] = ctx
        return handler(**arguments)

    return run
