"""Loads the JavaScript files of one scope, and turns what they register into tools.

The files of a folder that use `llm_tool_register` share a scope, as on a Synchronet BBS: what a file declares at its
top level is there for the later ones. An extension, a file that uses `spindle`, is a module with a scope of its own. A
file loads as a whole or not at all; a tool that cannot be offered is left out, and the others of its file stay.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from toolbus.common.text import clean_lines, list_names, parse_json, shorten
from toolbus.errors import InvalidTool, SetupError
from toolbus.functions.reply import Err
from toolbus.functions.runner import CallLost
from toolbus.functions.tool_spec import ToolSpec
from toolbus.parts.dropin.file_declarations import DEFINITION_KEYS, OPTIONS, located, offered, register_tool, registered
from toolbus.parts.dropin.file_loader import FileProblem, Guard, Loaded, extension_manifest
from toolbus.parts.dropin.file_result import failed_tool
from toolbus.parts.dropin.javascript import (
    ANNOUNCES,
    Engine,
    EngineLimits,
    ScriptError,
    ignored_text,
    random_key,
    with_remedy,
)
from toolbus.parts.dropin.manifest import NO_GRANTS, FileGrants
from toolbus.parts.dropin.spindle_services import SpindleServices
from toolbus.parts.extension.extension import FAILED, ToolInvocation, invocation_spec, result_value
from toolbus.sdk import Plugin, ToolScope
from toolbus.sdk.lent_model import MAX_TOKENS

log = logging.getLogger("toolbus.dropin.script_group")

RESTART_SECONDS = 0.5  # until another process has probably taken the place of one whose scope has ended
_MAX_REQUESTS = 8  # of an extension that are answered at once; others wait
_MAX_LOGGED = 4000  # characters of one line of a script's log
_WARNING, _DEBUG = 4, 7  # levels of a script's log, as syslog has them
_FRAME = re.compile(r"<input>:(\d+)")
_TOP_FRAME = re.compile(r"<eval> \(<input>:(\d+)")
_NO_MODULE = ModuleType("a file of JavaScript")  # it has no file-wide settings


class ScriptGroup:
    """The files of one scope. `load` is called once; its tools may then be called from any loop.

    Args:
        is_extension: whether the scope is that of one extension.
        grants: what an extension may use.
        ended: called when the scope has ended by itself, with the reason; on its thread.
        wait_seconds: how long a module may wait at its top level; time in which the engine computes does not count.

    Raises:
        SetupError: QuickJS is not installed.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        *,
        is_extension: bool = False,
        grants: FileGrants = NO_GRANTS,
        limits: EngineLimits | None = None,
        ended: Callable[[str], object] = lambda reason: None,
        wait_seconds: float = 15.0,
    ) -> None:
        self._wait_seconds = wait_seconds
        self._folder = folder
        self._files = files
        self._is_extension = is_extension
        self._engine = Engine(self._take, limits, ended)
        self._engine.install("web.js", random_key())
        self._engine.install("synchronet.js", list(files))
        self._services = SpindleServices(next(iter(files), ""), grants, os.environ)
        self._requests = ThreadPoolExecutor(_MAX_REQUESTS, "toolbus spindle")  # its threads start when they are needed
        if is_extension:
            permissions = self._services.permissions
            self._engine.install("spindle.js", _manifest(folder, files), ANNOUNCES.pattern, permissions)
        self._posts: list[list[Any]] | None = []  # of the file that is being loaded; None once all are loaded
        self._specs: dict[str, ToolSpec] = {}  # by name, in the order of first registration
        self._origins: dict[str, str] = {}  # the file of each tool
        self._problems: list[FileProblem] = []
        self._plugin: Plugin | None = None  # of an extension, whose tools may come and go; None before `attach`
        self._wrap: Callable[[ToolSpec], ToolSpec] = lambda spec: spec
        self._loop: asyncio.AbstractEventLoop | None = None  # of the calls of an extension; None before the first
        self._scopes: list[ToolScope] = []  # of its calls in flight

    def __repr__(self) -> str:
        return f"<ScriptGroup {self._folder} tools={len(self._specs)} {self._engine!r}>"

    def load(self, *, offering: Iterable[str] | None = None, guard: Guard = nullcontext) -> Loaded:
        """Loads the files, in order, as `load_files` does those in Python."""
        offered_files = set(self._files if offering is None else offering)
        for file in self._files:
            self._load(file, guard, offers=file in offered_files)
        self._posts = None
        return Loaded(tuple(self._specs.values()), tuple(self._problems))

    def attach(self, plugin: Plugin, wrap: Callable[[ToolSpec], ToolSpec] = lambda spec: spec) -> None:
        """Has a plugin follow what an extension registers from now on, and the extension its permissions.

        Args:
            wrap: what becomes of a tool before the plugin gets it.
        """
        self._wrap = wrap
        self._plugin = plugin

        @plugin.on_permission_denied
        def denied(permission: str, operation: str) -> None:
            self._engine.notify("permission_denied", {"permission": permission, "operation": "registerTool"})

        @plugin.on_permission_changed
        def changed(permission: str, granted: bool, every: Iterable[str]) -> None:
            fields = {"permission": permission, "granted": granted, "all": sorted(every)}
            self._engine.notify("permission_changed", fields)

    def close(self) -> None:
        """Ends the scope."""
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._engine.close()

    # -- loading ---------------------------------------------------------------------------------------------------

    def _load(self, file: str, guard: Guard, *, offers: bool) -> None:
        posts = self._posts = []
        self._engine.notify("begin", {})
        loaded = False
        try:
            with guard(file):
                self._wait(self._engine.load(self._text(file), module=self._is_extension))
            loaded = True
        except TimeoutError:
            waited = f"{self._wait_seconds:g} s"
            reason = f"still waits for something at its top level after {waited}: wait in a handler instead"
            self._problems.append(FileProblem(file, reason))
        except (ScriptError, SetupError) as error:
            self._problems.append(FileProblem(file, _reason(error)))
        finally:
            self._engine.notify("end", {"keep": loaded})
        for post in posts if loaded else ():
            self._apply(file, post, offers=offers)

    def _wait(self, loading: Future[Any]) -> None:
        seconds = self._wait_seconds if self._is_extension else None  # a script cannot wait, and the engine ends it
        while True:
            try:
                loading.result(seconds)
                return
            except TimeoutError:
                if loading.done() or not self._engine.is_busy:
                    raise

    def _text(self, file: str) -> str:
        path = self._folder / file
        if self._is_extension and not os.path.lexists(path):
            raise SetupError("is not there: build the extension, or name its file in entry_backend of spindle.json")
        if not path.is_file():
            raise SetupError("is not a readable file: it is a folder, a pipe or a dangling link")
        try:
            text = path.read_text("utf-8-sig")
        except UnicodeDecodeError:
            raise SetupError("is not UTF-8 text: save it as UTF-8") from None
        except OSError as error:
            raise SetupError(f"cannot be read: {error.strerror}: let this user read it") from None
        if "\0" in text:
            raise SetupError("holds a NUL character: write it as \\0 in a string")
        return text

    def _apply(self, file: str, post: list[Any], *, offers: bool) -> None:
        """Applies one message that a file sent while it was loaded."""
        match post:
            case ["register", str(record)]:
                spec = self._spec(file, record)
                if isinstance(spec, FileProblem):
                    self._problems.append(spec)
                elif offers:
                    self._add(file, spec)
            case ["unregister", name]:
                self._specs.pop(name, None)
            case ["ignored", name]:
                self._problems.append(FileProblem(file, ignored_text(str(name)), skipped=False))

    def _add(self, file: str, spec: ToolSpec) -> None:
        name = spec.tool.name
        if name in self._specs and not self._is_extension:
            reason = f'tool "{name}" registered twice (later wins): before in {self._origins[name]}. Rename one of them'
            self._problems.append(FileProblem(file, reason, skipped=False))
        self._specs[name] = spec
        self._origins[name] = file

    def _spec(self, file: str, text: str) -> ToolSpec | FileProblem:
        """Returns the tool of a registration, or why it cannot be offered."""
        try:
            record = parse_json(text)
            if not isinstance(record, dict):
                raise TypeError(f"it is {text:.80}: register an object with name, description and parameters")
            if self._is_extension and "def" not in record:
                return located(invocation_spec(record, self._answer), file)
            known, unknown = _known(record)
            if unknown:
                reason = f"of tool {record['name']!r:.80} these keys are ignored: {list_names(unknown)}"
                self._problems.append(FileProblem(file, reason, skipped=False))
            return offered(self._registered(known), file, _NO_MODULE)
        except (ValueError, TypeError, RecursionError, InvalidTool) as error:
            return FileProblem(file, f"a tool is left out: {error}", skipped=False)

    def _registered(self, record: Mapping[str, Any]) -> ToolSpec:
        """Returns the tool of a file with `llm_tool_register`."""
        name = record["name"]

        async def execute(args: dict[str, Any], env: Mapping[str, Any]) -> Any:
            fields = {"name": name, "args": args, "env": _plain(env)}
            try:
                return await self._ask("call", fields, env["deadline"])
            except ScriptError as error:
                _raise_if_lost(error)
                log.warning("tool %s of %s failed: %s", name, self._origins[name], _trace(error))
                return failed_tool(with_remedy(str(error)), "ScriptError")

        collected: list[ToolSpec] = []
        token = registered.set(collected)
        try:
            register_tool({**record, "execute": execute})
        finally:
            registered.reset(token)
        return collected[0]

    # -- running ---------------------------------------------------------------------------------------------------

    async def _answer(self, invocation: ToolInvocation) -> Any:
        # No docstring: it would become the description of tools that were registered without one.
        payload = {key: _plain_value(value) for key, value in invocation.items() if value is not None}
        self._loop = asyncio.get_running_loop()
        self._scopes.append(invocation.scope)
        try:
            returned = await self._ask("invoke", {"payload": payload}, invocation.scope.deadline)
        except ScriptError as error:
            _raise_if_lost(error)
            log.warning("tool %s failed: %s", invocation.tool_name, _trace(error))
            return Err(with_remedy(error.message) or FAILED)
        finally:
            self._scopes.remove(invocation.scope)
        return "" if returned is None else result_value(returned)

    async def _ask(self, kind: str, fields: Mapping[str, Any], deadline: float | None) -> Any:
        future: Future[Any] = self._engine.request(kind, fields, deadline=deadline)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._engine.drop(future)
            raise

    async def _generate(self, request: Any, scope: ToolScope | None) -> dict[str, Any]:
        """Returns the answer of the model that a host lends."""
        assert self._plugin is not None  # its calls come through it
        answer = await self._plugin.generate(**_generation(request), scope=scope)
        return {
            "content": answer.text,
            "model": answer.model,
            "finish_reason": answer.stop_reason,
            "usage": dict(answer.usage),
        }

    def _answer_request(self, number: int, kind: str, text: str, scope: ToolScope | None) -> None:
        """Answers one request of an extension, on a thread that may wait."""
        fields: dict[str, Any] = {"id": number}
        try:
            arguments = parse_json(text)
            if kind != "generate":
                fields["answer"] = self._services.answer(kind, arguments, scope.user_id if scope else None)
            elif self._loop is None:
                raise SetupError("a model can be asked while a tool is called: move spindle.generate into the handler")
            else:
                fields["answer"] = asyncio.run_coroutine_threadsafe(
                    self._generate(arguments[0], scope), self._loop
                ).result()
        except Exception as error:  # whatever it is: a request without an answer waits for ever
            fields["error"] = str(error) or type(error).__name__
        self._engine.notify("answered", fields)

    def _take(self, post: list[Any]) -> None:
        """Takes what a script posts, on the thread of the scope."""
        match post:
            case ["log", level, text]:
                _write(level, str(text))
            case ["ask", int(number), str(kind), str(text)]:
                # With several calls at once it is unknown which of them asks, so the request has no user of its own.
                scope = self._scopes[0] if len(self._scopes) == 1 else None
                self._requests.submit(self._answer_request, number, kind, text, scope)
            case _ if self._posts is not None:
                self._posts.append(post)
            case ["register", str(record)] if self._plugin is not None:
                spec = self._spec(self._files[0], record)
                if isinstance(spec, FileProblem):
                    log.warning("%s: %s", spec.file, spec.reason)
                else:
                    self._plugin.add_tool(self._wrap(spec), replace=True)
            case ["unregister", name] if self._plugin is not None:
                self._plugin.remove_tool(name)
            case ["ignored", name]:
                _write(_WARNING, ignored_text(str(name)))


