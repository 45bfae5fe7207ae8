"""Messages of JSON-RPC are read strictly and written unchanged."""

from __future__ import annotations

import json

import pytest
from msgspec import UNSET

from toolbus.parts.mcp.messages import jsonrpc
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError


def test_a_request_keeps_the_text_of_its_params() -> None:
    text = b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"n":123456789012345678901234567890,"f":1.50}}'
    message = jsonrpc.decode(text)
    assert message.is_request
    assert (message.id, message.method) == (7, "tools/call")
    assert bytes(message.params) == b'{"n":123456789012345678901234567890,"f":1.50}'


def test_the_ids_1_and_text_1_differ() -> None:
    assert jsonrpc.decode(b'{"jsonrpc":"2.0","id":"1","method":"ping"}').id == "1"
    assert jsonrpc.decode(b'{"jsonrpc":"2.0","id":1,"method":"ping"}').id == 1


def test_a_message_without_an_id_is_a_notification_and_one_without_a_method_an_answer() -> None:
    assert not jsonrpc.decode(b'{"jsonrpc":"2.0","method":"notifications/initialized"}').is_request
    answer = jsonrpc.decode(b'{"jsonrpc":"2.0","id":1,"result":{}}')
    assert not answer.is_request
    assert answer.rpc_error is None
    failed = jsonrpc.decode(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"no","data":[1]}}')
    assert failed.id is None
    assert failed.rpc_error is not None
    assert (failed.rpc_error.code, failed.rpc_error.message, failed.rpc_error.data) == (-32700, "no", [1])


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (b"{", McpCode.PARSE_ERROR, "not JSON"),
        (b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"a":"\xff"}}', McpCode.PARSE_ERROR, "not UTF-8"),
        (b"[" * 5000 + b"]" * 5000, McpCode.INVALID_REQUEST, "batches"),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', McpCode.INVALID_REQUEST, "batches"),
        (b'"text"', McpCode.INVALID_REQUEST, "not a JSON-RPC message"),
        (b'{"id":1,"method":"ping"}', McpCode.INVALID_REQUEST, "jsonrpc"),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', McpCode.INVALID_REQUEST, "id is null"),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', McpCode.INVALID_REQUEST, "id"),
        (b'{"jsonrpc":"2.0","id":1}', McpCode.INVALID_REQUEST, "not a response"),
        (b'{"jsonrpc":"2.0","method":5}', McpCode.INVALID_REQUEST, "method"),
    ],
)
def test_what_is_no_message_is_refused_with_the_reason(text: bytes, code: McpCode, says: str) -> None:
    with pytest.raises(RpcError) as refused:
        jsonrpc.decode(text)
    assert refused.value.code == code
    assert says in refused.value.message


def test_json_text_is_written_as_it_is_where_it_is_json() -> None:
    raw = jsonrpc.raw_json('{"n": 1.50}')
    assert jsonrpc.answer(1, {"structuredContent": raw}) == (
        b'{"jsonrpc":"2.0","id":1,"result":{"structuredContent":{"n": 1.50}}}'
    )
    for broken in ("{", '{"a":1}}', "", "NaN", '"\ud800"'):
        assert jsonrpc.raw_json(broken) is None, broken


def test_an_error_has_data_only_where_there_are_some() -> None:
    assert json.loads(jsonrpc.refusal(None, RpcError(-32700, "no")))["error"] == {"code": -32700, "message": "no"}
    assert json.loads(jsonrpc.refusal(3, RpcError(-32022, "no", {"supported": []})))["error"]["data"] == {
        "supported": []
    }


def test_params_of_another_shape_are_refused_with_their_place() -> None:
    with pytest.raises(RpcError, match="params"):
        jsonrpc.read(b"[1]", dict)
    assert jsonrpc.read(b"", dict) == {}
    assert jsonrpc.decode(b'{"jsonrpc":"2.0","method":"x"}').id is UNSET
