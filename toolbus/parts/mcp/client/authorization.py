"""Provides the token of a mount, and has a helper process renew it: early, and whenever the server refuses it.

The bus only reads the token from the file of the mount. OAuth itself is in `oauth.py`, which loads the official SDK (a
second, 38 MB): a helper runs it for a moment, and so does the command of a login.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import parse_qs, urlsplit

import msgspec

from toolbus.bus.keys.private_files import Stamp, make_directory, read_private, stamp_of, write_private
from toolbus.common.text import clean_line, quote
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.http_link import origin_of
from toolbus.parts.mcp.client.transport import Challenge, NeedsLogin
from toolbus.processes.child_environment import NEVER_PASSED_ON

log = logging.getLogger("toolbus.mounts")

EARLY_SECONDS = 60.0  # a token is renewed so long before it expires
HELPER_SECONDS = 90.0
RETRY_SECONDS = 60.0  # between attempts to renew early
COMMAND = (sys.executable, "-m", "toolbus.parts.mcp.client.oauth")
EXTRA = "mcp-oauth"


def has_extra() -> bool:
    """Tells whether the packages of the extra are installed, without importing them."""
    return importlib.util.find_spec("mcp") is not None and importlib.util.find_spec("httpx2") is not None


def login_command(name: str, url: str) -> str:
    """Returns the command with which a user logs in."""
    install = "" if has_extra() else f"`pip install 'toolbus[{EXTRA}]'` and "
    return f"run {install}`toolbus mounts add {name} --url {url} --login`"


@runtime_checkable
class LoginKeeper(Protocol):
    """Has the logins of several buses in common."""

    def exclusive(self, path: Path) -> AbstractAsyncContextManager[None]:
        """Lets one bus at a time renew the token of a file, with what the one before it wrote."""


class TokenAuthorization:
    """The token of one mount.

    Args:
        path: of the file of its tokens.
        how: what to do where a user has to log in, as the end of a sentence.
        keeper: where several buses have the login in common; None: this one has it alone.
        command: of the helper.
        turns: held while a helper runs, where several tokens share a few; None: it is the only one.
        clock: returns the time in seconds since the epoch.
    """

    def __init__(
        self,
        name: str,
        url: str,
        path: Path,
        how: str = "",
        *,
        keeper: LoginKeeper | None = None,
        command: Sequence[str] = COMMAND,
        clock: Callable[[], float] = time.time,
        turns: asyncio.Semaphore | None = None,
    ) -> None:
        self._name = name
        self._url = url
        self._path = path
        self._how = how or login_command(name, url)
        self._keeper = keeper
        self._command = command
        self._clock = clock
        self._stamp: Stamp = None  # of the file when it was last read
        self._tokens: Tokens | None = None  # None if there is no file with tokens for this server
        self._turns = turns or asyncio.Semaphore(1)
        self._renewing = asyncio.Lock()
        self._early: asyncio.Task[None] | None = None  # renews before the token expires
        self._early_at = 0.0  # when it was started, by the clock

    def __repr__(self) -> str:
        return f"<TokenAuthorization {self._name} {'token' if self._tokens else 'no token'}>"

    async def header(self) -> str:
        """Returns the Authorization header, and starts a renewal if the token expires soon."""
        self._read()
        tokens = self._tokens
        if tokens is None or not tokens.access:
            return ""
        now = self._clock()
        if tokens.can_refresh and 0 < tokens.expires_at < now + EARLY_SECONDS and now >= self._early_at + RETRY_SECONDS:
            self._early_at = now
            self._early = asyncio.create_task(self._renew_early(f"Bearer {tokens.access}"))
        return f"Bearer {tokens.access}"

    async def renew(self, challenge: Challenge) -> bool:
        """Gets another token after a refusal; False if the refusal does not ask for one.

        Raises:
            NeedsLogin: a user has to log in.
        """
        if challenge.status == 403 and not any(
            name.lower() == "www-authenticate" and "insufficient_scope" in value for name, value in challenge.headers
        ):
            return False
        alone = contextlib.nullcontext() if self._keeper is None else self._keeper.exclusive(self._path)
        async with self._renewing, alone:
            header = await self.header()
            if header and header != challenge.used:
                return True
            if self._tokens is None:
                raise NeedsLogin(f"server {self._name!r} requires a login: {self._how}", challenge)
            async with self._turns:
                error = await self._run(challenge)
            if not error and await self.header() in ("", challenge.used):
                error = "the helper did not get another token"
            if error:
                log.warning("%s: no new token: %s", self._name, error)
                raise NeedsLogin(f"server {self._name!r} requires a new login ({error}): {self._how}", challenge)
        return True

    async def close(self) -> None:
        """Ends an early renewal."""
        if self._early is not None:
            self._early.cancel()
            await asyncio.gather(self._early, return_exceptions=True)

    async def _renew_early(self, used: str) -> None:
        with contextlib.suppress(NeedsLogin):  # `renew` has logged it, and the token is still valid
            await self.renew(Challenge(401, (), b"", used))

    def _read(self) -> None:
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            tokens = tokens_of(read_document(self._path))
        except SetupError as error:
            log.warning("%s: its tokens are not used: %s", self._name, error)
            tokens = None
        # Tokens are sent only to the server that they were issued for: the configured URL may have changed.
        self._tokens = tokens if tokens is not None and origin_of(tokens.url) == origin_of(self._url) else None

    async def _run(self, challenge: Challenge) -> str:
        """Runs the helper. Returns why it failed; "" on success."""
        if not has_extra():
            return f"the extra {EXTRA} is not installed"
        refusal = msgspec.to_builtins(challenge)
        request = json.dumps({"url": self._url, "path": str(self._path), "challenge": refusal}).encode() + b"\n"
        process = await start_helper(self._command)
        try:
            async with asyncio.timeout(HELPER_SECONDS):
                output, _ = await process.communicate(request)
        except TimeoutError:
            return f"no answer within {HELPER_SECONDS:.0f} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return _outcome_of(output)


async def start_helper(command: Sequence[str] = COMMAND) -> asyncio.subprocess.Process:
    """Starts a helper, which takes requests as lines of JSON and answers each with lines."""
    environment = {name: value for name, value in os.environ.items() if name not in NEVER_PASSED_ON}
    # -P: nothing is imported from the bus's current directory.
    return await asyncio.create_subprocess_exec(
        command[0], "-P", *command[1:],
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )  # fmt: skip


def _outcome_of(output: bytes) -> str:
    """Returns the error in the helper's last line; "" if it succeeded."""
    lines = output.decode("utf-8", "replace").splitlines()
    try:
        message = json.loads(lines[-1]) if lines else {}
    except ValueError:
        message = {}
    if isinstance(message, dict) and message.get("done"):
        return ""
    error = message.get("error") if isinstance(message, dict) else None
    return clean_line(error) if isinstance(error, str) else f"the helper ended with {quote(lines[-1] if lines else '')}"


