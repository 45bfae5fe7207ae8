"""Reads the questions that a tool asks in the middle of a call, and checks the answers to them.

A question is an object with `method` and `params`, as protocol 2026-07-28 has it: `elicitation/create` (a form or a
URL for the user), `sampling/createMessage` (for the client's model) or `roots/list` (for the client's folders). Only
valid answers reach the tool: those to a form are checked by its schema, which is flat.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from toolbus.common.text import dump_json, parse_json, quote
from toolbus.protocol.limits import Limits
from toolbus.protocol.questions import ACCEPTED_BY, ACTIONS, FORM, URL
from toolbus.protocol.questions import ELICITATION as ELICIT
from toolbus.protocol.questions import ROOTS as LIST_ROOTS
from toolbus.protocol.questions import SAMPLING as SAMPLE

Json = dict[str, Any]

SAMPLING, ROOTS = ACCEPTED_BY[SAMPLE], ACCEPTED_BY[LIST_ROOTS]  # words of ToolCall.accepts, as FORM and URL

MAX_KEY = 256  # characters
MAX_PROPERTIES = 100  # of a form
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s]+")


class InvalidInput(ValueError):
    """A question or an answer breaks its format. The text has the value, the rule and how to fix it."""


# -- questions -----------------------------------------------------------------------------------------------------


def read_requests(text: str) -> dict[str, Json]:
    """Reads `ToolResult.input_requests_json`, whose size and number the bus has checked.

    Raises:
        InvalidInput: it breaks its format; the text is for the author of the tool.
    """
    try:
        requests = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"its questions are not JSON: {error}") from None
    return check_requests(requests)


def check_requests(requests: object, limits: Limits | None = None) -> dict[str, Json]:
    """Checks parsed questions and returns them.

    Args:
        limits: of their size and number; None if these are checked already.

    Raises:
        InvalidInput: they break their format or a limit.
    """
    if not isinstance(requests, dict) or not requests:
        raise InvalidInput("its questions are not an object that has at least one: give each question a key")
    if limits is not None:
        _check_size(requests, limits)
    for key, request in requests.items():
        try:
            _check_request(key, request)
        except InvalidInput as error:
            raise InvalidInput(f"its question {quote(key)}: {error}") from None
    return requests


def _check_size(requests: Json, limits: Limits) -> None:
    if len(requests) > limits.input_requests:
        raise InvalidInput(
            f"it asks {len(requests)} questions, more than the limit input_requests = {limits.input_requests}: ask in "
            "several rounds"
        )
    size = len(dump_json(requests).encode("utf-8", "replace"))
    if size > limits.input_requests_bytes:
        raise InvalidInput(
            f"its questions have {size} bytes, more than the limit input_requests_bytes = "
            f"{limits.input_requests_bytes}: ask for less at once"
        )


def need_of(request: Mapping[str, Any]) -> str:
    """Returns what a client must accept to be asked this question, in words of `ToolCall.accepts`."""
    method = request.get("method")
    if method == ELICIT:
        return URL if (request.get("params") or {}).get("mode") == "url" else FORM
    return SAMPLING if method == SAMPLE else ROOTS


def missing_needs(requests: Mapping[str, Mapping[str, Any]], accepts: Collection[str]) -> list[str]:
    """Returns what questions need and a client does not accept."""
    return sorted({need for need in map(need_of, requests.values()) if need not in accepts})


def capabilities_for(needs: Iterable[str]) -> Json:
    """Returns the capabilities that a client must declare for some needs."""
    capabilities: Json = {}
    for need in needs:
        name, _, kind = need.partition(".")
        declared = capabilities.setdefault(name, {})
        if kind:
            declared[kind] = {}
    return capabilities


def _check_request(key: str, request: object) -> None:
    if not 1 <= len(key) <= MAX_KEY:
        raise InvalidInput(f"its key has {len(key)} characters, it must have 1 to {MAX_KEY}")
    if not isinstance(request, dict):
        raise InvalidInput("it is not an object with method and params")
    method, params = request.get("method"), request.get("params", {})
    if not isinstance(method, str) or method not in _ANSWERS:
        raise InvalidInput(f"its method is {quote(str(method))}, it must be one of {', '.join(_ANSWERS)}")
    if not isinstance(params, dict):
        raise InvalidInput("its params are not an object")
    if method == SAMPLE:
        if not isinstance(params.get("messages"), list) or type(params.get("maxTokens")) is not int:
            raise InvalidInput("params.messages is not a list, or params.maxTokens not a whole number")
    elif method == ELICIT:
        if not isinstance(params.get("message"), str):
            raise InvalidInput("params.message, the text for the user, is missing or not a string")
        mode = params.get("mode", "form")
        if mode == "url":
            if not isinstance(params.get("url"), str) or not _URI.fullmatch(params["url"]):
                raise InvalidInput("params.url is not a URL")
        elif mode == "form":
            _check_form(params.get("requestedSchema"))
        else:
            raise InvalidInput(f"params.mode is {quote(str(mode))}, it must be form or url")


def _check_form(schema: object) -> None:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or schema.get("type") != "object" or not isinstance(properties, dict):
        raise InvalidInput("params.requestedSchema is not the schema of an object with properties")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(name in properties for name in required if isinstance(name, str)):
        raise InvalidInput("requestedSchema.required is not a list of names of its properties")
    if len(properties) > MAX_PROPERTIES:
        raise InvalidInput(f"its form has {len(properties)} fields, more than {MAX_PROPERTIES}: ask for less")
    for name, field in properties.items():
        if not isinstance(field, dict) or str(field.get("type")) not in _FIELDS:
            raise InvalidInput(
                f"field {quote(name)} of its form has none of the types {', '.join(_FIELDS)}: forms are flat"
            )
        if field["type"] == "array" and _choices(field.get("items")) is None:
            raise InvalidInput(f"field {quote(name)} of its form is a list of anything: give items an enum")


# -- answers -------------------------------------------------------------------------------------------------------


def check_answers(requests: Mapping[str, Json], answers: object) -> dict[str, Json]:
    """Returns the answers that the tool may see; answers to unknown keys are left out.

    Raises:
        InvalidInput: the answers are not an object, or one of them does not fit its question.
    """
    if not isinstance(answers, Mapping):
        raise InvalidInput("inputResponses is not an object: give the answer to each question under its key")
    checked = {}
    for key, request in requests.items():
        if key in answers:
            try:
                checked[key] = check_answer(request, answers[key])
            except InvalidInput as error:
                raise InvalidInput(f"the answer to {quote(key)}: {error}") from None
    return checked


def check_answer(request: Mapping[str, Any], answer: object) -> Json:
    """Checks the answer to one question and returns it.

    Raises:
        InvalidInput: it does not fit the question.
    """
    if not isinstance(answer, Mapping):
        raise InvalidInput(f"it is {_shown(answer)}, it must be an object: the result of {request['method']}")
    return _ANSWERS[request["method"]](request.get("params") or {}, answer)


def _elicited(params: Mapping[str, Any], answer: Mapping[str, Any]) -> Json:
    action = answer.get("action")
    if action not in ACTIONS:
        raise InvalidInput(f"action is {_shown(action)}, it must be one of {', '.join(ACTIONS)}")
    if action != "accept" or params.get("mode") == "url":
        return {"action": action}
    return {"action": action, "content": _filled_in(params["requestedSchema"], answer.get("content", {}))}


def _filled_in(schema: Mapping[str, Any], content: object) -> Json:
    """Returns the fields of a form. Unknown fields are left out; null means that the user left a field empty."""
    if not isinstance(content, Mapping):
        raise InvalidInput(f"content is {_shown(content)}, it must be an object with the fields of the form")
    required, fields = schema.get("required") or (), {}
    for name, field in schema["properties"].items():
        value = content.get(name)
        if value is None and name in required:
            value = field.get("default")
            if value is None:
                raise InvalidInput(f"field {quote(name)} is missing: the form requires it")
        if value is not None:
            fault = _FIELDS[field["type"]](field, value)
            if fault:
                raise InvalidInput(f"field {quote(name)} is {_shown(value)}, it must be {fault}")
            fields[name] = value
    return fields


def _text_fault(field: Mapping[str, Any], value: object) -> str:
    if not isinstance(value, str):
        return "a string"
    choices = _choices(field)
    if choices is not None:
        return "" if value in choices else _one_of(choices)
    if fault := _beyond(field, "Length", len(value)):
        return f"{fault} characters long"
    is_valid, what = _FORMATS.get(str(field.get("format")), (None, ""))
    return "" if is_valid is None or is_valid(value) else what


def _number_fault(field: Mapping[str, Any], value: object) -> str:
    whole = field["type"] == "integer"
    if isinstance(value, bool) or not isinstance(value, int | float) or (whole and value != value // 1):
        return "a whole number" if whole else "a number"
    return _beyond(field, "imum", value)


def _list_fault(field: Mapping[str, Any], value: object) -> str:
    choices = _choices(field.get("items")) or []
    if not isinstance(value, list) or not all(isinstance(each, str) and each in choices for each in value):
        return f"a list, each {_one_of(choices)}"
    if len(set(value)) < len(value):
        return "a list without repetitions"
    fault = _beyond(field, "Items", len(value))
    return f"a list of {fault}" if fault else ""


def _beyond(field: Mapping[str, Any], what: str, number: float) -> str:
    """Returns the bound that a number is beyond, of the keywords that end so; "" where it is within both."""
    least, most = field.get(f"min{what}"), field.get(f"max{what}")
    if isinstance(least, int | float) and not number >= least:
        return f"at least {least}"
    return f"at most {most}" if isinstance(most, int | float) and not number <= most else ""


def _choices(field: object) -> list[str] | None:
    """Returns the choices of a field, in each of its spellings; None if the field is free text."""
    if not isinstance(field, Mapping):
        return None
    if isinstance(field.get("enum"), list):
        return [str(each) for each in field["enum"]]
    for key in ("oneOf", "anyOf"):
        if isinstance(field.get(key), list):
            return [str(each["const"]) for each in field[key] if isinstance(each, Mapping) and "const" in each]
    return None


def _one_of(choices: list[str]) -> str:
    return f"one of {', '.join(map(quote, choices[:20]))}" + (", …" if len(choices) > 20 else "")


def _sampled(params: Mapping[str, Any], answer: Mapping[str, Any]) -> Json:
    content = answer.get("content")
    blocks = content if isinstance(content, list) else [content]
    if not blocks or not all(isinstance(each, Mapping) and isinstance(each.get("type"), str) for each in blocks):
        raise InvalidInput("content is not a content block, nor a list of them")
    if answer.get("role") not in ("assistant", "user") or not isinstance(answer.get("model"), str):
        raise InvalidInput("role is not assistant or user, or model not a string")
    return dict(answer)


def _rooted(params: Mapping[str, Any], answer: Mapping[str, Any]) -> Json:
    roots = answer.get("roots")
    if not isinstance(roots, list) or not all(
        isinstance(each, Mapping) and isinstance(each.get("uri"), str) for each in roots
    ):
        raise InvalidInput("roots is not a list of objects with a uri")
    return dict(answer)


def _shown(value: object) -> str:
    try:
        return quote(dump_json(value))
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def _parses(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


# Type of a form's field → returns what a value must be, or "" if the value is valid.
_FIELDS: Mapping[str, Callable[[Mapping[str, Any], object], str]] = {
    "string": _text_fault,
    "number": _number_fault,
    "integer": _number_fault,
    "boolean": lambda field, value: "" if isinstance(value, bool) else "true or false",
    "array": _list_fault,
}
_FORMATS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "date": (lambda text: _parses(datetime.date.fromisoformat, text), "a date such as 2026-01-31"),
    "date-time": (
        lambda text: "T" in text.upper() and _parses(datetime.datetime.fromisoformat, text.upper()),
        "a moment such as 2026-01-31T12:00:00Z",
    ),
    "email": (_EMAIL.fullmatch, "an e-mail address"),
    "uri": (_URI.fullmatch, "a URI"),
}
_ANSWERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Json]] = {
    ELICIT: _elicited,
    SAMPLE: _sampled,
    LIST_ROOTS: _rooted,
}
