"""Tests of what the parts of the bus say to the audit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts.audit.chains import entries, writing
from tests.parts.audit.test_audit_writer import filled, full_disk
from toolbus.bus.access.identity import Identity, Principal, Scopes
from toolbus.bus.audit import OWN_ACTS_BURST, REFUSALS_BURST, Audit
from toolbus.errors import InvalidRequest, NotAudited

ANN = Principal("chat", identity=Identity("ann", Scopes(), "k1", "token"))


def test_an_audit_that_is_off_does_nothing() -> None:
    audit = Audit()
    audit.record("attach", ANN)
    audit.record_calls([], 0.0)
    audit.check()
    with audit.operation("permit", ANN):
        pass
    assert audit.head is None


def test_a_line_names_the_identity_its_key_and_what_proved_it_or_else_the_source(tmp_path: Path) -> None:
    audit = Audit()
    with writing(tmp_path) as writer:
        audit.open(writer, required=False)
        audit.record("attach", ANN, peer="s-1", tools=3)
        audit.record("withdraw", Principal("weather"), target="sun", why="no reason")
    first, second = entries(tmp_path)
    assert [first[name] for name in ("act", "who", "key", "how", "source", "peer", "tools", "outcome")] == [
        *("attach", "ann", "k1", "token", "chat", "s-1", 3, "ok")
    ]
    assert [second[name] for name in ("act", "who", "key", "how", "source", "target", "why")] == [
        *("withdraw", "weather", "", "local", "weather", "sun", "no reason")
    ]


@pytest.mark.parametrize(("required", "begun"), [(False, []), (True, ["begun"])])
def test_an_operation_is_written_with_how_it_ended(tmp_path: Path, required: bool, begun: list[str]) -> None:
    audit = Audit()
    with writing(tmp_path) as writer:
        audit.open(writer, required=required)
        with audit.operation("permit", ANN, target="tools a", why="users: none"):
            assert [each["outcome"] for each in entries(tmp_path)] == begun  # on disk before it is done
        with pytest.raises(InvalidRequest), audit.operation("grant", ANN, target="b"):
            raise InvalidRequest("no such source")
    assert [(each["act"], each["outcome"], each["why"]) for each in entries(tmp_path)] == [
        *(("permit", outcome, "users: none") for outcome in [*begun, "ok"]),
        *(("grant", outcome, "") for outcome in begun),
        ("grant", "failed", "no such source"),
    ]


def test_what_cannot_be_written_is_not_done_where_the_audit_is_required(tmp_path: Path) -> None:
    filled(tmp_path)
    audit, done = Audit(), []
    with writing(tmp_path) as writer:
        audit.open(writer, required=True)
        audit.check()
        with full_disk(tmp_path):
            sentence = "this was not done.*File too large.*make room on the disk"
            with pytest.raises(NotAudited, match=sentence), audit.operation("permit", ANN):
                done.append("permit")
            with pytest.raises(NotAudited, match="this was not done"):
                audit.check()
        with audit.operation("grant", ANN):
            done.append("grant")
        audit.check()
    assert done == ["grant"]


def test_what_is_not_required_is_done_on_a_full_disk_and_written_later(tmp_path: Path) -> None:
    count = filled(tmp_path)
    audit, done = Audit(), []
    with writing(tmp_path) as writer:
        audit.open(writer, required=False)
        with full_disk(tmp_path):
            with audit.operation("permit", ANN):
                done.append("permit")
            audit.check()
    assert done == ["permit"]
    assert [(each["act"], each["outcome"]) for each in entries(tmp_path)[count:]] == [("permit", "ok")]


@pytest.mark.parametrize("required", [False, True])
def test_a_source_that_comes_and_goes_without_end_fills_no_disk_and_hides_no_other(
    tmp_path: Path, required: bool
) -> None:
    audit, count = Audit(), OWN_ACTS_BURST + 1_000
    flood, other = Principal("flood"), Principal("other")
    with writing(tmp_path) as writer:
        audit.open(writer, required=required)
        for number in range(count):
            audit.record(("attach", "register", "withdraw", "end")[number % 4], flood)
        audit.record("attach", other)
        audit.record("permit", flood)  # of an operator: always
    lines = entries(tmp_path)
    written = sum(each.get("source") == "flood" and each["act"] != "permit" for each in lines)
    assert (written == count) is required
    assert written + sum(each.get("lines", 0) for each in lines) == count
    assert [each["act"] for each in lines if each.get("source") == "other"] == ["attach"]
    assert sum(each["act"] == "permit" for each in lines) == 1


def test_a_flood_of_refusals_is_counted_and_not_written(tmp_path: Path) -> None:
    audit, refused = Audit(), REFUSALS_BURST + 1_000
    with writing(tmp_path) as writer:
        audit.open(writer, required=False)
        for _ in range(refused):
            audit.record("refuse", ANN, outcome="refused")
        audit.record("attach", ANN)
    acts = [each["act"] for each in entries(tmp_path)]
    assert acts.count("attach") == 1
    assert acts.count("refuse") < refused
    assert acts.count("refuse") + sum(each.get("lines", 0) for each in entries(tmp_path)) == refused
