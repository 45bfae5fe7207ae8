# ruff: noqa: F401, F811  # fixtures are imported and requested by name

import asyncio
import contextlib
import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts.dropin.loaded_files import call
from tests.parts.dropin.script_cases import Load, load
from tests.parts.dropin.test_spindle_scripts import answering
from tests.support.tool_folders import offered_folder
from toolbus.errors import SetupError
from toolbus.functions.call_context import CallContext
from toolbus.functions.scope import ToolScope
from toolbus.parts.dropin import spindle_services
from toolbus.parts.dropin.group_process import ProcessPlan
from toolbus.parts.dropin.javascript import EngineLimits
from toolbus.parts.dropin.manifest import FileGrants, Target
from toolbus.parts.dropin.spindle_services import SpindleServices
from toolbus.parts.tripwire.tripwire import Tripwire
from toolbus.protocol.tool import MIB


class _Api(http.server.BaseHTTPRequestHandler):
    """Answers with what was asked; `/to/…` redirects, `/long` without end, `/charset` in an unknown one."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        if self.path == "/long":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x" * 65_536)
        asked = {"path": self.path, "method": self.command, "key": self.headers.get("X-Key"), "body": body}
        content = json.dumps(asked).encode()
        self.send_response(418)
        self.send_header("X-Own", "yes")
        if self.path == "/charset":
            self.send_header("Content-Type", "text/plain; charset=klingon")
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *values: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Api) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client has read enough
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def services(tmp_path: Path, *targets: Target, secrets: tuple[str, ...] = (), **environment: str) -> SpindleServices:
    return SpindleServices("kb.js", FileGrants((tmp_path,), (), targets, secrets), environment)


async def test_an_extension_uses_what_its_operator_granted(load: Load, tmp_path: Path, port: int) -> None:
    (tmp_path / "kept").mkdir()
    grants = FileGrants((tmp_path / "kept",), (), (Target("127.0.0.1", port),), ("API_KEY",))
    text = f"""
    const before = await spindle.storage.getJson('notes/a.json', {{ fallback: {{ seen: 0 }} }})
    {
        answering(f'''
      before.seen += 1
      await spindle.storage.setJson('notes/a.json', before, {{ indent: 2 }})
      await spindle.userStorage.write('mine.txt', payload.args.text)
      const asked = await spindle.cors('http://127.0.0.1:{port}/x?y=1', {{
        method: 'POST', headers: {{ 'X-Key': await spindle.enclave.get('api_key') }}, body: 'b' }})
      const fetched = await fetch('http://127.0.0.1:{port}/z')
      return {{ seen: (await spindle.storage.getJson('notes/a.json')).seen,
        list: await spindle.storage.list('notes/'), mine: await spindle.userStorage.read('mine.txt'),
        status: asked.status, own: asked.headers['x-own'], body: JSON.parse(asked.body),
        fetched: [fetched.ok, fetched.status, fetched.headers.get('X-OWN'), (await fetched.json()).method],
        may: spindle.permissions.has('cors_proxy') }}
    ''')
    }"""
    os.environ["API_KEY"] = "secret-1"
    try:
        loaded = load({"kb.js": text}, is_extension=True, grants=grants)
        assert loaded.problems == ()
        scope = ToolScope("c1", "t", context=CallContext(user_id="Ann"))
        answered = json.loads((await call(loaded, "t", {"text": "of Ann"}, scope)).output)
    finally:
        del os.environ["API_KEY"]
    assert answered == {
        "seen": 1,
        "list": ["a.json"],
        "mine": "of Ann",
        "status": 418,
        "own": "yes",
        "body": {"path": "/x?y=1", "method": "POST", "key": "secret-1", "body": "b"},
        "fetched": [False, 418, "yes", "GET"],
        "may": True,
    }


async def test_an_answer_that_cannot_be_read_is_an_error_that_the_handler_can_catch(load: Load, port: int) -> None:
    grants = FileGrants((), (), (Target("127.0.0.1", port),), ())
    body = f"try {{ await fetch('http://127.0.0.1:{port}/charset') }} catch (error) {{ return error.message }}"
    loaded = load({"kb.js": answering(body)}, is_extension=True, grants=grants)
    scope = ToolScope("c1", "t", deadline=time.monotonic() + 20)
    assert "klingon" in (await call(loaded, "t", scope=scope)).output


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("spindle.storage.getJson('x')", 'add "/a/folder/of/its/own" to the list "write" of'),
        ("spindle.userStorage.write('x', 'y', 'u')", 'add "/a/folder/of/its/own" to the list "write" of'),
        ("spindle.cors('https://api.example.org/v1')", 'add "api.example.org:443" to the list "connect" of'),
        ("fetch('http://[2001:db8::1]:81/')", 'add "[2001:db8::1]:81" to the list "connect" of'),
        ("spindle.enclave.get('api_key')", 'add "API_KEY" to the list "secrets" of'),
        ("spindle.enclave.put('k', 'v')", "does not exist here: an operator sets secrets as variables of the bus"),
        ("spindle.oauth.getToken()", "does not exist here: ask an API with spindle.cors"),
    ],
)
async def test_without_a_grant_the_error_names_the_line_that_grants_it(load: Load, text: str, line: str) -> None:
    result = await call(load({"kb.js": answering(f"return await {text}")}, is_extension=True), "t")
    assert result.error is not None
    assert line in result.error.message
    assert "_manifest.json" in result.error.message
    assert Tripwire().check_result("t", result.to_wire()) is None, "the bus lets the remedy through"


@pytest.mark.parametrize(
    "given_up",
    [
        "const own = new AbortController(), asked = fetch('http://h/', own); own.abort('enough'); await asked",
        "await fetch('http://h/', {signal: AbortSignal.abort('enough')})",
    ],
)
async def test_a_request_can_be_given_up(load: Load, given_up: str) -> None:
    body = f"try {{ {given_up} }} catch (error) {{ return error }}"
    assert (await call(load({"kb.js": answering(body)}, is_extension=True), "t")).output == "enough"


async def test_a_signal_of_many_requests_does_not_hold_their_answers(load: Load, port: int) -> None:
    body = f"""
      const {{ signal }} = new AbortController(), options = {{ method: 'POST', body: 'x'.repeat(2 ** 20), signal }}
      for (let i = 0; i < 24; i++) await fetch('http://127.0.0.1:{port}/', options)
      return 'well'"""
    grants = FileGrants((), (), (Target("127.0.0.1", port),))
    limits = EngineLimits(heap_bytes=16 * MIB, turn_seconds=60.0)
    loaded = load({"kb.js": answering(body)}, is_extension=True, grants=grants, limits=limits)
    assert (await call(loaded, "t")).output == "well"


def test_what_is_stored_stays_below_its_folder_and_apart_by_user(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "other.txt").write_text("of others")
    kept = services(tmp_path / "kept")

    def ask(kind: str, *arguments: Any, user: str | None = None) -> Any:
        return kept.answer(kind, arguments, user)

    for path in ("../other.txt", "/etc/hostname", "a/../../other.txt", "", None, 5, "a\\b", "a\0b", "x" * 300):
        for function in ("read", "write", "exists", "delete", "stat", *(["list"] if path else [])):
            with pytest.raises(ValueError, match="is not a path of a stored file"):
                ask(f"storage.{function}", path, "text")
    users = ("Ann", "ann", "../Ann", ".", "a/b", "", "名" * 300)
    for user in filter(None, users):
        ask("userStorage.setJson", "x.json", {"of": user}, {"userId": user})
    for user in filter(None, users):
        assert ask("userStorage.getJson", "x.json", {"userId": user}) == {"of": user}
        assert ask("userStorage.exists", "x.json", user=user)
    assert not ask("storage.exists", "x.json")
    with pytest.raises(ValueError, match="pass the userId"):
        ask("userStorage.read", "x.json")
    ask("userStorage.move", "x.json", "y/z.json", "Ann")
    assert (ask("userStorage.list", "", "Ann"), ask("userStorage.list", "", "ann")) == (["y/z.json"], ["x.json"])
    ask("userStorage.delete", "y/z.json", "Ann")
    assert ask("userStorage.getJson", "y/z.json", {"fallback": 7, "userId": "Ann"}) == 7
    assert sorted(os.listdir(tmp_path)) == ["kept", "other.txt"]
    (tmp_path / "kept" / "shared").mkdir(exist_ok=True)
    (tmp_path / "kept" / "shared" / "link").symlink_to(tmp_path / "other.txt")
    with pytest.raises(ValueError, match="leads out of the folder"):
        ask("storage.read", "link")
    with pytest.raises(ValueError, match=r"storage\.chmod does not exist here: use .*getJson"):
        ask("storage.chmod", "x")


def test_what_is_stored_has_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spindle_services, "MAX_STORED_BYTES", 100)
    kept = services(tmp_path)
    kept.answer("storage.write", ["a", "x" * 80], None)
    with pytest.raises(ValueError, match="has 1 files of 80 bytes; with 30 more it would exceed the limit"):
        kept.answer("userStorage.write", ["b", "x" * 30], "Ann")
    kept.answer("storage.write", ["a", "x" * 90], None)  # what it replaces does not count
    kept.answer("storage.delete", ["a"], None)
    kept.answer("userStorage.write", ["b", "x" * 30], "Ann")


def test_a_host_whose_first_address_does_not_answer_is_asked_at_its_next(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ("127.0.0.9", "127.0.0.1")  # nothing listens at the first
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (each, port)) for each in addresses])
    targets = [Target(host, port) for host in ("api.test", *addresses)]
    asked = services(tmp_path, *targets).answer("cors", [f"http://api.test:{port}/x"], None)
    assert json.loads(asked["body"])["path"] == "/x"


def test_a_request_reaches_what_was_granted_and_nothing_else(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = services(tmp_path, Target("127.0.0.1", port), Target("localhost", port))
    base = f"http://127.0.0.1:{port}"
    assert json.loads(granted.answer("cors", [f"{base}/to/{base}/b"], None)["body"])["path"] == "/b"
    refused = {
        f"{base}/to/http://127.0.0.2:{port}/": f'"127.0.0.2:{port}" to the list "connect"',
        f"http://127.0.0.1:{port + 1}/": f'"127.0.0.1:{port + 1}" to the list "connect"',
        "file:///etc/hostname": "is not an address like",
        "nothing": "is not an address like",
        f"{base}/to/to": "redirects",
        f"{base}/long": "longer than",
    }
    monkeypatch.setattr(spindle_services, "MAX_BODY_BYTES", 200_000)
    for url, reason in refused.items():
        with pytest.raises((ValueError, SetupError)) as caught:
            granted.answer("cors", [url], None)
        assert reason in str(caught.value)
    named = services(tmp_path, Target("inside.example", port))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.0.1", port))])
    with pytest.raises(SetupError, match=rf'private address 127.0.0.1:{port}.*"connect"'):
        named.answer("cors", [f"http://inside.example:{port}/"], None)


def test_the_process_of_an_extension_has_its_grants() -> None:
    granted: dict[str, Any] = {"write": ("/w",), "connect": (("127.0.0.1", 80),)}
    for extension in (True, False):
        plan = ProcessPlan("/t", "dropin:a", ("a.js",), ("a.js",), "b:1", "k", 3, is_extension=extension, **granted)
        assert bool(plan.grants().write) is bool(plan.grants().connect) is extension


async def test_an_extension_in_a_folder_of_the_bus_keeps_what_it_stored(tmp_path: Path, port: int) -> None:
    tools, kept = tmp_path / "tools", tmp_path / "kept"
    for each in (tools / "kb" / "dist", kept):
        each.mkdir(parents=True)
    (tools / "kb" / "spindle.json").write_text('{"identifier": "kb"}')
    (tools / "kb" / "dist" / "backend.js").write_text(
        answering(
            "const n = await spindle.storage.getJson('n', {fallback: 0}); await spindle.storage.setJson('n', n + 1);"
            f" return [n, (await fetch('http://127.0.0.1:{port}/')).status]",
            "count",
        )
    )
    manifest = {"files": {"kb/dist/backend.js": {"write": [str(kept)], "connect": [f"127.0.0.1:{port}"]}}}
    (tools / "_manifest.json").write_text(json.dumps(manifest))
    for turn in range(2):
        async with offered_folder(tools) as offered:
            await offered.wait_for_report(" offered ", 1)
            result = await offered.bus.call("dropin:kb:count", {})
            assert (result.error, json.loads(result.text)) == (None, [turn, 418])
