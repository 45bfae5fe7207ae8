"""Tests endpoints: official clients and functions, streams that are closed, answers that break off."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.parts.models.loop.scripted_model import ApiError, FunctionSource, ScriptedModel, says
from tests.support.providers import anthropic, genai, ollama, openai
from toolbus.errors import SetupError
from toolbus.loop import (
    Endpoint,
    ToolLoop,
    anthropic_endpoint,
    endpoint_of,
    gemini_endpoint,
    ollama_endpoint,
    openai_endpoint,
    responses_endpoint,
)
from toolbus.parts.models.dialects.conversation import ModelCall, Turn
from toolbus.parts.models.dialects.dialect import EndpointError
from toolbus.parts.models.dialects.openai_chat import OpenAIChat
from toolbus.parts.models.dialects.wire_names import NameTable


class Asked:
    """A client whose methods, at any depth, note what they are called with."""

    def __init__(self, path: str = "", seen: list[tuple[str, dict[str, Any]]] | None = None) -> None:
        self._path = path
        self.seen = [] if seen is None else seen

    def __getattr__(self, name: str) -> Asked:
        if name == "aio" and not self._path.startswith("google"):
            raise AttributeError(name)
        return Asked(f"{self._path}.{name}", self.seen)

    def __call__(self, **options: Any) -> None:
        self.seen.append((self._path, options))


@pytest.mark.parametrize(
    ("make", "path", "request_", "sent"),
    [
        (openai_endpoint, "chat.completions.create", {"messages": []}, {"messages": []}),
        (responses_endpoint, "responses.create", {"input": []}, {"input": []}),
        (anthropic_endpoint, "messages.create", {"messages": []}, {"messages": [], "max_tokens": 4096}),
        (ollama_endpoint, "chat", {"messages": [], "tools": [{}]}, {"messages": [], "tools": [{}]}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_is_called_with_model_options_and_request(
    make: Any, path: str, request_: dict[str, Any], sent: dict[str, Any], stream: bool
) -> None:
    client = Asked("client")
    created = make(client, "m", stream=stream, temperature=0.5)
    asked = created.ask(request_)
    if inspect.isawaitable(asked):
        await asked
    counted = {"stream_options": {"include_usage": True}} if stream and make is openai_endpoint else {}
    expected = {"model": "m", "stream": stream, "temperature": 0.5, **counted, **sent}
    assert client.seen == [(f"client.{path}", expected)]
    assert "m" in repr(created)


class Refuses:
    """A server that takes only some keys, and says so as Fireworks and Azure do."""

    def __init__(self, message: str, status: int = 400) -> None:
        self.error = ApiError(status, message)
        self.sent: list[Any] = []  # of each request
        self.faults: list[Exception] = []  # of the next requests without the key
        self.chat = self.completions = self

    async def create(self, **keys: Any) -> Any:
        self.sent.append(keys.get("stream_options", "none"))
        if "stream_options" in keys:
            raise self.error
        if self.faults:
            raise self.faults.pop(0)
        return says("hi")


async def test_a_server_that_refuses_to_count_tokens_gets_the_request_again_without_counting() -> None:
    server = Refuses("Extra inputs are not permitted, field: 'stream_options'")
    endpoint = openai_endpoint(server, "m")
    for _ in range(2):
        assert await endpoint.ask({"messages": []}) == says("hi")
    assert server.sent == [{"include_usage": True}, "none", "none"]


async def test_a_server_that_also_fails_without_counts_gets_the_next_request_with_counting() -> None:
    server = Refuses("messages[3] is invalid: 'stream_options'")
    server.faults.append(ApiError(400, "messages[3] is invalid"))
    endpoint = openai_endpoint(server, "m")
    with pytest.raises(ApiError):
        await endpoint.ask({"messages": []})
    await endpoint.ask({"messages": []})
    assert server.sent == [{"include_usage": True}, "none"] * 2


@pytest.mark.parametrize(
    "server", [Refuses("the field 'tools' is not permitted"), Refuses("no stream_options now", 503)], ids=["400", "503"]
)
async def test_another_error_than_a_refusal_to_count_reaches_the_caller(server: Refuses) -> None:
    with pytest.raises(ApiError):
        await openai_endpoint(server, "m").ask({"messages": []})
    assert len(server.sent) == 1


@pytest.mark.parametrize(("given", "sent"), [({"include_usage": False}, {"include_usage": False}), (None, "none")])
async def test_stream_options_of_a_program_are_sent_as_they_are(given: Any, sent: Any) -> None:
    server = Refuses("no")
    with contextlib.suppress(ApiError):
        await openai_endpoint(server, "m", stream_options=given).ask({"messages": []})
    assert server.sent == [sent]


@pytest.mark.parametrize(("stream", "method"), [(True, "generate_content_stream"), (False, "generate_content")])
def test_gemini_gets_its_options_in_the_config(stream: bool, method: str) -> None:
    client = Asked("google")
    created = gemini_endpoint(client, "m", stream=stream, temperature=0.5)
    created.ask({"contents": [], "config": {"tools": [{}]}})
    config = {"temperature": 0.5, "tools": [{}]}
    assert client.seen == [(f"google.aio.models.{method}", {"model": "m", "contents": [], "config": config})]


@pytest.mark.parametrize("make", [openai_endpoint, gemini_endpoint])
@pytest.mark.parametrize("option", ["tools", "messages", "contents", "tool_choice", "input", "config"])
def test_an_option_that_the_loop_writes_is_refused(make: Any, option: str) -> None:
    with pytest.raises(SetupError, match=f"the loop writes {option} into every request"):
        make(Asked("google"), "m", **{option: []})


def own_client() -> Any:
    """Returns a client of a subclass in a program of its own."""

    class OwnClient(openai.AsyncOpenAI):
        pass

    return OwnClient(api_key="k")


@pytest.mark.parametrize(
    ("make", "dialect"),
    [
        (lambda: openai.AsyncOpenAI(api_key="k"), "openai"),
        (own_client, "openai"),
        (lambda: openai.AsyncAzureOpenAI(api_key="k", api_version="1", azure_endpoint="http://localhost"), "openai"),
        (lambda: anthropic.AsyncAnthropic(api_key="k"), "anthropic"),
        (lambda: genai.Client(api_key="k"), "gemini"),
        (lambda: genai.Client(api_key="k").aio, "gemini"),
        (lambda: ollama.AsyncClient(), "ollama"),
    ],
)
async def test_the_official_clients_are_recognized(make: Any, dialect: str) -> None:
    assert endpoint_of(make(), "m", temperature=0).dialect.name == dialect


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: openai.OpenAI(api_key="k"), "openai.AsyncOpenAI"),
        (lambda: anthropic.Anthropic(api_key="k"), "anthropic.AsyncAnthropic"),
        (lambda: ollama.Client(), "ollama.AsyncClient"),
    ],
)
def test_a_blocking_client_is_refused_with_the_async_class(make: Any, instead: str) -> None:
    with pytest.raises(SetupError, match=f"blocks the event loop: give a {instead}"):
        endpoint_of(make(), "m")


@pytest.mark.parametrize(
    ("make_endpoint", "make", "says"),
    [
        (
            openai_endpoint,
            lambda: anthropic.AsyncAnthropic(api_key="k"),
            "another provider: give it to anthropic_endpo",
        ),
        (anthropic_endpoint, lambda: openai.AsyncOpenAI(api_key="k"), "another provider: give it to openai_endpoint"),
        (gemini_endpoint, lambda: openai.AsyncOpenAI(api_key="k"), "another provider: give it to openai_endpoint"),
        (openai_endpoint, lambda: openai.OpenAI(api_key="k"), r"blocks the event loop: give a openai\.AsyncOpenAI"),
        (responses_endpoint, lambda: openai.OpenAI(api_key="k"), r"blocks the event loop: give a openai\.AsyncOpenAI"),
        (ollama_endpoint, lambda: ollama.Client(), r"blocks the event loop: give a ollama\.AsyncClient"),
    ],
)
def test_an_endpoint_refuses_a_client_that_it_cannot_use(make_endpoint: Any, make: Any, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        make_endpoint(make(), "m")


def test_a_loop_without_an_endpoint_says_how_to_make_one() -> None:
    with pytest.raises(SetupError, match=r"is not an endpoint: give openai_endpoint\(client, model\)"):
        ToolLoop(FunctionSource(), openai.AsyncOpenAI(api_key="k"))  # type: ignore[arg-type]


@pytest.mark.parametrize("client", [None, "openai", SimpleNamespace()])
def test_any_other_client_is_refused_with_the_known_ones(client: Any) -> None:
    with pytest.raises(SetupError, match=r"openai\.AsyncOpenAI, anthropic\.AsyncAnthropic"):
        endpoint_of(client, "m")


async def answered(ask: Any) -> list[Any]:
    return [piece async for piece in Endpoint(OpenAIChat(), ask).answer({}, NameTable.empty())]


async def test_a_function_may_return_await_or_yield_its_answer() -> None:
    async def awaited(request: Any) -> Any:
        return says("hi")

    async def yielded(request: Any) -> AsyncIterator[Any]:
        yield {"choices": [{"index": 0, "delta": {"content": "hi"}}]}

    for ask in (lambda request: says("hi"), awaited, yielded):
        *deltas, turn = await answered(ask)
        assert "".join(delta.text for delta in deltas) == "hi"
        assert isinstance(turn, Turn)
        assert turn.text == "hi"


class Stream:
    """A stream that ends by `close`, as those of the official clients do."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.closed = False
        self._fault = fault

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        raise self._fault or StopAsyncIteration

    async def close(self) -> None:
        self.closed = True
        raise ConnectionError("gone already")


