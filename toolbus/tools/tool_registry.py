"""`ToolRegistry`: tools of a Python program, listed and called in the program's own process.

It is the bus's registry and dispatcher behind the names that two systems gave such a thing: Stargazer's ``tools``
package (decorator, permissions by user, ``call`` that always returns a text) and N.E.K.O.'s in-process registration
(``register_tool`` and its kin, REST-63). With a bus, its tools are offered on the wire and tools of the wire can be
called here.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, Unpack

from toolbus.bus.calls.call_records import CallRecord
from toolbus.bus.catalog.compiled_tool import compile_tools
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.catalog.listing import ToolListing
from toolbus.bus.catalog.policy import EVERYONE, AccessRules
from toolbus.bus.local import LocalHandler, OnProgress
from toolbus.bus.tasks import TaskManager, TaskTools
from toolbus.dialects.export import Export
from toolbus.dialects.openai_chat import OpenAIChat
from toolbus.dialects.result_text import text_of
from toolbus.errors import Code, SetupError, Stage
from toolbus.functions.call_context import CallContext
from toolbus.functions.call_options import CallOptions
from toolbus.functions.tool_options import ToolTraits
from toolbus.functions.tool_spec import ToolSpec, spec_of
from toolbus.sdk.neko import ToolDefinition as DictTool
from toolbus.tool import TASK_SECONDS, CallError, Result, dump_arguments, is_source
from toolbus.tools.backend import SOURCE, Backend, OnBus, Standalone, offered
from toolbus.tools.definition import Running, ToolDefinition, running
from toolbus.tools.registry_source import RegistrySource

F = TypeVar("F", bound=Callable[..., Any])

MAX_NESTED = 8  # calls of tools by tools above one another
SHORTEST_PATIENCE = 0.001  # seconds; 0 would mean patience without end
Definition = ToolDefinition | DictTool


class LiveSession(Protocol):
    """A conversation that stays open and has been told of the tools (a realtime session)."""

    async def sync(self) -> object:
        """Tells it of the tools as they are now; raises where it refuses them."""


@dataclass(frozen=True, slots=True)
class _ExportCache:
    """The tools in OpenAI's format: as of a revision, and where each stands by its name on the bus."""

    revision: int
    export: Export
    places: Mapping[str, int]


