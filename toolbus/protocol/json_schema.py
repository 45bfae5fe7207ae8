"""Reads JSON Schemas as authors of plugins write them, and returns the normal form that validators and providers take.

Many systems never look at a tool's schema, so what their plugins declare is often no JSON Schema: `"type": "float"`,
`"required": true` inside a property, properties without the object around them. Such parts are read as they were meant;
a part that cannot be read is left out, so that it is not checked. A warning says so each time, and how to write it.
Only an unknown type is refused: it is a typing error, and the error names the nearest known type.

The normal form of a schema that breaks no rule is the schema itself. What references name, and whether patterns
compile, is looked at by `bus.catalog.schema_graph`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from toolbus.common.text import nearest

# Defines the grammar of JSON Schema: which keywords hold schemas, and which values the others may have.
#
# All readers of schemas use it: the normal form, the bus's validator, the dialects. Their errors show places and values
# in the same way.

Path: TypeAlias = tuple[str | int, ...]
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
MAX_BOUND = 2**63 - 1  # providers read bounds into 64 bits
SHOWN_CHARACTERS = 200
DRAFTS = {
    "json-schema.org/draft/2020-12/schema": 2020,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-04/schema": 4,
}
"""The known drafts by their address, without its scheme and its empty fragment."""

_ANCHOR = re.compile("[A-Za-z_][-A-Za-z0-9._]*", re.ASCII)

# Keywords that hold schemas: by name, in a list, or one.
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
SINGLE = frozenset(
    (
        *("items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "not", "if", "then", "else", "contentSchema"),
    )
)


class SchemaFault(ValueError):
    """A schema breaks a rule; the text names the place (a JSON pointer), the value, the rule and how to fix it."""


def draft_of(schema: dict[str, Any]) -> int | None:
    """Returns which draft a schema names: a number of `DRAFTS`, 2020 if it names none; None for an unknown one."""
    uri = schema.get("$schema", "json-schema.org/draft/2020-12/schema")
    if not isinstance(uri, str):
        return None
    return DRAFTS.get(uri.removesuffix("#").removeprefix("https://").removeprefix("http://"))


def show(value: object) -> str:
    """Returns a value as JSON for an error text, cut in the middle where it is long."""
    return cut(json.dumps(value, ensure_ascii=False, default=str))


def cut(text: str) -> str:
    """Shortens a text in the middle, as the rule that a value breaks stands at the end."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} … {text[3 - half :]}"


def pointed_at(value: Any, text: str) -> tuple[Any, Path]:
    """Returns what a JSON pointer names inside a value, None where it names nothing, and the steps to it."""
    steps = [unquote(step).replace("~1", "/").replace("~0", "~") for step in text.split("/")[1:]]
    for step in steps:
        if isinstance(value, list) and step.isascii() and step.isdecimal() and len(step) < 7:
            value = value[int(step)] if int(step) < len(value) else None
        else:
            value = value.get(step) if isinstance(value, dict) else None
    return value, tuple(steps)


