from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from aiohttp import web

from tests.parts.models.loop.model_server import Recording, Refuses, serving
from tests.parts.models.loop.official_clients import official
from tests.support.waiting import WAIT_SECONDS
from toolbus.errors import SetupError
from toolbus.loop import Endpoint, ollama_endpoint
from toolbus.parts.council.settings import SidecarSettings
from toolbus.parts.council.sidecar import Completion, Question, SidecarError, completion_of, model_of, sidecar_model
from toolbus.parts.models.dialects.dialect import EndpointError
from toolbus.parts.models.dialects.mcp import Mcp
from toolbus.parts.models.dialects.openai_chat import OpenAIChat

KEY = "sk-very-secret-0123456789"
FUNCTION = {
    "name": "call_tool",
    "description": "Looks something up.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}
QUESTION = Question(
    ({"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello?"}),
    temperature=0.4,
    top_p=0.8,
    max_tokens=77,
)
CALLING = replace(QUESTION, function=FUNCTION)


def says(text: str | None, arguments: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if arguments is not None:
        function = {"name": "call_tool", "arguments": arguments}
        message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


class Server:
    """Answers with one status and body after another, and records the requests."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.url = ""  # until it listens

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        status, body = self.answers.pop(0)
        return web.Response(status=status, body=body if isinstance(body, bytes) else json.dumps(body).encode())


@asynccontextmanager
async def server_of(*answers: tuple[int, Any]) -> AsyncIterator[Server]:
    server = Server(*answers)
    application = web.Application()
    application.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield server
    finally:
        await runner.cleanup()


async def ask(server: Server, question: Question = QUESTION, **options: Any) -> Completion:
    model = sidecar_model(SidecarSettings(server.url, "small"), **options)
    assert model is not None
    return completion_of(await model(question))


async def failure_of(*answers: tuple[int, Any], **options: Any) -> SidecarError:
    async with server_of(*answers) as server:
        with pytest.raises(SidecarError) as caught:
            await ask(server, api_key=KEY, **options)
    assert KEY not in str(caught.value) + repr(caught.value)
    return caught.value


# -- settings --------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_original() -> None:
    assert SidecarSettings() == SidecarSettings("", "", 0.7, 0.9, 1024)


@pytest.mark.parametrize(
    "settings",
    [
        {"connectionProfileId": "local", "model": "m", "temperature": 0, "topP": 1, "maxTokens": 64},
        {"connection": "local", "model": "m", "temperature": 0.0, "top_p": 1.0, "max_tokens": 64.0},
        {"connection_profile_id": "local", "model": "m", "temperature": 0, "top_p": 1, "max_tokens": 64},
    ],
)
def test_settings_are_read_in_each_spelling(settings: dict[str, Any]) -> None:
    assert SidecarSettings.read(settings) == SidecarSettings("local", "m", 0, 1, 64)


def test_a_missing_or_null_setting_has_its_default() -> None:
    assert SidecarSettings.read({"model": None, "topP": 0.5}) == SidecarSettings(top_p=0.5)


def test_an_unknown_setting_is_named_in_a_warning_with_the_nearest_known_one(caplog: pytest.LogCaptureFixture) -> None:
    assert SidecarSettings.read({"temprature": 1}) == SidecarSettings()
    assert "unknown keys are ignored: temprature (did you mean temperature?)" in caplog.text


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ([], "sidecar is [], it must be an object"),
        ({"temperature": 3}, "sidecar.temperature is 3, it must be a number from 0 to 2"),
        ({"temperature": float("nan")}, "sidecar.temperature is nan"),
        ({"temperature": True}, "sidecar.temperature is True"),
        ({"topP": "0.9"}, "sidecar.topP is '0.9', it must be a number from 0 to 1"),
        ({"maxTokens": 0}, "sidecar.maxTokens is 0, it must be a whole number of at least 1"),
        ({"maxTokens": 1.5}, "sidecar.maxTokens is 1.5"),
        ({"model": 7}, "sidecar.model is 7, it must be text: put it in quotes"),
        ({"topP": 0.1, "top_p": 0.2}, "sidecar.top_p is 0.2, it sets top_p a second time: keep one of topP and top_p"),
    ],
)
def test_a_setting_that_breaks_its_rule_is_refused_with_value_rule_and_fix(settings: Any, sentence: str) -> None:
    with pytest.raises(SetupError) as caught:
        SidecarSettings.read(settings)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "lacks"),
    [(SidecarSettings(model="m"), "connection"), (SidecarSettings(connection="http://localhost/v1"), "model")],
)
def test_without_connection_or_model_there_is_no_model_but_a_reason(settings: SidecarSettings, lacks: str) -> None:
    assert sidecar_model(settings) is None
    assert f"the settings name no {lacks}" in settings.unavailable


# -- an OpenAI-compatible server -------------------------------------------------------------------------------------


async def test_a_question_reaches_the_server_with_all_its_fields() -> None:
    async with server_of((200, says("  Hi.  "))) as server:
        assert await ask(server, api_key=f" {KEY}\n") == Completion("Hi.")
    assert server.requests == [
        {
            "model": "small",
            "messages": list(QUESTION.messages),
            "temperature": 0.4,
            "top_p": 0.8,
            "max_tokens": 77,
        }
    ]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


async def test_a_function_is_forced_and_its_arguments_come_back_as_written() -> None:
    async with server_of((200, says(None, '{"query":"owls"}'))) as server:
        assert await ask(server, CALLING) == Completion("", '{"query":"owls"}')
    request = server.requests[0]
    assert request["tool_choice"] == {"type": "function", "function": {"name": "call_tool"}}
    assert request["tools"][0]["function"]["parameters"]["required"] == ["query"]
    assert "Authorization" not in server.headers[0]


async def test_a_question_may_name_another_model() -> None:
    async with server_of((200, says("Hi."))) as server:
        await ask(server, replace(QUESTION, model="large"))
    assert server.requests[0]["model"] == "large"


async def test_a_connection_may_be_a_name_and_a_client_stays_open() -> None:
    async with (
        server_of((200, says("One.")), (200, says("Two."))) as server,
        httpx.AsyncClient(timeout=WAIT_SECONDS) as client,
    ):
        settings = SidecarSettings("local", "m")
        model = sidecar_model(settings, client=client, connections={"local": f"{server.url}/chat/completions/"})
        assert model is not None
        assert [completion_of(await model(QUESTION)).text for _ in range(2)] == ["One.", "Two."]
        assert not client.is_closed


REFUSALS = [
    (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        {"max_tokens"},
        {"max_completion_tokens": 77},
    ),
    ("Unsupported value: 'temperature' does not support 0.4 with this model.", {"temperature"}, {"top_p": 0.8}),
    ("This model does not support this tool_choice", {"tool_choice"}, {"max_tokens": 77}),
    ("this model does not support tools", {"tools", "tool_choice"}, {"max_tokens": 77}),
]


@pytest.mark.parametrize(("message", "gone", "there"), REFUSALS)
async def test_an_option_that_a_server_refuses_is_left_out_from_then_on(
    message: str, gone: set[str], there: dict[str, Any]
) -> None:
    refusal = (400, {"error": {"message": message}})
    async with server_of(refusal, (200, says("Hi.")), (200, says("Again."))) as server:
        model = sidecar_model(SidecarSettings(server.url, "m"))
        assert model is not None
        assert completion_of(await model(CALLING)).text == "Hi."
        assert completion_of(await model(CALLING)).text == "Again."
    for request in server.requests[1:]:
        assert not gone & request.keys()
        assert there.items() <= request.items()


async def test_two_questions_at_once_both_survive_a_refusal_that_each_meets_by_itself() -> None:
    both_asked = asyncio.Event()
    waiting = []

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "temperature" in request:
            waiting.append(request)
            if len(waiting) == 2:
                both_asked.set()
            await both_asked.wait()
            raise SidecarError("Unsupported parameter: 'temperature'", 400)
        return says("Hi.")

    model = model_of(Endpoint(OpenAIChat(), answer, "m"))
    answers = await asyncio.wait_for(asyncio.gather(model(QUESTION), model(QUESTION)), WAIT_SECONDS)
    assert [completion_of(each).text for each in answers] == ["Hi.", "Hi."]


async def test_an_error_that_names_no_option_of_the_request_is_raised_at_once() -> None:
    refused = await failure_of((400, {"error": {"message": "unknown model small"}}))
    assert (refused.status_code, refused.message.endswith("answered 400: unknown model small")) == (400, True)


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (
            401,
            {"error": {"message": f"Incorrect API key provided: {KEY}"}},
            "401: Incorrect API key provided: [hidden]",
        ),
        (401, {"error": "no"}, "check the API key"),
        (500, b"<html>\n oops\n</html>", "answered 500: <html> oops </html>"),
        (422, {"detail": [{"msg": "bad"}]}, '422: {"detail": [{"msg": "bad"}]}'),
        (200, b"<html>", "is the connection the base URL of an OpenAI-compatible server, with its /v1?"),
        (200, {"error": {"message": f"overloaded {KEY}"}}, "overloaded [hidden]"),
        (302, b"", "answered 302"),
        (500, b"", "no reason given"),
        (500, b"x" * 2000, "xxx…"),
        (200, b"x" * (4 * 1024 * 1024 + 1), "answered with more than 4096 KiB"),
    ],
)
async def test_a_fault_of_the_server_is_a_sentence_without_the_key(status: int, body: Any, sentence: str) -> None:
    refused = await failure_of((status, body))
    assert sentence in str(refused)
    assert str(refused).startswith("the sidecar model failed: http://127.0.0.1:")
    assert len(str(refused)) < 700


@pytest.mark.parametrize("host", ["127.0.0.1:9", "é..example", "xn--"])
async def test_an_unreachable_server_is_reported_as_such(host: str) -> None:
    model = sidecar_model(SidecarSettings(f"http://{host}/v1", "m"), timeout_seconds=5)
    assert model is not None
    with pytest.raises(SidecarError, match=r"cannot be reached: .*: is the server running"):
        await model(QUESTION)


async def test_a_server_that_never_answers_ends_at_the_bound() -> None:
    async with hanging() as url:
        model = sidecar_model(SidecarSettings(url, "m"), timeout_seconds=0.05)
        assert model is not None
        with pytest.raises(SidecarError, match=r"gave no answer within 0\.05 seconds"):
            await model(QUESTION)


@asynccontextmanager
async def hanging() -> AsyncIterator[str]:
    """A server that takes one connection and says nothing."""
    gone, closed = asyncio.Event(), asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        gone.set()
        await asyncio.wait_for(closed.wait(), WAIT_SECONDS)
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("connection", ["locl", "ftp://x/v1", "http://", "http://[::1", "127.0.0.1:8080"])
def test_a_connection_that_is_neither_url_nor_known_is_refused_with_those_that_are(connection: str) -> None:
    with pytest.raises(SetupError, match=r"give the base URL .* or the name of a connection \(known: local\)"):
        sidecar_model(SidecarSettings(connection, "m"), connections={"local": "http://localhost/v1"})


@pytest.mark.parametrize("connection", [f"http://u:{KEY}@h/v1", f"http://h/v1?key={KEY}", f"h:{KEY}@", "http://h#f"])
def test_a_url_that_holds_a_key_is_refused_without_showing_it(connection: str) -> None:
    with pytest.raises(SetupError, match="set TOOLBUS_SIDECAR_API_KEY in the environment") as caught:
        sidecar_model(SidecarSettings(connection, "m"))
    assert KEY not in str(caught.value)


def test_a_url_that_holds_a_key_is_refused_without_a_model_too_since_settings_are_shown() -> None:
    for connection in (f"http://u:{KEY}@h/v1", f"http://h/v1?key={KEY}"):
        with pytest.raises(SetupError, match="set TOOLBUS_SIDECAR_API_KEY in the environment") as caught:
            SidecarSettings.read({"connection": connection})
        assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", ["two words", "a\nb", "ключ"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(SetupError, match="copy it again, and set TOOLBUS_SIDECAR_API_KEY in the env") as caught:
        sidecar_model(SidecarSettings("http://h/v1", "m"), api_key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_an_invalid_timeout_is_refused(seconds: float) -> None:
    with pytest.raises(SetupError, match="timeout_seconds"):
        sidecar_model(SidecarSettings("http://h/v1", "m"), timeout_seconds=seconds)


def test_without_httpx_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(SetupError, match=r"pip install 'toolbus\[council\]'"):
        sidecar_model(SidecarSettings("http://h/v1", "m"))


# -- any provider's endpoint -----------------------------------------------------------------------------------------

FORCED: dict[str, dict[str, Any]] = {
    "openai": {
        "temperature": 0.4,
        "top_p": 0.8,
        "max_tokens": 77,
        "tool_choice": {"type": "function", "function": {"name": "call_tool"}},
    },
    "openai-responses": {
        "temperature": 0.4,
        "top_p": 0.8,
        "max_output_tokens": 77,
        "tool_choice": {"type": "function", "name": "call_tool"},
    },
    "anthropic": {"max_tokens": 77, "tool_choice": {"type": "tool", "name": "call_tool"}},
    "gemini": {
        "generationConfig": {"temperature": 0.4, "topP": 0.8, "maxOutputTokens": 77},
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["call_tool"]}},
    },
    "ollama": {"options": {"temperature": 0.4, "top_p": 0.8, "num_predict": 77}},
}


@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")  # of Google's client
@pytest.mark.parametrize("flavour", ["openai", "responses", "anthropic", "gemini", "ollama"])
async def test_each_official_client_gets_every_option_in_its_providers_place(flavour: str) -> None:
    async with serving(flavour, "one", "text") as server, official(server) as endpoint:
        model = model_of(endpoint)
        called = completion_of(await model(CALLING))
        settings = completion_of(await model(QUESTION))
    assert called.arguments is not None
    assert isinstance(json.loads(str(called.arguments)), dict)
    assert settings.text
    assert settings.arguments is None
    forcing, plain = server.requests
    forced = FORCED[server.recording.dialect]
    assert {key: forcing.get(key) for key in forced} == forced
    assert "call_tool" in json.dumps(forcing.get("tools"))
    assert not any(plain.get(key) for key in ("tools", "tool_choice", "toolConfig"))


@pytest.mark.parametrize("flavour", ["openai", "ollama"])
async def test_a_server_without_tools_gets_a_question_without_function(flavour: str) -> None:
    refusal = Recording.read(flavour).refusal
    async with serving(flavour, Refuses(**refusal), "text") as server, official(server) as endpoint:
        settings = completion_of(await model_of(endpoint)(CALLING))
    assert settings.text
    assert not server.requests[1].get("tools")


@pytest.mark.parametrize("flavour", ["openai", "anthropic", "ollama"])
async def test_the_sidecars_model_takes_the_place_of_the_endpoints(flavour: str) -> None:
    async with serving(flavour, "text") as server, official(server) as endpoint:
        await model_of(endpoint, sidecar=SidecarSettings(model="other"))(QUESTION)
    assert server.requests[0]["model"] == "other"


async def test_options_that_a_program_set_for_ollama_stay_beside_those_of_a_question() -> None:
    class Client:
        async def chat(self, **request: Any) -> dict[str, Any]:
            asked.append(request)
            return {"message": {"content": "Hi."}, "done": True}

    asked: list[dict[str, Any]] = []
    endpoint = ollama_endpoint(Client(), "m", stream=False, options={"num_ctx": 8192, "temperature": 0})
    await model_of(endpoint)(QUESTION)
    assert asked[0]["options"] == {"num_ctx": 8192, "temperature": 0.4, "top_p": 0.8, "num_predict": 77}


async def test_an_error_of_a_client_is_raised_where_no_option_can_be_left_out() -> None:
    def broken(request: Any) -> Any:
        raise TypeError("something else")

    with pytest.raises(TypeError, match="something else"):
        await model_of(Endpoint(OpenAIChat(), broken))(QUESTION)


async def test_a_dialect_without_a_model_is_refused_with_its_own_error() -> None:
    with pytest.raises(NotImplementedError, match="MCP is not a chat"):
        await model_of(Endpoint(Mcp(), lambda request: None))(QUESTION)


async def test_a_fault_within_an_answer_is_an_endpoint_error() -> None:
    with pytest.raises(EndpointError, match="overloaded"):
        await model_of(Endpoint(OpenAIChat(), lambda request: {"error": {"message": "overloaded"}}))(QUESTION)


@pytest.mark.parametrize(
    ("stop", "text", "calls", "sentence"),
    [
        ("content_filter", None, [], "its answer is refused: content_filter"),
        ("insufficient_system_resource", "", [], "its answer is failed: insufficient_system_resource"),
        ("length", None, [{"id": "c1", "function": {"name": "call_tool", "arguments": '{"qu'}}], "its answer is cut"),
    ],
)
async def test_an_answer_that_ended_before_it_held_anything_is_an_error_with_the_reason(
    stop: str, text: str | None, calls: list[Any], sentence: str
) -> None:
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    answer = {"choices": [{"message": message, "finish_reason": stop}]}
    with pytest.raises(EndpointError, match=sentence):
        await model_of(Endpoint(OpenAIChat(), lambda request: answer))(CALLING)


async def test_a_text_that_was_cut_is_an_answer() -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "Hi th"}, "finish_reason": "length"}]}
    model = model_of(Endpoint(OpenAIChat(), lambda request: answer))
    assert completion_of(await model(QUESTION)).text == "Hi th"
