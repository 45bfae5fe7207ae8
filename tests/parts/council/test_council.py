from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.parts.council.council_cases import ANN, BOB, model, ran, texts_of
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
from tests.support.waiting import WAIT_SECONDS
from toolbus.errors import Code, SetupError, Stage
from toolbus.extension import (
    Completion,
    Council,
    MemberDone,
    PromptTool,
    Question,
    Scene,
    SidecarSettings,
)
from toolbus.functions.call_context import ContextMessage
from toolbus.parts.council.settings import CouncilTimings
from toolbus.parts.council.tool_runner import truncate
from toolbus.protocol.tool import Result, Tool

NOT_SENT = Stage.NOT_DISPATCHED


# -- a run -----------------------------------------------------------------------------------------------------------


async def test_a_run_returns_the_outcomes_in_the_order_of_members_and_tools() -> None:
    fake = FakeToolSource(
        tool("eyes:look", display_name="Look Around"), tool("eyes:listen"), look="a wolf", listen={"db": 7}
    )
    deliberation = await ran(Council(fake, settings(ANN, BOB)), run_id="r1")
    assert [(each.key, each.display_name, each.success) for each in deliberation.outcomes] == [
        (("ann", "look"), "Look Around", True),
        (("ann", "listen"), "listen", True),
        (("bob", "look"), "Look Around", True),
    ]
    assert texts_of(deliberation) == ["a wolf", '{"db":7}', "a wolf"]
    assert (deliberation.run_id, deliberation.reused, deliberation.failed) == ("r1", False, ())
    assert "### Feedback perspective: **Bob**\n\n**Look Around:**\na wolf" in deliberation.block
    assert deliberation.seconds >= sum(each.seconds for each in deliberation.outcomes) > 0


async def test_without_participants_there_is_no_deliberation_and_no_event() -> None:
    events: list[Any] = []
    fake = FakeToolSource(tool("look"))
    council = Council(fake, settings(member("Ann", "look", chance=0), member("Bob")))
    assert await council.run([USER], on_event=events.append) is None
    assert (fake.calls, events) == ([], [])


async def test_inline_mode_leaves_the_calls_to_the_main_model_and_does_not_roll() -> None:
    fake, rolls = FakeToolSource(tool("look")), FixedRolls()
    council = Council(fake, settings(member("Ann", "look", chance=50), mode="inline"), rng=rolls)
    assert await council.run([USER]) is None
    assert fake.calls == []


async def test_members_of_a_run_replace_those_of_the_settings() -> None:
    fake = FakeToolSource(tool("look"))
    deliberation = await ran(Council(fake, settings(ANN)), members=[BOB])
    assert [each.member_id for each in deliberation.outcomes] == ["bob"]
    with pytest.raises(SetupError, match="'bob', it is the id of two members"):
        await Council(fake, settings()).run([USER], members=[BOB, BOB])


async def test_a_tool_that_is_unknown_or_not_for_councils_is_skipped_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeToolSource(tool("look"), tool("secret", council_eligible=False))
    council = Council(fake, settings(member("Ann", "gone", "secret", "look", "look"), member("Bob", "loook")))
    deliberation = await ran(council, run_id="r1")
    assert [each.tool for each in deliberation.outcomes] == ["look"]
    assert [(each["memberId"], each["toolName"]) for each in deliberation.described()["skipped"]] == [
        ("ann", "gone"),
        ("ann", "secret"),
        ("bob", "loook"),
    ]
    assert "misspelt, stopped, revoked or not council_eligible" in deliberation.skipped[0].why
    assert deliberation.skipped[2].why.endswith("did you mean look?")
    (warning,) = caplog.messages
    assert warning.startswith("council run 'r1' skips 'gone' of member 'ann', 'secret' of member 'ann', 'loook'")
    only_unknown = await ran(Council(fake, settings(member("Ann", "gone"))))
    assert only_unknown.outcomes == ()
    assert "No tools were executed for this generation." in only_unknown.block


async def test_a_qualified_name_finds_its_tool_and_a_bare_one_the_first_registered() -> None:
    fake = FakeToolSource(tool("one:look"), tool("two:look"), tool("listen"), tool("three:listen"))
    await ran(Council(fake, settings(member("Ann", "two:look", "look", "listen"))))
    assert [asked.name for asked in fake.calls] == ["two:look", "one:look", "listen"]


