"""YAML is read as JSON would have it, and no text of it crashes the process or keeps it busy."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from toolbus.parts.openapi.document import read_yaml


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("False", False),
        ("true if it runs, else false", "true if it runs, else false"),  # as the document of Docker has it
        ("yes", "yes"),
        ("=", "="),
        ("12:30", "12:30"),
        ("0123", "0123"),
        ("2020-01-01", "2020-01-01"),
        ("-12", -12),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("1.7976931348623157e+308", 1.7976931348623157e308),
        ("1e999", "1e999"),  # the beginning of a commit, say
        (".inf", ".inf"),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("!!int 1", 1),
        ("|\n  a\n  b", "a\nb\n"),
        ("[1, [x], {y: z}]", [1, ["x"], {"y": "z"}]),
        ("&a {x: &b [1], y: *b}", {"x": [1], "y": [1]}),
        ("{<<: {x: 1, y: 1}, y: 2}", {"x": 1, "y": 2}),
        ("{<<: [{x: 1}, {x: 2, z: 2}], y: 2}", {"x": 1, "z": 2, "y": 2}),
        ("['<<']", ["<<"]),
        ("[<<, {a: <<}]", ["<<", {"a": "<<"}]),
    ],
)
def test_a_value_is_what_json_would_have(written: str, value: Any) -> None:
    read = read_yaml(f"value: {written}\n")["value"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: " + "[" * 500, "nested too deep"),
        ("- " * 500, "nested too deep"),
        (
            f"a: &a {{{', '.join(f'x{n}: 1' for n in range(1_000))}}}\nb: {{<<: [{'*a, ' * 300}]}}\n",
            "its merges (<<) copy more than 200000 members",
        ),
        ("a: !!python/object/apply:os.system ['id']", "python/object/apply:os.system, which JSON cannot hold"),
        ("a: !!binary aGk=", "binary, which JSON cannot hold"),
        ("? [1]\n: 2", "a mapping has a key that is not text: write it as text"),
        ("<<: 1", "a merge (<<) names a value that is not a mapping: name an anchor of one"),
        ("a: *b", "the alias *b names nothing before it"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_at_once(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as refusal:
        read_yaml(text)
    assert reason in str(refusal.value)


@pytest.mark.parametrize("text", ["a: [", "a: " + "[" * 100_000, "- " * 100_000], ids=["open", "flow", "block"])
def test_what_the_library_itself_refuses_is_refused_with_its_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        read_yaml(text)


def test_yaml_is_read_where_pyyaml_was_built_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert read_yaml("a: &a [1, yes, true]\nb: *a\n") == {"a": [1, "yes", True], "b": [1, "yes", True]}
    with pytest.raises(ValueError, match="nested too deep"):
        read_yaml("a: " + "[" * 500)


def test_a_number_of_sixty_in_sixty_is_a_text_and_costs_nothing() -> None:
    minutes = "1" + ":1" * 200_000  # YAML 1.1 counts these as one number, in quadratic time
    assert read_yaml(f"a: {minutes}") == {"a": minutes}