# -- token files: private, one for each mount --------------------------------------------------------------------------

FOLDER = "mcp-tokens"  # in the data directory
USERS_FOLDER = "mcp-users"  # in the data directory; in it one for each mount
CLIENT_FILE = "client.json"  # beside the files of users: as which client the bus is registered for them


@dataclass(frozen=True, slots=True)
class Tokens:
    """The parts of a file that the bus uses.

    Attributes:
        url: of the server that the tokens are for.
        access: the current token; "" without one.
        expires_at: in seconds since the epoch; 0 if unknown.
        can_refresh: whether a new token needs no user.
    """

    url: str
    access: str
    expires_at: float
    can_refresh: bool


def token_path(directory: Path, name: str) -> Path:
    """Returns the path of a mount's tokens in a data directory."""
    return directory / FOLDER / f"{name}.json"


def users_path(directory: Path, name: str) -> Path:
    """Returns the folder of what belongs to the users of a mount."""
    return directory / USERS_FOLDER / name


def query_field(url: str, field: str) -> str:
    """Returns the first value of a field in a URL's query; "" for none."""
    return parse_qs(urlsplit(url).query).get(field, [""])[0]


def read_document(path: Path) -> dict[str, Any]:
    """Returns the content of a file; empty if it does not exist or has another form.

    Raises:
        SetupError: another user can read it, or owns it.
    """
    if not path.exists():
        return {}
    content, _ = read_private(path)
    try:
        document = json.loads(content)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Replaces a file.

    Raises:
        SetupError: it cannot be written.
    """
    make_directory(path.parent)
    write_private(path, json.dumps(document, indent=1).encode())


def tokens_of(document: Mapping[str, Any]) -> Tokens | None:
    """Returns the tokens of a file; None if it has none."""
    tokens, url = document.get("tokens"), document.get("url")
    if not isinstance(tokens, dict) or not isinstance(url, str):
        return None
    access, expires_at = tokens.get("access_token"), document.get("expires_at")
    return Tokens(
        url,
        access if isinstance(access, str) and access.isascii() and access.isprintable() else "",
        float(expires_at) if isinstance(expires_at, (int, float)) else 0.0,
        bool(tokens.get("refresh_token")),
    )


def remove_tokens(directory: Path, name: str) -> None:
    """Removes the tokens of a mount, and what belongs to its users, if it has any.

    Raises:
        SetupError: it cannot be removed.
    """
    try:
        token_path(directory, name).unlink(missing_ok=True)
        if users_path(directory, name).exists():
            shutil.rmtree(users_path(directory, name))
    except OSError as error:
        raise SetupError(f"{error.filename} cannot be removed: {error.strerror}") from None
