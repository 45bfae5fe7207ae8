from __future__ import annotations

import asyncio
import base64
import codecs
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolbus.bus.catalog.argument_repair import RepairedArguments
from toolbus.bus.gateway.callback_messages import (
    NO_REASON,
    callback_body,
    decompress,
    envelope,
    read_response,
    written_arguments,
)
from toolbus.bus.gateway.json_response import write_json
from toolbus.errors import Code, Stage
from toolbus.functions.reply import Err, Reply, image, text
from toolbus.functions.runner import run_handler
from toolbus.functions.scope import ToolScope
from toolbus.functions.tool_spec import LlmToolMeta, spec_of
from toolbus.protocol.tool import CallError, Result
from toolbus.v1 import tool_pb2 as pb

BIG = 2**200 + 1
DEEP = 100_000


# -- compressed responses ----------------------------------------------------------------------------------------

TEXT = b'{"output": "fine"}' * 100
RAW = zlib.compressobj(wbits=-15)
COMPRESSED = {
    "gzip": gzip.compress(TEXT),
    "X-GZIP": gzip.compress(TEXT),
    "deflate": zlib.compress(TEXT),
    " deflate": RAW.compress(TEXT) + RAW.flush(),
    "identity": TEXT,
    "gzip, identity": gzip.compress(TEXT),
    "gzip,gzip": gzip.compress(gzip.compress(TEXT)),
    "gzip ": gzip.compress(TEXT[:700]) + gzip.compress(TEXT[700:]),
}


@pytest.mark.parametrize("encoding", COMPRESSED)
def test_a_compressed_body_is_inflated_up_to_the_limit_to_the_byte(encoding: str) -> None:
    assert decompress(COMPRESSED[encoding], encoding, len(TEXT)) == TEXT
    if encoding != "identity":
        assert decompress(COMPRESSED[encoding], encoding, len(TEXT) - 1) is None


def test_a_small_body_that_expands_without_end_takes_no_more_memory_than_the_limit() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    tracemalloc.start()
    try:
        assert decompress(bomb, "gzip", 10_000) is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "encoding", "words"),
    [
        (b"plain", "gzip", "is not the gzip that its Content-Encoding promises"),
        (gzip.compress(TEXT)[:-9], "gzip", "cut off"),
        (gzip.compress(TEXT) + b"more", "gzip", "is not the gzip"),
        (b"plain", "deflate", "is not the deflate"),
        (TEXT, "br", "'br'"),
        (TEXT, "zstd", "gzip or deflate"),
    ],
    ids=["not gzip", "cut off", "gzip and more", "not deflate", "brotli", "zstd"],
)
def test_a_body_that_cannot_be_inflated_is_an_error_that_says_why(body: bytes, encoding: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decompress(body, encoding, 10_000)


# -- the body of a callback (REST-40) ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_text", "arguments"),
    [
        ("", b"{}"),
        ("{}", b"{}"),
        (' { "b" : 1, "a" : [ 2.50, null, true ] } ', b'{"b":1,"a":[2.5,null,true]}'),
        ('{"x":5.0,"y":5}', b'{"x":5.0,"y":5}'),
        (f'{{"x":{BIG},"y":"猫"}}', f'{{"x":{BIG},"y":"猫"}}'.encode()),
        ('{"x":"\\u732b"}', '{"x":"猫"}'.encode()),
        ('{"x":"\\ud800"}', b'{"x":"\\ud800"}'),
        ("[1,2]", b'{"value":[1,2]}'),
        ('"text"', b'{"value":"text"}'),
        ("7", b'{"value":7}'),
        ("false", b'{"value":false}'),
        ("null", b'{"value":null}'),
        ("\u2003{}", b"{}"),
        ('\ufeff{"a":1}\u00a0\n', b'{"a":1}'),
        ("{", b'{"_raw":"{"}'),
        ("city=Paris", b'{"_raw":"city=Paris"}'),
        (" ", b'{"_raw":" "}'),
        ('{"x":NaN}', b'{"_raw":"{\\"x\\":NaN}"}'),
        ('{"x":-Infinity}', b'{"_raw":"{\\"x\\":-Infinity}"}'),
        ('{"x":1e999}', b'{"_raw":"{\\"x\\":1e999}"}'),
        ("{} {}", b'{"_raw":"{} {}"}'),
        ("猫", '{"_raw":"猫"}'.encode()),
        ("\ud800", b'{"_raw":"\\ud800"}'),
    ],
)
def test_arguments_are_handed_over_as_an_object(given_text: str, arguments: bytes) -> None:
    raw = json.loads(callback_body("t", given_text, "c"))["raw_arguments"]
    assert raw == given_text
    body = callback_body("猫 /x", given_text, "c1")
    begin, _, _ = body.partition(b',"call_id":')
    name = b"\\u732b /x" if b"\\ud800" in body else "猫 /x".encode()  # then all of the body is escaped
    assert begin == b'{"name":"' + name + b'","arguments":' + arguments


