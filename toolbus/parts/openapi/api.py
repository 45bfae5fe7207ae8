"""Turns the operations of a document into tools, or leaves them out with a reason.

Pure: nothing is sent. An operation that cannot be offered is left out by itself, and its neighbours stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolbus.common.text import dump_json, mark_unsafe, quote, shorten
from toolbus.errors import InvalidTool
from toolbus.parts.openapi.api_settings import (
    ApiSettings,
    Credentials,
    OperationFilter,
    Placement,
    base_url_of,
    origin_of,
    servers_of,
)
from toolbus.parts.openapi.document import STEPS_OF_A_PART, Document, DocumentFault, ReadBudget, shown, text_of
from toolbus.parts.openapi.operations import (
    BYTES,
    MULTIPART,
    SAFE_METHODS,
    TEXT,
    Body,
    FoundOperation,
    Operation,
    find_operations,
    is_value,
    read_operation,
    unread_paths,
)
from toolbus.protocol.json_schema import CHECKS, LISTS, MAPS, SINGLE, SchemaFault, normal_form
from toolbus.protocol.limits import KIB
from toolbus.protocol.tool import Annotations, Tool

# A schema of OpenAPI 3.0 is written anew (`nullable`, `example`, bounds that are true or false), one of 3.1 is JSON
# Schema already. References stay references, so that a schema which contains itself needs no special care.

MAX_DEPTH = 48  # a bus takes 64 levels, and the tool's own schema is around these
MAX_NODES = 10_000  # of one tool, as a bus counts them

# What says nothing to a model, or is of the document rather than of the value.
_DROPPED = frozenset(("title", "$schema", "$id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$comment", "$defs"))
_KEPT = (CHECKS.keys() | {"const", "default"}) - _DROPPED - {"nullable", "readOnly", "writeOnly", "propertyOrdering"}
_NOT_IN_DEFS = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)


class SchemaReader:
    """Reads the schemas of one tool.

    Args:
        hidden: the keyword of properties that do not exist in this direction: `readOnly` in requests, `writeOnly` in
            responses.
        budget: of the whole document.
    """

    def __init__(self, document: Document, budget: ReadBudget, hidden: str = "readOnly") -> None:
        self._document = document
        self._budget = budget
        self._hidden = hidden
        self._names: dict[str, str] = {}  # JSON pointer → name in `$defs`
        self._numbers: dict[str, int] = {}  # name in `$defs` → the last number that was put behind it
        self._waiting: list[str] = []  # pointers whose schemas are not read yet
        self._nodes = 0
        self._is_3_0 = document.is_3_0

    def read(self, schema: Any) -> dict[str, Any]:
        """Returns a schema as JSON Schema; a reference at its root is resolved.

        Raises:
            DocumentFault: it cannot be read.
        """
        return self._schema(self._document.resolve(schema), 0)

    def definitions(self) -> dict[str, Any]:
        """Returns the `$defs` of all that was read."""
        definitions: dict[str, Any] = {}
        while self._waiting:
            pointer = self._waiting.pop()
            definitions[self._names[pointer]] = self._schema(self._document.find(pointer), 0)
        return definitions

    def _schema(self, schema: Any, depth: int) -> dict[str, Any]:
        self._count(depth)
        if isinstance(schema, bool):
            return {} if schema else {"not": {}}
        if not isinstance(schema, Mapping):
            raise DocumentFault(f"a schema is {shown(schema)}, it must be an object")
        result: dict[str, Any] = {}
        reference = schema.get("$ref")
        if isinstance(reference, str):
            result["$ref"] = f"#/$defs/{self._name(self._document.pointer(reference))}"
            if self._is_3_0:  # what stands beside a reference does not count there
                schema = {key: schema[key] for key in ("description",) if isinstance(schema.get(key), str)}
        for keyword, value in schema.items():
            self._keyword(result, keyword, value, depth)
        if "required" in result and isinstance(result.get("properties"), dict):
            properties = schema["properties"]
            names = result["required"] if isinstance(result["required"], list) else []
            result["required"] = [
                name for name in names if not isinstance(name, str) or not self._is_hidden(properties.get(name))
            ]
        return _translated(schema, result) if self._is_3_0 else result

    def _keyword(self, result: dict[str, Any], keyword: str, value: Any, depth: int) -> None:
        if keyword in ("$defs", "definitions", "$ref"):
            return
        if keyword in MAPS and isinstance(value, Mapping):
            result[keyword] = {
                str(name): self._schema(each, depth + 1)
                for name, each in value.items()
                if keyword != "properties" or not self._is_hidden(each)
            }
        elif keyword in LISTS and isinstance(value, list):
            result[keyword] = [self._schema(each, depth + 1) for each in value]
        elif keyword in SINGLE and isinstance(value, Mapping | bool):
            result[keyword] = value if isinstance(value, bool) else self._schema(value, depth + 1)
        elif keyword in _KEPT:
            result[keyword] = mark_unsafe(value) if keyword == "description" and isinstance(value, str) else value

    def _is_hidden(self, schema: Any) -> bool:
        return isinstance(schema, Mapping) and schema.get(self._hidden) is True

    def _name(self, pointer: str) -> str:
        """Returns the name of a schema in `$defs`, which is read later: one may contain itself."""
        if pointer not in self._names:
            self._document.find(pointer)
            plain = _NOT_IN_DEFS.sub("_", pointer.rpartition("/")[2])[:60] or "schema"
            name = plain
            while name in self._numbers:
                self._numbers[plain] += 1
                name = f"{plain}_{self._numbers[plain]}"
            self._numbers[name] = 1
            self._names[pointer] = name
            self._waiting.append(pointer)
        return self._names[pointer]

    def _count(self, depth: int) -> None:
        self._nodes += 1
        self._budget.spend(1)
        if depth > MAX_DEPTH:
            raise DocumentFault(f"its schemas are nested deeper than {MAX_DEPTH} levels")
        if self._nodes > MAX_NODES:
            raise DocumentFault(f"its schemas have more than {MAX_NODES} parts, too many for a tool")


def _translated(schema: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema of OpenAPI 3.0 as JSON Schema.

    Args:
        schema: as the document has it.
        result: the same, its parts translated.
    """
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(result.get(exclusive), bool):
            is_exclusive = result.pop(exclusive)
            if is_exclusive and bound in result:
                result[exclusive] = result.pop(bound)
    if "example" in schema and "examples" not in result:
        result["examples"] = [schema["example"]]
    if schema.get("nullable") is not True:
        return result
    if isinstance(result.get("enum"), list) and None not in result["enum"]:
        result["enum"] = [*result["enum"], None]
    if isinstance(kind := result.get("type"), str):
        result["type"] = [kind, "null"] if kind != "null" else kind
        return result
    if "enum" in result or not result.keys() & {"$ref", "allOf", "anyOf", "oneOf"}:
        return result  # null is among the values, or any value is allowed
    description = {"description": result.pop("description")} if "description" in result else {}
    return {**description, "anyOf": [result, {"type": "null"}]}


