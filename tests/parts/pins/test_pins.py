"""Pinned plugins: what is seen first is trusted, a change is marked or waits for an approval."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.bus.storage.store_cases import earlier_file
from tests.bus.streams.test_tool_review import attach, attached, reasons, reviews
from tests.support.core_model import Core, StreamDouble, names
from toolbus.bus.serve_settings import settle
from toolbus.bus.storage.store import Store
from toolbus.errors import Code, NotPermitted, SetupError
from toolbus.parts.pins.pins import (
    FINGERPRINTS,
    FIRST_SECONDS,
    MAX_SOURCES,
    MAX_TOOLS,
    Fingerprints,
    Pinned,
    Pins,
    pending,
)
from toolbus.protocol.tool import Annotations, Tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

OLD, NEW = pb.Tool(name="t", description="reads"), pb.Tool(name="t", description="reads and sends")


class Clock:
    """A clock that its test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def pinned(pin: str, **more: str) -> tuple[Core, Clock]:
    core, clock = Core(), Clock()
    core.dispatcher.seams.pins = Pins({"plugin": pin, **more}, clock=clock)  # type: ignore[dict-item]
    return core, clock


def pins_of(core: Core) -> Pins:
    pins = core.dispatcher.seams.pins
    assert isinstance(pins, Pins)
    return pins


def register(core: Core, stream: StreamDouble, *tools: pb.Tool, all_or_none: bool = False) -> wire.RegisterResponse:
    session = stream.peer.session_id
    return core.presence.register(wire.RegisterRequest(session_id=session, tools=tools, all_or_none=all_or_none))


def approve(core: Core, *subjects: str) -> None:
    pins_of(core).approve("plugin", subjects)
    core.presence.approved("plugin")


def warnings(core: Core, name: str = "t") -> tuple[str, ...]:
    entry = core.registry.find(name)
    return entry.all_warnings if entry is not None else ()


# -- block -----------------------------------------------------------------------------------------------------------


def test_a_changed_tool_is_refused_with_the_command_that_approves_it_and_the_old_one_is_withdrawn() -> None:
    core, _ = pinned("block")
    stream = attach(core, "plugin", OLD, pb.Tool(name="other"))
    assert list(attached(stream).registered) == ["t", "other"]
    caller, known = core.peer("host"), Tool.from_wire(OLD, core.limits).schema_hash
    answer = register(core, stream, NEW)
    assert "`toolbus access approve plugin t`" in reasons(answer)["t"]
    assert names(core) == ["other"]
    assert core.refusal(caller, "t", schema_hash=known).code == Code.NOT_FOUND
    approve(core, "tool:t")
    assert reviews(stream) == [(["t"], {})]
    assert core.registry.find("t").tool.description == "reads and sends"  # type: ignore[union-attr]
    assert core.refusal(caller, "t", schema_hash=known).code == Code.CATALOG_STALE


def test_an_attach_with_a_changed_tool_keeps_the_others_and_sends_no_denial() -> None:
    core, _ = pinned("block")
    core.presence.end(attach(core, "plugin", OLD, instance="1").peer, "gone", core.now)
    stream = attach(core, "plugin", NEW, pb.Tool(name="other"), instance="1")
    assert list(reasons(attached(stream))) == ["t"]
    assert names(core) == ["other"]
    assert not [event for event in stream.read("events") if event.HasField("permission_denied")]


def test_a_new_tool_of_a_known_source_waits_but_not_while_it_is_seen_for_the_first_time() -> None:
    core, clock = pinned("block")
    stream = attach(core, "plugin", OLD)
    clock.now = FIRST_SECONDS
    assert not register(core, stream, pb.Tool(name="at_start")).refused
    clock.now += 1
    answer = register(core, stream, pb.Tool(name="late"))
    assert "is new since source 'plugin' was trusted" in reasons(answer)["late"]
    assert names(core) == ["t", "at_start"]


