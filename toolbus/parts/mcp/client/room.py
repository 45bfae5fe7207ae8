"""Mounts MCP servers: runs those that the files of mounts name, and offers their tools on the bus.

A bus without such a file loads none of the code of mounts. The operators' tools show mounts, restart them, read their
logs and approve changes. No tool adds a mount: programs are started only from files that only the bus's user can write.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from toolbus.bus.access.identity import principal_of
from toolbus.bus.audit import Audit
from toolbus.bus.catalog.entry import Entry
from toolbus.bus.core import Core, Room
from toolbus.bus.keys.keyring import Changed
from toolbus.bus.rooms.gateway_room import GatewayRoom
from toolbus.bus.web_paths import Message, Receive, Send
from toolbus.common.text import clean_line, list_names, quote, shorten
from toolbus.errors import InvalidRequest
from toolbus.parts.mcp.client.files import ConfiguredMounts
from toolbus.parts.mcp.features import features_of
from toolbus.parts.mcp.settings import LOGIN_PATH, McpConfig
from toolbus.parts.pins import pins
from toolbus.protocol.tool import HINTS
from toolbus.sdk import ToolScope, llm_tool

if TYPE_CHECKING:
    from toolbus.parts.mcp.client.entries import MountEntry
    from toolbus.parts.mcp.client.files import MountsFollower
    from toolbus.parts.mcp.client.mount import Mount
    from toolbus.parts.mcp.client.mounts import Mounts
    from toolbus.parts.mcp.client.offer import MountManifest
    from toolbus.parts.mcp.client.user_logins import User

log = logging.getLogger("toolbus.mounts")


class McpClientRoom(Room):
    """The mounted MCP servers of one bus."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.mounts: Mounts | None = None  # None until the first mount
        self.configured: ConfiguredMounts | None = None  # the content of the files; None where none can exist
        self._tools = MountTools(core.audit)
        self._features = features_of(core)  # what the endpoint for clients shows, or these where it is missing
        self._follower: MountsFollower | None = None  # None where no file can exist
        self._following: asyncio.Task[None] | None = None  # None until started
        self._working: set[asyncio.Task[None]] = set()  # each revokes logins, or reviews a mount again

    def provides(self) -> Iterable[object]:
        """Returns what approves changes of the servers, their features, and their output."""
        own = (self._tools, self._features)
        return own if self.mounts is None else (*own, self.mounts.output)

    def tools(self) -> Iterable[Callable[..., Any]]:
        return self._tools.tools()

    async def open(self) -> None:
        """Reads the files.

        Raises:
            SetupError: the named one, or that of secrets, cannot be read.
        """
        config, mounting = self.core.config, self.core.config.part(McpConfig)
        if config.data_dir is None and mounting.mcp_servers is None:
            return
        from toolbus.parts.mcp.client.files import FILE, MountsFollower, variables_for

        own = config.data_dir / FILE if config.data_dir is not None else None
        self._tools.file = "" if own is None else str(own)
        self._follower = MountsFollower(own, mounting.mcp_servers, variables_for(mounting.mcp_secrets, os.environ))
        self.configured = self._follower.read_first()
        self.core.rooms.web.add(LOGIN_PATH, self._serve_login)
        self.core.sessions.doorman.on_refresh.append(self._keys_changed)

    async def start(self) -> None:
        """Offers the known tools of the servers, starts unknown servers, and follows the files from now on."""
        if self._follower is None or self.configured is None:
            return
        await self._apply(self.configured)
        self._keys_changed(Changed(server=True))  # keys may have been revoked since the last start
        self._following = asyncio.create_task(self._follow(self._follower), name="files of mounts")

    async def stop(self) -> None:
        """Ends every server and its processes."""
        tasks = [*filter(None, (self._following,)), *self._working]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.mounts is not None:
            await self.mounts.stop()

    def serving(self, source: str) -> bool | None:
        """Tells whether a mount can be called; None for another source."""
        return self.mounts.serving(source) if self.mounts is not None else None

    def sources(self) -> Iterable[str]:
        return [mount.name for mount in self.mounts] if self.mounts is not None else []

    def _why_absent(self, source: str) -> str:
        """Returns why a mount offers nothing, as the end of a sentence; "" for one that runs, and for other sources."""
        for mount in self.mounts or ():
            if mount.name == source and mount.state.value not in ("live", "degraded"):
                why = shorten(clean_line(mount.reason or mount.last_error), 300)
                return f": the mount {source} is {mount.state.value}{f' ({why})' if why else ''}, see `toolbus mounts`"
        refused = self.configured.refused.get(source) if self.configured is not None else None
        return "" if refused is None else f": the mount {source} is refused: {shorten(clean_line(refused), 300)}"

    async def _follow(self, follower: MountsFollower) -> None:
        async for configured in follower.follow():
            try:
                await self._apply(configured)
            except Exception:  # the next change may be better
                log.exception("a fault of the bus: the changed mounts were not started")

    async def _apply(self, configured: ConfiguredMounts) -> None:
        self.configured = self._tools.configured = configured
        for text in (*configured.notices, *configured.refused.values(), *configured.errors.values()):
            log.warning("%s", clean_line(text))
        if self.mounts is None:
            if not configured.entries:
                return
            self.core.calls.dispatcher.seams.why_absent = self._why_absent
            self.mounts = self._open_mounts()
        await self.mounts.apply(configured.entries)

    def _approved_elsewhere(self, source: str) -> None:
        mount = self.mounts.get(source) if self.mounts is not None else None
        if mount is not None:
            self._start(mount.review_again())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="mounts")
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    def _open_mounts(self) -> Mounts:
        from toolbus.parts.mcp.client.authorization import LoginKeeper
        from toolbus.parts.mcp.client.mounts import Mounts, open_remote
        from toolbus.parts.mcp.client.offer import MountManifest
        from toolbus.parts.mcp.client.user_logins import UserLogins

        manifest = MountManifest(self.core.program.store, self._approved_elsewhere)
        data_dir = self.core.config.data_dir
        logins, keeper = UserLogins(data_dir, self._base), self.core.rooms.provider(LoginKeeper)
        mounts = Mounts(self.core, manifest, partial(open_remote, data_dir, keeper=keeper), logins=logins)
        self._tools.follow(mounts, manifest)
        return mounts

    # -- logins of users ----------------------------------------------------------------------------------------------

    def _base(self) -> str:
        """Returns the address of the bus for browsers; "" where it serves no HTTP."""
        gateway = self.core.rooms.find(GatewayRoom)
        local = gateway.address if gateway is not None else None
        return self.core.config.part(McpConfig).mcp.login_url or (f"http://{local}" if local else "")

    async def _serve_login(self, scope: Message, receive: Receive, send: Send) -> None:
        if self.mounts is not None:
            await self.mounts.logins.serve(scope, receive, send)

    def _keys_changed(self, changed: Changed) -> None:
        if self.mounts is not None and changed:
            self._start(self._revoke(self.mounts))

    async def _revoke(self, mounts: Mounts) -> None:
        """Ends the logins of identities that no key proves any more."""
        from toolbus.parts.mcp.client.user_logins import User

        for row in await asyncio.to_thread(mounts.logins.kept):
            user = User(row["account"], row["user"])
            if user.identity and not self._is_in_force(user.identity):
                await mounts.log_out(row["mount"], user)
                self.core.audit.record("revoke", target=row["mount"], why=f"{user.shown} was revoked")
                log.info("mount %s: the login of %s ended with its identity", row["mount"], user.shown)

    def _is_in_force(self, identity: str) -> bool:
        """Tells whether an identity exists, and has a key that was not revoked; JWTs have none here."""
        keyring = self.core.sessions.keyring
        template = identity.partition("/")[0].partition("@")[0]
        if keyring is None:  # so nobody proves an identity now
            return True
        if template not in keyring.identities:
            return False
        return "/" in identity or any(key.identity == identity and not key.revoked for key in keyring.keys.values())