class ToolRegistry:
    """Tools of this process. Safe from any thread and any event loop; empty, it is false.

    Args:
        task_manager: keeps calls that take longer than its ``timeout``, whose caller then gets the task's id; None: all
            calls run to their end.
        bus: a running `toolbus.Bus` to be part of. Its tools are listed and called here too, and these are offered by
            it; calls that become tasks are then kept by the bus's own task manager, for whose timeout see `Config`.
        source: whose tools these are, for listings and for permissions by source.
        require_user: whether calls without a user are refused where a tool is for certain users. By default they pass,
            as in Stargazer; callers over the wire are always held to it.

    Raises:
        SetupError: from the constructor, for a task manager beside that of a bus.
        ValueError: from the constructor; the source breaks the rule for sources.
    """

    def __init__(
        self,
        task_manager: TaskManager | None = None,
        *,
        bus: Any = None,
        source: str = SOURCE,
        require_user: bool = False,
    ) -> None:
        if bus is not None and task_manager is not None:
            raise SetupError("a bus keeps tasks by itself: leave task_manager out, and see its Config for the patience")
        self.task_manager = task_manager if bus is None else bus.tasks
        self._home: Backend
        if bus is None:
            self._home = Standalone(task_manager, _checked(source), may_omit_user=not require_user)
        else:
            self._home = OnBus(bus, _checked(source), may_omit_user=not require_user)
        self._source = source
        self._dialect = OpenAIChat()
        self._lock = threading.RLock()  # what is registered here and in the home changes together
        self._exported: _ExportCache | None = None  # None: to be made anew
        self._own: dict[str, tuple[Definition, LocalHandler]] = {}  # what was registered here, by name
        self._ruled: frozenset[str] = frozenset()  # tools that `set_permissions` named
        self._sessions: dict[LiveSession, asyncio.AbstractEventLoop] = {}  # with the loop that each belongs to
        if task_manager is not None:
            for method in TaskTools(task_manager).tools():
                self._offer(spec_of(method), BUS_SOURCE, qualified=True)

    def __repr__(self) -> str:
        return f"<ToolRegistry tools={len(self)}>"

    # -- registering ---------------------------------------------------------------------------------------------

    def tool(
        self, name: str, description: str, parameters: dict[str, Any], **options: Unpack[ToolTraits]
    ) -> Callable[[F], F]:
        """Makes a function a tool; a decorator, which returns the function itself. The same name is replaced.

        Args:
            name: what models call it, `[A-Za-z0-9_.-]{1,64}`.
            description: tells a model when to use it.
            parameters: JSON Schema of the arguments. A parameter of the function called ``ctx`` is not the model's.
            options: described in `ToolTraits`, none of them required.

        Raises:
            TypeError, ValueError, InvalidTool: naming what breaks a rule.
        """
        flags = (options.get("no_background", False), options.get("allow_repeat", False))

        def register(function: F) -> F:
            self._register(ToolDefinition(name, description, parameters, function, *flags), options)
            return function

        return register

    def register_tool(self, definition: Definition) -> None:
        """Registers a tool; live sessions hear of it by and by (REST-63).

        Args:
            definition: ours, whose handler takes keywords, or that of `toolbus.sdk`, whose handler takes one dict.

        Raises:
            TypeError, ValueError, InvalidTool: naming what breaks a rule.
        """
        self._register(definition, {})

    async def register_tool_and_sync(self, definition: Definition) -> None:
        """Registers a tool and waits until every live session has been told (REST-63).

        Raises:
            Exception: what a session raised that refused the new list, the first where several did; all have been told
                then, and the tool stays registered.
        """
        self._register(definition, {})
        await self._sync()

    def unregister_tool(self, name: str) -> bool:
        """Withdraws a tool that was registered here. Returns whether there was one, not replaced by another's."""
        with self._lock:
            own = self._own.pop(name, None)
            gone = own is not None and bool(self._home.registry.withdraw(own[1]).names)
        if gone:
            self._home.changed()
        return gone

    async def unregister_tool_and_sync(self, name: str) -> bool:
        """Withdraws a tool and waits until every live session has been told.

        Raises:
            Exception: as for `register_tool_and_sync`.
        """
        removed = self.unregister_tool(name)
        await self._sync()
        return removed

    def clear_tools(self, source: str | None = None) -> int:
        """Withdraws what was registered here, of one source or (None) all of it. Returns how many tools."""
        with self._lock:
            names = [name for name, (each, _) in self._own.items() if source is None or self._source_of(each) == source]
            return sum(self.unregister_tool(name) for name in names)

    def offer_task_tools(self) -> None:
        """Offers ``check_task``, ``await_task``, ``list_tasks`` and ``cancel_task`` to models like any other tool.

        Without it they are not listed. A registry of its own can call them even so, as ``toolbus:check_task`` and so on
        and by their bare names; on a bus those are for operators.

        Raises:
            ValueError: there is no task manager.
        """
        if self.task_manager is None:
            raise ValueError("this registry keeps no tasks: make it with ToolRegistry(task_manager=TaskManager())")
        for method in TaskTools(self.task_manager).tools():
            self._offer(spec_of(method), f"{BUS_SOURCE}.tasks")
        self._home.changed()

    def _register(self, definition: Definition, options: ToolTraits) -> None:
        if isinstance(definition, ToolDefinition):
            definition = definition.for_models()
            spec = definition.spec(**options)
        elif isinstance(definition, DictTool):
            spec = definition.spec()
        else:
            raise TypeError(
                f"{definition!r:.80} is no tool: give a ToolDefinition of toolbus.tools, or one of toolbus.sdk"
            )
        with self._lock:
            self._own[definition.name] = (definition, self._offer(spec, self._source_of(definition)))
        self._home.changed()

    def _source_of(self, definition: Definition) -> str:
        return _checked(definition.source) if isinstance(definition, DictTool) else self._source

    def _offer(self, spec: ToolSpec, source: str, *, qualified: bool = False) -> LocalHandler:
        home = self._home
        handler = LocalHandler(source, spec, home.dispatcher, home.slots, run_sync=home.run_sync)
        home.registry.register(handler, compile_tools([spec.tool], home.limits), qualified=qualified)
        return handler

    async def _sync(self) -> None:
        told = [_told(session, loop) for session, loop in list(self._sessions.items())]
        for answer in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    def add_session(self, session: LiveSession) -> None:
        """Has ``register_tool_and_sync`` wait for a session, until `remove_session`.

        Raises:
            RuntimeError: no event loop runs here; a session is only used on the one that it belongs to.
        """
        self._sessions[session] = asyncio.get_running_loop()

    def remove_session(self, session: LiveSession) -> None:
        """Forgets a session that has ended; one that is not known is no error."""
        self._sessions.pop(session, None)

    # -- permissions ---------------------------------------------------------------------------------------------

    def set_permissions(self, permissions: Mapping[str, Iterable[str]]) -> None:
        """Says which users may call which tools; replaces what was said here before. Takes effect at once.

        On a bus, rules that it has for other tools, and for roles and sources, stay as they are.

        Args:
            permissions: user ids by tool; ``*`` is everyone. A tool that is not named is open to everyone, one with an
                empty list to nobody.

        Raises:
            InvalidRequest: naming what is no such thing.
        """
        named = dict(permissions)

        def with_named(rules: AccessRules) -> AccessRules:
            tables: dict[str, dict[str, Any]] = {**rules.as_tables()}
            others = {name: users for name, users in tables["tools"].items() if name not in self._ruled}
            return AccessRules.read(tables | {"tools": others | named})

        with self._lock:
            self._home.view.revise(with_named)
            self._ruled = frozenset(named)
        self._home.changed()

    def is_allowed(self, tool_name: str, user_id: str) -> bool:
        """Whether a user may call a tool, by the rules of `set_permissions`; on a bus by all of the tool's."""
        permissions, entry = self._home.view.permissions, self._home.registry.find(tool_name)
        if entry is None:
            rules = [permissions.tools[tool_name]] if tool_name in permissions.tools else []
        else:
            rules = [users for _, _, users in permissions.rules_for(entry)]
        return all(EVERYONE in users or user_id in users for users in rules)

    # -- calling -------------------------------------------------------------------------------------------------

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None,
        user_id: str | None = "",
        ctx: Any = None,
        *,
        nested: bool = False,
    ) -> str:
        """Calls a tool and returns what a model should read: the result, or why there is none. Never raises.

        Args:
            arguments: what JSON can hold, or JSON text.
            user_id: for whom; "", or None, is the user of the call that a tool answers while it calls, and passes every
                permission where there is none, unless the registry requires a user.
            ctx: handed to a handler that has a parameter of that name.
            nested: whether a tool calls, which needs the result itself: the call never becomes a task.
        """
        try:
            return text_of(await self.call_result(name, arguments, user_id, ctx, nested=nested))
        except (TypeError, ValueError, RecursionError) as problem:
            return f"tool {name!r:.80} was not called, because its call cannot be written as JSON: {problem}"

    async def call_result(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None = None,
        user_id: str | None = "",
        ctx: Any = None,
        *,
        nested: bool = False,
        context: CallContext | None = None,
        schema_hash: str = "",
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Result:
        """As `call`, but returns the result as a record.

        Args:
            context: what the tool may know beside the user, and the user where it names one.
            schema_hash: of the declaration that the caller knows; the call is refused once the tool has changed.
            timeout: seconds; None means the tool's own, or as long as a task may take where it has none, or where the
                call may become one.

        Raises:
            TypeError, ValueError, RecursionError: JSON cannot hold the arguments; a user is no text.
        """
        if user_id is None:
            user_id = ""
        if not isinstance(user_id, str):
            raise TypeError(f"user_id is {user_id!r:.80}: give a text, the empty one where nobody is known")
        level = running.get().depth + 1
        if level > MAX_NESTED:
            sentence = f"tools called tools {MAX_NESTED} deep; the chain ends here: let a tool answer by itself"
            return Result(is_error=True, error=CallError(Code.PERMISSION_DENIED, sentence, Stage.NOT_DISPATCHED))
        context = context or CallContext()
        user_id = user_id or running.get().user_id
        if user_id and not context.user_id:
            context = replace(context, user_id=user_id)
        known_context = context if context != CallContext() else None
        options = CallOptions.of(timeout, None, known_context, schema_hash, None)
        message = options.to_wire(self._bus_name(str(name)), dump_arguments(arguments))
        entry = self._home.registry.find(message.name)
        tool = entry.current.tool if entry is not None and entry.current is not None else None
        if self.task_manager is not None and not nested and not (tool is not None and tool.no_background):
            message.background_after_seconds = max(self.task_manager.timeout, SHORTEST_PATIENCE)
        elif timeout is None:
            message.timeout_seconds = (tool.timeout_seconds if tool is not None else 0.0) or TASK_SECONDS
        before = running.set(Running(ctx, context.user_id, level))
        try:
            return await self._home.call(message, on_progress)
        finally:
            running.reset(before)

    def _bus_name(self, name: str) -> str:
        """Returns a tool's name where a model's name for it is given, and finds the task tools by bare name."""
        registry = self._home.registry
        if registry.find(name) is not None:
            return name
        listed = self._export().export.names.to_bus.get(name, name)
        return f"toolbus:{name}" if listed == name and registry.find(f"toolbus:{name}") is not None else listed

    # -- reading -------------------------------------------------------------------------------------------------

    def get_openai_tools(self, user_id: str | None = None) -> list[dict[str, Any]]:
        """Returns the tools as OpenAI's chat completions take them; ``[]`` where there are none. Not to be changed.

        Args:
            user_id: only what this user may call; None: everything.
        """
        exported = self._export()
        tools, places = exported.export.tools, exported.places
        if user_id is None:
            return list(tools)
        return [tools[places[each.tool.name]] for each in self._listings(user_id) if each.tool.name in places]

    def get_openai_tools_by_names(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Returns some of the tools, in the order of the registry; unknown names are passed over. Not to be changed."""
        exported = self._export()
        found = {exported.places[name] for name in names if name in exported.places}
        return [exported.export.tools[place] for place in sorted(found)]

    def invalidate_cache(self) -> None:
        """Forgets the exported tools. Changes through this class do so by themselves."""
        self._exported = None

    def list_tools(self) -> list[ToolDefinition]:
        """Returns a snapshot of the tools, those of the bus included."""
        return [self._definition(listing) for listing in self._listings()]

    def tool_names(self) -> frozenset[str]:
        """Returns the names of the tools."""
        return frozenset(listing.tool.name for listing in self._listings())

    def repeat_allowed_tools(self) -> frozenset[str]:
        """Returns the names of the tools that the guard against repeated calls lets pass."""
        return frozenset(listing.tool.name for listing in self._listings() if listing.tool.allow_repeat)

    @property
    def has_tools(self) -> bool:
        """Whether there is any tool."""
        return len(self) > 0

    def __len__(self) -> int:
        return len(self._listings())

    def as_source(self, user_id: str = "", ctx: Any = None) -> RegistrySource:
        """Returns these tools for a tool loop or a realtime session, called on behalf of a user."""
        return RegistrySource(self, self._home, user_id, ctx)

    def records(self) -> list[CallRecord]:
        """Returns the newest calls, newest first."""
        return self._home.records()

    def _listings(self, user_id: str | None = None) -> Sequence[ToolListing]:
        return offered(self._home, user_id)

    def _export(self) -> _ExportCache:
        exported, revision = self._exported, self._home.registry.revision  # the revision is read before the tools are
        if exported is None or exported.revision != revision:
            export = self._dialect.export(listing.tool for listing in self._listings())
            exported = _ExportCache(revision, export, {name: place for place, name in enumerate(export.kept)})
            self._exported = exported
        return exported

    def _definition(self, listing: ToolListing) -> ToolDefinition:
        tool = listing.tool
        registered, handler = self._own.get(tool.name, (None, None))
        if isinstance(registered, ToolDefinition) and handler in listing.entry.handlers():
            return registered
        call = functools.partial(self._call_with, tool.name)
        return ToolDefinition(tool.name, tool.description, tool.parameters, call, tool.no_background, tool.allow_repeat)

    async def _call_with(self, name: str, /, **arguments: Any) -> str:
        return await self.call(name, arguments)


async def _told(session: LiveSession, loop: asyncio.AbstractEventLoop) -> object:
    """Has a session told of the tools, on its own loop; one whose loop has ended has nobody to tell."""
    if loop is asyncio.get_running_loop():
        return await session.sync()
    syncing = _sync_of(session)
    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(syncing, loop))
    except RuntimeError:
        if not loop.is_closed():
            raise
        syncing.close()
        return None


async def _sync_of(session: LiveSession) -> object:
    return await session.sync()


def _checked(source: str) -> str:
    if not is_source(source) or source == BUS_SOURCE:
        raise ValueError(
            f"source {source!r:.80} breaks the rule [A-Za-z0-9_.:-]{{1,128}}, or is the bus's own: name another"
        )
    return source
