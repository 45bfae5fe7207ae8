"""Bus and plugin prove themselves to each other with a secret that neither of them sends (REST-45)."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.callbacks import CallbackPlugin, Legacy, Start, names, no_text_has, starting
from tests.support.waiting import until
from toolbus.bus.gateway.callback_proof import is_proof, is_secret, proof, signature
from toolbus.errors import Code, Stage

SECRET = "f3c1" * 8
OTHER = "0" * 32
NONCE = "00" * 16


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a bus on this test's data directory."""
    return starting(tmp_path / "data")


def header(head: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*?)\r?$", head, re.IGNORECASE | re.MULTILINE)
    return found[1] if found else ""


def proves(plugin: CallbackPlugin, secret: str = SECRET) -> Callable[[str], str]:
    """What a plugin does with a challenge."""

    def prove(head: str) -> str:
        url = f"http://127.0.0.1:{plugin.port}{head.split(' ')[1]}"
        return f"X-Toolbus-Proof: {proof(secret, header(head, 'X-Toolbus-Challenge'), url)}\r\n"

    return prove


def posts(plugin: CallbackPlugin) -> list[str]:
    return [head for head, _ in plugin.requests if head.startswith("post ")]


def gets(plugin: CallbackPlugin) -> list[tuple[str, Any]]:
    return [(head, body) for head, body in plugin.requests if head.startswith("get ")]


def test_a_proof_is_that_of_its_secret_nonce_and_url_only() -> None:
    url = "http://127.0.0.1:9000/run"
    good = proof(SECRET, NONCE, url)
    assert is_proof(good, SECRET, NONCE, url)
    assert is_proof(f" {good.upper()} ", SECRET, NONCE, url)
    for secret, nonce, where in ((OTHER, NONCE, url), (SECRET, "11" * 16, url), (SECRET, NONCE, url + "2")):
        assert not is_proof(good, secret, nonce, where)
    for answer in ("", "é", SECRET, NONCE, signature(SECRET, NONCE, url.encode()), good[:-1]):
        assert not is_proof(answer, SECRET, NONCE, url)


def test_proof_and_signature_are_made_as_the_documents_say() -> None:
    def mac(text: str) -> str:
        return hmac.new(SECRET.encode(), text.encode(), hashlib.sha256).hexdigest()

    assert proof(SECRET, NONCE, "http://127.0.0.1:9000/run") == mac(f"proof:{NONCE}:http://127.0.0.1:9000/run")
    assert signature(SECRET, NONCE, b'{"name":"x"}') == mac(f'call:{NONCE}:{{"name":"x"}}')


async def test_calls_that_come_at_once_share_a_challenge(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        plugin.prove = proves(plugin)
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url(), callback_secret=SECRET)
            results = await asyncio.gather(*(bus.call("x", {"n": number}) for number in range(50)))
        assert [result.output for result in results] == [{"n": number} for number in range(50)]
        assert len(gets(plugin)) == 1


@pytest.mark.parametrize("text", ["", "short", "x" * 15, "x" * 257, "with space " * 2, "é" * 20, 'quote"' * 4])
def test_a_text_that_is_short_or_has_other_characters_is_not_a_secret(text: str) -> None:
    assert not is_secret(text)


async def test_calls_are_signed_after_one_challenge_without_arguments(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        plugin.prove = proves(plugin)
        async with start() as bus, Legacy.of(bus) as legacy:
            url = plugin.url(user="me:pass@").replace("/run", "/run?a=1")
            plugin.prove = lambda head: (
                f"X-Toolbus-Proof: {proof(SECRET, header(head, 'X-Toolbus-Challenge'), url)}\r\n"
            )
            await legacy.ask("register", name="x", callback_url=url, callback_secret=SECRET)
            for number in range(3):
                assert (await bus.call("x", {"private": number})).output == {"private": number}
    ((challenge, sent),) = gets(plugin)
    assert challenge.startswith("get /run?a=1 http/1.1")
    assert sent == {}
    assert "authorization" not in challenge
    assert "private" not in challenge
    assert plugin.requests[0][0] == challenge, "it comes before the first arguments"
    assert len(posts(plugin)) == 3
    for head, call in plugin.requests[1:]:
        nonce, _, signed = header(head, "X-Toolbus-Signature").partition(":")
        body = json.dumps(call, separators=(",", ":")).encode()
        assert signed == signature(SECRET, nonce, body)
    assert len({header(head, "X-Toolbus-Signature") for head in posts(plugin)}) == 3
    no_text_has(SECRET, [head for head, _ in plugin.requests])


@pytest.mark.parametrize("answer", ["", f"X-Toolbus-Proof: {OTHER}\r\n", f"X-Toolbus-Proof: {SECRET}\r\n"])
async def test_a_program_that_does_not_know_the_secret_gets_no_arguments(start: Start, answer: str) -> None:
    with CallbackPlugin().come() as plugin:
        plugin.prove = lambda head: answer
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url(), callback_secret=SECRET)
            error = (await bus.call("x", {"private": 1})).error
            assert error
            assert (error.code, error.stage, error.retry_safe) == (Code.UNAVAILABLE, Stage.NOT_DISPATCHED, True)
            assert "callback_secret" in error.message
            assert names(bus, away=False) == []
            plugin.prove = proves(plugin)  # the plugin itself is back
            await until(lambda: names(bus, away=False) == ["x"], "a probe to find that it proves itself")
            assert posts(plugin) == []
            assert (await bus.call("x", {"n": 1})).output == {"n": 1}


