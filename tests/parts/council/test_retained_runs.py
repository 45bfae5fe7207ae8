from __future__ import annotations

from typing import Any

from tests.parts.council.fake_tool_source import USER, FakeToolSource, FixedRolls, member, outcome, settings, tool
from toolbus.extension import Council, Deliberation, Scene, SidecarSettings
from toolbus.parts.council.council import RetainedRuns, fingerprint

SCENE = Scene(chat_id="chat", world_info="Snow.")


def council(fake: FakeToolSource, **fields: Any) -> Council:
    chosen = {"retain_results_for_regens": True, **fields}
    return Council(fake, settings(member("Ann", "look"), **chosen))


async def test_a_regenerated_reply_reuses_the_earlier_run_if_nothing_changed() -> None:
    events: list[Any] = []
    fake = FakeToolSource(tool("look"))
    retaining = council(fake)
    first = await retaining.run([USER], scene=SCENE)
    again = await retaining.run([USER], scene=SCENE, regenerates=True, run_id="r2", on_event=events.append)
    assert first is not None
    assert again is not None
    assert (again.reused, first.reused, again.run_id) == (True, False, "r2")
    assert (again.outcomes, again.block) == (first.outcomes, first.block)
    assert len(fake.calls) == 1
    assert events == []


async def test_by_default_and_for_a_new_reply_the_tools_run_again() -> None:
    fake = FakeToolSource(tool("look"))
    for retaining in (council(fake, retain_results_for_regens=False), council(fake)):
        for regenerates in (True, False):
            await retaining.run([USER], scene=SCENE, regenerates=regenerates)
    assert len(fake.calls) == 4


async def test_whatever_a_tool_could_see_runs_the_tools_again_when_it_changes() -> None:
    fake = FakeToolSource(tool("look"))
    retaining = council(fake)
    await retaining.run([USER], scene=SCENE)
    changes: tuple[dict[str, Any], ...] = (
        {"messages": [USER, USER]},
        {"scene": Scene(chat_id="chat", world_info="Rain.")},
        {"scene": Scene(chat_id="another", world_info="Snow.")},
        {"user_id": "somebody else"},
        {"attributes": {"channel": "dm"}},
        {"members": [member("Ann", "look", role="Scout")]},
    )
    for number, change in enumerate(changes, 2):
        await retaining.run(**{"messages": [USER], "scene": SCENE, "regenerates": True, **change})
        assert len(fake.calls) == number


async def test_a_run_with_failures_is_not_used_again_until_a_retry_has_mended_it() -> None:
    def look(asked: object) -> str:
        if len(fake.calls) < 3:
            raise RuntimeError("fog")
        return "wolf"

    fake = FakeToolSource(tool("look"), look=look)
    retaining = council(fake)
    await retaining.run([USER], scene=SCENE)
    second = await retaining.run([USER], scene=SCENE, regenerates=True)
    assert second is not None
    assert len(fake.calls) == 2
    await retaining.retry(second, [USER], scene=SCENE)
    mended = await retaining.run([USER], scene=SCENE, regenerates=True)
    assert mended is not None
    assert (mended.reused, mended.outcomes[0].content, len(fake.calls)) == (True, "wolf", 3)


async def test_a_council_that_stayed_silent_stays_silent_without_another_roll() -> None:
    rolls = FixedRolls(0.9, 0.1)
    silent = Council(
        FakeToolSource(tool("look")),
        settings(member("Ann", "look", chance=50), retain_results_for_regens=True),
        rng=rolls,
    )
    assert await silent.run([USER], scene=SCENE) is None
    assert await silent.run([USER], scene=SCENE, regenerates=True) is None
    assert rolls.left == [0.1]
    assert await silent.run([USER], scene=SCENE) is not None


def test_a_fingerprint_names_content_and_not_order_of_keys_or_kind_of_list() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": (2,), "a": 1})
    assert fingerprint(SidecarSettings()) == fingerprint(SidecarSettings())
    assert fingerprint(SidecarSettings()) != fingerprint(SidecarSettings(model="other"))
    assert fingerprint(settings(member("Ann", "look"))) != fingerprint(settings(member("Ann", "listen")))
    assert fingerprint("half \ud83d") != fingerprint("half")


def test_the_chat_that_was_not_used_for_longest_is_forgotten_first() -> None:
    runs = RetainedRuns(max_chats=2)
    for chat in "abc":
        runs.store(chat, "fingerprint", None)
    assert [chat for chat in "abc" if runs.find(chat, "fingerprint") is not None] == ["b", "c"]
    runs.store("c", "fingerprint", Deliberation("r", (), "block"))
    assert runs.find("c", "fingerprint") is None


def test_the_characters_of_all_retained_runs_are_limited_and_the_newest_stays() -> None:
    runs = RetainedRuns(max_characters=100)
    for chat, size in (("a", 60), ("b", 30), ("c", 50)):
        runs.store(chat, "fingerprint", Deliberation("r", (outcome("Ann", "look", "x" * size),), ""))
    assert [runs.find(chat, "fingerprint") is not None for chat in "abc"] == [False, True, True]
    runs.store("d", "fingerprint", Deliberation("r", (outcome("Ann", "look"),), "x" * 500))
    assert [runs.find(chat, "fingerprint") is not None for chat in "bcd"] == [False, False, True]
