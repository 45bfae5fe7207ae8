"""Finds the operations of a document, names them, and reads what each takes: parameters and a body.

`find_operations` looks at every operation and reads nothing deeper, so that names do not depend on what is offered;
`read_operation` reads one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from toolbus.common.text import quote
from toolbus.errors import SetupError
from toolbus.parts.openapi.document import (
    STEPS_OF_A_PART,
    Document,
    DocumentFault,
    JsonObject,
    ReadBudget,
    shown,
    text_of,
)
from toolbus.protocol.tool import MAX_NAME

JSON, FORM, MULTIPART, TEXT, BYTES = "json", "form", "multipart", "text", "bytes"
QUERY_STYLES = ("form", "spaceDelimited", "pipeDelimited", "deepObject")


@dataclass(frozen=True, slots=True)
class Body:
    """The body of an operation.

    Attributes:
        argument: its name as an argument of the tool.
        kind: how it is written: `JSON`, `FORM`, `MULTIPART`, `TEXT` or `BYTES`.
        media_type: its Content-Type.
        schema: as the document has it.
        styles: how fields of a form are written, style and explode by name, where the document says it.
        types: media types of the parts of a form by name, where the document says it.
    """

    argument: str
    kind: str
    media_type: str
    required: bool
    description: str = ""
    schema: Any = field(default=True, repr=False)
    styles: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        """The parts whose types say that they are bytes."""
        return {name for name, types in self.types.items() if types and not any(map(_TEXTUAL.fullmatch, types))}


def read_body(document: Document, operation: JsonObject, budget: ReadBudget) -> Body | None:
    """Reads the body of an operation, in the first of the media types that can be written here; None where it has none.

    Args:
        budget: of the whole document.

    Raises:
        DocumentFault: it cannot be sent.
    """
    if "requestBody" not in operation:
        return None
    content = document.resolve_object(operation["requestBody"], "its body")
    medias = content.get("content")
    if not isinstance(medias, Mapping) or not medias:
        return None
    budget.spend(STEPS_OF_A_PART * len(medias))
    kinds = [(_kind_of_body(str(media)), str(media), described) for media, described in medias.items()]
    for preferred in (JSON, FORM, MULTIPART, TEXT, BYTES):
        for kind, media, described in kinds:
            if kind == preferred and (kind != BYTES or _is_raw(document, media, described)):
                return Body(
                    argument="body",
                    kind=kind,
                    media_type="application/json" if "*" in media else media,
                    required=content.get("required") is True,
                    description=text_of(content, "description"),
                    schema=described.get("schema", True) if isinstance(described, Mapping) else True,
                    styles=_styles_of_form(described) if kind == FORM else {},
                    types=_types_of_parts(described) if kind == MULTIPART else {},
                )
    names = ", ".join(quote(media) for _, media, _ in kinds[:5])
    raise DocumentFault(f"its body is of type {names}; JSON, forms, text and bytes can be sent")


def _styles_of_form(described: Any) -> dict[str, tuple[str, bool]]:
    """Returns style and explode of the fields that the media type's `encoding` names."""
    encoding = described.get("encoding") if isinstance(described, Mapping) else None
    styles = {}
    for name, each in encoding.items() if isinstance(encoding, Mapping) else ():
        style = each.get("style", "form") if isinstance(each, Mapping) and {"style", "explode"} & each.keys() else None
        if style in QUERY_STYLES:
            explode = each.get("explode")
            styles[str(name)] = (style, explode if isinstance(explode, bool) else style in ("form", "deepObject"))
    return styles


def _types_of_parts(described: Any) -> dict[str, tuple[str, ...]]:
    encoding = described.get("encoding") if isinstance(described, Mapping) else None
    return {
        str(name): tuple(filter(_MEDIA_TYPE.fullmatch, _listed(str(each["contentType"])[:_MAX_TYPES])))
        for name, each in (encoding.items() if isinstance(encoding, Mapping) else ())
        if isinstance(each, Mapping) and "contentType" in each
    }


def _listed(types: str) -> Iterator[str]:
    return (each.partition(";")[0].strip().lower() for each in types.split(","))


_MAX_TYPES = 1000  # characters of a list of media types
_TEXTUAL = re.compile(r"text/.*|application/(?:.*\+)?(?:json|xml)")
_MEDIA_TYPE = re.compile(r"[\w!#$&^.+*-]+/[\w!#$&^.+*-]+", re.ASCII)


def _kind_of_body(media: str) -> str:
    plain = media.partition(";")[0].strip().lower()
    if is_json(plain) or plain in ("*/*", "application/*"):
        return JSON
    if plain.startswith("text/"):
        return TEXT
    kinds = {"application/x-www-form-urlencoded": FORM, "multipart/form-data": MULTIPART}
    return kinds.get(plain, "" if _UNWRITABLE.fullmatch(plain) else BYTES)