MAX_DESCRIPTION = 1_000  # characters: a model needs when to call it, not the manual
MAX_SCHEMA_BYTES = 64 * KIB  # of one tool: what is larger fills a model's context by itself
MAX_STEPS = 1_000_000  # for all tools of a document: about 2 s; the 1,471 operations of GitHub take 113,000
_CHARACTERS_OF_A_STEP = 32  # of a schema that is written and checked
_LISTS = ("servers", "security")
_BINARY = frozenset(("binary", "byte", "base64"))
_FILE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "filename": {"type": "string"},
        "text": {"type": "string", "description": "the content, where it is text"},
        "base64": {"type": "string", "description": "the content as base64, where it is not"},
    },
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ApiTool:
    """An operation that is offered.

    Attributes:
        title: method and path, as the document has them.
        base_url: where its requests go.
        placements: the credentials that they get.
    """

    title: str
    tool: Tool
    operation: Operation
    base_url: str
    placements: tuple[Placement, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An operation that is not offered, and why."""

    title: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Api:
    """The tools of a document, and the operations that are left out.

    Attributes:
        base_url: where requests go.
        warnings: for the operator, one text each.
    """

    base_url: str
    tools: tuple[ApiTool, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line for operators."""
        return f"operations of {self.base_url}: {len(self.tools)} offered, {len(self.left_out)} left out"


def read_api(document: Document, settings: ApiSettings | None = None) -> Api:
    """Returns the tools of a document.

    Raises:
        SetupError: no address for requests was named, or a setting does not fit the document.
    """
    settings = settings or ApiSettings()
    base_url = base_url_of(document, settings)
    maker = _ToolMaker(document, settings, base_url)
    selection = OperationFilter(settings)
    tools: list[ApiTool] = []
    left_out: list[LeftOut] = []
    for found in find_operations(document, settings.prefix):
        reason = selection.refusal(found)
        if not reason and len(tools) >= settings.max_tools:
            reason = f"max_tools is {settings.max_tools}: name the needed operations in allow"
        if not reason:
            try:
                tools.append(maker.make(found))
            except (DocumentFault, SchemaFault) as fault:
                reason = str(fault)
            except InvalidTool as fault:
                reason = "; ".join(fault.faults)
            except RecursionError:
                reason = "it is nested too deep"
        if reason:
            left_out.append(LeftOut(found.title, found.name, mark_unsafe(shorten(reason, 500))))
    left_out += [LeftOut(path, "", shorten(reason, 500)) for path, reason in unread_paths(document)]
    warnings = [f"no operation matches {quote(pattern)}: correct the pattern" for pattern in sorted(selection.unused)]
    sends_secrets = bool(settings.headers) or any(tool.placements for tool in tools)
    host = origin_of(base_url)[1]
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    if base_url.startswith("http:") and sends_secrets and not is_local:
        warnings.append(f"credentials cross the network to {base_url} in plain text: use https")
    return Api(base_url, tuple(tools), tuple(left_out), tuple(warnings))


class _ToolMaker:
    """Makes tools of single operations."""

    def __init__(self, document: Document, settings: ApiSettings, base_url: str) -> None:
        self._document = document
        self._settings = settings
        self._base_url = base_url
        self._credentials = Credentials(document, settings.auth, settings.headers)
        self._budget = ReadBudget(MAX_STEPS)

    def make(self, found: FoundOperation) -> ApiTool:
        """Returns the tool of an operation.

        Raises:
            DocumentFault, SchemaFault, InvalidTool: it cannot be one.
        """
        owners = (found.content, found.shared, self._document.content)
        listed = [owner[key] for owner in owners for key in _LISTS if isinstance(owner.get(key), list)]
        self._budget.spend(STEPS_OF_A_PART * sum(map(len, listed)) + 1)
        placements = self._credentials.of_operation(found.content)
        base_url = self._base_url_of(found)
        operation = read_operation(self._document, found, self._budget)
        own = (each for each in operation.parameters if not self._credentials.is_secret(each.location, each.name))
        operation = replace(operation, parameters=tuple(own))
        schema = self._parameters(operation)
        parameters = dump_json(schema)
        self._budget.spend(len(parameters) // _CHARACTERS_OF_A_STEP)
        if len(parameters.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
            raise DocumentFault(f"the schema of its arguments has more than {MAX_SCHEMA_BYTES} bytes")
        normal_form(schema)  # raises where the bus would refuse the tool
        tool = Tool(
            name=found.name,
            description=_description(found),
            parameters_json=parameters,
            timeout_seconds=self._settings.timeout + 1,  # the request's own timeout says more
            annotations=_annotations(found.method),
            metadata_json=dump_json({"operation": found.title, **({"tags": found.tags} if found.tags else {})}),
            output_schema_json=self._output_schema(found) if self._settings.output_schemas else "",
        )
        return ApiTool(found.title, tool, operation, base_url, placements)

    def _base_url_of(self, found: FoundOperation) -> str:
        for owner in (found.content, found.shared):
            servers = list(servers_of(owner, self._document.url or f"{self._base_url}/"))
            own = next((url for url in servers if origin_of(url) == origin_of(self._base_url)), "")
            if own:
                return own.rstrip("/")
            if servers:
                raise DocumentFault(f"its requests go to {quote(servers[0], 200)}, and not to {self._base_url}")
        return self._base_url

    def _parameters(self, operation: Operation) -> dict[str, Any]:
        """Returns the JSON Schema of the arguments: one property for each parameter, and `body`."""
        reader = SchemaReader(self._document, self._budget)
        properties: dict[str, Any] = {}
        required = []
        for each in operation.parameters:
            schema = reader.read(each.schema)
            if each.description:
                schema["description"] = mark_unsafe(shorten(each.description, MAX_DESCRIPTION))
            properties[each.argument] = schema
            if each.required:
                required.append(each.argument)
        if (body := operation.body) is not None:
            properties[body.argument] = self._body(body, reader)
            if body.required:
                required.append(body.argument)
        schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        if definitions := reader.definitions():
            schema["$defs"] = definitions
        return schema

    def _body(self, body: Body, reader: SchemaReader) -> dict[str, Any]:
        if body.kind in (TEXT, BYTES):
            schema: dict[str, Any] = {"type": "string"} if body.kind == TEXT else dict(_FILE)
        else:
            schema = reader.read(body.schema)
        if body.kind == MULTIPART:
            given = self._document.resolve(body.schema)
            named = given.get("properties") if isinstance(given, Mapping) else None
            for name, each in named.items() if isinstance(named, Mapping) else ():
                if self._is_file(each) or (name in body.files and is_value(self._document.resolve(each))):
                    schema["properties"][name] = _FILE
                elif isinstance(each, Mapping) and self._is_file(each.get("items")):
                    schema["properties"][name] = {"type": "array", "items": _FILE}
        if body.description and "description" not in schema:
            schema["description"] = mark_unsafe(shorten(body.description, MAX_DESCRIPTION))
        return schema

    def _is_file(self, schema: Any) -> bool:
        schema = self._document.resolve(schema)
        if not isinstance(schema, Mapping) or schema.get("readOnly") is True:
            return False
        media = str(schema.get("contentMediaType", ""))
        return schema.get("format") in _BINARY or (bool(media) and not media.endswith("json"))

    def _output_schema(self, found: FoundOperation) -> str:
        """Returns the JSON Schema of a successful response; "" without one, or where it cannot be read."""
        responses = found.content.get("responses")
        if not isinstance(responses, Mapping):
            return ""
        try:
            status = next(status for status in sorted(map(str, responses)) if status[:1] == "2")
            content = self._document.resolve_object(responses[status], "a response").get("content")
            media = next(each for name, each in (content or {}).items() if str(name).startswith("application/json"))
            reader = SchemaReader(self._document, self._budget, "writeOnly")
            schema = reader.read(media["schema"])
            definitions = reader.definitions()
            text = dump_json({**schema, **({"$defs": definitions} if definitions else {})})
        except (StopIteration, DocumentFault, KeyError, TypeError, AttributeError, RecursionError):
            return ""
        return text if len(text.encode("utf-8", "replace")) <= MAX_SCHEMA_BYTES else ""


def _description(found: FoundOperation) -> str:
    summary, description = (text_of(found.content, key) for key in ("summary", "description"))
    parts = [summary, "" if summary and description.startswith(summary) else description]
    if found.content.get("deprecated") is True:
        parts.insert(0, "Deprecated.")
    return mark_unsafe(shorten("\n".join(part for part in parts if part), MAX_DESCRIPTION)) or found.title


def _annotations(method: str) -> Annotations:
    """Returns the properties of a method by RFC 9110: whether it is safe, and whether it is idempotent."""
    reads = method in SAFE_METHODS
    return Annotations(
        read_only=reads,
        idempotent=reads or method in ("PUT", "DELETE"),
        destructive=method == "DELETE" if method in ("DELETE", *SAFE_METHODS) else None,
        open_world=True,
    )
