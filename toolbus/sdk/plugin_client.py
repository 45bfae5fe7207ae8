"""Offers tools on a bus: `Plugin`.

It joins a set of tools, the connection and the runner of handlers. `run` is for a process that is only a plugin,
`start` and `close` are for a program that also does other things.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, Unpack, overload

from toolbus.errors import PeerLost, RequestError, SetupError
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import ToolDefinition, ToolOptions, ToolSet, ToolSpec, describe, meta_of, spec_of
from toolbus.functions.workers import Inbox, Workers
from toolbus.protocol.tool import plugin_source
from toolbus.sdk.attempt import Delegate, RefusedTool, Standing, WaitingTool
from toolbus.sdk.connection import Connection, open_connection
from toolbus.sdk.connection_settings import TIMINGS, ConnectionSettings, ConnectionTimings, find_credential
from toolbus.sdk.generation import Generation, Mode, ask, request_of
from toolbus.sdk.incoming_calls import Runner
from toolbus.sdk.listing import CatalogChange
from toolbus.sdk.notification import notify, say
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

if TYPE_CHECKING:
    from toolbus.sdk.credential import Credential

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
RunSync = Callable[[Callable[[], Any]], Awaitable[Any]]


class _Hook:
    """A function, and a lock that keeps its events in order."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.turn = asyncio.Lock()
        # The one change that waits for its turn, by the delegate of the bus that it is of.
        self.waiting: dict[object, list[CatalogChange]] = {}


class Hooks:
    """The hooks of one plugin, by the kind of event; an exception of one is logged, and the others still run.

    Async ones run on the plugin's loop, plain ones on its workers, never on the connection's thread.

    Args:
        run_sync: runs a function of no arguments off the loop.
    """

    def __init__(self, run_sync: RunSync) -> None:
        self._run_sync = run_sync
        self._hooks: defaultdict[str, list[_Hook]] = defaultdict(list)
        self._loop: asyncio.AbstractEventLoop | None = None  # where they run; None before the start
        self._inbox: Inbox | None = None  # of that loop
        self._tasks: set[asyncio.Task[None]] = set()  # a loop keeps no task alive by itself

    def __repr__(self) -> str:
        return f"<Hooks {', '.join(f'{kind}={len(functions)}' for kind, functions in self._hooks.items())}>"

    def add(self, kind: str, function: F) -> F:
        """Registers a function for one kind of event; returns it.

        Raises:
            TypeError: it is not a function.
        """
        if not callable(function):
            raise TypeError(f"on_{kind} is put on a function, not on {function!r:.80}: write it above a def")
        self._hooks[kind].append(_Hook(function))
        return function

    def wants(self, kind: str) -> bool:
        """Tells whether there is a hook for a kind of event."""
        return bool(self._hooks.get(kind))

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the loop on which they run."""
        self._loop, self._inbox = loop, Inbox(loop)

    def fire(self, kind: str, *facts: Any) -> None:
        """Calls the hooks for an event; from any thread, and without waiting.

        Each hook gets one event after the other, in order; a slow one delays only itself.
        """
        if self._inbox is not None and self.wants(kind):
            self._inbox.put(self._begin, (kind, facts))

    def fire_change(self, kind: str, change: CatalogChange, bus: object = None) -> None:
        """Calls the hooks for a change of the catalog, as `fire`; those that a slow hook did not get yet become one.

        Args:
            bus: whose catalog it is: changes of two buses never become one.
        """
        if self._inbox is not None and self.wants(kind):
            self._inbox.put(self._begin_change, (kind, change, bus))

    async def settle(self, seconds: float) -> None:
        """Waits for the hooks that run, except for the one that calls this."""
        if running := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(running, timeout=seconds)

    def _begin(self, event: tuple[str, tuple[Any, ...]]) -> None:
        kind, facts = event
        for hook in self._hooks[kind]:
            self._start(kind, hook, facts)

    def _begin_change(self, event: tuple[str, CatalogChange, object]) -> None:
        kind, change, bus = event
        for hook in self._hooks[kind]:
            if (waiting := hook.waiting.get(bus)) is None:
                hook.waiting[bus] = [change]
                self._start(kind, hook, hook.waiting[bus], bus)
            else:
                waiting[0] = waiting[0].followed_by(change)

    def _start(self, kind: str, hook: _Hook, facts: Sequence[Any], bus: object = None) -> None:
        assert self._loop is not None  # the inbox is that loop's
        task = self._loop.create_task(self._run(kind, hook, facts, bus))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, kind: str, hook: _Hook, facts: Sequence[Any], bus: object) -> None:
        async with hook.turn:
            hook.waiting.pop(bus, None)
            try:
                await called(hook.function, facts, self._run_sync)
            except asyncio.CancelledError:
                raise
            except BaseException:  # SystemExit too: it would end the loop of all handlers
                log.exception("on_%s: %r failed", kind, hook.function)


async def called(function: Callable[..., Any], facts: Sequence[Any], run_sync: RunSync) -> Any:
    """Calls an author's function, a plain one off the loop; returns its value or raises its exception."""
    if inspect.iscoroutinefunction(function):
        return await function(*facts)
    returned, problem = await run_sync(lambda: _caught(function, facts))
    if problem is not None:
        raise problem
    return await returned if inspect.isawaitable(returned) else returned


