"""Has users log in at mounted servers in their browsers, and keeps what belongs to them until their login ends.

The page of a login is the bus's own: it names the user for whom somebody agrees, and a cookie makes sure that the
browser which comes back from the authorization server has seen it. OAuth runs in a helper process (`oauth.py`), which
writes the tokens into private files, one for each user; it ends with the last login that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import html
import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from toolbus.bus.access.identity import Principal
from toolbus.bus.calls.call import Call
from toolbus.bus.keys.private_files import make_directory
from toolbus.bus.web_paths import Message, Receive, Send, respond
from toolbus.common.text import clean_line, quote
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.authorization import (
    CLIENT_FILE,
    COMMAND,
    EXTRA,
    USERS_FOLDER,
    has_extra,
    query_field,
    read_document,
    start_helper,
    tokens_of,
    users_path,
    write_document,
)
from toolbus.parts.mcp.client.entries import MountEntry, OAuthClient
from toolbus.parts.mcp.client.transport import Challenge
from toolbus.parts.mcp.features import Requester
from toolbus.parts.mcp.settings import LOGIN_PATH

log = logging.getLogger("toolbus.mounts")

MAX_KEPT = 10_000  # of whom something is kept, of one mount
MAX_HELPERS = 2  # that renew tokens at the same time
MAX_PENDING = 100  # logins that wait at the same time
PAGE_SECONDS = 60.0  # for the authorization server's page to be found, and for its code to be exchanged
_COOKIE = "toolbus-login"
_OWN = "identity "  # how the account of an identity begins
_LINK = '<p><a href="?go=1">Go on to log in</a>'
_HTML = "<!doctype html><meta charset=utf-8><title>toolbus</title><p>{}"
_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


@dataclass(frozen=True, slots=True)
class User:
    """Whom a call is for.

    Attributes:
        account: of the caller that it comes from in the end: `Principal.account`.
        id: the user whom that caller names; "" where it names none.
    """

    account: str
    id: str = ""

    @classmethod
    def of(cls, call: Call) -> User:
        """Returns the user of a call; a nested one is for the user of the outermost."""
        return cls(call.root.caller.principal.account, call.context.user_id if call.context is not None else "")

    @classmethod
    def of_requester(cls, asker: Requester) -> User:
        """Returns the user of a request of an MCP client."""
        return cls(Principal(asker.source, identity=asker.identity).account, asker.user_id)

    @property
    def digest(self) -> str:
        """What names the user's files."""
        return hashlib.sha256(f"{self.account}\0{self.id}".encode("utf-8", "surrogatepass")).hexdigest()[:32]

    @property
    def identity(self) -> str:
        """The name of the identity that calls; "" for a program of this machine."""
        return self.account.removeprefix(_OWN) if self.account.startswith(_OWN) else ""

    @property
    def shown(self) -> str:
        """The user, for texts."""
        caller = f"identity {quote(self.identity)}" if self.identity else f"source {quote(self.account)}"
        return f"user {quote(self.id)} of {caller}" if self.id else caller


@dataclass(slots=True)
class PendingLogin:
    """A login that waits for its user.

    Attributes:
        ticket: names it in the link.
        path: of the user's tokens.
        page: of the authorization server; not done until the helper has found it.
        ended: done with why it failed; "" on success.
        cookie: of the browser that has seen the bus's page; "" before.
    """

    ticket: str
    mount: str
    user: User
    path: Path
    page: asyncio.Future[str]
    ended: asyncio.Future[str]
    cookie: str = ""

    @property
    def state(self) -> str:
        """The state with which the browser comes back."""
        is_known = self.page.done() and not self.page.cancelled() and self.page.exception() is None
        return query_field(self.page.result(), "state") if is_known else ""


GIVEN_UP = "the call that began it was given up"


