"""Posts calls and challenges to callback URLs, over the keep-alive connections of one aiohttp session.

`Callbacks` loads this module when the first tool has a callback URL: aiohttp takes a tenth of a second and 10 MB.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
from yarl import URL

from toolbus.bus.gateway import callback_proof
from toolbus.bus.gateway.callback_faults import ExchangeFault, NotConnected, NotHttp
from toolbus.bus.gateway.callback_handler import CallbackHandler
from toolbus.bus.gateway.callback_messages import LARGE_BODY
from toolbus.bus.gateway.callback_request import CallbackRequest, CallbackResponse
from toolbus.bus.outbound import open_session

Pace = Callable[[int], Awaitable[None]]
_OUT_OF_SOCKETS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL}  # this process's fault
_FAULTS = (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, OSError, asyncio.IncompleteReadError)


class CallbackClient:
    """The HTTP client of the callback tools of one bus; belongs to the running loop.

    Args:
        may_serve: as in `open_session`.
    """

    def __init__(self, may_serve: Callable[[int], bool]) -> None:
        # REST-41: no cap below the calls in flight; the time limit is the dispatcher's.
        self._session = open_session(connections=0, seconds=None, content_type="application/json", may_serve=may_serve)

    async def close(self) -> None:
        """Closes every connection."""
        await self._session.close()

    async def post(self, handler: CallbackHandler, body: bytes, headers: Mapping[str, str]) -> CallbackResponse:
        """Posts the body of a call to a tool's URL and returns the response, which the caller releases.

        Raises:
            ExchangeFault: no response came.
        """
        if handler.request is None:
            handler.request = CallbackRequest(self._session, _url(handler), handler.headers)
        try:
            return await handler.request.send(self._session, body, headers)
        except _FAULTS as error:
            raise _fault(error) from error

    async def read(self, response: CallbackResponse, limit: int, pace: Pace) -> bytes | None:
        """Returns a body; None where it is larger than the limit.

        Args:
            pace: waits before more of a large body is read, given how many bytes have come.

        Raises:
            ExchangeFault: the connection broke.
        """
        try:
            return await _read(response.content, limit, pace)
        except _FAULTS as error:
            raise _fault(error) from error

    async def challenge(self, handler: CallbackHandler, nonce: str) -> str:
        """Returns what the program at a tool's URL answers to a challenge; sends neither arguments nor credentials.

        Raises:
            ExchangeFault: it did not answer.
        """
        headers = {callback_proof.CHALLENGE: nonce}
        try:
            async with self._session.get(_url(handler), headers=headers, allow_redirects=False) as response:
                return response.headers.get(callback_proof.PROOF, "")
        except _FAULTS as error:
            raise _fault(error) from error


def _url(handler: CallbackHandler) -> URL:
    return URL(handler.target.url, encoded=True)  # as it was registered: parsing it anew would requote it


async def _read(content: aiohttp.StreamReader, limit: int, pace: Pace) -> bytes | None:
    if content.is_eof():  # a small body arrives with its headers, and reading it in chunks takes longer
        body = content.read_nowait()
        return body if len(body) <= limit else None
    chunks: list[bytes] = []
    size = 0
    async for chunk in content.iter_any():
        size += len(chunk)
        if size > limit:
            return None
        chunks.append(chunk)
        if size > LARGE_BODY:
            await pace(len(chunk))
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _fault(error: BaseException) -> ExchangeFault:
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        reason = os.strerror(cause.errno) if cause.errno else cause.strerror or str(cause) or type(cause).__name__
        untrusted = isinstance(error, aiohttp.ClientSSLError)
        return NotConnected(reason, out_of_sockets=error.errno in _OUT_OF_SOCKETS, untrusted=untrusted)
    if isinstance(error, aiohttp.http_exceptions.HttpProcessingError):
        return NotHttp(" ".join(error.message.split()).rstrip(" ^")[:200])  # it has several lines, with a caret below
    return ExchangeFault(_why_broken(error))


def _why_broken(error: BaseException) -> str:
    if isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str):
        return "Server disconnected within the headers"  # the message is what aiohttp has parsed of them
    cause = error.__cause__
    if isinstance(error, aiohttp.ClientPayloadError) and isinstance(cause, aiohttp.http_exceptions.HttpProcessingError):
        return cause.message.rstrip(".")  # without the repr, and the status 400, which nobody has sent
    return str(error) or type(error).__name__
