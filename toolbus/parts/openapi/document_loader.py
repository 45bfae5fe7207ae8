"""Gets a document: from a URL, a file or a mapping."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urlsplit

from toolbus.common.text import quote
from toolbus.errors import SetupError
from toolbus.parts.openapi.api_client import ApiClient, ApiUnreachable
from toolbus.parts.openapi.api_request import ApiRequest
from toolbus.parts.openapi.api_settings import check_url
from toolbus.parts.openapi.document import MAX_BYTES, Document, read_document
from toolbus.protocol.tool import SOURCE

DOCUMENT_SECONDS = 20.0  # for a document to arrive


def load_document(document: str | Path | Mapping[str, Any]) -> Document:
    """Returns a document from its URL, its file or its mapping.

    Raises:
        SetupError: it cannot be read.
        ApiUnreachable: the server of the URL gave no answer.
    """
    if url := url_of(document):
        return _run_in_thread(url)
    if isinstance(document, Mapping):
        return read_document(document)
    path = Path(document).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SetupError(f"{path} has more than {MAX_BYTES} bytes: shorten the document")
        return read_document(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SetupError(f"{path}: {reason}: name a file, or a URL that begins with https://") from None


async def fetch_document(url: str) -> Document:
    """Returns the document of a URL.

    Raises:
        SetupError: it is not a document that can be used.
        ApiUnreachable: its server gave no answer, or answered that it is busy.
    """
    client = ApiClient(url, 1)
    try:
        response = await client.send(urldefrag(url)[0], ApiRequest("GET", ""), (), DOCUMENT_SECONDS, MAX_BYTES)
    finally:
        await client.close()
    if response.status >= 500 or response.status == 429:
        raise ApiUnreachable(f"{url} was answered with HTTP {response.status}")
    if response.is_cut:
        raise SetupError(f"{url} has more than {MAX_BYTES} bytes: shorten the document")
    if not 200 <= response.status < 300:
        place = urlsplit(response.headers.get("location", "")).netloc
        where = f", a redirect to {quote(place)}" if place else ""
        raise SetupError(f"{url} was answered with HTTP {response.status}{where}: name the document's own address")
    return read_document(response.body, url, response.url)


def url_of(document: object) -> str:
    """Returns a URL without its fragment; "" for a file or a mapping."""
    if not isinstance(document, str) or not document.lower().startswith(("http://", "https://")):
        return ""
    check_url(document, "the document's address")
    return urldefrag(document)[0]


def source_of_url(url: str) -> str:
    """Returns a source for the tools of a URL's document: its host, and the port that it names."""
    host = urlsplit(url).netloc.lower().strip("[]")
    return host if SOURCE.fullmatch(host) else "openapi"


def _run_in_thread(url: str) -> Document:
    """Fetches a document where a loop may be running already."""
    outcome: list[Document | BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(fetch_document(url)))
        except BaseException as problem:
            outcome.append(problem)

    thread = threading.Thread(target=run, name="toolbus-openapi", daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
