"""Reads what a description says about the form of an argument, as a model does, and returns it as JSON Schema.

What is understood: sentences and clauses such as `At least 1, at most 10.`, `one of "a", "b"`, `format date`,
`matching the pattern …`, types in words (`array of string or null`), and lists of fields, one a line:

    - name (string, required, one of "a", "b"): what it is

Fields below a field stand further to the right; `either …` and `or …` are alternatives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

_NEEDED = "this field is required"  # a mark, until the object that has the field is known
_TYPE = {
    **dict.fromkeys(("string", "text", "strings", "texts"), "string"),
    **dict.fromkeys(("integer", "integers", "whole number"), "integer"),
    **dict.fromkeys(("number", "numbers"), "number"),
    **dict.fromkeys(("boolean", "booleans", "true or false"), "boolean"),
    **dict.fromkeys(("array", "list"), "array"),
    **dict.fromkeys(("object", "objects"), "object"),
    "null": "null",
}
_TYPE_WORD = re.compile(r"(?:an? )?(whole number|true or false|[a-z]+)", re.IGNORECASE)
_BULLET = re.compile(r"^(\s*)[-*] (.*)$")
_DEFINITION = re.compile(r"^(\w[\w.-]*) is: (.*)$")
_VALUE = r'(?:"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:e-?\d+)?|true|false|null)'
_NUMBER = r"(-?[\d.]+(?:e-?\d+)?)"
_NEXT = r"(?=(?:, (?:default|at least|at most|format|required|for example|one of|more than|less than|no |always))|\.?$)"
_CLAUSES: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern, re.IGNORECASE), keyword)
    for pattern, keyword in (
        (rf"(?:one of|allowed values?:?|values?:) ({_VALUE}(?:,? (?:or )?{_VALUE})*)", "enum"),
        (rf"(?:always|only|must be) ({_VALUE})", "const"),
        (r"format:? ([\w-]+)", "format"),
        (rf"(?:matching|matches|must match)(?: the)?(?: regular expression| pattern)?:? (.+?){_NEXT}", "pattern"),
        (rf"pattern:? (.+?){_NEXT}", "pattern"),
        (rf"at least {_NUMBER} characters?", "minLength"),
        (rf"at most {_NUMBER} characters?", "maxLength"),
        (rf"at least {_NUMBER} items?", "minItems"),
        (rf"at most {_NUMBER} items?", "maxItems"),
        (rf"at least {_NUMBER} (?:fields?|properties)", "minProperties"),
        (rf"at least {_NUMBER}", "minimum"),
        (rf"at most {_NUMBER}", "maximum"),
        (rf"(?:more|greater) than {_NUMBER}", "exclusiveMinimum"),
        (rf"less than {_NUMBER}", "exclusiveMaximum"),
        (rf"(?:a )?multiple of {_NUMBER}", "multipleOf"),
        (rf"default:? ({_VALUE}|\[.*?\]|\{{.*?\}})", "default"),
        (r"\brequired\b", _NEEDED),
    )
)
_NUMERIC = frozenset(
    (
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "minimum", "maximum"),
        *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_CHOICE = re.compile(r"(?:either|or) ")


@dataclass(slots=True)
class _Line:
    """A line of a list, with the lines below it."""

    text: str
    indent: int
    below: list[_Line] = field(default_factory=list)


def read_words(description: str) -> Json:
    """Returns what a description says about an argument as a schema; empty where it says nothing."""
    schema: Json = {}
    definitions: Json = {}
    target = schema
    top: list[_Line] = []
    roots: list[tuple[Json, list[_Line]]] = [(schema, top)]
    for line in description.split("\n"):
        bullet = _BULLET.match(line)
        if bullet:
            _place(top, _Line(bullet[2], len(bullet[1])))
        elif definition := _DEFINITION.match(line):
            target, top = {}, []
            definitions[definition[1]] = target
            roots.append((target, top))
            target.update(_spec(definition[2]))
        else:
            for sentence in re.split(r"(?<=[^.\s])\.(?:\s|$)", line):
                _merge(target, _types_alone(sentence) or _clauses(sentence))
    for root, lines in roots:
        _fields(root, lines)
    schema.pop(_NEEDED, None)
    if definitions:
        schema["$defs"] = definitions
    return schema


def _place(lines: list[_Line], new: _Line) -> None:
    while lines and lines[-1].indent < new.indent:
        lines = lines[-1].below
    lines.append(new)


def _fields(schema: Json, lines: Sequence[_Line]) -> None:
    """Adds what a list says to the schema of what it describes."""
    properties: Json = {}
    for line in lines:
        text = line.text
        if _CHOICE.match(text):
            choice = _spec(_CHOICE.sub("", text, count=1))
            _fields(choice, line.below)
            schema.setdefault("anyOf", []).append(choice)
        elif item := re.match(r"item \d+", text):
            schema.setdefault("prefixItems", []).append(_entry(text[item.end() :], line))
            schema.setdefault("type", "array")
        elif rest := re.match(r"(?:any|each|every) (?:other )?(?:name|key|field)(?: that matches (\S+))?", text):
            schema["additionalProperties"] = _entry(text[rest.end() :], line)
        elif re.match(r"(?:each|every) item", text):
            schema["items"] = _entry(text[len("each item") :], line)
        elif name := re.match(r'(".*?"|`.*?`|.+?)(?= \(|:|$)', text):
            properties[name[1].strip('"`')] = _entry(text[name.end() :], line)
    if properties:
        target = _holder(schema)
        target["properties"] = {**target.get("properties", {}), **properties}
        target.setdefault("type", "object")
        needed = [name for name, each in properties.items() if each.pop(_NEEDED, False)]
        target["required"] = [*target.get("required", ()), *needed]


def _holder(schema: Json) -> Json:
    """Returns the schema that fields below a line belong to: the items of an array, else itself."""
    if schema.get("type") == "array" or "items" in schema:
        items: Json = schema.setdefault("items", {})
        return _holder(items)
    return schema


def _entry(text: str, line: _Line) -> Json:
    """Reads ` (clauses): description` and what stands below."""
    clauses, rest = _parenthesis(text.strip())
    schema = _spec(clauses)
    if description := rest.removeprefix(":").strip():
        schema["description"] = description
    _fields(schema, line.below)
    return schema


def _spec(text: str) -> Json:
    """Reads types and clauses."""
    schema = _clauses(_without_types(text))
    kinds = _types(text)
    if kinds:
        _merge(schema, kinds[0] if len(kinds) == 1 else _union(kinds))
    return schema


def _union(kinds: Sequence[Json]) -> Json:
    if all(set(kind) == {"type"} for kind in kinds):
        return {"type": [kind["type"] for kind in kinds]}
    return {"anyOf": [*kinds]}


def _types_alone(sentence: str) -> Json:
    """Reads a sentence that only names types, such as `String (format email) or integer`."""
    if not re.match(r"(?:an? )?(?:string|text|integer|number|boolean|array|object|null)\b", sentence, re.IGNORECASE):
        return {}
    kinds = _types(sentence)
    return _union(kinds) if len(kinds) > 1 else kinds[0] if kinds and "(" in sentence else {}


def _types(text: str) -> list[Json]:
    """Reads types joined by `or`, from the first clause that is one."""
    for part in _top_level(text, ", "):
        kinds: list[Json] = []
        for alternative in _top_level(part, " or "):
            kind = _type(alternative.strip())
            if kind is None:
                kinds = []
                break
            kinds.append(kind)
        if kinds:
            return kinds
    return []


def _type(text: str) -> Json | None:
    match = _TYPE_WORD.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    name = _TYPE.get(match[1].lower())
    if name is None:
        if re.fullmatch(r" \(see .*\)", text[len(text.split(" ")[0]) :]):
            return {"$ref": f"#/$defs/{text.split(' ')[0]}"}
        return None
    if name == "array" and rest.startswith(" of "):
        inner, outer = rest[4:], ""
        if (groups := re.search(r"^(.*\)) (\([^()]*items?[^()]*\))$", inner)) is not None:
            inner, outer = groups[1], groups[2]
        items = _type(inner)
        return {"type": "array", **({"items": items} if items else {}), **_clauses(outer.strip("()"))}
    inside, _ = _parenthesis(rest.strip())
    return {"type": name, **_clauses(inside)}


def _without_types(text: str) -> str:
    """Returns the clauses of a text whose types have clauses of their own in parentheses."""
    return re.sub(r"(\b(?:string|integer|number|boolean|array|object)[\w ]*)\((?:[^()]|\([^()]*\))*\)", r"\1", text)


def _clauses(text: str) -> Json:
    found: Json = {}
    for pattern, keyword in _CLAUSES:
        match = pattern.search(text)
        if match is None:
            continue
        if keyword == _NEEDED:
            found[keyword] = True
        elif keyword in _NUMERIC:
            found[keyword] = json.loads(match[1].rstrip("."))
        elif keyword == "enum":
            found[keyword] = [json.loads(each) for each in re.findall(_VALUE, match[1])]
        elif keyword in ("const", "default"):
            found[keyword] = _json(match[1])
        else:
            found.setdefault(keyword, match[1])
        text = text[: match.start()] + text[match.end() :]
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _merge(schema: Json, more: Json) -> None:
    for key, value in more.items():
        schema.setdefault(key, value)


def _parenthesis(text: str) -> tuple[str, str]:
    """Returns what stands in the parenthesis that a text begins with, and what follows it."""
    if not text.startswith("("):
        return "", text
    level, quoted = 0, False
    for index, each in enumerate(text):
        if each == '"' and text[index - 1] != "\\":
            quoted = not quoted
        if not quoted:
            level += (each == "(") - (each == ")")
        if level == 0:
            return text[1:index], text[index + 1 :]
    return text[1:], ""


def _top_level(text: str, separator: str) -> list[str]:
    """Splits a text at separators outside of parentheses and quotes."""
    parts, start, level, quoted = [], 0, 0, False
    for index, each in enumerate(text):
        if each == '"':
            quoted = not quoted
        level += (each in "([{") - (each in ")]}")
        if level == 0 and not quoted and text.startswith(separator, index) and index >= start:
            parts.append(text[start:index])
            start = index + len(separator)
    return [*parts, text[start:]]
