"""Offers the tools of an extension: `Extension`, a plugin whose handlers may answer for all of its tools.

It is the API that extensions of role-play hosts use: tools registered as records, one or several `TOOL_INVOCATION`
handlers, the host's fields beside the arguments. Everything else is `Plugin`'s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, Unpack, overload

from toolbus.errors import Code, Stage
from toolbus.functions.call_context import ContextMessage
from toolbus.functions.hints import without_property
from toolbus.functions.reply import Err, Ok, Reply, dump_output
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolDefinition, ToolOptions, ToolSpec, describe, spec_of
from toolbus.protocol.json_schema import properties_of
from toolbus.protocol.tool import USER_KEYS, CallError, Result
from toolbus.sdk.plugin_client import Plugin, called, made_of
from toolbus.v1 import tool_pb2 as pb

log = logging.getLogger("toolbus.sdk.extension")

F = TypeVar("F", bound=Callable[..., Any])
Handler = Callable[["ToolInvocation"], Any]

TOOL_INVOCATION = "TOOL_INVOCATION"
NO_HANDLER = f"No {TOOL_INVOCATION} handler registered"
FAILED = "Tool invocation failed"

_FLAGS = ("council_eligible", "inline_available")
_FIELDS = frozenset(("name", "display_name", "description", "parameters", "timeout", "validate", "min_level", *_FLAGS))

# A model cannot set these fields: values that it writes under their names are removed or replaced. The user of a call
# is never in its arguments.

CONTEXT = "context"
DEADLINE = "__deadlineMs"

# The fields of a council member, with the values for those that the host has not sent.
_MEMBER_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "memberId": "",
        "itemId": "",
        "packId": "",
        "packName": "",
        "name": "",
        "role": "",
        "chance": 100,
        "avatarUrl": None,
        "definition": "",
        "personality": "",
        "behavior": "",
        "genderIdentity": 3,  # any
    }
)
_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "toolName": "tool_name",
        "args": "args",
        "requestId": "request_id",
        "councilMember": "council_member",
        "contextMessages": "context_messages",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class ToolInvocation(Mapping[str, Any]):
    """One call, as a handler for all tools gets it: a mapping with the keys that extensions know.

    Attributes:
        tool_name: `toolName`, the registered name, without the source.
        args: the model's arguments, with the host's `context` and `__deadlineMs`.
        request_id: `requestId`, the caller's id of the call.
        council_member: `councilMember`, the member that makes the call, with exactly twelve fields; None outside a
            council.
        context_messages: `contextMessages`, the conversation as the host sent it, each with role and content, and
            perhaps a name; None if it sent none.
        scope: progress, cancellation, calls of other tools, the user. Not in the mapping.
    """

    tool_name: str
    args: dict[str, Any]
    request_id: str
    council_member: Mapping[str, Any] | None
    context_messages: list[dict[str, str]] | None
    scope: ToolScope

    @classmethod
    def of(cls, arguments: Mapping[str, Any], scope: ToolScope, *, keeps_context: bool = False) -> ToolInvocation:
        """Returns the record of a call for its handlers.

        Args:
            keeps_context: as for `with_host_fields`.
        """
        member = scope.context.member
        return cls(
            tool_name=scope.tool,
            args=with_host_fields(arguments, scope, keeps_context=keeps_context),
            request_id=scope.request_id,
            council_member=None if member is None else council_member(member),
            context_messages=[_shown(each) for each in scope.context.messages] or None,
            scope=scope,
        )

    def __getitem__(self, key: str) -> Any:
        return getattr(self, _KEYS[key])

    def __iter__(self) -> Iterator[str]:
        return iter(_KEYS)

    def __len__(self) -> int:
        return len(_KEYS)


def with_host_fields(arguments: Mapping[str, Any], scope: ToolScope, *, keeps_context: bool = False) -> dict[str, Any]:
    """Returns arguments with the host's fields, and without fields that only a host may set.

    Args:
        keeps_context: whether the model may write `context` if the host sent none: the tool declares it.
    """
    fields = {key: value for key, value in arguments.items() if key not in USER_KEYS and key != DEADLINE}
    if scope.context.messages:
        fields[CONTEXT] = context_text(scope.context.messages)
    elif not keeps_context:
        fields.pop(CONTEXT, None)
    if (left := scope.time_left()) < math.inf:
        fields[DEADLINE] = round((time.time() + left) * 1000)
    return fields


def taking_host_fields(spec: ToolSpec) -> ToolSpec:
    """Returns a tool whose handler gets `context` and `__deadlineMs` as arguments, if it takes them.

    Its schema does not show them to a model.
    """
    host_fields = {CONTEXT, DEADLINE}
    schema = spec.tool.parameters
    for field in host_fields:
        schema = without_property(schema, field)
    tool = dataclasses.replace(spec.tool, parameters_json=json.dumps(schema, ensure_ascii=False))
    unwanted = frozenset() if spec.names is None else host_fields - spec.names

    def prepare(arguments: dict[str, Any], scope: ToolScope) -> dict[str, Any]:
        fields = with_host_fields(arguments, scope)
        return {key: value for key, value in fields.items() if key not in unwanted}

    return dataclasses.replace(spec, tool=tool, prepare=prepare)


def council_member(member: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a member with exactly twelve fields, with defaults for those that the host has not sent."""
    fields = _MEMBER_FIELDS.items()
    return MappingProxyType({key: other if member.get(key) is None else member[key] for key, other in fields})


