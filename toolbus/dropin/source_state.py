"""What a folder of tools keeps in mind: what is wanted of each source, and the processes that there are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from toolbus.dropin.group import Group


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """What a source is to offer. Where it is another one, its process would be different.

    Attributes:
        print: of the files and the grants.
        bus: where it attaches; empty while nobody knows.
        taken: names of tools that a later file of another group registers as well, each with that file.
        notices: what operators should know, beside what the process finds itself.
    """

    group: Group
    print: str
    bus: str = ""
    taken: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()

    def keeps(self, before: SourcePlan) -> bool:
        """Tells whether nothing is taken away that was offered or granted before; new code does not count."""
        same = self.bus == before.bus and self.group.grants.covers(before.group.grants)
        return same and set(self.group.files) >= set(before.group.files)


@dataclass(slots=True)
class Process:
    """One process of a source, restarts included.

    Attributes:
        tools: names that its files registered, each with its file, whether or not it offers them.
        slow: files that it does not load, since they took too long before, or the bus refused their tools, each with
            what is said about it.
        loading: the file that it loads; empty where it loads none.
        late: the file that it took too long to load, of which it ends; empty where there is none.
        refused: files with tools that the bus refused, each with why.
        heard: when it last said something, by the loop's time; None while no process runs.
        beats: whether it says regularly that it is alive; not while it loads.
        late_line: where in that file it was; empty where nobody knows.
    """

    name: str
    wanted: SourcePlan
    slow: dict[str, str]
    tools: dict[str, str] = field(default_factory=dict)
    loading: str = ""
    late: str = ""
    late_line: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    heard: float | None = None
    beats: bool = False
    loaded: str = ""  # what it has to offer, in words; empty before it has loaded its files
    attached: bool = False
    over: bool = False  # nothing runs any more, and will not be started again
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # it is attached or over


class Source:
    """What is wanted of one source, and what there is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wanted: SourcePlan | None = None  # None: nothing any more
        self.changed = asyncio.Event()  # what is wanted is something else
        self.running: Process | None = None  # whose tools are offered, or should be; None before the first
        self.failed = False  # the newest process could not be had
        self.trouble = ""  # what operators should know about that; empty where all is well

    def want(self, wanted: SourcePlan | None) -> None:
        if wanted is None or wanted != self.wanted:
            self.wanted = wanted
            self.changed.set()

    def registered(self) -> dict[str, str]:
        """Returns the tools that it has and is to keep, each with its file."""
        if self.wanted is None or self.running is None or self.running.over:
            return {}
        files = self.wanted.group.files
        return {name: file for name, file in self.running.tools.items() if file in files}