class UserLogins:
    """The logins of the users of one bus.

    Args:
        directory: the data directory; None: the bus stores nothing, so no user can log in.
        base: returns the address of the bus for browsers; "" where it serves no HTTP.

    Attributes:
        command: of the helper.
        turns: of the helpers that renew tokens, each a process of some 50 MB.
    """

    def __init__(self, directory: Path | None, base: Callable[[], str]) -> None:
        self._directory = directory
        self._base = base
        self.command: Sequence[str] = COMMAND
        self.turns = asyncio.Semaphore(MAX_HELPERS)
        self._pending: dict[str, PendingLogin] = {}  # by ticket
        self._helper: asyncio.subprocess.Process | None = None  # None while no login waits
        self._starting = asyncio.Lock()
        self._reading: set[asyncio.Task[None]] = set()  # each reads what one helper writes

    def __repr__(self) -> str:
        return f"<UserLogins pending={self.pending}>"

    @property
    def pending(self) -> int:
        """How many logins wait."""
        return len(self._pending)

    # -- what is kept -------------------------------------------------------------------------------------------------

    def token_file(self, mount: str, user: User) -> Path:
        """Returns the file of a user's tokens.

        Raises:
            SetupError: the bus stores nothing.
        """
        if self._directory is None:
            raise SetupError("this bus stores nothing, so no user can log in: start it with a data directory")
        return users_path(self._directory, mount) / f"{user.digest}.json"

    def folder(self, mount: str, user: User) -> Path:
        """Returns the folder of a user's process, which is made if it does not exist.

        Raises:
            SetupError: the bus stores nothing, or the folder cannot be made.
        """
        file = self.token_file(mount, user)
        folder = file.with_suffix("")
        if not folder.exists():
            self._check_room(file)
            make_directory(file.parent)
            make_directory(folder)
            write_document(file, {"user": _about(user), **read_document(file)})
        return folder

    def kept(self) -> list[dict[str, Any]]:
        """Returns what is kept of each user: mount, account, user, since when, and whether there is a token."""
        rows: list[dict[str, Any]] = []
        root = None if self._directory is None else self._directory / USERS_FOLDER
        for file in sorted(root.glob("*/*.json")) if root is not None else ():
            try:
                document = read_document(file)
            except SetupError as error:
                log.warning("%s", clean_line(str(error)))
                continue
            about = document.get("user")
            if isinstance(about, dict) and {"account", "user", "since"} <= about.keys():
                rows.append({"mount": file.parent.name, **about, "token": tokens_of(document) is not None})
        return rows

    def forget(self, mount: str, user: User) -> bool:
        """Removes all that is kept of a user at a mount; tells whether anything was.

        Raises:
            SetupError: it cannot be removed.
        """
        self.cancel(mount, user)
        file = self.token_file(mount, user)
        had = file.exists()
        try:
            file.unlink(missing_ok=True)
            if file.with_suffix("").exists():
                shutil.rmtree(file.with_suffix(""))
        except OSError as error:
            raise SetupError(f"{error.filename} cannot be removed: {error.strerror}") from None
        return had

    def _check_room(self, file: Path) -> None:
        """Checks that one more user may have something at a mount: hosts choose the ids of users.

        Raises:
            SetupError: as many have something as may.
        """
        if not file.exists() and sum(1 for _ in file.parent.glob("*.json")) >= MAX_KEPT:
            mount = file.parent.name
            raise SetupError(f"{MAX_KEPT} users have logins at {mount}, which is the limit: end some of them")

    # -- a login ------------------------------------------------------------------------------------------------------

    async def begin(self, entry: MountEntry, user: User, challenge: Challenge | None = None) -> str:
        """Begins a login, unless one of the user waits already. Returns the link for the user.

        Args:
            challenge: the refusal of the server; None: it is asked for one.

        Raises:
            SetupError: no user can log in here now; the text says how to fix it.
        """
        pending = self._find(entry.name, user)
        if pending is None:
            pending = await self._start(entry, user, challenge)
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                await asyncio.shield(pending.page)
        except TimeoutError:
            self._end(pending, "the authorization server does not answer")
            why = "its authorization server does not answer"
            raise SetupError(f"the login at {entry.name} cannot begin: {why}") from None
        except SetupError:
            if pending.ended.result() != GIVEN_UP:
                raise
            return await self.begin(entry, user, challenge)
        return f"{self._base()}{LOGIN_PATH}/{pending.ticket}"

    async def ended(self, mount: str, user: User, seconds: float) -> None:
        """Waits until a login that waits has ended, for some seconds at most."""
        pending = self._find(mount, user)
        if pending is not None:
            await asyncio.wait((pending.ended,), timeout=max(0.0, seconds))

    def cancel(self, mount: str, user: User) -> None:
        """Ends a login that waits."""
        pending = self._find(mount, user)
        if pending is not None:
            self._tell({"id": pending.ticket})
            self._end(pending, "it was cancelled")

    async def close(self) -> None:
        """Ends all logins that wait, and the helper."""
        for pending in list(self._pending.values()):
            self._end(pending, "the bus stops")
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)

    def _find(self, mount: str, user: User) -> PendingLogin | None:
        return next((each for each in self._pending.values() if each.mount == mount and each.user == user), None)

    async def _start(self, entry: MountEntry, user: User, challenge: Challenge | None) -> PendingLogin:
        base, path, client = self._base(), self.token_file(entry.name, user), entry.oauth or OAuthClient()
        if not base:
            raise SetupError("this bus serves no HTTP, so no user can log in: set `http`, or `login_url` of [mcp]")
        if not has_extra():
            raise SetupError(f"logging in needs the extra {EXTRA}: run `pip install 'toolbus[{EXTRA}]'`")
        if len(self._pending) >= MAX_PENDING:
            raise SetupError(f"{MAX_PENDING} users log in at this moment, which is the limit: try again in a minute")
        self._check_room(path)
        loop = asyncio.get_running_loop()
        ticket = secrets.token_urlsafe(24)
        pending = PendingLogin(ticket, entry.name, user, path, loop.create_future(), loop.create_future())
        self._pending[ticket] = pending
        request = {
            "id": ticket, "url": entry.url, "path": str(path), "shared": str(path.with_name(CLIENT_FILE)),
            "client": [client.client_id, client.client_secret], "challenge": msgspec.to_builtins(challenge),
            "redirect_uri": f"{base}{LOGIN_PATH}/callback", "about": {"user": _about(user)},
        }  # fmt: skip
        try:
            async with self._starting:
                if self._helper is None:
                    self._helper = await start_helper(self.command)
                    task = asyncio.create_task(self._read(self._helper), name="logins of users")
                    self._reading.add(task)
                    task.add_done_callback(self._reading.discard)
        except OSError as error:
            self._end(pending, f"the helper does not start: {error.strerror}")
            return pending
        except asyncio.CancelledError:
            self._end(pending, GIVEN_UP)
            raise
        self._tell(request)
        return pending

    def _tell(self, message: Mapping[str, Any]) -> None:
        helper = self._helper
        if helper is not None and helper.stdin is not None:
            helper.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, helper: asyncio.subprocess.Process) -> None:
        """Takes what a helper writes, until it ends."""
        assert helper.stdout is not None  # it is a pipe
        try:
            while line := await helper.stdout.readline():
                with contextlib.suppress(ValueError):
                    self._take(json.loads(line))
        finally:
            if self._helper is helper:
                self._helper = None
                for pending in list(self._pending.values()):
                    self._end(pending, "the helper has ended: try again")
            with contextlib.suppress(ProcessLookupError):
                helper.kill()
            await helper.wait()

    def _take(self, message: Mapping[str, Any]) -> None:
        pending = self._pending.get(str(message.get("id")))
        if pending is None:
            return
        page = str(message.get("page", ""))
        if page.startswith(("https://", "http://")) and page.isascii() and page.isprintable():
            if not pending.page.done():
                pending.page.set_result(page)
        else:
            text = str(message.get("error") or ("" if message.get("done") else f"{quote(page)} is no page to log in"))
            self._end(pending, clean_line(text))

    def _end(self, pending: PendingLogin, why: str) -> None:
        if self._pending.pop(pending.ticket, None) is None:
            return
        if not pending.page.done():
            pending.page.set_exception(SetupError(f"the login at {pending.mount} cannot begin: {why}"))
            pending.page.exception()  # it is read by those who wait for it
        pending.ended.set_result(why)
        path = pending.path
        if why and path.exists() and not path.with_suffix("").exists() and tokens_of(read_document(path)) is None:
            path.unlink(missing_ok=True)  # it has only what the login began with
        log.info("mount %s: login of %s: %s", pending.mount, pending.user.shown, why or "done")
        if not self._pending and self._helper is not None and self._helper.stdin is not None:
            helper, self._helper = self._helper, None
            helper.stdin.close()  # type: ignore[union-attr]  # it ends

    # -- its pages ----------------------------------------------------------------------------------------------------

    async def serve(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers the requests of browsers."""
        name, query = scope["path"].removeprefix(f"{LOGIN_PATH}/"), scope["query_string"].decode("latin-1")
        fields = {name: values[0] for name, values in parse_qs(query).items()}
        headers, status = list(_HEADERS), 200
        if name == "callback":
            cookies = "; ".join(value.decode("latin-1") for key, value in scope["headers"] if key == b"cookie")
            status, text = await self._come_back(fields, cookies)
        elif (pending := self._pending.get(name)) is None or not pending.state:
            status, text = 404, "This login has ended, or never began. Call the tool again."
        elif "go" not in fields:
            text = html.escape(
                f"Log in at {pending.mount} for {pending.user.shown} of this bus. Everything that this user calls "
                "there will be done with the account that you choose. Go on only if this is you."
            )
            text += _LINK
        else:
            pending.cookie = pending.cookie or secrets.token_urlsafe(24)
            secure = "; Secure" if self._base().startswith("https:") else ""
            cookie = f"{_COOKIE}-{pending.ticket}={pending.cookie}; Path={LOGIN_PATH}; HttpOnly; SameSite=Lax{secure}"
            headers += [(b"set-cookie", cookie.encode()), (b"location", pending.page.result().encode())]
            status, text = 302, ""
        await respond(scope, send, status, _HTML.format(text).encode(), headers)

    async def _come_back(self, fields: Mapping[str, str], cookies: str) -> tuple[int, str]:
        """Takes the browser back from the authorization server. Returns the status and the text of the answer."""
        given = fields.get("state", "")
        pending = next((each for each in self._pending.values() if each.state and each.state == given), None)
        if pending is None:
            return 404, "This login has ended, or never began. Call the tool again."
        if not pending.cookie or f"{_COOKIE}-{pending.ticket}={pending.cookie}" not in cookies.split("; "):
            return 403, "This browser has not begun this login: open the link that the tool gave."
        self._tell({"id": pending.ticket, "answer": dict(fields)})
        await asyncio.wait((pending.ended,), timeout=PAGE_SECONDS)
        why = pending.ended.result() if pending.ended.done() else "the authorization server does not answer"
        return (502, html.escape(f"The login failed: {why}")) if why else (200, "You are logged in. Close this page.")


def _about(user: User) -> dict[str, Any]:
    return {"account": user.account, "user": user.id, "since": time.time()}
