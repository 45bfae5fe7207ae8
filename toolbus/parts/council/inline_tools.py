"""Offers tools to the main model itself, each once for every member that has it, and routes the model's calls.

A model sees one flat list of names. A table maps each name to a tool and, if a member has it, to the member, so no
name is ever parsed. Every error of a call is a result that the model reads: a turn never ends because of a tool.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolbus.common.cancellation import is_being_cancelled
from toolbus.errors import Code, InvalidRequest, Stage, ToolBusError
from toolbus.functions.call_context import NO_CONTEXT, CallContext
from toolbus.parts.council.settings import Member
from toolbus.parts.council.tool_runner import available_tools, by_any_name
from toolbus.parts.models.dialects.wire_names import PLAIN_NAMES, NameRule, NameTable
from toolbus.parts.models.loop.tool_source import ToolSource
from toolbus.parts.models.loop.turn_reply import refusal
from toolbus.protocol.tool import Progress, Result, Tool

log = logging.getLogger("toolbus.extension")

PREFIX = 8  # characters of a member's id in front of its names; ids that share them are used in full
EMPTY_RESULT = "(empty result)"  # some providers refuse a result without text

_Key = tuple[str, str]  # id of a member, "" for none; name of the tool as listed


@dataclass(frozen=True, slots=True)
class InlineTarget:
    """What one offered name stands for: a tool as the bus lists it, and its member; None for a tool of no member."""

    tool_name: str
    member: Member | None = None


@dataclass(frozen=True, slots=True)
class InlineExport:
    """The functions for one model.

    Attributes:
        tools: by the names that the model sees, those of the members first, in their order; any dialect exports them.
            Each has the schema_hash of the tool that it stands for.
        targets: the tool and member of each name.
        missing: (member id, name) of assigned tools that do not exist or are not meant for councils.
    """

    tools: tuple[Tool, ...] = ()
    targets: Mapping[str, InlineTarget] = field(default_factory=dict)
    missing: tuple[tuple[str, str], ...] = ()

    @classmethod
    def build(
        cls, tools: Iterable[Tool], members: Iterable[Member] = (), *, rule: NameRule = PLAIN_NAMES
    ) -> InlineExport:
        """Returns each tool of each member, and the tools that are `inline_available`.

        The same tools and members always get the same names, in any order.

        Args:
            tools: as the bus lists them.
            members: all that take part; no dice are rolled.
            rule: which names the provider accepts.

        Raises:
            InvalidRequest: two members have the same id, or one has an empty id.
        """
        members = _check_ids(members)
        listed = tuple(tools)
        eligible = by_any_name(available_tools(listed, ()))
        targets: dict[_Key, tuple[Tool, Member | None]] = {}
        missing: list[tuple[str, str]] = []
        for member in members:
            for assigned in member.tools:
                available = eligible.get(assigned)
                if available is None or not isinstance(available.tool, Tool):
                    missing.append((member.id, assigned))
                else:
                    targets[member.id, available.tool.name] = (available.tool, member)
        for tool in listed:
            if tool.inline_available:
                targets["", tool.name] = (tool, None)
        names = _names(targets, rule)
        return cls(
            tuple(_offered(tool, names[key], member) for key, (tool, member) in targets.items()),
            {names[key]: InlineTarget(tool.name, member) for key, (tool, member) in targets.items()},
            tuple(missing),
        )

    def resolve(self, name: str) -> InlineTarget | None:
        """Returns the tool and member of a name; None for an unknown name."""
        return self.targets.get(name)


class InlineTools:
    """A source of tools for a `toolbus.loop.ToolLoop`: those of another source, as a main model is offered them.

    Args:
        source: where the tools are.
        members: all that take part.
        rule: which names the provider accepts.

    Raises:
        InvalidRequest: two members have the same id, or one has an empty id.
    """

    def __init__(self, source: ToolSource, members: Iterable[Member] = (), *, rule: NameRule = PLAIN_NAMES) -> None:
        self.members = _check_ids(members)
        self._source = source
        self._rule = rule
        self._export: InlineExport | None = None  # of `_revision`; None until tools were listed
        self._revision = -1

    def __repr__(self) -> str:
        offered = len(self._export.tools) if self._export is not None else 0
        return f"<InlineTools {self._source!r} members={len(self.members)} offered={offered}>"

    @property
    def context(self) -> CallContext | None:
        """The context with which the source lists and calls."""
        context: CallContext | None = getattr(self._source, "context", None)
        return context

    async def export(self) -> InlineExport:
        """Returns the current tools for the model.

        Raises:
            ToolBusError: the source cannot list its tools.
        """
        revision, listed = await self._source.tools()
        if self._export is None or revision != self._revision:
            self._revision, self._export = revision, InlineExport.build(listed, self.members, rule=self._rule)
        return self._export

    async def tools(self) -> tuple[int, Sequence[Tool]]:
        """Returns the revision of the source and the offered tools; see `ToolSource`."""
        export = await self.export()
        return self._revision, export.tools

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
        """Calls the tool of a name, on behalf of its member. Never raises, unless this task is cancelled.

        Args:
            context: of the call, with the conversation; None means that of the source. The name always determines the
                member.
        """
        try:
            target = (self._export or await self.export()).resolve(name)
            if target is None:
                return refusal(Code.NOT_FOUND, f"there is no tool {name[:80]!r}: call one that is offered")
            member = None if target.member is None else target.member.described()
            result = await self._source.call(
                target.tool_name,
                arguments_json,
                context=dataclasses.replace(context or self.context or NO_CONTEXT, member=member),
                schema_hash=schema_hash,
                timeout=timeout,
                on_progress=on_progress,
            )
        except asyncio.CancelledError:
            if is_being_cancelled():
                raise
            text = f"the call of {name[:80]!r} was cancelled before it had a result"
            return refusal(Code.CANCELLED, text, Stage.UNKNOWN)
        except TimeoutError:
            text = f"Tool invocation {name[:80]!r} timed out"
            return refusal(Code.DEADLINE_EXCEEDED, text, Stage.UNKNOWN)
        except ToolBusError as error:
            return refusal(Code.UNAVAILABLE, str(error), Stage.UNKNOWN)
        except Exception as error:
            log.exception("calling %r failed", name[:80])
            text = f"the call of {name[:80]!r} failed: {type(error).__name__}"
            return refusal(Code.INTERNAL, text, Stage.UNKNOWN)
        has_text = result.output_json not in ('""', "null", "")
        if has_text or result.content or result.error is not None or result.is_error:
            return result
        return dataclasses.replace(result, output_json=json.dumps(EMPTY_RESULT))

    def changes(self) -> AsyncIterator[int]:
        """Yields the revisions of the source; see `ToolSource`."""
        return self._source.changes()


def _check_ids(members: Iterable[Member]) -> tuple[Member, ...]:
    """Returns members whose ids are unique.

    Raises:
        InvalidRequest: two members have the same id, or one has an empty id.
    """
    members = tuple(members)
    for member_id, times in Counter(member.id for member in members).items():
        if times > 1 or not member_id:
            raise InvalidRequest(f"{times} members have the id {member_id[:80]!r}: give each a different id")
    return members


def _names(keys: Iterable[_Key], rule: NameRule) -> dict[_Key, str]:
    """Returns a unique name for each key: the start of the member's id, then the tool's name."""
    plain = {(member_id, tool): f"{member_id[:PREFIX]}_{tool}" if member_id else tool for member_id, tool in keys}
    times = Counter(plain.values())
    # The table fits names to the provider's rule and needs unique ones: names that are equal get the whole id appended.
    unique = {key: name for key, name in plain.items() if times[name] == 1}
    taken = set(unique.values())
    for key in sorted(plain.keys() - unique.keys()):
        name = f"{plain[key]}\0{key[0]}"
        while name in taken:
            name += "\0"
        unique[key] = name
        taken.add(name)
    table = NameTable.build(unique.values(), rule)
    return {key: table.to_wire[name] for key, name in unique.items()}


def _offered(tool: Tool, name: str, member: Member | None) -> Tool:
    """Returns a tool as the model sees it, with the schema_hash of the original: calls are checked against that."""
    changes: dict[str, Any] = {"name": name}
    if member is not None:
        voice = f"{member.name} - {member.role}" if member.role else member.name
        changes |= {"description": f"[{voice}] {tool.description}"}
    offered = dataclasses.replace(tool.renamed(name), **changes)  # renamed first: a listed name may be invalid
    object.__setattr__(offered, "schema_hash", tool.schema_hash)
    return offered
