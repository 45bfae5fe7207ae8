"""Asks the person at the terminal what a tool asks: each field of its form in turn.

Everything but the answers goes to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from toolbus.cli import terminal
from toolbus.common.terminal_input import read_line
from toolbus.common.text import parse_json
from toolbus.protocol.input_requests import InvalidInput, check_answer
from toolbus.protocol.questions import CANCELLED, DECLINED, FORM, Answer, Question

ReadLine = Callable[[str], Awaitable[str | None]]  # gets the prompt; None: the end of the input, Ctrl-D

_YES, _NO = ("y", "yes", "true", "1"), ("n", "no", "false", "0")
_TYPES = {"integer": "whole number", "number": "number", "boolean": "yes or no", "array": "several, with commas"}


async def ask_person(question: Question, read: ReadLine = read_line) -> Answer:
    """Returns what a person answers to a form; an empty required field or Ctrl-D declines."""
    if question.needs != FORM:
        return CANCELLED
    terminal.print_note(f"the tool asks: {question.message}")
    schema = question.schema
    fields, required = schema.get("properties") or {}, schema.get("required") or ()
    if not fields:
        text = await read("  accept? (yes or no; Enter: no)")
        return Answer() if (text or "").strip().lower() in _YES else DECLINED
    content: dict[str, Any] = {}
    for name, field in fields.items():
        while True:
            text = await read(_prompt(name, field, name in required))
            if text is None:
                return DECLINED
            if not text.strip():
                if "default" in field:
                    content[name] = field["default"]
                elif name in required:
                    return DECLINED
                break
            value = _value(text, field)
            fault = _fault(question, name, field, value)
            if not fault:
                content[name] = value
                break
            terminal.print_lines(f"  {fault}", sys.stderr)
    return Answer(content=content)


def _plain(field: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a field without null, which is an answer that is left out: of a type, an enum, or alternatives."""
    for key in ("anyOf", "oneOf"):
        rest = [
            each for each in field.get(key) or () if not (each.get("type") == "null" or each.get("const", 0) is None)
        ]
        if key in field and len(rest) == 1 and "const" not in rest[0]:
            return _plain({**{name: value for name, value in field.items() if name != key}, **rest[0]})
        if key in field:
            field = {**field, key: rest}
    if isinstance(types := field.get("type"), list):
        rest = [each for each in types if each != "null"]
        field = {**field, "type": rest[0] if len(rest) == 1 else rest}
    if None in (field.get("enum") or ()):
        field = {**field, "enum": [each for each in field["enum"] if each is not None]}
    return field


def _prompt(name: str, field: Mapping[str, Any], is_required: bool) -> str:
    field = _plain(field)
    choices = _choices(field)
    about = [str(field["description"])] if field.get("description") else []
    kind = field.get("type")
    about += [_TYPES[kind]] if isinstance(kind, str) and kind in _TYPES else []
    about += [f"one of {', '.join(choices)}"] if choices else []
    if "default" in field:
        about.append(f"Enter: {_shown(field['default'])}")
    else:
        about.append("Enter: decline" if is_required else "Enter: leave it out")
    return f"  {field.get('title') or name} ({'; '.join(about)}):"


def _choices(field: Mapping[str, Any]) -> list[str]:
    """Returns what can be chosen, each with its title where it has one."""
    options = (
        _plain(field["items"]) if field.get("type") == "array" and isinstance(field.get("items"), Mapping) else field
    )
    names = options.get("enumNames") or ()
    listed = [
        f"{value} ({names[index]})" if index < len(names) else str(value)
        for index, value in enumerate(options.get("enum") or ())
    ]
    titled = [each for each in options.get("oneOf") or options.get("anyOf") or () if "const" in each]
    return listed or [
        f"{each['const']} ({each['title']})" if "title" in each else str(each["const"]) for each in titled
    ]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _value(text: str, field: Mapping[str, Any]) -> Any:
    """Returns a text as the field has it; as it is where it cannot be read so, which the rules of the form refuse."""
    word, field = text.strip(), _plain(field)
    match field.get("type"):
        case "boolean":
            return True if word.lower() in _YES else False if word.lower() in _NO else word
        case "array":
            return [each.strip() for each in word.split(",") if each.strip()]
        case "integer" | "number":
            try:
                return parse_json(word)
            except (ValueError, RecursionError):
                return word
        case _:
            return word if _choices(field) else text


def _fault(question: Question, name: str, field: Mapping[str, Any], value: Any) -> str:
    """Returns what is wrong with the value of one field; "" where it fits."""
    form = {"type": "object", "properties": {name: field}}
    alone = {"method": question.method, "params": {**question.params, "requestedSchema": form}}
    try:
        check_answer(alone, Answer(content={name: value}).to_json())
    except InvalidInput as error:
        return str(error)
    except (KeyError, TypeError):  # a type that forms do not have: the tool may know it
        return ""
    return ""
