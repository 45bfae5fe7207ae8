"""Checks the questions of tools, and the parts of a call that answer them: what its caller accepts, answers, state.

Most calls have none of these. The bus stores no question: a call with answers is a call of its own.
"""

from __future__ import annotations

from toolbus.bus.calls.call import InputExchange
from toolbus.bus.calls.refusals import Refused
from toolbus.errors import CallError, Code, Stage
from toolbus.questions import (
    NEEDS_INPUT,
    QuestionFault,
    explain_needs,
    explain_unaccepted,
    read_answers,
    read_questions,
    unaccepted,
    words,
)
from toolbus.tool import Limits, Tool
from toolbus.v1 import tool_pb2 as pb


def read_exchange(call: pb.ToolCall, limits: Limits) -> InputExchange:
    """Reads and checks the exchange of a call whose caller accepts questions.

    Raises:
        Refused: it breaks a rule or a limit.
    """
    answers, state = call.input_responses_json, call.request_state
    size = len(answers.encode())
    if size > limits.arguments_bytes:
        raise Refused(
            Code.INVALID_ARGUMENTS,
            f"input_responses_json has {size} bytes, more than {limits.arguments_bytes}: answer with less",
            limit=("arguments_bytes", limits.arguments_bytes),
        )
    if answers:
        try:
            read_answers(answers)
        except ValueError as problem:
            raise Refused(Code.INVALID_ARGUMENTS, str(problem)) from None
    size = len(state.encode())
    if size > limits.request_state_bytes:
        raise Refused(
            Code.INVALID_ARGUMENTS,
            f"request_state has {size} bytes, more than the limit request_state_bytes = {limits.request_state_bytes}: "
            "send back what came with the questions, unchanged",
            limit=("request_state_bytes", limits.request_state_bytes),
        )
    return InputExchange(words(call.accepts), answers, state)


def check_needs(tool: Tool, name: str, exchange: InputExchange | None) -> None:
    """Checks whether the caller accepts all that a tool is declared to need.

    Raises:
        Refused: it does not.
    """
    missing = unaccepted(tool.needs, exchange.accepts if exchange is not None else ())
    if missing:
        raise Refused(Code.INVALID_ARGUMENTS, explain_needs(name, missing), reason=NEEDS_INPUT)


def why_not_asked(name: str, result: pb.ToolResult, exchange: InputExchange | None, limits: Limits) -> CallError | None:
    """Returns the error that a caller gets instead of a tool's questions; None where it accepts them."""
    try:
        questions = read_questions(result.input_requests_json, limits)
        size = len(result.request_state.encode())
        if size > limits.request_state_bytes:
            raise QuestionFault(
                f"its request_state has {size} bytes, more than the limit "
                f"request_state_bytes = {limits.request_state_bytes}: keep less for the next run",
                ("request_state_bytes", limits.request_state_bytes),
            )
    except QuestionFault as fault:
        code = Code.TOOL if fault.limit is None else Code.RESULT_TOO_LARGE
        reason = "invalid_questions" if fault.limit is None else ""
        text = f"tool {name!r} asked for input in a way that breaks a rule: {fault}"
        return CallError(code, text, Stage.ACCEPTED, limit=fault.limit, reason=reason)
    accepts = exchange.accepts if exchange is not None else ()
    missing = unaccepted((question.needs for question in questions), accepts)
    if missing or exchange is None:
        text = explain_unaccepted(name, questions, missing)
        return CallError(Code.TOOL, text, Stage.ACCEPTED, reason=NEEDS_INPUT)
    return None
