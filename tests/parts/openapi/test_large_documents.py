"""Tests that what a document costs is bounded, also where its operations share large parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from toolbus.errors import SetupError
from toolbus.openapi import Api, ApiSettings, Document, read_api


def read(content: dict[str, Any]) -> Api:
    return read_api(Document(content), ApiSettings(base_url="http://api.example", allow="*"))


# Functions, so that only the process that runs a test has its megabytes.
SHARED: dict[str, Callable[[], dict[str, Any]]] = {
    "parameters": lambda: {
        "get": {},
        "security": [],
        "parameters": [{"name": "q", "in": "query"} for _ in range(100_001)],
    },
    "security": lambda: {"get": {"security": [{"key": []}] * 50_000}},
    "servers": lambda: {"get": {}, "servers": [{"url": "/v2"}] * 50_000},
    "body": lambda: {
        "get": {"requestBody": {}},
        "post": {"requestBody": {"content": {f"x/{n}": {} for n in range(50_000)}}},
    },
}


@pytest.mark.parametrize("shared", SHARED)
def test_what_many_operations_share_is_not_read_again_without_end(shared: str) -> None:
    paths = {f"/{n}": {"$ref": "#/components/pathItems/shared"} for n in range(20)}
    content = {"openapi": "3.1.0", "paths": paths, "components": {"pathItems": {"shared": SHARED[shared]()}}}
    last = read(content).left_out[-1]
    assert last.reason == "the document is too large to be read for all of it: allow fewer operations"


def test_too_many_operations_are_refused() -> None:
    item: dict[str, Any] = {method: {} for method in ("get", "put", "post", "patch", "delete")}
    paths = {f"/{n}": {"$ref": "#/components/pathItems/shared"} for n in range(10_001)}
    content = {"openapi": "3.1.0", "paths": paths, "components": {"pathItems": {"shared": item}}}
    with pytest.raises(SetupError, match="has more than 50000 operations"):
        read(content)


@pytest.mark.parametrize("value", [[1] * 100_000, {"a": 1}, None, 3], ids=["list", "object", "null", "number"])
def test_an_error_names_the_kind_of_a_value_that_may_be_large(value: Any) -> None:
    operation = {"parameters": [{"name": "q", "in": "query", "schema": {"items": {"anyOf": [value]}}}]}
    content = {"openapi": "3.1.0", "paths": {"/x": {"get": operation}}}
    left_out = read(content).left_out
    assert all(each.reason.startswith("a schema is ") and len(each.reason) < 100 for each in left_out)
    assert bool(left_out) == (not isinstance(value, dict))
