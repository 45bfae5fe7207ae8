"""Validates arguments and outputs against JSON Schema: compiles schemas, parses, explains what is wrong.

JSON Schema 2020-12, unless ``$schema`` names 2019-09, 07, 06 or 04; ``format`` and ``content…`` are annotations, as
2020-12 has them by default. Knows no tools, sessions or calls. ``schema_graph`` decides which schemas are accepted,
before the native validator sees them; the limits on arguments are here.
Figures were measured with jsonschema-rs 0.60.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

import jsonschema_rs
import orjson

from toolbus.bus.catalog.schema_defaults import Defaults, defaults_of
from toolbus.common.text import escape_surrogates
from toolbus.protocol.json_schema import SchemaFault, cut, draft_of, limited, normal_form, pointed_at, pointer, show
from toolbus.protocol.tool import Limits

# Measures a JSON Schema as a graph: which schemas in it apply which others, and what a check of it can cost.
#
# A reference out of the schema, and a pattern that does not compile, are left out of it, so that they are not
# checked.
#
# The validator is native code that cannot be stopped once it runs, follows references wherever they lead by default,
# and ends the process where its stack overflows. So every schema is measured here before it is compiled. Knows the
# grammar of drafts 04 to 2020-12; knows neither arguments nor tools. Figures were measured with jsonschema-rs 0.60.

IN_PLACE_DEPTH = 32  # steps at one place of the arguments; `unevaluated…` takes 9 KB of native stack for each
RECURSION_COST = 60  # a reference back to a schema that is being checked is looked up in a table: 0.5 to 4 µs
BACKTRACKS = 10_000  # of a pattern with look-around: 0.3 to 2 ms for a text of 1,000 characters
CERTAINLY_SMALL = 1_000  # states and characters of a pattern: one that does not compile is misspelt, not too large
# What a part of a pattern takes to compile, in plain characters (1 µs): any but some, a class of Unicode.
ANY_BUT, UNICODE_CLASS = 10, 500
BACKTRACK_STATES = 8_000  # what such a pattern counts as: it reads 7,500 characters a check, in 0.2 s at worst

PatternEngine = jsonschema_rs.RegexOptions | jsonschema_rs.FancyRegexOptions

_VALIDATORS: dict[int, type[jsonschema_rs.Validator]] = {
    2020: jsonschema_rs.Draft202012Validator,
    2019: jsonschema_rs.Draft201909Validator,
    7: jsonschema_rs.Draft7Validator,
    6: jsonschema_rs.Draft6Validator,
    4: jsonschema_rs.Draft4Validator,
}
_BASE = "http://schema.invalid/"  # what relative references are read against; RFC 2606 keeps it from existing
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# How a keyword applies the schemas in it: to the same value, to one named member, or to any number of members.
SAME, MEMBER, MANY, _NEVER = "same", "member", "many", "never"
_APPLIES: dict[str, str] = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"), SAME),
    **dict.fromkeys(("properties", "prefixItems"), MEMBER),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"), MANY),
    **dict.fromkeys(("items", "additionalItems", "unevaluatedItems", "contains"), MANY),
    **dict.fromkeys(("$defs", "definitions", "contentSchema"), _NEVER),
}
# Keywords that can refuse a value because another schema accepts it, or has not looked at it.
_REFUSES_MORE = {"not", "if", "then", "else", "maxContains", "unevaluatedProperties", "unevaluatedItems"}
_WEIGHS = frozenset(("const", "enum", "pattern", "patternProperties"))  # keywords that take steps of their own
_BRANCHING = frozenset(("anyOf", "oneOf", "propertyNames"))
_ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "$defs",
    "definitions",
    "$id",
    "id",
    "$schema",
}
_MAPS = {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
_PATTERN_PART = re.compile(
    r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\{(?P<least>\d+)(?P<to>,(?P<most>\d*))?\}|.", re.DOTALL
)


class Edge(NamedTuple):
    """One schema applies another."""

    applies: str
    key: str | int | None  # the member that it applies to, where that is one
    target: Node


@dataclass(slots=True, eq=False)
class Node:
    """One schema inside the schema."""

    schema: dict[str, Any]
    place: tuple[str | int, ...]
    base: str
    edges: list[Edge] = field(default_factory=list)
    weight: int = 1  # steps that it takes by itself
    states: int = 0  # of its own patterns


class Size(NamedTuple):
    """The cost of a node with everything below it.

    Attributes:
        nodes: schemas, with references expanded.
        in_place: the longest chain of schemas that apply to one value.
        steps: the most that apply to any one value.
        repeated: the same, of values that arguments may hold any number of.
        states: the most regular-expression states that read any one text.
    """

    nodes: int
    in_place: int
    steps: int
    repeated: int
    states: int


_BACK = Size(1, 1, RECURSION_COST, RECURSION_COST, 0)


class Graph:
    """The schemas inside a schema, and which of them apply others.

    Attributes:
        unchecked: a sentence for each part that was taken out of the schema because it cannot be checked; complete
            after `measure`. The given schema is changed.
    """

    def __init__(self, root: dict[str, Any], limits: Limits) -> None:
        self._limits = limits
        self._nodes: dict[int, Node] = {}  # by identity of the dict in the parsed text, which lives as long
        self._resources: dict[str, dict[str, Any]] = {_BASE: root}
        self._anchors: dict[tuple[str, str], dict[str, Any]] = {}
        self._dynamic: dict[str, list[dict[str, Any]]] = {}
        # Pattern → whether it needs the engine that backtracks, and why neither compiles it; "" if one does.
        self._engines: dict[str, tuple[bool, str]] = {}
        self.compile_cost = 0  # of all patterns so far, see `Limits.pattern_cost`
        self.unchecked: list[str] = []
        version = draft_of(root) or 2020
        self.draft = _VALIDATORS[version]
        self._hides_siblings = version <= 7  # of $ref
        self._id = "id" if version == 4 else "$id"
        self._walk(root, (), _BASE)
        self.root = self._nodes[id(root)]
        linked = 0
        while linked < len(self._nodes):  # a reference may reach a place that no keyword does
            fresh = list(self._nodes.values())[linked:]
            linked += len(fresh)
            for node in fresh:
                self._link(node)

    def measure(self) -> tuple[Size, PatternEngine]:
        """Returns the cost of a check and the regular-expression engine that the patterns need.

        Raises:
            SchemaFault: where arguments could not be checked in bounded time and stack.
        """
        self._refuse_endless()
        for node in self._nodes.values():
            self._weigh(node)
        size, recursive = self._expand(1)
        if recursive:  # which references lead back depends on the order, and the validator's need not be ours
            size = Size(*map(max, size, self._expand(-1)[0]))
        if any(backtracks for backtracks, _ in self._engines.values()):
            return size, jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS)
        return size, jsonschema_rs.RegexOptions()

    def relax(self) -> None:
        """Takes out keywords that refuse a value because another part allows it: after a part was left out."""
        changed = False
        for node in self._nodes.values():
            for keyword in _REFUSES_MORE & node.schema.keys():
                del node.schema[keyword]
                changed = True
            if "oneOf" in node.schema:
                branches = node.schema.pop("oneOf")
                node.schema.setdefault("anyOf", branches)
                changed = True
        if changed:
            self.unchecked.append(
                "schema at #: not, if, oneOf, maxContains and unevaluated… are not checked (oneOf as anyOf) as long as "
                "other parts are left out: correct those"
            )

    @property
    def branches(self) -> bool:
        """Whether one error of the schema can carry others: those of every branch that did not fit."""
        return any(not _BRANCHING.isdisjoint(node.schema) for node in self._nodes.values())

    def takes_objects(self) -> bool:
        """Tells whether the schema could accept an object, as far as its types say; to be called after `measure`."""
        return self._takes(self.root.schema, {})

    def _takes(self, schema: object, known: dict[int, bool]) -> bool:
        """Tells the same of a schema inside; a method, since a function that calls itself would keep the graph alive.

        Args:
            known: the answers so far, by the identity of the schema.
        """
        if not isinstance(schema, dict):
            return schema is not False
        if id(schema) not in known:
            known[id(schema)] = True
            answers = [_types_allow_objects(schema)]
            for keyword, quantifier in (("allOf", all), ("anyOf", any), ("oneOf", any)):
                parts = schema.get(keyword)
                if isinstance(parts, list) and parts:
                    answers.append(quantifier([self._takes(part, known) for part in parts]))
            node, reference = self._nodes.get(id(schema)), schema.get("$ref")
            if node is not None and isinstance(reference, str):
                answers.append(self._takes(self._resolved(node, "$ref", reference), known))
            known[id(schema)] = all(answers)
        return known[id(schema)]

    def _walk(self, root: dict[str, Any], place: tuple[str | int, ...], base: str) -> None:
        """Stores every schema that stands where the grammar allows one, with its base and its names."""
        waiting: list[tuple[object, tuple[str | int, ...], str]] = [(root, place, base)]
        while waiting:
            schema, place, base = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in self._nodes:
                continue
            if place and "$schema" in schema and schema["$schema"] != self._resources[_BASE].get("$schema"):
                raise SchemaFault(
                    f"schema at {pointer([*place, '$schema'])}: {show(schema['$schema'])} differs from the "
                    f"outermost $schema: use one draft throughout"
                )
            base = self._named(schema, place, base)
            self._nodes[id(schema)] = Node(schema, place, base)
            waiting.extend((part, (*place, *below), base) for part, below, _ in _parts(schema))

    def _named(self, schema: dict[str, Any], place: tuple[str | int, ...], base: str) -> str:
        name = schema.get(self._id)
        if isinstance(name, str) and not (self._hides_siblings and "$ref" in schema):
            url, fragment = urldefrag(_joined(base, name, [*place, self._id]))
            if fragment:
                self._anchors[url, fragment] = schema
            if url != base:
                base = url
                self._resources.setdefault(base, schema)
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = schema.get(keyword)
            if isinstance(anchor, str):
                self._anchors[base, anchor] = schema
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(anchor, []).append(schema)
        return base

    def _link(self, node: Node) -> None:
        hidden = self._hides_siblings and "$ref" in node.schema
        if not hidden:
            for part, below, applies in _parts(node.schema):
                if applies != _NEVER and isinstance(part, dict):
                    node.edges.append(Edge(applies, below[-1] if applies == MEMBER else None, self._nodes[id(part)]))
        for keyword in ("$ref",) if hidden else _REFERENCES:
            reference = node.schema.get(keyword)
            if not isinstance(reference, str):
                continue
            try:
                targets = [self._resolved(node, keyword, reference)]
            except SchemaFault as fault:
                self._drop_reference(node, keyword, fault)
                continue
            if keyword == "$dynamicRef":  # whichever of that name is outermost when it is reached: count them all
                targets += self._dynamic.get(urldefrag(reference)[1], ())
            for target in {id(target): target for target in targets if isinstance(target, dict)}.values():
                node.edges.append(Edge(SAME, None, self._nodes[id(target)]))

    def _drop_reference(self, node: Node, keyword: str, fault: SchemaFault) -> None:
        """Takes a reference out of its schema; in drafts that ignore what stands beside it, that as well."""
        self.unchecked.append(f"{fault}; until then it is not checked")
        for key in list(node.schema):
            if key == keyword or (self._hides_siblings and key not in _ANNOTATIONS):
                del node.schema[key]

    def _resolved(self, node: Node, keyword: str, reference: str) -> object:
        place = [*node.place, keyword]
        url, fragment = urldefrag(_joined(node.base, reference, place))
        if url not in self._resources:
            raise SchemaFault(
                f"schema at {pointer(place)}: {show(reference)} leads out of the schema, and nothing is fetched: "
                f"copy what it names into $defs and refer to that"
            )
        resource = self._resources[url]
        target, steps = pointed_at(resource, fragment)
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((url, unquote(fragment)))
        if not isinstance(target, (dict, bool)):
            raise SchemaFault(
                f"schema at {pointer(place)}: {show(reference)} names no schema in this document: "
                f"correct it or add what it names"
            )
        if isinstance(target, dict) and id(target) not in self._nodes:
            self._walk(target, (*self._nodes[id(resource)].place, *steps), url)
        return target

    def _weigh(self, node: Node) -> None:
        schema = node.schema
        if _WEIGHS.isdisjoint(schema):
            return
        options = schema.get("enum")
        for value in (schema.get("const"), *(options if isinstance(options, list) else ())):
            if isinstance(value, (dict, list)):  # scalars are looked up in a table, these are compared one by one
                node.weight += 10 + _count(value)
        by_pattern = schema.get("patternProperties")
        for keyword, patterns in (("pattern", [schema.get("pattern")]), ("patternProperties", by_pattern)):
            for pattern in patterns if isinstance(patterns, (list, dict)) else ():
                if isinstance(pattern, str):
                    self._weigh_pattern(node, keyword, pattern)

    def _weigh_pattern(self, node: Node, keyword: str, pattern: str) -> None:
        if pattern not in self._engines:
            self.compile_cost += _states(pattern, _compile_cost)
            if self.compile_cost > self._limits.pattern_cost:  # before it is compiled: nothing stops that
                raise SchemaFault(
                    f"schema at {pointer([*node.place, keyword])}: {show(pattern)} takes the patterns of this schema "
                    f"beyond the limit pattern_cost = {self._limits.pattern_cost} (a class such as \\p{{L}} counts as "
                    f"{UNICODE_CLASS}, times its repetitions): shorten it, or repeat with + and use maxLength"
                )
            self._engines[pattern] = _engine_for(pattern)
        backtracks, reason = self._engines[pattern]
        if not reason:
            node.states += BACKTRACK_STATES if backtracks else _states(pattern)
            node.weight += BACKTRACKS if backtracks else 1
            return
        text = (
            f"schema at {pointer([*node.place, keyword])}: {show(pattern)} cannot be compiled as a pattern "
            f"({cut(reason)}): correct or shorten it"
        )
        # Without one of several patterns for keys, what is left would refuse keys that it was meant to allow.
        if keyword != "pattern" or len(pattern) > CERTAINLY_SMALL or _states(pattern) > CERTAINLY_SMALL:
            raise SchemaFault(text)
        self.unchecked.append(f"{text}; until then it is not checked")
        del node.schema["pattern"]

    def _refuse_endless(self) -> None:
        """Refuses references that form a cycle at one value: checking them would never end."""
        starts = [node for node in self._nodes.values() if any(edge.applies == SAME for edge in node.edges)]
        for node, _, is_back in _visit(starts, lambda node: [e for e in node.edges if e.applies == SAME]):
            if is_back:
                raise SchemaFault(
                    f"schema at {pointer(node.place)}: it applies itself to the same value again, without end: "
                    f"refer to it from properties or items only"
                )

    def _expand(self, step: int) -> tuple[Size, bool]:
        """Sums up the graph from its leaves, each node once, with references that lead back cut."""
        sizes: dict[int, Size] = {}
        again: list[Node] = []
        for node, path, is_back in _visit([self.root], lambda node: node.edges[::step]):
            if is_back:
                again.append(node)
                continue
            size = sizes[id(node)] = _combined(
                node, [(edge, _BACK if id(edge.target) in path else sizes[id(edge.target)]) for edge in node.edges]
            )
            if size.nodes > self._limits.schema_nodes:
                raise SchemaFault(
                    f"schema at {pointer(node.place)}: with its references expanded it has more than the limit "
                    f"schema_nodes = {self._limits.schema_nodes}: refer to shared parts less often"
                )
            if size.in_place > IN_PLACE_DEPTH:
                raise SchemaFault(
                    f"schema at {pointer(node.place)}: more than {IN_PLACE_DEPTH} schemas apply to one value, each "
                    f"inside the other: merge some of them"
                )
        total = sizes[id(self.root)]
        return total._replace(repeated=max([total.repeated, *(sizes[id(node)].steps for node in again)])), bool(again)


def _visit(
    starts: Iterable[Node], edges_of: Callable[[Node], Sequence[Edge]]
) -> Iterator[tuple[Node, dict[int, None], bool]]:
    """Yields each node after all that it applies, and, marked True, each that an edge from below leads back to.

    With them come the ids of the nodes on the path there, the node included.
    """
    done: set[int] = set()
    for start in starts:
        if id(start) in done:
            continue
        path: dict[int, None] = {id(start): None}
        stack = [(start, iter(edges_of(start)))]
        while stack:
            node, edges = stack[-1]
            for edge in edges:
                target = edge.target
                if id(target) in path:
                    yield target, path, True
                elif id(target) not in done:
                    path[id(target)] = None
                    stack.append((target, iter(edges_of(target))))
                    break
            else:
                yield node, path, False
                stack.pop()
                del path[id(node)]
                done.add(id(node))


def raise_unless_panic(problem: BaseException) -> None:
    """Raises a problem again unless it is a panic of the Rust code, which derives from BaseException."""
    if type(problem).__name__ != "PanicException":
        raise problem


def _parts(schema: dict[str, Any]) -> Iterator[tuple[object, tuple[str | int, ...], str]]:
    """Yields the schemas directly inside a schema: each with its place below it and how it applies."""
    for keyword, value in schema.items():
        applies = _APPLIES.get(keyword)
        if applies is None:
            continue
        if isinstance(value, dict) and keyword in _MAPS:
            for key, part in value.items():
                yield part, (keyword, key), applies
        elif isinstance(value, list):
            for index, part in enumerate(value):
                yield part, (keyword, index), MEMBER if keyword == "items" else applies
        else:
            yield value, (keyword,), applies


def _combined(node: Node, parts: Sequence[tuple[Edge, Size]]) -> Size:
    """Sums up a node: schemas for the same value add up, of those for different members the costliest counts."""
    if not parts:  # as most: a third of what measuring takes
        return Size(1, 1, node.weight, 0, node.states)
    same = [size for edge, size in parts if edge.applies == SAME]
    member = [size for edge, size in parts if edge.applies == MEMBER]
    many = [size for edge, size in parts if edge.applies == MANY]
    # `unevaluated…` checks what applies in place again, and then a last time, to learn what has been looked at.
    times = 3 if "unevaluatedProperties" in node.schema or "unevaluatedItems" in node.schema else 1
    steps_of_many = sum(size.steps for size in many)
    return Size(
        nodes=1 + times * sum(size.nodes for size in same) + sum(size.nodes for size in (*member, *many)),
        in_place=1 + max((size.in_place for size in same), default=0),
        steps=max(node.weight, steps_of_many, *(size.steps for size in member))
        + times * sum(size.steps for size in same),
        repeated=max(steps_of_many, *(size.repeated for size in (*member, *many)), 0)
        + times * sum(size.repeated for size in same),
        states=max(node.states, sum(size.states for size in many), *(size.states for size in member))
        + times * sum(size.states for size in same),
    )


def _engine_for(pattern: str) -> tuple[bool, str]:
    """Returns whether a pattern needs the engine that backtracks, and why neither engine compiles it, else ""."""
    reason = ""
    engines: tuple[PatternEngine, ...] = (
        jsonschema_rs.RegexOptions(),
        jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACKS),
    )
    for backtracks, engine in enumerate(engines):
        try:
            jsonschema_rs.Draft202012Validator({"pattern": pattern}, pattern_options=engine, offline=True)
            return bool(backtracks), ""
        except ValueError as problem:
            reason = str(problem).partition("\n")[0]
        except BaseException as problem:
            raise_unless_panic(problem)
            reason = "the engine failed on it"
    return False, reason


def _compile_cost(part: str) -> int:
    """Estimates what a part of a pattern takes to compile, in plain characters."""
    if part[0] == "[":
        classes = part.count("\\p") + part.count("\\P")
        return UNICODE_CLASS * classes + max(len(part) // 3, ANY_BUT * part.startswith("[^"), 1)
    if part[:2] in ("\\p", "\\P"):
        return UNICODE_CLASS
    return ANY_BUT if part in (".", "\\S", "\\D", "\\W") else 1


def _states(pattern: str, weigh: Callable[[str], int] = lambda part: 1) -> int:
    """Estimates the states of a pattern: its parts, times its counted repetitions."""
    groups = [[0, 0]]  # for each open group: states so far, and those of its last part
    for match in _PATTERN_PART.finditer(pattern):
        part, group = match[0], groups[-1]
        if part == "(":
            groups.append([0, 0])
        elif part == ")" and len(groups) > 1:
            groups.pop()
            groups[-1][0] += group[0]
            groups[-1][1] = group[0]
        elif match["least"]:
            times = int((match["most"] or match["least"])[:9])
            group[0] += group[1] * max(times - 1, 0)
            group[1] *= max(times, 1)
        elif part not in "*+?|^$":
            group[1] = weigh(part)
            group[0] += group[1]
    return sum(total for total, _ in groups)


def _types_allow_objects(schema: dict[str, Any]) -> bool:
    types = schema.get("type", "object")
    allowed = [schema["const"]] if "const" in schema else schema.get("enum", [{}])
    return (
        "object" in (types if isinstance(types, list) else [types])
        and isinstance(allowed, list)
        and any(isinstance(value, dict) for value in allowed)
    )


def _count(value: object) -> int:
    """Counts the values inside a JSON value, itself included."""
    waiting = [value]
    for item in waiting:
        if isinstance(item, (dict, list)):
            waiting.extend(item.values() if isinstance(item, dict) else item)
    return len(waiting)


def _joined(base: str, reference: str, place: Iterable[str | int]) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:
        raise SchemaFault(f"schema at {pointer(place)}: {show(reference)} is not a URI reference: correct it") from None


__all__ = ["ArgumentChecker", "SchemaFault", "compile_output_schema", "compile_schema", "load_arguments"]

ARGUMENT_DEPTH = 128  # 1,000 levels of a recursive schema overflowed 8 MiB of native stack, which ends the process
WIDE_INTEGERS = 256  # of more than 64 bits: 1,000 of them in an array with uniqueItems took 0.5 s, 40,000 took 79 s
CHECK_STEPS = 8_000_000  # schemas times values of one check, about 30 ns each
PATTERN_STEPS = 60_000_000  # states times characters of one check, about 8 ns each
FREE_STEPS, FREE_STATES = 20, 60  # up to here 1 MiB of arguments stays near the two bounds above, whatever it holds
EXPLAIN_STEPS = 20_000  # each may become an error record of about 10 µs
EXPLAIN_DEPTH = 512  # steps above one another; each takes up to 1.5 KB of native stack where errors are collected
SHOWN_FAULTS = 5
# Cache: compiled schemas outlive their tools, so that a reconnect is cheap: 5 KB each, 57 KB with 30 fields. Longer and
# dearer schemas are seldom shared, and this many of them would take much memory: up to 15 MB each.
MAX_CACHED_SCHEMAS, CACHED_CHARACTERS, CACHED_COST = 1_024, 4_096, 1_000

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
        text: the schema as it is checked: its normal form (`toolbus.protocol.json_schema`), without what cannot be
            checked.
        warnings: what was read otherwise than it is written, or is not checked: a sentence each, for operators.
        compile_cost: what its patterns took to compile, see `Limits.pattern_cost`.
        has_integers: whether the schema asks for integers somewhere.
        load: parses arguments for this schema; exactly if the value of a wide integer can matter to it. Raises
            ValueError also where a whole number may be written as a fraction and the schema has integers.
        is_valid: tells whether arguments fit: the validator's own method, or one that counts the arguments first
            where the schema could make a check slow. It expects what `load_arguments` returned, which bounds their
            depth and their wide integers.
        passes: tells whether arguments can be sent as they are: they fit and lack no default.
        defaults: what is filled in; None where the schema declares none.
    """

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
        self.compile_cost = 0
        self._validator = validator
        self._size = size
        self.warnings = warnings
        self.text = text  # `explain` builds the graph from it again, so that not every tool keeps one in memory
        self._limits = limits
        self.has_integers = '"integer"' in text
        self.load = _loader(exactly=_ASKS_FOR_VALUES(text) is not None, has_integers=self.has_integers)
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


