"""What an extension of Spindle may use besides its tools: HTTP, stored files, secrets. Only what the manifest grants.

    {"files": {"kb/dist/backend.js": {
        "connect": ["api.example.org:443"], "write": ["/srv/kb"], "secrets": ["API_KEY"]}}}

`connect` is for `spindle.cors` and `fetch`, the first folder of `write` for `spindle.storage` and `userStorage`, and
`secrets` for `spindle.enclave`. Without a grant the error names the line that grants it.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import ipaddress
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote as percent_encode
from urllib.parse import urljoin, urlsplit

from toolbus.common.text import list_names, quote
from toolbus.common.whole_file import replace_file
from toolbus.errors import SetupError
from toolbus.parts.dropin.manifest import FILE, FileGrants
from toolbus.protocol.tool import MIB

MAX_BODY_BYTES = 4 * MIB  # of an answer, and of what is sent
MAX_SECONDS = 30.0  # of a request with all its redirects
MAX_REDIRECTS = 5
MAX_STORED_BYTES = 64 * MIB  # of all files of an extension
MAX_STORED_FILES = 10_000
_MAX_NAME_BYTES = 200  # of each part of a path
_REDIRECTS = {301, 302, 303, 307, 308}
_SET_BY_US = frozenset(("host", "content-length", "transfer-encoding", "connection"))
_MISSING = object()


class SpindleServices:
    """Answers an extension's requests. `answer` blocks, and may be called from any thread.

    Args:
        file: of the extension, as the manifest names it.
        grants: its entry there.
        environment: where granted secrets are.
    """

    def __init__(self, file: str, grants: FileGrants, environment: Mapping[str, str]) -> None:
        self._file = file
        self._grants = grants
        self._environment = environment
        self._writing = threading.Lock()

    @property
    def permissions(self) -> tuple[str, ...]:
        """The permissions of Spindle that the grants amount to."""
        return ("cors_proxy",) if self._grants.connect else ()

    def answer(self, kind: str, arguments: Sequence[Any], user: str | None) -> Any:
        """Returns what a request is answered with, as JSON has it.

        Args:
            kind: `cors`, or `storage.` or `userStorage.` or `enclave.` with the name of the function.
            user: of the call that asks; None if that is unknown.

        Raises:
            SetupError: it is not granted; the text names the line of the manifest that grants it.
            ValueError: an argument breaks a rule, or a limit is reached.
            OSError: the host cannot be reached, or the file is not there.
        """
        service, _, function = kind.partition(".")
        match service:
            case "cors":
                return self._request(*arguments)
            case "enclave":
                return self._secret(function, *arguments)
            case _:
                return self._stored(service, function, list(arguments), user)

    def _refused(self, what: str, key: str, value: str) -> SetupError:
        # No JSON: a result with a field "secrets" is blocked, that of an error too.
        return SetupError(
            f'{what} is not granted: add {json.dumps(value, ensure_ascii=False)} to the list "{key}" of '
            f"{quote(self._file)} in {FILE}"
        )

    # -- HTTP ------------------------------------------------------------------------------------------------------

    def _request(self, url: Any, options: Any = None) -> dict[str, Any]:
        options = options if isinstance(options, Mapping) else {}
        method = str(options.get("method") or "GET").upper()
        headers = {str(key): str(value) for key, value in dict(options.get("headers") or {}).items()}
        body = options.get("body")
        if body is not None and not isinstance(body, str):
            raise ValueError(f"body is a {type(body).__name__}: pass a text, JSON.stringify(value) for example")
        content = None if body is None else body.encode()
        if content is not None and len(content) > MAX_BODY_BYTES:
            raise ValueError(f"body has {len(content)} bytes, the limit is {MAX_BODY_BYTES}: send less")
        until = time.monotonic() + MAX_SECONDS
        for _ in range(MAX_REDIRECTS + 1):
            answer, place = self._exchange(str(url), method, headers, content, until)
            if place is None:
                return answer
            before, url = urlsplit(str(url)), urljoin(str(url), place)
            if urlsplit(url)[:2] != before[:2]:  # another host: it gets no credentials of the first
                headers = {k: v for k, v in headers.items() if k.lower() not in ("authorization", "cookie")}
            if answer["status"] == 303 or (answer["status"] in (301, 302) and method == "POST"):
                method, content = "GET", None
        raise ValueError(f"more than {MAX_REDIRECTS} redirects, the last to {quote(str(url))}: ask for that address")

    def _exchange(
        self, url: str, method: str, headers: Mapping[str, str], content: bytes | None, until: float
    ) -> tuple[dict[str, Any], str | None]:
        """Makes one request; returns the answer, and where it redirects to."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{quote(url)} is not an address like https://api.example.org/path")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        connection = _Connection(
            parts.hostname, port, parts.scheme == "https", self._places(parts.hostname, port), until
        )
        with contextlib.closing(connection):
            path = parts.path or "/"
            connection.putrequest(method, f"{path}?{parts.query}" if parts.query else path, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() not in _SET_BY_US:
                    connection.putheader(name, value)
            if content is not None or method in ("POST", "PUT", "PATCH"):
                connection.putheader("Content-Length", str(len(content or b"")))
            connection.endheaders(content)
            with connection.getresponse() as response:
                place = response.headers.get("Location") if response.status in _REDIRECTS else None
                charset = response.headers.get_content_charset("utf-8")
                text = _read(response, connection, until).decode(charset, "replace")
        named = {name.lower(): value for name, value in response.headers.items()}
        answer = {"status": response.status, "statusText": response.reason, "headers": named, "body": text, "url": url}
        return answer, place

    def _places(self, host: str, port: int) -> list[tuple[str, int]]:
        """Returns the addresses of a granted host; private ones that its name leads to have to be granted too."""
        granted = {(target.host, target.port) for target in self._grants.connect}
        if (host, port) not in granted:
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise self._refused(f"a connection to {shown}", "connect", shown)
        addresses = [info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        usable = [each for each in addresses if each == host or (each, port) in granted or _is_public(str(each))]
        if not usable:
            private = f"[{addresses[0]}]:{port}" if ":" in str(addresses[0]) else f"{addresses[0]}:{port}"
            raise self._refused(f"the private address {private}, which {host} leads to,", "connect", private)
        return [(str(each), port) for each in usable]

    # -- files -----------------------------------------------------------------------------------------------------

    def _stored(self, service: str, function: str, arguments: list[Any], user: str | None) -> Any:
        folder = next((path for path in self._grants.write if path.is_dir()), None)
        if folder is None:
            raise self._refused("storing files", "write", "/a/folder/of/its/own")
        if service == "userStorage":
            user = _user_of(function, arguments) or user
            if not user:
                raise ValueError(f"userStorage.{function} needs a user: pass the userId, or call it in a handler")
            folder = folder / "users" / _folder_name(user)
        else:
            folder = folder / "shared"
        run = getattr(_Files(folder, self._make_room), f"do_{function}", None)
        if run is None:
            raise ValueError(f"spindle.{service}.{function} does not exist here: use {list_names(_FUNCTIONS)}")
        with self._writing:
            return run(*arguments)

    def _make_room(self, new: int, replaced: Path) -> None:
        """Refuses a file that would exceed the quota of the extension."""
        root = next(path for path in self._grants.write if path.is_dir())
        sizes = [
            os.lstat(os.path.join(place, name)).st_size
            for place, _, names in os.walk(root)
            for name in names
            if os.path.join(place, name) != str(replaced)
        ]
        if sum(sizes) + new > MAX_STORED_BYTES or len(sizes) + 1 > MAX_STORED_FILES:
            raise ValueError(
                f"{root} has {len(sizes)} files of {sum(sizes)} bytes; with {new} more it would exceed the limit of "
                f"{MAX_STORED_FILES} files or {MAX_STORED_BYTES} bytes: delete some"
            )

    # -- secrets ---------------------------------------------------------------------------------------------------

    def _secret(self, function: str, name: Any = None, *_: Any) -> Any:
        names = self._grants.secrets
        if function == "list":
            return list(names)
        if function in ("get", "has"):
            variable = next((each for each in (str(name), str(name).upper()) if each in names), None)
            value = None if variable is None else self._environment.get(variable)
            if function == "has":
                return value is not None
            if variable is None:
                raise self._refused(f"the secret {quote(str(name))}", "secrets", str(name).upper())
            return value
        raise SetupError(f"spindle.enclave.{function} does not exist here")


_FUNCTIONS = ("getJson", "setJson", "read", "write", "exists", "list", "delete", "mkdir", "move", "stat")


class _Files:
    """The files below one folder; a path is relative, its parts are separated by '/'."""

    def __init__(self, folder: Path, make_room: Callable[[int, Path], None]) -> None:
        self._folder = folder
        self._make_room = make_room

    def do_read(self, path: Any, *_: Any) -> str:
        file = self._place(path)
        try:
            if file.stat().st_size > MAX_BODY_BYTES:
                raise ValueError(f"{quote(str(path))} is larger than {MAX_BODY_BYTES} bytes: keep smaller files")
            return file.read_text("utf-8")
        except FileNotFoundError:
            raise ValueError(f"{quote(str(path))} is not stored: write it first, or ask with exists") from None
        except IsADirectoryError:
            raise ValueError(f"{quote(str(path))} is a folder: name a file in it") from None

    def do_getText(self, path: Any, options: Any = None, *_: Any) -> Any:
        fallback = options.get("fallback", _MISSING) if isinstance(options, Mapping) else _MISSING
        return fallback if fallback is not _MISSING and not self._place(path).is_file() else self.do_read(path)

    def do_getJson(self, path: Any, options: Any = None, *_: Any) -> Any:
        fallback = options.get("fallback") if isinstance(options, Mapping) else None
        if not self._place(path).is_file():
            return fallback
        try:
            return json.loads(self.do_read(path))
        except ValueError as error:
            raise ValueError(f"{quote(str(path))} is not JSON: {error}") from None

    def do_setJson(self, path: Any, value: Any = None, options: Any = None, *_: Any) -> None:
        indent = options.get("indent") if isinstance(options, Mapping) else None
        self.do_write(path, json.dumps(value, ensure_ascii=False, indent=indent if isinstance(indent, int) else None))

    def do_write(self, path: Any, text: Any = "", *_: Any) -> None:
        if not isinstance(text, str):
            raise ValueError(f"the content is a {type(text).__name__}: write a text, or use setJson")
        file, content = self._place(path), text.encode()
        if len(content) > MAX_BODY_BYTES:
            raise ValueError(f"the content has {len(content)} bytes, the limit is {MAX_BODY_BYTES}: write less")
        self._make_room(len(content), file)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(file, content, 0o600)

    do_setText = do_write

    def do_exists(self, path: Any, *_: Any) -> bool:
        return self._place(path).exists()

    def do_list(self, prefix: Any = "", *_: Any) -> list[str]:
        """Returns the files below a folder, relative to it, as Spindle does."""
        folder = self._folder if prefix in (None, "") else self._place(prefix)
        return sorted(
            (Path(place) / name).relative_to(folder).as_posix() for place, _, names in os.walk(folder) for name in names
        )

    def do_delete(self, path: Any, *_: Any) -> None:
        file = self._place(path)
        try:
            if file.is_dir():
                file.rmdir()
            else:
                file.unlink()
        except FileNotFoundError:
            raise ValueError(f"{quote(str(path))} is not stored: ask with exists") from None

    def do_mkdir(self, path: Any, *_: Any) -> None:
        self._place(path).mkdir(parents=True, exist_ok=True, mode=0o700)

    def do_move(self, source: Any, target: Any, *_: Any) -> None:
        place = self._place(target)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._place(source).replace(place)
        except FileNotFoundError:
            raise ValueError(f"{quote(str(source))} is not stored: ask with exists") from None

    def do_stat(self, path: Any, *_: Any) -> dict[str, Any]:
        file = self._place(path)
        if not file.exists():
            return {"exists": False, "isFile": False, "isDirectory": False, "sizeBytes": 0, "modifiedAt": None}
        found = file.stat()
        modified = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.st_mtime))
        kinds = {"isFile": file.is_file(), "isDirectory": file.is_dir()}
        return {"exists": True, **kinds, "sizeBytes": found.st_size, "modifiedAt": modified}

    def _place(self, path: Any) -> Path:
        text = path if isinstance(path, str) else ""
        parts = PurePosixPath(text).parts
        plain = text and text.isprintable() and "\\" not in text and not text.startswith("/") and ".." not in parts
        if not plain or not parts or any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in parts):
            raise ValueError(
                f"{quote(str(path))} is not a path of a stored file: write it like notes/today.json, without '..', "
                f"each part at most {_MAX_NAME_BYTES} bytes"
            )
        place = self._folder.joinpath(*parts)
        if not place.resolve().is_relative_to(self._folder.resolve()):
            raise ValueError(f"{quote(str(path))} leads out of the folder of the extension: use another name")
        return place


