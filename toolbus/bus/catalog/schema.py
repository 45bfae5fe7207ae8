"""Validates arguments and outputs against JSON Schema: compiles schemas, parses, explains what is wrong.

JSON Schema 2020-12, unless ``$schema`` names 2019-09, 07, 06 or 04; ``format`` and ``content…`` are annotations, as
2020-12 has them by default. Knows no tools, sessions or calls. ``schema_graph`` decides which schemas are accepted,
before the native validator sees them; the limits on arguments are here.
Figures were measured with jsonschema-rs 0.60.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import jsonschema_rs
import orjson

from toolbus.bus.catalog.schema_defaults import Defaults, defaults_of
from toolbus.bus.catalog.schema_graph import MANY, MEMBER, Graph, Node, Size, raise_unless_panic
from toolbus.normal_schema import limited, normal_form
from toolbus.schema_grammar import SchemaFault, cut, pointer, show
from toolbus.text import escape_surrogates
from toolbus.tool import Limits

__all__ = ["ArgumentChecker", "SchemaFault", "compile_output_schema", "compile_schema", "load_arguments"]

ARGUMENT_DEPTH = 128  # 1,000 levels of a recursive schema overflowed 8 MiB of native stack, which ends the process
WIDE_INTEGERS = 256  # of more than 64 bits: 1,000 of them in an array with uniqueItems took 0.5 s, 40,000 took 79 s
CHECK_STEPS = 8_000_000  # schemas times values of one check, about 30 ns each
PATTERN_STEPS = 60_000_000  # states times characters of one check, about 8 ns each
FREE_STEPS, FREE_STATES = 20, 60  # up to here 1 MiB of arguments stays near the two bounds above, whatever it holds
EXPLAIN_STEPS = 20_000  # each may become an error record of about 10 µs
EXPLAIN_DEPTH = 512  # steps above one another; each takes up to 1.5 KB of native stack where errors are collected
SHOWN_FAULTS = 5
# Cache: compiled schemas outlive their tools, so that a reconnect is cheap: 5 KB each, 57 KB with 30 fields.
MAX_CACHED_SCHEMAS = 1_024
CACHED_CHARACTERS = 4096  # longer schemas are seldom shared, and this many of them would take much memory

ARGUMENTS, OUTPUT = "arguments", "output"  # what a schema is of, as error texts name it
TOO_MUCH_TO_EXPLAIN = (
    ": they break the tool's schema, and are too many or too deeply nested for the bus to say where: send fewer values"
)

_loads = orjson.loads  # saves an attribute lookup on every call
_PLAIN = frozenset({str, int, bool, type(None)})
_no_digit_in = frozenset("0123456789").isdisjoint
_find_wide_integer = re.compile(r"[:,\[ \n\r\t-][0-9]{19}").search  # mostly outside strings
# Keywords for which an integer that became a float would give a wrong verdict; a backslash could spell any of them.
_ASKS_FOR_VALUES = re.compile(
    r'"(?:minimum|maximum|exclusiveMinimum|exclusiveMaximum|multipleOf|const|enum|uniqueItems)"|\\'
).search
CHOICES = (jsonschema_rs.ValidationErrorKind.AnyOf, jsonschema_rs.ValidationErrorKind.OneOfNotValid)
_TYPE = jsonschema_rs.ValidationErrorKind.Type
MAYBE_WHOLE = ".0"  # in the text of arguments: one of them may be a whole number that is written as a fraction
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class ArgumentChecker:
    """Checks arguments against one compiled schema; for outputs it is the same.

    Attributes:
        text: the schema as it is checked: its normal form (`toolbus.normal_schema`), without what cannot be checked.
        warnings: what was read otherwise than it is written, or is not checked: a sentence each, for operators.
        has_integers: whether the schema asks for integers somewhere.
        load: parses arguments for this schema; exactly if the value of a wide integer can matter to it. Raises
            ValueError also where a whole number may be written as a fraction and the schema has integers.
        is_valid: tells whether arguments fit: the validator's own method, or one that counts the arguments first
            where the schema could make a check slow. It expects what `load_arguments` returned, which bounds their
            depth and their wide integers.
        passes: tells whether arguments can be sent as they are: they fit and lack no default.
        defaults: what is filled in; None where the schema declares none.
    """

    __slots__ = (
        *(
            "_is_free",
            "_limits",
            "_size",
            "_validator",
            "defaults",
            "has_integers",
            "is_valid",
            "load",
            "noun",
            "passes",
        ),
        *("text", "warnings"),
    )

    def __init__(
        self,
        validator: jsonschema_rs.Validator,
        size: Size,
        text: str,
        limits: Limits,
        warnings: tuple[str, ...] = (),
        defaults: Defaults | None = None,
        noun: str = ARGUMENTS,
    ) -> None:
        self.noun = noun  # what it checks, as its texts name it
        self._validator = validator
        self._size = size
        self.warnings = warnings
        self.text = text  # `explain` builds the graph from it again, so that not every tool keeps one in memory
        self._limits = limits
        self.has_integers = '"integer"' in text
        exactly = _ASKS_FOR_VALUES(text) is not None
        self.load: Callable[[str], Any] = load_arguments if exactly else _load_quickly
        if self.has_integers:
            self.load = _unless_whole(exactly=exactly)
        self._is_free = size.repeated <= FREE_STEPS and size.states <= FREE_STATES
        self.is_valid: Callable[[object], bool] = validator.is_valid if self._is_free else self._is_valid_if_few
        self.defaults = defaults
        self.passes: Callable[[object], bool] = self.is_valid if defaults is None else self._is_complete

    def __repr__(self) -> str:
        return f"ArgumentChecker({len(self.text)} characters, {self._size})"

    def explain(self, arguments: object) -> str:
        """Returns what is wrong with arguments, for a model to act on; "" if they fit."""
        if is_deeper(arguments, ARGUMENT_DEPTH):
            return f"{self.noun} are nested more than {ARGUMENT_DEPTH} levels deep: flatten them"
        graph = self._graph()
        try:
            if excess := self._excess(arguments):
                return excess
            if _is_explainable(graph.root, arguments):
                errors = iter(self._validator.iter_errors(arguments))
                faults = [_fault_text(error, self.noun) for error in itertools.islice(errors, SHOWN_FAULTS)]
                more = sum(1 for _ in errors)
                return "; ".join(faults) + (f"; and {more} more" if more else "")
            if self._is_free and not graph.branches:
                self._validator.validate(arguments)  # stops at the first error, which is then the only one made
            return "" if self._validator.is_valid(arguments) else self.noun + TOO_MUCH_TO_EXPLAIN
        except jsonschema_rs.ValidationError as error:
            return _fault_text(error, self.noun)
        except (ValueError, TypeError) as problem:  # what JSON cannot represent: lone surrogates, values of other types
            return f"{self.noun}: they are not JSON: {cut(str(problem))}"
        except BaseException as problem:
            raise_unless_panic(problem)
            return f"{self.noun}: the validator failed on them: send simpler values"

    def errors(self, arguments: object, limit: int) -> list[jsonschema_rs.ValidationError] | None:
        """Returns what is wrong with arguments; None if it is too much to say, or more than a limit."""
        if is_deeper(arguments, ARGUMENT_DEPTH) or self._excess(arguments):
            return None
        try:
            if not _is_explainable(self._graph().root, arguments):
                return None
            errors = list(itertools.islice(self._validator.iter_errors(arguments), limit + 1))
        except (ValueError, TypeError):  # what JSON cannot represent
            return None
        except BaseException as problem:
            raise_unless_panic(problem)
            return None
        return errors if len(errors) <= limit else None

    def _graph(self) -> Graph:
        return Graph(_read(self.text, self._limits), self._limits)

    def _is_complete(self, arguments: object) -> bool:
        return not (self.defaults is not None and self.defaults.lacks(arguments)) and self.is_valid(arguments)

    def _is_valid_if_few(self, arguments: object) -> bool:
        return not self._excess(arguments) and self._validator.is_valid(arguments)

    def _excess(self, arguments: object) -> str:
        """Returns which limit of this schema the arguments exceed; "" if none."""
        if self._is_free:
            return ""
        max_values = CHECK_STEPS // max(self._size.repeated, FREE_STEPS)
        max_characters = PATTERN_STEPS // max(self._size.states, FREE_STATES)
        characters = 0
        values: list[Any] = [arguments]
        for value in values:
            kind = type(value)
            if kind is str:
                characters += len(value)
            elif kind is dict:
                characters += sum(map(len, value))
                values.extend(value.values())
            elif kind is list:
                values.extend(value)
            if len(values) > max_values:
                return (
                    f"{self.noun}: they hold more than {max_values} values, the most that can be checked in time "
                    f"against this tool's schema: send fewer"
                )
        if characters > max_characters:
            return (
                f"{self.noun}: their texts have {characters} characters, the most that can be checked in time against "
                f"the patterns in this tool's schema is {max_characters}: send shorter ones"
            )
        return ""


def compile_schema(parameters_json: str, limits: Limits) -> ArgumentChecker:
    """Compiles the schema of a tool's arguments; equal short texts share one checker.

    No reference is followed out of the text, neither to a URL nor to a file. What people write in place of JSON Schema
    is read as what it means, and what cannot be checked is not checked; the checker's warnings say so.

    Raises:
        SchemaFault: where the schema breaks a rule, exceeds a limit or could stop the bus.
    """
    if len(parameters_json) <= CACHED_CHARACTERS:
        return _compile_once(parameters_json, limits)
    return _compile(parameters_json, limits)


def compile_output_schema(output_schema_json: str, limits: Limits) -> ArgumentChecker:
    """Compiles the schema of a tool's output, by the rules for arguments; but an output may be any JSON.

    Raises:
        SchemaFault: as for `compile_schema`.
    """
    return _compile_once(output_schema_json, limits, OUTPUT)


def load_output(output_json: str) -> Any:
    """Parses an output for its checker.

    Raises:
        ValueError: it is not JSON, or holds what cannot be checked.
    """
    try:
        return load_arguments(output_json or "null")
    except ValueError as problem:
        raise ValueError(f"{OUTPUT}: {str(problem).partition('arguments ')[2] or problem}") from None


def load_arguments(text: str) -> Any:
    """Parses arguments as JSON: integers are exact up to 308 digits, an empty text is ``{}``.

    Raises:
        ValueError: saying where the text is not JSON, or which limit it exceeds.
    """
    try:
        value = _loads(text)
    except orjson.JSONDecodeError as problem:
        if text == "":
            return {}
        fix = "send it as a string" if "infinity" in str(problem) else "correct it"
        raise ValueError(f"arguments are not JSON: {cut(str(problem))}: {fix}") from None
    # Most arguments: one level deep, and no integer became a float. The checks below read the whole text again.
    if type(value) is dict and _PLAIN.issuperset(map(type, value.values())):
        return value
    if (
        len(text) > 2 * ARGUMENT_DEPTH
        and text.count("{") + text.count("[") > ARGUMENT_DEPTH
        and is_deeper(value, ARGUMENT_DEPTH)
    ):
        raise ValueError(f"arguments are nested more than {ARGUMENT_DEPTH} levels deep: flatten them")
    # A run of 19 digits is the shortest that can exceed 64 bits, and has one of them at some 19th place.
    if _no_digit_in(text[18::19]) or not (_find_wide_integer(text) or type(value) is float):
        return value
    return _load_exactly(text)


def _load_quickly(text: str) -> Any:
    """Does the same as `load_arguments`, but turns integers beyond 64 bits into floats."""
    if len(text) > 2 * ARGUMENT_DEPTH:
        return load_arguments(text)
    try:
        return _loads(text)
    except orjson.JSONDecodeError:
        return load_arguments(text)


def _unless_whole(*, exactly: bool) -> Callable[[str], Any]:
    """Returns what loads arguments for a schema with integers; one function, since each call pays for it."""
    longest = 0 if exactly else 2 * ARGUMENT_DEPTH

    def load(text: str) -> Any:
        if MAYBE_WHOLE in text:
            raise ValueError("a whole number may be written as a fraction")
        if len(text) > longest:
            return load_arguments(text)
        try:
            return _loads(text)
        except orjson.JSONDecodeError:
            return load_arguments(text)

    return load


def _load_exactly(text: str) -> Any:
    """Parses again a text that orjson accepted, because orjson turns integers beyond 64 bits into floats."""
    wide = 0

    def integer(digits: str) -> int:
        nonlocal wide
        value = int(digits)
        if not -(2**63) <= value < 2**64:
            wide += 1
            if wide > WIDE_INTEGERS:
                raise ValueError(
                    f"arguments hold more than {WIDE_INTEGERS} integers beyond 64 bits: send them as strings"
                )
        return value

    return json.loads(text, parse_int=integer)


@functools.lru_cache(maxsize=MAX_CACHED_SCHEMAS)
def _compile_once(text: str, limits: Limits, noun: str = ARGUMENTS) -> ArgumentChecker:
    return _compile(text, limits, noun)  # errors are not cached


def _compile(text: str, limits: Limits, noun: str = ARGUMENTS) -> ArgumentChecker:
    schema, warnings, left_out = normal_form(_read(text, limits))
    graph = Graph(schema, limits)
    size, engine = graph.measure()
    if left_out or graph.unchecked:
        graph.relax()
    if warnings or graph.unchecked:
        warnings = [*warnings, *graph.unchecked]
        text = escape_surrogates(json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
        _read(text, limits)  # the normal form has limits too
    try:
        validator = graph.draft(
            {key: value for key, value in schema.items() if key != "$schema"},
            validate_formats=False,
            pattern_options=engine,
            offline=True,
        )
    except jsonschema_rs.ValidationError as problem:
        raise SchemaFault(f"schema at {pointer(problem.instance_path)}: {cut(problem.message)}: correct it") from None
    except (ValueError, TypeError, jsonschema_rs.ReferencingError) as problem:
        raise SchemaFault(f"schema at #: it does not compile: {cut(str(problem))}: correct it") from None
    except BaseException as problem:
        raise_unless_panic(problem)
        raise SchemaFault("schema at #: the validator failed on it: simplify it") from None
    if noun == ARGUMENTS and not graph.takes_objects():
        raise SchemaFault(
            'schema at #: it accepts no JSON object, but arguments are always one: declare "type": "object"'
        )
    defaults, unfit = defaults_of(schema)
    return ArgumentChecker(validator, size, text, limits, limited([*warnings, *unfit]), defaults, noun)


def _read(text: str, limits: Limits) -> dict[str, Any]:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limits.schema_bytes:
        raise SchemaFault(
            f"schema at #: it has {size} bytes, more than the limit schema_bytes = {limits.schema_bytes}: shorten it"
        )
    try:
        value = orjson.loads(text)
        if is_deeper(value, limits.schema_depth):
            raise SchemaFault(
                f"schema at #: it is nested deeper than the limit schema_depth = {limits.schema_depth}: "
                f"move inner parts to $defs"
            )
        if _find_wide_integer(text):
            value = _load_exactly(text)
    except orjson.JSONDecodeError as problem:
        raise SchemaFault(f"schema at #: it is not JSON: {cut(str(problem))}: correct it") from None
    except SchemaFault:
        raise
    except ValueError as problem:
        raise SchemaFault(f"schema at #: {str(problem).replace('arguments hold', 'it holds')}") from None
    if not isinstance(value, dict):
        raise SchemaFault(f"schema at #: it is {cut(text)}, it must be a JSON object such as {{}}")
    return value


def is_deeper(value: object, limit: int) -> bool:
    """Tells whether a JSON value has more levels of objects and arrays than a limit."""
    level: list[Any] = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) is dict or type(item) is list
        ]
    return bool(level)


def _is_explainable(root: Node, arguments: object) -> bool:
    """Tells whether collecting errors stays cheap, by walking the schema along the arguments as the validator would.

    To collect errors the validator tries every branch, remembers nothing and quotes the value in each error: 18 levels
    of a schema with two branches took more than 20 s.
    """
    sizes: dict[int, int] = {}
    _measure_texts(arguments, sizes)
    budget: float = EXPLAIN_STEPS
    waiting: list[tuple[Node, Any, int]] = [(root, arguments, 1)]
    while waiting:
        node, value, depth = waiting.pop()
        budget -= 1 + (sizes[id(value)] if isinstance(value, (dict, list)) else _length(value)) / 1000
        if budget < 0 or depth > EXPLAIN_DEPTH or len(waiting) > EXPLAIN_STEPS:
            return False
        for edge in node.edges:
            for item in _members(value, edge.key) if edge.applies in (MEMBER, MANY) else (value,):
                waiting.append((edge.target, item, depth + 1))
    return True


def _members(value: Any, key: str | int | None) -> Iterable[Any]:
    if key is None:
        return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, dict):
        return (value[key],) if key in value else ()
    return value[key : key + 1] if isinstance(value, list) and isinstance(key, int) else ()


def _measure_texts(value: Any, sizes: dict[int, int]) -> int:
    """Stores about how many characters each object and array has as JSON; the depth of arguments is bounded before."""
    if not isinstance(value, (dict, list)):
        return _length(value)
    items = value.values() if isinstance(value, dict) else value
    keys = sum(map(len, value)) if isinstance(value, dict) else 0
    size = sizes[id(value)] = keys + sum(_measure_texts(item, sizes) + 2 for item in items)
    return size


def _length(value: object) -> int:
    return len(value) if isinstance(value, str) else value.bit_length() // 3 if isinstance(value, int) else 8


def _place(error: jsonschema_rs.ValidationError, place: str) -> str:
    for part in error.instance_path:
        if isinstance(part, int):
            place += f"[{part}]"
        else:
            place += f".{part}" if _PLAIN_KEY.fullmatch(part) else f"[{json.dumps(part, ensure_ascii=False)}]"
    return cut(place)


def _fault_text(error: jsonschema_rs.ValidationError, noun: str) -> str:
    message = error.message
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Constant):  # the one message without the value
        message = f"{show(error.instance)} is not what it must be: {message}"
    place = _place(error, noun)
    return f"{place}: {cut(message)} (rule {pointer(error.schema_path)[1:] or '/'}){_closest(error, noun)}"


def _closest(error: jsonschema_rs.ValidationError, noun: str) -> str:
    """Returns what is wrong with the closest branch of a choice: the one that got furthest into the value."""
    if not isinstance(error.kind, CHOICES):
        return ""
    firsts = [branch[0] for branch in error.kind.context if branch]
    if not firsts:
        return ""
    best = max(firsts, key=lambda first: (len(first.instance_path), not isinstance(first.kind, _TYPE)))
    return f", closest: {_place(best, noun)}: {cut(best.message)}"
