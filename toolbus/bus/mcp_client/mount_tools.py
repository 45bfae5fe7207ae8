"""Offers what operators do with mounts as tools of the bus: show, approve, restart, read a log.

They show and restart what is configured, and add nothing: what starts a program stands in files that only the bus's
user can write.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from toolbus.bus.access.principal import principal_of
from toolbus.bus.audit.audit import Audit
from toolbus.bus.mcp_client.mounts_follower import ConfiguredMounts
from toolbus.bus.pins import fingerprints
from toolbus.errors import InvalidRequest
from toolbus.sdk import ToolScope, llm_tool
from toolbus.text import list_names, quote
from toolbus.tool import HINTS

if TYPE_CHECKING:  # a bus without mounts loads nothing of these
    from toolbus.bus.mcp_client.manifest import Manifest
    from toolbus.bus.mcp_client.mount import Mount
    from toolbus.bus.mcp_client.mount_entry import MountEntry
    from toolbus.bus.mcp_client.mounts import Mounts

_TOOL = fingerprints.tool_subject("")


class MountTools:
    """The operators' tools for the mounts of one bus.

    Attributes:
        configured: what the files say now.
        file: which `toolbus mount` writes; "" where the bus stores nothing.
    """

    def __init__(self, audit: Audit) -> None:
        self.configured = ConfiguredMounts()
        self.file = ""
        self._audit = audit
        self._mounts: Mounts | None = None  # None until there is a mount
        self._manifest: Manifest | None = None  # where approvals are stored; None until there is a mount
        self._approving = asyncio.Lock()

    def follow(self, mounts: Mounts, manifest: Manifest) -> None:
        """Shows these mounts from now on."""
        self._mounts, self._manifest = mounts, manifest

    def close(self) -> None:
        """Closes what remembers the mounts; they have ended."""
        if self._manifest is not None:
            self._manifest.close()

    def tools(self) -> list[Callable[..., Any]]:
        """The methods that are tools."""
        return [self.show_mounts, self.mount_approve, self.mount_restart, self.mount_logs]

    @llm_tool(
        name="mounts",
        description="Shows the mounted MCP servers: state with reason and how to fix it, tools, process, changes that "
        "wait for an approval.",
        read_only=True,
    )
    def show_mounts(self, name: str = "") -> dict[str, Any]:
        """Shows mounts. Runs on a thread: the memory of processes takes some milliseconds to be read.

        Args:
            name: of one mount, which is shown with its tools; "" for all.
        """
        shown = [self._find(name)] if name and name not in self.configured.refused else list(self._mounts or ())
        details = bool(name)
        disabled = [entry.name for entry in self.configured.entries.values() if entry.disabled]
        return {
            "file": self.file,
            "mounts": [self._described(mount, details=details) for mount in shown if not name or mount.name == name],
            "disabled": disabled,
            "refused": dict(self.configured.refused),
            "notices": list(self.configured.notices),
            "errors": dict(self.configured.errors),
        }

    @llm_tool(
        description="Trusts what a mounted MCP server declares now, where that differs from what was trusted before."
    )
    async def mount_approve(
        self, scope: ToolScope, name: str, tool: str = "", expected: list[str] | None = None
    ) -> dict[str, Any]:
        """Approves changes.

        Args:
            name: of the mount.
            tool: one tool, by its name here or at the server, or a subject such as `instructions`; "" for all.
            expected: the fingerprints that were shown; a change that came since then is not approved. null: any.
        """
        async with self._approving:
            mount, manifest = self._find(name), self._manifest
            assert manifest is not None  # there is a mount
            entry = mount.entry
            known = await asyncio.to_thread(manifest.fingerprints, entry.name, entry.command_digest)
            waiting = fingerprints.pending(known)
            chosen = [subject for subject in waiting if not tool or _names(subject, tool)]
            if tool and not chosen:
                raise InvalidRequest(
                    f"nothing of {quote(tool)} waits for an approval in mount {name}; what does: {list_names(waiting)}"
                )
            if expected is not None:
                chosen = [each for each in chosen if fingerprints.digest_of(waiting[each].pending) in expected]
            with self._audit.operation("mount.approve", principal_of(scope), target=name, why=list_names(chosen)):
                approved = fingerprints.approve(known, chosen)
                await asyncio.to_thread(manifest.save_fingerprints, entry.name, entry.command_digest, approved)
                await mount.review_again()
        return {"name": name, "approved": chosen, "waiting": [each for each in waiting if each not in chosen]}

    @llm_tool(description="Starts a mounted MCP server anew, also one that was given up.")
    async def mount_restart(self, scope: ToolScope, name: str) -> dict[str, Any]:
        """Restarts a mount; its calls in flight end."""
        mount = self._find(name)
        with self._audit.operation("mount.restart", principal_of(scope), target=name):
            mount.restart()
        return {"name": name, "restarted": True}

    @llm_tool(description="Shows the newest lines of the log of a mounted MCP server.", read_only=True)
    async def mount_logs(self, name: str) -> dict[str, Any]:
        """Shows what the server wrote to its standard error."""
        return {"name": name, "lines": self._find(name).log_lines}

    def _find(self, name: str) -> Mount:
        mount = self._mounts.get(name) if self._mounts is not None else None
        if mount is not None:
            return mount
        if name in self.configured.refused:
            raise InvalidRequest(f"mount {name} is not there: {self.configured.refused[name]}")
        if name in self.configured.entries:
            raise InvalidRequest(
                f'mount {name} is disabled: remove "disabled" from {self.configured.entries[name].origin}'
            )
        raise InvalidRequest(
            f"there is no mount {quote(name)}; there are {list_names(each.name for each in self._mounts or ())}"
        )

    def _described(self, mount: Mount, *, details: bool) -> dict[str, Any]:
        from toolbus.bus.mcp_client.declarations import our_name

        status, entry = mount.status(), mount.entry
        shown = dataclasses.asdict(status)
        left = [{"name": each.name, "reason": each.reason} for each in status.left]
        shown |= {"state": status.state.value, "left": left, "pin": entry.pin, "origin": entry.origin}
        shown |= {"target": _target(entry), "notices": {name: list(each) for name, each in status.notices.items()}}
        if details and self._manifest is not None:
            known = self._manifest.fingerprints(entry.name, entry.command_digest)
            shown["declared"] = [_tool(mount, item.tool.name, known) for item in mount.offer.declared.compiled]
            shown["changes"] = [
                {
                    "subject": subject,
                    "tool": our_name(subject.removeprefix(_TOOL)) if subject.startswith(_TOOL) else "",
                    "fingerprint": fingerprints.digest_of(each.pending),
                    "approved": each.fingerprint,
                    "difference": each.difference(),
                }
                for subject, each in fingerprints.pending(known).items()
            ]
        return shown


def _tool(mount: Mount, name: str, known: dict[str, fingerprints.Pinned]) -> dict[str, Any]:
    declared = mount.offer.declared
    tool = next(each for each in declared.tools if each.name == name)
    pinned = known.get(fingerprints.tool_subject(declared.server_names[name]), fingerprints.Pinned())
    return {
        "name": name,
        "title": tool.display_name,
        "description": tool.description,
        "hints": {hint: value for hint in HINTS if (value := getattr(tool.annotations, hint)) is not None},
        "fingerprint": pinned.fingerprint,
        "changed": bool(pinned.pending),
    }


def _names(subject: str, wanted: str) -> bool:
    """Tells whether a person means a subject."""
    from toolbus.bus.mcp_client.declarations import our_name

    theirs = subject.removeprefix(_TOOL) if subject.startswith(_TOOL) else ""
    return wanted == subject or bool(theirs and wanted in (theirs, our_name(theirs)))


def _target(entry: MountEntry) -> str:
    """Returns where a server is, without what may be secret: arguments, the query of a URL."""
    if not entry.is_remote:
        return entry.command
    parts = urlsplit(entry.url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"