class _Connection(http.client.HTTPConnection):
    """A connection to the first of some checked addresses that answers: the name is not looked up again."""

    def __init__(self, host: str, port: int, secure: bool, places: list[tuple[str, int]], until: float) -> None:
        super().__init__(host, port, timeout=max(0.1, until - time.monotonic()))
        self.default_port = 443 if secure else 80  # so that the Host header has no port that is the usual one
        self._secure = secure
        self._places = places
        self._until = until

    def connect(self) -> None:
        for left in range(len(self._places), 0, -1):
            seconds = max(0.1, self._until - time.monotonic()) / left  # a silent one leaves time for the others
            try:
                self.sock = socket.create_connection(self._places[-left], seconds)
                break
            except OSError:
                if left == 1:
                    raise
        self.sock.settimeout(self.timeout)
        if self._secure:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _read(response: http.client.HTTPResponse, connection: _Connection, until: float) -> bytes:
    body = bytearray()
    while chunk := response.read1(65_536):
        body += chunk
        left = until - time.monotonic()
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"the answer is longer than {MAX_BODY_BYTES} bytes: ask for less")
        if left <= 0:
            raise TimeoutError(f"the answer took longer than {MAX_SECONDS:g} s")
        if connection.sock is not None:
            connection.sock.settimeout(left)
    return bytes(body)


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_global


def _user_of(function: str, arguments: list[Any]) -> str:
    """Returns the user that a request names: in its options, or as the last text beyond its own arguments."""
    own = {"write": 2, "setText": 2, "move": 2}.get(function, 1)
    for each in arguments[own:]:
        if isinstance(each, Mapping) and isinstance(each.get("userId"), str):
            return str(each["userId"])
    return arguments[-1] if len(arguments) > own and isinstance(arguments[-1], str) and function != "setJson" else ""


def _folder_name(user: str) -> str:
    """Returns the name of a user's folder; no two users share one, also where case does not count."""
    digest = hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{percent_encode(user, safe='', errors='replace').replace('.', '%2E')[:100]}-{digest[:32]}"