def test_a_body_has_its_four_keys_in_order() -> None:
    body = callback_body("get_weather", '{"city": "São Paulo"}', "call-1")
    assert (
        body
        == (
            '{"name":"get_weather","arguments":{"city":"São Paulo"},"call_id":"call-1",'
            '"raw_arguments":"{\\"city\\": \\"São Paulo\\"}"}'
        ).encode()
    )
    repaired = RepairedArguments.of('{"a":5}', '{"a":"5"}', ())
    body = json.loads(callback_body("t", repaired, "c"))
    assert (body["arguments"], body["raw_arguments"]) == ({"a": 5}, '{"a":"5"}')
    assert callback_body("t", "", "") == b'{"name":"t","arguments":{},"call_id":"","raw_arguments":""}'


@pytest.mark.parametrize(
    ("arguments", "raw", "expected"),
    [
        ({"_raw": "{bad"}, "{bad", "{bad"),
        ({"value": [1]}, " [1]", " [1]"),
        ({"value": 5}, "5", "5"),
        ({"_raw": "{bad"}, "", ""),
        ({"_raw": "x"}, '{"_raw":"x"}', ""),
        ({"value": 5}, '{"value":5}', ""),
        ({"value": 5}, "{bad", ""),
        ({"city": "Oslo"}, '{"city":"Oslo"}', ""),
        ({"value": 5}, None, ""),
    ],
)
def test_what_a_main_server_could_not_read_is_what_its_model_wrote(
    arguments: dict[str, Any], raw: Any, expected: str
) -> None:
    assert written_arguments(arguments, raw) == expected


@pytest.mark.parametrize("text", ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "1" * 5_000])
def test_arguments_that_cannot_be_parsed_are_passed_on_as_text(text: str) -> None:
    body = json.loads(callback_body("t", text, "c"))
    assert body["arguments"] == {"_raw": text}
    assert body["raw_arguments"] == text


TEXTS = st.text(st.characters(), max_size=20)  # lone surrogates included
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def _same(one: Any, other: Any) -> bool:
    """Compares JSON values with the kinds of their numbers."""
    return json.dumps(one) == json.dumps(other)