async def test_the_context_of_the_host_travels_beside_the_arguments() -> None:
    """Neither member nor context nor deadline is among the arguments, where a model could set it."""
    fake = FakeToolSource(tool("look"))
    ann = member("Ann", "look", role="Scout", chance=100, pack_name="Pack", avatar_url="/a.png")
    await ran(
        Council(fake, settings(ann, timeout_seconds=20)),
        scene=Scene(world_info="Snow."),
        user_id="u1",
        attributes={"channel": "dm"},
    )
    (asked,) = fake.calls
    assert (asked.arguments, asked.timeout) == ({}, 20.0)
    assert (asked.context.user_id, asked.context.attributes) == ("u1", {"channel": "dm"})
    assert asked.context.member == {
        "memberId": "ann",
        "itemId": "",
        "packId": "",
        "packName": "Pack",
        "name": "Ann",
        "role": "Scout",
        "chance": 100,
        "avatarUrl": "/a.png",
        "definition": "",
        "personality": "",
        "behavior": "",
        "genderIdentity": 3,
    }
    assert asked.context.messages == (
        ContextMessage("system", "## World info\nSnow."),
        ContextMessage("user", "Who is at the door?"),
    )


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "result", "sentence"),
    [
        ("ext:look", failed(Code.DEADLINE_EXCEEDED, "late"), "Tool invocation 'look' timed out"),
        ("ext:look", failed(Code.UNAVAILABLE, "gone", NOT_SENT), "Extension worker 'ext' is not running"),
        ("look", failed(Code.UNAVAILABLE, "the bus says why", NOT_SENT), "the bus says why"),
        ("ext:look", failed(Code.UNAVAILABLE, "gone", Stage.ACCEPTED), "Extension worker stopped"),
        ("ext:look", failed(Code.TOOL, "no eyes"), "no eyes"),
        ("ext:look", failed(Code.TOOL), "Tool invocation failed"),
        ("ext:look", Result(output_json='"dark"', is_error=True), "dark"),
        ("ext:look", Result(is_error=True), "Tool invocation failed"),
        ("ext:look", failed(Code.PERMISSION_DENIED, "u1 may not"), "u1 may not"),
        ("ext:look", failed(Code.OVERLOADED), "OVERLOADED"),
    ],
)
async def test_a_failure_has_the_sentence_of_its_kind(name: str, result: Result, sentence: str) -> None:
    deliberation = await ran(Council(FakeToolSource(tool(name), look=result), settings(BOB)))
    (outcome,) = deliberation.failed
    assert (outcome.error, outcome.content, outcome.success) == (sentence, "", False)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("problem", [RuntimeError("boom"), ValueError(), TimeoutError(), asyncio.CancelledError()])
async def test_one_failing_tool_does_not_stop_the_others(parallel: bool, problem: BaseException) -> None:
    def look(asked: RecordedCall) -> Any:
        raise problem

    deliberation = await ran(
        Council(FakeToolSource(tool("look"), tool("listen"), look=look), settings(ANN, parallel=parallel))
    )
    assert texts_of(deliberation) == [f"! {str(problem) or 'Tool invocation failed'}", "what listen says"]


async def test_null_is_an_empty_success() -> None:
    deliberation = await ran(Council(FakeToolSource(tool("look"), look=None), settings(BOB)))
    assert (deliberation.outcomes[0].success, deliberation.outcomes[0].content) == (True, "")


async def test_one_tool_cannot_fill_the_main_models_context() -> None:
    """The original system puts results of any size in front of the main model."""
    fake = FakeToolSource(tool("look"), look="é" * 100_000)
    content = (await ran(Council(fake, settings(BOB)))).outcomes[0].content
    assert len(content.encode()) <= 65_536
    assert content.endswith("é\n[truncated]")
    short = (await ran(Council(fake, settings(BOB, result_bytes=1024)))).outcomes[0].content
    assert 1000 < len(short.encode()) <= 1024
    loud = FakeToolSource(tool("look"), look=failed(Code.TOOL, "x" * 100_000))
    assert len((await ran(Council(loud, settings(BOB)))).failed[0].error) <= 65_536


def test_a_text_that_just_fits_is_not_cut() -> None:
    assert truncate("é" * 512, 1024) == "é" * 512
    assert truncate("half \ud83d", 1024) == "half \ufffd"


async def test_without_a_catalog_the_buss_tools_fail_and_prompt_tools_still_run() -> None:
    class Lost(FakeToolSource):
        async def tools(self) -> tuple[int, Sequence[Tool]]:
            raise ConnectionError("no bus there")

    council = Council(
        Lost(), settings(member("Ann", "look", "muse")), model=model, prompt_tools=[PromptTool("muse", prompt="Muse.")]
    )
    deliberation = await ran(council)
    assert [each.success for each in deliberation.outcomes] == [False, True]
    assert deliberation.failed[0].error == "the tools cannot be listed: no bus there"


