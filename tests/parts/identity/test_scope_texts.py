"""Tests the sentences that say what scopes allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.bus.access.identity import VERBS, Globs, Scopes
from toolbus.parts.identity.scope_texts import Template, scope_sentences, template


@pytest.mark.parametrize(
    ("kind", "sentences"),
    [
        (
            "plugin",
            [
                "It attaches as the sources weather*.",
                "It offers tools of any name.",
                "It calls tools only as part of a call that it answers.",
                "It speaks for no user, up to access level 0.",
                "It does not administer the bus.",
            ],
        ),
        (
            "host",
            [
                "It attaches as the sources weather*.",
                "It offers no tools.",
                "It sees and calls every tool.",
                "It speaks for every user, up to access level 89.",
                "It does not administer the bus.",
            ],
        ),
        (
            "reader",
            [
                "It attaches as no source: it has no stream.",
                "It offers no tools.",
                "It sees every tool, and calls none.",
                "It speaks for no user, up to access level 0.",
                "It administers calls, metrics.",
            ],
        ),
    ],
)
def test_each_template_is_described_in_sentences(kind: Template, sentences: list[str]) -> None:
    assert scope_sentences(template(kind, "weather*")) == sentences


def test_every_scope_has_its_sentence() -> None:
    scopes = Scopes(
        attach=Globs(["*"]),
        offer=Globs(["a", "b"]),
        call=Globs(["home:*"]),
        never=Globs(["danger*"]),
        roles=Globs(["cat"]),
        users=Globs(["team-*"]),
        level=5,
        administer=frozenset(["*"]),
        rate=2.5,
        in_flight=7,
        sessions=1,
    )
    assert scope_sentences(scopes) == [
        "It attaches as any source.",
        "It offers the tools a, b.",
        "It sees and calls the tools home:*, but not danger*.",
        "It sees the tools of the roles cat only.",
        "It speaks for the users team-*, up to access level 5.",
        "It administers everything of the bus.",
        "It makes at most 2.5 calls a second.",
        "It has at most 7 calls at the same time.",
        "It has at most 1 streams at the same time.",
    ]


@given(st.sampled_from(["attach", "offer", "call", "users"]), st.frozensets(st.sampled_from(VERBS)))
def test_different_scopes_have_different_sentences(name: str, verbs: frozenset[str]) -> None:
    nothing, more = Scopes(), Scopes(**{name: Globs(["x"])}, administer=verbs)  # type: ignore[arg-type]
    assert scope_sentences(nothing) != scope_sentences(more)


def test_what_each_template_may_do() -> None:
    plugin, host = template("plugin", "weather*"), template("host", "chat")
    assert plugin.attach.match("weather2")
    assert plugin.offer.match("any")
    assert not plugin.call.match("any")
    assert host.call.match("any")
    assert not host.offer.match("any")
    assert not host.administers("drain")
    assert template("operator").administers("drain")
    assert not template("reader").administers("drain")
    assert template("reader").in_flight == 0
