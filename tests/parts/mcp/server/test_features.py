"""Prompts, resources, templates and completions of mounted servers, as clients of both eras see them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parts.mcp.server.asking import Channel, Json, Mounted, mcp_bench
from tests.support.waiting import Stopwatch
from toolbus.bus.access.identity import LOCAL, Globs, Identity, Scopes
from toolbus.bus.catalog.policy import AccessRules, Policy
from toolbus.parts.mcp.features import Features, features_of
from toolbus.parts.mcp.messages.hops import with_hop
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.server import mcp_listing, mcp_request
from toolbus.parts.mcp.server.feature_view import FeatureView, matches
from toolbus.parts.mcp.server.mcp_listing import ToolNames
from toolbus.parts.mcp.settings import Profile
from toolbus.protocol.tool import Progress


def _names(listed: Json, key: str, name: str = "name") -> list[str]:
    return [entry[name] for entry in listed[key]]


async def test_prompts_are_named_like_tools_and_asked_for_by_their_own_name() -> None:
    async with mcp_bench(Profile(bare=("plain",))) as bench:
        first, second = Mounted("a.b", prompts=["ask"]), Mounted("plain", prompts=["ask", "more"])
        features_of(bench.bus.core).add(first)
        features_of(bench.bus.core).add(second)
        listed = await bench.ask("prompts/list")
        assert _names(listed, "prompts") == ["a_b_ask", "ask", "more"]
        assert listed["prompts"][0]["description"] == "of a.b"
        assert await bench.ask("prompts/get", {"name": "a_b_ask", "arguments": {"x": "1"}})
        assert first.requests == [("prompts/get", {"name": "ask", "arguments": {"x": "1"}})]
        assert (await bench.ask("prompts/get", {"name": "ask"}))["of"] == "plain"
        with pytest.raises(RpcError) as raised:
            await bench.ask("prompts/get", {"name": "a.b:ask"})
        assert raised.value.code == McpCode.INVALID_PARAMS


async def test_a_resource_of_two_mounts_belongs_to_the_first() -> None:
    async with mcp_bench() as bench:
        for mounted in (Mounted("one", resources=["x://a"]), Mounted("two", resources=["x://a", "x://b"])):
            features_of(bench.bus.core).add(mounted)
        listed = await bench.ask("resources/list")
        assert [(each["uri"], each["description"]) for each in listed["resources"]] == [
            ("x://a", "of one"),
            ("x://b", "of two"),
        ]
        assert (await bench.ask("resources/read", {"uri": "x://a"}))["of"] == "one"
        assert (await bench.ask("resources/read", {"uri": "x://b"}))["of"] == "two"


async def test_templates_are_tried_in_the_order_of_their_mounts() -> None:
    async with mcp_bench() as bench:

        def missing(method: str, params: Json) -> Json:
            raise RpcError(McpCode.RESOURCE_NOT_FOUND, "no such file")

        one, two = Mounted("one", templates=["x://{id}"], answer=missing), Mounted("two", templates=["x://{+path}"])
        features_of(bench.bus.core).add(one)
        features_of(bench.bus.core).add(two)
        listed = await bench.ask("resources/templates/list")
        assert _names(listed, "resourceTemplates", "uriTemplate") == ["x://{id}", "x://{+path}"]
        assert (await bench.ask("resources/read", {"uri": "x://1"}))["of"] == "two"
        assert len(one.requests) == 1
        assert (await bench.ask("resources/read", {"uri": "x://1/2"}))["of"] == "two"
        assert len(one.requests) == 1


@pytest.mark.parametrize(
    ("template", "uri", "expected"),
    [
        ("test://template/{id}/data", "test://template/123/data", True),
        ("test://template/{id}/data", "test://template/1/2/data", False),
        ("test://template/{id}/data", "test://template/123/data/more", False),
        ("file:///{+path}", "file:///a/b.c", True),
        ("x://a{?q,r}", "x://a?q=1&r=2", True),
        ("x://a{?q,r}", "x://a", True),
        ("x://a{/part*}", "x://a/b/c", True),
        ("x://a.b", "x://aXb", False),
        ("", "x", False),
    ],
)
def test_a_uri_matches_the_templates_that_may_have_made_it(template: str, uri: str, expected: bool) -> None:
    assert matches(template, uri) is expected


async def test_an_unknown_resource_has_the_code_of_its_era() -> None:
    async with mcp_bench() as bench:
        with pytest.raises(RpcError) as raised:
            await bench.ask("resources/read", {"uri": "x://none"})
        assert (raised.value.code, raised.value.data) == (McpCode.INVALID_PARAMS, {"uri": "x://none"})
        with pytest.raises(RpcError) as raised:
            await bench.ask("resources/read", {"uri": "x://none"}, session=bench.session())
        assert raised.value.code == McpCode.RESOURCE_NOT_FOUND


async def test_a_uri_that_is_not_listed_is_only_shown_to_mounts_of_its_scheme() -> None:
    async with mcp_bench() as bench:
        files, web = Mounted("files", resources=["file:///a"]), Mounted("web", resources=["https://x.example/a"])
        features_of(bench.bus.core).add(web)
        features_of(bench.bus.core).add(files)
        assert (await bench.ask("resources/read", {"uri": "file:///linked"}))["of"] == "files"
        assert web.requests == []


async def test_reads_and_lists_say_how_long_they_may_be_cached_in_the_modern_era_only() -> None:
    async with mcp_bench() as bench:
        answer: Json = {"resultType": "complete", "ttlMs": 7, "cacheScope": "public", "contents": [], "_meta": {"a": 1}}
        features_of(bench.bus.core).add(Mounted("one", resources=["x://a"], answer=lambda *_: dict(answer)))
        read = await bench.ask("resources/read", {"uri": "x://a"})
        assert (read["ttlMs"], read["cacheScope"], read["_meta"]["a"]) == (7, "public", 1)
        for method in ("prompts/list", "resources/list", "resources/templates/list"):
            listed = await bench.ask(method)
            assert (listed["cacheScope"], listed["ttlMs"] > 0, listed["resultType"]) == ("public", True, "complete")
            assert not {"ttlMs", "cacheScope", "resultType"} & set(await bench.ask(method, session=bench.session()))
        legacy = await bench.ask("resources/read", {"uri": "x://a"}, session=bench.session())
        assert legacy == {"contents": [], "_meta": {"a": 1}}


async def test_completions_go_to_the_mount_that_has_the_prompt_or_the_template() -> None:
    async with mcp_bench() as bench:
        one = Mounted("one", prompts=["p"], templates=["x://{id}"])
        features_of(bench.bus.core).add(one)
        features_of(bench.bus.core).add(Mounted("two", capabilities=("prompts",), prompts=["p"]))
        argument = {"name": "id", "value": "1"}
        for reference, own in (
            ({"type": "ref/prompt", "name": "one_p"}, {"type": "ref/prompt", "name": "p"}),
            ({"type": "ref/resource", "uri": "x://{id}"}, {"type": "ref/resource", "uri": "x://{id}"}),
        ):
            await bench.ask("completion/complete", {"ref": reference, "argument": argument})
            assert one.requests[-1] == ("completion/complete", {"ref": own, "argument": argument})
        params: Json = {"ref": {"type": "ref/prompt", "name": "two_p"}, "argument": argument}
        assert (await bench.ask("completion/complete", params))["completion"]["values"] == []
        for wrong in ({}, {"type": "ref/prompt", "name": "no"}, {"type": "ref/resource", "uri": "no"}, {"type": "x"}):
            with pytest.raises(RpcError) as raised:
                await bench.ask("completion/complete", {"ref": wrong, "argument": argument})
            assert raised.value.code == McpCode.INVALID_PARAMS


async def test_long_lists_come_in_pages_and_a_cursor_of_another_list_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = with_hop(Mounted("m", resources=["x://0"]).declared("resources")[0], "x" * 24)
    monkeypatch.setattr(mcp_listing, "MAX_PAGE_BYTES", 2 * len(mcp_request.encode(listed)) + 2)
    async with mcp_bench() as bench:
        mounted = Mounted("m", prompts=["a"], resources=[f"x://{number}" for number in range(5)])
        features_of(bench.bus.core).add(mounted)
        uris: list[str] = []
        cursors: list[str] = []
        params: Json = {}
        while True:
            page = await bench.ask("resources/list", params)
            uris += _names(page, "resources", "uri")
            if "nextCursor" not in page:
                break
            cursors.append(page["nextCursor"])
            params = {"cursor": page["nextCursor"]}
        assert (uris, len(cursors)) == (mounted.uris, 2)
        for method, cursor in (("prompts/list", cursors[0]), ("resources/list", "x"), ("resources/list", 7)):
            with pytest.raises(RpcError) as raised:
                await bench.ask(method, {"cursor": cursor})
            assert raised.value.code == McpCode.INVALID_PARAMS
        del mounted.uris[:2]  # the last of the first page, too
        mounted.uris.append("x://9")
        page = await bench.ask("resources/list", {"cursor": cursors[0]})
        assert _names(page, "resources", "uri") == ["x://2", "x://3"]


def test_a_profile_and_an_identity_see_what_their_patterns_allow() -> None:
    features = Features()
    features.add(Mounted("open", prompts=["p"], resources=["x://1"], templates=["x://{a}"]))
    features.add(Mounted("shut", prompts=["p"], resources=["x://2"], templates=["x://{b}"]))
    view = FeatureView(features, Policy(), ToolNames())
    profile, anybody = Profile(sources=("open",)), LOCAL
    someone = Identity("bob", Scopes(call=Globs(("shut:*",))))
    assert list(view.listed("prompts", profile, anybody)) == ["open_p"]
    assert list(view.listed("resources", profile, anybody)) == ["x://1"]
    assert list(view.listed("templates", profile, anybody)) == ["x://{a}"]
    assert [each.source for each in view.providers_of(profile, anybody, "x://2")] == ["open"]
    denied = Profile(deny=("open:x://secret*",))
    for uri in ("x://secret/1", "x://secret1"):  # one that no template fits, and one that does
        assert [each.source for each in view.providers_of(denied, anybody, uri)] == ["shut"]
    assert list(view.listed("prompts", Profile(), someone)) == ["shut_p"]
    assert list(view.listed("resources", Profile(), someone)) == ["x://2"]


@pytest.mark.parametrize("greedy", ["{+x}", "{scheme}://{+x}", "mail:{+x}", "notes://{+x}", "notes://a/{+x}"])
def test_a_template_takes_no_uri_that_another_mount_lists_or_names_better(greedy: str) -> None:
    features = Features()
    features.add(Mounted("greedy", templates=[greedy]))
    features.add(Mounted("notes", resources=["notes://1"], templates=["notes://a/b/{id}"]))
    view = FeatureView(features, Policy(), ToolNames())

    def owners(uri: str) -> list[str]:
        return [each.source for each in view.providers_of(Profile(), LOCAL, uri)]

    assert owners("notes://1") == ["notes"]
    assert owners("notes://a/b/2") == ["notes"]
    own = {"mail:{+x}": "mail:7", "notes://{+x}": "notes://c", "notes://a/{+x}": "notes://a/c"}.get(greedy)
    assert owners(own or "notes://c") == (["greedy"] if own else ["notes"])
    assert owners("other://1") == []


def test_the_only_mount_with_resources_gets_what_its_template_names_with_a_variable_alone() -> None:
    features = Features()
    features.add(Mounted("only", templates=["{+x}"]))
    view = FeatureView(features, Policy(), ToolNames())
    assert [each.source for each in view.providers_of(Profile(), LOCAL, "any://1")] == ["only"]


def test_a_mount_for_certain_users_levels_and_roles_shows_others_neither_prompts_nor_resources() -> None:
    features = Features()
    features.add(Mounted("m", prompts=["p"], resources=["x://1"], templates=["x://{a}"], role="ops", min_level=5))
    rules = AccessRules.read({"sources": {"m": ["ann"]}, "tools": {"m:q": []}})
    view = FeatureView(features, Policy(permissions=rules), ToolNames())
    sees = Profile(user="ann", level=5, role="ops")
    for profile, sees_it in (
        (sees, True),
        (replace(sees, role=""), True),
        (replace(sees, role="shop"), False),
        (replace(sees, level=4), False),
        (replace(sees, user="bob"), False),
        (replace(sees, user=""), False),
    ):
        assert bool(view.listed("prompts", profile, LOCAL)) is sees_it
        assert bool(view.listed("resources", profile, LOCAL)) is sees_it
        assert bool(view.listed("templates", profile, LOCAL)) is sees_it
        assert bool(view.providers_of(profile, LOCAL, "x://1")) is sees_it
    silenced = FeatureView(features, Policy(frozenset({"m"}), permissions=rules), ToolNames())
    assert not silenced.listed("prompts", sees, LOCAL)
    assert not silenced.providers_of(sees, LOCAL, "x://1")
    other_role = Identity("bob", Scopes(call=Globs(("*",)), roles=Globs(("shop",))))
    assert not view.listed("prompts", sees, other_role)


async def test_an_identity_that_may_call_nothing_asks_no_mounted_server() -> None:
    async with mcp_bench() as bench:
        mounted = Mounted("m", prompts=["p"], resources=["x://1"])
        features_of(bench.bus.core).add(mounted)
        reader = Identity("reader", Scopes(call=Globs(("*",)), in_flight=0))
        assert _names(await bench.ask("prompts/list", identity=reader), "prompts") == ["m_p"]
        for method, params in (("prompts/get", {"name": "m_p"}), ("resources/read", {"uri": "x://1"})):
            with pytest.raises(RpcError, match="in_flight is 0"):
                await bench.ask(method, params, identity=reader)
        assert mounted.requests == []


def test_a_template_of_a_hostile_server_takes_no_time() -> None:
    watch = Stopwatch()
    assert not matches("x://" + "{+a}" * 16 + "/", "x://" + "a" * 400)
    assert not matches("{a}" * 1000, "a")
    assert watch.seconds() < 5


async def test_progress_of_a_mounted_server_reaches_the_client_that_wants_it() -> None:
    async with mcp_bench() as bench:
        mounted = Mounted("m", prompts=["p"])
        features_of(bench.bus.core).add(mounted)
        channel = Channel()
        await bench.ask("prompts/get", {"name": "m_p", "_meta": {"progressToken": 7}}, channel=channel)
        report = mounted.askers[0].on_progress
        assert report is not None
        report(Progress(1, 2))
        assert channel.of("notifications/progress") == [{"progressToken": 7, "progress": 1, "total": 2}]
        await bench.ask("prompts/get", {"name": "m_p"}, channel=channel)
        assert mounted.askers[1].on_progress is None


async def test_instructions_that_are_handed_on_reach_the_clients_that_see_something_of_the_mount() -> None:
    async with mcp_bench() as bench:
        begin = {"protocolVersion": "2025-11-25", "capabilities": {}}
        plain = (await bench.ask("server/discover"))["instructions"]
        bench.offer("buy", lambda call: None)
        for mounted in (
            Mounted("shop", instructions="Pay first."),
            Mounted("none", instructions="Unseen."),
            Mounted("x"),
        ):
            features_of(bench.bus.core).add(mounted)
        found = await bench.ask("server/discover")
        assert found["instructions"] == f"{plain}\n\nInstructions of shop, for its tools:\nPay first."
        assert found["cacheScope"] == "private"
        legacy = await bench.ask("initialize", begin, session=bench.session())
        assert legacy["instructions"] == found["instructions"]
        other = await bench.ask("server/discover", profile=Profile(name="other", sources=("x",)))
        assert (other["instructions"], other["cacheScope"]) == (plain, "public")


@pytest.mark.parametrize("meta", [[], "x", 7, None])
async def test_a_meta_that_is_no_object_is_left_out(meta: object) -> None:
    async with mcp_bench() as bench:
        features_of(bench.bus.core).add(Mounted("m", prompts=["p"], answer=lambda *_: {"messages": [], "_meta": meta}))
        assert (await bench.ask("prompts/get", {"name": "m_p"}))["messages"] == []
        assert await bench.ask("prompts/get", {"name": "m_p"}, session=bench.session()) == {"messages": []}