def pointer(place: Iterable[str | int]) -> str:
    """Returns a place in a schema as a JSON pointer in a URL's fragment, cut where it is long."""
    return cut("#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in place))


def is_count(value: Any) -> bool:
    """Tells whether a value can be a number of characters, items or properties."""
    return is_number(value) and value >= 0 and value == int(value) and value <= MAX_BOUND


def is_number(value: Any) -> bool:
    """Tells whether a value is a number that fits into a double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def is_names(value: Any) -> bool:
    """Tells whether a value is a list of different texts."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value) and len(set(value)) == len(value)


def is_type(value: Any) -> bool:
    """Tells whether a value is a type, or a list of different types."""
    if isinstance(value, list):
        return bool(value) and is_names(value) and all(item in TYPES for item in value)
    return isinstance(value, str) and value in TYPES


def of_type(value: Any, kind: str) -> bool:
    """Tells whether a JSON value is of a type."""
    match value:
        case None:
            return kind == "null"
        case bool():
            return kind == "boolean"
        case str():
            return kind == "string"
        case list():
            return kind == "array"
        case dict():
            return kind == "object"
        case _:
            return kind == "number" or (kind == "integer" and value == int(value))


def type_of_values(schema: dict[str, Any]) -> str:
    """Returns the scalar type of all values of a choice that names no type; "" where they have none in common."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not values or "type" in schema:
        return ""
    scalars = ("string", "integer", "number", "boolean", "null")
    return next((kind for kind in scalars if all(of_type(each, kind) for each in values)), "")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


CHECKS: dict[str, Callable[[Any], bool]] = {
    "type": is_type,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "examples": lambda value: isinstance(value, list),
    **dict.fromkeys(("required", "propertyOrdering"), is_names),
    **dict.fromkeys(("title", "description", "format", "pattern", "$ref", "$dynamicRef", "$schema"), _is_text),
    **dict.fromkeys(
        ("$anchor", "$dynamicAnchor"), lambda value: _is_text(value) and _ANCHOR.fullmatch(value) is not None
    ),
    "$id": lambda value: _is_text(value) and "#" not in value[:-1],
    "dependentRequired": lambda value: isinstance(value, dict) and all(map(is_names, value.values())),
    **dict.fromkeys(("$comment", "contentEncoding", "contentMediaType"), _is_text),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), is_count),
    **dict.fromkeys(("minContains", "maxContains"), is_count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), is_number),
    "multipleOf": lambda value: is_number(value) and value > 0,
    **dict.fromkeys(
        ("uniqueItems", "deprecated", "readOnly", "writeOnly", "nullable"), lambda value: isinstance(value, bool)
    ),
}
"""Keyword → check of its value; providers refuse a request for a single invalid value."""


MAX_WARNINGS = 10  # of one schema; the rest are counted
_MAX_PASSES = 3  # a part that one pass leaves out may have hidden the meaning of the rest
_MAX_TYPE = 200  # characters of a type such as list[dict[str, int]]
_MAX_TYPE_DEPTH = 8

Place: TypeAlias = tuple[str | int, ...]

ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("str", "text", "char", "varchar", "unicode", "bytes", "path"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "bigint"), "integer"),
    **dict.fromkeys(("float", "double", "decimal", "real", "num", "numeric", "float32", "float64"), "number"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("list", "tuple", "set", "sequence", "iterable", "vector"), "array"),
    **dict.fromkeys(("dict", "map", "mapping", "record", "struct", "hash"), "object"),
    **dict.fromkeys(("none", "nonetype", "nil", "void", "undefined"), "null"),
    **dict.fromkeys(("any", "mixed", "unknown", "json", "*", ""), "any"),
}
"""Names of types in other systems, in lower case → the type, or "any" where every value is allowed."""

FORMATS: Mapping[str, str] = {
    **{name: name for name in ("date", "time", "date-time", "duration", "email", "hostname", "uri", "uuid")},
    "datetime": "date-time",
    "url": "uri",
}
"""Formats that are written as types: texts."""

_OPTIONAL = frozenset(("optional", "nullable"))
_UNION = frozenset(("union",))
_GENERIC = re.compile(r"(?:typing\.)?([A-Za-z]+)\s*(?:\[(.+)\]|<(.+)>)", re.DOTALL)
_SPLITTERS = {"|": re.compile(r"[\[<(\]>)|]"), ",": re.compile(r"[\[<(\]>),]")}
_OTHER_MAPS = frozenset(("dependencies", "dependentRequired"))
_OF_ARRAYS = frozenset(("items", "additionalItems", "unevaluatedItems", "contains"))  # arguments are an object
_COMBINING = frozenset(("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "properties", "patternProperties"))
_MARKS = frozenset(("type", "enum", "const", "description", "$ref", "anyOf", "oneOf", "allOf", "default", "items"))
_RESTS = (  # the second keyword judges the members that the first does not name
    ("properties", "additionalProperties"),
    ("patternProperties", "additionalProperties"),
    ("prefixItems", "items"),
)
_LITERAL = frozenset(("const", "default", "example"))  # data, whatever it looks like
_FLAGS = {"true": True, "false": False, "yes": True, "no": False}


class NormalForm(NamedTuple):
    """A schema as it is read.

    Attributes:
        schema: the given object itself, without warnings.
        warnings: a sentence for each part that is read otherwise than it is written.
        left_out: whether a part could not be read and is left out: the schema allows more without it.
    """

    schema: dict[str, Any]
    warnings: list[str]
    left_out: bool = False


class _Kind(NamedTuple):
    """The meaning of a type that JSON Schema does not have."""

    types: tuple[str, ...]  # empty: any
    keywords: dict[str, Any]  # that say the rest of it


_ANY = _Kind((), {})


def normal_form(schema: dict[str, Any]) -> NormalForm:
    """Returns the normal form of a schema of arguments. The given schema is not changed.

    Raises:
        SchemaFault: a type is unknown, or the schema is nested too deep to be read.
    """
    form = NormalForm(schema, [])
    for _ in range(_MAX_PASSES):
        normalizer = _Normalizer(draft_of(form.schema) or 2020)
        try:
            result = normalizer.root(form.schema)
        except RecursionError:
            raise SchemaFault("schema at #: it is nested too deep to be read: move inner parts to $defs") from None
        news = [each for each in normalizer.warnings if each not in form.warnings]
        if not news:
            break
        form = NormalForm(result, form.warnings + news, form.left_out or normalizer.left_out)
    return form


def properties_of(schema: Any) -> dict[str, Any]:
    """Returns the properties of a schema of arguments, read as its normal form has them; none where it has no form."""
    try:
        properties = normal_form(schema).schema.get("properties") if isinstance(schema, dict) else None
    except SchemaFault:
        return {}
    return properties if isinstance(properties, dict) else {}


def limited(warnings: list[str]) -> tuple[str, ...]:
    """Returns the first warnings, and how many more there are."""
    if len(warnings) <= MAX_WARNINGS:
        return tuple(warnings)
    more = f"schema: {len(warnings) - MAX_WARNINGS} more of this kind: correct the ones above first"
    return (*warnings[:MAX_WARNINGS], more)


_AMBIGUOUS = re.compile(r"(?<=[^\\(|^])(?<!\\\\)(\{,([0-9]*)\})")


def _fits(value: Any, types: Iterable[str]) -> bool:
    return any(of_type(value, kind) for kind in types)


def _as_type(value: Any, types: Iterable[str]) -> Any:
    """Returns a value as one of a type, where that is plain: a number as text, or the text of a number or a flag."""
    if isinstance(value, str):
        try:
            read = json.loads(value.strip().lower())
        except (ValueError, RecursionError):
            return value
        return read if read is not None and not isinstance(read, (str, list, dict)) and _fits(read, types) else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return json.dumps(value) if is_number and "string" in types else value


def _unique(values: list[Any]) -> Iterator[Any]:
    seen: set[str] = set()
    for value in values:
        if (key := json.dumps(value, sort_keys=True)) not in seen:
            seen.add(key)
            yield value


class _Normalizer:
    """Builds the normal form of one schema.

    Args:
        draft: by whose rules it is read.
    """

    def __init__(self, draft: int) -> None:
        self._draft = draft
        self._uri: object = None  # the schema's own `$schema`, once known
        self.warnings: list[str] = []
        self.left_out = False

    def _warn(self, place: Place, text: str) -> None:
        self.warnings.append(f"schema at {pointer(place)}: {text}")

    def root(self, schema: dict[str, Any]) -> dict[str, Any]:
        self._uri = schema.get("$schema")
        if "$schema" in schema and draft_of(schema) is None and not isinstance(self._uri, dict):
            self._warn(
                ("$schema",),
                f"{show(self._uri)} is not known here and is not fetched, so 2020-12 is assumed: leave $schema out or "
                "name draft 2020-12, 2019-09, 07, 06 or 04 by its official address",
            )
            schema = {key: value for key, value in schema.items() if key != "$schema"}
            self._uri = None
        return self.schema(self._wrapped(schema), ())

    def _wrapped(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns a root whose properties stand where they belong."""
        if not _COMBINING.isdisjoint(schema):
            return schema
        bare = {key: value for key, value in schema.items() if _is_no_keyword(key, value)}
        if not bare:
            return schema
        others = schema.keys() - bare
        if all(isinstance(schema[key], dict) and key in _OF_ARRAYS for key in others):
            bare = dict(schema)  # one may be called items, where nothing else is a keyword
        elif not any(_MARKS & value.keys() for value in bare.values()):
            return schema  # perhaps the author's own extensions
        names = list(bare)
        self._warn(
            (),
            f"properties without their wrapper ({_listed(names)}) are read as properties: write "
            f'{{"type": "object", "properties": {{{show(names[0])}: …}}}}',
        )
        rest = {key: value for key, value in schema.items() if key not in bare}
        return {**rest, "type": rest.get("type", "object"), "properties": bare}

    def schema(self, schema: dict[str, Any], place: Place) -> dict[str, Any]:
        """Returns the normal form of one schema."""
        result: dict[str, Any] = {}
        for keyword, value in schema.items():
            for key, each in self._read(schema, keyword, value, (*place, keyword)).items():
                if key == keyword or key not in schema:
                    result[key] = each
        for keyword, rest in _RESTS:
            if keyword in schema and keyword not in result:
                result.pop(rest, None)  # it would refuse what the other one was to allow
        if "type" in result and not {"not", "if"} & {*place}:  # there, allowing more would forbid more
            self._fit_values(result, place)
        if names := self._required_by_themselves(schema.get("properties"), place):
            result["required"] = list(dict.fromkeys([*result.get("required", ()), *names]))
        return result

    def _fit_values(self, schema: dict[str, Any], place: Place) -> None:
        """Reads an enum or a const whose values are not of the schema's type as what is meant."""
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        for keyword in ("enum", "const"):
            values = schema.get(keyword) if keyword == "enum" else [schema["const"]] if "const" in schema else None
            if not isinstance(values, list) or all(each is None or _fits(each, types) for each in values):
                continue
            here = (*place, keyword)
            items = schema.get("items", {})
            if "array" in types and isinstance(items, dict) and not any(isinstance(each, list) for each in values):
                if keyword in items:
                    continue
                inner = {**items, keyword: schema.pop(keyword)}
                self._warn(here, f"{show(values)} is read as the values of the items: write it in items")
                schema["items"] = inner
                if "type" in inner:
                    self._fit_values(inner, (*place, "items"))
                continue
            meant = [each if each is None or _fits(each, types) else _as_type(each, types) for each in values]
            if all(each is None or _fits(each, types) for each in meant):
                self._warn(here, f"{show(values)} is read as {show(meant)}, values of the type: write these")
                schema[keyword] = list(_unique(meant)) if keyword == "enum" else meant[0]
            elif any(_fits(each, types) for each in meant):
                wrong = [each for each in values if each is not None and not _fits(each, types)]
                self._warn(here, f"no call can have {show(wrong)}, which the type does not allow: correct one of them")
            else:
                del schema[keyword]
                self._left_out(values, f"none of it is of the type {show(schema['type'])}", here)

    def _read(self, schema: dict[str, Any], keyword: str, value: Any, here: Place) -> dict[str, Any]:
        """Returns the meaning of a keyword, as keywords; those that the schema has itself go before."""
        if keyword == "type":
            return self._type(value, here)
        if keyword == "required":
            return self._required(value, here)
        if keyword == "items" and isinstance(value, list) and self._draft >= 2020:
            return self._tuple(schema, value, here)
        if keyword == "additionalItems" and isinstance(schema.get("items"), list) and self._draft >= 2020:
            return {}  # read with the items
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool) and self._draft != 4:
            return self._exclusive(schema, keyword, value, here)
        normal = self._keyword(keyword, value, here)
        return {} if normal is None and keyword not in _LITERAL else {keyword: normal}

    def _keyword(self, keyword: str, value: Any, here: Place) -> Any:
        """Returns the value of a keyword; None where it is left out."""
        if keyword in MAPS or (keyword == "dependencies" and self._draft < 2020):
            return self._map(keyword, value, here)
        if keyword == "items" and isinstance(value, list):  # drafts up to 2019-09
            return [self._part(part, (*here, index)) for index, part in enumerate(value)]
        if keyword in LISTS:
            if isinstance(value, list) and value:
                return [self._part(part, (*here, index)) for index, part in enumerate(value)]
            self._left_out(value, "it must be a list of schemas", here)
            return None
        if keyword in SINGLE:
            return self._single(value, here)
        if keyword == "$schema":
            if value == self._uri:
                return value
            self._left_out(value, "it differs from the outermost $schema: use one draft throughout", here)
            return None
        if keyword in ("$id", "id") and self._draft < 2019:
            return value  # they may name an anchor there
        if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
            return value  # draft 04
        check = CHECKS.get(keyword)
        if keyword == "pattern" and isinstance(value, str) and (ambiguous := _AMBIGUOUS.search(value)):
            self._warn(
                here,
                f"{show(value)} means two things: {ambiguous[1]} is a repetition for Python, and these characters "
                f"themselves for others: write {{0,{ambiguous[2]}}}, or escape the brace",
            )
        if check is None or check(value):
            return value
        if keyword == "enum" and isinstance(value, dict) and value:
            self._warn(here, f"{show(value)} is read as its keys: write a list of values")
            return list(value)
        self._left_out(value, f"it is not a value of {keyword}", here)
        return None

    def _left_out(self, value: Any, why: str, here: Place) -> None:
        self.left_out = True
        self._warn(here, f"{show(value)} is not checked, since {why}: correct it or leave it out")

    def _part(self, value: Any, here: Place) -> Any:
        """Returns a schema that cannot be left out."""
        single = self._single(value, here)
        return {} if single is None else single

    def _single(self, value: Any, here: Place) -> Any:
        if isinstance(value, bool):
            return value
        if isinstance(value, dict):
            if "required" in value and isinstance(_flag(value["required"]), bool):
                self._warn(
                    (*here, "required"),
                    f"{show(value['required'])} says nothing here: list required names in the object's own required",
                )
                value = {key: each for key, each in value.items() if key != "required"}
            return self.schema(value, here)
        if isinstance(flag := _flag(value), bool):
            self._warn(here, f"{show(value)} is read as {show(flag)}: write it without quotation marks")
            return flag
        if isinstance(value, str) and (kind := _read_type(value)) is not None:
            meant = _as_keywords(kind)
            self._warn(here, f"{show(value)} is read as {show(meant)}: write that")
            return meant
        self._left_out(value, "it is not a schema", here)
        return None

    def _map(self, keyword: str, value: Any, here: Place) -> dict[str, Any] | None:
        if keyword == "properties" and _is_list_of_named(value):
            self._warn(here, 'a list is read as an object: write {"NAME": {…}} for each item')
            value = {each["name"]: {key: item for key, item in each.items() if key != "name"} for each in value}
        if not isinstance(value, dict):
            self._left_out(value, f"{keyword} must be an object of schemas", here)
            return None
        if keyword == "dependencies":
            return {
                name: part if isinstance(part, list) else self._part(part, (*here, name))
                for name, part in value.items()
            }
        if keyword == "properties":
            return {name: self._property(part, (*here, name)) for name, part in value.items()}
        return {name: self._part(part, (*here, name)) for name, part in value.items()}

    def _property(self, value: Any, here: Place) -> Any:
        if isinstance(value, dict):
            if isinstance(_flag(value.get("required")), bool):
                value = {key: each for key, each in value.items() if key != "required"}  # read with the object
            return self.schema(value, here)
        if isinstance(value, str) and _read_type(value) is None:
            self._warn(here, f'{show(value)} is read as a description: write {{"description": {show(value)}}}')
            return {"description": value}
        return self._part(value, here)

    def _required_by_themselves(self, properties: Any, place: Place) -> list[str]:
        """Returns the names of the properties with a `required` flag of their own."""
        if _is_list_of_named(properties):
            properties = {each["name"]: each for each in properties}
        names = []
        for name, part in properties.items() if isinstance(properties, dict) else ():
            flag = _flag(part.get("required")) if isinstance(part, dict) else None
            if not isinstance(flag, bool):
                continue
            meaning, instead = "optional", "leave it out"
            if flag:
                names.append(name)
                meaning, instead = "required", f'write "required": [{show(name)}] beside properties'
            self._warn(
                (*place, "properties", name, "required"),
                f"{show(part['required'])} is read as: the argument is {meaning}: {instead}",
            )
        return names

    def _required(self, value: Any, here: Place) -> dict[str, Any]:
        if CHECKS["required"](value):
            return {"required": value}
        if isinstance(value, str) and not isinstance(_flag(value), bool):
            self._warn(here, f"{show(value)} is read as {show([value])}: write a list of names")
            return {"required": [value]}
        if isinstance(value, list):
            names = list(dict.fromkeys(name for name in value if isinstance(name, str)))
            self._warn(here, f"{show(value)} is read as {show(names)}: write each name once, as text")
            return {"required": names}
        self._left_out(value, "required is a list of names", here)
        return {}

    def _tuple(self, schema: dict[str, Any], value: list[Any], here: Place) -> dict[str, Any]:
        """Returns the meaning of a list of items since 2020-12."""
        self._warn(here, "a list of schemas is read as prefixItems, as drafts up to 2019-09 have it: write prefixItems")
        meant: dict[str, Any] = {}
        if value:
            meant["prefixItems"] = [self._part(part, (*here, index)) for index, part in enumerate(value)]
        if "additionalItems" in schema:
            rest = self._single(schema["additionalItems"], (*here[:-1], "additionalItems"))
            if rest is not None:
                meant["items"] = rest
        return meant

    def _exclusive(self, schema: dict[str, Any], keyword: str, value: bool, here: Place) -> dict[str, Any]:
        """Returns the meaning that draft 04 gives to a flag beside a bound."""
        inclusive = "minimum" if keyword == "exclusiveMinimum" else "maximum"
        bound = schema.get(inclusive)
        if not value or not CHECKS[inclusive](bound):
            self._left_out(value, f"{keyword} is a number since draft 06", here)
            return {}
        self._warn(here, f'true is read as {show(bound)}, as draft 04 has it: write "{keyword}": {show(bound)}')
        return {keyword: bound}

    def _type(self, value: Any, here: Place) -> dict[str, Any]:
        """Returns the meaning of a type.

        Raises:
            SchemaFault: the type is unknown.
        """
        if CHECKS["type"](value):
            return {"type": value}
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) for name in names):
            self._left_out(value, f"a type is one of {', '.join(TYPES)}", here)
            return {}
        kinds = []
        for name in names:
            kind = _read_type(name)
            if kind is None:
                raise _unknown_type(name, here)
            kinds.append(kind)
        meant = _as_keywords(_united(kinds))
        if not meant:
            self._warn(here, f"{show(value)} allows every value: leave the type out")
        elif len(meant) == 1:
            self._warn(here, f"{show(value)} is read as {show(meant['type'])}: write that")
        else:
            self._warn(here, f"{show(value)} is read as {show(meant)[1:-1]}: write that")
        return meant


