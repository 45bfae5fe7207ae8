"""Documents as tools: which operations are offered, as what, and which are left out and why. Nothing is sent."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolbus.bus.catalog.schema import compile_schema
from toolbus.common.text import dump_json
from toolbus.errors import SetupError
from toolbus.openapi import Api, ApiSettings, read_api, read_document
from toolbus.parts.openapi.api import SchemaReader
from toolbus.parts.openapi.document import MAX_BYTES, DocumentFault, ReadBudget
from toolbus.protocol.limits import Limits
from toolbus.protocol.tool import NAME

HERE = "http://127.0.0.1:9/v1"
PETSTORE: dict[str, Any] = {
    "openapi": "3.0.4",
    "info": {"title": "Swagger Petstore"},
    "servers": [{"url": "/api/v3"}],
    "paths": {
        "/pet": {
            "put": {
                "operationId": "updatePet",
                "summary": "Update a pet",
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/xml": {"schema": {"$ref": "#/components/schemas/Pet"}},
                        "application/json": {"schema": {"$ref": "#/components/schemas/Pet"}},
                    },
                },
            }
        },
        "/pet/{petId}": {
            "parameters": [
                {"name": "petId", "in": "path", "required": True, "schema": {"type": "integer", "format": "int64"}}
            ],
            "get": {"operationId": "getPetById", "tags": ["pet"], "deprecated": True, "description": "Returns a pet."},
            "delete": {
                "operationId": "deletePet",
                "parameters": [{"name": "api_key", "in": "header", "schema": {"type": "string"}}],
            },
        },
        "/store": {"get": {"tags": ["store"]}},
    },
    "components": {
        "schemas": {
            "Pet": {
                "type": "object",
                "required": ["name", "id"],
                "properties": {
                    "id": {"type": "integer", "readOnly": True},
                    "name": {"type": "string", "nullable": True, "example": "doggie", "xml": {"wrapped": True}},
                    "age": {"type": "integer", "minimum": 0, "exclusiveMinimum": True},
                    "status": {"type": "string", "nullable": True, "enum": ["sold", "free"]},
                    "parent": {"$ref": "#/components/schemas/Pet"},
                    "owner": {"nullable": True, "allOf": [{"$ref": "#/components/schemas/Owner"}]},
                },
            },
            "Owner": {
                "type": "object",
                "properties": {"pets": {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}}},
            },
        },
        "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "api_key"}},
    },
}  # fmt: skip


def api_of(content: dict[str, Any], **options: Any) -> Api:
    return read_api(read_document(content), ApiSettings(**{"base_url": HERE, **options}))


def one(operation: dict[str, Any], path: str = "/x", method: str = "get", **rest: Any) -> dict[str, Any]:
    return {"openapi": "3.1.0", "paths": {path: {method: operation}}, **rest}


def parameters_of(content: dict[str, Any], **options: Any) -> dict[str, Any]:
    (tool,) = api_of(content, allow="*", **options).tools
    compile_schema(tool.tool.parameters_json, Limits())  # as a bus reads it
    return tool.tool.parameters


def test_a_document_of_3_0_becomes_tools_with_json_schema() -> None:
    api = api_of(PETSTORE, allow="*")
    tools = {each.tool.name: each.tool for each in api.tools}
    assert list(tools) == ["updatePet", "getPetById", "deletePet", "get_store"]
    assert tools["getPetById"].description == "Deprecated.\nReturns a pet."
    assert tools["get_store"].description == "GET /store"
    assert tools["deletePet"].parameters["properties"] == {"petId": {"type": "integer", "format": "int64"}}
    schema = tools["updatePet"].parameters
    compile_schema(tools["updatePet"].parameters_json, Limits())
    body = schema["properties"]["body"]
    assert schema["required"] == ["body"]
    assert body["required"] == ["name"]
    assert body["properties"] == {
        "name": {"type": ["string", "null"], "examples": ["doggie"]},
        "age": {"type": "integer", "exclusiveMinimum": 0},
        "status": {"type": ["string", "null"], "enum": ["sold", "free", None]},
        "parent": {"$ref": "#/$defs/Pet"},
        "owner": {"anyOf": [{"allOf": [{"$ref": "#/$defs/Owner"}]}, {"type": "null"}]},
    }
    assert sorted(schema["$defs"]) == ["Owner", "Pet"]


def test_annotations_follow_the_method() -> None:
    tools = {each.tool.name: each.tool.annotations for each in api_of(PETSTORE, allow="*").tools}
    assert (tools["getPetById"].read_only, tools["getPetById"].destructive) == (True, False)
    assert (tools["updatePet"].read_only, tools["updatePet"].idempotent) == (False, True)
    assert (tools["deletePet"].idempotent, tools["deletePet"].destructive) == (True, True)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["getPetById", "get_store"]),
        ({"allow": "*", "deny": "delete*"}, ["updatePet", "getPetById", "get_store"]),
        ({"allow": ["GET /pet/*", "PUT /pet"]}, ["updatePet", "getPetById"]),
        ({"allow": "* /pet/{petId}"}, ["getPetById", "deletePet"]),
        ({"allow": "tag:store"}, ["get_store"]),
        ({"allow": "*", "max_tools": 2}, ["updatePet", "getPetById"]),
        ({"allow": "*", "deny": ["* *"]}, []),
    ],
)
def test_patterns_choose_operations(options: dict[str, Any], names: list[str]) -> None:
    api = api_of(PETSTORE, **options)
    assert [each.tool.name for each in api.tools] == names
    assert len(api.tools) + len(api.left_out) == 4
    assert all(each.reason for each in api.left_out)


def test_a_pattern_that_matches_nothing_is_a_warning() -> None:
    assert api_of(PETSTORE, allow=["getPetById", "getPets"], deny="x").warnings == (
        "no operation matches 'getPets': correct the pattern",
        "no operation matches 'x': correct the pattern",
    )


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        ({"parameters": [{"$ref": "https://other.example/x.json#/limit"}]}, "leads out of the document"),
        ({"parameters": [{"$ref": "#/components/parameters/none"}]}, "names nothing in the document"),
        ({"parameters": [{"$ref": "#/paths/~1bad/get/parameters/0"}]}, "more than 16 times"),
        ({"parameters": "none"}, "are not a list"),
        ({"parameters": [7]}, "it must be an object"),
        ({"parameters": [{"name": "x", "in": "body"}]}, "stands in 'body'"),
        ({"parameters": [{"name": "x", "in": "query", "style": "simple"}]}, "which a query parameter cannot have"),
        ({"parameters": [{"name": "x\ny", "in": "header"}]}, "cannot be sent"),
        ({"parameters": [{"name": "x", "in": "query", "schema": {"type": "strange"}}]}, "strange"),
        ({"parameters": [{"name": "x", "in": "query", "schema": "text"}]}, "a schema is"),
        ({"servers": [{"url": "https://other.example"}]}, "its requests go to 'https://other.example'"),
    ],
)
def test_a_bad_operation_is_left_out_and_its_neighbours_stay(operation: dict[str, Any], reason: str) -> None:
    api = api_of({"openapi": "3.1.0", "paths": {"/bad": {"get": operation}, "/good": {"get": {}}}})
    assert [each.tool.name for each in api.tools] == ["get_good"]
    (left_out,) = api.left_out
    assert reason in left_out.reason


@pytest.mark.parametrize("path", ["x", "/a/../b", "/%2e%2e/b", "/a?b", "/a#b", "/a b", "/./a"])
def test_a_path_that_is_not_plain_leaves_its_operation_out(path: str) -> None:
    assert "is not a plain path" in api_of(one({}, path)).left_out[0].reason


@pytest.mark.parametrize(
    "url",
    ["ftp://a.example", "a.example", "https://", "https://a.example:0", "https://[a", "https://u:s3cret@a.example",
     "https://a.example/?k=1", "https://a.example/#x", "https://a example", "https://a.example\\b"],
)  # fmt: skip
def test_a_base_url_is_a_plain_url_without_credentials(url: str) -> None:
    with pytest.raises(SetupError, match="base_url") as refused:
        ApiSettings(base_url=url)
    assert "s3cret" not in str(refused.value)


def test_sizes_are_bounded() -> None:
    with pytest.raises(SetupError, match="an OpenAPI document may have 33554432"):
        read_document(bytes(MAX_BYTES + 1))
    parameter = {"name": "x", "in": "query", "schema": {"description": "x" * 70_000}}
    assert "more than 65536 bytes" in api_of(one({"parameters": [parameter]})).left_out[0].reason
    reader = SchemaReader(read_document(one({})), ReadBudget(3))
    with pytest.raises(DocumentFault, match="allow fewer operations"):
        reader.read({"properties": {"a": {}, "b": {}, "c": {}}})


def test_a_path_in_another_file_is_named() -> None:
    api = api_of({"openapi": "3.1.0", "paths": {"/far": {"$ref": "far.yaml"}, "/near": {"get": {}}}})
    assert [each.tool.name for each in api.tools] == ["get_near"]
    assert [(each.title, "leads out of the document" in each.reason) for each in api.left_out] == [("/far", True)]


@pytest.mark.parametrize(
    ("media", "schema"),
    [
        ("application/xml", {}),
        ("image/*", {}),
        ("multipart/mixed", {}),
        ("application/yaml", {"type": "object"}),
        ("application/yaml", {"$ref": "#/components/schemas/Pet"}),
    ],
)
def test_a_body_that_cannot_be_written_leaves_its_operation_out(media: str, schema: Any) -> None:
    document = one({"requestBody": {"content": {media: {"schema": schema}}}}, method="post")
    document["components"] = {"schemas": {"Pet": {"properties": {}}}}
    api = api_of(document, allow="*")
    assert api.left_out[0].reason == (f"its body is of type '{media}'; JSON, forms, text and bytes can be sent")


def test_a_body_of_bytes_is_a_file_whatever_its_type() -> None:
    content = {"application/pdf": {"schema": {"$ref": "#/components/schemas/File"}}}
    document = one({"requestBody": {"content": content}}, method="post")
    document["components"] = {"schemas": {"File": {"type": "string", "format": "binary"}}}
    assert set(parameters_of(document)["properties"]["body"]["properties"]) == {"filename", "text", "base64"}


def test_a_part_of_a_form_is_a_file_where_only_its_media_type_says_so() -> None:
    parts: dict[str, Any] = {"image": {}, "scan": {"type": "string"}, "meta": {"type": "string"}, "other": {}}
    types = {"image": "image/png, image/jpeg", "scan": "application/pdf", "meta": "application/json"}
    encoding = {name: {"contentType": each} for name, each in types.items()}
    media = {"schema": {"type": "object", "properties": parts}, "encoding": encoding}
    document = one({"requestBody": {"content": {"multipart/form-data": media}}}, method="post")
    read = parameters_of(document)["properties"]["body"]["properties"]
    assert [name for name, schema in read.items() if "base64" in schema.get("properties", ())] == ["image", "scan"]


def test_parameters_of_one_name_are_told_apart_and_names_fit_every_provider() -> None:
    listed = [
        *({"name": "id", "in": place} for place in ("path", "query", "header", "cookie")),
        *({"name": name, "in": "query"} for name in ("filter[name]", "body", "body_query", "$", "x" * 90)),
    ]
    operation = {"parameters": listed, "requestBody": {"content": {"application/json": {}}}}
    names = list(parameters_of(one(operation, "/x/{id}", "post"))["properties"])
    assert names == [
        *("id", "id_query", "id_header", "id_cookie", "filter_name", "body_query", "body_query_query", "query"),
        *("x" * 64, "body"),
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) for name in names)


def test_headers_that_say_who_sends_are_no_arguments() -> None:
    names = ("Authorization", "Host", "accept", "Content-Type", "Cookie", "X-HTTP-Method-Override", "X-Mine")
    listed = [{"name": name, "in": "header", "required": True} for name in names]
    assert parameters_of(one({"parameters": listed}))["required"] == ["X-Mine"]


def test_names_are_unique_and_fit_and_do_not_depend_on_what_is_offered() -> None:
    paths = {f"/p{number}": {"get": {"operationId": "Größe " + "x" * 80}} for number in range(3)}
    content = {
        "openapi": "3.1.0",
        "paths": {**paths, "/q": {"get": {"operationId": "a/b"}, "post": {"operationId": "a b"}}},
    }
    names = {each.title: each.tool.name for each in api_of(content, allow="*", prefix="my-").tools}
    assert len(set(names.values())) == 5
    assert all(NAME.fullmatch(name) for name in names.values())
    assert names["GET /q"] == "my-a_b"
    alone = api_of(content, allow="* /q", deny="GET *", prefix="my-")
    assert alone.tools[0].tool.name == names["POST /q"] != names["GET /q"]


@pytest.mark.parametrize(
    ("schemes", "security", "auth", "placed"),
    [
        ({"a": {"type": "http", "scheme": "Bearer"}}, [{"a": []}], "s", [("header", "Authorization", "bearer")]),
        ({"a": {"type": "http", "scheme": "basic"}}, [{"a": []}], {"a": "u:p"}, [("header", "Authorization", "basic")]),
        ({"a": {"type": "oauth2"}}, [{}, {"a": ["x"]}], "s", [("header", "Authorization", "bearer")]),
        ({"a": {"type": "apiKey", "in": "cookie", "name": "k"}}, [{"a": []}], "s", [("cookie", "k", "")]),
        ({"a": {"type": "apiKey", "in": "query", "name": "k"}}, [], "s", []),
        ({}, None, "s", [("header", "Authorization", "bearer")]),
        ({"a": {"type": "http", "scheme": "bearer"}}, [{"a": []}, {}], None, []),
        ({"a": {"type": "oauth2"}}, [{"a": []}], {"a": None}, []),
    ],
)
def test_security_schemes_say_where_a_credential_goes(schemes: Any, security: Any, auth: Any, placed: Any) -> None:
    content = one({} if security is None else {"security": security}, components={"securitySchemes": schemes})
    (tool,) = api_of(content, auth=auth).tools
    assert [(each.location, each.name, each.kind) for each in tool.placements] == placed
    assert "'s'" not in repr(tool)


@pytest.mark.parametrize(
    ("schemes", "auth", "text"),
    [
        (
            {"a": {"type": "http", "scheme": "bearer"}, "b": {"type": "oauth2"}},
            "s",
            "say which one the credential is for",
        ),
        ({"a": {"type": "http", "scheme": "bearer"}}, {"b": "s"}, "auth names 'b'"),
        ({"a": {"type": "mutualTLS"}}, {"a": "s"}, "of a kind that is not supported"),
    ],
)
def test_a_credential_that_fits_no_scheme_is_refused(schemes: Any, auth: Any, text: str) -> None:
    with pytest.raises(SetupError, match=text):
        api_of(one({}, components={"securitySchemes": schemes}), auth=auth)


@pytest.mark.parametrize(
    ("url", "servers", "base"),
    [
        ("https://a.example/docs/openapi.json", None, "https://a.example"),
        ("https://a.example/docs/openapi.json", [{"url": "/v2/"}], "https://a.example/v2"),
        ("https://a.example/docs/openapi.json", [{"url": "../v1"}], "https://a.example/v1"),
        ("https://a.example/docs/openapi.json", [{"url": ""}], "https://a.example"),
        ("https://a.example/x", [{"url": "https://b.example"}, {"url": "https://A.example:443/v"}], "https://A.example:443/v"),
        ("https://a.example/x", [{"url": "//a.example/{v}", "variables": {"v": {"default": "v9"}}}], "https://a.example/v9"),
        ("https://a.example/x", [{"url": "http://a.example"}], None),
        ("https://a.example/x", [{"url": "https://169.254.169.254/latest"}], None),
        ("", [{"url": "https://b.example"}], None),
        ("", None, None),
        ("https://a.example/x", [{"url": "https://[b.example"}], "https://a.example"),
    ],
)  # fmt: skip
def test_requests_go_to_an_origin_that_the_operator_named(url: str, servers: Any, base: str | None) -> None:
    content = one({}, **({} if servers is None else {"servers": servers}))
    document = read_document(content, url or "pets.yaml", url)
    if base is None:
        with pytest.raises(SetupError, match="pass base_url="):
            read_api(document)
        assert read_api(document, ApiSettings(base_url="https://c.example/")).base_url == "https://c.example"
    else:
        assert read_api(document).base_url == base


def test_credentials_over_plain_http_are_a_warning() -> None:
    content = one({})
    assert api_of(content, auth="s").warnings == ()
    warned = api_of(content, auth="s", base_url="http://api.example").warnings
    assert warned == ("credentials cross the network to http://api.example in plain text: use https",)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"swagger": "2.0"}', "is Swagger 2.0, and only OpenAPI 3 is read: convert it"),
        ('{"openapi": "4.0.0"}', "openapi is '4.0.0', it must be 3.0, 3.1 or 3.2"),
        ('{"openapi": "3.0.0", "paths": []}', "paths is"),
        ("[]", "holds a list, not an object"),
        ("{", "is not JSON"),
        ("<!doctype html>", "is a page of HTML"),
        ("openapi: [", "is not YAML"),
        ("[" * 100_000, "nested too deep"),
        ("a: &a [*a, *a]\n", "repeats itself too often"),
        (
            "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)),
            "repeats itself too often",
        ),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)  # fmt: skip
def test_what_is_no_document_is_refused_with_the_fix(text: str | bytes, error: str) -> None:
    with pytest.raises(SetupError, match=re.escape(error)):
        read_document(text, "pets")


def test_yaml_is_read_as_json_would_have_it() -> None:
    text = """
