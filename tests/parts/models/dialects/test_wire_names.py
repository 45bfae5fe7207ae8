"""Tests names on the wire: always valid for the provider, one for one, and mapped back exactly."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parts.models.dialects.sample_tools import SAMPLES
from toolbus.parts.models.dialects.wire_names import GEMINI_NAMES, PLAIN_NAMES, NameRule, NameTable

RULES = {"plain": PLAIN_NAMES, "gemini": GEMINI_NAMES}
AWKWARD = (
    *(
        "查询天气",
        "查询weather",
        "get weather",
        "a.b",
        "a:b",
        "a b",
        "a_b",
        "a__b",
        "source:name",
        "3d",
        "-",
        "_",
        "...",
    ),
    *("a" * 64, "a" * 63 + ".", "9" * 64, "." * 64, "名" * 64, "x" * 200, "x" * 200 + ".", "naïve", "tool", "a\nb", ""),
)
ALPHABET = st.sampled_from("aAz09_-.: 天名é\n/$😀")
NAMES = st.lists(
    st.one_of(st.text(ALPHABET, max_size=8), st.text(ALPHABET, min_size=55, max_size=80), st.sampled_from(AWKWARD))
)


def _hold(table: NameTable, names: list[str], rule: NameRule) -> None:
    assert list(table.to_wire) == list(dict.fromkeys(names))
    assert all(rule.accepts(wire) for wire in table.to_bus)
    assert all(table.to_bus[table.wire(name)] == name for name in names)
    assert len(table.to_bus) == len(set(names))
    assert all(table.wire(name) == name for name in names if rule.accepts(name))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(names=NAMES, seed=st.randoms(use_true_random=False))
def test_any_set_of_names_maps_one_for_one_whatever_its_order(
    rule: NameRule, names: list[str], seed: random.Random
) -> None:
    table = NameTable.build(names, rule)
    _hold(table, names, rule)
    shuffled = list(names)
    seed.shuffle(shuffled)
    assert NameTable.build(shuffled, rule).to_wire == table.to_wire


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(names=NAMES)
def test_names_that_look_like_mapped_names_do_not_change_the_others(rule: NameRule, names: list[str]) -> None:
    mapped = [*names, *NameTable.build(names, rule).to_bus]
    twice = [*mapped, *NameTable.build(mapped, rule).to_bus]
    _hold(NameTable.build(twice, rule), twice, rule)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(names=NAMES, gone=st.text(ALPHABET, max_size=80))
def test_a_name_that_is_not_offered_becomes_valid_and_belongs_to_no_tool(
    rule: NameRule, names: list[str], gone: str
) -> None:
    table = NameTable.build(names, rule)
    wire = table.wire(gone)
    assert rule.accepts(wire)
    assert table.to_bus.get(wire, gone) == gone


@pytest.mark.parametrize(
    ("name", "plain", "gemini"),
    [
        ("get_weather", "get_weather", "get_weather"),
        ("a__b", "a__b", "a__b"),
        ("files.read", "files_read", "files.read"),
        ("notes:add note", "notes_add_note", "notes:add_note"),
        ("3d_print", "3d_print", "_3d_print"),
        ("-dash", "-dash", "_-dash"),
        ("a" * 63 + ".", "a" * 63 + "_", "a" * 63 + "."),
        ("天气weather", "__weather", "__weather"),
    ],
)
def test_a_single_name_stays_as_readable_as_the_rule_allows(name: str, plain: str, gemini: str) -> None:
    assert NameTable.build([name], PLAIN_NAMES).wire(name) == plain
    assert NameTable.build([name], GEMINI_NAMES).wire(name) == gemini


def test_meaningless_and_too_long_names_get_a_hash() -> None:
    table = NameTable.build(["查询天气", "查询时间", "x" * 100], PLAIN_NAMES)
    assert table.wire("查询天气").startswith("tool_")
    assert table.wire("查询天气") != table.wire("查询时间")
    assert len(table.wire("x" * 100)) == 64
    assert NameTable.build(["9" * 64], GEMINI_NAMES).wire("9" * 64).startswith("_999")


def test_names_that_collide_get_a_hash_each_and_a_valid_name_stays() -> None:
    table = NameTable.build(["a.b", "a:b", "a_b"], PLAIN_NAMES)
    assert table.wire("a_b") == "a_b"
    assert len({table.wire(name) for name in ("a.b", "a:b", "a_b")}) == 3
    assert table.to_bus["a_b"] == "a_b"


def test_a_name_that_collides_on_purpose_does_not_change_the_other() -> None:
    victim = "a.b" + "c" * 100
    taken = NameTable.build([victim], PLAIN_NAMES).wire(victim)
    table = NameTable.build([victim, taken], PLAIN_NAMES)
    assert table.wire(taken) == taken
    assert table.to_bus[table.wire(victim)] == victim


def test_a_withdrawn_tool_never_takes_the_name_of_an_offered_one() -> None:
    table = NameTable.build(["a.b"], PLAIN_NAMES)
    assert table.wire("a.b") == "a_b"
    assert table.wire("a_b") not in table.to_bus
    assert NameTable.empty().wire("gone.tool") == "gone_tool"
    assert NameTable.empty(GEMINI_NAMES).wire("3d") == "_3d"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_sample_tools_map_one_for_one(rule: NameRule) -> None:
    names = [tool.name for tool in SAMPLES]
    _hold(NameTable.build(names, rule), names, rule)
