"""`env`: the user whom a call is made for, set by the host alone."""

import json
from concurrent.futures import Future
from typing import Any

import pytest

from toolbus.dropin import env_of
from toolbus.errors import Code, Stage, ToolBusError
from toolbus.functions.call_context import CallOptions
from toolbus.protocol.tool import CallError, Result
from toolbus.sdk import CallContext, ContextMessage, ToolScope

KEYS = {
    *("user_id", "user", "speaker", "level", "channel", "mode", "member", "messages", "deadline", "attributes"),
    "bus",
}


def env(user_id: str = "", **attributes: str) -> Any:
    return env_of(ToolScope("c1", "t", context=CallContext(user_id=user_id, attributes=attributes)))


def test_every_key_is_there_and_empty_without_a_context() -> None:
    call_env = env_of(ToolScope())
    assert set(call_env) == KEYS
    assert [key for key, value in call_env.items() if value] == []


def test_attributes_of_the_host_are_keys_of_their_own_and_stay_unchanged() -> None:
    call_env = env("u1", channel="#main", mode="irc", locale="de", level="30", relay_max_pending="5")
    assert (call_env["user_id"], call_env["channel"], call_env["mode"], call_env["level"]) == ("u1", "#main", "irc", 30)
    assert (call_env["locale"], call_env["relay_max_pending"]) == ("de", "5")
    assert call_env["attributes"]["level"] == "30"


@pytest.mark.parametrize(
    ("attributes", "user", "speaker"),
    [
        ({}, "u1", "u1"),
        ({"user": "Ada"}, "Ada", "Ada"),
        ({"speaker": "Bob"}, "Bob", "Bob"),
        ({"user": "Ada", "speaker": "Bob"}, "Ada", "Bob"),
    ],
)
def test_a_missing_name_is_taken_from_the_other_one(attributes: dict[str, str], user: str, speaker: str) -> None:
    call_env = env("u1", **attributes)
    assert (call_env["user"], call_env["speaker"]) == (user, speaker)


@pytest.mark.parametrize(
    ("text", "level"),
    [("90", 90), ("0", 0), ("", 0), ("-5", 0), ("9.5", 0), ("sysop", 0), ("٣", 0), ("²", 0), ("9" * 5000, 0)],
)
def test_an_invalid_level_is_the_lowest(text: str, level: int) -> None:
    assert env(level=text)["level"] == level


def test_an_attribute_cannot_replace_a_field_of_the_context() -> None:
    attributes = dict.fromkeys(KEYS, "claimed")
    call_env = env_of(ToolScope(context=CallContext(user_id="u1", attributes=attributes)))
    assert call_env["user_id"] == "u1"
    assert (call_env["messages"], call_env["deadline"], call_env["member"]) == ((), None, None)
    assert call_env["attributes"] == attributes


def test_messages_member_and_deadline_are_those_of_the_call() -> None:
    messages = (ContextMessage("user", "hello", "Ada"),)
    context = CallContext(messages=messages, member={"name": "Neko"})
    call_env = env_of(ToolScope(context=context, deadline=12.5))
    assert [dict(each) for each in call_env["messages"]] == [{"role": "user", "content": "hello", "name": "Ada"}]
    assert (call_env["member"]["name"], call_env["deadline"]) == ("Neko", 12.5)


def test_env_is_read_only_at_every_depth() -> None:
    context = CallContext(attributes={"a": "b"}, messages=(ContextMessage("user", "x"),), member={"name": "Neko"})
    call_env: Any = env_of(ToolScope(context=context))
    for inner in (call_env, call_env["attributes"], call_env["messages"][0], call_env["member"]):
        with pytest.raises(TypeError):
            inner["user_id"] = "root"


def connected(result: Result) -> tuple[Any, list[str]]:
    """Returns the `env` of a call whose nested calls end in a result, and the names and arguments of those."""
    calls: list[str] = []

    def call(name: str, arguments_json: str, options: CallOptions) -> Future[Result]:
        calls.append(f"{name} {arguments_json}")
        future: Future[Result] = Future()
        future.set_result(result)
        return future

    return env_of(ToolScope(caller=call)), calls


def test_functions_of_the_bus_return_what_the_tool_for_introspection_does() -> None:
    call_env, calls = connected(Result(output_json='{"tools": 3}'))
    assert call_env["bus"]["stats"]() == {"tools": 3}
    assert list(call_env["bus"]) == ["plugins", "tools", "recent_calls", "stats"]
    assert calls == ['toolbus:this_bus {"kind":"stats"}']
    assert env_of(ToolScope())["bus"] == {}


def test_a_refusal_of_the_bus_is_an_error_that_names_the_function() -> None:
    denied = CallError(Code.PERMISSION_DENIED, "level 50 is needed", Stage.NOT_DISPATCHED)
    call_env, _ = connected(Result(is_error=True, error=denied))
    with pytest.raises(ToolBusError, match=r"env\['bus'\]\['plugins'\]: level 50 is needed"):
        call_env["bus"]["plugins"]()


def test_its_values_can_be_written_as_json() -> None:
    call_env = env("u1", level="3")
    assert json.loads(json.dumps({key: call_env[key] for key in ("user_id", "level")})) == {"user_id": "u1", "level": 3}
