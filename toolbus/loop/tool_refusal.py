"""Detects whether an endpoint's error means that its model takes no tools.

Such a model can still answer, so the loop repeats the request without tools. Any other error (a temporary fault, a
limit, one tool's invalid schema) must be reported: hiding it would remove the tools silently. Errors are read by their
attributes, so that no provider's SDK has to be installed.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Statuses of a permanent refusal. llama.cpp answers with 500; its phrases are below.
STATUSES = frozenset({400, 404, 422, 501})

_TOOLS = r"[`'\"]?\b(?:tools|tool(?: |_)?(?:use|calls?|calling)|functions?[ _-]?call(?:s|ing)?|functions)\b[`'\"]?"

# In any answer with one of STATUSES. Each comes from at least one server, named behind it.
PHRASES = tuple(
    re.compile(phrase, re.IGNORECASE | re.DOTALL)
    for phrase in (
        rf"(?:does not|doesn't|do not|don't) support (?:(?:the|any|use of|using|native) )*{_TOOLS}",  # Ollama, DeepSeek
        rf"{_TOOLS}(?: parameters?| arguments?)? (?:is|are) (?:currently |presently )?not "
        r"(?:supported|enabled|available)",  # OpenAI, Azure, Gemini, Mistral, Qwen
        r"(?:unrecognized|unsupported|unknown) (?:request )?(?:argument|parameter|param|field|name)(?: supplied)?:? "
        r"[`'\"]?tools[`'\"]?(?![\w.\[])",  # OpenAI, llama.cpp, Gemini by REST
        r"no endpoints found that support tool use",  # OpenRouter
        r"--enable-auto-tool-choice",  # vLLM
        r"[`'\"]body[`'\"], ?[`'\"]tools[`'\"] ?[\])].{0,80}not permitted",  # servers that check with pydantic
        r"不支持.{0,8}(?:工具|函数调用|tools?\b|function)",
    )
)

# With any status: these phrases are so specific that they always mean a server without tools.
SERVER_PHRASES = tuple(
    re.compile(phrase, re.IGNORECASE)
    for phrase in (
        r"tools param requires --jinja",  # llama.cpp
        r"unsupported param: tools\b",  # llama.cpp before it had tools
    )
)


def refuses_tools(error: BaseException) -> bool:
    """Tells whether an endpoint's error means that it takes no tools at all."""
    status = status_of(error)
    if status is None:
        return False
    text = text_of_error(error)
    if status in STATUSES:
        return any(phrase.search(text) for phrase in (*PHRASES, *SERVER_PHRASES))
    return status == 500 and any(phrase.search(text) for phrase in SERVER_PHRASES)


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status that an error of a client carries; None where there is none."""
    response = getattr(error, "response", None)
    for holder, name in ((error, "status_code"), (error, "code"), (error, "status"), (response, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int) and not isinstance(status, bool):
            return status
    return None


def text_of_error(error: BaseException) -> str:
    """Returns all texts of an error: its string, its message and the body of the answer."""
    parts: list[Any] = [str(error)]
    parts += [getattr(error, name, None) for name in ("message", "body", "details")]
    try:
        parts.append(getattr(getattr(error, "response", None), "text", None))
    except Exception:  # the body was streamed and not read
        pass
    return "\n".join(_as_text(part) for part in parts if part)


def _as_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    try:
        return json.dumps(part, ensure_ascii=False, default=str)
    except ValueError:
        return str(part)
