"""Has clients answer questions in the middle of a request, in the form of their era.

Inside the bus there is one form: a request ends with questions, and is repeated with the answers. A modern client gets
the questions as the result, together with a sealed state, and sends its request again. A legacy client gets them on the
stream of its request, which waits. In both eras the bus checks the answers before a tool sees them.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from toolbus.bus.keys.seal import STATE_SECONDS, BrokenSeal
from toolbus.parts.mcp.messages.eras import SAMPLING_TOOLS, gives_tools
from toolbus.parts.mcp.messages.jsonrpc import McpCode, RpcError
from toolbus.parts.mcp.server.calls import missing_capability
from toolbus.parts.mcp.server.mcp_request import CallParams, McpRequest, encode
from toolbus.parts.mcp.server.server import McpServer
from toolbus.protocol.input_requests import InvalidInput, check_answer, check_answers, missing_needs
from toolbus.protocol.limits import MIB
from toolbus.protocol.questions import SAMPLING

STATE = "state"  # the purpose of a sealed state
NOT_BOUND = ("_meta", "inputResponses", "requestState")  # params that may differ when a request is repeated
MAX_ROUNDS = 16  # of questions in one request of a legacy client
MAX_STATE = 4 * MIB  # of an opened state; the limit of a request's body applies to the sealed one
FORM_SINCE = "2025-11-25"  # the first revision in which an elicitation names its mode

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions that must be answered before a request can be.

    Attributes:
        requests: the questions by key, in the form of MCP; if empty, the client repeats the request at once.
        state: the tool's state, which comes back with the answers.
        answers: those of earlier rounds.
    """

    requests: dict[str, Json]
    state: str = ""
    answers: dict[str, Json] = field(default_factory=dict)


# Runs a request with answers and the state that came with the questions; returns the result as text, or questions.
Run = Callable[[Mapping[str, Json], str], Awaitable[bytes | Questions]]


class NotAnswered(Exception):
    """A legacy client cannot be asked, or its answer is invalid. The text says why."""


async def run_with_input(server: McpServer, request: McpRequest, run: Run) -> bytes:
    """Answers a request that may ask questions.

    Raises:
        RpcError: the state is not the bus's, the answers do not fit the questions, or the client lacks a capability.
        NotAnswered: a legacy client gave no valid answer.
    """
    return await (_run_modern(server, request, run) if request.modern else _run_legacy(request, run))


def _missing(request: McpRequest, questions: Mapping[str, Json]) -> list[str]:
    """Returns what questions need and the client did not declare: MCP has a capability for tools of samplings too."""
    accepts = request.client.accepts
    missing = missing_needs(questions, accepts)
    asked = [question.get("params") or {} for question in questions.values() if question["method"] == SAMPLING]
    if SAMPLING_TOOLS not in accepts and any(map(gives_tools, asked)):
        missing.append(SAMPLING_TOOLS)
    return missing


# -- modern ----------------------------------------------------------------------------------------------------------


async def _run_modern(server: McpServer, request: McpRequest, run: Run) -> bytes:
    responses, state = _sent_back(request)
    if state is not None:
        asked = _open(server, request, state)
    else:
        outcome = await run({}, "")
        if responses is None or not isinstance(outcome, Questions):
            return _write(server, request, outcome)
        asked = outcome  # answers without a state count if their keys are those of the questions
    answers = asked.answers
    if responses is not None:
        try:
            answers = answers | check_answers(asked.requests, responses)
        except InvalidInput as error:
            raise RpcError(McpCode.INVALID_PARAMS, str(error)) from None
    unanswered = {key: question for key, question in asked.requests.items() if key not in answers}
    if unanswered:
        return _write(server, request, Questions(unanswered, asked.state, answers), known=asked.requests)
    return _write(server, request, await run(answers, asked.state))


def _sent_back(request: McpRequest) -> tuple[Any, str | None]:
    """Returns the answers and the state of a request; None for each that it does not have."""
    params = request.params
    if isinstance(params, CallParams):
        return msgspec.json.decode(params.input_responses), params.request_state
    fields = request.fields
    state = fields.get("requestState")
    if state is not None and not isinstance(state, str):
        raise RpcError(McpCode.INVALID_PARAMS, "requestState must be the one that came with the questions, a string")
    return fields.get("inputResponses"), state


def _write(
    server: McpServer, request: McpRequest, outcome: bytes | Questions, known: Mapping[str, Json] | None = None
) -> bytes:
    """Writes the result of a request.

    Args:
        known: all questions of the round, if some of them are answered.
    """
    if isinstance(outcome, bytes):
        return outcome
    missing = _missing(request, outcome.requests)
    if missing:
        raise missing_capability(missing)
    content = encode([known or outcome.requests, outcome.state, outcome.answers])
    state = server.sealer.seal(zlib.compress(content, 1), *_bound(request), seconds=STATE_SECONDS)
    result: Json = {"requestState": state}
    if outcome.requests:
        result["inputRequests"] = outcome.requests
    return request.complete(result, kind="input_required")


def _open(server: McpServer, request: McpRequest, state: str) -> Questions:
    try:
        packed = server.sealer.open(state, *_bound(request))
    except BrokenSeal as broken:
        raise RpcError(
            McpCode.INVALID_PARAMS, f"requestState: {broken}; send the one of the last answer, or begin again without"
        ) from None
    requests, inner, answers = msgspec.json.decode(zlib.decompressobj().decompress(packed, MAX_STATE))
    return Questions(requests, inner, answers)


def _bound(request: McpRequest) -> tuple[str, ...]:
    """Returns the scope in which a state is valid: the same request of the same user."""
    params = request.params
    if isinstance(params, CallParams):
        name, arguments = params.name, bytes(params.arguments)
    else:
        asked = {key: value for key, value in request.fields.items() if key not in NOT_BOUND}
        name, arguments = "", encode(asked)
    profile = request.profile
    return STATE, request.method, name, _digest(arguments), profile.name, profile.user, request.identity.name


def _digest(text: bytes) -> str:
    """Returns a digest of JSON that does not depend on its spelling, since clients may write it differently."""
    try:
        text = json.dumps(json.loads(text), sort_keys=True).encode()
    except (ValueError, RecursionError):  # numbers that Python cannot read, or deep nesting: then the text as it is
        pass
    return hashlib.sha256(text).hexdigest()


# -- legacy ----------------------------------------------------------------------------------------------------------


async def _run_legacy(request: McpRequest, run: Run) -> bytes:
    answers: dict[str, Json] = {}
    state = ""
    for _ in range(MAX_ROUNDS):
        outcome = await run(answers, state)
        if isinstance(outcome, bytes):
            return outcome
        missing = _missing(request, outcome.requests)
        if missing:
            raise NotAnswered(f"this client cannot be asked: it did not declare {', '.join(missing)}")
        answers = {key: await _ask(request, question) for key, question in outcome.requests.items()}
        state = outcome.state
    raise NotAnswered(f"it has asked in {MAX_ROUNDS} rounds, the limit")


async def _ask(request: McpRequest, question: Json) -> Json:
    method, params = question["method"], question.get("params") or {}
    if params.get("mode") == "form" and request.version < FORM_SINCE:
        params = {name: value for name, value in params.items() if name != "mode"}
    try:
        return check_answer(question, await request.ask(method, params))
    except (RpcError, InvalidInput) as error:
        raise NotAnswered(f"the client did not answer {method}: {error}") from None
