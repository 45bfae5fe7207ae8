"""Tests that what a program gave to its endpoint holds for the questions of a council, for every provider."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from toolbus.errors import SetupError
from toolbus.functions.scope import ToolScope
from toolbus.loop import anthropic_endpoint, gemini_endpoint, ollama_endpoint, openai_endpoint, responses_endpoint
from toolbus.parts.council.settings import SidecarSettings
from toolbus.parts.council.sidecar import Question, lent, model_of
from toolbus.parts.models.loop.endpoint import Endpoint
from toolbus.sdk.generation import GenerationRequest

DEFAULTS = SidecarSettings()
QUESTION = Question(({"role": "user", "content": "Hello?"},), defaults=DEFAULTS.defaults)
COUNCILS = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 1024}


class Asked(Exception):
    """Ends a request, once it is known what it asks."""


class Client:
    """Takes the requests of every provider's client, and records the last one."""

    def __init__(self) -> None:
        self.request: dict[str, Any] = {}
        self.chat = self._chat()
        self.responses = self.messages = SimpleNamespace(create=self.ask)
        self.models = SimpleNamespace(generate_content_stream=self.ask)

    def _chat(self) -> Any:
        def chat(**request: Any) -> Any:
            self.ask(**request)

        chat.completions = SimpleNamespace(create=self.ask)  # type: ignore[attr-defined]
        return chat

    def ask(self, **request: Any) -> Any:
        self.request = request
        raise Asked


def _plain(request: dict[str, Any]) -> dict[str, Any]:
    return request


def _config(request: dict[str, Any]) -> dict[str, Any]:
    return dict(request["config"])


def _options(request: dict[str, Any]) -> dict[str, Any]:
    return dict(request["options"])


Case = tuple[Callable[..., Endpoint], dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]], dict[str, Any]]
# What makes the endpoint, its options, where they stand in a request, and what is there of the council's defaults.
CASES: dict[str, Case] = {
    "chat": (openai_endpoint, {"temperature": 0, "max_tokens": 9}, _plain, {"top_p": 0.9}),
    "chat, the newer name of the length": (
        openai_endpoint,
        {"max_completion_tokens": 9},
        _plain,
        {"temperature": 0.7, "top_p": 0.9, "max_tokens": None},
    ),
    "responses": (
        responses_endpoint,
        {"top_p": 0.5, "max_output_tokens": 9},
        _plain,
        {"temperature": 0.7},
    ),
    "anthropic": (anthropic_endpoint, {"max_tokens": 9}, _plain, {"temperature": 0.7, "top_p": None}),
    "anthropic without a number": (anthropic_endpoint, {"temperature": 0.1}, _plain, {"max_tokens": 1024}),
    "gemini": (gemini_endpoint, {"temperature": 0.1, "max_output_tokens": 9}, _config, {"top_p": 0.9}),
    "ollama": (
        lambda client, model, **options: ollama_endpoint(client, model, options=options),
        {"temperature": 0.1, "num_predict": 9},
        _options,
        {"top_p": 0.9},
    ),
}


@pytest.mark.parametrize(("make", "own", "place", "councils"), CASES.values(), ids=CASES.keys())
async def test_options_of_an_endpoint_are_not_overwritten_by_defaults(
    make: Callable[..., Endpoint],
    own: dict[str, Any],
    place: Callable[[dict[str, Any]], dict[str, Any]],
    councils: dict[str, Any],
) -> None:
    client = Client()
    with pytest.raises(Asked):
        await model_of(make(client, "m", **own))(QUESTION)
    asked = place(client.request)
    assert {name: asked.get(name) for name in (*own, *councils)} == {**own, **councils}


async def test_an_endpoint_without_options_gets_the_defaults() -> None:
    client = Client()
    with pytest.raises(Asked):
        await model_of(openai_endpoint(client, "m"))(QUESTION)
    assert {name: client.request[name] for name in COUNCILS} == COUNCILS


async def test_a_setting_that_is_not_at_its_default_goes_before_the_endpoints_option() -> None:
    client, settings = Client(), replace(DEFAULTS, temperature=0.3)
    question = replace(QUESTION, temperature=settings.temperature, defaults=settings.defaults)
    with pytest.raises(Asked):
        await model_of(openai_endpoint(client, "m", temperature=0, max_tokens=9))(question)
    assert (client.request["temperature"], client.request["max_tokens"]) == (0.3, 9)


@pytest.mark.parametrize(("wanted", "sent"), [(None, 0), (0.5, 0.5)])
async def test_a_lent_model_uses_the_temperature_of_its_endpoint_unless_the_request_has_one(
    wanted: float | None, sent: float
) -> None:
    client = Client()
    request = GenerationRequest(QUESTION.messages, "raw", 5, wanted, (), "", ToolScope())  # type: ignore[arg-type]
    with pytest.raises(Asked):
        await lent(model_of(openai_endpoint(client, "m", temperature=0)))(request)
    assert (client.request["temperature"], client.request["max_tokens"]) == (sent, 5)


def test_a_model_of_a_value_that_is_not_an_endpoint_is_refused_at_once() -> None:
    with pytest.raises(SetupError, match=r"is not an endpoint: give openai_endpoint\(client, model\)"):
        model_of(Client())  # type: ignore[arg-type]
