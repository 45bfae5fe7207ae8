"""``toolbus tasks``: calls that became tasks, and their results."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from toolbus.cli import bus_client, terminal
from toolbus.cli.bus_client import BusOption, JsonOption
from toolbus.cli.call_command import administer, check_seconds, content_of, show, show_content
from toolbus.cli.help_text import manual

if TYPE_CHECKING:
    from toolbus.sdk import Host
    from toolbus.tool import Result

MANUAL = manual(
    (
        "toolbus tasks",
        "toolbus tasks --user u-17 --json",
        "toolbus tasks check task_0123456789abcdef",
        "toolbus tasks await task_0123456789abcdef --timeout 60",
        "toolbus tasks cancel task_0123456789abcdef",
    ),
    """
    Without a verb it lists tasks, newest first. A task belongs to the user it was begun for, else to the program that
    began it: give the --user of the call; without it the tasks are those of `toolbus call`. A task of somebody else is
    as if there were none.

    check looks at once, await waits for the end, without --timeout for as long as it takes; Ctrl-C ends the waiting,
    not the task. Both print the result to standard output as `toolbus call` does; with --json the whole answer.
    """,
    "0 done (check: also where it still runs), 1 the task failed, its result is lost, it did not end in time, or there "
    "was nothing to cancel, 2 wrong usage, 3 no bus there, 130 after Ctrl-C.",
)

WAIT_SECONDS = 60.0  # how long one question waits for the end
_HEADS = ("TASK", "STATUS", "SECONDS", "TOOL", "ABOUT")


class Verb(StrEnum):
    """What to do about one task."""

    CHECK = "check"
    AWAIT = "await"
    CANCEL = "cancel"


def tasks(
    verb: Annotated[
        Verb | None, typer.Argument(metavar="check|await|cancel", help="What to do (default: list tasks).")
    ] = None,
    task_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Which task, as `toolbus tasks` shows it.")
    ] = None,
    bus: BusOption = None,
    user: Annotated[str | None, typer.Option(metavar="ID", help="Whose tasks (default: this program's).")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long to wait, with await.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List background tasks, look at one, wait for it, or cancel it."""
    if timeout is not None and verb is not Verb.AWAIT:
        terminal.fail("--timeout goes with await: toolbus tasks await ID --timeout SECONDS", terminal.USAGE)
    check_seconds("--timeout", timeout)
    if verb is None:
        _list(administer(bus, "list_tasks", {}, user), as_json)
        return
    if not task_id:
        terminal.fail(f"{verb} needs the ID of a task: `toolbus tasks` lists them", terminal.USAGE)
    if verb is Verb.AWAIT:
        result = bus_client.with_host(bus, lambda host: _await(host, task_id, user, timeout))
    else:
        result = bus_client.with_host(bus, lambda host: _ask(host, f"{verb}_task", user, {"task_id": task_id}))
    if result.is_error and not _runs(result.output):
        _refused(result, task_id, user, as_json)
    if verb is Verb.CANCEL:
        _cancelled(result.output, as_json)
    else:
        _told(result, as_json)


def _list(answer: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        terminal.say_json(answer)
    else:
        terminal.table(_HEADS, [_row(each) for each in answer["tasks"]])


def _row(task: Mapping[str, Any]) -> tuple[str, ...]:
    sign = task.get("progress", {})
    part = f"{sign['done']:g}" + (f"/{sign['total']:g}" if sign["total"] else "") if sign else ""
    about = task.get("error") or f"{part} {sign.get('message', '')}".strip()
    return task["task_id"], task["status"], f"{task['seconds']:.1f}", task["tool"], about


async def _ask(host: Host, tool: str, user: str | None, arguments: Mapping[str, Any], **options: Any) -> Result:
    return await host.call(f"toolbus:{tool}", arguments, context=bus_client.on_behalf(user), **options)


async def _await(host: Host, task_id: str, user: str | None, timeout: float | None) -> Result:
    """Asks again and again: one call may not take as long as a task."""
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        left = WAIT_SECONDS if until is None else min(WAIT_SECONDS, max(0.0, until - time.monotonic()))
        arguments = {"task_id": task_id, "timeout": round(left, 3)}
        result = await _ask(host, "await_task", user, arguments, timeout=left + bus_client.ANSWER_SECONDS)
        over = until is not None and time.monotonic() >= until
        if over or not result.is_error or not _runs(result.output):
            return result


def _runs(answer: Any) -> bool:
    return isinstance(answer, dict) and answer.get("status") == "running"


def _refused(result: Result, task_id: str, user: str | None, as_json: bool) -> NoReturn:
    """Ends the command: the bus said no, or there is no such task, which it tells models in their own words."""
    from toolbus.errors import Code

    if not as_json and result.error is not None and result.error.code is Code.TOOL:
        whose = f" of user {user!r}" if user else ""
        look = "toolbus tasks" + (f" --user {shlex.quote(user)}" if user else "")
        terminal.fail(
            terminal.clean(
                f"there is no task {task_id!r:.80}{whose}: `{look}` lists those there are; finished ones are kept for "
                "a while, and a task of somebody else is as if there were none"
            )
        )
    show(result, as_json)
    raise typer.Exit(terminal.REFUSED)


def _told(result: Result, as_json: bool) -> None:
    """Prints what became of a task; ends the command where that is no good end."""
    answer = result.output
    if as_json:
        terminal.say_json({**answer, **content_of(result)})
    elif result.is_error:
        print(f"toolbus: {terminal.clean(answer['task_id'])} was not done in time; it goes on", file=sys.stderr)
    elif _runs(answer):
        terminal.table(_HEADS, [_row(answer)])
    else:
        if "result" in answer:
            terminal.say_json(answer["result"])
        show_content(result)
        if "error" in answer:
            print(f"toolbus: {terminal.utf8(answer['error'])}", file=sys.stderr)
    if result.is_error or "error" in answer or answer["status"] == "failed":
        raise typer.Exit(terminal.REFUSED)


def _cancelled(answer: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        terminal.say_json(answer)
    elif answer["cancelled"]:
        print(f"cancelled {terminal.clean(answer['task_id'])}")
    if not answer["cancelled"]:
        terminal.fail(f"nothing to cancel: {terminal.clean(answer['task_id'])} is {answer['status']} already")