openapi: 3.0.0
paths:
  /x:
    get:
      parameters:
        - {name: q, in: query, schema: {enum: [yes, no, 2020-01-01, true]}}
      responses: {200: {description: ok}}
"""
    document = read_document(text)
    assert document.content["paths"]["/x"]["get"]["responses"] == {"200": {"description": "ok"}}
    (tool,) = read_api(document, ApiSettings(base_url=HERE)).tools
    assert tool.tool.parameters["properties"]["q"] == {"enum": ["yes", "no", "2020-01-01", True]}


def test_a_file_in_a_form_is_an_object_of_text_or_base64() -> None:
    schema = {
        "type": "object",
        "properties": {
            "one": {"type": "string", "format": "binary"},
            "many": {"type": "array", "items": {"contentMediaType": "image/png"}},
            "note": {"type": "string"},
        },
    }
    content = one({"requestBody": {"content": {"multipart/form-data": {"schema": schema}}}}, method="post")
    body = parameters_of(content)["properties"]["body"]["properties"]
    assert list(body["one"]["properties"]) == ["filename", "text", "base64"]
    assert list(body["many"]["items"]["properties"]) == ["filename", "text", "base64"]
    assert body["note"] == {"type": "string"}


def test_the_schema_of_a_response_is_promised_only_where_that_is_wanted() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"writeOnly": True}}}
    content = one({"responses": {"200": {"content": {"application/json": {"schema": schema}}}}})
    assert api_of(content).tools[0].tool.output_schema is None
    promised = api_of(content, output_schemas=True).tools[0].tool
    assert promised.output_schema == {"type": "object", "properties": {"a": {"type": "string"}}}
    assert not promised.validate_output


def test_500_operations_are_read_in_little_time_and_the_rest_is_named() -> None:
    schemas = {
        f"S{n}": {"type": "object", "properties": {"next": {"$ref": f"#/components/schemas/S{(n + 1) % 60}"}}}
        for n in range(60)
    }
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/S0"}}}}
    paths = {f"/p{n}/{{id}}": {"post": {"operationId": f"op{n}", "requestBody": body}} for n in range(500)}
    begun = time.process_time()
    api = api_of({"openapi": "3.0.0", "paths": paths, "components": {"schemas": schemas}}, allow="*")
    assert time.process_time() - begun < 20
    assert len(api.tools) == 128
    assert api.left_out[0].reason == "max_tools is 128: name the needed operations in allow"
    assert len(api.tools[0].tool.parameters["$defs"]) == 60


@pytest.mark.parametrize("depth", [60, 5_000])
def test_a_schema_that_is_too_deep_leaves_its_operation_out(depth: int) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    content = one({"parameters": [{"name": "x", "in": "query", "schema": schema}]})
    if depth > 1_000:
        with pytest.raises(SetupError, match="nested too deep"):
            api_of(content)
    else:
        assert "nested deeper than 48 levels" in api_of(content).left_out[0].reason


# -- any document -----------------------------------------------------------------------------------------------------

_VOCABULARY = """
    $ref openapi paths get post parameters in name query path header cookie schema type object string array items
    properties required nullable allOf oneOf enum content application/json requestBody components schemas tags
    servers url variables operationId style explode form deepObject multipart/form-data format binary security
    #/components/schemas/A #/paths/~1a/get # /a /a/{b} A 3.0.0 responses 200 description
