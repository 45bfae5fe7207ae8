"""Has clients answer what is asked in the middle of a request, each in the way of its era.

Inside the bus there is one form: what was asked ends with questions, and is asked again with the answers. A modern
client gets the questions as the result, together with a sealed state, and sends its request again. A legacy client is
asked on the stream of its request, which waits. Either way answers are checked before anything but the bus sees them.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from toolbus.bus.mcp_server.mcp_request import CallParams, McpRequest, encode
from toolbus.bus.mcp_server.seal import STATE_SECONDS, BrokenSeal
from toolbus.bus.mcp_server.server import McpServer
from toolbus.limits import MIB
from toolbus.mcp.input_requests import InvalidInput, capabilities_for, check_answer, check_answers, missing_needs
from toolbus.mcp.jsonrpc import McpCode, RpcError

STATE = "state"  # the purpose of a sealed state
NOT_BOUND = ("_meta", "inputResponses", "requestState")  # params that differ when the same is asked again
MAX_ROUNDS = 16  # in which one request of a legacy client is asked something
MAX_STATE = 4 * MIB  # of an opened state; the body of a request bounds the sealed one
FORM_SINCE = "2025-11-25"  # the first revision in which an elicitation names its mode

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked before a request can be answered.

    Attributes:
        requests: the questions by key, as MCP has them; with none, the same is asked again at once.
        state: what comes back with the answers.
        answers: those that the client has given in earlier rounds.
    """

    requests: dict[str, Json]
    state: str = ""
    answers: dict[str, Json] = field(default_factory=dict)


# Asks with answers and the state that came with the questions; returns the result as text, or questions.
Run = Callable[[Mapping[str, Json], str], Awaitable[bytes | Questions]]


class NotAnswered(Exception):
    """A legacy client was asked, and its answer is of no use. The text says why."""


async def run_with_input(server: McpServer, request: McpRequest, run: Run) -> bytes:
    """Answers a request that may ask something in its middle.

    Raises:
        RpcError: what the client sent back is not what it was given, its answers are not what was asked for, or it
            lacks a capability.
        NotAnswered: a legacy client did not answer what was asked.
    """
    return await (_run_modern(server, request, run) if request.modern else _run_legacy(request, run))


# -- modern ----------------------------------------------------------------------------------------------------------


async def _run_modern(server: McpServer, request: McpRequest, run: Run) -> bytes:
    responses, state = _sent_back(request)
    if state is not None:
        asked = _open(server, request, state)
    else:
        outcome = await run({}, "")
        if responses is None or not isinstance(outcome, Questions):
            return _write(server, request, outcome)
        asked = outcome  # answers without a state count where they are to what is asked anyway
    answers = asked.answers
    if responses is not None:
        try:
            answers = answers | check_answers(asked.requests, responses)
        except InvalidInput as error:
            raise RpcError(McpCode.INVALID_PARAMS, str(error)) from None
    left = {key: question for key, question in asked.requests.items() if key not in answers}
    if left:
        return _write(server, request, Questions(left, asked.state, answers), known=asked.requests)
    return _write(server, request, await run(answers, asked.state))


def _sent_back(request: McpRequest) -> tuple[Any, str | None]:
    """Returns the answers and the state that a request brings; None for what it does not."""
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
        known: all questions of the round, where some of them are answered.
    """
    if isinstance(outcome, bytes):
        return outcome
    missing = missing_needs(outcome.requests, request.client.accepts)
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
    """Returns what a state is valid for: the same request of the same user."""
    params = request.params
    if isinstance(params, CallParams):
        name, arguments = params.name, bytes(params.arguments)
    else:
        asked = {key: value for key, value in request.fields.items() if key not in NOT_BOUND}
        name, arguments = "", encode(asked)
    profile = request.profile
    return STATE, request.method, name, _digest(arguments), profile.name, profile.user, request.identity.name


def _digest(text: bytes) -> str:
    """Returns a digest of JSON that does not depend on its spelling: clients write it anew."""
    try:
        text = json.dumps(json.loads(text), sort_keys=True).encode()
    except (ValueError, RecursionError):  # numbers that Python does not read, or deep nesting: then as it is spelled
        pass
    return hashlib.sha256(text).hexdigest()


def missing_capability(needs: list[str]) -> RpcError:
    """Returns the error for a modern client that cannot be asked what a tool asks."""
    return RpcError(
        McpCode.MISSING_CAPABILITY,
        f"this asks for what the client cannot do: {', '.join(needs)}; declare it in clientCapabilities",
        {"requiredCapabilities": capabilities_for(needs)},
    )


# -- legacy ----------------------------------------------------------------------------------------------------------


async def _run_legacy(request: McpRequest, run: Run) -> bytes:
    answers: dict[str, Json] = {}
    state = ""
    for _ in range(MAX_ROUNDS):
        outcome = await run(answers, state)
        if isinstance(outcome, bytes):
            return outcome
        missing = missing_needs(outcome.requests, request.client.accepts)
        if missing:
            raise NotAnswered(f"this client cannot be asked: it did not declare {', '.join(missing)}")
        answers = {key: await _ask(request, question) for key, question in outcome.requests.items()}
        state = outcome.state
    raise NotAnswered(f"it asked in {MAX_ROUNDS} rounds and was not done")


async def _ask(request: McpRequest, question: Json) -> Json:
    method, params = question["method"], question.get("params") or {}
    if params.get("mode") == "form" and request.version < FORM_SINCE:
        params = {name: value for name, value in params.items() if name != "mode"}
    try:
        return check_answer(question, await request.ask(method, params))
    except (RpcError, InvalidInput) as error:
        raise NotAnswered(f"the client did not answer {method}: {error}") from None
