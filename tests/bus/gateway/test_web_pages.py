"""Sends what Chromium sends when a web page attacks, byte for byte and without a browser (REST-21 to REST-23)."""

from __future__ import annotations

import pytest

from tests.browser.attempts import ATTEMPTS, REBINDING
from tests.browser.recording import Recorded, read_recorded, replay
from tests.bus.gateway.calling import client
from toolbus.testing import running_bus

RECORDED = read_recorded()
PAGES = ("another port", "another site", "rebound")
# GETs, whose answers no page can read.
HARMLESS = (
    "the list",
    "an icon",
    "events",
    "a web socket",
    "a window",
    "a script",
)


@pytest.mark.parametrize("page", PAGES)
async def test_every_request_of_an_attacking_page_is_answered_as_recorded_and_changes_nothing(page: str) -> None:
    async with running_bus(http="127.0.0.1:0") as bus, client(bus) as http:
        for recorded in (each for each in RECORDED if each.page == page):
            answer = await replay(bus, recorded)
            assert answer.status == recorded.status, recorded
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert not [name for name in answer.headers if name.startswith("access-control-")]
        assert (await http.get("/api/tools")).json()["tools_by_role"] == {"default": []}
        assert (await http.get("/readyz")).json() == {"status": "ready"}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each.page}-{each.attempt}")
def test_what_changes_something_is_refused(recorded: Recorded) -> None:
    refused = (403, 405, 415)  # 405: a preflight
    assert recorded.status in refused or (recorded.status == 200 and recorded.attempt.startswith(HARMLESS))
    assert recorded.page == "another port" or recorded.status == 403 or "Origin: " not in str(recorded.head)


def test_every_attempt_is_recorded() -> None:
    assert {(each.page, each.attempt) for each in RECORDED} == {
        *((page, attempt) for page in PAGES[:2] for attempt in ATTEMPTS),
        *((PAGES[2], attempt) for attempt in REBINDING),
    }