def context_text(messages: Iterable[ContextMessage]) -> str:
    """Returns messages as one text, with blank lines between them, each but the system's with its role before it."""
    return "\n\n".join(each.content if each.role == "system" else f"{each.role}: {each.content}" for each in messages)


def _shown(message: ContextMessage) -> dict[str, str]:
    fields = {"role": message.role, "content": message.content}
    return fields | {"name": message.name} if message.name else fields


class Extension(Plugin):
    """An extension of this process: its tools, listed as ``source:name``, and their handlers.

    A tool has a function of its own (`tool`, or `register_tool` with a handler), or the handlers for all tools answer
    its calls (`on_invocation`). Tools can be added and removed at any time, from any thread. If the bus refuses them,
    the log, `on_refused` and `ready` report it.

    Args:
        source: whose tools these are, `[A-Za-z0-9_.:-]{1,128}`.
        qualified: whether the tools are listed as ``source:name``, so that they never collide with another's.
        options: as for `Plugin`.

    Raises:
        SetupError: an argument breaks its rule.
    """

    _operations: ClassVar[Mapping[str, str]] = {"attach": "registerTool", "register": "registerTool"}

    def __init__(self, source: str, *, qualified: bool = True, **options: Any) -> None:
        super().__init__(source, qualified=qualified, **options)
        self._handlers: list[Handler] = []  # for all tools that have no function of their own

    async def quiet(self, messages: str | Sequence[Mapping[str, str]], **options: Any) -> str:
        """Asks the host's model with the host's own settings: `Plugin.generate` in mode ``quiet``; returns the text."""
        return (await self.generate(messages, mode="quiet", **options)).text

    async def raw(self, messages: str | Sequence[Mapping[str, str]], **options: Any) -> str:
        """Asks the host's model with these messages alone: `Plugin.generate` in mode ``raw``; returns the text."""
        return (await self.generate(messages, mode="raw", **options)).text

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self, /, *, replace: bool = False, host_args: bool = False, **options: Unpack[ToolOptions]
    ) -> Callable[[F], F]: ...
    def tool(
        self,
        function: Any = None,
        /,
        *,
        replace: bool = False,
        host_args: bool = False,
        **options: Unpack[ToolOptions],
    ) -> Any:
        """Offers a function; a decorator, as `Plugin.tool`, with ``host_args`` as for `add_tool`."""

        def offer(function: F) -> F:
            self.add_tool(function, replace=replace, host_args=host_args, **options)
            return function

        return offer if function is None else offer(function)

    def add_tool(
        self,
        tool: Callable[..., Any] | ToolDefinition | ToolSpec,
        *,
        replace: bool = False,
        host_args: bool = False,
        **options: Unpack[ToolOptions],
    ) -> ToolSpec:
        """Offers a tool with a function of its own, as `Plugin.add_tool` does.

        It takes the place of one that was registered without a function.

        Args:
            host_args: whether the function gets `context` and `__deadlineMs` as arguments, which the model neither
                writes nor sees. Its `ToolScope` has both too.
        """
        spec = made_of(tool, options)
        if host_args:
            spec = taking_host_fields(spec)
        existing = self.tools.get(spec.tool.name)
        return super().add_tool(spec, replace=replace or (existing is not None and existing.handler == self._answer))

    def register_tool(
        self,
        record: Mapping[str, Any] | None = None,
        /,
        *,
        handler: Callable[..., Any] | None = None,
        host_args: bool = False,
        **fields: Any,
    ) -> None:
        """Offers a tool; one of that name is replaced. Does not wait for the bus: see `ready` and `on_refused`.

        Args:
            record: `name`, `display_name`, `description`, `parameters` (a JSON Schema), `council_eligible`,
                `inline_available`, `timeout` in seconds, `validate`, `min_level`. What is missing or None has its
                default; whatever else there is is ignored, as hosts set fields of their own. A council that plans no
                arguments calls its tools without any, and the bus does not check that call.
            handler: a function that answers for this tool only, with the arguments as keywords. None leaves it to the
                function that the tool has, or to the handlers for all tools.
            host_args: as for `add_tool`.
            fields: the same as in a record, over it.

        Raises:
            ValueError, TypeError: a field breaks its rule.
        """
        options = _options({**(record or {}), **fields})
        existing = self.tools.get(options["name"])
        takes_dict = False
        if handler is None and existing is not None and existing.handler != self._answer:
            handler, takes_dict = existing.handler, existing.takes_dict
            host_args = host_args or existing.prepare is not None
        if takes_dict:  # its one parameter is not one of the tool
            options.setdefault("parameters", {"type": "object"})
        if handler is None:
            spec = _spec_answered_by(self._answer, options)
        else:
            spec = spec_of(handler, describe(handler, **options), takes_dict=takes_dict)
            spec = taking_host_fields(spec) if host_args else spec
        self.tools.add(spec, replace=True)

    def unregister_tool(self, name: str) -> bool:
        """Withdraws a tool of this extension; returns whether there was one. An unknown name is not an error."""
        return self.remove_tool(name)

    def on_invocation(self, function: F) -> F:
        """Registers a handler for the calls of all tools without a function of their own; a decorator.

        It gets a `ToolInvocation` and may be async or plain. With several of them each is called, in order, and the
        first that returns something, or raises, decides. A text is the result as it is, None is "", anything else is
        its JSON text, and what it raises becomes the tool's error, by its message.

        Raises:
            TypeError: it is not a function.
        """
        if not callable(function):
            raise TypeError(f"on_invocation is put on a function, not on {function!r:.80}: write it above a def")
        self._handlers.append(function)
        return function

    def on(self, event: str, handler: Handler) -> Callable[[], None]:
        """Does what `on_invocation` does, for ``"TOOL_INVOCATION"``. Returns what takes the handler away again.

        Raises:
            ValueError: another event.
        """
        if event != TOOL_INVOCATION:
            raise ValueError(
                f"there is no event {event!r:.80}: there is {TOOL_INVOCATION!r}; for others use on_permission_denied, "
                "on_permission_changed, on_refused or on_tools_changed"
            )
        self.on_invocation(handler)

        def off() -> None:
            if handler in self._handlers:
                self._handlers.remove(handler)

        return off

    async def _answer(self, invocation: ToolInvocation) -> Any:
        # No docstring: it would become the description of tools that were registered without one.
        handlers = tuple(self._handlers)
        if not handlers:
            return _error(NO_HANDLER)
        answers = [await self._one(handler, invocation) for handler in handlers]
        return next((answer for answer in answers if answer is not None), "")

    async def _one(self, handler: Handler, invocation: ToolInvocation) -> Any:
        """Returns the value of one handler or its failure; None if it has no value."""
        try:
            return result_value(await called(handler, (invocation,), self._workers.run))
        except asyncio.CancelledError:
            raise
        except BaseException as problem:
            log.warning("a handler for %s failed", invocation.tool_name, exc_info=problem)
            return _error(_message(problem), type(problem).__name__)


