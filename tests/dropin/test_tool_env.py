"""`env`: who a tool is run for, from the host and from nobody else."""

import json
from typing import Any

import pytest

from toolbus.dropin import env_of
from toolbus.sdk import CallContext, ContextMessage, ToolScope

KEYS = {
    *("user_id", "user", "speaker", "level", "channel", "mode", "member", "messages", "deadline", "attributes"),
    "bus",
}


def env(user_id: str = "", **attributes: str) -> Any:
    return env_of(ToolScope("c1", "t", context=CallContext(user_id=user_id, attributes=attributes)))


def test_everything_is_there_and_empty_where_nobody_said_anything() -> None:
    nobody = env_of(ToolScope())
    assert set(nobody) == KEYS
    assert [key for key, value in nobody.items() if value] == []


def test_what_the_host_said_is_spread_and_kept_as_it_was() -> None:
    given = env("u1", channel="#main", mode="irc", locale="de", level="30", relay_max_pending="5")
    assert (given["user_id"], given["channel"], given["mode"], given["level"]) == ("u1", "#main", "irc", 30)
    assert (given["locale"], given["relay_max_pending"]) == ("de", "5")
    assert given["attributes"]["level"] == "30"


@pytest.mark.parametrize(
    ("attributes", "user", "speaker"),
    [
        ({}, "u1", "u1"),
        ({"user": "Ada"}, "Ada", "Ada"),
        ({"speaker": "Bob"}, "Bob", "Bob"),
        ({"user": "Ada", "speaker": "Bob"}, "Ada", "Bob"),
    ],
)
def test_names_fall_back_to_what_is_known(attributes: dict[str, str], user: str, speaker: str) -> None:
    given = env("u1", **attributes)
    assert (given["user"], given["speaker"]) == (user, speaker)


@pytest.mark.parametrize(
    ("text", "level"),
    [("90", 90), ("0", 0), ("", 0), ("-5", 0), ("9.5", 0), ("sysop", 0), ("٣", 0), ("²", 0), ("9" * 5000, 0)],
)
def test_a_level_that_is_no_number_is_the_least(text: str, level: int) -> None:
    assert env(level=text)["level"] == level


def test_an_attribute_cannot_stand_for_what_the_host_says_by_other_means() -> None:
    attributes = dict.fromkeys(KEYS, "claimed")
    given = env_of(ToolScope(context=CallContext(user_id="u1", attributes=attributes)))
    assert given["user_id"] == "u1"
    assert (given["messages"], given["deadline"], given["member"]) == ((), None, None)
    assert given["attributes"] == attributes


def test_messages_member_and_deadline_are_those_of_the_call() -> None:
    messages = (ContextMessage("user", "hello", "Ada"),)
    context = CallContext(messages=messages, member={"name": "Neko"})
    given = env_of(ToolScope(context=context, deadline=12.5))
    assert [dict(each) for each in given["messages"]] == [{"role": "user", "content": "hello", "name": "Ada"}]
    assert (given["member"]["name"], given["deadline"]) == ("Neko", 12.5)


def test_it_can_be_read_only_at_every_level() -> None:
    context = CallContext(attributes={"a": "b"}, messages=(ContextMessage("user", "x"),), member={"name": "Neko"})
    given: Any = env_of(ToolScope(context=context))
    for inner in (given, given["attributes"], given["messages"][0], given["member"]):
        with pytest.raises(TypeError):
            inner["user_id"] = "root"


def test_a_copy_of_it_can_be_written_as_json() -> None:
    given = env("u1", level="3")
    assert json.loads(json.dumps({key: given[key] for key in ("user_id", "level")})) == {"user_id": "u1", "level": 3}
