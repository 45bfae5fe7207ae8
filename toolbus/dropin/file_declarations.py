"""The four ways in which a drop-in file may say what its tools are, each turned into `ToolSpec`s.

1. `register_tool(name=…, execute=…, definition=…)`, also called `llm_tool_register`; both are there without import;
2. `TOOL_NAME`, `TOOL_DESCRIPTION`, `TOOL_PARAMETERS` and a function `run`;
3. `TOOLS`, a list of `{"name", "description", "parameters", "handler"}`;
4. functions with `@llm_tool`.

A file may mix them; they are offered in this order. Arguments are not checked here: the bus checks them against the
schema before a tool sees them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import ModuleType
from typing import Any

from toolbus.dropin.file_result import answering
from toolbus.dropin.tool_env import env_of
from toolbus.errors import InvalidTool
from toolbus.functions import hints
from toolbus.functions.declaration import LlmToolMeta, describe, meta_of
from toolbus.functions.tool_options import OPTION_NAMES
from toolbus.functions.tool_spec import ToolSpec, spec_of

CTX = "ctx"  # the parameter that gets the `ToolScope` and is never shown to a model
_SCOPE = "the scope of this call"  # under which `execute` tools are handed theirs, beside the arguments
_INCOMPLETE = "llm_tool_register: spec needs {name, execute, def}"
_ANYTHING = {"type": "object", "properties": {}}
_FLAGS = {"no_background": "TOOL_NO_BACKGROUND", "allow_repeat": "TOOL_ALLOW_REPEAT"}
_MIN_LEVEL = "TOOL_MIN_LEVEL"  # of a file
_OF_FUNCTIONS = ("name", "description", "parameters", "strict")  # what a definition may hold
_OPTIONS = tuple(each for each in OPTION_NAMES if each != "name")
_OF_SCHEMAS = {
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "$ref", "$schema"),
    *("$defs", "definitions", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired"),
}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

registered: ContextVar[list[ToolSpec] | None] = ContextVar("toolbus_dropin_registered", default=None)
"""What the file that is being loaded has registered so far; None where none is."""


def register_tool(
    spec: Mapping[str, Any] | None = None,
    /,
    *,
    name: Any = None,
    execute: Any = None,
    definition: Any = None,
    **options: Any,
) -> None:
    """Offers a tool, from the file that is being loaded.

    Args:
        spec: all of the following as one mapping, for files that were `llm_tool_register({…})`; its `def` is
            `definition`.
        name: what models call it.
        execute: takes the arguments as a dict, and `env`, who the call is made for (see `env_of`); fewer parameters
            are fine. Plain or async.
        definition: what a model is told, as OpenAI and Ollama write it, `{"type": "function", "function": {…}}`, or
            the inner object alone: `description` and `parameters`.
        options: as those of `llm_tool`. Without `timeout` a call may take as long as whoever calls it waits.

    Raises:
        InvalidTool: something is missing or contradicts itself, or no file is being loaded.
        TypeError, ValueError: naming the part that breaks its rule.
    """
    given = {"name": name, "execute": execute, "definition": definition, **options, **(spec or {})}
    name, execute, definition = (given.pop(key) for key in ("name", "execute", "definition"))
    definition = given.pop("def", None) or definition
    if not name or not callable(execute) or not definition:
        raise InvalidTool([_INCOMPLETE])
    collected = registered.get()
    if collected is None:
        raise InvalidTool([f"tool {name!r:.80}: register_tool works only while its file is loaded: call it there"])
    description, parameters = _definition(name, definition)
    meta = _described(execute, name, given | {"description": description, "parameters": parameters})
    made = spec_of(execute, meta, takes_dict=True)
    collected.append(replace(made, handler=_with_env(name, execute), scope=_SCOPE))


def specs_of(module: ModuleType, known: Sequence[Any] = ()) -> list[ToolSpec]:
    """Returns what a loaded file declares by its names, the second to fourth shape.

    Args:
        known: decorated functions that are offered already; an import of one is no tool of its own.

    Raises:
        InvalidTool, TypeError, ValueError: naming what is wrong.
    """
    found = vars(module)
    for stray in ("TOOL_DESCRIPTION", "TOOL_PARAMETERS"):
        if stray in found and "TOOL_NAME" not in found:
            raise InvalidTool([f"{stray} is there without TOOL_NAME, so it describes no tool: add TOOL_NAME and run"])
    flags = {flag: bool(found.get(variable)) for flag, variable in _FLAGS.items()}
    specs = []
    if "TOOL_NAME" in found:
        described = {"description": found.get("TOOL_DESCRIPTION"), "parameters": found.get("TOOL_PARAMETERS")}
        specs.append(_by_keywords("run", {"name": found["TOOL_NAME"], "handler": found.get("run"), **described}, flags))
    tools = found.get("TOOLS", [])
    if not isinstance(tools, list | tuple):
        raise InvalidTool([f"TOOLS is a {type(tools).__name__}, it must be a list of dicts: put [ and ] round it"])
    specs += [_by_keywords(f"TOOLS[{index}]", each, flags) for index, each in enumerate(tools)]
    seen = {id(each) for each in known}
    return specs + [spec_of(each) for each in decorated(module) if id(each) not in seen]


def decorated(module: ModuleType) -> list[Callable[..., Any]]:
    """Returns a module's functions with `@llm_tool`, each once, also those that it imported."""
    routines = [each for each in vars(module).values() if inspect.isroutine(each) and not inspect.ismethod(each)]
    return list({id(each): each for each in routines if meta_of(each) is not None}.values())