def compile_schema(parameters_json: str, limits: Limits, *, fills_defaults: bool = True) -> ArgumentChecker:
    """Compiles the schema of a tool's arguments; equal short texts share one checker.

    No reference is followed out of the text, neither to a URL nor to a file. What people write in place of JSON Schema
    is read as what it means, and what cannot be checked is not checked; the checker's warnings say so.

    Args:
        fills_defaults: whether arguments that lack defaults are completed.

    Raises:
        SchemaFault: where the schema breaks a rule, exceeds a limit or could stop the bus.
    """
    return _compile_once(parameters_json, limits, ARGUMENTS, fills_defaults=fills_defaults)


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
        if type(text) is not str:  # repaired arguments, which are a class of their own
            return load_arguments(str(text))
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


def _loader(*, exactly: bool, has_integers: bool) -> Callable[[str], Any]:
    """Returns what loads arguments for a schema: unless exactly, integers beyond 64 bits may become floats."""
    longest = 0 if exactly else 2 * ARGUMENT_DEPTH

    def load(text: str) -> Any:
        if has_integers and MAYBE_WHOLE in text:
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


_compiled = OrderedDict[tuple[str, Limits, str, bool], ArgumentChecker]()  # the last used is the last


def _compile_once(text: str, limits: Limits, noun: str, *, fills_defaults: bool = True) -> ArgumentChecker:
    key = text, limits, noun, fills_defaults
    checker = _compiled.pop(key, None) or _compile(text, limits, noun, fills_defaults=fills_defaults)
    if len(text) <= CACHED_CHARACTERS and checker.compile_cost <= CACHED_COST:
        _compiled[key] = checker
        if len(_compiled) > MAX_CACHED_SCHEMAS:
            _compiled.popitem(last=False)
    return checker


