from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.parts.council.council_cases import ANN, BOB, ran, texts_of
from tests.parts.council.fake_tool_source import (
    USER,
    FakeToolSource,
    FixedRolls,
    RecordedCall,
    failed,
    member,
    settings,
    tool,
)
from toolbus.errors import Code, SetupError
from toolbus.extension import (
    Council,
    CouncilCompleted,
    CouncilStarted,
    Member,
    MemberDone,
    Scene,
    ToolsFailed,
)
from toolbus.parts.council.settings import CouncilTimings

# -- events ----------------------------------------------------------------------------------------------------------


def kinds(events: list[Any]) -> list[str]:
    return [event.described()["event"] for event in events]


async def test_events_tell_what_happens_under_the_names_of_the_original() -> None:
    events: list[Any] = []
    fake = FakeToolSource(tool("look"), tool("listen"), listen=failed(Code.TOOL, "deaf"))
    ann = member("Ann", "look", "listen", item_id="i", avatar_url="/a.png")
    deliberation = await ran(
        Council(fake, settings(ann, BOB)), run_id="r1", scene=Scene("chat"), on_event=events.append
    )
    assert [type(event) for event in events] == [CouncilStarted, MemberDone, MemberDone, CouncilCompleted, ToolsFailed]
    started, ann_done, _, completed, some_failed = (event.described() for event in events)
    head = {"generationId": "r1", "chatId": "chat"}
    assert started == {"event": "COUNCIL_STARTED", **head, "memberCount": 2}
    assert ann_done == {
        "event": "COUNCIL_MEMBER_DONE",
        **head,
        "memberId": "ann",
        "memberName": "Ann",
        "memberItemId": "i",
        "memberAvatarUrl": "/a.png",
        "results": [each.described() for each in deliberation.outcomes[:2]],
    }
    assert completed["event"] == "COUNCIL_COMPLETED"
    assert completed["resultCount"] == 3
    assert completed["totalDurationMs"] == round(deliberation.seconds * 1000)
    assert some_failed == {
        "event": "COUNCIL_TOOLS_FAILED",
        **head,
        "failedTools": [
            {
                "memberId": "ann",
                "memberName": "Ann",
                "toolName": "listen",
                "toolDisplayName": "listen",
                "error": "deaf",
            }
        ],
        "successCount": 2,
        "failedCount": 1,
    }
    json.dumps([event.described() for event in events])