def test_a_source_that_changes_a_tool_at_once_waits_too() -> None:
    core, _ = pinned("block")
    stream = attach(core, "plugin", OLD)
    assert list(reasons(register(core, stream, NEW))) == ["t"]


def test_a_change_that_is_taken_back_waits_for_nothing() -> None:
    core, _ = pinned("block")
    stream = attach(core, "plugin", OLD)
    register(core, stream, NEW)
    register(core, stream, OLD)
    assert names(core) == ["t"]
    assert pending(pins_of(core).known("plugin") or {}) == {}


def test_all_or_none_refuses_all_by_name_and_offers_all_with_the_approval() -> None:
    core, _ = pinned("block")
    attach(core, "plugin", OLD)
    stream = attach(core, "plugin", pb.Tool(name="u"), NEW, instance="2", all_or_none=True)
    assert list(reasons(attached(stream))) == ["u", "t"]
    with pytest.raises(NotPermitted, match="toolbus access approve plugin t"):
        register(core, stream, pb.Tool(name="v"), NEW, all_or_none=True)
    approve(core, "tool:t")
    assert [sorted(offered) for offered, _ in reviews(stream)] == [["t", "u"]]


# -- warn ------------------------------------------------------------------------------------------------------------


def test_a_change_is_offered_marked_and_logged_once_until_it_is_approved(caplog: pytest.LogCaptureFixture) -> None:
    core, _ = pinned("warn")
    stream = attach(core, "plugin", OLD)
    assert warnings(core) == ()
    for _ in range(2):
        assert not register(core, stream, NEW).refused
    assert ["toolbus access approve plugin" in text for text in warnings(core)] == [True]
    assert len([record for record in caplog.records if record.name == "toolbus.pins"]) == 1
    [listing] = core.registry.listings()
    assert listing.tool.description == "reads and sends"
    approve(core, "tool:t")
    assert warnings(core) == ()


def test_a_new_tool_of_a_known_source_is_not_marked() -> None:
    core, clock = pinned("warn")
    stream = attach(core, "plugin", OLD)
    clock.now = 1e6
    register(core, stream, pb.Tool(name="late"))
    assert (names(core), warnings(core, "late")) == (["t", "late"], ())


# -- who is pinned, and what counts ----------------------------------------------------------------------------------


def test_who_is_not_named_is_neither_compared_nor_remembered(tmp_path: Path) -> None:
    pins = Pins({"weather": "block", "lab.*": "warn", "lab.x*": "block"})
    assert {name: pins.pin_of(name) for name in ("weather", "weather2", "lab.a", "lab.xy")} == {
        "weather": "block",
        "weather2": None,
        "lab.a": "warn",
        "lab.xy": "block",
    }
    assert pins.review("weather2", [Tool("t")]) == pins.review("weather2", [Tool("t", "changed")]) == {}
    assert pins.sources() == []
    with closing(Store.of(tmp_path)) as store:
        store.open()
        Pins().open(store)
        assert FINGERPRINTS.name not in repr(store), "nothing was read"


@pytest.mark.parametrize(
    "more",
    [
        {"description": "x"},
        {"display_name": "x"},
        {"parameters_json": '{"type":"object","title":"x"}'},
        {"output_schema_json": '{"type":"object"}'},
        {"annotations": Annotations(read_only=True)},
    ],
)
def test_what_a_model_reads_counts(more: dict[str, object]) -> None:
    pins = Pins({"*": "block"})
    assert pins.review("s", [Tool("t")]) == {}
    assert list(pins.review("s", [Tool("t", **more)])) == [("t", "")]  # type: ignore[arg-type]


def test_where_it_runs_and_how_long_does_not_count() -> None:
    pins = Pins({"*": "block"})
    pins.review("s", [Tool("t", callback_url="http://127.0.0.1:1/")])
    assert pins.review("s", [Tool("t", callback_url="http://127.0.0.1:2/", timeout_seconds=5)]) == {}


