from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parts.council.fake_tool_source import FakeToolSource, failed, member, tool
from tests.parts.models.loop.scripted_model import ScriptedModel, call, says
from tests.support.examples import examples
from tests.support.waiting import WAIT_SECONDS
from toolbus.dialects import find_dialect
from toolbus.errors import Code, InvalidRequest, PeerLost
from toolbus.extension import InlineExport, InlineTarget, InlineTools, Member
from toolbus.functions.call_context import CallContext, ContextMessage
from toolbus.loop import ToolLoop, ToolSource, source_of
from toolbus.protocol.tool import Result, Tool
from toolbus.sdk import Extension, ToolInvocation
from toolbus.testing import running_bus

LEGAL = re.compile(r"[a-zA-Z0-9_-]{1,64}")
IDS = ("1b4e28ba-2fa1-11d2-883f-0016d3cca427", "1b4e28ba-9999-4000-8000-0016d3cca427")  # alike at the beginning
ANN = Member(IDS[0], "Ann", ("memory:search",), role="Archivist")
BEN = Member(IDS[1], "Ben", ("memory:search",))
SEARCH = tool("memory:search", description="Searches.")


def names(export: InlineExport) -> list[str]:
    return [each.name for each in export.tools]


# -- names and descriptions -------------------------------------------------------------------------------------------


def test_each_tool_of_each_member_is_a_function_of_its_own_that_says_whose_it_is() -> None:
    export = InlineExport.build([SEARCH, tool("memory:save")], [ANN, member("Bo", "save")])
    assert names(export) == ["1b4e28ba_memory_search", "bo_memory_save"]
    assert [each.description for each in export.tools] == ["[Ann - Archivist] Searches.", "[Bo] "]
    assert export.resolve("1b4e28ba_memory_search") == InlineTarget("memory:search", ANN)
    assert export.resolve("invented") is None


@pytest.mark.parametrize("members", [(), (ANN,)])
def test_inline_tools_are_offered_whether_or_not_there_are_members(members: tuple[Member, ...]) -> None:
    roll = tool("dice:roll", council_eligible=False, inline_available=True, description="FixedRolls.")
    export = InlineExport.build([SEARCH, roll], members)
    (offered,) = [each for each in export.tools if export.targets[each.name].member is None]
    assert (offered.name, offered.description, offered.metadata_json) == ("dice_roll", "FixedRolls.", "")
    assert export.resolve("dice_roll") == InlineTarget("dice:roll")
    assert len(export.tools) == 1 + len(members)


def test_a_name_with_two_underscores_maps_back_exactly() -> None:
    export = InlineExport.build([tool(name, inline_available=True) for name in ("a:b__c", "a__b:c", "a__b__c")])
    assert sorted(target.tool_name for target in export.targets.values()) == ["a:b__c", "a__b:c", "a__b__c"]
    assert export.resolve("a__b__c") == InlineTarget("a__b__c")


def test_names_fit_every_provider_whatever_the_source_is_called() -> None:
    source = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    long = tool(f"{source}:{'x' * 64}", inline_available=True)
    export = InlineExport.build([long, SEARCH], [Member(IDS[0], "Ann", (long.name, "search"))])
    assert all(LEGAL.fullmatch(name) for name in names(export))
    assert [export.targets[name].tool_name for name in names(export)] == [long.name, "memory:search", long.name]


def test_members_whose_ids_begin_alike_do_not_collide() -> None:
    export = InlineExport.build([SEARCH], [ANN, BEN])
    assert len(set(names(export))) == 2
    assert [export.targets[name].member for name in names(export)] == [ANN, BEN]


def test_a_tool_that_is_called_like_a_members_function_does_not_collide() -> None:
    twin = tool("1b4e28ba_memory:search", inline_available=True)
    export = InlineExport.build([SEARCH, twin], [ANN])
    assert list(export.targets.values()) == [InlineTarget("memory:search", ANN), InlineTarget(twin.name)]


def test_names_stay_from_call_to_call_in_whatever_order_tools_and_members_come() -> None:
    tools = [SEARCH, tool("memory:save", inline_available=True), tool("日记:搜索", inline_available=True)]
    first = InlineExport.build(tools, [ANN, BEN])
    assert InlineExport.build(reversed(tools), [BEN, ANN]).targets == first.targets


