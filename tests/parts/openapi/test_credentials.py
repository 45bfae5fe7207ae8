"""Tests where secrets are read, and the errors for missing ones."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from toolbus.errors import SetupError
from toolbus.openapi import env
from toolbus.parts.openapi.api_settings import Placement, read_secret


async def token() -> str:
    return "from a function"


@pytest.mark.parametrize(("secret", "value"), [("plain", "plain"), (token, "from a function"), (lambda: "x", "x")])
async def test_a_secret_is_a_text_or_a_function(secret: Any, value: str) -> None:
    assert await read_secret(secret) == value


@pytest.mark.parametrize("secret", ["", "a\nb", "a ", "ä", lambda: None, lambda: 7])
async def test_what_cannot_be_sent_is_refused_without_showing_it(secret: Any) -> None:
    with pytest.raises(
        SetupError,
        match="is not a text of printable ASCII characters, without blanks around it: correct auth=",
    ):
        await read_secret(secret)


async def test_what_a_function_raises_goes_to_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> str:
        raise ValueError("the token abc has expired")

    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(SetupError, match="the function that returns a credential raised ValueError"),
    ):
        await read_secret(fails)
    assert "has expired" in caplog.text


async def test_basic_authentication_is_encoded_and_no_placement_shows_its_secret() -> None:
    placement = Placement("header", "Authorization", "basic", "user:pass")
    assert await placement.value() == ("Basic dXNlcjpwYXNz", "user:pass")
    assert "pass" not in repr(placement)


def test_a_variable_that_is_not_set_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(SetupError, match="NO_SUCH_KEY is not set: set it, and hand it on with `toolbus run"):
        env("NO_SUCH_KEY")
