"""Lists and calls the tools of a Python program in the program's own process, and loads folders of them.

It is the bus's registry and dispatcher under the public names of two systems: Stargazer's ``tools`` package (decorator,
permissions by user, ``call`` that always returns a text) and N.E.K.O.'s in-process registration (``register_tool`` and
the like, REST-63). With a bus, its tools are offered on the wire, and tools of the wire can be called here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, Unpack, overload

from toolbus.bus.calls.call_records import CallRecord
from toolbus.bus.catalog.entry import BUS_SOURCE, ToolListing, compile_tool
from toolbus.bus.catalog.policy import EVERYONE, AccessRules
from toolbus.bus.local import LocalHandler, OnProgress
from toolbus.errors import Code, InvalidTool, SetupError, Stage
from toolbus.functions.call_context import CallContext, CallOptions
from toolbus.functions.hints import description_of
from toolbus.functions.tool_spec import (
    CTX,
    RunningCall,
    ToolDefinition,
    ToolSpec,
    ToolTraits,
    running_call,
    spec_of,
    with_ctx,
)
from toolbus.parts.dropin.file_declarations import spec_of_entry
from toolbus.parts.dropin.file_loader import FileProblem, Loaded, load_folder
from toolbus.parts.models.dialects.export import Export
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.moving.registry.backend import BUS_HAS_TASKS, SOURCE, Backend, OnBus, Standalone
from toolbus.parts.tasks import TaskManager, TaskTools
from toolbus.protocol.tool import TASK_SECONDS, CallError, Progress, Result, Tool, dump_arguments, is_source
from toolbus.sdk.tracing import in_span

Definition = ToolDefinition | ToolSpec | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Registered:
    """A tool that a program has registered.

    Attributes:
        source: whose it is.
        handler: runs it.
        definition: what it was registered with; None where that was not a `ToolDefinition`.
    """

    source: str
    handler: LocalHandler
    definition: ToolDefinition | None


log = logging.getLogger("toolbus.tools")


class RegisteredTools:
    """What a program has registered. Safe from any thread."""

    def __init__(self, backend: Backend, source: str) -> None:
        self._backend = backend
        self._source = source
        self._lock = threading.RLock()  # `_tools` and the backend's registry change together
        self._tools: dict[str, _Registered] = {}  # by name
        self._task_tools: dict[tuple[str, bool], list[LocalHandler]] = {}  # by source and `qualified`
        self._loading = threading.Lock()  # one folder at a time: each swaps its tools as a whole
        self._folders: dict[Path, dict[str, str]] = {}  # by folder, the file of each tool that it offers

    def __repr__(self) -> str:
        return f"<RegisteredTools {self._source} tools={len(self._tools)}>"

    def register(self, definition: Definition, options: ToolTraits) -> None:
        """Registers a tool; the same name is replaced.

        Raises:
            TypeError, ValueError, InvalidTool: naming what breaks a rule.
        """
        shown: ToolDefinition | None = None
        source = self._source
        if isinstance(definition, ToolDefinition):
            shown = definition.for_models()
            spec = shown.spec(**options)
            if definition.takes_dict or definition.metadata.get("source"):
                source = check_source(definition.source)
        elif isinstance(definition, ToolSpec):
            spec = definition
        elif isinstance(definition, Mapping) and {"handler", "execute"} & set(definition):  # type: ignore[redundant-expr]
            spec = spec_of_file(spec_of_entry(definition))
        else:
            raise TypeError(
                f"{definition!r:.80} is not a tool: give a ToolDefinition, or a dict with name, description, "
                "parameters and handler"
            )
        with self._lock:
            self._tools[spec.tool.name] = _Registered(source, self._offer(spec, source), shown)
        self._backend.changed()

    def unregister(self, name: str) -> bool:
        """Withdraws a tool. Returns whether it was registered here and had not been replaced by another source."""
        with self._lock:
            registered = self._tools.pop(name, None)
            if registered is None:
                return False
            withdrawn = bool(self._backend.registry.withdraw(registered.handler).names)
        if withdrawn:
            self._backend.changed()
        return withdrawn

    def clear(self, source: str | None) -> int:
        """Withdraws the tools of one source, or (None) all of them. Returns how many."""
        with self._lock:
            names = [name for name, each in self._tools.items() if source is None or each.source == source]
            return sum(self.unregister(name) for name in names)

    def register_task_tools(self, tasks: TaskManager, source: str, *, qualified: bool = False) -> None:
        """Registers ``check_task``, ``await_task``, ``list_tasks`` and ``cancel_task``.

        Args:
            qualified: whether they are listed with their source in front.
        """
        with self._lock:
            self._task_tools[source, qualified] = [
                self._offer(spec_of(method), source, qualified=qualified) for method in TaskTools(tasks).tools()
            ]
        self._backend.changed()

    def replace_task_tools(self, tasks: TaskManager | None) -> None:
        """Has the task tools that are registered ask another task manager; None withdraws them."""
        with self._lock:
            before, self._task_tools = self._task_tools, {}
            for (source, qualified), handlers in before.items():
                if tasks is not None:
                    self.register_task_tools(tasks, source, qualified=qualified)
                else:
                    for handler in handlers:
                        self._backend.registry.withdraw(handler)
        self._backend.changed()

    def load_folder(self, folder: Path, *, require_manifest: bool) -> Loaded:
        """Loads a folder, for the first time or again: see `load_tools`.

        The files are those of `toolbus.dropin`: every way in which one declares tools works here too. Their code runs
        in this process, without a sandbox, so grants of the manifest change nothing; its allow list counts. One bad
        file is one warning, and the others are loaded.
        """
        folder = folder.absolute()
        with self._loading:
            loaded = load_folder(folder, require_manifest=require_manifest)
            if loaded.files is None:
                return loaded
            failed = {problem.file for problem in loaded.problems if problem.skipped} & set(loaded.files)
            files: dict[str, str] = {}
            refused: dict[str, FileProblem] = {}
            for spec in loaded.specs:
                file = str(json.loads(spec.tool.metadata_json)["file"])
                try:
                    self.register(spec_of_file(spec), {})
                except (InvalidTool, TypeError, ValueError) as error:
                    log.warning("tool %s of %s is not registered: %s", spec.tool.name, file, error)
                    refused[spec.tool.name] = FileProblem(file, str(error), skipped=False)
                else:
                    files[spec.tool.name] = file
            for name, file in self._folders.get(folder, {}).items():
                if name not in files and (file in failed or name in refused):
                    files[name] = file
                elif name not in files:
                    self.unregister(name)
            self._folders[folder] = files
        return replace(loaded, problems=(*loaded.problems, *refused.values()))

    def definition_of(self, listing: ToolListing) -> ToolDefinition | None:
        """Returns the definition that a listed tool was registered with here; None for a tool of another source."""
        registered = self._tools.get(listing.tool.name)
        if registered is None or registered.handler not in listing.entry.handlers():
            return None
        definition = registered.definition
        if definition is None or definition.takes_dict:  # the handler of a listed definition takes keywords
            return None
        if definition.parameters is None:
            return replace(definition, parameters=dict(listing.tool.parameters))
        return definition

    def _offer(self, spec: ToolSpec, source: str, *, qualified: bool = False) -> LocalHandler:
        backend = self._backend
        handler = LocalHandler(source, spec, backend.dispatcher, backend.slots, run_sync=backend.run_sync)
        backend.registry.register(handler, [compile_tool(spec.tool, backend.limits)], qualified=qualified)
        return handler


def spec_of_file(spec: ToolSpec) -> ToolSpec:
    """Returns a tool of a tool file as a registry runs it: its ``ctx`` is the context that a caller passes, if any."""
    return with_ctx(spec, has_default=False) if spec.scope == CTX else spec


def check_source(source: str) -> str:
    """Returns a source that a program may use for its tools.

    Raises:
        ValueError: it breaks the rule for sources, or is the bus's own.
    """
    if not is_source(source) or source == BUS_SOURCE:
        raise ValueError(
            f"source {source!r:.80} breaks the rule [A-Za-z0-9_.:-]{{1,128}}, or is the bus's own: name another"
        )
    return source


class LiveSession(Protocol):
    """A conversation that stays open and knows the tools (a realtime session)."""

    def sync(self) -> Coroutine[Any, Any, object]:
        """Sends the current tools to the model; raises where it refuses them."""


async def _sync_on(session: LiveSession, loop: asyncio.AbstractEventLoop) -> object:
    """Syncs a session on its own loop; a session whose loop is closed has ended and is skipped."""
    if loop is asyncio.get_running_loop():
        return await session.sync()
    syncing = session.sync()
    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(syncing, loop))
    except RuntimeError:
        if not loop.is_closed():
            raise
        syncing.close()
        return None


@dataclass(frozen=True, slots=True)
class _CachedExport:
    """The export of one revision, and the index of each tool in it by its name on the bus."""

    revision: int
    export: Export
    indexes: Mapping[str, int]


class OpenAITools:
    """The export of the current revision, cached."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._dialect = OpenAIChat()
        self._cached: _CachedExport | None = None  # None: to be exported

    def __repr__(self) -> str:
        return f"<OpenAITools revision={self._cached.revision if self._cached is not None else None}>"

    def listed(self, user_id: str | None) -> list[dict[str, Any]]:
        """Returns the tools that a user may call, or (None) all, in the order of the registry."""
        cached = self._current()
        if user_id is None:
            return list(cached.export.tools)
        names = (listing.tool.name for listing in self._backend.listings(user_id))
        return [cached.export.tools[cached.indexes[name]] for name in names if name in cached.indexes]

    def by_names(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Returns the tools of some names, in the order of the registry; unknown names are skipped."""
        cached = self._current()
        indexes = {cached.indexes[name] for name in names if name in cached.indexes}
        return [cached.export.tools[index] for index in sorted(indexes)]

    def bus_name(self, name: str) -> str:
        """Returns a tool's name on the bus for the name that a model knows; task tools also have their bare name."""
        registry = self._backend.registry
        if registry.find(name) is not None:
            return name
        listed = self._current().export.names.to_bus.get(name, name)
        own = f"{BUS_SOURCE}:{name}"
        return own if listed == name and registry.find(own) is not None else listed

    def clear(self) -> None:
        """Empties the cache; a new revision does so by itself."""
        self._cached = None

    def _current(self) -> _CachedExport:
        cached, revision = self._cached, self._backend.registry.revision  # the revision is read before the tools are
        if cached is None or cached.revision != revision:
            export = self._dialect.export(listing.tool for listing in self._backend.listings(None))
            cached = _CachedExport(revision, export, {name: index for index, name in enumerate(export.kept)})
            self._cached = cached
        return cached


class ToolPermissions:
    """The rules that a program has set for tools. Safe from any thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._tools: frozenset[str] = frozenset()  # with a rule that was set here

    def __repr__(self) -> str:
        return f"<ToolPermissions tools={len(self._tools)}>"

    def set(self, permissions: Mapping[str, Iterable[str]]) -> None:
        """Replaces the rules that were set here before; see `ToolRegistry.set_permissions`.

        Raises:
            InvalidRequest: naming the value that breaks a rule.
        """
        rules = dict(permissions)

        def revised(before: AccessRules) -> AccessRules:
            tables: dict[str, dict[str, Any]] = {**before.as_tables()}
            others = {name: users for name, users in tables["tools"].items() if name not in self._tools}
            return AccessRules.read(tables | {"tools": others | rules})

        with self._lock:
            self._backend.view.revise(revised)
            self._tools = frozenset(rules)
        self._backend.changed()

    def allow(self, tool_name: str, user_id: str) -> bool:
        """Tells whether a user may call a tool; on a bus by all rules that hold for it."""
        permissions, entry = self._backend.view.permissions, self._backend.registry.find(tool_name)
        if entry is None:
            rules = [permissions.tools[tool_name]] if tool_name in permissions.tools else []
        else:
            rules = [users for _, _, users in permissions.rules_for(entry)]
        return all(EVERYONE in users or user_id in users for users in rules)


POLL_SECONDS = 0.05  # between looks at the revision: changes come from any thread, and need no lock this way


class RegistrySource:
    """A `toolbus.loop.ToolSource` of one user.

    Args:
        call: `ToolRegistry.call_result`.
        ctx: passed to handlers that have a parameter of that name.
    """

    def __init__(self, backend: Backend, call: Callable[..., Awaitable[Result]], user_id: str, ctx: Any) -> None:
        self._backend = backend
        self._call = call
        self._user_id = user_id
        self._ctx = ctx

    def __repr__(self) -> str:
        return f"<RegistrySource tools={len(self._backend.listings(self._user_id))} user={self._user_id!r}>"

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        """Returns the revision and the tools that the user may call."""
        revision = self._backend.registry.revision
        return revision, [listing.tool for listing in self._backend.listings(self._user_id)]

    async def call(
        self,
        name: str,
        arguments_json: str,
        *,
        context: CallContext | None,
        schema_hash: str,
        timeout: float | None = None,
        on_progress: Callable[[Progress], object] | None = None,
    ) -> Result:
        """Calls a tool; a context without a user gets this source's."""
        return await self._call(
            name,
            arguments_json,
            self._user_id,
            self._ctx,
            context=context,
            schema_hash=schema_hash,
            timeout=timeout,
            on_progress=on_progress,
        )

    async def changes(self) -> AsyncIterator[int]:
        """Yields the revision, then each newer one."""
        known = -1
        while True:
            revision = self._backend.registry.revision
            if revision != known:
                known = revision
                yield revision
            await asyncio.sleep(POLL_SECONDS)


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
        SetupError: from the constructor, for a task manager in addition to that of a bus.
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
        self.registered = RegisteredTools(self._backend, source)
        self._openai = OpenAITools(self._backend)
        self._permissions = ToolPermissions(self._backend)
        self._sessions: dict[LiveSession, asyncio.AbstractEventLoop] = {}  # that get changes, with their loops
        if task_manager is not None:
            self.registered.register_task_tools(task_manager, BUS_SOURCE, qualified=True)

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
        self.registered.replace_task_tools(tasks)
        if tasks is not None:
            self.registered.register_task_tools(tasks, BUS_SOURCE, qualified=True)

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
            self.registered.register(definition, options)
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
        self.registered.register(definition, {})

    async def register_tool_and_sync(self, definition: Definition) -> None:
        """Registers a tool and waits until every live session has received it (REST-63).

        Raises:
            Exception: the first error of a session that refused the new list; the others have it then, and the tool
                stays registered.
        """
        self.registered.register(definition, {})
        await self._sync_sessions()

    def unregister_tool(self, name: str) -> bool:
        """Withdraws a tool that was registered here. Returns whether it was there, and not replaced by another's."""
        return self.registered.unregister(name)

    async def unregister_tool_and_sync(self, name: str) -> bool:
        """Withdraws a tool and waits until every live session has received that.

        Raises:
            Exception: as for `register_tool_and_sync`.
        """
        removed = self.unregister_tool(name)
        await self._sync_sessions()
        return removed

    async def _sync_sessions(self) -> None:
        syncs = [_sync_on(session, loop) for session, loop in list(self._sessions.items())]
        for result in await asyncio.gather(*syncs, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def clear_tools(self, source: str | None = None) -> int:
        """Withdraws the tools that were registered here, of one source or (None) all. Returns how many."""
        return self.registered.clear(source)

    def offer_task_tools(self) -> None:
        """Offers ``check_task``, ``await_task``, ``list_tasks`` and ``cancel_task`` to models like any other tool.

        Without it they are not listed, but a registry without a bus can call them, as ``toolbus:check_task`` and so on
        and by their bare names; on a bus those are for operators.

        Raises:
            ValueError: the registry has no task manager.
        """
        if self.task_manager is None:
            raise ValueError("this registry has no task manager: make it with ToolRegistry(task_manager=TaskManager())")
        self.registered.register_task_tools(self.task_manager, f"{BUS_SOURCE}.tasks")
        self._backend.changed()

    def add_session(self, session: LiveSession) -> None:
        """Has ``register_tool_and_sync`` wait for a session, until `remove_session`.

        Raises:
            RuntimeError: no event loop runs here; a session is only used on the one that it belongs to.
        """
        self._sessions[session] = asyncio.get_running_loop()

    def remove_session(self, session: LiveSession) -> None:
        """Removes a session that has ended; an unknown one is not an error."""
        self._sessions.pop(session, None)

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
        return self._openai.listed(user_id)

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
        registered = self.registered.definition_of(listing)
        if registered is not None:
            return registered
        tool = listing.tool

        async def call(**arguments: Any) -> str:
            return await self.call(tool.name, arguments)

        return ToolDefinition(tool.name, tool.description, tool.parameters, call, tool.no_background, tool.allow_repeat)


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
    return registry.registered.load_folder(Path(directory), require_manifest=require_manifest)


def reload_tools(directory: str | Path, registry: ToolRegistry, *, require_manifest: bool = False) -> Loaded:
    """Loads a folder again; the same as `load_tools`, by the name that Stargazer's programs call."""
    return load_tools(directory, registry, require_manifest=require_manifest)
