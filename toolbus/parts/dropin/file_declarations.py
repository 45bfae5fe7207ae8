"""Reads the four ways in which a drop-in file declares its tools, and turns each into a `ToolSpec`.

1. `register_tool(name=…, execute=…, definition=…)`, also called `llm_tool_register`; both exist without an import;
2. `TOOL_NAME`, `TOOL_DESCRIPTION`, `TOOL_PARAMETERS` and a function `run`;
3. `TOOLS`, a list of `{"name", "description", "parameters", "handler"}`;
4. functions with `@llm_tool`.

A file may mix them; its tools are offered in this order. Arguments are not checked here: the bus checks them against
the schema before a tool gets them.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType, ModuleType
from typing import Any

from toolbus.errors import InvalidTool, ToolBusError
from toolbus.functions import hints
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import (
    CTX,
    OPTION_NAMES,
    LlmToolMeta,
    ToolSpec,
    conversions_of,
    describe,
    meta_of,
    spec_of,
)
from toolbus.parts.dropin.file_result import answering
from toolbus.protocol.json_schema import SchemaFault, normal_form
from toolbus.protocol.tool import level_of

# All of it comes from the host's context of the call, nothing from the arguments, so a model cannot claim to be another
# user. It is read-only.

_KINDS = ("plugins", "tools", "recent_calls", "stats")


def env_of(scope: ToolScope) -> Mapping[str, Any]:
    """Returns what a tool may know about its call: the host's attributes, and these keys, which are always set.

    - `user_id`: the user whom the call is made for; "" if the host named none, and then assume no user;
    - `user`, `speaker`: their name, and who spoke; a missing one is taken from the other, then from `user_id`;
    - `level`: the access level as a whole number; 0, the lowest, if it is missing or not a number;
    - `channel`, `mode`: where and how the conversation takes place; "" if the host did not set it;
    - `member`: the council member that the call is made for; None outside a council;
    - `messages`: the end of the conversation, oldest first, each with `role`, `content` and `name`;
    - `deadline`: when the caller stops waiting, by `time.monotonic()`; None if there is no deadline;
    - `bus`: functions that return what this user may see of the bus: `plugins()`, `tools()`, `recent_calls()`,
      `stats()`; for plain functions; an async one calls the tool `toolbus:this_bus` itself;
    - `attributes`: everything that the host set, unchanged, each a text.
    """
    attributes = scope.context.attributes
    user_id = scope.context.user_id
    messages = scope.context.messages
    return MappingProxyType(
        {
            **attributes,
            "user_id": user_id,
            "user": attributes.get("user") or attributes.get("speaker") or user_id,
            "speaker": attributes.get("speaker") or attributes.get("user") or user_id,
            "level": level_of(attributes),
            "channel": attributes.get("channel", ""),
            "mode": attributes.get("mode", ""),
            "member": None if scope.context.member is None else MappingProxyType(dict(scope.context.member)),
            "messages": tuple(
                MappingProxyType({"role": each.role, "content": each.content, "name": each.name}) for each in messages
            ),
            "deadline": scope.deadline,
            "bus": _bus(scope),
            "attributes": MappingProxyType(dict(attributes)),
        }
    )


def _bus(scope: ToolScope) -> Mapping[str, Callable[[], Any]]:
    kinds = _KINDS if scope.can_call else ()
    return MappingProxyType({kind: functools.partial(_introspect, scope, kind) for kind in kinds})


def _introspect(scope: ToolScope, kind: str) -> Any:
    result = scope.call_sync("toolbus:this_bus", {"kind": kind})
    if result.error is not None:
        raise ToolBusError(f"the bus did not answer env['bus'][{kind!r}]: {result.error.message}")
    return result.output


_SCOPE = "the scope of this call"  # the key under which `execute` tools get theirs, among the arguments
_INCOMPLETE = "llm_tool_register: spec needs {name, execute, def}"
_NO_PARAMETERS = {"type": "object", "properties": {}}
_FLAGS = {"no_background": "TOOL_NO_BACKGROUND", "allow_repeat": "TOOL_ALLOW_REPEAT"}
_MIN_LEVEL = "TOOL_MIN_LEVEL"  # of a file
DEFINITION_KEYS = ("name", "description", "parameters", "strict")  # what a definition may hold
OPTIONS = tuple(each for each in OPTION_NAMES if each != "name")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

registered: ContextVar[list[ToolSpec] | None] = ContextVar("toolbus_dropin_registered", default=None)
"""What the file that is being loaded has registered so far; None while no file is being loaded."""


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
        spec: all of the following as one mapping, for files with `llm_tool_register({…})`; its `def` is `definition`.
        name: of the tool, for models.
        execute: takes the arguments as a dict, and `env`, the user whom the call is made for (see `env_of`); fewer
            parameters are allowed. Plain or async.
        definition: what a model reads, as OpenAI and Ollama write it, `{"type": "function", "function": {…}}`, or the
            inner object alone: `description` and `parameters`.
        options: those of `llm_tool`. Without `timeout` a call may take as long as its caller waits.

    Raises:
        InvalidTool: something is missing or contradicts itself, or no file is being loaded.
        TypeError, ValueError: naming the part that breaks its rule.
    """
    entry = {"name": name, "execute": execute, "definition": definition, **options, **(spec or {})}
    made, collected = _by_dict(entry), registered.get()
    if collected is None:
        raise InvalidTool(
            [f"tool {entry['name']!r:.80}: register_tool works only while a file is loaded: call it at its top level"]
        )
    collected.append(made)