def offered(spec: ToolSpec, file: str, module: ModuleType) -> ToolSpec:
    """Returns a file's tool as it is offered: it answers instead of raising, and says which file it is from.

    A tool that asks for no level of access has its file's.
    """
    said = spec.tool.metadata_json
    metadata = {**(json.loads(said) if said else {}), "origin": "dropin", "file": file}
    level = spec.tool.min_level or vars(module).get(_MIN_LEVEL, 0)
    tool = replace(spec.tool, metadata_json=json.dumps(metadata, ensure_ascii=False), min_level=level)
    tool.to_wire()  # a flag of the wrong type would else keep the whole process from attaching
    return answering(replace(spec, tool=tool))


def _described(handler: Callable[..., Any], name: Any, options: dict[str, Any]) -> LlmToolMeta:
    """Returns what was said about a tool; without a timeout, a call may take as long as whoever calls it waits."""
    known = _OPTIONS
    for option in options:
        if option not in known:
            raise InvalidTool([f"tool {name!r:.80}: {option!r:.80} is no option of a tool: it has {', '.join(known)}"])
    options["description"] = options.get("description") or ""
    _check_schema(name, options.get("parameters"))
    meta = describe(handler, name=name, **options)
    return meta if "timeout" in options else replace(meta, timeout=0.0)


def _check_schema(name: Any, parameters: Any) -> None:
    """Refuses properties that stand where the schema of an object has to, which as a schema would allow anything."""
    if not isinstance(parameters, Mapping) or not parameters:
        return  # that it is no dict is told by the SDK
    if parameters.get("type", "object") != "object":
        what = f"of type {parameters['type']!r:.80}"
    elif (
        "type" not in parameters
        and not _OF_SCHEMAS & set(parameters)
        and all(isinstance(each, Mapping) for each in parameters.values())
    ):
        what = f"{dict(parameters)!r:.80}, which is no schema"
    else:
        return
    raise InvalidTool(
        [
            f"tool {name!r:.80}: its parameters are {what}: arguments are an object, so write "
            '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
        ]
    )