def test_a_missing_assigned_tool_is_reported_and_a_tool_named_twice_is_offered_once() -> None:
    hidden = tool("memory:hidden", council_eligible=False)
    export = InlineExport.build([SEARCH, hidden], [member("Bo", "search", "memory:search", "gone", "hidden")])
    assert names(export) == ["bo_memory_search"]
    assert export.missing == (("bo", "gone"), ("bo", "hidden"))


@pytest.mark.parametrize("ids", [("a", "a"), ("",)])
def test_members_without_unique_ids_are_refused(ids: tuple[str, ...]) -> None:
    members = [Member(each, each) for each in ids]
    with pytest.raises(InvalidRequest, match=f"have the id '{ids[0]}': give each"):
        InlineExport.build([], members)
    with pytest.raises(InvalidRequest, match="give each"):
        InlineTools(FakeToolSource(), members)


def test_functions_keep_the_hash_of_the_declaration_behind_them() -> None:
    export = InlineExport.build([SEARCH], [ANN])
    assert export.tools[0].schema_hash == SEARCH.schema_hash


PARTS = st.text(st.sampled_from("ab_:-. 搜é"), min_size=1, max_size=70) | st.sampled_from(
    ["a__b", "a:b", "搜索", "x" * 64]
)


@settings(max_examples=examples(25))
@given(
    st.lists(PARTS, unique=True, max_size=6),
    st.lists(st.sampled_from(["", "abcdefgh", "1b4e28ba-"]).flatmap(lambda a: PARTS.map(a.__add__)), unique=True),
)
def test_every_name_is_legal_and_maps_back_exactly(tool_names: list[str], ids: list[str]) -> None:
    tools = [Tool("t", inline_available=True, council_eligible=True).renamed(name) for name in tool_names]
    members = [Member(each, each, tuple(tool_names)) for each in ids]
    export = InlineExport.build(tools, members)
    assert all(LEGAL.fullmatch(name) for name in export.targets)
    assert names(export) == list(export.targets)
    found = [(target.tool_name, target.member and target.member.id) for target in export.targets.values()]
    assert sorted(found, key=repr) == sorted(((name, each) for name in tool_names for each in (None, *ids)), key=repr)


@pytest.mark.parametrize("dialect", ["openai", "anthropic", "gemini"])
def test_any_dialect_exports_them_and_finds_its_way_back(dialect: str) -> None:
    export = InlineExport.build([SEARCH, tool("搜索:日记", inline_available=True)], [ANN, BEN])
    written = find_dialect(dialect).export(export.tools)
    assert [export.targets[written.names.to_bus[name]] for name in written.names.to_bus] == [*export.targets.values()]
    assert not written.left_out


# -- calls ------------------------------------------------------------------------------------------------------------


async def asked(tools: InlineTools, name: str, **options: Any) -> Result:
    return await tools.call(name, '{"query":"door"}', **{"context": None, "schema_hash": "", **options})


async def test_a_call_reaches_the_tool_with_the_member_and_the_context_of_the_host() -> None:
    fake = FakeToolSource(SEARCH)
    tools = InlineTools(fake, [ANN, BEN])
    assert isinstance(tools, ToolSource)
    revision, offered = await tools.tools()
    context = CallContext(user_id="u", member={"name": "Eve"}, messages=(ContextMessage("user", "Hi"),))
    result = await asked(tools, offered[1].name, context=context, timeout=7)
    assert (revision, result.output) == (1, "what memory:search says")
    (seen,) = fake.calls
    assert (seen.name, seen.arguments, seen.timeout) == ("memory:search", {"query": "door"}, 7)
    assert seen.context == CallContext(user_id="u", member=BEN.described(), messages=context.messages)


async def test_a_tool_without_member_is_called_without_one_whatever_the_context_says() -> None:
    fake = FakeToolSource(tool("dice:roll", inline_available=True))
    await asked(InlineTools(fake), "dice_roll", context=CallContext(member={"name": "Eve"}))
    assert fake.calls[0].context == CallContext()


async def test_a_call_without_context_has_that_of_the_source() -> None:
    fake = FakeToolSource(SEARCH)
    fake.context = CallContext(user_id="u")  # type: ignore[attr-defined]
    tools = InlineTools(fake, [ANN])
    assert tools.context == CallContext(user_id="u")
    await asked(tools, "1b4e28ba_memory_search")
    assert fake.calls[0].context == CallContext(user_id="u", member=ANN.described())