def invocation_spec(record: Mapping[str, Any], answer: Handler) -> ToolSpec:
    """Returns the tool of a record, as `Extension.register_tool` reads it, whose calls a function answers.

    Args:
        answer: gets a `ToolInvocation`, under the name ``invocation``.

    Raises:
        ValueError, TypeError: a field breaks its rule.
    """
    return _spec_answered_by(answer, _options(record))


def _spec_answered_by(answer: Handler, options: dict[str, Any]) -> ToolSpec:
    options = {**options, "parameters": options.get("parameters", {"type": "object", "properties": {}})}
    spec = spec_of(answer, describe(answer, **options))
    keeps = CONTEXT in properties_of(spec.tool.parameters)

    def prepare(arguments: dict[str, Any], scope: ToolScope) -> dict[str, Any]:
        return {"invocation": ToolInvocation.of(arguments, scope, keeps_context=keeps)}

    return dataclasses.replace(spec, prepare=prepare)


def _options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record's fields as options of `llm_tool`; what is missing is left out.

    Raises:
        ValueError, TypeError: one breaks its rule.
    """
    options = {key: value for key, value in fields.items() if key in _FIELDS and value is not None}
    options["no_defaults"] = True  # hosts of extensions pass on what the model sent
    name = options.get("name")
    if not isinstance(name, str):
        raise TypeError(f"a tool's name is {name!r:.80}, it must be a text of [A-Za-z0-9_.-]{{1,64}}: give it one")
    if ":" in name:
        raise ValueError(
            f"tool name {name[:80]!r} holds a colon: register the bare name, the bus puts the source and a colon "
            "before it"
        )
    for flag in _FLAGS:
        if not isinstance(options.get(flag, False), bool):
            raise TypeError(f"tool {name[:80]!r}: {flag} is {options[flag]!r:.80}, it must be True or False")
    if ignored := fields.keys() - _FIELDS:
        log.info("tool %r: ignored %s", name[:80], ", ".join(sorted(map(repr, ignored)))[:200])
    return options


def result_value(returned: Any) -> Any:
    """Returns what a handler's value is as a result.

    Raises:
        TypeError: JSON cannot hold it.
    """
    if isinstance(returned, Ok):
        return result_value(returned.value)
    if returned is None or isinstance(returned, str | Reply | Err | Result | pb.ContentBlock):
        return returned
    if isinstance(returned, list | tuple) and returned and all(isinstance(each, pb.ContentBlock) for each in returned):
        return returned
    return dump_output(returned)


def _message(problem: BaseException) -> str:
    try:
        return str(problem) or FAILED
    except Exception:  # an exception whose own text raises
        return FAILED


def _error(message: str, reason: str = "") -> Result:
    return Result(is_error=True, error=CallError(Code.TOOL, message, Stage.ACCEPTED, reason=reason))