@given(TEXTS, st.dictionaries(TEXTS, JSON), st.booleans())
def test_any_object_arrives_as_it_was(name: str, arguments: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    body = json.loads(callback_body(name, text, "c"))
    assert _same(body, {"name": name, "arguments": arguments, "call_id": "c", "raw_arguments": text})


@given(TEXTS)
def test_a_body_is_written_for_any_text(text: str) -> None:
    body = json.loads(callback_body(text, text, text))
    assert list(body) == ["name", "arguments", "call_id", "raw_arguments"]
    assert isinstance(body["arguments"], dict)


# -- what a plugin answers (REST-42) -----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 299])
@pytest.mark.parametrize(
    ("body", "output_json"),
    [
        ('{"output":{"temp_c":22},"is_error":false}', '{"temp_c":22}'),
        ('{"output":null}', "null"),
        ('{"output":5.0}', "5.0"),
        (f'{{"output":[{BIG},5]}}', f"[{BIG},5]"),
        ('{"output":"猫","is_error":0}', '"猫"'),
        ('{"output":"\\ud800"}', '"\\ud800"'),
        ('{"output":1,"is_error":null,"error":"ignored"}', "1"),
        ('{"output":1,"error":"ignored"}', "1"),
        ('{"output":1,"is_error":""}', "1"),
        ('{"output":1,"is_error":[]}', "1"),
        ('{"temp_c": 22, "is_error": false}', '{"temp_c":22,"is_error":false}'),
        ('{"error":"no flag"}', '{"error":"no flag"}'),
        ("{}", "{}"),
        ("[1, 2]", "[1,2]"),
        ('"text"', '"text"'),
        ("5.0", "5.0"),
        (str(BIG), str(BIG)),
        ("null", "null"),
        ("true", "true"),
        ("", '""'),
        ("done", '"done"'),
        ("猫", '"猫"'),
        ('{"output":NaN}', '"{\\"output\\":NaN}"'),
        ("Infinity", '"Infinity"'),
        ("1e999", '"1e999"'),
        ("{'output': 1}", "\"{'output': 1}\""),
        (" ", '" "'),
    ],
)
def test_an_answer_becomes_the_output(status: int, body: str, output_json: str) -> None:
    assert read_response(status, body.encode(), "utf-8", "t") == pb.ToolResult(output_json=output_json)


def test_no_content_becomes_an_empty_text() -> None:
    assert read_response(204, b"", "", "t") == pb.ToolResult(output_json='""')


@pytest.mark.parametrize(
    ("body", "message", "reason", "output_json"),
    [
        ('{"output":null,"is_error":true,"error":"city not found"}', "city not found", "city not found", "null"),
        ('{"output":{"why":1},"is_error":true,"error":"NO_CITY"}', "NO_CITY", "NO_CITY", '{"why":1}'),
        ('{"output":1,"is_error":true}', "", "", "1"),
        ('{"output":1,"is_error":true,"error":null}', "", "", "1"),
        ('{"output":1,"is_error":true,"error":""}', "", "", "1"),
        ('{"output":1,"is_error":true,"error":{"code": 5.0}}', '{"code":5.0}', "", "1"),
        ('{"output":1,"is_error":true,"error":404}', "404", "", "1"),
        ('{"output":1,"is_error":true,"error":false}', "false", "", "1"),
        ('{"output":1,"is_error":"false","error":"x"}', "x", "x", "1"),
        ('{"output":1,"is_error":1,"error":"\\ud800"}', "?", "?", "1"),
        ('{"is_error":true,"error":"x"}', "x", "x", '{"is_error":true,"error":"x"}'),
        (f'{{"output":1,"is_error":true,"error":"{"e" * 128}"}}', "e" * 128, "e" * 128, "1"),
        (f'{{"output":1,"is_error":true,"error":"{"e" * 129}"}}', "e" * 129, "", "1"),
        (f'{{"output":1,"is_error":true,"error":"{"e" * 5000}"}}', "e" * 4095 + "…", "", "1"),
    ],
    ids=lambda value: value[:50],
)
def test_an_answer_with_is_error_keeps_error_and_output(body: str, message: str, reason: str, output_json: str) -> None:
    result = Result.from_wire(read_response(200, body.encode(), "utf-8", "t"))
    error = CallError(Code.TOOL, message, Stage.ACCEPTED, reason=reason)
    assert result == Result(output_json=output_json, is_error=True, error=error)


@pytest.mark.parametrize(
    ("body", "charset", "output_json"),
    [
        (codecs.BOM_UTF8 + b'{"output":1}', "", "1"),
        ('{"output":"猫"}'.encode("utf-16"), "", '"猫"'),
        ('{"output":1}'.encode("utf-16-le"), "utf-8", "1"),
        ('{"output":1}'.encode("utf-32-be"), "latin-1", "1"),
        ("olé".encode("latin-1"), "ISO-8859-1", '"olé"'),
        ("猫".encode("shift_jis"), "Shift_JIS", '"猫"'),
        ("猫".encode("gb18030"), "gb18030", '"猫"'),
        (b"ol\xe9", "utf-8", '"ol�"'),
        (b"ol\xe9", "", '"ol�"'),
        (b"ol\xe9", "no such charset", '"ol�"'),
        (b"ol\xe9", "iso-8859-99", '"ol�"'),
        (b"ol\xe9", "ascii", '"ol�"'),
        (b"egbpdaj6bu4bxfgehfvwxn", "punycode", '"egbpdaj6bu4bxfgehfvwxn"'),
        (b"\\d", "unicode_escape", '"\\\\d"'),
        (b"b2s=", "base64", '"b2s="'),
        (b"x", "utf-8\0", '"x"'),
    ],
)
def test_json_is_detected_and_text_is_decoded_by_its_charset(body: bytes, charset: str, output_json: str) -> None:
    assert read_response(200, body, charset, "t") == pb.ToolResult(output_json=output_json)


def _refused(status: int, body: bytes) -> str:
    result = Result.from_wire(read_response(status, body, "utf-8", "get_weather"))
    assert result.error is not None
    assert result == Result(
        is_error=True, error=CallError(Code.TOOL, result.error.message, Stage.ACCEPTED), output_json="null"
    )
    return result.error.message


@pytest.mark.parametrize(("status", "phrase"), [(301, "301 Moved Permanently"), (307, "307 Temporary Redirect")])
def test_a_redirect_is_an_error_that_says_it_is_not_followed(status: int, phrase: str) -> None:
    assert _refused(status, b'<a href="http://u:secret@127.0.0.1/">') == (
        f"the callback of get_weather answered HTTP {phrase}, and redirects are not followed: "
        "register the URL that it redirects to as callback_url"
    )


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"", "HTTP 404 Not Found"),
        (422, b'{"detail":"no"}', 'HTTP 422 Unprocessable Entity: {"detail":"no"}'),
        (500, b"x" * 300, "HTTP 500 Internal Server Error: " + "x" * 200),
        (500, b"\xff", "HTTP 500 Internal Server Error: �"),
        (503, b'{"output":1}', 'HTTP 503 Service Unavailable: {"output":1}'),
        (599, b"odd", "HTTP 599: odd"),
        (999, b"", "HTTP 999"),
        (100, b"", "HTTP 100 Continue"),
    ],
)
def test_an_error_status_is_an_error_with_the_beginning_of_its_text(status: int, body: bytes, message: str) -> None:
    told = _refused(status, body)
    assert told.replace("Content", "Entity") == message  # Python 3.13 has the newer phrase of 422