def _unknown_type(name: str, here: Place) -> SchemaFault:
    near = nearest(name.lower(), (*TYPES, *(alias for alias in ALIASES if len(alias) > 1), *FORMATS))
    known = _read_type(near) if near else None
    guess = f"did you mean {show(known.types[0] if known and known.types else near)}? " if near else ""
    return SchemaFault(
        f"schema at {pointer(here)}: {show(name)} is not a type: {guess}The types are {', '.join(TYPES)}"
    )


def _read_type(text: str, depth: int = 0) -> _Kind | None:
    """Returns the meaning of a type in the systems that have it; None where it is unknown."""
    if len(text) > _MAX_TYPE or depth > _MAX_TYPE_DEPTH:
        return None
    text = text.strip()
    name = text.lower()
    if name in TYPES:
        return _Kind((name,), {})
    if name in ALIASES:
        return _ANY if ALIASES[name] == "any" else _Kind((ALIASES[name],), {})
    if name in FORMATS:
        return _Kind(("string",), {"format": FORMATS[name]})
    if len(members := _split(text, "|")) > 1:
        return _all_of(members, depth)
    if text.endswith("?"):
        return _all_of([text[:-1], "null"], depth)
    if text.endswith("[]"):
        return _array(text[:-2], depth)
    if match := _GENERIC.fullmatch(text):
        return _generic(match[1].lower(), match[2] or match[3], depth)
    return None