async def test_a_catalog_that_never_arrives_costs_at_most_the_timeout_of_the_settings() -> None:
    class Silent(FakeToolSource):
        async def tools(self) -> tuple[int, Sequence[Tool]]:
            await asyncio.Event().wait()
            raise NotImplementedError

    council = Council(Silent(), settings(BOB, timeout_seconds=0.02, least_timeout_seconds=0))
    assert "not listed within 0.02 seconds" in (await ran(council)).failed[0].error


async def test_a_source_that_keeps_to_no_time_costs_little_more_than_the_settings_time() -> None:
    async def never(asked: RecordedCall) -> str:
        await asyncio.Event().wait()
        return ""

    once = settings(member("Ann", "look", "listen"), timeout_seconds=0.02, least_timeout_seconds=0)
    source = FakeToolSource(tool("look"), tool("listen"), look=never)
    deliberation = await ran(Council(source, once, timings=CouncilTimings(extra_seconds=0.01)))
    assert texts_of(deliberation) == ["! Tool invocation 'look' timed out", "what listen says"]


# -- order, parallel, cancelling -------------------------------------------------------------------------------------


async def test_by_default_one_tool_runs_at_a_time() -> None:
    running = []

    async def look(asked: RecordedCall) -> str:
        running.append(asked)
        await asyncio.sleep(0)
        assert running == [asked]
        running.clear()
        return "seen"

    deliberation = await ran(
        Council(FakeToolSource(tool("look"), tool("listen"), look=look, listen=look), settings(ANN, BOB))
    )
    assert texts_of(deliberation) == ["seen"] * 3


async def test_in_parallel_outcomes_keep_the_order_of_assignment() -> None:
    last_first: list[asyncio.Event] = [asyncio.Event() for _ in range(4)]
    last_first[-1].set()
    places = {("ann", "look"): 0, ("ann", "listen"): 1, ("bob", "look"): 2}

    async def wait(asked: RecordedCall) -> str:
        assert asked.context.member is not None
        place = places[asked.context.member["memberId"], asked.name]
        await asyncio.wait_for(last_first[place + 1].wait(), WAIT_SECONDS)
        last_first[place].set()
        return str(place)

    events: list[Any] = []
    fake = FakeToolSource(tool("look"), tool("listen"), look=wait, listen=wait)
    deliberation = await ran(Council(fake, settings(ANN, BOB, parallel=True)), on_event=events.append)
    assert texts_of(deliberation) == ["0", "1", "2"]
    assert [event.member.name for event in events if isinstance(event, MemberDone)] == ["Bob", "Ann"]


@pytest.mark.parametrize("parallel", [False, True])
async def test_cancelling_a_run_cancels_its_calls_and_starts_no_more(parallel: bool) -> None:
    """The original system looks at a cancellation between tools only and lets a running call go on."""
    began, ended = asyncio.Event(), []

    async def look(asked: RecordedCall) -> str:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(asked.name)
        raise NotImplementedError

    fake = FakeToolSource(tool("look"), tool("listen"), look=look)
    run = asyncio.create_task(Council(fake, settings(BOB, ANN, parallel=parallel)).run([USER]))
    await asyncio.wait_for(began.wait(), WAIT_SECONDS)
    asked = len(fake.calls)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ended == ["look"] * len(ended) != []
    assert parallel or (asked, len(fake.calls)) == (1, 1)


async def test_a_tool_that_swallows_a_cancellation_is_the_last_that_runs() -> None:
    async def look(asked: RecordedCall) -> str:
        run.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            pass
        return "went on"

    fake = FakeToolSource(tool("look"), tool("listen"), look=look)
    run = asyncio.create_task(Council(fake, settings(ANN)).run([USER]))
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [asked.name for asked in fake.calls] == ["look"]


async def test_a_run_of_tools_that_never_wait_can_be_cancelled_between_them() -> None:
    def look(asked: RecordedCall) -> str:
        asyncio.get_running_loop().call_soon(run.cancel)
        return "at once"

    fake = FakeToolSource(tool("look"), tool("listen"), look=look)
    run = asyncio.create_task(Council(fake, settings(ANN)).run([USER]))
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [asked.name for asked in fake.calls] == ["look"]


# -- prompt tools and planning ---------------------------------------------------------------------------------------


