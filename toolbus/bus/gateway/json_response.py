"""Writes JSON responses: compact UTF-8, large integers and half surrogate pairs included."""

from __future__ import annotations

import json
from typing import Any

import orjson
from fastapi import Response

from toolbus.common.text import dump_json

_ASCII_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def write_json(value: Any) -> bytes:
    """Returns a value, which was read from JSON, as compact UTF-8 JSON.

    Raises:
        RecursionError: it is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or half of a surrogate pair
        pass
    try:
        return dump_json(value).encode()
    except UnicodeEncodeError:  # UTF-8 cannot hold it, an escape can
        return _ASCII_ENCODER.encode(value).encode()


def json_response(content: Any, status: int = 200) -> Response:
    """Returns a response with a JSON body.

    Raises:
        RecursionError: the content is nested too deeply.
    """
    return json_bytes_response(write_json(content), status)


def json_bytes_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a response whose body is JSON already."""
    return Response(body, status_code=status, media_type="application/json", headers=headers)