def _generic(head: str, inside: str, depth: int) -> _Kind | None:
    members = _split(inside, ",")
    if head in _OPTIONAL:
        return _all_of([*members, "null"], depth)
    if head in _UNION:
        return _all_of(members, depth)
    kind = _read_type(head, depth + 1)
    if kind == _Kind(("array",), {}) and len(members) == 1:
        return _array(members[0], depth)
    return kind if kind is not None and kind.types in (("array",), ("object",)) else None


def _array(item: str, depth: int) -> _Kind | None:
    kind = _read_type(item, depth + 1)
    if kind is None:
        return None
    items = _as_keywords(kind)
    return _Kind(("array",), {"items": items} if items else {})


def _all_of(members: list[str], depth: int) -> _Kind | None:
    kinds = [_read_type(member, depth + 1) for member in members]
    return None if None in kinds else _united([kind for kind in kinds if kind is not None])


def _united(kinds: list[_Kind]) -> _Kind:
    """Returns the type that allows whatever one of some types allows."""
    if any(not kind.types for kind in kinds):
        return _ANY
    types = tuple(dict.fromkeys(name for kind in kinds for name in kind.types))
    others = [kind for kind in kinds if kind.types != ("null",)]
    return _Kind(types, others[0].keywords if len(others) == 1 else {})


def _as_keywords(kind: _Kind) -> dict[str, Any]:
    if not kind.types:
        return {}
    return {"type": kind.types[0] if len(kind.types) == 1 else list(kind.types), **kind.keywords}


def _split(text: str, separator: str) -> list[str]:
    """Splits a type at its outermost separators."""
    if separator not in text:  # most of the time: a schema of 256 KiB may have 60,000 of them
        return [text.strip()]
    parts, start, level = [], 0, 0
    for match in _SPLITTERS[separator].finditer(text):
        if match[0] != separator:
            level += 1 if match[0] in "[<(" else -1
        elif level == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _flag(value: Any) -> Any:
    """Returns the flag that a text stands for; any other value as it is."""
    return _FLAGS.get(value.strip().lower(), value) if isinstance(value, str) and len(value) < _MAX_TYPE else value


def _is_no_keyword(key: str, value: Any) -> bool:
    """Tells whether a key of a root must be a property without its wrapper: its object is not the keyword's value."""
    if not isinstance(value, dict) or key in SINGLE or key in MAPS or key in _OTHER_MAPS or key in _LITERAL:
        return False
    check = CHECKS.get(key)
    return check is None or not check(value)


def _is_list_of_named(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in value)
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(show(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
