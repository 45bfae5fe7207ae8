"""Lists and calls the tools of a Python program in the program's own process, and loads folders of them.

It is the bus's registry and dispatcher under the public names of two systems: Stargazer's ``tools`` package (decorator,
permissions by user, ``call`` that always returns a text) and N.E.K.O.'s in-process registration (``register_tool`` and
the like, REST-63). With a bus, its tools are offered on the wire, and tools of the wire can be called here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from toolbus.bus.calls.call_record import CallRecord
from toolbus.bus.catalog.entry import ToolListing
from toolbus.bus.catalog.handler import BUS_SOURCE
from toolbus.bus.local import OnProgress
from toolbus.bus.tasks import TaskManager
from toolbus.dropin.file_loader import Loaded
from toolbus.errors import Code, SetupError, Stage
from toolbus.functions.call_context import CallContext
from toolbus.functions.call_options import CallOptions
from toolbus.functions.hints import description_of
from toolbus.functions.tool_definition import RunningCall, ToolDefinition, running_call
from toolbus.functions.tool_options import ToolTraits
from toolbus.sdk.tracing import in_span
from toolbus.tool import TASK_SECONDS, CallError, Result, dump_arguments
from toolbus.tools.backend import BUS_HAS_TASKS, SOURCE, Backend, OnBus, Standalone
from toolbus.tools.live_sessions import LiveSession, LiveSessions
from toolbus.tools.loaded_folders import LoadedFolders
from toolbus.tools.openai_tools import OpenAITools
from toolbus.tools.registered_tools import Definition, RegisteredTools, check_source
from toolbus.tools.registry_source import RegistrySource
from toolbus.tools.tool_permissions import ToolPermissions

F = TypeVar("F", bound=Callable[..., Any])

PLACE = ("channel_id", "platform")  # what tools in other processes learn of a caller's ctx
MAX_PLACE = 256  # characters of each

MAX_NESTED = 8  # calls of tools by tools above one another
MIN_BACKGROUND_SECONDS = 0.001  # 0 would mean that a call never becomes a task


class ToolRegistry:
    """Tools of this process. Safe from any thread and any event loop; false while it has no tools.

    Args:
        task_manager: turns calls that take longer than its ``timeout`` into tasks, whose caller gets the task's id;
            None: all calls run to their end. The attribute may be set later.
        bus: a `toolbus.Bus` to be part of. Its tools are listed and called here too, and it offers these tools; calls
            become tasks of the bus's own task manager, see `Config.background_after_seconds`.
        source: the source of these tools, for listings and for permissions by source.
        inherit_user: whether calls that a tool makes itself, and that name no user, are made for the user of the call
            that it answers. False: they are made without a user, as in Stargazer.
        require_user: whether calls without a user are refused where a tool is for certain users. By default they pass,
            as in Stargazer; callers over the wire always need a user.

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
        inherit_user: bool = True,
    ) -> None:
        if bus is not None and task_manager is not None:
            raise SetupError(BUS_HAS_TASKS)
        self._inherit_user = inherit_user
        source = check_source(source)
        self._backend: Backend
        if bus is None:
            self._backend = Standalone(task_manager, source, may_omit_user=not require_user)
        else:
            self._backend = OnBus(bus, source, may_omit_user=not require_user)
        self._registered = RegisteredTools(self._backend, source)
        self.folders = LoadedFolders(self._registered)
        self._openai = OpenAITools(self._backend)
        self._permissions = ToolPermissions(self._backend)
        self._sessions = LiveSessions()
        if task_manager is not None:
            self._registered.register_task_tools(task_manager, BUS_SOURCE, qualified=True)

    def __repr__(self) -> str:
        return f"<ToolRegistry tools={len(self)}>"

    @property
    def task_manager(self) -> TaskManager | None:
        """Turns calls that take long into tasks; None: all calls run to their end. On a bus it is the bus's own.

        Set it, and calls from now on become its tasks; those that are tasks already stay with the manager before.

        Raises:
            SetupError: it is set, and the registry is part of a bus.
        """
        return self._backend.tasks

    @task_manager.setter
    def task_manager(self, tasks: TaskManager | None) -> None:
        self._backend.set_tasks(tasks)
        self._registered.replace_task_tools(tasks)
        if tasks is not None:
            self._registered.register_task_tools(tasks, BUS_SOURCE, qualified=True)

    # -- registering ---------------------------------------------------------------------------------------------

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self,
        name: str = "",
        description: str = "",
        parameters: dict[str, Any] | None = None,
        **options: Unpack[ToolTraits],
    ) -> Callable[[F], F]: ...
    def tool(
        self,
        name: Any = "",
        description: str = "",
        parameters: dict[str, Any] | None = None,
        **options: Unpack[ToolTraits],
    ) -> Any:
        """Makes a function a tool; a decorator, with or without arguments. Returns the function itself.

        The same name is replaced.

        Args:
            name: what models call it, `[A-Za-z0-9_.-]{1,64}`; the function's name by default.
            description: tells a model when to use it; the docstring's first paragraph by default.
            parameters: JSON Schema of the arguments; read from the type hints by default. A parameter of the function
                called ``ctx`` is not the model's.
            options: described in `ToolTraits`, none of them required.

        Raises:
            TypeError, ValueError, InvalidTool: naming what breaks a rule.
        """
        flags = (options.get("no_background", False), options.get("allow_repeat", False))

        def register(function: F) -> F:
            own = name if isinstance(name, str) and name else function.__name__
            text = description or description_of(function)
            dict_handler = False if parameters is None else None  # hints say what it takes
            definition = ToolDefinition(own, text, parameters, function, *flags, dict_handler=dict_handler)
            self._registered.register(definition, options)
            return function

        return register(name) if callable(name) else register

    def register_tool(self, definition: Definition) -> None:
        """Registers a tool; live sessions receive it later, without waiting (REST-63).

        Args:
            definition: a `ToolDefinition`; a dict as tool files write it, `{"name", "description", "parameters",
                "handler"}` or `{"name", "execute", "def"}`; or a `ToolSpec`.

        Raises:
            TypeError, ValueError, InvalidTool: naming what breaks a rule.
        """
        self._registered.register(definition, {})

    async def register_tool_and_sync(self, definition: Definition) -> None:
        """Registers a tool and waits until every live session has received it (REST-63).

        Raises:
            Exception: the first error of a session that refused the new list; the others have it then, and the tool
                stays registered.
        """
        self._registered.register(definition, {})
        await self._sessions.sync()

    def unregister_tool(self, name: str) -> bool:
        """Withdraws a tool that was registered here. Returns whether it was there, and not replaced by another's."""
        return self._registered.unregister(name)

    async def unregister_tool_and_sync(self, name: str) -> bool:
        """Withdraws a tool and waits until every live session has received that.

        Raises:
            Exception: as for `register_tool_and_sync`.
        """
        removed = self.unregister_tool(name)
        await self._sessions.sync()
        return removed

    def clear_tools(self, source: str | None = None) -> int:
        """Withdraws the tools that were registered here, of one source or (None) all. Returns how many."""
        return self._registered.clear(source)

    def offer_task_tools(self) -> None:
        """Offers ``check_task``, ``await_task``, ``list_tasks`` and ``cancel_task`` to models like any other tool.

        Without it they are not listed, but a registry without a bus can call them, as ``toolbus:check_task`` and so on
        and by their bare names; on a bus those are for operators.

        Raises:
            ValueError: the registry has no task manager.
        """
        if self.task_manager is None:
            raise ValueError("this registry has no task manager: make it with ToolRegistry(task_manager=TaskManager())")
        self._registered.register_task_tools(self.task_manager, f"{BUS_SOURCE}.tasks")
        self._backend.changed()

    def add_session(self, session: LiveSession) -> None:
        """Has ``register_tool_and_sync`` wait for a session, until `remove_session`.

        Raises:
            RuntimeError: no event loop runs here; a session is only used on the one that it belongs to.
        """
        self._sessions.add(session)

    def remove_session(self, session: LiveSession) -> None:
        """Removes a session that has ended; an unknown one is not an error."""
        self._sessions.remove(session)

    # -- permissions ---------------------------------------------------------------------------------------------

    def set_permissions(self, permissions: Mapping[str, Iterable[str]]) -> None:
        """Sets which users may call which tools; replaces the rules that were set here before. Takes effect at once.

        On a bus, its rules for other tools, and for roles and sources, stay as they are.

        Args:
            permissions: user ids by tool; ``*`` is everyone. A tool that is not named is open to everyone; an empty
                list denies everyone.

        Raises:
            InvalidRequest: naming the value that breaks a rule.
        """
        self._permissions.set(permissions)

    def is_allowed(self, tool_name: str, user_id: str) -> bool:
        """Whether a user may call a tool, by the rules of `set_permissions`; on a bus by all of the tool's."""
        return self._permissions.allow(tool_name, user_id)

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
        """Calls a tool and returns the text for a model: the result, or why the call failed. Never raises.

        Args:
            arguments: what JSON can hold, or JSON text.
            user_id: on whose behalf. "" or None: inside a tool, the user of the call that it answers, unless the
                registry was made with ``inherit_user=False``; else no user, which passes every permission unless the
                registry requires a user.
            ctx: passed to a handler that has a parameter of that name. Tools elsewhere on a bus get its ``channel_id``
                and ``platform``, if it has them, as attributes of the call's context.
            nested: whether a tool makes the call and needs the result itself: the call never becomes a task.
        """
        try:
            return (await self.call_result(name, arguments, user_id, ctx, nested=nested)).text
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
        """Calls a tool as `call` does, and returns the result as a record.

        Args:
            context: further circumstances for the tool; its user goes before ``user_id``.
            schema_hash: of the declaration that the caller knows; the call is refused once the tool has changed.
            timeout: seconds; None means the tool's own, or as long as a task may take where it has none, or where the
                call may become one.

        Raises:
            TypeError, ValueError, RecursionError: JSON cannot hold the arguments; the user is not text.
        """
        if user_id is None:
            user_id = ""
        if not isinstance(user_id, str):
            raise TypeError(f"user_id is {user_id!r:.80}: give text, empty where the user is unknown")
        level = running_call.get().depth + 1
        if level > MAX_NESTED:
            reason = f"tools called tools {MAX_NESTED} deep; the chain ends here: let a tool answer by itself"
            return Result(is_error=True, error=CallError(Code.PERMISSION_DENIED, reason, Stage.NOT_DISPATCHED))
        context = context or CallContext()
        if self._inherit_user:
            user_id = user_id or running_call.get().user_id
        if user_id and not context.user_id:
            context = replace(context, user_id=user_id)
        if ctx is not None:
            context = replace(context, attributes=_place_of(ctx) | dict(context.attributes))
        known_context = context if context != CallContext() else None
        options = CallOptions.of(timeout, None, known_context, schema_hash, None)
        message = options.to_wire(self._openai.bus_name(str(name)), dump_arguments(arguments))
        entry = self._backend.registry.find(message.name)
        tool = entry.current.tool if entry is not None and entry.current is not None else None
        if self.task_manager is not None and not nested and not (tool is not None and tool.no_background):
            message.background_after_seconds = max(self.task_manager.timeout, MIN_BACKGROUND_SECONDS)
        elif timeout is None:
            message.timeout_seconds = (tool.timeout_seconds if tool is not None else 0.0) or TASK_SECONDS
        token = running_call.set(RunningCall(ctx, context.user_id, level))
        try:
            return await in_span(message, lambda: self._backend.call(message, on_progress))
        finally:
            running_call.reset(token)

    # -- reading -------------------------------------------------------------------------------------------------

    def get_openai_tools(self, user_id: str | None = None) -> list[dict[str, Any]]:
        """Returns the tools as OpenAI's chat completions take them; ``[]`` without tools. Not to be changed.

        Args:
            user_id: only what this user may call; None: everything.
        """
        return self._openai.all() if user_id is None else self._openai.for_user(user_id)

    def get_openai_tools_by_names(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Returns some of the tools, in the order of the registry; unknown names are passed over. Not to be changed."""
        return self._openai.by_names(names)

    def invalidate_cache(self) -> None:
        """Empties the cache of exported tools. Changes through this class do so by themselves."""
        self._openai.clear()

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
        return RegistrySource(self._backend, self.call_result, user_id, ctx)

    def records(self) -> list[CallRecord]:
        """Returns the newest calls, newest first."""
        return self._backend.records()

    def _listings(self) -> Sequence[ToolListing]:
        return self._backend.listings(None)

    def _definition(self, listing: ToolListing) -> ToolDefinition:
        registered = self._registered.definition_of(listing)
        if registered is not None:
            return registered
        tool = listing.tool
        call = functools.partial(self._call_with, tool.name)
        return ToolDefinition(tool.name, tool.description, tool.parameters, call, tool.no_background, tool.allow_repeat)

    async def _call_with(self, name: str, /, **arguments: Any) -> str:
        return await self.call(name, arguments)


def _place_of(ctx: Any) -> dict[str, str]:
    """Returns the attributes of a call that a caller's ``ctx`` names: where its conversation takes place."""
    values = {name: getattr(ctx, name, None) for name in PLACE}
    return {name: str(value)[:MAX_PLACE] for name, value in values.items() if value and isinstance(value, str | int)}


def load_tools(directory: str | Path, registry: ToolRegistry, *, require_manifest: bool = False) -> Loaded:
    """Registers the tools of a folder's files; what went wrong with a file is logged as a warning.

    A folder that was loaded before is loaded again: new tools and new code take the place of the old ones one by one,
    calls in flight end on the old code, and what the folder no longer has is withdrawn. A file that fails to load
    keeps the tools that it had, and a tool that is refused stays as it was. A folder or manifest that cannot be read
    changes nothing.

    Args:
        require_manifest: a folder without a manifest loads nothing.

    Returns:
        What the files declare, and their problems; those of the manifest too.
    """
    return registry.folders.load(Path(directory), require_manifest=require_manifest)


def reload_tools(directory: str | Path, registry: ToolRegistry, *, require_manifest: bool = False) -> Loaded:
    """Loads a folder again; the same as `load_tools`, by the name that Stargazer's programs call."""
    return load_tools(directory, registry, require_manifest=require_manifest)
