"""Writes a result as providers require it: as text that marks a failure, or as an object."""

from __future__ import annotations

from typing import Any

from toolbus.result_text import FAILED, block_text, parsed_output, repeats_failure
from toolbus.tool import Result

_MARK = "Error: "


def answer_text(result: Result) -> str:
    """Returns a result as text for a model whose provider has no field that tells a failure: the text is marked.

    A text that is an object with `error` needs no mark.
    """
    text = result.text
    failure = result.failure
    if not failure or (not result.content and repeats_failure(parsed_output(result.output_json), failure)):
        return text
    return _MARK + text


def object_of(result: Result) -> dict[str, Any]:
    """Returns a result as an object: an object is passed on, anything else is wrapped as `{"result": …}`.

    A failure has an `error`, and the tool's output, if any, as `result`. Content is a text under
    `content`.
    """
    output = parsed_output(result.output_json)
    failure = result.failure
    content = "\n".join(block_text(block) for block in result.content)
    if failure and not (failure == FAILED and isinstance(output, dict) and "error" in output):
        answer: dict[str, Any] = {"error": failure}
        if output not in (None, failure, answer):
            answer["result"] = output
    elif isinstance(output, dict) and not (content and "content" in output):
        answer = output
    else:
        answer = {"result": output}
    return answer | {"content": content} if content else answer


def arguments_object(arguments_json: str) -> dict[str, Any]:
    """Returns a model's arguments as an object, or `{}`: to echo a call, not to make it."""
    arguments = parsed_output(arguments_json)
    return arguments if isinstance(arguments, dict) else {}