# XML, of which a schema says only half; several parts; ranges, and what is not a type.
_UNWRITABLE = re.compile(r"application/(?:.*\+)?xml|multipart/.*|.*\*.*|[^/]*")


def _is_raw(document: Document, media: str, described: Any) -> bool:
    """Tells whether a body of another type is one value: a file, or a text in its own format."""
    if media.partition(";")[0].strip().lower() == "application/octet-stream":
        return True
    return not isinstance(described, Mapping) or is_value(document.resolve(described.get("schema", {})))


def is_value(schema: Any) -> bool:
    """Tells whether a schema, resolved, says no more of a content than that it is one text or file."""
    return schema in ({}, True) or (isinstance(schema, Mapping) and schema.get("type") == "string")


def is_json(media: str) -> bool:
    """Tells whether a media type is JSON."""
    plain = media.partition(";")[0].strip().lower()
    return plain == "application/json" or plain.endswith("+json")


METHODS = ("get", "head", "post", "put", "patch", "delete")  # OPTIONS and TRACE tell a model nothing
SAFE_METHODS = frozenset(("GET", "HEAD"))  # they change nothing (RFC 9110, 9.2.1)
LOCATIONS = ("path", "query", "header", "cookie")
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", re.ASCII)

MAX_OPERATIONS = 50_000  # of a document; a path that is a reference has all operations of what it names

_DIGEST = 8  # characters that tell names apart
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)
_PLACEHOLDER = re.compile(r"\{([^{}/]+)\}")
# Headers that say how a message is sent, who sends it or that it means another method: OpenAPI ignores the first three,
# no argument sets the rest.
_NOT_ARGUMENTS = frozenset(
    (
        *("accept", "content-type", "authorization", "cookie", "host", "content-length", "transfer-encoding"),
        *("connection", "upgrade", "te", "trailer", "expect", "keep-alive", "proxy-authorization", "proxy-connection"),
        *("accept-encoding", "x-http-method-override", "x-http-method", "x-method-override"),
    )
)
_STYLES = {"path": ("simple", "label", "matrix"), "query": QUERY_STYLES, "header": ("simple",), "cookie": ("form",)}