CHARSETS = st.sampled_from(["utf-8", "utf-16", "utf-32-le", "latin-1", "cp1252", "shift_jis", "iso-2022-jp", "cp999"])
BODIES = st.binary() | st.one_of(
    JSON, st.fixed_dictionaries({}, optional={"output": JSON, "is_error": JSON, "error": JSON})
).map(lambda value: json.dumps(value).encode())


@given(st.integers(100, 999) | st.just(200), BODIES, CHARSETS | st.text())
def test_any_answer_becomes_a_result_that_travels(status: int, body: bytes, charset: str) -> None:
    result = read_response(status, body, charset, "t")
    assert pb.ToolResult.FromString(result.SerializeToString()) == result
    json.loads(result.output_json)
    assert result.is_error == result.HasField("error")


@given(JSON)
def test_any_output_arrives_as_it_was(output: Any) -> None:
    result = read_response(200, json.dumps({"output": output}).encode(), "", "t")
    assert _same(json.loads(result.output_json), output)


@pytest.mark.parametrize("body", [b"[" * DEEP + b"]" * DEEP, b"1" * 5_000, b'{"output":' + b"1" * 5_000 + b"}"])
def test_an_answer_that_cannot_be_parsed_is_text(body: bytes) -> None:
    assert read_response(200, body, "", "t").output_json == json.dumps(body.decode())


