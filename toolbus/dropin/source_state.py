"""Holds the state of a folder's sources: the plan of each, and the process that carries it out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from toolbus.dropin.group import Group


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """The tools that a source has to offer. A different plan needs a different process.

    Attributes:
        fingerprint: of the files and the grants.
        bus: the address where it attaches; empty while it is unknown.
        overridden: names of tools that a later file of another group registers too, each with that file.
        notices: for operators, besides those that the process adds.
    """

    group: Group
    fingerprint: str
    bus: str = ""
    overridden: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def keeps(self, before: SourcePlan) -> bool:
        """Tells whether every file and grant of an earlier plan is in this one too; changed code does not count."""
        same = self.bus == before.bus and self.group.grants.covers(before.group.grants)
        return same and set(self.group.files) >= set(before.group.files)


class Source:
    """One source: its plan, and the process that carries it out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.plan: SourcePlan | None = None  # None: it is to offer nothing any more
        self.plan_changed = asyncio.Event()
        self.process: GroupProcess | None = None  # whose tools are offered, or should be; None before the first
        self.failed = False  # the newest process could not be started
        self.fault = ""  # why, for operators; empty if nothing is wrong

    def set_plan(self, plan: SourcePlan | None) -> None:
        if plan is None or plan != self.plan:
            self.plan = plan
            self.plan_changed.set()

    def registered(self) -> dict[str, str]:
        """Returns the tools that it has and is to keep, each with its file."""
        if self.plan is None or self.process is None or self.process.ended:
            return {}
        files = self.plan.group.files
        return {name: file for name, file in self.process.tools.items() if file in files}


@dataclass(slots=True)
class GroupProcess:
    """One process of a source, restarts included.

    Attributes:
        name: in reports.
        plan: what it was started for.
        skipped: files that it does not load, since they took too long before, each with the reason.
        tools: names that its files registered, each with its file, whether or not they are offered.
        loading_file: the file that it loads now; empty if it loads none.
        timed_out_file: the file that took too long to load and so ended the process; empty if none did.
        timed_out_line: where in that file it was; empty if that is not known.
        last_report: when it last reported anything, by the loop's time; None while no process runs.
        has_heartbeat: whether it sends heartbeats; it does not while it loads.
        offers: what it offers, as a text for people; empty until its files are loaded.
        ended: nothing runs any more, and will not be restarted.
        ready: it is attached or ended.
    """

    name: str
    source: Source
    plan: SourcePlan
    skipped: dict[str, str]
    tools: dict[str, str] = field(default_factory=dict)
    loading_file: str = ""
    timed_out_file: str = ""
    timed_out_line: str = ""
    last_report: float | None = None
    has_heartbeat: bool = False
    offers: str = ""
    attached: bool = False
    ended: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