def _raise_if_lost(error: ScriptError) -> None:
    if error.lost:
        text = f"another call ended the process of the scripts: {error}"
        raise CallLost(text, ran=error.began, retry_after=RESTART_SECONDS)


def _generation(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `Plugin.generate` takes of a request; a limit above what hosts usually lend is left to the host."""
    parameters = request.get("parameters") or {}
    most = parameters.get("max_tokens")
    messages = request.get("messages") or []
    return {
        "messages": [{"role": each["role"], "content": each["content"]} for each in messages],
        "mode": request["mode"],
        "max_tokens": most if isinstance(most, int) and most <= MAX_TOKENS else None,
        "temperature": parameters.get("temperature"),
        "stop": parameters.get("stop"),
        "model": request.get("model"),
    }


def _known(record: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns a registration with the keys that mean something, and the names of the others: a BBS ignores them."""
    definition = record["def"]
    inner = definition.get("function", definition) if isinstance(definition, dict) else None
    if not isinstance(inner, dict):
        return record, []
    described = {key: value for key, value in inner.items() if key in DEFINITION_KEYS}
    options = {key: value for key, value in record.items() if key in ("name", *OPTIONS)}
    unknown = {*record, *inner, *definition} - {*options, *DEFINITION_KEYS, "def", "type", "function"}
    return {**options, "def": described}, sorted(unknown)


def _manifest(folder: Path, files: Sequence[str]) -> dict[str, Any]:
    """Returns what an extension says about itself; the name of its file if it says nothing."""
    name, _, entry = files[0].partition("/") if files else ("", "", "")
    manifest = extension_manifest(folder / name) if entry else {}
    return {"identifier": name.removesuffix(".js"), **manifest}


def _plain(env: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `env` as JavaScript can hold it: without functions, times as `Date.now()` has them."""
    left = None if env["deadline"] is None else env["deadline"] - time.monotonic()
    deadline = None if left is None else round((time.time() + left) * 1000)
    return {key: _plain_value(value) for key, value in env.items() if key != "bus"} | {"deadline": deadline}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_value(each) for key, each in value.items()}
    return [_plain_value(each) for each in value] if isinstance(value, list | tuple) else value


def _write(level: Any, text: str) -> None:
    """Writes a line of a script's log where the output of the process goes."""
    if level != _DEBUG:
        stream = sys.stderr if isinstance(level, int) and level <= _WARNING else sys.stdout
        print(shorten(clean_lines(text), _MAX_LOGGED), file=stream, flush=True)


def _trace(error: ScriptError) -> str:
    """Returns what was thrown and where, as far as that is in a script."""
    lines = [line for line in error.stack.splitlines() if line.strip()]
    own = next((number - 1 for number, line in enumerate(lines) if " at settle (<input>" in line), len(lines))
    return "\n".join((with_remedy(str(error)), *lines[: max(own, 0)])).replace("<input>", "line ")


def _reason(error: ScriptError | SetupError) -> str:
    """Returns one line: what went wrong, where in the file, and how to fix it if that is known."""
    if isinstance(error, SetupError):
        return str(error)
    frame = _TOP_FRAME.search(error.stack) or _FRAME.search(error.stack)
    text = shorten(" ".join(str(error).split()), 500)
    where = f" (line {frame[1]})" if frame else ""
    return f"{text}{where}{with_remedy(text).removeprefix(text)}"