llm_tool_register = register_tool  # as the files of a Synchronet BBS call it


def spec_of_entry(entry: Mapping[str, Any]) -> ToolSpec:
    """Returns a tool that a program writes as a file would: `{name, execute, def}`, or an entry of `TOOLS`.

    Raises:
        InvalidTool, TypeError, ValueError: naming what is wrong.
    """
    if "execute" not in entry:
        return _by_keywords(f"tool {entry.get('name')!r:.80}", entry, {})
    return _by_dict(entry)


def specs_of(module: ModuleType, known: Sequence[Any] = ()) -> list[ToolSpec]:
    """Returns what a loaded file declares by its names, in the second to fourth way.

    Args:
        known: decorated functions that are offered already; an import of one is not a second tool.

    Raises:
        InvalidTool, TypeError, ValueError: naming what is wrong.
    """
    names = vars(module)
    for stray in ("TOOL_DESCRIPTION", "TOOL_PARAMETERS"):
        if stray in names and "TOOL_NAME" not in names:
            raise InvalidTool(
                [f"{stray} is set without TOOL_NAME, so it describes no tool: add TOOL_NAME and a function run"]
            )
    flags = {flag: bool(names.get(variable)) for flag, variable in _FLAGS.items()}
    specs = []
    if "TOOL_NAME" in names:
        if "run" not in names:
            raise InvalidTool(["TOOL_NAME is set, but there is no function run: add one, which takes the arguments"])
        described = {"description": names.get("TOOL_DESCRIPTION"), "parameters": names.get("TOOL_PARAMETERS")}
        specs.append(_by_keywords("run", {"name": names["TOOL_NAME"], "handler": names["run"], **described}, flags))
    tools = names.get("TOOLS", [])
    if not isinstance(tools, list | tuple):
        raise InvalidTool([f"TOOLS is a {type(tools).__name__}, it must be a list of dicts: put [ and ] around it"])
    specs += [_by_keywords(f"TOOLS[{index}]", each, flags) for index, each in enumerate(tools)]
    seen = {id(each) for each in known}
    return specs + [spec_of(each) for each in decorated(module) if id(each) not in seen]


def decorated(module: ModuleType) -> list[Callable[..., Any]]:
    """Returns a module's functions with `@llm_tool`, each once, also those that it imported."""
    routines = [each for each in vars(module).values() if inspect.isroutine(each) and not inspect.ismethod(each)]
    return list({id(each): each for each in routines if meta_of(each) is not None}.values())


def offered(spec: ToolSpec, file: str, module: ModuleType) -> ToolSpec:
    """Returns a file's tool as it is offered: it never raises, and its metadata names the file.

    A tool without an access level has that of its file.
    """
    level = spec.tool.min_level or vars(module).get(_MIN_LEVEL, 0)
    return answering(located(replace(spec, tool=replace(spec.tool, min_level=level)), file))


def located(spec: ToolSpec, file: str) -> ToolSpec:
    """Returns a file's tool with metadata that names the file.

    Raises:
        TypeError, ValueError: a field has the wrong type, which would else keep the whole process from attaching.
    """
    own = spec.tool.metadata_json
    metadata = {**(json.loads(own) if own else {}), "origin": "dropin", "file": file}
    tool = replace(spec.tool, metadata_json=json.dumps(metadata, ensure_ascii=False))
    tool.to_wire()
    return replace(spec, tool=tool)


def _meta(handler: Callable[..., Any], name: Any, options: dict[str, Any]) -> LlmToolMeta:
    """Returns the declaration of a tool; without a timeout, a call may take as long as its caller waits.

    Its function gets the arguments that were sent, without the defaults of its schema: the systems that such files come
    from fill none in, and a function may tell an argument that is missing from one that is null.
    """
    known = OPTIONS
    for option in options:
        if option not in known:
            raise InvalidTool([f"tool {name!r:.80}: {option!r:.80} is not an option of a tool: use {', '.join(known)}"])
    options["description"] = options.get("description") or ""
    _check_schema(name, options.get("parameters"))
    meta = describe(handler, name=name, **{"no_defaults": True, **options})
    return meta if "timeout" in options else replace(meta, timeout=0.0)


