"""The state beside a model of the other side: whatever happens to both, a few looks bring them in step."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest

from tests.support.core_model import PeerDouble, offered, tool
from tests.support.examples import examples
from toolbus.bus.catalog.registry import Registry
from toolbus.parts.moving.upstream.ownership import Ownership
from toolbus.parts.moving.upstream.plan import make_plan
from toolbus.parts.moving.upstream.sync_state import DEFAULT_TIMINGS, ClearStep, RegisterStep, SyncState, UnregisterStep
from toolbus.parts.moving.upstream.upstream_responses import UpstreamListing, UpstreamTool

BASE, UPSTREAM = "http://127.0.0.1:48916", "http://127.0.0.1:48911"
ROLES = ("r1", "r2", "r3")
FOREIGN = UpstreamTool("somebody", "http://127.0.0.1:1/x", "")


@dataclass
class Model:
    """Registry, sync_state and what the other side has, without a network between them."""

    registry: Registry = field(default_factory=lambda: Registry(ROLES))
    sync_state: SyncState = field(default_factory=lambda: SyncState(Ownership()))
    tools: dict[str, dict[str, UpstreamTool]] = field(default_factory=lambda: {role: {} for role in ROLES})
    full: set[str] = field(default_factory=set)  # roles that take nothing
    now: float = 0.0

    def theirs(self) -> UpstreamListing:
        names: dict[str, dict[str, UpstreamTool]] = {}
        for role, tools in self.tools.items():
            for name, held in tools.items():
                names.setdefault(name, {})[role] = held
        return UpstreamListing(tuple(self.tools), names)

    def look(self) -> int:
        """Does one look and what follows from it. Returns the number of steps."""
        listings = [item for role in self.registry.roles for item in self.registry.listings(role)]
        self.sync_state.plan = make_plan(sorted(listings, key=lambda item: item.entry.place), BASE, UPSTREAM)
        theirs = self.theirs()
        steps = self.sync_state.decide(theirs, self.now)
        self.sync_state.note_sending(steps, self.now)
        for step in steps:
            roles = [step.role] if step.role else list(self.tools)
            if isinstance(step, RegisterStep):
                body = json.loads(step.planned.body(step.role, "b"))
                held = UpstreamTool(body["source"], body["callback_url"], body["description"])
                failed = frozenset(role for role in roles if role in self.full or role not in self.tools)
                for role in set(roles) - failed:
                    self.tools[role][body["name"]] = held
                if failed == set(roles):
                    self.sync_state.note_refused(step, theirs, "full", self.now)
                else:
                    self.sync_state.note_accepted(step, theirs, failed, "full" if failed else "", self.now)
            else:
                self.sync_state.note_unregister(step, self.now)
                for role in roles:
                    self.tools[role].pop(step.name, None)
        return len(steps)

    def settle(self) -> None:
        """Looks until there is nothing to do, which must not take long."""
        for _ in range(6):
            if not self.look():
                return
        raise AssertionError(f"there is always something to do: {self.sync_state.decide(self.theirs(), self.now)}")

    def missing(self) -> list[tuple[str, str]]:
        """What should be there and is not, but for roles that are full and names that others took."""
        planned = self.sync_state.plan.tools
        found = []
        for role, tools in self.tools.items():
            for name in self.sync_state.plan.by_name:
                one = planned.get((name, role)) or planned.get((name, None))
                held = tools.get(name)
                if one is None or role in self.full or held is FOREIGN:
                    continue
                if held != UpstreamTool(one.source, one.callback_url, one.tool.description):
                    found.append((role, name))
        return found

    def left_over(self) -> list[tuple[str, str]]:
        planned = self.sync_state.plan.tools
        return [
            (role, name)
            for role, tools in self.tools.items()
            for name, held in tools.items()
            if held is not FOREIGN and (name, role) not in planned and (name, None) not in planned
        ]


def offer(model: Model, source: str, *tools: object) -> None:
    model.registry.register(PeerDouble(source), offered(*tools))  # type: ignore[arg-type]


def _disturb(model: Model, draw: random.Random) -> None:
    role, name = draw.choice(ROLES), draw.choice("tuv")
    match draw.randrange(8):
        case 0 | 1 | 2:
            description = draw.choice(("", "other"))
            offer(model, draw.choice("ab"), tool(name, description, role=draw.choice((None, *ROLES))))
        case 3:
            model.registry.unregister(name, draw.choice(("", role)))
        case 4:
            model.tools[role].pop(name, None)
        case 5:
            model.tools = {each: {} for each in ROLES}
        case 6:
            model.tools[role][name] = FOREIGN
        case 7:
            model.full ^= {role}
            model.now += draw.choice((0.0, DEFAULT_TIMINGS.retry_seconds))


@pytest.mark.hypothesis  # so that `make thorough` tries more seeds
@pytest.mark.parametrize("seed", range(examples(50)))
def test_whatever_happens_to_both_sides_a_few_looks_bring_them_in_step(seed: int) -> None:
    draw, model = random.Random(seed), Model()
    for _ in range(40):
        for _ in range(draw.randint(1, 3)):
            _disturb(model, draw)
        model.settle()
    model.full.clear()
    model.now += DEFAULT_TIMINGS.retry_seconds
    model.settle()
    assert (model.missing(), model.left_over()) == ([], [])
    model.now += 10 * DEFAULT_TIMINGS.retry_seconds
    assert model.look() == 0


@pytest.mark.parametrize("seed", range(examples(10)))
def test_what_others_took_is_never_touched_while_our_own_declarations_stay(seed: int) -> None:
    draw, model = random.Random(seed), Model()
    offer(model, "a", tool("t"), tool("u", role="r1"))
    offer(model, "b", tool("u", role="r2"), tool("v"))
    model.settle()
    model.settle()
    for _ in range(10):
        role, name = draw.choice(ROLES), draw.choice("tuv")
        model.tools[role][name] = FOREIGN
        model.settle()
        assert model.tools[role][name] is FOREIGN
        other = draw.choice(ROLES)
        if model.tools[other].get(name) is not FOREIGN:
            model.tools[other].pop(name, None)
            model.settle()
            assert model.tools[role][name] is FOREIGN
    assert model.missing() == []


def test_a_role_that_was_full_has_the_tool_after_a_minute() -> None:
    model = Model(full={"r2"})
    offer(model, "a", tool("t"))
    model.settle()
    assert model.sync_state.problems == {("t", None): "full"}
    model.full.clear()
    assert model.look() == 0
    model.now += DEFAULT_TIMINGS.retry_seconds
    assert model.look() == 1
    model.settle()
    assert (model.missing(), model.sync_state.problems) == ([], {})


def test_a_role_that_comes_later_gets_the_tools_for_all_roles() -> None:
    model = Model()
    offer(model, "a", tool("t"), tool("u", role="r1"))
    model.settle()
    model.tools["r4"] = {}
    model.settle()
    assert list(model.tools["r4"]) == ["t"]


def test_a_tool_for_one_role_follows_the_one_for_all_roles_in_the_same_look() -> None:
    model = Model()
    offer(model, "a", tool("t"))
    offer(model, "b", tool("t", role="r1"))
    model.settle()
    del model.tools["r2"]["t"]
    assert model.look() == 2
    assert model.missing() == []


def test_a_role_that_failed_is_not_retried_once_another_owner_has_the_name_there() -> None:
    model = Model(full={"r2"})
    offer(model, "a", tool("t"))
    model.settle()
    model.full.clear()
    model.tools["r2"]["t"] = FOREIGN
    model.settle()
    model.now += DEFAULT_TIMINGS.retry_seconds
    model.settle()
    assert model.tools["r2"]["t"] is FOREIGN
    assert model.sync_state.problems["t", None].startswith("replaced upstream by source 'somebody' (role 'r2')")


def test_names_of_sources_over_there_are_fit_for_a_log_however_long() -> None:
    model = Model()
    offer(model, "a", tool("t"))
    model.settle()
    model.tools["r1"]["t"] = UpstreamTool("x\n" * 10_000, "", "")
    model.settle()
    text = model.sync_state.problems["t", None]
    assert "\n" not in text
    assert len(text) < 500


def test_a_tool_for_all_roles_replaces_no_foreign_tool_in_a_role_that_has_its_own() -> None:
    model = Model()
    model.tools["r1"]["t"] = FOREIGN
    offer(model, "a", tool("t"))
    offer(model, "b", tool("t", role="r1"))
    model.settle()
    assert model.tools["r1"]["t"] is FOREIGN
    assert model.missing() == []
    del model.tools["r1"]["t"]
    model.settle()
    assert model.tools["r1"]["t"].source == "plugin:b"


def test_the_closing_steps_withdraw_what_is_ours_and_nothing_else() -> None:
    model = Model()
    offer(model, "a", tool("t"), tool("u"), tool("v", role="r1"))
    offer(model, "b", tool("w"))
    model.settle()
    model.tools["r2"]["x"] = UpstreamTool("plugin:a", "http://127.0.0.1:1/x", "")
    model.tools["r2"]["u"] = FOREIGN
    assert model.sync_state.closing(model.theirs()) == [
        ClearStep("plugin:b"),
        UnregisterStep("t", None),
        UnregisterStep("u", "r1"),
        UnregisterStep("u", "r3"),
        UnregisterStep("v", None),
    ]