def raising(problem: BaseException) -> Any:
    def answer(_: Any) -> None:
        raise problem

    return answer


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (failed(Code.TOOL, "no such book"), Code.TOOL, "no such book"),
        (failed(Code.DEADLINE_EXCEEDED, "too slow"), Code.DEADLINE_EXCEEDED, "too slow"),
        (raising(PeerLost("the bus is gone")), Code.UNAVAILABLE, "the bus is gone"),
        (raising(TimeoutError()), Code.DEADLINE_EXCEEDED, "timed out"),
        (raising(ValueError("a fault")), Code.INTERNAL, "failed: ValueError"),
        (raising(asyncio.CancelledError()), Code.CANCELLED, "cancelled before it had a result"),
    ],
)
async def test_every_error_is_a_result_and_does_not_end_the_turn(answer: Any, code: Code, words: str) -> None:
    tools = InlineTools(FakeToolSource(SEARCH, search=answer), [ANN])
    result = await asked(tools, "1b4e28ba_memory_search")
    assert result.error is not None
    assert (result.error.code, words in result.error.message) == (code, True)
    model = ScriptedModel(says("", call("1b4e28ba_memory_search")), says("I could not."))
    reply = await ToolLoop(tools, model.endpoint).run("?")
    assert reply.text == "I could not."
    assert words in model.results(1)[0]


async def test_every_call_is_answered_one_of_an_invented_name_too() -> None:
    tools = InlineTools(FakeToolSource(SEARCH), [ANN])
    calls = [call("1b4e28ba_memory_search"), call("1b4e28ba_gone"), call("memory:search")]
    model = ScriptedModel(says("", *calls), says("Done."))
    await ToolLoop(tools, model.endpoint).run("?")
    assert model.offered(0) == ["1b4e28ba_memory_search"]
    assert [("what memory:search says" in each, "there is no tool" in each) for each in model.results(1)] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    result = await asked(tools, "invented")
    assert result.error is not None
    assert result.error.code is Code.NOT_FOUND


async def test_a_loop_calls_with_the_hash_of_the_declaration_and_sees_changes() -> None:
    seen: list[str] = []

    class Changing(FakeToolSource):
        revision = 1

        async def tools(self) -> tuple[int, Any]:
            return self.revision, self.offered

        async def call(self, name: str, arguments_json: str, **options: Any) -> Result:
            seen.append(options["schema_hash"])
            return await super().call(name, arguments_json, **options)

    fake = Changing(SEARCH)
    tools = InlineTools(fake, [ANN])
    model = ScriptedModel(says("", call("1b4e28ba_memory_search")), says("."), says("."))
    loop = ToolLoop(tools, model.endpoint)
    await loop.run("?")
    assert seen == [SEARCH.schema_hash]
    fake.offered, fake.revision = (*fake.offered, tool("dice:roll", inline_available=True)), 2
    await loop.run("?")
    assert model.offered(2) == ["1b4e28ba_memory_search", "dice_roll"]
    assert [revision async for revision in tools.changes()] == [1]


async def test_the_member_reaches_an_extension_over_the_wire() -> None:
    seen: list[ToolInvocation] = []
    async with running_bus() as bus:
        extension = Extension("memory", address=bus.grpc_addresses[0])
        extension.register_tool(name="search", council_eligible=True)
        extension.on_invocation(seen.append)
        async with extension:
            await asyncio.wait_for(extension.ready(), WAIT_SECONDS)
            model = ScriptedModel(says("", call("1b4e28ba_memory_search_" + IDS[1])), says("Done."))
            loop = ToolLoop(InlineTools(source_of(bus), [ANN, BEN]), model.endpoint)
            context = CallContext(messages=(ContextMessage("user", "Hi"),))
            await asyncio.wait_for(loop.run("?", context=context), WAIT_SECONDS)
    assert model.results(1) == ["(empty result)"]
    assert dict(seen[0]["councilMember"] or {}) == BEN.described()
    assert seen[0]["args"]["context"] == "user: Hi"


async def test_an_empty_result_has_a_text() -> None:
    tools = InlineTools(FakeToolSource(SEARCH, search=""), [ANN])
    assert (await asked(tools, "1b4e28ba_memory_search")).output == "(empty result)"


async def test_cancelling_a_call_cancels_it() -> None:
    began = asyncio.Event()

    async def wait(_: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    tools = InlineTools(FakeToolSource(SEARCH, search=wait), [ANN])
    task = asyncio.create_task(asked(tools, "1b4e28ba_memory_search"))
    await asyncio.wait_for(began.wait(), WAIT_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
