"""`ToolRegistry`: tools of a Python program, listed and called in the program's own process.

It is the bus's registry and dispatcher behind the names that two systems gave such a thing: Stargazer's ``tools``
package (decorator, permissions by user, ``call`` that always returns a text) and N.E.K.O.'s in-process registration
(``register_tool`` and its kin, REST-63). With a bus, its tools are offered on the wire and tools of the wire can be
called here.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from toolbus.dialects.openai_chat import OpenAIChat
from toolbus.dialects.shape import Export
from toolbus.dialects.text import text_of
from toolbus.entry import Listing
from toolbus.errors import Code, Stage
from toolbus.local import LocalHandler, OnProgress
from toolbus.offer import prepare
from toolbus.policy import EVERYONE, Permissions
from toolbus.records import CallRecord
from toolbus.sdk.neko import ToolDefinition as DictTool
from toolbus.sdk.scope import CallContext
from toolbus.sdk.tool_spec import ToolSpec, spec_of
from toolbus.tasks import TaskManager, TaskTools
from toolbus.tool import TASK_SECONDS, CallError, Limits, Result, dump_arguments
from toolbus.tools.definition import ToolDefinition, current_ctx, depth
from toolbus.tools.home import SOURCE, Alone, Home, OnBus
from toolbus.tools.source import RegistrySource
from toolbus.v1 import tool_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])

MAX_NESTED = 8  # calls of tools by tools above one another
Definition = ToolDefinition | DictTool


class LiveSession(Protocol):
    """A conversation that stays open and has been told of the tools (a realtime session)."""

    async def sync(self) -> object:
        """Tells it of the tools as they are now; raises where it refuses them."""


class ToolRegistry:
    """Tools of this process. Safe from any thread and any event loop; empty, it is false.

    Args:
        task_manager: keeps calls that take longer than its ``timeout``, whose caller then gets the task's id; None: all
            calls run to their end.
        bus: a running `toolbus.Bus` to be part of. Its tools are listed and called here too, and these are offered by
            it; calls that become tasks are then kept by the bus's own task manager, for whose timeout see `Config`.
        require_user: whether calls without a user are refused where a tool is for certain users. By default they pass,
            as in Stargazer; callers over the wire are always held to it.
    """

    def __init__(self, task_manager: TaskManager | None = None, *, bus: Any = None, require_user: bool = False) -> None:
        self.task_manager = task_manager if bus is None else bus.tasks
        self._home: Home
        if bus is None:
            self._home = Alone(task_manager, unnamed_may=not require_user)
        else:
            self._home = OnBus(bus, unnamed_may=not require_user)
        self._limits = Limits()
        self._dialect = OpenAIChat()
        self._exported: tuple[int, Export] | None = None  # with the revision that it shows
        self._specs: dict[str, Definition] = {}  # what was registered here, by name
        self._handlers: dict[str, LocalHandler] = {}
        self._sessions: dict[LiveSession, None] = {}
        if task_manager is not None and bus is None:
            for method in TaskTools(task_manager).tools():
                self._offer(spec_of(method), "toolbus", qualified=True)

    def __repr__(self) -> str:
        return f"<ToolRegistry tools={len(self)}>"

    # -- registering ---------------------------------------------------------------------------------------------

    def tool(self, name: str, description: str, parameters: dict[str, Any], **options: Any) -> Callable[[F], F]:
        """Makes a function a tool; a decorator, which returns the function itself. The same name is replaced.

        Args:
            name: what models call it, `[A-Za-z0-9_.-]{1,64}`.
            description: tells a model when to use it.
            parameters: JSON Schema of the arguments. A parameter of the function called ``ctx`` is not the model's.
            options: ``no_background``, ``allow_repeat`` and the other options of `toolbus.llm_tool`.

        Raises:
            TypeError, ValueError, InvalidTool: naming what breaks a rule.
        """
        flags = {name: options.pop(name, False) for name in ("no_background", "allow_repeat")}

        def register(function: F) -> F:
            self._register(ToolDefinition(name, description, parameters, function, **flags), options)
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
            Exception: whatever the first session raised that refused the new list; the tool stays registered.
        """
        self._register(definition, {})
        await self._sync()

    def unregister_tool(self, name: str) -> bool:
        """Withdraws a tool that was registered here. Returns whether there was one."""
        definition = self._specs.pop(name, None)
        if definition is None:
            return False
        self._home.registry.withdraw(self._handlers.pop(name))
        self._home.changed()
        return True

    async def unregister_tool_and_sync(self, name: str) -> bool:
        """Withdraws a tool and waits until every live session has been told.

        Raises:
            Exception: whatever the first session raised that refused the new list.
        """
        removed = self.unregister_tool(name)
        await self._sync()
        return removed

    def clear_tools(self, source: str | None = None) -> int:
        """Withdraws what was registered here, of one source or (None) all of it. Returns how many tools."""
        names = [name for name, each in list(self._specs.items()) if source is None or _source(each) == source]
        return sum(self.unregister_tool(name) for name in names)

    def offer_task_tools(self) -> None:
        """Offers ``check_task``, ``await_task``, ``list_tasks`` and ``cancel_task`` to models like any other tool.

        Without it they can be called, as ``toolbus:check_task`` and so on and by their bare names, but are not listed.

        Raises:
            ValueError: there is no task manager.
        """
        if self.task_manager is None:
            raise ValueError("this registry keeps no tasks: make it with ToolRegistry(task_manager=TaskManager())")
        for method in TaskTools(self.task_manager).tools():
            self._offer(spec_of(method), "toolbus.tasks")

    def _register(self, definition: Definition, options: Mapping[str, Any]) -> None:
        spec = definition.spec() if isinstance(definition, DictTool) else definition.spec(**options)
        handler = self._offer(spec, _source(definition))
        self._specs[definition.name] = definition
        self._handlers[definition.name] = handler

    def _offer(self, spec: ToolSpec, source: str, *, qualified: bool = False) -> LocalHandler:
        handler = LocalHandler(source, spec, self._home.dispatcher, run_sync=self._home.run_sync)
        self._home.registry.register(handler, prepare([spec.tool], self._limits), qualified=qualified)
        self._home.changed()
        return handler

    async def _sync(self) -> None:
        await asyncio.gather(*(session.sync() for session in list(self._sessions)))

    def add_session(self, session: LiveSession) -> None:
        """Has ``register_tool_and_sync`` wait for a session, until `remove_session`."""
        self._sessions[session] = None

    def remove_session(self, session: LiveSession) -> None:
        """Forgets a session that has ended; one that is not known is no error."""
        self._sessions.pop(session, None)

    # -- permissions ---------------------------------------------------------------------------------------------

    def set_permissions(self, permissions: Mapping[str, Iterable[str]]) -> None:
        """Says which users may call which tools; replaces what was said before. Takes effect at once.

        Args:
            permissions: user ids by tool; ``*`` is everyone. A tool that is not named is open to everyone, one with an
                empty list to nobody.

        Raises:
            InvalidRequest: naming what is no such thing.
        """
        before = self._home.view.permissions.as_tables()
        self._home.view.permit(Permissions.read(before | {"tools": dict(permissions)}))
        self._home.changed()

    def is_allowed(self, tool_name: str, user_id: str) -> bool:
        """Whether a user may call a tool, by the four rules of `set_permissions`."""
        users = self._home.view.permissions.tools.get(tool_name)
        return users is None or EVERYONE in users or user_id in users

    # -- calling -------------------------------------------------------------------------------------------------

    async def call(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None,
        user_id: str = "",
        ctx: Any = None,
        *,
        nested: bool = False,
    ) -> str:
        """Calls a tool and returns what a model should read: the result, or why there is none. Never raises.

        Args:
            arguments: what JSON can hold, or JSON text.
            user_id: for whom; "" passes every permission, unless the registry requires a user.
            ctx: handed to a handler that has a parameter of that name.
            nested: whether a tool calls, which needs the result itself: the call never becomes a task.
        """
        try:
            return text_of(await self.call_result(name, arguments, user_id, ctx, nested=nested))
        except (TypeError, ValueError) as problem:
            return f"the arguments of {name!r:.80} cannot be written as JSON: {problem}"

    async def call_result(
        self,
        name: str,
        arguments: Mapping[str, Any] | str | None = None,
        user_id: str = "",
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
            timeout: seconds; None means the tool's own, or as long as a task may take where it has none.

        Raises:
            TypeError, ValueError: JSON cannot hold the arguments.
        """
        level = depth.get() + 1
        if level > MAX_NESTED:
            sentence = f"tools called tools {MAX_NESTED} deep; the chain ends here: let a tool answer by itself"
            return Result(is_error=True, error=CallError(Code.PERMISSION_DENIED, sentence, Stage.NOT_DISPATCHED))
        context = context or CallContext()
        if user_id and not context.user_id:
            context = replace(context, user_id=user_id)
        message = pb.ToolCall(
            name=self._bus_name(str(name)),
            arguments_json=dump_arguments(arguments),
            timeout_seconds=timeout or 0.0,
            schema_hash=schema_hash,
            context=context.to_wire() if context != CallContext() else None,
        )
        if self.task_manager is not None and not nested:
            message.background_after_seconds = self.task_manager.timeout
        elif timeout is None:
            message.timeout_seconds = self._own_timeout(message.name)
        ctx_before, depth_before = current_ctx.set(ctx), depth.set(level)
        try:
            return await self._home.call(message, on_progress)
        finally:
            depth.reset(depth_before)
            current_ctx.reset(ctx_before)

    def _bus_name(self, name: str) -> str:
        """Returns a tool's name where a model's name for it is given, and finds the task tools by bare name."""
        registry = self._home.registry
        if registry.find(name) is not None:
            return name
        listed = self._export().names.to_bus.get(name, name)
        return f"toolbus:{name}" if listed == name and registry.find(f"toolbus:{name}") is not None else listed

    def _own_timeout(self, name: str) -> float:
        entry = self._home.registry.find(name)
        declared = entry.tool.timeout_seconds if entry is not None else 0.0
        return declared or TASK_SECONDS

    # -- reading -------------------------------------------------------------------------------------------------

    def get_openai_tools(self, user_id: str | None = None) -> list[dict[str, Any]]:
        """Returns the tools as OpenAI's chat completions take them; ``[]`` where there are none.

        Args:
            user_id: only what this user may call; None: everything.
        """
        if user_id is None:
            return list(self._export().tools)
        return list(self._dialect.export(each.tool for each in self._listings(user_id)).tools)

    def get_openai_tools_by_names(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Returns some of the tools, in the order of the registry; unknown names are passed over."""
        export, wanted = self._export(), frozenset(names)
        return [tool for name, tool in zip(export.kept, export.tools, strict=True) if name in wanted]

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

    def _listings(self, user_id: str = "") -> tuple[Listing, ...]:
        return self._home.view.listings(user_id=user_id, caller=self._home.onlooker)

    def _export(self) -> Export:
        revision = self._home.registry.revision
        if self._exported is None or self._exported[0] != revision:
            self._exported = (revision, self._dialect.export(listing.tool for listing in self._listings()))
        return self._exported[1]

    def _definition(self, listing: Listing) -> ToolDefinition:
        tool = listing.tool
        registered = self._specs.get(tool.name)
        if isinstance(registered, ToolDefinition) and listing.source == SOURCE:
            return registered
        handler = functools.partial(self._call_with, tool.name)
        return ToolDefinition(
            tool.name,
            tool.description,
            json.loads(tool.parameters_json),
            handler,
            tool.no_background,
            tool.allow_repeat,
        )

    async def _call_with(self, name: str, **arguments: Any) -> str:
        return await self.call(name, arguments)


def _source(definition: Definition) -> str:
    return definition.source if isinstance(definition, DictTool) else SOURCE