def _compile(text: str, limits: Limits, noun: str, *, fills_defaults: bool) -> ArgumentChecker:
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
    defaults, unfit = defaults_of(schema) if fills_defaults else (None, [])
    checker = ArgumentChecker(validator, size, text, limits, limited([*warnings, *unfit]), defaults, noun)
    checker.compile_cost = graph.compile_cost
    return checker


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


def path_text(path: Iterable[str | int], text: str = "") -> str:
    """Returns a path into arguments, after the text of where it begins: `a.b[0]["a key"]`."""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{escape_surrogates(json.dumps(part, ensure_ascii=False))}]"
    return text


def _place(error: jsonschema_rs.ValidationError, noun: str) -> str:
    return cut(path_text(error.instance_path, noun))


def _fault_text(error: jsonschema_rs.ValidationError, noun: str) -> str:
    rule = pointer(error.schema_path)[1:] or "/"
    return f"{_place(error, noun)}: {_message(error)} (rule {rule}){_closest(error, noun)}"


def _message(error: jsonschema_rs.ValidationError) -> str:
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Enum):  # the validator names two of them
        return f"{show(error.instance)} is not one of {show(error.kind.options)[1:-1]}"
    if isinstance(error.kind, jsonschema_rs.ValidationErrorKind.Constant):  # the one message without the value
        return cut(f"{show(error.instance)} is not what it must be: {error.message}")
    return cut(error.message)


def _closest(error: jsonschema_rs.ValidationError, noun: str) -> str:
    """Returns what is wrong with the closest branch of a choice, first of those with the type and constants of it."""
    if not isinstance(error.kind, CHOICES):
        return ""
    depth, constant = len(error.instance_path), jsonschema_rs.ValidationErrorKind.Constant
    branches = [sorted(each, key=lambda each: not isinstance(each.kind, constant)) for each in error.kind.context]
    firsts = [(len(each[0].instance_path), type(each[0].kind), each[0]) for each in branches if each]
    if not firsts:
        return ""
    *_, best = max(
        firsts, key=lambda each: (each[:2] != (depth, _TYPE), each[1] != constant, each[0], each[1] != _TYPE)
    )
    values = [show(each.kind.expected_value) for *_, each in firsts if isinstance(each.kind, constant)]
    if isinstance(best.kind, constant) and len(values) > 1:
        return f", closest: {_place(best, noun)}: one of {cut(', '.join(values))} was expected"
    return f", closest: {_place(best, noun)}: {_message(best)}"