async def test_a_plugin_that_is_started_again_proves_itself_before_it_gets_arguments(start: Start) -> None:
    with CallbackPlugin().come() as plugin:
        plugin.prove = proves(plugin)
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url(), callback_secret=SECRET)
            assert not (await bus.call("x")).is_error
            plugin.leave()
            for _ in range(3):  # REST-43
                error = (await bus.call("x")).error
                assert error
                assert "accepts no connection" in error.message
            assert names(bus, away=False) == []
            plugin.requests.clear()
            plugin.come()
            await until(lambda: names(bus, away=False) == ["x"], "a probe to find it")
            assert not (await bus.call("x")).is_error
            plugin.leave()  # and without that anybody noticed
            plugin.come()
            plugin.requests.clear()
            assert not (await bus.call("x")).is_error
    assert [head.split(" ")[0] for head, _ in plugin.requests] == ["get", "post"]


async def test_a_restored_tool_comes_back_by_its_proof_and_a_foreign_program_learns_nothing(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "toolbus")
    with CallbackPlugin().come() as plugin:
        plugin.prove = proves(plugin)
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url(), callback_secret=SECRET)
            await legacy.ask("register", name="open", callback_url=plugin.url())
        plugin.leave()
        plugin.come()
        plugin.prove = lambda head: ""
        async with start() as bus:
            assert names(bus, away=False) == []
            await until(lambda: len(gets(plugin)) > 2, "the probe to come again")
            assert posts(plugin) == []
            said = [text for text in caplog.messages if text.startswith("unconfirmed")]
            assert len(said) == 1, "and the log says so once"
            assert (await bus.call("toolbus:confirm", {"source": "external"})).output["confirmed"] == ["open"]
            assert names(bus, away=False) == ["open"]
            plugin.prove = proves(plugin)
            await until(lambda: names(bus, away=False) == ["x", "open"], "the proof")
            assert not (await bus.call("x")).is_error
        async with start() as bus:  # it is asked at the start already
            assert names(bus, away=False) == ["x", "open"]
    no_text_has(SECRET, [*caplog.messages, *(head for head, _ in plugin.requests)])
    assert (tmp_path / "data" / "bus.db").stat().st_mode & 0o777 == 0o600


async def test_no_answer_of_the_bus_repeats_the_secret(start: Start) -> None:
    async with start() as bus, Legacy.of(bus) as legacy:
        good: dict[str, Any] = {"name": "x", "callback_url": "http://127.0.0.1:9/", "callback_secret": SECRET}
        answers = [await legacy.post("register", **good)]
        for bad in ({"name": ""}, {"name": None}, {"callback_secret": SECRET + "!"}, {"callback_secret": [SECRET]}):
            answer = await legacy.post("register", **{**good, **bad})
            assert answer.status_code == 422
            answers.append(answer)
        del good["name"]
        answers.append(await legacy.post("register", **good))  # the error shows the whole body
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            answers.append(await legacy.send("register", json.dumps(good).encode(), kind))
        answers.append(await legacy.send("register", f"callback_secret={SECRET}&name=x".encode(), "text/plain"))
        no_text_has(SECRET, [answer.text for answer in answers])
        no_text_has(SECRET, [repr(each) for each in bus.list()[0].entry.handlers()])


async def test_where_the_system_does_not_say_who_listens_every_call_is_proven_and_restored_tools_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolbus.bus.gateway.callback_handler.listener_id", lambda address: "")
    with CallbackPlugin().come() as plugin:
        plugin.prove = proves(plugin)
        async with start() as bus, Legacy.of(bus) as legacy:
            await legacy.ask("register", name="x", callback_url=plugin.url(), callback_secret=SECRET)
            await legacy.ask("register", name="open", callback_url=plugin.url())
            for _ in range(2):
                assert not (await bus.call("x")).is_error
            assert not (await bus.call("open")).is_error
            assert len(gets(plugin)) == 2
        async with start() as bus:
            assert names(bus, away=False) == ["x"]
            assert not (await bus.call("x")).is_error
            assert (await bus.call("toolbus:confirm", {"source": "external"})).output["confirmed"] == ["open"]
            assert not (await bus.call("open")).is_error