"""
_WORDS = st.sampled_from(_VOCABULARY.split())
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
    | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=5),
    max_leaves=25,
)
_PARAMETER = st.fixed_dictionaries(
    {"name": _WORDS, "in": st.sampled_from(["query", "path", "header", "cookie"])},
    optional={"schema": _JSON, "style": _WORDS, "required": st.booleans(), "content": _JSON, "$ref": _WORDS},
)
_OPERATION = st.fixed_dictionaries(
    {},
    optional={
        "parameters": st.lists(_PARAMETER, max_size=4) | _JSON,
        "requestBody": st.fixed_dictionaries({"content": st.dictionaries(_WORDS, _JSON, max_size=3)}) | _JSON,
        "operationId": _WORDS | _JSON,
        "security": _JSON, "servers": _JSON, "tags": _JSON, "responses": _JSON, "description": _JSON,
    },
)  # fmt: skip
_PATH = st.fixed_dictionaries({}, optional={"get": _OPERATION, "post": _OPERATION, "parameters": _JSON, "$ref": _WORDS})
_COMPONENTS = st.fixed_dictionaries(
    {"schemas": st.dictionaries(_WORDS, _JSON, max_size=4)}, optional={"securitySchemes": _JSON}
)
_DOCUMENT = st.fixed_dictionaries(
    {
        "openapi": st.sampled_from(["3.0.3", "3.1.0"]),
        "paths": st.dictionaries(st.sampled_from(["/a", "/a/{b}", "/{a}/{a}", "x", "/a?b"]), _PATH | _JSON, max_size=4),
    },
    optional={"components": _COMPONENTS | _JSON, "servers": _JSON, "security": _JSON, "info": _JSON},
)


@settings(max_examples=30, deadline=None)
@given(_DOCUMENT, st.booleans())
def test_no_document_makes_the_reader_raise_anything_but_its_own_error(content: Any, promise: bool) -> None:
    try:
        document = read_document(dump_json(content))
        api = read_api(document, ApiSettings(base_url=HERE, allow="*", output_schemas=promise))
    except SetupError:
        return
    names = [each.tool.name for each in api.tools]
    assert len(set(names)) == len(names)
    for each in api.tools:
        assert NAME.fullmatch(each.tool.name)
        json.loads(each.tool.parameters_json)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40) | _JSON.filter(lambda value: isinstance(value, dict)))
def test_no_bytes_make_the_reader_raise_anything_but_its_own_error(source: Any) -> None:
    try:
        read_document(source)
    except SetupError:
        pass
