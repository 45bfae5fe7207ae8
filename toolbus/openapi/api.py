"""Turns the operations of a document into tools, or leaves them out with a reason.

Pure: nothing is sent. An operation that cannot be offered is left out by itself, and its neighbours stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from toolbus.errors import InvalidTool
from toolbus.limits import KIB
from toolbus.normal_schema import normal_form
from toolbus.openapi.api_schemas import SchemaReader
from toolbus.openapi.api_settings import ApiSettings, OperationFilter, base_url_of, origin_of, servers_of
from toolbus.openapi.credentials import Credentials, Placement
from toolbus.openapi.document import STEPS_OF_A_PART, Document, DocumentFault, ReadBudget, text_of
from toolbus.openapi.operations import (
    SAFE_METHODS,
    FoundOperation,
    Operation,
    find_operations,
    read_operation,
    unread_paths,
)  # fmt: skip
from toolbus.openapi.request_body import BYTES, MULTIPART, TEXT, Body
from toolbus.schema_grammar import SchemaFault
from toolbus.text import dump_json, mark_unsafe, quote, shorten
from toolbus.tool import Annotations, Tool

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
    if base_url.startswith("http:") and maker.sends_secrets(tools) and not _is_loopback(base_url):
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

    def sends_secrets(self, tools: list[ApiTool]) -> bool:
        return bool(self._settings.headers) or any(tool.placements for tool in tools)

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
                if self._is_file(each):
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


def _is_loopback(url: str) -> bool:
    host = origin_of(url)[1]
    return host in ("localhost", "::1") or host.startswith("127.")
