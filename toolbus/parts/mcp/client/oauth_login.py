"""Logs a user in at an MCP server, for `toolbus mount --login`: opens the browser and waits for the user."""

from __future__ import annotations

import asyncio
import logging
import webbrowser
from collections.abc import Callable
from pathlib import Path

import aiohttp

from toolbus.errors import SetupError
from toolbus.parts.mcp.client.authorization import EXTRA, has_extra
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
    # The command has its own process, so the SDK may be loaded here; it takes a second.
    from toolbus.parts.mcp.client.oauth_program import ERRORS, TokenRequest, failure_of, get_token

    async def agree(page: str) -> None:
        if page.startswith(("https://", "http://")) and page.isprintable():
            show(f"Agree in the browser; if none opens, visit\n  {page}")
            await asyncio.to_thread(open_browser, page)

    disabled = logging.root.manager.disable
    logging.disable()  # the SDK's log could contain tokens
    try:
        await get_token(TokenRequest(url, token_path(directory, name), challenge, client=client), agree)
    except ERRORS as error:
        raise SetupError(f"the login at {url} failed: {failure_of(error)}") from None
    finally:
        logging.disable(disabled)
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