def _caught(function: Callable[..., Any], facts: Sequence[Any]) -> tuple[Any, BaseException | None]:
    """Returns a function's value and its exception: a future does not pass on every kind of exception."""
    try:
        return function(*facts), None
    except BaseException as problem:
        return None, problem


TOOLS = "tools"  # the permission to offer tools


class Permissions:
    """The permissions of a source, as the bus has reported them; of several, those of any. Safe from any thread.

    Attributes:
        parts: those of each bus, by address, where the peer attaches to several.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Permissions] = {}
        self._granted = frozenset((TOOLS,))  # a bus reports only that it denies this permission, not that it grants it

    def __repr__(self) -> str:
        return f"<Permissions {', '.join(sorted(self._granted)) or 'none'}>"

    @property
    def granted(self) -> frozenset[str]:
        """All permissions that the source has."""
        parts = tuple(self.parts.values())
        return frozenset().union(*(part.granted for part in parts)) if parts else self._granted

    def has(self, permission: str) -> bool:
        """Tells whether the source has a permission, for example ``tools``."""
        return permission in self.granted

    def set(self, granted: Iterable[str]) -> None:
        """Replaces all permissions; for the connection."""
        self._granted = frozenset(granted)


class PluginDelegate(Delegate):
    """The `Delegate` of a plugin. Everything runs on the connection's loop.

    Args:
        operations: the names that authors know for denied operations, by the bus's names.

    Attributes:
        declare: declares the tools again; None before there is a connection.
    """

    def __init__(
        self, tools: ToolSet, permissions: Permissions, standing: Standing, hooks: Hooks, operations: Mapping[str, str]
    ) -> None:
        self.declare: Callable[[], object] | None = None
        self._tools = tools
        self._permissions = permissions
        self._standing = standing
        self._hooks = hooks
        self._operations = operations

    def of_bus(self, bus: str) -> PluginDelegate:
        """Returns the delegate for one of several buses, by its address."""
        permissions = self._permissions.parts.setdefault(bus, Permissions())
        return PluginDelegate(self._tools, permissions, self._standing.of_bus(bus), self._hooks, self._operations)

    def forget_bus(self, bus: str) -> None:
        """Forgets one of several buses."""
        self._permissions.parts.pop(bus, None)
        self._standing.parts.pop(bus, None)

    def tools(self) -> Sequence[pb.Tool]:
        return [spec.tool.to_wire() for spec in self._tools]

    def subscriptions(self) -> Sequence[Any]:
        return (wire.SUBSCRIPTION_CATALOG,) if self._hooks.wants("tools_changed") else ()

    def attached(self, attached: wire.Attached) -> None:
        if len(self._tools) > attached.refused_total:  # the permission may have been granted while there was no stream
            self._permissions.set(self._permissions.granted | {TOOLS})
        self._standing.attached(attached.refused, attached.waiting)

    def registered(self, response: wire.RegisterResponse) -> None:
        self._standing.added(response.refused, response.waiting)

    def refused(self, names: Sequence[str], reason: str) -> None:
        # If the reason for refusing all names some of them, the author has to fix those.
        named = tuple(name for name in names if f"tool {name!r}" in reason or f"tool name {name!r}" in reason)
        self._hooks.fire("refused", named or tuple(name for name in names if name), reason)

    def event(self, event: wire.Event) -> None:
        match event.WhichOneof("kind"):
            case "catalog":
                self._hooks.fire_change("tools_changed", CatalogChange.from_wire(event.catalog), self)
            case "tools_reviewed":
                self._standing.reviewed(event.tools_reviewed)
            case "tool_overwritten":
                taken = event.tool_overwritten
                log.warning("tool %s is no longer offered: source %s registered the name", taken.name, taken.by_source)
            case "tool_removed":
                log.warning("tool %s was withdrawn by another peer or an operator", event.tool_removed.name)
            case "permission_denied":
                self._denied(event.permission_denied)
            case "permission_changed":
                self._changed(event.permission_changed)

    def _denied(self, denied: wire.PermissionDenied) -> None:
        log.error("the bus refuses %s: this source lacks the permission %r", denied.operation, denied.permission)
        self._permissions.set(self._permissions.granted - {denied.permission})
        operation = self._operations.get(denied.operation, denied.operation)
        self._hooks.fire("permission_denied", denied.permission, operation)

    def _changed(self, changed: wire.PermissionChanged) -> None:
        level, change = (logging.INFO, "granted") if changed.granted else (logging.WARNING, "revoked")
        log.log(level, "the permission %r was %s", changed.permission, change)
        self._permissions.set(changed.all_granted)
        self._hooks.fire("permission_changed", changed.permission, changed.granted, tuple(changed.all_granted))
        if changed.permission == TOOLS and changed.granted and self.declare is not None:
            self.declare()  # the bus may have withdrawn them meanwhile


GRACE_SECONDS = 10.0  # for calls in flight at a graceful shutdown
HOOK_SECONDS = 1.0  # for hooks that still run when the plugin has ended: the last event may be its refusal
WORKERS = 32
MAX_IN_FLIGHT = 256  # the bus's default for a session


class Lifecycle(Protocol):
    """The tools of an object, and what `Plugin` calls at the moments of the object's life."""

    @property
    def tools(self) -> ToolSet:
        """The live set of its tools."""

    async def start(self, run_sync: RunSync, run_timer: RunSync) -> None:
        """Is awaited before the plugin connects.

        Args:
            run_sync: runs a plain function on a thread that no tool uses.
            run_timer: runs a plain function on one of the tools' threads.

        Raises:
            SetupError: the plugin must not start.
        """

    def connected(self, send: Callable[[str, Any], object]) -> None:
        """Is called once, with a function that sends a text and JSON to every user as a notification."""

    async def stop(self, run_sync: RunSync) -> None:
        """Is awaited after the last call; it does not raise."""