def _check_schema(name: Any, parameters: Any) -> None:
    """Refuses a schema that accepts no object; every other fault is found by the bus."""
    if not isinstance(parameters, dict):
        return  # the SDK refuses it
    try:
        types = normal_form(parameters).schema.get("type", "object")
    except SchemaFault:
        return
    if "object" in (types if isinstance(types, list) else [types]):
        return
    raise InvalidTool(
        [
            f"tool {name!r:.80}: its parameters are of type {types!r:.80}: arguments are an object, so write "
            '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
        ]
    )


def _definition(name: Any, definition: Any) -> tuple[Any, Any]:
    """Returns description and parameters of a definition, in either of its two forms."""
    inner = definition.get("function", definition) if isinstance(definition, Mapping) else None
    if not isinstance(inner, Mapping):
        raise InvalidTool(
            [
                f"tool {name!r:.80}: its definition is {definition!r:.80}, it must be a dict like "
                '{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}'
            ]
        )
    known = {id(definition): ("type", "function"), id(inner): DEFINITION_KEYS}
    if inner is definition:
        known = {id(inner): ("type", *DEFINITION_KEYS)}
    for part in (definition, inner):
        for key in part:
            if key not in known[id(part)]:
                keys = ", ".join(known[id(part)])
                raise InvalidTool(
                    [f"tool {name!r:.80}: its definition has the unknown key {key!r:.80}: it may have {keys}"]
                )
    if inner.get("name") not in (None, name):
        raise InvalidTool(
            [f"tool {name!r:.80}: its definition has the name {inner['name']!r:.80}: give both the same name"]
        )
    return inner.get("description"), inner.get("parameters") or _NO_PARAMETERS


def _with_env(name: str, execute: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """Returns a handler that runs `execute(args, env)` with as many of the two as it takes."""
    count = _count_parameters(name, execute)

    def run(arguments: dict[str, Any]) -> Any:
        scope = arguments.pop(_SCOPE)
        return execute(*(arguments, env_of(scope))[:count])

    return run


def _count_parameters(name: str, execute: Callable[..., Any]) -> int:
    """Returns how many of `args` and `env` a function takes."""
    try:
        signature = inspect.signature(execute)
    except (TypeError, ValueError):  # a builtin without a signature
        return 2
    kinds = [each.kind for each in signature.parameters.values()]
    count = 2 if inspect.Parameter.VAR_POSITIONAL in kinds else min(2, sum(kind in _POSITIONAL for kind in kinds))
    try:
        signature.bind(*range(count))
        fits = count > 0 or not kinds
    except TypeError:
        fits = False
    if not fits:
        raise InvalidTool(
            [f"tool {name!r:.80}: execute has the signature {signature}, it is called as execute(args, env): change it"]
        )
    return count


def _by_dict(entry: Mapping[str, Any]) -> ToolSpec:
    """Returns the tool of an entry whose function is called as `execute(args, env)`."""
    options = dict(entry)
    name, execute, definition = (options.pop(key, None) for key in ("name", "execute", "definition"))
    definition = options.pop("def", None) or definition
    if not name or not callable(execute) or not definition:
        raise InvalidTool([_INCOMPLETE])
    description, parameters = _definition(name, definition)
    meta = _meta(execute, name, options | {"description": description, "parameters": parameters})
    spec = spec_of(execute, meta, takes_dict=True)
    return replace(spec, handler=_with_env(name, execute), scope=_SCOPE)


def _by_keywords(where: str, entry: Any, flags: Mapping[str, bool]) -> ToolSpec:
    """Returns the tool of an entry whose handler takes the arguments as keywords."""
    if not isinstance(entry, Mapping):
        raise InvalidTool([f"{where} is a {type(entry).__name__}, it must be a dict with name and handler"])
    known = ["name", "handler", *OPTIONS]
    for key in entry:
        if key not in known:
            raise InvalidTool([f"{where} has {key!r:.80}, which is not an option of a tool: use {', '.join(known)}"])
    options = {**flags, **entry}
    name, handler = options.pop("name", None), options.pop("handler", None)
    if not name or not callable(handler):
        missing = "name" if not name else "function"
        raise InvalidTool([f"{where} has no {missing}: a tool needs a name and a function"])
    takes_ctx = _takes_ctx(handler)
    parameters = options.pop("parameters", None)
    from_hints = parameters is None
    if takes_ctx:
        parameters = hints.without_property(hints.parameters_schema(handler) if parameters is None else parameters, CTX)
    spec = spec_of(handler, _meta(handler, name, options | {"parameters": parameters}))
    if not takes_ctx:
        return spec
    if from_hints:
        spec = replace(spec, **conversions_of(hints.signature_of(handler), name, without=CTX))
    names = None if spec.names is None else spec.names - {CTX}
    return replace(spec, scope=CTX, names=names, required=spec.required - {CTX})


def _takes_ctx(handler: Callable[..., Any]) -> bool:
    """Tells whether a handler has a parameter `ctx`, which gets the scope whatever its hint."""
    try:
        ctx = inspect.signature(handler).parameters.get(CTX)
    except (TypeError, ValueError):
        return False
    return ctx is not None and ctx.kind in _BY_KEYWORD