@dataclass(frozen=True, slots=True)
class FoundOperation:
    """An operation as it stands in the document.

    Attributes:
        name: of its tool, unique in the document.
        shared: the parameters and servers of its path.
    """

    method: str
    path: str
    name: str
    id: str
    content: JsonObject = field(repr=False)
    shared: JsonObject = field(repr=False)

    @property
    def title(self) -> str:
        """Method and path, as patterns and messages have them."""
        return f"{self.method} {self.path}"

    @property
    def tags(self) -> tuple[str, ...]:
        """The groups that the document puts it in."""
        tags = self.content.get("tags")
        return tuple(tag for tag in tags if isinstance(tag, str)) if isinstance(tags, list) else ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operation.

    Attributes:
        argument: its name as an argument of the tool.
        name: its name in the request.
        location: `path`, `query`, `header` or `cookie`.
        style, explode: how lists and objects are written.
        as_json: whether its value is written as JSON.
        schema: as the document has it.
    """

    argument: str
    name: str
    location: str
    style: str
    explode: bool
    required: bool = False
    as_json: bool = False
    description: str = ""
    schema: Any = field(default=True, repr=False)


@dataclass(frozen=True, slots=True)
class Operation:
    """The parts of a request of one operation."""

    method: str
    path: str
    parameters: tuple[Parameter, ...]
    body: Body | None


def find_operations(document: Document, prefix: str = "") -> list[FoundOperation]:
    """Returns all operations of a document, in its order; what is not an operation is passed over.

    Args:
        prefix: begins the name of each tool.

    Raises:
        SetupError: there are too many.
    """
    found: list[FoundOperation] = []
    taken: set[str] = set()
    for path, method, content, shared in _operations(document):
        if len(found) == MAX_OPERATIONS:
            raise SetupError(f"{document.name} has more than {MAX_OPERATIONS} operations: shorten it")
        operation_id = content.get("operationId")
        given = operation_id if isinstance(operation_id, str) and operation_id.strip() else ""
        words = given or f"{method} {path.replace('{', '').replace('}', '')}"
        title = f"{method.upper()} {path}"
        name = _tool_name(prefix + words, title, taken)
        taken.add(name)
        found.append(FoundOperation(method.upper(), path, name, given, content, shared))
    return found


def _operations(document: Document) -> Iterator[tuple[str, str, JsonObject, JsonObject]]:
    for path, item in document.content.get("paths", {}).items():
        try:
            shared = document.resolve(item)
        except DocumentFault:
            continue  # see `unread_paths`
        if isinstance(shared, Mapping):
            for method in METHODS:
                if isinstance(content := shared.get(method), Mapping):
                    yield path, method, content, shared


def unread_paths(document: Document) -> Iterator[tuple[str, str]]:
    """Yields each path whose operations cannot be found, and why: most often they are in another file."""
    for path, item in document.content.get("paths", {}).items():
        try:
            document.resolve(item)
        except DocumentFault as fault:
            yield path, str(fault)


def _tool_name(words: str, title: str, taken: Iterable[str]) -> str:
    """Returns a name for a tool; one that is too long or taken ends in a digest of what it stands for."""
    name = _UNFIT.sub("_", words).strip("_.-") or "operation"
    if len(name) <= MAX_NAME and name not in taken:
        return name
    for round_ in range(100):  # only a document made for it gets beyond the first
        digest = hashlib.sha256(f"{title} {words} {round_ or ''}".encode("utf-8", "replace")).hexdigest()[:_DIGEST]
        name = f"{name[: MAX_NAME - _DIGEST - 1]}_{digest}"
        if name not in taken:
            break
    return name


def read_operation(document: Document, found: FoundOperation, budget: ReadBudget) -> Operation:
    """Reads what an operation takes.

    Args:
        budget: of the whole document.

    Raises:
        DocumentFault: it cannot be called from here; the text says why.
    """
    steps = [unquote(step) for step in found.path.split("/")]
    if steps[0] or {".", ".."} & {*steps} or re.search(r"[?#\\\s\x00-\x1f\x7f]", found.path):
        raise DocumentFault(f"its path {quote(found.path)} is not a plain path that begins with /")
    arguments: set[str] = set()
    body = None if found.method in SAFE_METHODS else read_body(document, found.content, budget)
    if body is not None:
        arguments.add(body.argument)
    placeholders = dict.fromkeys(_PLACEHOLDER.findall(found.path))
    parameters = []
    for content in _merged(document, found, budget):
        parameter = _parameter(content, arguments)
        if parameter is None or (parameter.location == "path" and parameter.name not in placeholders):
            continue
        if parameter.location == "path":
            del placeholders[parameter.name]
        arguments.add(parameter.argument)
        parameters.append(parameter)
    for name in placeholders:  # in the path, and not described
        argument = _argument(name, "path", arguments)
        arguments.add(argument)
        parameters.append(Parameter(argument, name, "path", "simple", False, True, schema={"type": "string"}))
    return Operation(found.method, found.path, tuple(parameters), body)


def _merged(document: Document, found: FoundOperation, budget: ReadBudget) -> list[JsonObject]:
    """Returns the parameters of an operation and its path; its own replace those of the path."""
    merged: dict[tuple[str, str], JsonObject] = {}
    for owner in (found.shared, found.content):
        listed = owner.get("parameters", [])
        if not isinstance(listed, list):
            raise DocumentFault("its parameters are not a list")
        budget.spend(STEPS_OF_A_PART * len(listed))
        for each in listed:
            content = document.resolve_object(each, "a parameter")
            name, location = content.get("name"), content.get("in")
            if not isinstance(name, str) or not name or location not in LOCATIONS:
                raise DocumentFault(f"a parameter has the name {shown(name)} and stands in {shown(location)}")
            merged[location, name] = content
    return list(merged.values())


def _parameter(content: JsonObject, taken: set[str]) -> Parameter | None:
    """Reads one parameter; None for one that no argument may set."""
    name, location = content["name"], content["in"]
    required = content.get("required") is True or location == "path"
    if location == "header" and name.lower() in _NOT_ARGUMENTS:
        return None
    if location in ("header", "cookie") and not HEADER_NAME.fullmatch(name):
        raise DocumentFault(f"the name of its {location} parameter {quote(name)} cannot be sent")
    style = content.get("style", _STYLES[location][0])
    if style not in _STYLES[location]:
        raise DocumentFault(
            f"its parameter {quote(name)} has the style {shown(style)}, which a {location} parameter cannot have"
        )
    explode = content.get("explode")
    media, schema = _parameter_schema(content)
    return Parameter(
        argument=_argument(name, location, taken),
        name=name,
        location=location,
        style=style,
        explode=explode if isinstance(explode, bool) else style in ("form", "deepObject"),
        required=required,
        as_json=is_json(media),
        description=text_of(content, "description"),
        schema=schema,
    )


def _parameter_schema(content: JsonObject) -> tuple[str, Any]:
    medias = content.get("content")
    if isinstance(medias, Mapping) and medias:
        media, described = next(iter(medias.items()))
        return str(media), described.get("schema", True) if isinstance(described, Mapping) else True
    return "", content.get("schema", True)


def _argument(name: str, location: str, taken: set[str]) -> str:
    """Returns a name that providers take as a property's; one that is taken says where it belongs."""
    plain = _UNFIT.sub("_", name).strip("_.-")[:MAX_NAME] or location
    if plain not in taken:
        return plain
    for number in ("", *(f"_{number}" for number in range(2, 100))):
        argument = f"{plain[: MAX_NAME - 10]}_{location}{number}"
        if argument not in taken:
            return argument
    raise DocumentFault(f"it has too many parameters called {quote(name)}")