# -- what the plugin host answers (REST-50) ----------------------------------------------------------------------


PNG, WEBP = b"\x89PNG\r\n\x1a\nrest", b"RIFF\x00\x00\x00\x00WEBPVP8 "


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize(
    ("image_of", "content"),
    [
        ({"data_b64": _b64(PNG), "mime": "image/png"}, (image(PNG, "image/png"),)),
        ({"data_b64": _b64(PNG)}, (image(PNG, "image/png"),)),
        ({"data_b64": _b64(b"\xff\xd8\xff\xe0"), "mime": ""}, (image(b"\xff\xd8\xff\xe0", "image/jpeg"),)),
        ({"data_b64": _b64(WEBP), "mime": None}, (image(WEBP, "image/webp"),)),
        ({"data_b64": _b64(b"GIF89a.")}, (image(b"GIF89a.", "image/gif"),)),
        ({"data_b64": f"data:image/bmp;base64,{_b64(b'??')}"}, (image(b"??", "image/bmp"),)),
        ({"data_b64": base64.encodebytes(PNG * 20).decode()}, (image(PNG * 20, "image/png"),)),
        ({"data_b64": _b64(PNG), "vision_prompt": "Look."}, (text("Look."), image(PNG, "image/png"))),
        ({"data_b64": 5}, (text("[image 1 is not base64]"),)),
    ],
)
def test_pictures_of_a_callback_are_content_and_go_on_to_a_main_server(
    image_of: dict[str, Any], content: tuple[pb.ContentBlock, ...], is_error: bool
) -> None:
    body = {"output": {"shot": 7}, "is_error": is_error, "error": "X" if is_error else None, "images": [image_of]}
    result = Result.from_wire(read_response(200, json.dumps(body).encode(), "utf-8", "shoot"))
    assert (result.output, result.content, result.is_error) == ({"shot": 7}, content, is_error)
    sent = envelope(result)
    again = Result.from_wire(read_response(200, write_json(sent), "utf-8", "shoot"))
    assert again.output == {"shot": 7}
    assert [each for each in again.content if each.HasField("image")] == [
        each for each in content if each.HasField("image")
    ]


@pytest.mark.parametrize("images", [["a.png"], {"data_b64": "cG5n"}, None, [{"url": "x"}], []])
def test_images_of_another_form_are_left_to_the_output(images: Any) -> None:
    body = json.dumps({"output": 1, "images": images}).encode()
    result = read_response(200, body, "utf-8", "shoot")
    assert (result.output_json, list(result.content), result.is_error) == ("1", [], False)


def _failed(code: Code, message: str, reason: str = "", output_json: str = "null") -> Result:
    return Result("c", output_json, is_error=True, error=CallError(code, message, Stage.ACCEPTED, reason=reason))


def _words(*texts: str) -> tuple[pb.ContentBlock, ...]:
    return tuple(pb.ContentBlock(text=pb.TextContent(text=text)) for text in texts)


IMAGE = pb.ContentBlock(image=pb.ImageContent(data=b"x", mime_type="image/png"))


@pytest.mark.parametrize(
    ("result", "output"),
    [
        (Result("c", '{"a":5.0}'), {"a": 5.0}),
        (Result("c", str(BIG)), BIG),
        (Result("c", ""), None),
        (Result("c", "no JSON"), "no JSON"),
        (Result("c", "NaN"), "NaN"),
        (Result("c", "null", content=(*_words("one"), IMAGE, *_words("two"))), "one\ntwo"),
        (Result("c", "null", content=(IMAGE,)), None),
        (Result("c", "0", content=_words("left out")), 0),
    ],
)
def test_success_is_its_output(result: Result, output: Any) -> None:
    sent = envelope(result)
    pictures = [{"data_b64": "eA==", "mime": "image/png"}] if IMAGE in result.content else None
    assert sent.pop("images", None) == pictures
    assert sent == {"output": output, "is_error": False}