# -- the operators' tools ----------------------------------------------------------------------------------------------

_TOOL = pins.tool_subject("")


class MountTools:
    """The operators' tools for the mounts of one bus.

    Attributes:
        configured: the content of the files of mounts.
        file: the one that `toolbus mounts add` writes; "" if the bus has no data directory.
    """

    def __init__(self, audit: Audit) -> None:
        self.configured = ConfiguredMounts()
        self.file = ""
        self._audit = audit
        self._mounts: Mounts | None = None  # None before the first mount
        self._manifest: MountManifest | None = None  # stores approvals; None before the first mount

    def follow(self, mounts: Mounts, manifest: MountManifest) -> None:
        """Takes the mounts of the bus."""
        self._mounts, self._manifest = mounts, manifest

    def tools(self) -> list[Callable[..., Any]]:
        return [self.show_mounts, self.mount_restart, self.mount_logs, self.mount_logins, self.mount_login]

    @llm_tool(
        name="mounts",
        description="Shows the mounted MCP servers and buses: state with reason and how to fix it, tools, process, "
        "changes that wait for an approval.",
        read_only=True,
    )
    def show_mounts(self, name: str = "") -> dict[str, Any]:
        """Shows mounts. Runs on a thread, since it takes milliseconds to read the memory of processes.

        Args:
            name: of one mount, to show it with its tools; "" for all.
        """
        configured = self.configured
        shown = [self._find(name)] if name and name not in configured.refused else list(self._mounts or ())
        return {
            "file": self.file,
            "mounts": [self._described(each, details=bool(name)) for each in shown if name in ("", each.name)],
            "disabled": [entry.name for entry in configured.entries.values() if entry.disabled],
            "refused": dict(configured.refused),
            "notices": list(configured.notices),
            "errors": dict(configured.errors),
        }

    def explain(self, entry: Entry) -> Iterable[tuple[str, bool | None, str]]:
        """Yields which bus decides about calls of a mounted bus's tool, and whether it answers."""
        mount = self._mounts.get(entry.source) if self._mounts is not None else None
        if mount is not None and mount.entry.bus:
            theirs = mount.offer.declared.server_names.get(entry.bare_name, entry.bare_name)
            state = mount.reason if mount.state.value == "offline" else mount.state.value
            how = f"`toolbus access explain {theirs} --bus {mount.entry.bus}` says what"
            yield "other bus", None, f"{state}; it decides too: {how}"

    # -- approvals ---------------------------------------------------------------------------------------------------

    def approvable(self) -> Iterable[str]:
        return [each.name for each in self._mounts or ()]

    def known(self, source: str) -> Mapping[str, pins.Pinned] | None:
        """Returns the fingerprints of a mount; None if it does not exist."""
        mount = self._mounts.get(source) if self._mounts is not None else None
        if mount is None or self._manifest is None:
            return None
        return self._manifest.fingerprints(mount.entry.name, mount.entry.command_digest)

    async def approve(self, source: str, subjects: Collection[str]) -> None:
        """Approves the pending changes of some subjects of a mount, and offers them."""
        mount, manifest = self._find(source), self._manifest
        assert manifest is not None  # there is a mount
        entry = mount.entry
        known = await asyncio.to_thread(manifest.fingerprints, entry.name, entry.command_digest)
        approved = pins.approve(known, subjects)
        await asyncio.to_thread(manifest.save_fingerprints, entry.name, entry.command_digest, approved)
        await mount.review_again()

    def tool_of(self, subject: str) -> str:
        """Returns a tool's name on the bus; "" for other subjects."""
        from toolbus.parts.mcp.client.offer import our_name

        return our_name(subject.removeprefix(_TOOL)) if subject.startswith(_TOOL) else ""

    # -- the tools ---------------------------------------------------------------------------------------------------

    @llm_tool(description="Restarts a mounted MCP server, also one that was given up.")
    async def mount_restart(self, scope: ToolScope, name: str) -> dict[str, Any]:
        """Restarts a mount; its calls in flight end."""
        mount = self._find(name)
        with self._audit.operation("mount.restart", principal_of(scope), target=name):
            mount.restart()
        return {"name": name, "restarted": True}

    @llm_tool(description="Shows the newest lines of the log of a mounted MCP server.", read_only=True)
    async def mount_logs(self, name: str) -> dict[str, Any]:
        """Shows lines of the server's standard error."""
        return {"name": name, "lines": self._find(name).log_lines}

    @llm_tool(description="Lists the logins of users at mounted MCP servers, or ends some of them.")
    async def mount_logins(
        self, scope: ToolScope, name: str = "", end: bool = False, account: str = "", user: str = ""
    ) -> dict[str, Any]:
        """Lists logins: whose they are and since when, never a token.

        Args:
            name: of a mount; "" for all.
            end: ends those that are listed, and the users' servers.
            account: only those of this account, such as `identity chat/ann`.
            user: only those of this user.
        """
        mounts = self._mounts
        rows = await asyncio.to_thread(mounts.logins.kept) if mounts is not None else []
        wanted = {"mount": name, "account": account, "user": user}
        rows = [row for row in rows if all(row[key] == value for key, value in wanted.items() if value)]
        if end and mounts is not None:
            if not any(wanted.values()):
                raise InvalidRequest("no login is ended without a choice: name a mount, an account or a user")
            for row in rows:
                with self._audit.operation("revoke", principal_of(scope), target=row["mount"]):
                    await mounts.log_out(row["mount"], _user(row["account"], row["user"]))
        return {"logins": rows, "ended": end}

    @llm_tool(
        description="Shows whether you are logged in at a mounted MCP server where each user has a login, gives the "
        "link to log in, or ends your login."
    )
    async def mount_login(self, scope: ToolScope, name: str, action: str = "show") -> dict[str, Any]:
        """Handles the login of the caller's own user.

        Args:
            name: of the mount.
            action: `show`, `begin` or `end`.
        """
        mount, mounts = self._find(name), self._mounts
        user = _user(principal_of(scope).account, scope.context.user_id)
        if not mount.entry.is_per_user or mounts is None:
            raise InvalidRequest(f"mount {name} has no logins of users: its calls need none")
        if action == "end":
            return {"mount": name, "logged_in": False, "ended": await mounts.log_out(name, user)}
        rows = await asyncio.to_thread(mounts.logins.kept)
        own = (name, user.account, user.id)
        logged_in = any(row["token"] for row in rows if (row["mount"], row["account"], row["user"]) == own)
        if action == "begin" and not logged_in and mount.entry.is_remote and not mount.entry.exchange_at:
            return {"mount": name, "logged_in": False, "link": await mounts.logins.begin(mount.entry, user)}
        if action not in ("show", "begin"):
            raise InvalidRequest(f"action is {quote(action)}: it must be show, begin or end")
        return {"mount": name, "logged_in": logged_in}

    def _find(self, name: str) -> Mount:
        mount = self._mounts.get(name) if self._mounts is not None else None
        if mount is not None:
            return mount
        if name in self.configured.refused:
            raise InvalidRequest(f"mount {name} is refused: {self.configured.refused[name]}")
        if entry := self.configured.entries.get(name):
            raise InvalidRequest(f'mount {name} is disabled: remove "disabled" from {entry.origin}')
        names = list_names(each.name for each in self._mounts or ())
        raise InvalidRequest(f"there is no mount {quote(name)}; there are {names}")

    def _described(self, mount: Mount, *, details: bool) -> dict[str, Any]:
        status, entry = mount.status(), mount.entry
        shown = dataclasses.asdict(status)
        left = [{"name": each.name, "reason": each.reason} for each in status.left]
        shown |= {"state": status.state.value, "left": left, "pin": entry.pin, "origin": entry.origin}
        shown |= {"target": _target(entry), "notices": {name: list(each) for name, each in status.notices.items()}}
        if details and self._manifest is not None:
            known = self._manifest.fingerprints(entry.name, entry.command_digest)
            shown["declared"] = [_tool(mount, item.tool.name, known) for item in mount.offer.declared.compiled]
        return shown


def _user(account: str, id: str) -> User:
    from toolbus.parts.mcp.client.user_logins import User

    return User(account, id)


def _tool(mount: Mount, name: str, known: dict[str, pins.Pinned]) -> dict[str, Any]:
    declared = mount.offer.declared
    tool = next(each for each in declared.tools if each.name == name)
    pinned = known.get(pins.tool_subject(declared.server_names[name]), pins.Pinned())
    return {
        "name": name,
        "title": tool.display_name,
        "description": tool.description,
        "hints": {hint: value for hint in HINTS if (value := getattr(tool.annotations, hint)) is not None},
        "fingerprint": pinned.fingerprint,
        "changed": bool(pinned.pending),
    }


def _target(entry: MountEntry) -> str:
    """Returns the command or URL of a server, without arguments and query, which may be secret; a bus's address."""
    if not entry.url:
        return entry.command or entry.bus
    parts = urlsplit(entry.url)
    return f"{parts.scheme}://{parts.netloc}{parts.path}"
