"""Requests to callbacks are written as HTTP wants them; what a plugin gets over a socket is in test_callbacks.py."""

from __future__ import annotations

import pytest
from yarl import URL

from toolbus.bus.gateway.callback_request import CallbackRequest
from toolbus.bus.outbound import open_session


@pytest.mark.parametrize("value", ["a\r\nHost: b", "a\nb", "a\0b", "a\x7fb"])
async def test_a_header_with_a_control_character_is_refused_before_anything_is_sent(value: str) -> None:
    async with open_session(connections=0, seconds=None) as session:
        request = CallbackRequest(session, URL("http://127.0.0.1:1/"), {})
        with pytest.raises(ValueError, match="control character"):
            await request.send(session, b"", {"X-Toolbus-User": value})
        with pytest.raises(ValueError, match="control character"):
            CallbackRequest(session, URL("http://127.0.0.1:1/"), {"Authorization": value})
