"""Requests as arguments become them: every way of writing a value, and what no argument may change."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.openapi import ApiSettings, read_api, read_document
from toolbus.parts.openapi.api_request import ApiRequest, ArgumentFault, build_request

HERE = "http://127.0.0.1:9/v1"
SCALAR, LIST, OBJECT = "a/b &", ["a", "b c"], {"k": 1, "l": "m,n"}


def request_of(
    parameter: dict[str, Any], value: Any, path: str = "/x", *, slashes: bool = False, **rest: Any
) -> ApiRequest:
    listed = [{"name": "p", **parameter}] if parameter else []
    content = {"openapi": "3.1.0", "paths": {path: {"post": {"parameters": listed, **rest}}}}
    (tool,) = read_api(read_document(content), ApiSettings(base_url=HERE, allow="*")).tools
    return build_request(tool.operation, {"body" if "requestBody" in rest else "p": value}, slashes=slashes)


@pytest.mark.parametrize(
    ("style", "explode", "value", "query"),
    [
        (None, None, SCALAR, "p=a%2Fb%20%26"),
        ("form", True, LIST, "p=a&p=b%20c"),
        ("form", False, LIST, "p=a,b%20c"),
        ("form", True, OBJECT, "k=1&l=m%2Cn"),
        ("form", False, OBJECT, "p=k,1,l,m%2Cn"),
        ("spaceDelimited", False, LIST, "p=a%20b%20c"),
        ("pipeDelimited", False, LIST, "p=a%7Cb%20c"),
        ("spaceDelimited", True, LIST, "p=a&p=b%20c"),
        ("deepObject", True, {"a": 1, "b": {"c": [True]}, "d": None}, "p%5Ba%5D=1&p%5Bb%5D%5Bc%5D=true"),
        ("form", True, [], ""),
        ("form", False, [], ""),
        ("form", None, 3.0, "p=3"),
        ("form", None, 0.5, "p=0.5"),
        ("form", None, False, "p=false"),
        ("form", None, "ü\ud800", "p=%C3%BC%3F"),
    ],
)  # fmt: skip
def test_a_value_of_the_query_is_written_as_its_style_says(style: Any, explode: Any, value: Any, query: str) -> None:
    stated = {"style": style, "explode": explode}
    parameter = {"in": "query", **{key: each for key, each in stated.items() if each is not None}}
    path = request_of(parameter, value).path
    assert path == (f"/x?{query}" if query else "/x")


@pytest.mark.parametrize(
    ("style", "explode", "value", "path"),
    [
        ("simple", False, "a b?#ä", "/x/a%20b%3F%23%C3%A4/y"),
        ("simple", False, LIST, "/x/a,b%20c/y"),
        ("simple", False, OBJECT, "/x/k,1,l,m%2Cn/y"),
        ("simple", True, OBJECT, "/x/k=1,l=m%2Cn/y"),
        ("label", False, LIST, "/x/.a,b%20c/y"),
        ("label", True, LIST, "/x/.a.b%20c/y"),
        ("matrix", False, 5, "/x/;p=5/y"),
        ("matrix", False, LIST, "/x/;p=a,b%20c/y"),
        ("matrix", True, LIST, "/x/;p=a;p=b%20c/y"),
        ("matrix", True, OBJECT, "/x/;k=1;l=m%2Cn/y"),
        ("simple", False, "%2e%2e", "/x/%252e%252e/y"),
        ("simple", False, "{p}", "/x/%7Bp%7D/y"),
    ],
)
def test_a_value_of_the_path_is_written_as_its_style_says(style: str, explode: bool, value: Any, path: str) -> None:
    assert request_of({"in": "path", "style": style, "explode": explode}, value, "/x/{p}/y").path == path


@pytest.mark.parametrize("value", ["a/b", "a\\b", "..", ".", "", "a\nb", ["a", ".."], {"a/b": 1}, ["/"], [""], [], {}])
def test_a_value_that_is_more_than_one_step_of_the_path_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentFault, match="'p'"):
        request_of({"in": "path"}, value, "/x/{p}")


def test_slashes_can_be_allowed_but_no_steps_upwards() -> None:
    assert request_of({"in": "path"}, "group/project", "/x/{p}", slashes=True).path == "/x/group%2Fproject"
    for value in ("../x", "a/..", "a/./b", "a\\..\\b", "/a", "a//b", "a/"):
        with pytest.raises(ArgumentFault):
            request_of({"in": "path"}, value, "/x/{p}", slashes=True)


def test_pieces_do_not_become_a_step_upwards_either() -> None:
    content = {"openapi": "3.1.0", "paths": {"/x/{a}{b}/.{c}": {"get": {}}}}
    (tool,) = read_api(read_document(content), ApiSettings(base_url=HERE)).tools
    assert build_request(tool.operation, {"a": "1", "b": "2", "c": "3"}).path == "/x/12/.3"
    refused: list[Any] = [".", [], ""]
    for last in refused:
        with pytest.raises(ArgumentFault):
            build_request(tool.operation, {"a": "1", "b": "2", "c": last})


@given(st.text(max_size=12), st.booleans())
def test_no_text_leaves_its_step_of_the_path(value: str, slashes: bool) -> None:
    try:
        path = request_of({"in": "path"}, value, "/x/{p}/y", slashes=slashes).path
    except ArgumentFault:
        return
    url = urlsplit(f"https://h.example{path}")
    assert (url.netloc, url.query, url.fragment) == ("h.example", "", "")
    before, step, after = url.path.removeprefix("/").split("/")
    assert (before, after) == ("x", "y")
    assert slashes or "/" not in unquote(step)
    assert not {".", ".."} & {*unquote(step).split("/")}


@pytest.mark.parametrize(
    ("value", "header"),
    [("t", "t"), (["a", "b"], "a,b"), ({"k": 1}, "k,1"), (7, "7")],
)
def test_a_header_is_written_as_a_list_with_commas(value: Any, header: str) -> None:
    assert request_of({"in": "header", "name": "p"}, value).headers == (("p", header),)


@pytest.mark.parametrize("value", ["a\r\nX-Admin: 1", "a\nb", "\x00", "ä", ["a", "\n"]])
def test_no_value_of_a_header_adds_a_line(value: Any) -> None:
    with pytest.raises(ArgumentFault, match="printable ASCII"):
        request_of({"in": "header", "name": "p"}, value)


def test_a_cookie_cannot_add_another_one() -> None:
    assert request_of({"in": "cookie"}, "a; admin=1\r\n").headers == (("Cookie", "p=a%3B%20admin%3D1%0D%0A"),)
    assert request_of({"in": "cookie"}, {"a=1; admin": "1"}).headers == (("Cookie", "a%3D1%3B%20admin=1"),)


def test_a_parameter_with_content_is_written_as_json() -> None:
    content = {"application/json": {"schema": {"type": "object"}}}
    assert request_of({"in": "query", "content": content}, {"a": [1]}).path == "/x?p=%7B%22a%22%3A%5B1%5D%7D"
    assert request_of({"in": "path", "content": content}, {"a": [1]}, "/{p}").path == "/%7B%22a%22%3A%5B1%5D%7D"
    assert request_of({"in": "header", "content": content}, {"a": [1]}).headers == (("p", '{"a":[1]}'),)


@pytest.mark.parametrize(
    ("media", "value", "content", "sent"),
    [
        ("application/json", {"a": None}, b'{"a":null}', "application/json"),
        ("application/json", None, b"null", "application/json"),
        ("application/merge-patch+json; v=1", [1], b"[1]", "application/merge-patch+json; v=1"),
        ("*/*", "x", b'"x"', "application/json"),
        ("application/x-www-form-urlencoded", {"a": "1&b=2", "c": ["x", True], "d": None}, b"a=1%26b%3D2&c=x&c=true",
         "application/x-www-form-urlencoded"),
        ("text/csv", "a,ü", "a,ü".encode(), "text/csv"),
        ("application/octet-stream", {"base64": "AAE="}, b"\x00\x01", "application/octet-stream"),
        ("image/png", {"base64": "AAE="}, b"\x00\x01", "image/png"),
        ("application/x-ndjson", {"text": "{}"}, b"{}", "application/x-ndjson"),
    ],
)  # fmt: skip
def test_a_body_is_written_as_its_type_says(media: str, value: Any, content: bytes, sent: str) -> None:
    request = request_of({}, value, requestBody={"content": {"application/xml": {}, media: {}}})
    assert (request.content, request.headers) == (content, (("Content-Type", sent),))


def test_a_form_writes_its_fields_as_the_document_says() -> None:
    encoding = {
        "deep": {"style": "deepObject"},
        "joined": {"explode": False},
        "odd": {"style": "x"},
        "type": {"contentType": "x"},
    }
    form = {"application/x-www-form-urlencoded": {"encoding": encoding}}
    value = {"deep": {"a": {"b": 1}}, "joined": ["x", "y"], "odd": ["x", "y"], "type": {"k": 1}}
    request = request_of({}, value, requestBody={"content": form})
    assert request.content == b"deep%5Ba%5D%5Bb%5D=1&joined=x,y&odd=x&odd=y&type=%7B%22k%22%3A1%7D"


def test_a_form_with_files_has_parts() -> None:
    value = {"file": {"filename": "a.txt", "text": "hi"}, "n": [1, 2], "none": None}
    request = request_of({}, value, requestBody={"content": {"multipart/form-data": {}}})
    assert request.parts == (("file", ("a.txt", b"hi")), ("n", (None, b"1")), ("n", (None, b"2")))


def test_parts_of_a_form_have_the_types_of_the_document_and_objects_are_json() -> None:
    encoding = {
        "logo": {"contentType": "image/png"},
        "photo": {"contentType": "image/png, image/jpeg"},
        "any": {"contentType": "image/*"},
        "meta": {"contentType": "application/vnd.x+json; v=1"},
        "bad": {"contentType": "a/b\r\nX: 1"},
    }
    file = {"base64": "AAE="}
    value = {"logo": file, "photo": file, "any": file, "meta": "{}", "bad": "x", "plain": {"a": 1}, "list": [{"b": 2}]}
    request = request_of({}, value, requestBody={"content": {"multipart/form-data": {"encoding": encoding}}})
    assert request.parts == (
        ("logo", ("logo", b"\x00\x01", "image/png")),
        ("photo", ("photo", b"\x00\x01")),
        ("any", ("any", b"\x00\x01")),
        ("meta", (None, b"{}", "application/vnd.x+json")),
        ("bad", (None, b"x")),
        ("plain", (None, b'{"a":1}', "application/json")),
        ("list", (None, b'{"b":2}', "application/json")),
    )


@pytest.mark.parametrize(
    ("media", "value", "text"),
    [
        ("application/x-www-form-urlencoded", "a=1", "must be an object"),
        ("application/octet-stream", {"text": "a", "base64": "AA=="}, "give an object with text or base64"),
        ("application/octet-stream", {"base64": "*"}, "cannot be decoded"),
    ],
)
def test_a_body_that_cannot_be_sent_says_what_to_give(media: str, value: Any, text: str) -> None:
    with pytest.raises(ArgumentFault, match=text):
        request_of({}, value, requestBody={"content": {media: {}}})


def test_missing_and_unknown_arguments_are_refused() -> None:
    operation = {"requestBody": {"required": True, "content": {"text/plain": {}}}}
    content = {"openapi": "3.1.0", "paths": {"/x/{p}": {"post": operation}}}
    (tool,) = read_api(read_document(content), ApiSettings(base_url=HERE, allow="*")).tools
    refused: list[tuple[dict[str, Any], str]] = [
        ({"body": "x"}, "'p' is missing"),
        ({"p": 1}, "'body' is missing"),
        ({"q": 1}, "unknown argument 'q'"),
    ]
    for arguments, text in refused:
        with pytest.raises(ArgumentFault, match=text):
            build_request(tool.operation, arguments)