@pytest.mark.parametrize(
    ("result", "output", "error"),
    [
        (_failed(Code.TOOL, "NO_CITY", "NO_CITY", '{"why":1}'), {"why": 1}, "NO_CITY"),
        (_failed(Code.TOOL, "city: none", "city: none"), {"error": "city: none"}, "city: none"),
        (_failed(Code.TOOL, "a long sentence"), {"error": "a long sentence"}, "a long sentence"),
        (_failed(Code.TOOL, ""), {"error": NO_REASON}, ""),
        (Result("c", "null", is_error=True), {"error": NO_REASON}, ""),
        (Result("c", "null", is_error=True, content=_words("why")), "why", ""),
        (_failed(Code.INTERNAL, ""), {"error": "INTERNAL"}, "INTERNAL"),
        (Result("c", "1", is_error=True), 1, ""),
        (_failed(Code.TOOL, "ValueError: no such city", "ValueError"), {"error": "no such city"}, "ValueError"),
        (_failed(Code.TOOL, "ValueError: no", "ValueError", '{"kept":1}'), {"kept": 1}, "ValueError"),
        (_failed(Code.NOT_FOUND, "no tool x"), {"error": "no tool x"}, "TOOL_NOT_REGISTERED"),
        (_failed(Code.UNAVAILABLE, "gone"), {"error": "gone"}, "PLUGIN_NOT_RUNNING"),
        (_failed(Code.DEADLINE_EXCEEDED, "after 30 s"), {"error": "after 30 s"}, "TOOL_TIMEOUT"),
        (_failed(Code.OVERLOADED, "full"), {"error": "full"}, "OVERLOADED"),
        (_failed(Code.INVALID_ARGUMENTS, "no city"), {"error": "no city"}, "INVALID_ARGUMENTS"),
        (_failed(Code.INTERNAL, "see the log"), {"error": "see the log"}, "INTERNAL"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_failure_is_output_and_error(result: Result, output: Any, error: str) -> None:
    assert envelope(result) == {"output": output, "is_error": True, "error": error}


def _raise(problem: BaseException) -> Any:
    raise problem


@pytest.mark.parametrize(
    ("handler", "answer"),
    [
        (lambda: {"temp_c": 22}, {"output": {"temp_c": 22}, "is_error": False}),
        (lambda: {"output": 1, "is_error": False}, {"output": 1, "is_error": False}),
        (
            lambda: {"output": {"reason": "none"}, "is_error": True, "error": "NO_CITY"},
            {"output": {"reason": "none"}, "is_error": True, "error": "NO_CITY"},
        ),
        (
            lambda: {"output": None, "is_error": True, "error": "a: b"},
            {"output": {"error": "a: b"}, "is_error": True, "error": "a: b"},
        ),
        (lambda: Err("no"), {"output": {"error": "no"}, "is_error": True, "error": "no"}),
        (lambda: Reply(1, error="no"), {"output": 1, "is_error": True, "error": "no"}),
        (
            lambda: _raise(ValueError("no: city")),
            {"output": {"error": "no: city"}, "is_error": True, "error": "ValueError"},
        ),
        (lambda: _raise(ValueError()), {"output": {"error": "ValueError"}, "is_error": True, "error": "ValueError"}),
    ],
)
async def test_exceptions_and_envelopes_of_a_tool_of_the_sdk_differ(handler: Any, answer: dict[str, Any]) -> None:
    result = await run_handler(
        spec_of(handler, LlmToolMeta("t", handler)), "{}", ToolScope("c", "t"), asyncio.to_thread
    )
    assert envelope(result) == answer


@given(JSON, TEXTS.filter(bool))
def test_an_envelope_survives_the_way_through_both_hosts(output: Any, error: str) -> None:
    word = error.encode("utf-8", "replace").decode()
    for told in (
        {"output": output, "is_error": False},
        {"output": {"error": word} if output is None else output, "is_error": True, "error": word},
    ):
        back = envelope(Result.from_wire(read_response(200, write_json(told), "utf-8", "t")))
        assert _same(back, told)