class PluginObject(Protocol):
    """An object that `Plugin.from_object` runs.

    Attributes:
        plugin_id: names its source; empty is allowed if the source is given.
    """

    plugin_id: str

    @property
    def __toolbus_lifecycle__(self) -> Lifecycle:
        """Its tools and its life."""


class Plugin:
    """A plugin of this process: its tools, and the connection over which they are called.

    Async handlers run on the loop on which `start` was awaited (`run` makes one), plain functions on up to ``workers``
    threads. A handler that blocks does not stop the plugin's heartbeats.

    Args:
        source: whose tools these are, `[A-Za-z0-9_.:-]{1,128}`.
        address: where the bus listens; None means TOOLBUS_ADDRESS, then the credential's, then 127.0.0.1:48930. With
            several (``a:48931,b:48931`` or ``dns:NAME:PORT``) the plugin attaches to each of them.
        instance: tells several processes of one source apart; None generates one.
        max_in_flight: calls that it takes at once, of all its buses together; 0 means 256.
        qualified: lists the tools as ``source:name``, so that they never collide with another plugin's.
        token: proves that this plugin may use a bound source; None means TOOLBUS_TOKEN.
        credential: proves who this plugin is, to a bus on another machine: a file of `toolbus keys add`. None means
            TOOLBUS_CREDENTIAL. The file is read again at each connection.
        workers: threads for handlers that are plain functions.
        tools: a set that the caller owns; None makes one.
        notices: texts about it for operators; `toolbus list` shows them.
        all_or_none: whether the bus offers none of the tools if it refuses one of them; `ready` and `run` then raise.

    Attributes:
        tools: the set of its tools.
        permissions: those of its source, as the bus has reported them: ``permissions.has("tools")``.

    Raises:
        SetupError: an argument breaks its rule, or the credential cannot be used.
    """

    # No other attributes: setting one that does nothing, such as an address, is an error.
    __slots__ = (
        *("__weakref__", "permissions", "tools", "_closed", "_connection", "_hooks"),
        *("_lifecycle", "_lifecycle_worker", "_settings", "_standing", "_workers"),
    )
    __toolbus_plugin__ = True  # how `toolbus run` finds it in a file
    _operations: ClassVar[Mapping[str, str]] = {}  # names of denied operations for authors, by the bus's names

    def __init__(
        self,
        source: str,
        *,
        address: str | None = None,
        instance: str | None = None,
        max_in_flight: int = 0,
        qualified: bool = False,
        token: str | None = None,
        credential: Credential | str | Path | None = None,
        workers: int = WORKERS,
        tools: ToolSet | None = None,
        notices: Sequence[str] = (),
        all_or_none: bool = False,
        _timings: ConnectionTimings = TIMINGS,
    ) -> None:
        self.tools = ToolSet() if tools is None else tools
        self.permissions = Permissions()
        self._settings = ConnectionSettings(
            source,
            address or "",
            instance or "",
            max_in_flight,
            qualified,
            token or "",
            tuple(notices),
            _timings,
            find_credential(credential),
            all_or_none,
        )
        self._workers = Workers(workers, f"toolbus-{source}-worker")
        self._hooks = Hooks(lambda function: self._workers.run(function))
        self._standing = Standing(source, lambda names, reason: self._hooks.fire("refused", tuple(names), reason))
        self._lifecycle: Lifecycle | None = None  # of the object whose tools these are; None without one
        self._lifecycle_worker = Workers(1, f"toolbus-{source}-lifecycle")  # apart from handlers, which may hang
        self._connection: Connection | None = None  # None before the start
        self._closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.source} tools={len(self.tools)} {self._connection!r}>"

    @classmethod
    def from_object(cls, owner: PluginObject, *, source: str | None = None, **options: Any) -> Self:
        """Returns a plugin that offers an object's tools and runs its lifecycle methods.

        Args:
            owner: an object of a class that derives from `NekoPluginBase`, or another `PluginObject`.
            source: None means ``plugin:`` and the object's ``plugin_id``.
            options: as for the constructor.

        Raises:
            TypeError: the object has no life of its own.
        """
        lifecycle: Lifecycle | None = getattr(owner, "__toolbus_lifecycle__", None)
        if lifecycle is None:
            raise TypeError(f"{owner!r:.80} is no plugin object: derive its class from NekoPluginBase (toolbus.sdk)")
        plugin = cls(source or plugin_source(owner.plugin_id), tools=lifecycle.tools, **options)
        plugin._lifecycle = lifecycle
        return plugin

    @property
    def source(self) -> str:
        """Whose tools these are."""
        return self._settings.source

    @property
    def closed(self) -> bool:
        """Whether it was closed, by `close` or at the end of `run`, and not started again."""
        return self._closed

    @property
    def address(self) -> str:
        """Where it expects the bus; set by the constructor, and for one run by `start`."""
        return self._settings.address

    @property
    def refused(self) -> tuple[RefusedTool, ...]:
        """The tools that the bus refused, each with the reason; it offers the others. Empty before it has answered."""
        return self._standing.refused

    @property
    def waiting(self) -> tuple[WaitingTool, ...]:
        """The tools that the bus offers as soon as their role exists."""
        return self._standing.waiting

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(self, /, *, replace: bool = False, **options: Unpack[ToolOptions]) -> Callable[[F], F]: ...
    def tool(self, function: Any = None, /, *, replace: bool = False, **options: Unpack[ToolOptions]) -> Any:
        """Offers a function; a decorator, with or without `ToolOptions`. Returns the function itself."""

        def offer(function: F) -> F:
            self.add_tool(function, replace=replace, **options)
            return function

        return offer if function is None else offer(function)

    def add_tool(
        self,
        tool: Callable[..., Any] | ToolDefinition | ToolSpec,
        *,
        replace: bool = False,
        **options: Unpack[ToolOptions],
    ) -> ToolSpec:
        """Offers a tool, from any thread and also while connected; `ready` waits until the bus has it.

        Args:
            tool: a function, decorated with `llm_tool` or not, a `ToolDefinition` or a `ToolSpec`.
            replace: takes the place of the tool of that name, if there is one, without a moment without that tool.
            options: described in `ToolOptions`, for a function.

        Raises:
            SetupError: the plugin has a tool of that name, and it is not to be replaced.
            ValueError, TypeError: as for `llm_tool`.
        """
        spec = made_of(tool, options)
        if not self.tools.add(spec, replace=replace):
            name = spec.tool.name
            raise SetupError(f"{self.source!r} already has a tool {name!r}: pass replace=True, or rename one")
        return spec

    def remove_tool(self, name: str) -> bool:
        """Withdraws a tool, from any thread; returns whether it existed. Its calls in flight are finished."""
        return self.tools.remove(name)

    def on_permission_denied(self, function: F) -> F:
        """Registers a hook ``(permission, operation)`` for operations that the bus denied; a decorator.

        Hooks may be async or plain. The exception of one is logged, and the others still run.
        """
        return self._hooks.add("permission_denied", function)

    def on_permission_changed(self, function: F) -> F:
        """Registers a hook ``(permission, granted, all_granted)`` for granted or revoked permissions; a decorator.

        When the permission to offer tools is granted again, the plugin declares them again by itself.
        """
        return self._hooks.add("permission_changed", function)

    def on_refused(self, function: F) -> F:
        """Registers a hook ``(names, reason)`` for tools that the bus refused; a decorator.

        It is called once for each reason, and not again if a tool is refused for the same reason after a reconnect. It
        is also called if the bus refuses the plugin itself, or with ``all_or_none`` all tools: `names` are then those
        that the reason names, else all.
        """
        return self._hooks.add("refused", function)

    def on_tools_changed(self, function: F) -> F:
        """Registers a hook for each `CatalogChange` of the bus's catalog; a decorator.

        Changes that come while the hook runs reach it as one.
        """
        self._hooks.add("tools_changed", function)
        if self._connection is not None:
            self._connection.tools_changed()  # attaching again subscribes
        return function

    def run(self, on_ready: Callable[[], object] | None = None, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Offers the tools until SIGINT or SIGTERM, or until the bus disconnects the plugin for good.

        The first signal starts a graceful shutdown: it finishes its calls and returns. A second one ends it at once.

        Args:
            on_ready: called once, when `ready` returns for the first time.
            grace_seconds: how long the calls in flight may take after the first signal.

        Raises:
            RequestError: the bus refuses this plugin; the text is the bus's.
            PeerLost: another process took this plugin's place, or an operator asked it to disconnect.
            SetupError: a startup method of the plugin object failed.
        """
        asyncio.run(self._run(on_ready, grace_seconds))

    async def start(self, *, address: str | None = None) -> None:
        """Begins to connect, and reconnects without end; handlers run on the loop on which this is awaited.

        Returns before a bus has answered; see `ready`. A plugin that was closed starts anew.

        Args:
            address: of another bus for this time, without the credential, as a test needs it; None means its own.

        Raises:
            SetupError: a startup method of the plugin object failed, or the plugin runs.
        """
        if self._connection is not None and not self._closed:
            raise SetupError(f"plugin {self.source!r} runs: close it before you start it again")
        if self._closed:
            self._workers, self._lifecycle_worker = self._workers.renewed(), self._lifecycle_worker.renewed()
            self._closed = False
        settings = self._settings if address is None else replace(self._settings, address=address, credential=None)
        if self._lifecycle is not None:
            await self._lifecycle.start(self._lifecycle_worker.run, self._workers.run)
        loop = asyncio.get_running_loop()
        self._hooks.open(loop)
        runner = Runner(self.tools, loop, self._workers, self._settings.max_in_flight or MAX_IN_FLIGHT)
        delegate = PluginDelegate(self.tools, self.permissions, self._standing, self._hooks, self._operations)
        self._connection = connection = open_connection(settings, delegate, runner.take, "plugin")
        delegate.declare = connection.tools_changed
        self.tools.on_change = lambda name, spec: connection.tools_changed()
        connection.start()
        if self._lifecycle is not None:
            self._lifecycle.connected(lambda text, data: say(connection, text, data))

    async def ready(self) -> None:
        """Waits until the bus has answered for the tools that the plugin has now.

        The bus then offers them, except for those in `refused`, whose reasons are in the log, and those in `waiting`.

        Raises:
            RequestError: the bus refuses the plugin, or with ``all_or_none`` one of its tools; the text has the reason.
            PeerLost: the plugin was closed, or disconnected for good.
        """
        connection = self._started()
        await asyncio.wrap_future(connection.submit(connection.ready()))

    async def notify(self, user: str, text: str, data: Any = None) -> int:
        """Sends a notification to a user outside a call; hosts that follow show it, or give it to the model.

        Waits up to 10 s for a connection. A plain function on a thread uses `notify_sync`.

        Args:
            user: the user whom it is for; "" for everyone.
            text: the text for the user, 1 to 16,384 bytes.
            data: JSON for programs, at most 262,144 bytes; None for none. `{"wants": "reply"}` lets the host's model
                answer it now, `"context"` gives it to the model with the user's next message; a host may do less.

        Returns:
            The number of hosts that got it; 0: no host follows notifications, or none may see this user.

        Raises:
            CallFailed: the bus refuses it (too large, too often, a user who may not use this source), no bus took it in
                time, or the output of a bus of another make does not have the number.
            TypeError, ValueError: JSON cannot hold the data.
        """
        return await asyncio.wrap_future(notify(self._started(), user, text, data))

    def notify_sync(self, user: str, text: str, data: Any = None) -> int:
        """As `notify`, from any thread but that of the loop; blocks until the bus has answered."""
        return notify(self._started(), user, text, data).result()

    async def generate(
        self,
        messages: str | Sequence[Mapping[str, str]],
        *,
        mode: Mode | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] | None = None,
        model: str | None = None,
        timeout: float | None = None,
        scope: ToolScope | None = None,
    ) -> Generation:
        """Asks the model that a host lends: the tool ``host:generate``. The source needs the permission ``generation``.

        Args:
            messages: a text, or messages with ``role`` and ``content``, oldest first, at most 256.
            mode: ``quiet``: with the host's own instructions and settings, the default; ``raw``: these messages alone.
            max_tokens: of the answer; None means the host's limit.
            temperature, stop, model: None means the host's own; the host need not follow ``model``.
            timeout: seconds; None means the host's limit.
            scope: of the call that this request is part of: it ends with that call, and counts for its user.

        Raises:
            CallFailed: no host lends a model, the source lacks the permission, a limit was hit, or the model failed.
        """
        options = {"mode": mode, "max_tokens": max_tokens, "temperature": temperature, "stop": stop, "model": model}
        return await ask(scope or self._started(), request_of(messages, options), timeout)

    async def ended(self) -> None:
        """Waits until the connection has ended for good; raises as `run` does."""
        connection = self._started()
        await asyncio.wrap_future(connection.submit(connection.ended()))

    def leave(self, reason: str = "closed", grace_seconds: float = GRACE_SECONDS) -> bool:
        """Starts a graceful shutdown, which finishes the calls in flight and ends `run` and `ended`; from any thread.

        Does not wait, not even for a loop that is blocked. Returns False if the plugin was not started, or has ended.
        """
        if self._connection is None:
            return False
        with suppress(PeerLost):
            self._connection.submit(self._connection.close(reason, grace_seconds))
            return True
        return False

    async def close(self, grace_seconds: float = GRACE_SECONDS, *, reason: str = "closed") -> None:
        """Shuts down gracefully: finishes the calls in flight and disconnects. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        connection = self._connection
        if connection is not None:
            self.tools.on_change = None
            await asyncio.wrap_future(connection.submit(connection.close(reason, grace_seconds)))
            await asyncio.to_thread(connection.stop_thread)
            if self._lifecycle is not None:
                await self._lifecycle.stop(self._lifecycle_worker.run)
        await self._hooks.settle(HOOK_SECONDS)
        self._lifecycle_worker.stop()
        self._workers.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _started(self) -> Connection:
        if self._connection is None:
            raise SetupError(f"plugin {self.source!r} has not been started: await start() first")
        return self._connection

    async def _run(self, on_ready: Callable[[], object] | None, grace_seconds: float) -> None:
        # Before the start: the tools may be offered when it returns. Without a connection there is nothing to drain.
        with _signals(lambda name: self.leave(name, grace_seconds) or self._closed):
            await self.start()
            frozen, notifying = gc.get_freeze_count(), asyncio.ensure_future(self._notify(on_ready))
            try:
                await self.ended()
            finally:
                notifying.cancel()
                if not frozen:
                    gc.unfreeze()  # the program goes on
                await self.close(0.0)

    async def _notify(self, on_ready: Callable[[], object] | None) -> None:
        with suppress(PeerLost, RequestError):  # `ended` raises them too
            await self.ready()
            gc.freeze()  # what is loaded stays: to look through it again and again takes a fifth of the calls a second
            if on_ready is not None:
                on_ready()


def made_of(tool: Callable[..., Any] | ToolDefinition | ToolSpec, options: ToolOptions) -> ToolSpec:
    """Returns the specification of an author's tool; see `Plugin.add_tool`."""
    if isinstance(tool, ToolSpec):
        return tool
    if isinstance(tool, ToolDefinition):
        return tool.spec()
    return spec_of(tool, describe(tool, **options) if options else meta_of(tool) or describe(tool))


@contextmanager
def _signals(drain: Callable[[str], bool]) -> Iterator[None]:
    """Lets the first SIGINT or SIGTERM drain the plugin or, if `drain` refuses, do what it did; the second ends it.

    The signal handlers are plain ones, not the loop's: an async tool that blocks its loop must not block signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    draining = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal draining
        if draining or not drain(signal.Signals(number).name):
            signal.signal(number, signal.SIG_DFL if draining else before[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        draining = True
        log.info("%s: finishing the calls in flight; again to end at once", signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
