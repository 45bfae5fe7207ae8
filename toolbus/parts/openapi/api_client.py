"""Sends requests with httpx: one origin, no cookies, no redirects to elsewhere, bodies and times bounded.

It uses httpx's transport, not its client: a client logs each URL, which may hold a key, and follows each redirect.
Closing a call closes its connection, so that the API learns that its caller has left. What a tool returns of a response
is made here too, and needs no connection.
"""

from __future__ import annotations

import asyncio
import urllib.request
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import ModuleType
from typing import Any
from urllib.parse import urljoin

from toolbus.common.text import clean_line, dump_json, is_utf8, mark_unsafe, parse_json, shorten
from toolbus.common.version import VERSION
from toolbus.errors import SetupError, ToolBusError
from toolbus.functions.reply import Reply, audio, image, resource
from toolbus.parts.openapi.api_request import ApiRequest
from toolbus.parts.openapi.api_settings import origin_of
from toolbus.parts.openapi.operations import SAFE_METHODS

MAX_EXCERPT = 1_000  # characters of a body that an error shows
_OF_A_BODY = ("content-type", "content-length")  # which HEAD asks about
_WITHOUT_BODY = ("last-modified", "etag", "location")
_TEXTS = ("application/xml", "application/yaml", "application/x-yaml", "application/javascript", "application/graphql")


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """A response.

    Attributes:
        headers: by name in lower case.
        body: decoded, at most as long as the limit.
        is_cut: whether the body was longer.
        url: where it came from, without its query.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = field(default=b"", repr=False)
    is_cut: bool = False
    url: str = ""

    @property
    def media_type(self) -> str:
        """The media type in lower case, without its parameters; "" if it is not stated."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


def read_response(response: ApiResponse, limit: int, secrets: Collection[str] = ()) -> Reply:
    """Returns what a tool returns for a response.

    Args:
        limit: bytes that the body may have.
        secrets: texts that no error may show: APIs do repeat a key that they refuse.
    """
    if not 200 <= response.status < 300:
        return _refusal(response, secrets)
    if response.is_cut:
        return Reply(
            is_error=True,
            error=f"the response has more than {limit} bytes: ask for less, with a filter, a smaller page or fewer "
            f"fields. It begins: {_excerpt(response, secrets)}",
        )
    media = response.media_type
    kind = media.partition("/")[0]
    if not response.body:
        names = _OF_A_BODY + _WITHOUT_BODY if response.headers.get("content-length", "0") != "0" else _WITHOUT_BODY
        shown = {name: response.headers[name] for name in names if name in response.headers}
        return Reply({"status": response.status, **({"headers": shown} if shown else {})})
    if kind in ("image", "audio") and media != "image/svg+xml":
        block = image(response.body, media) if kind == "image" else audio(response.body, media)
        return Reply({"content_type": media, "bytes": len(response.body)}, [block])
    text = _text(response)
    if text is None:
        block = resource(response.url, response.body, media)
        return Reply({"content_type": media, "bytes": len(response.body)}, [block])
    return Reply(_value(text) if media.endswith("json") or not media else text)


def _refusal(response: ApiResponse, secrets: Collection[str]) -> Reply:
    try:
        phrase = f" {HTTPStatus(response.status).phrase}"
    except ValueError:
        phrase = ""
    output: dict[str, Any] = {"status": response.status}
    parts = [f"HTTP {response.status}{phrase}"]
    if retry := response.headers.get("retry-after", ""):
        output["retry_after"] = shorten(retry, 100)
        parts.append(f"try again after {shorten(mark_unsafe(retry), 100)}{' s' if retry.isdigit() else ''}")
    if 300 <= response.status < 400:
        parts.append("redirects to another place are not followed")
    if excerpt := _excerpt(response, secrets):
        parts.append(excerpt)
    return Reply(output, is_error=True, error=": ".join(parts))


def _excerpt(response: ApiResponse, secrets: Collection[str]) -> str:
    """Returns the beginning of a text body, without secrets; "" for bytes."""
    text = _text(response) or ""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return shorten(mark_unsafe(" ".join(text.split())), MAX_EXCERPT)


def _text(response: ApiResponse) -> str | None:
    """Returns a body that is text; None for bytes."""
    media = response.media_type
    says_text = media.startswith("text/") or media.endswith(("json", "+xml")) or media in _TEXTS
    if not says_text and media and media != "application/x-www-form-urlencoded":
        return None
    _, _, charset = response.headers.get("content-type", "").lower().partition("charset=")
    charset = charset.partition(";")[0].strip(" \"'")
    encoding = charset if charset in ("iso-8859-1", "latin-1", "us-ascii", "windows-1252", "utf-16") else "utf-8-sig"
    errors = "replace" if says_text or response.is_cut else "strict"
    try:
        return response.body.decode(encoding, errors)
    except UnicodeDecodeError:
        return None


def _value(text: str) -> Any:
    """Returns what a text holds as JSON; the text itself where it is not JSON that can be passed on."""
    try:
        value = parse_json(text)
        return value if is_utf8(dump_json(value)) else text
    except (ValueError, RecursionError):
        return text


