from __future__ import annotations

from tests.parts.council.fake_tool_source import USER, FakeToolSource, failed, member, outcome, settings, tool
from toolbus.errors import Code
from toolbus.extension import Council, CouncilHistory, HistoryEntry, Scene

ANN = member("Ann", "look", "listen", history_retention={"look": 2})


def test_successes_are_stored_up_to_the_retention_of_their_tool() -> None:
    history = CouncilHistory()
    for turn in range(4):
        outcomes = [
            outcome("Ann", "look", f" look {turn} "),
            outcome("Ann", "listen", "not remembered"),
            outcome("Ann", "look", success=False, error="blind"),
            outcome("Ann", "look", "   "),
        ]
        history.record("chat", [ANN], outcomes)
    assert [each.content for each in history.entries("chat")] == ["look 2", "look 3"]
    assert history.entries("other") == ()


def test_an_entry_is_cut_and_says_so() -> None:
    history = CouncilHistory()
    history.record("chat", [ANN], [outcome("Ann", "look", "x" * 5000)])
    assert history.entries("chat")[0].content == "x" * 4000 + "\n[truncated]"


def test_a_chat_keeps_two_hundred_entries_and_a_tool_ten() -> None:
    history = CouncilHistory()
    crowd = [member(f"M{number}", "look", history_retention={"look": 99}) for number in range(30)]
    for turn in range(12):
        history.record("chat", crowd, [outcome(each.name, "look", f"{each.name} {turn}") for each in crowd])
    entries = history.entries("chat")
    assert len(entries) == 200
    assert max(sum(each.member_id == who.id for each in entries) for who in crowd) <= 10
    assert entries[-1].content == "M29 11"


def test_a_member_without_retention_loses_its_entries_and_others_keep_theirs() -> None:
    history = CouncilHistory()
    bob = member("Bob", "look", history_retention={"look": 1})
    history.record("chat", [ANN, bob], [outcome("Ann", "look", "wolf"), outcome("Bob", "look", "fox")])
    history.record("chat", [member("Ann", "look")], [])
    assert [each.content for each in history.entries("chat")] == ["fox"]


def test_the_chat_that_was_not_used_for_longest_goes_first() -> None:
    history = CouncilHistory(most_chats=2)
    for chat in ("a", "b", "a", "c"):
        history.record(chat, [ANN], [outcome("Ann", "look", chat)])
    assert [chat for chat in "abc" if history.entries(chat)] == ["a", "c"]


def test_a_host_can_keep_the_entries_and_give_them_back() -> None:
    entry = HistoryEntry("ann", "Ann", "look", "Look", "wolf")
    history = CouncilHistory()
    history.restore("chat", [entry])
    assert history.entries("chat") == (entry,)
    assert "### 1 deliberation ago - Ann / Look\nwolf" in history.block("chat", [ANN])


async def test_earlier_results_go_to_the_main_model_and_never_to_the_member_itself() -> None:
    sights = iter(("wolf 1", "wolf 2", "wolf 3", "wolf 4"))
    fake = FakeToolSource(tool("look"), look=lambda asked: next(sights))
    council = Council(fake, settings(ANN), history=CouncilHistory())
    scene = Scene(chat_id="chat")
    blocks = []
    for _ in range(4):
        deliberation = await council.run([USER], scene=scene)
        assert deliberation is not None
        blocks.append(deliberation.history)
    assert blocks[0] == ""
    assert "wolf 1" not in blocks[3]
    assert blocks[3].index("### 2 deliberations ago - Ann / look\nwolf 2") < blocks[3].index("### 1 deliberation ago")
    assert not any("wolf" in str(asked.context) for asked in fake.calls)


async def test_a_retry_adds_its_successes_and_has_the_block_of_its_turn() -> None:
    sights = iter((failed(Code.TOOL, "fog"), "wolf"))
    fake = FakeToolSource(tool("look"), tool("listen"), look=lambda asked: next(sights), listen="howls")
    history = CouncilHistory()
    ann = member("Ann", "look", "listen", history_retention={"look": 2, "listen": 2})
    council = Council(fake, settings(ann), history=history)
    first = await council.run([USER])
    assert first is not None
    assert [each.content for each in history.entries("")] == ["howls"]
    again = await council.retry(first, [USER])
    assert again.history == ""  # what was said in this turn is no history yet
    assert [each.content for each in history.entries("")] == ["howls", "wolf"]


async def test_a_regenerated_reply_never_gets_the_results_of_its_replaced_run() -> None:
    sights = iter(f"wolf {number}" for number in range(1, 6))
    fake = FakeToolSource(tool("look"), look=lambda asked: next(sights))
    ann = member("Ann", "look", history_retention={"look": 1})
    council = Council(fake, settings(ann), history=CouncilHistory())
    scene = Scene(chat_id="chat")
    blocks = []
    for regenerates in (False, False, True, True, False):
        deliberation = await council.run([USER], scene=scene, regenerates=regenerates)
        assert deliberation is not None
        blocks.append([number for number in range(1, 6) if f"wolf {number}" in deliberation.history])
    assert blocks == [[], [1], [1], [1], [4]]


async def test_a_turn_without_a_council_is_not_taken_for_the_one_before_it() -> None:
    history = CouncilHistory()
    council = Council(FakeToolSource(tool("look")), settings(ANN), history=history)
    await council.run([USER])
    for regenerates in (False, True):
        await council.run([USER], members=[member("Bob", "look", chance=0)], regenerates=regenerates)
    assert [each.content for each in history.entries("")] == ["what look says"]


async def test_a_retry_of_a_replaced_run_is_not_stored() -> None:
    sights = iter((failed(Code.TOOL, "fog"), "fox", "wolf"))
    fake = FakeToolSource(tool("look"), look=lambda asked: next(sights))
    history = CouncilHistory()
    council = Council(fake, settings(member("Ann", "look", history_retention={"look": 2})), history=history)
    first = await council.run([USER], run_id="first")
    await council.run([USER], regenerates=True, run_id="second")
    assert first is not None
    assert [each.content for each in (await council.retry(first, [USER])).outcomes] == ["wolf"]
    assert [(each.run_id, each.content) for each in history.entries("")] == [("second", "fox")]


def test_entries_that_a_host_gave_back_are_abandoned_with_their_run() -> None:
    history = CouncilHistory()
    history.restore("chat", [HistoryEntry("ann", "Ann", "look", "Look", text, text) for text in ("fox", "wolf")])
    history.begin("chat", "new", replaces=True)
    assert [each.content for each in history.entries("chat")] == ["fox"]
    history.begin("chat", "new", replaces=True)  # a host that keeps the id of its run
    history.record("chat", [ANN], [outcome("Ann", "look", "owl")], "new")
    assert [each.content for each in history.entries("chat")] == ["fox", "owl"]


def test_the_characters_of_all_chats_are_limited_and_the_oldest_chat_is_evicted() -> None:
    history = CouncilHistory(max_characters=100)
    for _ in range(3):  # what takes the place of something else counts once
        history.restore("a", [HistoryEntry("ann", "Ann", "look", "Look", "x" * 60)])
        history.restore("b", [HistoryEntry("ann", "Ann", "look", "Look", "x" * 40)])
    assert (len(history.entries("a")), len(history.entries("b"))) == (1, 1)
    history.restore("c", [HistoryEntry("ann", "Ann", "look", "Look", "x" * 200)])
    assert [len(history.entries(chat)) for chat in "abc"] == [0, 0, 1]
