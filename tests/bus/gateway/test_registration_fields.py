"""A registration by REST has what a tool over gRPC has, and its plugin may ask for the context of calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bus.gateway.calling import client
from tests.faults.callbacks import CallbackPlugin, starting
from tests.support.core_model import one_call, tool
from toolbus.bus import Bus
from toolbus.bus.gateway import callback_context
from toolbus.bus.gateway.callback_context import MAX_BYTES, context_headers, wants_context
from toolbus.errors import Code
from toolbus.sdk import CallContext, ContextMessage, Inputs
from toolbus.testing import running_bus
from toolbus.v1 import tool_pb2 as pb

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ALL = {
    "display_name": "Weather",
    "council_eligible": True,
    "inline_available": True,
    "min_level": 5,
    "annotations": {"read_only": True, "destructive": False},
    "validate": True,
    "context_headers": True,
    "output_schema": {"type": "str"},
    "validate_output": True,
    "needs": ["sampling"],
    "always_background": True,
}


async def register(bus: Bus, plugin: CallbackPlugin, **fields: Any) -> dict[str, Any]:
    async with client(bus) as http:
        body = {"name": "weather", "callback_url": plugin.url(), "parameters": CITY, "source": "w", **fields}
        answer = await http.post("/api/tools/register", json=body)
    said: dict[str, Any] = answer.json()
    return said


def headers_of(plugin: CallbackPlugin) -> dict[str, str]:
    head, _ = plugin.requests[-1]
    return dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)


async def test_a_registration_has_what_a_tool_over_grpc_has_also_after_a_restart(tmp_path: Path) -> None:
    start = starting(tmp_path / "data")
    with CallbackPlugin().come() as plugin:
        for registers in (True, False):
            async with start() as bus:
                if registers:
                    assert "ignored" not in await register(bus, plugin, **ALL)
                (listed,) = bus.list(level=5)
                said = listed.tool
                hints = said.annotations
                shown = (said.display_name, said.council_eligible, said.inline_available, said.min_level)
                assert shown == ("Weather", True, True, 5)
                assert (said.output_schema, said.needs) == ({"type": "string"}, ("sampling",))
                assert (said.validate_output, said.always_background) == (True, True)
                assert (hints.read_only, hints.idempotent, hints.destructive, hints.open_world) == (
                    True,
                    None,
                    False,
                    None,
                )
                assert bus.list() == []
                high = CallContext("ann", {"level": "5"})
                can_answer = Inputs(("sampling",))
                refused = await bus.call("weather", {"town": 1}, context=high, inputs=can_answer)
                assert refused.error is not None
                assert refused.error.code is Code.INVALID_ARGUMENTS
                arguments = {"city": "oslo", "userId": "x"}
                answered = await bus.call("weather", arguments, context=high, inputs=can_answer)
                assert answered.error is not None
                assert answered.error.reason == "output_schema"  # it returned an object
                assert plugin.requests[-1][1]["arguments"] == {"city": "oslo"}
                assert headers_of(plugin)["x-toolbus-user"] == '"ann"'


async def test_unknown_fields_are_ignored_and_named_where_there_are_any(tmp_path: Path) -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        with CallbackPlugin().come() as plugin:
            said = await register(bus, plugin, colour="red", annotations={"readOnly": True}, icon={"a": 1})
            assert said == {
                "ok": True,
                "registered": "weather",
                "affected_roles": ["default"],
                "failed_roles": [],
                "ignored": ["colour", "icon", "annotations.readOnly"],
            }


@pytest.mark.parametrize(
    ("fields", "loc"),
    [
        ({"min_level": -1}, "min_level"),
        ({"council_eligible": "perhaps"}, "council_eligible"),
        ({"annotations": {"read_only": 7}}, "annotations"),
        ({"display_name": "x" * 257}, "display_name"),
        ({"validate": True, "parameters": {"type": "strin"}}, "parameters"),
        ({"output_schema": {"type": "strin"}}, "output_schema"),
        ({"needs": [""]}, "needs"),
    ],
)
async def test_a_field_that_breaks_its_rule_is_refused_with_its_place(fields: dict[str, Any], loc: str) -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        with CallbackPlugin().come() as plugin:
            said = await register(bus, plugin, **fields)
            assert said["detail"][0]["loc"][:2] == ["body", loc]
            assert bus.list() == []


async def test_only_a_plugin_that_asks_gets_the_context() -> None:
    async with running_bus(http="127.0.0.1:0") as bus:
        with CallbackPlugin().come() as plugin:
            for asks in (True, False):
                await register(bus, plugin, context_headers=asks)
                context = CallContext(
                    "ann", {"level": "5"}, member={"name": "ada"}, messages=(ContextMessage("user", "hi é"),)
                )
                assert (await bus.call("weather", {"city": "oslo"}, context=context)).error is None
                headers = {name: value for name, value in headers_of(plugin).items() if name.startswith("x-toolbus")}
                if not asks:
                    assert headers == {}
                    continue
                assert json.loads(headers["x-toolbus-member"]) == {"name": "ada"}
                assert json.loads(headers["x-toolbus-messages"]) == [{"role": "user", "content": "hi é"}]
                assert json.loads(headers["x-toolbus-attributes"]) == {"level": "5"}
                assert 0 < json.loads(headers["x-toolbus-timeout"]) <= 30


TEXTS = st.text(st.characters(codec="utf-8"), max_size=3_000)


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=5), st.dictionaries(TEXTS, TEXTS, max_size=5), TEXTS, TEXTS)
def test_headers_are_bounded_ascii_lines_whatever_the_context(
    messages: list[tuple[str, str]], member: dict[str, str], user: str, traceparent: str
) -> None:
    core, host, plugin = one_call(tool("t"))
    core.call(host, "t")
    call = plugin.hand_over()[0]
    call.context = pb.CallContext(user_id=user, member_json=json.dumps(member), traceparent=traceparent)
    call.context.messages.extend(pb.ContextMessage(role=role, content=content) for role, content in messages)
    headers = context_headers(call)
    ours = {name: value for name, value in headers.items() if name.startswith("X-Toolbus") and "Left" not in name}
    assert sum(len(name) + len(value) for name, value in ours.items()) <= MAX_BYTES
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    for value in ours.values():
        json.loads(value)
    shown = json.loads(headers.get("X-Toolbus-Messages", "[]"))
    assert shown == [{"role": role, "content": content} for role, content in messages][len(messages) - len(shown) :]
    if len(shown) < len(messages):
        assert "X-Toolbus-Messages" in headers["X-Toolbus-Left-Out"]


def test_a_context_of_many_parts_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []

    def counted(value: object) -> str:
        written.append(value)
        return json.dumps(value, separators=(",", ":"))

    monkeypatch.setattr(callback_context, "_json", counted)
    core, host, plugin = one_call(tool("t"))
    core.call(host, "t")
    call = plugin.hand_over()[0]
    call.context = pb.CallContext(attributes={f"k{index}": "v" for index in range(5_000)})
    call.context.messages.extend(pb.ContextMessage(role="user", content=str(index)) for index in range(5_000))
    headers = context_headers(call)
    assert len(written) < 15_000
    assert "X-Toolbus-Attributes" in headers["X-Toolbus-Left-Out"]


@pytest.mark.parametrize("member", ["{", "[" * 5_000])
def test_a_member_that_is_not_json_is_left_out(member: str) -> None:
    core, host, plugin = one_call(tool("t"))
    core.call(host, "t")
    call = plugin.hand_over()[0]
    call.context = pb.CallContext(user_id="ann", member_json=member)
    headers = context_headers(call)
    assert headers["X-Toolbus-User"] == '"ann"'
    assert headers["X-Toolbus-Left-Out"] == "X-Toolbus-Member"


@pytest.mark.parametrize("metadata", ['["context_headers"]', '{"context_headers"', '"context_headers"'])
def test_metadata_of_any_shape_asks_for_no_context(metadata: str) -> None:
    assert not wants_context(tool("t", metadata_json=metadata))


async def test_a_callback_gets_no_defaults_also_where_its_arguments_are_checked(tmp_path: Path) -> None:
    start = starting(tmp_path / "data")
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3}}}
    with CallbackPlugin().come() as plugin:
        for registers in (True, False):  # also after a restart
            async with start() as bus:
                if registers:
                    await register(bus, plugin, validate=True, parameters=schema)
                await bus.call("weather", '{"city":"Oslo"}')
                assert plugin.requests[-1][1]["arguments"] == {"city": "Oslo"}
                await bus.call("weather", '{"days":"2"}')
                assert plugin.requests[-1][1]["arguments"] == {"days": 2}