MAX_REDIRECTS = 3
CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 0.4  # servers close an idle connection after 0.5 to 5 s
_REDIRECTS = (301, 302, 307, 308)
_ANY_ENCODING = 32 + zlib.MAX_WBITS  # gzip or zlib, as the data say


def load_httpx() -> ModuleType:
    """Imports httpx, which the extra brings.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import httpx
    except ImportError:
        raise SetupError(
            "requests to an API need httpx, which is not installed: run `pip install 'toolbus[openapi]'`"
        ) from None
    return httpx


class ApiUnreachable(ToolBusError):
    """No response was received; the text says from where and why."""


class ApiClient:
    """Sends requests to one origin, over connections that are used again.

    Args:
        url: of the origin.
        connections: open at once.

    Raises:
        SetupError: httpx is not installed, or a variable of the environment keeps it from working.
    """

    def __init__(self, url: str, connections: int) -> None:
        self._httpx = httpx = load_httpx()
        self._origin = origin_of(url)
        scheme, host, port = self._origin
        self.name = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme)
        if proxy and "://" not in proxy:
            proxy = f"http://{proxy}"  # as other programs read HTTPS_PROXY=proxy:3128
        try:
            self._transport = httpx.AsyncHTTPTransport(
                verify=httpx.create_ssl_context() if scheme == "https" else False,
                limits=httpx.Limits(
                    max_connections=connections,
                    max_keepalive_connections=connections,
                    keepalive_expiry=KEEP_ALIVE_SECONDS,
                ),
                proxy=proxy,
            )
        except (ValueError, OSError, ImportError) as error:
            raise SetupError(f"no connection to {self.name} can be set up: {shorten(str(error), 200)}") from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._transport.aclose()

    async def send(
        self, base_url: str, request: ApiRequest, extra: Sequence[tuple[str, str]], timeout: float, max_bytes: int
    ) -> ApiResponse:
        """Sends a request and returns its response; a redirect of a read within the origin is followed.

        Args:
            base_url: of the origin; the request's path is below it.
            extra: headers of the operator, which win.
            timeout: seconds, from connecting to the last byte.
            max_bytes: of the body.

        Raises:
            ApiUnreachable: no response was received.
        """
        replaced = {name.lower() for name, _ in extra}
        headers = [(name, value) for name, value in request.headers if name.lower() not in replaced]
        fixed = [("Accept", "application/json, */*;q=0.5"), ("User-Agent", f"toolbus/{VERSION}")]
        headers += [*((name, value) for name, value in fixed if name.lower() not in replaced), *extra]
        headers.append(("Accept-Encoding", "gzip"))
        url, path = f"{base_url}{request.path}", base_url + request.path.partition("?")[0]
        try:
            async with asyncio.timeout(timeout):
                for _ in range(MAX_REDIRECTS + 1):
                    response = await self._exchange(request, url, headers, timeout, max_bytes, path)
                    target = urljoin(url, response.headers.get("location", url))
                    if response.status not in _REDIRECTS or request.method not in SAFE_METHODS or target == url:
                        break
                    if origin_of(target) != self._origin:  # it would get the credentials
                        break
                    url, path = target, target.partition("?")[0]
                return response
        except (TimeoutError, self._httpx.TimeoutException):
            raise ApiUnreachable(f"{self.name} has not answered within {timeout:g} s") from None
        except self._httpx.LocalProtocolError:  # its text repeats the header, which may be a credential
            raise ApiUnreachable(f"{self.name} cannot be called: a header or credential cannot be sent") from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL, OSError, ValueError, zlib.error) as error:
            reason = clean_line(shorten(str(error) or type(error).__name__, 200))
            raise ApiUnreachable(f"{self.name} cannot be reached: {reason}") from None

    async def _exchange(
        self,
        request: ApiRequest,
        url: str,
        headers: Sequence[tuple[str, str]],
        timeout: float,
        max_bytes: int,
        path: str,
    ) -> ApiResponse:
        seconds = self._httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)).as_dict()
        built = self._httpx.Request(
            request.method,
            url,
            headers=list(headers),
            content=request.content,
            files=request.parts,
            extensions={"timeout": seconds},
        )
        to = built.url  # as httpx reads it, which connects
        if origin_of(f"{to.scheme}://{to.netloc.decode()}") != self._origin:
            raise ValueError("the request would leave its origin")
        received = await self._transport.handle_async_request(built)
        try:
            body, is_cut = await _read(received, max_bytes)
        finally:
            await received.aclose()
        return ApiResponse(received.status_code, dict(received.headers.items()), body, is_cut, path)


async def _read(response: Any, limit: int) -> tuple[bytes, bool]:
    """Returns the body, decompressed, and whether it has more than the limit: a small one may expand without end."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", "deflate", ""):
        raise ValueError(f"the response has the content encoding {shorten(encoding)}, and only gzip was requested")
    inflate = zlib.decompressobj(_ANY_ENCODING) if encoding not in ("identity", "") else None
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk if inflate is None else inflate.decompress(chunk, limit + 1 - len(body))
        if len(body) > limit:
            return bytes(body[:limit]), True
    if inflate is not None and not inflate.eof and body:
        raise ValueError("the compressed response ends too early")
    return bytes(body), False