@pytest.mark.parametrize("problem", [RuntimeError("broken page"), asyncio.CancelledError()])
async def test_an_exception_of_on_event_is_logged_and_ends_nothing(
    problem: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []

    async def on_event(event: Any) -> None:
        events.append(event)
        raise problem

    with caplog.at_level(logging.WARNING):
        await ran(Council(FakeToolSource(tool("look")), settings(BOB)), on_event=on_event)
    assert kinds(events) == ["COUNCIL_STARTED", "COUNCIL_MEMBER_DONE", "COUNCIL_COMPLETED"]
    assert len(caplog.records) == 3


async def test_an_on_event_that_never_returns_blocks_no_run() -> None:
    events: list[Any] = []

    async def on_event(event: Any) -> None:
        events.append(event)
        await asyncio.Event().wait()

    council = Council(FakeToolSource(tool("look")), settings(BOB), timings=CouncilTimings(event_seconds=0.01))
    deliberation = await ran(council, on_event=on_event)
    assert [each.success for each in deliberation.outcomes] == [True]
    assert kinds(events) == ["COUNCIL_STARTED", "COUNCIL_MEMBER_DONE", "COUNCIL_COMPLETED"]


# -- retry -----------------------------------------------------------------------------------------------------------


def failing_at_first(*places: tuple[str, str]) -> Callable[[RecordedCall], str]:
    """Returns a tool that fails once for each of these members and tools."""
    left = set(places)

    def look(asked: RecordedCall) -> str:
        assert asked.context.member is not None
        place = asked.context.member["memberId"], asked.name
        if place in left:
            left.discard(place)
            raise RuntimeError("fog")
        return f"{place[0]} {place[1]}"

    return look


def asked_of(fake: FakeToolSource) -> list[tuple[str, str]]:
    return [(asked.context.member["memberId"], asked.name) for asked in fake.calls if asked.context.member]


async def test_a_retry_runs_only_failed_tools_and_not_anothers_success_of_the_same_tool() -> None:
    """The original system selects by the tool's name, so another member's successful run is made again."""
    events: list[Any] = []
    fake = FakeToolSource(tool("look"), tool("listen"), look=failing_at_first(("ann", "look")))
    council = Council(fake, settings(ANN, member("Bob", "look", chance=0.001)), rng=FixedRolls(0.0))
    first = await ran(council)
    assert texts_of(first) == ["! fog", "what listen says", "bob look"]
    fake.calls.clear()
    again = await council.retry(first, [USER], on_event=events.append)
    assert asked_of(fake) == [("ann", "look")]
    assert texts_of(again) == ["ann look", "what listen says", "bob look"]
    assert (again.run_id, again.failed) == (first.run_id, ())
    assert again.seconds > first.seconds
    assert "ann look" in again.block
    assert kinds(events) == ["COUNCIL_STARTED", "COUNCIL_MEMBER_DONE", "COUNCIL_COMPLETED"]
    assert events[0].member_count == 1


async def test_members_whose_ids_begin_alike_are_distinct_everywhere() -> None:
    """The original system knows a member by the first eight characters of its id."""
    one, two = (Member(id=f"12345678-{end}", name=end, tools=("look",)) for end in "ab")
    fake = FakeToolSource(tool("look"), look=failing_at_first((two.id, "look")))
    council = Council(fake, settings(one, two))
    first = await ran(council)
    assert texts_of(first) == ["12345678-a look", "! fog"]
    fake.calls.clear()
    assert texts_of(await council.retry(first, [USER])) == ["12345678-a look", "12345678-b look"]
    assert asked_of(fake) == [(two.id, "look")]


async def test_a_retry_can_select_some_of_the_failed_tools() -> None:
    look = failing_at_first(("ann", "look"), ("bob", "look"))
    fake = FakeToolSource(tool("look"), tool("listen"), look=look)
    council = Council(fake, settings(ANN, BOB))
    first = await ran(council)
    fake.calls.clear()
    again = await council.retry(first, [USER], only=[("bob", "look")])
    assert asked_of(fake) == [("bob", "look")]
    assert texts_of(again) == ["! fog", "what listen says", "bob look"]


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ([], "only is empty: leave it out to retry all; failed in this run: ann look"),
        (
            [("ann", "look"), ("ann", "listen")],
            "only names ann listen, which did not fail in this run: failed in this run: ann look",
        ),
        ([("nobody", "look")], "only names nobody look"),
    ],
)
async def test_a_retry_of_a_tool_that_did_not_fail_is_refused_and_runs_nothing(
    only: list[tuple[str, str]], words: str
) -> None:
    fake = FakeToolSource(tool("look"), tool("listen"), look=failing_at_first(("ann", "look")))
    council = Council(fake, settings(ANN))
    first = await ran(council)
    fake.calls.clear()
    with pytest.raises(SetupError, match=words):
        await council.retry(first, [USER], only=only)
    assert fake.calls == []


async def test_a_retry_without_failures_returns_the_same_deliberation_and_sends_no_event() -> None:
    events: list[Any] = []
    fake = FakeToolSource(tool("look"), tool("listen"))
    council = Council(fake, settings(ANN))
    first = await ran(council)
    assert await council.retry(first, [USER], on_event=events.append) is first
    assert events == []


async def test_a_tool_that_fails_again_or_is_withdrawn_stays_a_failure_in_its_place() -> None:
    fake = FakeToolSource(tool("look"), tool("listen"), look=failed(Code.TOOL, "fog"), listen=failed(Code.TOOL, "deaf"))
    council = Council(fake, settings(ANN))
    first = await ran(council)
    fake.offered = (tool("look"),)
    events: list[Any] = []
    again = await council.retry(first, [USER], on_event=events.append)
    assert texts_of(again) == ["! fog", "! listen is not there now"]
    assert [len(each.outcomes) for each in events if isinstance(each, MemberDone)] == [2]
    without = await council.retry(first, [USER], members=[member("Ann", "look")])
    assert texts_of(without) == ["! fog", "! listen is not there now"]


async def test_a_run_ends_with_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeToolSource(tool("look"), tool("listen"), look=failed(Code.TOOL, "fog"))
    with caplog.at_level(logging.INFO, "toolbus.extension"):
        await ran(Council(fake, settings(ANN)), run_id="r1")
    (line,) = caplog.messages
    assert re.fullmatch(r"council run 'r1' ended results=2 failed=1 seconds=\d+\.\d\d", line)


async def test_a_tool_that_timed_out_says_in_a_field_of_its_own_which_time_it_had() -> None:
    fake = FakeToolSource(tool("kb:look"), tool("listen"), look=failed(Code.DEADLINE_EXCEEDED, "late"))
    deliberation = await ran(Council(fake, settings(member("Ann", "kb:look", "listen"), timeout_seconds=15)))
    late, other = deliberation.described()["results"]
    assert (late["error"], late["timeoutMs"]) == ("Tool invocation 'look' timed out", 15000)
    assert "timeoutMs" not in other
