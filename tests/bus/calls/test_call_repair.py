"""Calls whose arguments are repaired: what the plugin gets, what record and log say, who switches it off."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.support.core_model import NUMBER, Core, error_of, tool
from toolbus.bus.calls.call_records import MAX_REPAIRS_SHOWN
from toolbus.errors import Code
from toolbus.protocol.tool import Limits, Tool
from toolbus.v1 import tool_pb2 as pb

COUNCIL = replace(NUMBER, name="c", council_eligible=True)


def of(name: str = "n", **properties: Any) -> Tool:
    return tool(name, parameters_json=json.dumps({"type": "object", "properties": properties}))


def arrived(core: Core, caller: Any, plugin: Any, name: str, arguments: str, **more: Any) -> str:
    """Returns the arguments with which a call reached its plugin."""
    call_id = core.call(caller, name, arguments, **more)
    assert call_id not in caller.results, error_of(caller, call_id)
    (call,) = plugin.pending.values()
    core.dispatcher.results(plugin, [pb.ToolResult(call_id=call.id, output_json="1")], core.now)
    return str(call.arguments_json)


def test_a_plugin_gets_repaired_arguments_and_the_record_says_what_was_done() -> None:
    core = Core()
    host, plugin = core.peer("h"), core.plugin("p", NUMBER)
    assert arrived(core, host, plugin, "n", '{"a":"5"}') == '{"a":5}'
    assert arrived(core, host, plugin, "n", '{"a":5}') == '{"a":5}'
    plain, repaired = core.dispatcher.records
    assert repaired.described(0.0)["repairs"] == [{"path": "a", "from": "string", "to": "integer"}]
    assert (repaired.outcome, repaired.arguments_size) == ("OK", 9)
    assert "repairs" not in plain.described(0.0)
    assert [plain.number, repaired.number] == [2, 1]


def test_the_error_is_about_the_arguments_as_they_came() -> None:
    core = Core()
    host, _ = core.peer("h"), core.plugin("p", of(a={"type": "integer"}, b={"type": "integer"}))
    error = error_of(host, core.call(host, "n", '{"a":"5","b":"x"}'))
    assert error.code == Code.INVALID_ARGUMENTS
    assert 'arguments.a: "5" ' in error.message
    (record,) = core.dispatcher.records
    assert record.repairs == ()


@pytest.mark.parametrize("arguments", [" ", "\n\t ", ""])
def test_arguments_of_blanks_are_an_empty_object(arguments: str) -> None:
    core = Core()
    host = core.peer("h")
    plugin = core.plugin("p", tool("checked"), tool("free", validate=False), of("d", a={"default": 1}))
    assert arrived(core, host, plugin, "checked", arguments) == ""
    assert arrived(core, host, plugin, "free", arguments) == ""
    assert arrived(core, host, plugin, "d", arguments) == '{"a":1}'


def test_blanks_of_unicode_around_arguments_are_left_out() -> None:
    core = Core()
    host, plugin = core.peer("h"), core.plugin("p", NUMBER, of("d", a={"default": 1}))
    assert arrived(core, host, plugin, "n", '\ufeff{"a":5}\u00a0') == '{"a":5}'
    assert arrived(core, host, plugin, "d", "\u3000{}") == '{"a":1}'


def test_a_default_is_filled_in_as_the_integer_that_is_asked() -> None:
    core = Core()
    host = core.peer("h")
    plugin = core.plugin("p", of("d", a={"type": "integer", "default": 1.0}, b={"type": "number", "default": 2.0}))
    assert arrived(core, host, plugin, "d", "{}") == '{"a":1,"b":2.0}'
    assert arrived(core, host, plugin, "d", '{"a":3}') == '{"a":3,"b":2.0}'


def test_an_object_that_was_written_as_text_is_read_without_the_keys_that_only_a_host_may_set() -> None:
    core = Core()
    host, plugin = core.peer("h"), core.plugin("p", NUMBER)
    assert arrived(core, host, plugin, "n", json.dumps('{"a": 5}')) == '{"a": 5}'
    text = json.dumps('{"a": "5", "userId": "eve"}')
    core.call(host, "n", text)
    (call,) = plugin.pending.values()
    assert json.loads(call.arguments_json) == {"a": 5}
    assert "eve" not in call.arguments_json.original
    assert [str(each) for each in call.arguments_json.repairs] == [
        "arguments: string to object",
        "a: string to integer",
    ]
    error = error_of(host, core.call(host, "n", '"no object"'))
    assert "must be a JSON object" in error.message


def test_a_whole_number_arrives_as_the_integer_that_is_asked_also_beside_another_repair() -> None:
    core = Core()
    host, plugin = core.peer("h"), core.plugin("p", of(a={"type": "integer"}, b={"type": "integer", "default": 1}))
    assert arrived(core, host, plugin, "n", '{"a": 5.0, "b": 2}') == '{"a":5,"b":2}'
    assert arrived(core, host, plugin, "n", '{"a": 5.0}') == '{"a":5,"b":1}'
    assert arrived(core, host, plugin, "n", '{"a": 5.0, "b": "2"}') == '{"a":5,"b":2}'
    assert [str(each) for each in next(iter(core.dispatcher.records)).repairs] == [
        "b: string to integer",
        "a: number to integer",
    ]


def test_a_tool_or_the_bus_may_switch_repairs_off() -> None:
    core, off = Core(), Core(repairs=False)
    defaults = of("d", a={"type": "integer", "default": 1})
    for each, tools in (
        (core, (replace(NUMBER, no_repair=True), replace(defaults, no_repair=True))),
        (off, (NUMBER, defaults)),
    ):
        host, plugin = each.peer("h"), each.plugin("p", *tools)
        assert error_of(host, each.call(host, "n", '{"a":"5"}')).code == Code.INVALID_ARGUMENTS
        assert arrived(each, host, plugin, "d", "{}") == "{}"
        assert arrived(each, host, plugin, "n", '{"a":5.0}') == '{"a":5.0}'
        assert error_of(host, each.call(host, "d", '{"a":null}')).code == Code.INVALID_ARGUMENTS


def test_a_tool_without_defaults_gets_what_was_sent_and_its_repairs() -> None:
    core = Core()
    nested = {"type": "object", "properties": {"c": {"default": 2}}}
    schema = of("d", a={"type": "integer", "default": 1}, b={"default": None}, o=nested)
    host, plugin = core.peer("h"), core.plugin("p", replace(schema, no_defaults=True))
    for sent in ("{}", '{"o": {}}', '{ "a" : 2 }', '{"o":{"x":1.50}}'):
        assert arrived(core, host, plugin, "d", sent) == sent
    assert arrived(core, host, plugin, "d", '{"a":"5"}') == '{"a":5}'
    assert error_of(host, core.call(host, "d", '{"a":"x"}')).code == Code.INVALID_ARGUMENTS
    filled, other = core.plugin("q", of("e", a={"default": 1})), of("f", a={"default": 1})
    assert arrived(core, host, filled, "e", "{}") == '{"a":1}'
    assert other.schema_hash == replace(other, no_defaults=True).schema_hash


def test_a_tool_without_validation_gets_what_the_model_wrote() -> None:
    core = Core()
    host, plugin = core.peer("h"), core.plugin("p", replace(NUMBER, validate=False))
    assert arrived(core, host, plugin, "n", '{"a":"5"}') == '{"a":"5"}'


def test_only_a_councils_call_without_planned_arguments_is_unchecked() -> None:
    core = Core()
    host, other = core.peer("h"), core.peer("o", trusted=False)
    plugin = core.plugin("p", COUNCIL, NUMBER)
    unplanned = pb.CallContext(member_json="{}", unplanned=True)
    assert arrived(core, host, plugin, "c", "{}", context=unplanned) == "{}"
    for caller, name, arguments, context in (
        (host, "c", "{}", None),
        (host, "c", "{}", pb.CallContext(member_json="{}")),
        (host, "c", '{"b":1}', unplanned),
        (host, "n", "{}", unplanned),
        (other, "c", "{}", unplanned),
    ):
        error = error_of(caller, core.call(caller, name, arguments, context=context))
        assert error.code == Code.INVALID_ARGUMENTS, (name, arguments)


def test_a_repair_is_logged_once_without_values(caplog: pytest.LogCaptureFixture) -> None:
    core = Core()
    host, plugin = core.peer("h"), core.plugin("p", NUMBER, of("d", a={"default": 1}))
    with caplog.at_level(logging.INFO, "toolbus.calls"):
        for number in ("5", "6", "7"):
            arrived(core, host, plugin, "n", f'{{"a":"{number}"}}')
        arrived(core, host, plugin, "d", "{}")
    (record,) = caplog.records
    assert record.getMessage() == "repaired arguments: a: string to integer"
    fields = vars(record)
    assert (fields["call_id"], fields["tool"], fields["identity"]) == ("c1", "n", "h")


def test_a_record_shows_the_first_repairs() -> None:
    core = Core()
    host, plugin = core.peer("h"), core.plugin("p", of(a={"type": "array", "items": {"type": "integer"}}))
    arrived(core, host, plugin, "n", json.dumps({"a": ["1"] * 50}))
    (record,) = core.dispatcher.records
    assert len(record.repairs) == MAX_REPAIRS_SHOWN


def test_a_failed_call_s_record_says_what_was_repaired() -> None:
    core = Core()
    host, _ = core.peer("h"), core.plugin("p", NUMBER)
    call_id = core.call(host, "n", '{"a":"5"}')
    core.dispatcher.endings.cancels(host, [pb.ToolCancel(call_id=call_id)], core.now)
    (record,) = core.dispatcher.records
    assert (record.outcome, [str(each) for each in record.repairs]) == ("CANCELLED", ["a: string to integer"])


@pytest.mark.parametrize(
    ("sent", "gets"),
    [
        ("{}", '{"a":1,"b":[]}'),
        (" {\n} ", '{"a":1,"b":[]}'),
        ('{"x": 1.50} ', '{"x": 1.50,"a":1,"b":[]}'),
        ('{ "a" : 123456789012345678901234567890 }', '{ "a" : 123456789012345678901234567890,"b":[]}'),
        ('{"b":[1],"n":{"c":5}}', '{"b":[1],"n":{"c":5},"a":1}'),
        ('{"n":{}}', '{"n":{"c":2},"a":1,"b":[]}'),
        ('{"a":"7"}', '{"a":7,"b":[]}'),
    ],
)
def test_defaults_are_filled_in_the_same_with_and_without_another_step(sent: str, gets: str) -> None:
    core = Core()
    nested = {"type": "object", "properties": {"c": {"default": 2}}}
    schema = of("d", a={"type": "integer", "default": 1}, b={"type": "array", "default": []}, n=nested)
    host, plugin = core.peer("h"), core.plugin("p", schema)
    assert arrived(core, host, plugin, "d", sent) == gets
    with_key = f'{sent.strip()[:-1]}{"," if ":" in sent else ""}"userId":"u"}}'  # makes the bus write the text again
    assert json.loads(arrived(core, host, plugin, "d", with_key)) == json.loads(gets)
    rewritten, filled = core.dispatcher.records
    assert filled.arguments_size == len(sent)
    assert set(map(str, filled.repairs)) == set(map(str, rewritten.repairs)) != set()


def test_a_default_that_breaks_the_schema_with_what_came_is_not_filled_in() -> None:
    core = Core()
    schema = {"properties": {"a": {"default": 1}, "b": {}}, "dependentRequired": {"a": ["b"]}}
    host, plugin = core.peer("h"), core.plugin("p", tool("d", parameters_json=json.dumps({"type": "object"} | schema)))
    assert arrived(core, host, plugin, "d", '{"c":1}') == '{"c":1}'
    assert arrived(core, host, plugin, "d", '{"b":1}') == '{"b":1,"a":1}'


def test_arguments_that_have_no_room_for_a_default_go_on_without_it() -> None:
    core = Core(limits=Limits(arguments_bytes=100))
    host, plugin = core.peer("h"), core.plugin("p", of("d", a={"default": "x" * 60}))
    long = json.dumps({"b": "y" * 60})
    assert arrived(core, host, plugin, "d", long) == long
    assert json.loads(arrived(core, host, plugin, "d", "{}")) == {"a": "x" * 60}


def test_the_record_of_a_nested_call_with_defaults_names_its_parent_and_what_was_filled_in() -> None:
    core = Core()
    host, plugin, inner = core.peer("h"), core.plugin("p", NUMBER), core.plugin("q", of("d", a={"default": 1}))
    core.call(host, "n", '{"a":5}')
    (outer,) = plugin.pending.values()
    arrived(core, plugin, inner, "d", "{}", parent_call_id=outer.id)
    (record,) = core.dispatcher.records
    assert (record.parent, list(map(str, record.repairs))) == (outer.id, ["a: absent to integer"])


def test_a_call_that_lacks_a_default_takes_little_more_than_one_that_has_it() -> None:
    core = Core()
    host, plugin = core.peer("h"), core.plugin("p", of("d", a={"type": "integer", "default": 1}))

    def steps(arguments: str) -> int:
        entered: list[str] = []
        sys.setprofile(lambda frame, event, argument: entered.append(event) if event == "call" else None)
        try:
            arrived(core, host, plugin, "d", arguments)
        finally:
            sys.setprofile(None)
        return len(entered)

    steps("{}"), steps('{"a":2}')  # what is made once
    assert steps('{"b":1}') - steps('{"a":2}') <= 20