@pytest.mark.parametrize("fault", [None, ValueError("cut off")])
async def test_a_stream_is_closed_however_it_ends(fault: Exception | None) -> None:
    stream = Stream(fault)
    with pytest.raises(EndpointError if fault is None else ValueError, match="off"):
        await answered(lambda request: stream)
    assert stream.closed


async def _events(*chunks: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for chunk in chunks:
        yield {"choices": [{"index": 0, **chunk}]}


async def test_an_answer_that_breaks_off_in_a_call_is_an_error_with_the_partial_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "add", "arguments": '{"a":'}}
    with pytest.raises(EndpointError, match=r"broke off after 5 characters .* without a finish_reason") as raised:
        await answered(lambda request: _events({"delta": {"content": "Let's"}}, {"delta": {"tool_calls": [call]}}))
    assert raised.value.raw.text == "Let's"
    assert not caplog.records


async def test_an_answer_without_stop_reason_is_complete_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "toolbus.loop")
    *_, turn = await answered(lambda request: _events({"delta": {"content": "Hello"}}))
    assert turn.text == "Hello"
    assert "gave no stop reason for an answer" in caplog.text


@pytest.mark.parametrize(("stop", "stopped"), [("stop", "answered"), ("length", "cut")])
async def test_a_reply_tells_whether_the_answer_was_truncated(stop: str, stopped: str) -> None:
    answer = says("It is")
    answer["choices"][0]["finish_reason"] = stop
    reply = await ToolLoop(FunctionSource(), ScriptedModel(answer).endpoint).run("?")
    assert (reply.text, reply.stopped, reply.cut) == ("It is", stopped, stopped == "cut")


async def test_a_timeout_of_the_caller_ends_a_turn() -> None:
    async def never(request: Any) -> Any:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await ToolLoop(FunctionSource(), Endpoint(OpenAIChat(), never)).run("?")


def test_an_endpoint_shows_its_dialect() -> None:
    assert repr(ScriptedModel().endpoint) == "<Endpoint played openai>"


@pytest.mark.parametrize(
    ("base_url", "short"), [("https://api.mistral.ai/v1/", True), ("https://notmistral.ai/v1/", False)]
)
def test_only_mistral_gets_calls_with_ids_of_nine_letters_and_digits(base_url: str, short: bool) -> None:
    dialect = openai_endpoint(SimpleNamespace(base_url=base_url), "m").dialect
    turn = Turn(calls=(ModelCall("call_Zx81MEyC", "now", "{}"),), dialect="openai")
    (message, _) = dialect.history([turn], NameTable.empty())
    assert (len(message["tool_calls"][0]["id"]) == 9) is short
