"""Logs a user in at an MCP server, for `toolbus mount --login`: opens the browser and waits for the helper."""

from __future__ import annotations

import asyncio
import json
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from toolbus.errors import SetupError
from toolbus.parts.mcp.client.authorization import (
    COMMAND,
    EXTRA,
    has_extra,
    helper_environment,
    helper_request,
    outcome_of,
)
from toolbus.parts.mcp.client.http_link import MAX_ERROR_BYTES, Challenge, read_body
from toolbus.parts.mcp.client.http_session import open_session
from toolbus.parts.mcp.client.token_file import token_path
from toolbus.parts.mcp.messages import eras, headers, jsonrpc

ANSWER_SECONDS = 20.0  # for the server's first answer


def login(
    directory: Path,
    name: str,
    url: str,
    *,
    show: Callable[[str], object] = print,
    open_browser: Callable[[str], object] = webbrowser.open,
    client: tuple[str, str] = ("", ""),
) -> bool:
    """Logs in, and writes the tokens into the data directory, where the bus finds them.

    Args:
        directory: the data directory.
        show: prints a text for the user.
        client: id and secret of a client that was registered by hand; "" if the server registers one itself.

    Returns:
        False if the server requires no login; nothing was done then.

    Raises:
        SetupError: the login failed; the text says how to fix it.
    """
    if not has_extra():
        raise SetupError(f"logging in needs the extra {EXTRA}: run `pip install 'toolbus[{EXTRA}]'`")
    return asyncio.run(_login(directory, name, url, show, open_browser, client))


async def _login(
    directory: Path,
    name: str,
    url: str,
    show: Callable[[str], object],
    open_browser: Callable[[str], object],
    client: tuple[str, str],
) -> bool:
    challenge = await _challenge_of(url)
    if challenge is None:
        return False
    more: dict[str, Any] = {"interactive": True, "client_id": client[0], "client_secret": client[1]}
    request = helper_request(name, url, token_path(directory, name), challenge, **more)
    process = await asyncio.create_subprocess_exec(
        *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=helper_environment()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    last = b""
    try:
        process.stdin.write(request)
        await process.stdin.drain()
        process.stdin.close()
        async for line in process.stdout:
            last = line
            page = _page_of(line)
            if page:
                show(f"Agree in the browser; if none opens, visit\n  {page}")
                await asyncio.to_thread(open_browser, page)
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    error = outcome_of(last)
    if error:
        raise SetupError(f"the login at {url} failed: {error}")
    return True


async def _challenge_of(url: str) -> Challenge | None:
    """Returns the refusal of a server that requires a login; None if it requires none.

    Raises:
        SetupError: the server does not answer.
    """
    written = {
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        headers.VERSION: eras.NEWEST,
        headers.METHOD: "server/discover",
    }
    message = jsonrpc.request(1, "server/discover", {"_meta": {eras.META_VERSION: eras.NEWEST}})
    try:
        async with (
            asyncio.timeout(ANSWER_SECONDS),
            open_session([url]) as session,
            session.post(url, data=message, headers=written, allow_redirects=False) as response,
        ):
            if response.status not in (401, 403):
                return None
            body = await read_body(response, MAX_ERROR_BYTES)
            return Challenge(response.status, tuple(response.headers.items()), body, "", eras.NEWEST)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise SetupError(
            f"{url} does not answer ({str(error) or 'in time'}): correct the url, or try again later"
        ) from None


def _page_of(line: bytes) -> str:
    try:
        message = json.loads(line)
    except ValueError:
        return ""
    page = str(message.get("open", "")) if isinstance(message, dict) else ""
    return page if page.startswith(("https://", "http://")) and page.isprintable() else ""