async def test_a_prompt_tool_is_answered_by_the_model_and_wins_over_a_tool_of_the_same_name() -> None:
    fake = FakeToolSource(tool("look"))
    from_file, bundled = PromptTool("look", prompt="File."), PromptTool("look", prompt="Bundled.", display_name="Look!")
    questions = []

    async def answer(question: Question) -> str:
        questions.append(question)
        return "imagined"

    council = Council(
        fake, settings(BOB), model=answer, sidecar=SidecarSettings(temperature=0.1), prompt_tools=[from_file, bundled]
    )
    deliberation = await ran(council)
    assert texts_of(deliberation) == ["imagined"]
    assert (deliberation.outcomes[0].display_name, fake.calls) == ("Look!", [])
    assert "Bundled." in questions[0].messages[0]["content"]
    assert questions[0].messages[1]["content"] == "user: Who is at the door?"
    assert questions[0].temperature == 0.1


async def test_the_result_of_a_prompt_tool_is_stored_under_its_variable() -> None:
    mood = PromptTool("mood", prompt="Name the mood.", variable="mood", deliberates=False)
    deliberation = await ran(
        Council(FakeToolSource(), settings(member("Ann", "mood")), model=model, prompt_tools=[mood])
    )
    assert deliberation.variables == {"mood": deliberation.outcomes[0].content}
    assert "model says" not in deliberation.block
    assert deliberation.outcomes[0].described()["resultVariable"] == "mood"


async def test_an_exception_of_a_model_fails_one_tool_and_not_the_run() -> None:
    problems = itertools.cycle([RuntimeError("no credit"), asyncio.CancelledError(), TypeError()])

    async def broken(question: Question) -> str:
        raise next(problems)

    council = Council(
        FakeToolSource(tool("look")),
        settings(member("Ann", "muse", "look")),
        model=broken,
        prompt_tools=[PromptTool("muse", prompt="Muse.")],
        timings=CouncilTimings(backoff_seconds=0.0),
    )
    deliberation = await ran(council)
    assert [each.success for each in deliberation.outcomes] == [False, True]


async def test_a_model_that_wants_to_end_the_program_ends_one_tool_only() -> None:
    async def leaving(question: Question) -> str:
        raise SystemExit("no license")

    muse = PromptTool("muse", prompt="Muse.")
    council = Council(
        FakeToolSource(tool("look")), settings(member("Ann", "muse", "look")), model=leaving, prompt_tools=[muse]
    )
    assert [each.error for each in (await ran(council)).outcomes] == ["no license", ""]


async def test_without_a_model_prompt_tools_are_listed_as_unavailable_and_fail_with_the_reason() -> None:
    council = Council(
        FakeToolSource(
            tool("ext:look", description="Looks.", metadata_json='{"category":"eyes"}'),
            tool("b", metadata_json="["),
            tool("x", council_eligible=False),
        ),
        settings(member("Ann", "look", "muse")),
        prompt_tools=[PromptTool("muse", prompt="Muse.", category="story")],
    )
    listed = await council.available()
    shown = [(each.name, each.kind, each.source, each.category, each.available) for each in listed]
    assert shown == [
        ("ext:look", "extension", "ext", "eyes", True),
        ("b", "extension", "", "extension", True),
        ("muse", "prompt", "", "story", False),
    ]
    assert "for example http://127.0.0.1:8080/v1" in listed[2].reason
    assert listed[0].described() == {
        "name": "ext:look",
        "qualifiedName": "ext:look",
        "displayName": "look",
        "description": "Looks.",
        "source": "ext",
        "category": "eyes",
        "kind": "extension",
        "available": True,
        "reason": "",
    }
    deliberation = await ran(council)
    assert texts_of(deliberation) == ["what ext:look says", f"! {listed[2].reason}"]


async def test_arguments_are_planned_where_the_settings_say_so() -> None:
    schema = json.dumps({"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]})
    fake = FakeToolSource(tool("look", parameters_json=schema, display_name="Look"), tool("listen"))

    async def planner(question: Question) -> Completion:
        return Completion(arguments={"query": "door", "context": "made up"})

    await ran(Council(fake, settings(ANN, plan_arguments=True), model=planner))
    assert fake.calls[0].arguments["query"] == "door"
    assert fake.calls[0].context.messages[-1].content == "Who is at the door?"
    assert fake.calls[1].arguments == {}

    async def mute(question: Question) -> str:
        return ""

    failing = await ran(Council(fake, settings(ANN, plan_arguments=True), model=mute))
    assert texts_of(failing) == ['! Failed to plan arguments for tool "Look"', "what listen says"]


def test_planning_without_a_model_is_refused_at_once() -> None:
    with pytest.raises(SetupError, match=r"turn it off, or give a model \(no sidecar model: the settings name no conn"):
        Council(FakeToolSource(), settings(plan_arguments=True))
    with pytest.raises(SetupError, match="is not a source of tools"):
        Council(object(), settings())