def _definition(name: Any, definition: Any) -> tuple[Any, Any]:
    """Returns description and parameters of either form of a definition."""
    inner = definition.get("function", definition) if isinstance(definition, Mapping) else None
    if not isinstance(inner, Mapping):
        raise InvalidTool(
            [
                f"tool {name!r:.80}: its definition is {definition!r:.80}, it must be a dict like "
                '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'
            ]
        )
    known = {id(definition): ("type", "function"), id(inner): _OF_FUNCTIONS}
    if inner is definition:
        known = {id(inner): ("type", *_OF_FUNCTIONS)}
    for part in (definition, inner):
        for key in part:
            if key not in known[id(part)]:
                words = ", ".join(known[id(part)])
                raise InvalidTool(
                    [f"tool {name!r:.80}: its definition has {key!r:.80}, but may have {words}: correct it"]
                )
    if inner.get("name") not in (None, name):
        raise InvalidTool([f"tool {name!r:.80}: its definition is of {inner['name']!r:.80}: give both the same name"])
    return inner.get("description"), inner.get("parameters") or _ANYTHING


def _with_env(name: str, execute: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Returns a handler that runs `execute(args, env)` with as many of the two as it takes."""
    takes = _taken(name, execute)

    def run(arguments: dict[str, Any]) -> Any:
        scope = arguments.pop(_SCOPE)
        return execute(*(arguments, env_of(scope))[:takes])

    return run


def _taken(name: str, execute: Callable[..., Any]) -> int:
    """Returns how many of `args` and `env` a function takes."""
    try:
        signature = inspect.signature(execute)
    except (TypeError, ValueError):  # a builtin that does not tell
        return 2
    kinds = [each.kind for each in signature.parameters.values()]
    takes = 2 if inspect.Parameter.VAR_POSITIONAL in kinds else min(2, sum(kind in _POSITIONAL for kind in kinds))
    try:
        signature.bind(*range(takes))
        fits = takes > 0 or not kinds
    except TypeError:
        fits = False
    if not fits:
        raise InvalidTool([f"tool {name!r:.80}: execute takes {signature}, it is run as execute(args, env): change it"])
    return takes


def _by_keywords(where: str, entry: Any, flags: Mapping[str, bool]) -> ToolSpec:
    """Returns the tool of an entry whose handler takes the arguments as keywords."""
    if not isinstance(entry, Mapping):
        raise InvalidTool([f"{where} is a {type(entry).__name__}, it must be a dict with name and handler: correct it"])
    known = ["name", "handler", *_OPTIONS]
    for key in entry:
        if key not in known:
            raise InvalidTool(
                [f"{where} has {key!r:.80}, which is no option of a tool: it may have {', '.join(known)}"]
            )
    options = {**flags, **entry}
    name, handler = options.pop("name", None), options.pop("handler", None)
    if not name or not callable(handler):
        lacks = "name" if not name else "function"
        raise InvalidTool(
            [f"{where} has no {lacks}, but a tool needs a name and a function that can be called: add it"]
        )
    takes_ctx = _takes_ctx(handler)
    parameters = options.pop("parameters", None)
    if takes_ctx:
        parameters = _without_ctx(hints.parameters_schema(handler) if parameters is None else parameters)
    spec = spec_of(handler, _described(handler, name, options | {"parameters": parameters}))
    if not takes_ctx:
        return spec
    names = None if spec.names is None else spec.names - {CTX}
    return replace(spec, scope=CTX, names=names, required=spec.required - {CTX})


def _takes_ctx(handler: Callable[..., Any]) -> bool:
    """Tells whether a handler has a parameter `ctx` that the SDK would not fill itself, for it has another hint."""
    try:
        ctx = inspect.signature(handler).parameters.get(CTX)
    except (TypeError, ValueError):
        return False
    return ctx is not None and ctx.kind in _BY_KEYWORD


def _without_ctx(parameters: Any) -> Any:
    """Returns a schema without the property that no model may fill."""
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or CTX not in properties:
        return parameters
    shown = {**parameters, "properties": {name: each for name, each in properties.items() if name != CTX}}
    if isinstance(required := parameters.get("required"), list):
        shown["required"] = [name for name in required if name != CTX]
    return shown
