"""Implements ``toolbus tasks``: lists calls that became background tasks, and gets their results."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption
from toolbus.cli.call_command import call_bus_tool, check_seconds, content_of, show, show_content
from toolbus.cli.help_text import epilog

if TYPE_CHECKING:
    from toolbus.protocol.tool import Result
    from toolbus.sdk import Host

EPILOG = epilog(
    (
        "toolbus tasks",
        "toolbus tasks --user u-17 --json",
        "toolbus tasks --all",
        "toolbus tasks await task_0123456789abcdef --all",
        "toolbus tasks check task_0123456789abcdef",
        "toolbus tasks await task_0123456789abcdef --timeout 60",
        "toolbus tasks cancel task_0123456789abcdef",
    ),
    """
    Without a verb it lists tasks, newest first. A task belongs to the user whom it was started for, or to the program
    that started it: use the same --user as for the call, or --source with the program's name. Without them the tasks
    are those of `toolbus call`. Tasks of others are not shown.

    --all lists the tasks of all users and programs. The programs of the bus's own user on its machine may do that, and
    keys with the scope administer = ["calls"]. With an ID it finds the owner of the task, and acts for that owner.

    check prints the state of a task, await waits until it ends; without --timeout it waits without limit. Ctrl-C ends
    the wait, not the task. Both print the result to standard output, like `toolbus call`; with --json they print the
    whole state.
    """,
    "0 done (check: also if the task still runs), 1 the task failed, its result is lost, it did not end in time, or it "
    "could not be cancelled, 2 wrong usage, 3 no bus found, 130 after Ctrl-C.",
)

WAIT_SECONDS = 60.0  # how long one request waits for the end
_HEADINGS = ("TASK", "STATUS", "SECONDS", "TOOL", "ABOUT")


class TaskVerb(StrEnum):
    """What to do with one task."""

    CHECK = "check"
    AWAIT = "await"
    CANCEL = "cancel"


def tasks(
    verb: Annotated[
        TaskVerb | None, typer.Argument(metavar="check|await|cancel", help="What to do (default: list tasks).")
    ] = None,
    task_id: Annotated[str | None, typer.Argument(metavar="ID", help="Id of the task, as in `toolbus tasks`.")] = None,
    bus: BusOption = None,
    credential: CredentialOption = None,
    user: Annotated[
        str | None, typer.Option(metavar="ID", help="Tasks of this user (default: those of this program).")
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tasks that this program started for no user.")
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Tasks of all users and programs.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long await waits, in seconds (default: no limit).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List background tasks, look at one, wait for it, or cancel it."""
    if timeout is not None and verb is not TaskVerb.AWAIT:
        terminal.fail("--timeout needs await: toolbus tasks await ID --timeout SECONDS", terminal.USAGE)
    check_seconds("--timeout", timeout)
    if sum((user is not None, source is not None, everyone)) > 1:
        terminal.fail("--user, --source and --all say whose tasks are meant: give one of them", terminal.USAGE)
    target = BusTarget(bus, credential)
    if verb is None:
        _list(target, user, source, everyone, as_json)
        return
    if not task_id:
        terminal.fail(f"{verb} needs the ID of a task: `toolbus tasks` lists them", terminal.USAGE)
    if everyone:
        user, source = _owner(target, task_id)

    async def ask(host: Host) -> Result:
        if verb is TaskVerb.AWAIT:
            return await _await(host, task_id, user, timeout)
        return await _request(host, f"{verb}_task", user, {"task_id": task_id})

    result = bus_client.with_host(target, ask, source)
    if result.is_error and not _is_running(result.output):
        _fail(result, task_id, user, source, as_json)
    if verb is TaskVerb.CANCEL:
        _show_cancelled(result.output, as_json)
    else:
        _show_task(result, as_json)


