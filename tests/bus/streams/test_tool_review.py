"""Tools are judged one by one: a bad one is refused with its own reason, and tried again when what it lacks changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.core_model import Core, StreamDouble, names, tool
from toolbus.bus.access.identity import LOCAL, Globs, Identity, Scopes
from toolbus.bus.streams import refused_tools
from toolbus.bus.streams.refused_tools import Cause, Refusal, SessionRefusals
from toolbus.protocol.tool import Limits
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

BAD = '{"type":'


def attach(core: Core, source: str, *tools: pb.Tool, stream: StreamDouble | None = None, **fields: Any) -> StreamDouble:
    stream = stream or core.stream()
    stream.send(attach=wire.Attach(protocol_version=1, source=source, tools=tools, **fields))
    return stream


def attached(stream: StreamDouble) -> wire.Attached:
    answer: wire.Attached = stream.read("attached")[-1]
    return answer


def reasons(message: Any) -> dict[str, str]:
    return {each.name: each.error for each in message.refused}


def listed(core: Core, identity: Identity = LOCAL, **fields: Any) -> list[tuple[str, str]]:
    request = wire.ListRequest(include_refused=True, **fields)
    return [(source, each.name) for source, each in core.presence.review.refused.listed(request, identity)]


def reviews(stream: StreamDouble) -> list[tuple[list[str], dict[str, str]]]:
    events = [event.tools_reviewed for event in stream.read("events") if event.HasField("tools_reviewed")]
    return [(list(event.registered), reasons(event)) for event in events]


# -- one by one ------------------------------------------------------------------------------------------------------


def test_a_request_of_many_dear_schemas_is_compiled_up_to_a_bound_and_the_rest_is_refused_by_name() -> None:
    core = Core()
    text = json.dumps({"properties": {"a": {"pattern": r"^\p{L}{1,40}$"}}})
    dear = [tool(f"dear{number}", parameters_json=text.replace("40", str(40 + number))) for number in range(50)]
    stream = core.attached("plugin", *dear, tool("plain"))
    (answer,) = stream.read("attached")
    assert 30 < len(answer.registered) < 50
    assert answer.registered[-1] != "plain"  # it comes after them; a request of its own takes it
    refused = reasons(answer)
    assert "dear49" in refused
    assert "the most for one request: repeat classes with * or +" in refused["dear49"]


def test_each_bad_tool_is_refused_with_its_own_reason_and_the_others_are_offered() -> None:
    core = Core()
    stream = attach(
        core,
        "plugin",
        pb.Tool(name="good"),
        pb.Tool(name="a b"),
        pb.Tool(name="schema", parameters_json=BAD),
        pb.Tool(name="late", timeout_seconds=301),
        pb.Tool(name="url", callback_url="http://127.0.0.1:1/"),
        pb.Tool(name="also"),
    )
    answer = attached(stream)
    assert (list(answer.registered), answer.refused_total, stream.status) == (["good", "also"], 4, None)
    parts = {"a b": "[A-Za-z0-9_.-]", "schema": "JSON", "late": "300", "url": "callback_url"}
    assert {name: part in reasons(answer)[name] for name, part in parts.items()} == dict.fromkeys(parts, True)
    assert names(core) == ["good", "also"]


def test_of_two_tools_with_one_name_the_first_is_offered() -> None:
    core = Core(roles=("cat", "dog"))
    tools = pb.Tool(name="t", description="first"), pb.Tool(name="t", description="second")
    answer = attached(attach(core, "plugin", *tools, pb.Tool(name="t", role="cat", description="of cats")))
    assert (list(answer.registered), list(reasons(answer))) == (["t"], ["t"])
    assert "declared twice" in reasons(answer)["t"]
    assert core.registry.find("t", "dog").tool.description == "first"  # type: ignore[union-attr]
    assert core.registry.find("t", "cat").tool.description == "of cats"  # type: ignore[union-attr]


def test_tools_beyond_the_limit_of_a_session_are_refused_and_those_within_are_offered() -> None:
    core = Core(limits=Limits(tools=2))
    stream = attach(core, "plugin", *(pb.Tool(name=f"t{number}") for number in range(4)))
    answer = attached(stream)
    assert (names(core), list(reasons(answer))) == (["t0", "t1"], ["t2", "t3"])
    assert "limit tools = 2" in reasons(answer)["t2"]


def test_tools_beyond_the_room_of_a_role_are_refused_and_taken_when_there_is_room() -> None:
    core = Core()
    core.registry.tables.tools_per_role = 2
    stream = attach(core, "plugin", *(pb.Tool(name=f"t{number}") for number in range(3)))
    answer = attached(stream)
    assert (names(core), list(reasons(answer))) == (["t0", "t1"], ["t2"])
    assert "limit tools_per_role = 2" in reasons(answer)["t2"]
    core.presence.tick(core.now)
    assert reviews(stream) == []
    core.presence.unregister(wire.UnregisterRequest(name="t0"))
    core.presence.tick(core.now)
    assert names(core) == ["t1", "t2"]
    assert reviews(stream) == [(["t2"], {})]


def test_a_refused_declaration_takes_the_place_of_the_offered_one_and_spares_the_others() -> None:
    core = Core()
    stream = core.attached("plugin", tool("a"), tool("b"))
    request = wire.RegisterRequest(session_id=stream.peer.session_id)
    request.tools.add(name="a", parameters_json=BAD)
    request.tools.add(name="c")
    response = core.presence.register(request)
    assert (list(response.registered), response.ok, list(reasons(response))) == (["c"], False, ["a"])
    assert names(core) == ["b", "c"]
    response = core.presence.register(
        wire.RegisterRequest(session_id=stream.peer.session_id, tools=[pb.Tool(name="a")])
    )
    assert (response.ok, names(core), listed(core)) == (True, ["b", "c", "a"], [])


def test_a_later_attach_without_the_bad_tool_has_no_refusal_left() -> None:
    core = Core()
    stream = attach(core, "plugin", pb.Tool(name="a"), pb.Tool(name="bad", parameters_json=BAD))
    assert listed(core) == [("plugin", "bad")]
    attach(core, "plugin", pb.Tool(name="a"), stream=stream)
    assert listed(core) == []


def test_a_reconnect_with_a_bad_tool_brings_the_good_ones_back_in_their_places() -> None:
    core = Core()
    tools = pb.Tool(name="first"), pb.Tool(name="bad", parameters_json=BAD), pb.Tool(name="second")
    first = attach(core, "plugin", *tools, instance="i")
    core.plugin("other", tool("third"))
    first.end()
    assert listed(core) == []
    attach(core, "plugin", *tools, instance="i")
    assert names(core) == ["first", "second", "third"]


# -- all or none -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "status", "part"),
    [
        (pb.Tool(name="bad", parameters_json=BAD), "INVALID_ARGUMENT", "JSON"),
        (pb.Tool(name="bad", role="nobody"), "NOT_FOUND", "nobody"),
        (pb.Tool(name="t3"), "RESOURCE_EXHAUSTED", "limit tools = 2"),
    ],
    ids=["schema", "role", "limit"],
)
def test_one_bad_tool_refuses_all_where_the_attach_says_so(bad: pb.Tool, status: str, part: str) -> None:
    core = Core(limits=Limits(tools=2))
    stream = attach(core, "plugin", pb.Tool(name="t1"), pb.Tool(name="t2"), bad, all_or_none=True)
    assert stream.status is not None
    assert (stream.status[0], part in stream.status[1], names(core)) == (status, True, [])


def test_a_role_without_room_refuses_all_where_the_attach_says_so() -> None:
    core = Core()
    core.registry.tables.tools_per_role = 1
    stream = attach(core, "plugin", pb.Tool(name="a"), pb.Tool(name="b"), all_or_none=True)
    assert stream.status is not None
    assert stream.status[0] == "RESOURCE_EXHAUSTED"
    assert names(core) == []
    core.attached("plugin", tool("a"), all_or_none=True)
    assert names(core) == ["a"]


def test_a_missing_right_refuses_all_by_name_where_the_attach_says_so() -> None:
    core = Core()
    stream = core.stream()
    stream.peer.principal = stream.peer.principal.__class__(
        identity=Identity("i", Scopes(attach=Globs(["p"]), offer=Globs(["mine"])))
    )
    attach(core, "p", pb.Tool(name="mine"), pb.Tool(name="other"), stream=stream, all_or_none=True)
    answer = attached(stream)
    assert (list(answer.registered), list(reasons(answer)), names(core)) == ([], ["mine", "other"], [])
    assert "all_or_none" in reasons(answer)["mine"]
    assert "scope offer" in reasons(answer)["other"]


# -- trying again ----------------------------------------------------------------------------------------------------


def test_a_tool_for_a_missing_role_is_offered_when_the_role_is_added() -> None:
    core = Core()
    stream = attach(core, "plugin", pb.Tool(name="good"), pb.Tool(name="t", role="later"))
    stream.written()
    core.registry.add_role("later")
    core.presence.catalog_changed()
    assert [listing.tool.name for listing in core.registry.listings("later")] == ["good", "t"]
    assert reviews(stream) == [(["t"], {})]
    assert listed(core) == []


def test_a_right_that_comes_back_brings_the_tools_back_without_an_attach() -> None:
    core = Core()
    stream = attach(core, "plugin", pb.Tool(name="a"), pb.Tool(name="bad", parameters_json=BAD), pb.Tool(name="b"))
    stream.written()
    core.policy.deny("plugin", set())
    core.presence.permission_changed("plugin", "tools", granted=False)
    ((registered, refused),) = reviews(stream)
    assert (registered, list(refused), names(core)) == ([], ["a", "b"], [])
    assert "toolbus access grant plugin" in refused["a"]
    assert listed(core) == [("plugin", "bad"), ("plugin", "a"), ("plugin", "b")]
    core.policy.grant("plugin")
    core.presence.permission_changed("plugin", "tools", granted=True)
    assert reviews(stream) == [(["a", "b"], {})]
    assert (names(core), listed(core)) == (["a", "b"], [("plugin", "bad")])


def test_what_is_tried_again_and_bad_for_another_reason_is_told_with_that_reason() -> None:
    core = Core(denied=frozenset({"plugin"}))
    stream = attach(core, "plugin", pb.Tool(name="bad", parameters_json=BAD))
    assert "toolbus access grant" in reasons(attached(stream))["bad"]
    core.policy.grant("plugin")
    core.presence.permission_changed("plugin", "tools", granted=True)
    ((registered, refused),) = reviews(stream)
    assert (registered, "JSON" in refused["bad"]) == ([], True)


def test_a_wider_scope_brings_the_tools_that_the_identity_may_offer_then() -> None:
    core = Core()
    narrow = Identity("i", Scopes(attach=Globs(["p"]), offer=Globs(["mine"])))
    wide = Identity("i", Scopes(attach=Globs(["p"]), offer=Globs(["*"])))
    stream = core.stream()
    stream.peer.principal = stream.peer.principal.__class__(identity=narrow)
    attach(core, "p", pb.Tool(name="mine"), pb.Tool(name="other"), stream=stream)
    assert list(reasons(attached(stream))) == ["other"]
    core.presence.refresh_identities(lambda identity: wide, core.now)
    assert (names(core), reviews(stream)) == (["mine", "other"], [(["other"], {})])


# -- forgetting ------------------------------------------------------------------------------------------------------


def test_unregistering_a_refused_name_forgets_it_and_does_not_fail() -> None:
    core = Core()
    tools = (
        pb.Tool(name="bad", parameters_json=BAD),
        pb.Tool(name="away", role="later"),
        pb.Tool(name="rest", role="x", timeout_seconds=301),
    )
    stream = attach(core, "plugin", *tools)
    for request in (
        wire.UnregisterRequest(session_id=stream.peer.session_id, name="bad"),
        wire.UnregisterRequest(name="away", role="later"),
    ):
        response = core.presence.unregister(request)
        assert (response.ok, response.removed, list(response.affected_roles)) == (True, True, [])
    assert listed(core) == [("plugin", "rest")]
    assert not core.presence.unregister(wire.UnregisterRequest(name="bad")).removed
    core.registry.add_role("later")
    core.presence.catalog_changed()
    assert names(core) == []


@pytest.mark.parametrize("way", ["clear", "drain", "end", "drain_source"])
def test_the_refusals_of_a_session_end_with_what_it_offers(way: str) -> None:
    core = Core()
    stream = attach(core, "plugin", pb.Tool(name="bad", parameters_json=BAD))
    assert listed(core) == [("plugin", "bad")]
    if way == "clear":
        core.presence.clear(wire.ClearRequest(source="plugin"))
    elif way == "drain":
        stream.send(drain=wire.Drain())
    elif way == "drain_source":
        core.presence.drain_source("plugin", 5.0, core.now)
    else:
        stream.end()
    assert (listed(core), len(core.presence.review.refused)) == ([], 0)


# -- who sees them ---------------------------------------------------------------------------------------------------


def test_refusals_are_listed_for_operators_and_for_who_may_be_their_source() -> None:
    core = Core()
    away = pb.Tool(name="away", role="later", timeout_seconds=301)
    for source in ("p", "q"):
        attach(core, source, pb.Tool(name="bad", parameters_json=BAD), away)
    everything = [(source, name) for source in ("p", "q") for name in ("bad", "away")]
    assert listed(core) == everything
    assert listed(core, source="q", names=["bad"]) == [("q", "bad")]
    assert listed(core, role="default") == [("p", "bad"), ("q", "bad")]
    own = Identity("own", Scopes(attach=Globs(["q"]), call=Globs(["*"])))
    operator = Identity("operator", Scopes(administer=frozenset({"catalog"})))
    assert listed(core, own) == everything[2:]
    assert listed(core, operator) == everything


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_an_answer_names_so_many_refusals_that_the_message_is_not_filled_and_says_how_many_there_are() -> None:
    core = Core()
    tools = [pb.Tool(name=f"{'x' * 100} {number}", timeout_seconds=-1) for number in range(3_000)]
    stream = attach(core, "plugin", *tools, max_message_bytes=65_536)
    answer = attached(stream)
    assert answer.refused_total == 3_000
    assert 0 < len(answer.refused) < 1_000
    assert answer.ByteSize() < 65_536 // 2
    assert len(core.presence.review.refused) == refused_tools.MAX_OF_SESSION


def test_forgetting_leaves_sessions_alone_that_have_no_refusal_of_the_name() -> None:
    core, refused = Core(), SessionRefusals()
    for source in ("first", "second"):
        refused.set(core.attached(source).peer, [Refusal.of(pb.Tool(name="same"), source, Cause.PERMISSION)])
    before = [refused.of(peer) for peer in refused.peers]
    assert refused.forget("other", source="first") == refused.forget("same", role="other") == 0
    after = [refused.of(peer) for peer in refused.peers]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert refused.find("same") == ("first", "first")


def test_declarations_that_do_not_fit_are_dropped_before_their_refusals() -> None:
    core, refused = Core(), SessionRefusals()
    peer = core.attached("plugin").peer
    large = pb.Tool(name="t", description="x" * 400_000)
    refused.set(peer, [Refusal.of(large, "why", Cause.PERMISSION) for _ in range(4)])
    assert [each.declaration is not None for each in refused.of(peer)] == [True, True, False, False]
    refused.set(peer, [Refusal.of(pb.Tool(name="n" * 10_000), "e" * 10_000, Cause.DECLARATION)])
    ((name, error),) = [(each.name, each.error) for each in refused.of(peer)]
    assert (len(name), len(error)) == (refused_tools.MAX_NAME, refused_tools.MAX_ERROR)
    refused.drop(peer)
    assert repr(refused) == "<SessionRefusals 0 of 0 sessions, 0 bytes>"


class _Interrupted(Identity):
    """An identity during whose look at the refusals, on a thread, a session ends on the loop."""

    def may_attach(self, source: str) -> bool:
        for peer in self.core.presence.review.refused.peers[1:]:  # type: ignore[attr-defined]
            self.core.presence.review.refused.drop(peer)  # type: ignore[attr-defined]
        return True


def test_refusals_are_listed_while_sessions_with_others_end() -> None:
    core = Core()
    for source in ("one", "two", "three"):
        attach(core, source, pb.Tool(name="bad", parameters_json=BAD))
    identity = _Interrupted("near", Scopes())
    object.__setattr__(identity, "core", core)
    assert listed(core, identity) == [("one", "bad"), ("two", "bad"), ("three", "bad")]