def test_a_tool_of_each_role_is_compared_by_itself() -> None:
    pins = Pins({"*": "block"})
    assert pins.review("s", [Tool("t", "of cats", role="cat"), Tool("t", "of dogs", role="dog")]) == {}
    assert list(pins.review("s", [Tool("t", "of cats", role="cat"), Tool("t", "new", role="dog")])) == [("t", "dog")]


def test_a_configuration_with_another_pin_or_no_source_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "toolbus.toml"
    file.write_text('[pins]\n"plugin:*" = "block"\n')
    assert settle({"data_dir": None}, {}, file).config.pins == {"plugin:*": "block"}
    for text, says in (('weather = "off"', "warn"), ('"a b" = "warn"', "a source is 1 to 128")):
        file.write_text(f"[pins]\n{text}\n")
        with pytest.raises(SetupError, match=says):
            settle({"data_dir": None}, {}, file)


# -- remembering -----------------------------------------------------------------------------------------------------


def test_fingerprints_survive_a_restart_and_the_first_minute_does_not(tmp_path: Path) -> None:
    for declared, waiting in (
        ([Tool("t")], []),
        ([Tool("t", "x"), Tool("u")], [("t", ""), ("u", "")]),
        ([Tool("t", "x")], []),
    ):
        with closing(Store.of(tmp_path)) as store:
            store.open()
            pins = Pins({"s": "block"})
            pins.open(store)
            assert list(pins.review("s", declared)) == waiting
            pins.approve("s", ["tool:t"])


@pytest.mark.parametrize("damage", ["UPDATE pins SET value = '{}'", "UPDATE pins SET key = 'x'"])
def test_after_damage_nothing_is_trusted_unseen(tmp_path: Path, damage: str) -> None:
    with closing(Store.of(tmp_path)) as store:
        store.open()
        Fingerprints(store).save_fingerprints("s", "", {"tool:t": Pinned("{}")})
    with closing(sqlite3.connect(tmp_path / "bus.db", isolation_level=None)) as connection:
        connection.execute(damage)
    with closing(Store.of(tmp_path)) as store:
        store.open()
        pins = Pins({"s": "block"})
        pins.open(store)
        assert list(pins.review("s", [Tool("t")])) == [("t", "")]
        assert "u" not in str(pins.review("s", [Tool("v")], accepted=True)), "it was accepted before"


def test_after_a_damaged_file_of_an_earlier_release_nothing_is_trusted_unseen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pins.db").write_bytes(earlier_file(0x54427069))
    with closing(Store.of(tmp_path)) as store:
        store.open()
        pins = Pins({"s": "block"})
        pins.open(store)
        assert list(pins.review("s", [Tool("t")])) == [("t", "")]
        assert pins.review("s", [Tool("u")], accepted=True) == {}, "as the store of callbacks says"
    assert "pins.db is damaged" in caplog.text
    assert "pinned to block wait for `toolbus access approve`" in caplog.text


def test_what_does_not_fit_is_refused_where_changes_are_blocked() -> None:
    pins = Pins({"*": "block"})
    many = [Tool(f"t{number}") for number in range(MAX_TOOLS + 1)]
    waiting = pins.review("s", many)
    assert list(waiting) == [(f"t{MAX_TOOLS}", "")]
    assert "cannot be stored" in waiting[f"t{MAX_TOOLS}", ""]
    for number in range(MAX_SOURCES - 1):
        pins.review(f"s{number}", [Tool("t")])
    assert list(pins.review("one_more", [Tool("t")])) == [("t", "")]
    assert "one_more" not in pins.sources()


def test_tools_that_were_never_approved_make_room_for_others() -> None:
    clock = Clock()
    pins = Pins({"*": "block"}, clock=clock)
    pins.review("s", [Tool("t")])
    clock.now = 1e6
    pins.review("s", [Tool(f"a{number}") for number in range(MAX_TOOLS - 1)])
    assert "is new" in pins.review("s", [Tool("b")])["b", ""]
    assert pins.known("s") is not None
    assert pins.review("s", [Tool("t")]) == {}