def _list(bus: BusTarget, user: str | None, source: str | None, everyone: bool, as_json: bool) -> None:
    headings, tool = ((*_HEADINGS, "OWNER"), "all_tasks") if everyone else (_HEADINGS, "list_tasks")
    reply = call_bus_tool(bus, tool, {}, user, source=source)
    rows = reply["tasks"]
    if as_json:
        terminal.print_json(reply)
    else:
        whose = [[f"{kind} {each[kind]}" for kind in ("user", "source", "identity") if kind in each] for each in rows]
        terminal.print_table(headings, [(*_row(each), *of) for each, of in zip(rows, whose, strict=True)])


def _owner(bus: BusTarget, task_id: str) -> tuple[str | None, str | None]:
    """Returns the user of a task, or the source of the program that started it; ends the command without one."""
    found = call_bus_tool(bus, "all_tasks", {"task_id": task_id})["tasks"]
    if not found:
        terminal.fail(f"unknown task {task_id!r:.80}: `toolbus tasks --all` lists tasks; finished ones expire")
    if identity := found[0].get("identity"):
        terminal.fail(f"{task_id} belongs to the identity {identity!r}: use its key, with --credential")
    return found[0].get("user"), found[0].get("source")


def _row(task: Mapping[str, Any]) -> tuple[str, ...]:
    progress = task.get("progress", {})
    part = f"{progress['done']:g}" + (f"/{progress['total']:g}" if progress["total"] else "") if progress else ""
    about = task.get("error") or f"{part} {progress.get('message', '')}".strip()
    return task["task_id"], task["status"], f"{task['seconds']:.1f}", task["tool"], about


async def _request(host: Host, tool: str, user: str | None, arguments: Mapping[str, Any], **options: Any) -> Result:
    return await host.call(f"toolbus:{tool}", arguments, context=bus_client.call_context(user), **options)


async def _await(host: Host, task_id: str, user: str | None, timeout: float | None) -> Result:
    """Sends requests until the task ends: one call may not take as long as a task."""
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        left = WAIT_SECONDS if until is None else min(WAIT_SECONDS, max(0.0, until - time.monotonic()))
        arguments = {"task_id": task_id, "timeout": round(left, 3)}
        result = await _request(host, "await_task", user, arguments, timeout=left + bus_client.REPLY_SECONDS)
        timed_out = until is not None and time.monotonic() >= until
        if timed_out or not result.is_error or not _is_running(result.output):
            return result


def _is_running(state: Any) -> bool:
    return isinstance(state, dict) and state.get("status") == "running"


def _fail(result: Result, task_id: str, user: str | None, source: str | None, as_json: bool) -> NoReturn:
    """Ends the command: the bus refused, or the task does not exist, which it reports in words for models."""
    from toolbus.errors import Code

    if not as_json and result.error is not None and result.error.code is Code.TOOL:
        whose = f" of user {user!r}" if user else f" of source {source!r}" if source else ""
        option = f" --user {shlex.quote(user)}" if user else f" --source {shlex.quote(source)}" if source else ""
        terminal.fail(
            f"unknown task {task_id!r:.80}{whose}: `toolbus tasks{option}` lists tasks; finished ones expire, and only "
            "`toolbus tasks --all` shows those of others"
        )
    show(result, as_json)
    raise typer.Exit(terminal.REFUSED)


def _show_task(result: Result, as_json: bool) -> None:
    """Prints the state of a task; ends the command if the task failed or did not end in time."""
    state = result.output
    if as_json:
        terminal.print_json({**state, **content_of(result)})
    elif result.is_error:
        terminal.print_note(f"{state['task_id']} did not end in time and continues")
    elif _is_running(state):
        terminal.print_table(_HEADINGS, [_row(state)])
    else:
        if "result" in state:
            terminal.print_json(state["result"])
        show_content(result)
        if "error" in state:
            terminal.print_note(state["error"])
    if result.is_error or "error" in state or state["status"] == "failed":
        raise typer.Exit(terminal.REFUSED)


def _show_cancelled(state: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        terminal.print_json(state)
    elif state["cancelled"]:
        terminal.print_lines(f"cancelled {state['task_id']}")
    if not state["cancelled"]:
        terminal.fail(f"nothing to cancel: {state['task_id']} is {state['status']} already")
