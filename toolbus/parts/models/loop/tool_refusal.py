"""Reads whether an endpoint's error refuses all tools, some of them, their number, or the key `strict`.

The model can then still answer without them. Any other error (a temporary fault, a rate limit) must be reported: hiding
it would remove tools silently. Errors are read by their attributes, so that no provider's SDK has to be installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from toolbus.common.newest import NewestCache
from toolbus.parts.models.dialects.dialect import Dialect
from toolbus.parts.models.dialects.export import Export, LeftOut, ToolWriter
from toolbus.protocol.tool import Tool

# Statuses of a permanent refusal. llama.cpp answers with 500; its phrases are below.
STATUSES = frozenset({400, 404, 422, 501})

_TOOLS = r"[`'\"]?\b(?:tools|tool(?: |_)?(?:use|calls?|calling)|functions?[ _-]?call(?:s|ing)?|functions)\b[`'\"]?"

# In any answer with one of STATUSES. Each comes from at least one server, named after it.
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

# A tool by its place in the request, or by its name. The text after a place must be a part of the declaration: errors
# of other keys, such as its type, would blame one tool after the other.
_PART = r"(?:function|custom|parameters|input_schema|name|description)\b"
_PLACES = tuple(
    re.compile(place)
    for place in (
        r"tools\[\d+\]\.function_?[dD]eclarations\[(\d+)\]",  # Gemini
        rf"\btools\[(\d+)\]\.{_PART}",  # OpenAI, Azure, Groq
        rf"\btools\.(\d+)\.{_PART}",  # Anthropic, also on Bedrock
        rf"\\?['\"]tools\\?['\"], ?(\d+), ?\\?['\"]{_PART}",  # servers that check with pydantic: vLLM, Mistral
        rf"\\?['\"]path\\?['\"]: ?\[(?:\s|\\n)*(\d+),(?:\s|\\n)*\\?['\"]{_PART}",  # LM Studio
    )
)
_NAMES = re.compile(r"invalid (?:json )?schema for (?:function|tool) [`'\"]?([^`'\",:\s]+)", re.IGNORECASE)  # OpenAI …

# About one tool's schema, without the name of the tool.
_UNNAMED = tuple(
    re.compile(phrase, re.IGNORECASE)
    for phrase in (
        r"failed to parse grammar",  # llama.cpp, LM Studio
        r"json schema conversion failed",  # llama.cpp
        r"failed to parse tools:",  # llama.cpp
        r"cannot unmarshal \w+ into Go struct field \S*tools\.",  # Ollama
        r"tools\.function\.parameters(?:\.\w+)? is (?:not a valid|required)",  # Moonshot
        r"FunctionDeclaration in the request exceeds the maximum allowed nesting depth",  # Gemini
        r"json schema contains features not supported by|\bgrammar error: ",  # vLLM
        r"failed to transform json schema to a grammar",  # xgrammar, behind vLLM and SGLang
        r"\bunimplemented keys: \[|\boneOf constraints are not supported|\bunsatisfiable schema\b",  # llguidance
        r"\bunknown format: \S|\bregex parse error:",  # llguidance
        r"\bunsupported json schema structure\b|\bformat \S+ is not supported by outlines\b",  # outlines
        r"invalid tool schema",  # Mistral
        r"invalid function schema",  # xAI
    )
)
_SCHEMA_STATUSES = frozenset({None, 400, 422, 500})  # None: an error in the middle of a stream carries no status

_STRICT_KEY = tuple(
    re.compile(phrase, re.IGNORECASE)
    for phrase in (
        r"\btools(?:\[\d+\]|\.\d+)(?:\.function|\.custom)?\.strict\b",  # OpenAI, Anthropic on Bedrock
        r"\\?['\"]strict\\?['\"] ?[\])]",  # servers that check with pydantic
        r"(?:parameter|field|key|property|argument|name):? \\?[`'\"]strict\\?[`'\"]",  # Cohere
    )
)
_STRICT_TOOLS = re.compile(r"(?:number of|too many) strict tools", re.IGNORECASE)  # Anthropic

_TOO_MANY = tuple(
    re.compile(phrase, re.IGNORECASE)
    for phrase in (
        r"\btools\b.{0,4}array too long\. Expected an array with maximum length (\d+)",  # OpenAI, Azure
        r"\btools\b.{0,6}maximum number of items is (\d+)",  # Groq
        r"maximum tools limit reached\..{0,60}the maximum is (\d+)",  # xAI
        r"at most (\d+) function declarations",  # Gemini
        r"may not include more than (\d+) tools",  # GitHub Copilot
    )
)


# Quotes of the request or of the answer in an error: texts of users, tools and models, which are not a refusal.
_QUOTED = re.compile(r"\\*['\"](?:input|failed_generation)\\*['\"]\s*:.*", re.DOTALL)  # pydantic's key, and Groq's


@dataclass(frozen=True, slots=True)
class SchemaRefusal:
    """An endpoint's refusal of some declarations.

    Attributes:
        names: the tools, by their names on the bus; empty if the error names none.
        strict: "key" if the key `strict` is unknown, "tools" if the request has too many strict tools, else "".
    """

    names: tuple[str, ...] = ()
    strict: Literal["", "key", "tools"] = ""


def schema_refusal(error: BaseException, export: Export) -> SchemaRefusal | None:
    """Reads an error as a refusal of some of the exported tools; None if it is not one."""
    if isinstance(error, OSError | TimeoutError) or status_of(error) not in _SCHEMA_STATUSES:
        return None
    text = text_of_error(error)
    stricts = [strict_of(declaration) for declaration in export.tools]
    if any(strict is not None for strict in stricts) and any(phrase.search(text) for phrase in _STRICT_KEY):
        return SchemaRefusal(strict="key")
    if any(stricts) and _STRICT_TOOLS.search(text):
        return SchemaRefusal(strict="tools")
    wires = list(export.names.to_bus)
    named = [export.names.to_bus[wire] for wire in _NAMES.findall(text) if wire in export.names.to_bus]
    if not named and len(wires) == len(export.tools):
        pattern = next((pattern for pattern in _PLACES if pattern.search(text)), None)
        places = [int(place) for place in pattern.findall(text)] if pattern is not None else []
        named = [export.names.to_bus[wires[place]] for place in places if place < len(wires)]
    if named or any(phrase.search(text) for phrase in _UNNAMED):
        return SchemaRefusal(tuple(dict.fromkeys(named)))
    return None


def strict_of(declaration: Any) -> bool | None:
    """Returns the key `strict` of a declaration, wherever the dialect writes it; None if it is absent."""
    for holder in (declaration, declaration.get("function")):
        if isinstance(holder, dict) and "strict" in holder:
            return bool(holder["strict"])
    return None


def tool_limit(error: BaseException) -> int | None:
    """Returns the number of tools that an endpoint takes, if its error refuses a request with more."""
    if status_of(error) not in {None, 400, 413, 422}:
        return None
    text = text_of_error(error)
    return next((int(match[1]) for phrase in _TOO_MANY if (match := phrase.search(text))), None)


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
    """Returns the HTTP status of a client's error; None if it has none."""
    response = getattr(error, "response", None)
    for holder, name in ((error, "status_code"), (error, "code"), (error, "status"), (response, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int) and not isinstance(status, bool):
            return status
    return None


def text_of_error(error: BaseException) -> str:
    """Returns all texts of an error: its string, its message and the body of the answer, without quotes in them."""
    parts: list[Any] = [str(error)]
    parts += [getattr(error, name, None) for name in ("message", "body", "details")]
    try:
        parts.append(getattr(getattr(error, "response", None), "text", None))
    except Exception:  # the body was streamed and not read
        pass
    return "\n".join(_QUOTED.sub("", _as_text(part)) for part in parts if part)


def _as_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    try:
        return json.dumps(part, ensure_ascii=False, default=str)
    except ValueError:
        return str(part)


MAX_REFUSED = 1000  # stored declarations
MAX_PROBES = 40  # requests that search declarations that an error does not name; one among 128 needs 15 or fewer
MAX_HOPELESS = 16  # exports without a refused declaration

Refuses: TypeAlias = Callable[[Sequence[Tool]], Awaitable[bool]]


class EndpointRefusals:
    """The refusals of one endpoint; each loop has its own, since its conversations share an endpoint.

    A declaration is identified by its schema_hash, so a tool that changes is offered again. It is stored only after a
    request without it was accepted, so that a wrong guess hides no tool.

    Attributes:
        revision: rises with each stored declaration.
        max_tools: the number of tools that it takes; None: it refused no number.
        strict: how declarations are sent: with `strict` unchanged, off, or absent.
    """

    def __init__(self) -> None:
        self.revision = 0
        self.max_tools: int | None = None
        self.strict: Literal["unchanged", "off", "absent"] = "unchanged"
        self._refused: NewestCache[str, str] = NewestCache(MAX_REFUSED)  # schema_hash → why
        self._loose: NewestCache[str, None] = NewestCache(MAX_REFUSED)  # schema_hash of tools that must be loose
        self._hopeless: NewestCache[tuple[str, ...], None] = NewestCache(MAX_HOPELESS)  # exports, by their hashes

    def __repr__(self) -> str:
        return f"EndpointRefusals({len(self._refused)} refused, max_tools={self.max_tools}, strict={self.strict})"

    def remember(self, whys: Mapping[Tool, str]) -> None:
        """Stores declarations that the endpoint refused, each with the reason."""
        for tool, why in whys.items():
            self._refused[tool.schema_hash] = why
        self.revision += 1

    def split(self, tools: Sequence[Tool]) -> tuple[Sequence[Tool], tuple[LeftOut, ...]]:
        """Returns the tools that are not known to be refused, and the others with the reason."""
        if not self._refused:
            return tools, ()
        accepted = [tool for tool in tools if tool.schema_hash not in self._refused]
        left_out = (tool for tool in tools if tool.schema_hash in self._refused)
        return accepted, tuple(LeftOut(tool.name, self._refused[tool.schema_hash]) for tool in left_out)

    async def find(self, export: Export, refuses: Refuses) -> Halving:
        """Finds the tools of an export that the endpoint refuses.

        Finds none if it refuses them only together, or refuses another part of the request.

        Args:
            refuses: asks the endpoint whether it refuses a request with these tools.
        """
        halving = Halving(refuses)
        if not await halving.is_refused(()):
            await halving.search(list(export.kept.values()))
        return halving

    def is_hopeless(self, export: Export) -> bool:
        """Tells whether an earlier request without some tools of this export was refused, too."""
        return tuple(export.hashes.values()) in self._hopeless

    def give_up(self, export: Export) -> None:
        """Leaving out tools of this export did not help, and is not tried again."""
        self._hopeless[tuple(export.hashes.values())] = None

    def loosen(self, hashes: Iterable[str]) -> None:
        """Stores declarations, by their schema_hash, that the endpoint accepts only if they are loose."""
        for each in hashes:
            self._loose[each] = None

    def relaxed(self, export: Export, writer: ToolWriter, loose: Set[str] = frozenset()) -> Export:
        """Returns an export whose declarations are as the endpoint accepts them.

        Args:
            writer: the dialect of the export.
            loose: further declarations, by their schema_hash, that are not strict and have a plain schema.
        """
        loose = loose | self._loose.keys()
        if self.strict == "unchanged" and loose.isdisjoint(export.hashes.values()):
            return export
        absent = self.strict == "absent"
        hashes = export.hashes.values()
        plain = export.tools if loose.isdisjoint(hashes) else writer.plainly(export)
        tools = tuple(
            _relaxed(simple if schema_hash in loose else declaration, absent=absent)
            if self.strict != "unchanged" or schema_hash in loose
            else declaration
            for declaration, simple, schema_hash in zip(export.tools, plain, hashes, strict=True)
        )
        return replace(export, tools=tools)


def _relaxed(declaration: Mapping[str, Any], *, absent: bool) -> dict[str, Any]:
    """Returns a declaration in which `strict` is false or absent; if it was absent, it stays absent."""
    relaxed = {key: value for key, value in declaration.items() if key != "strict" or not absent}
    if "strict" in relaxed:
        relaxed["strict"] = False
    if isinstance(function := relaxed.get("function"), dict):
        relaxed["function"] = _relaxed(function, absent=absent)
    return relaxed


class Halving:
    """Finds the refused tools of a refused group by bisection; used once.

    Attributes:
        found: tools that are refused alone.
        undecided: groups with refused tools that MAX_PROBES requests could not separate.
        accepted: the number of tools in the largest group that the endpoint accepted.
    """

    def __init__(self, refuses: Refuses) -> None:
        self.found: list[Tool] = []
        self.undecided: list[Tool] = []
        self.accepted = 0
        self._refuses = refuses
        self._left = MAX_PROBES  # requests

    async def search(self, group: Sequence[Tool], *, sure: bool = True) -> None:
        """Searches a group of tools that is refused.

        Args:
            sure: False if the refusal only follows from the other group being accepted: perhaps the endpoint refuses
                both groups only together.
        """
        if len(group) == 1:
            if sure or await self.is_refused(group):
                self.found += group
            return
        first, second = group[: len(group) // 2], group[len(group) // 2 :]
        if not await self.is_refused(first):
            await self.search(second, sure=False)
            return
        await self.search(first)
        if await self.is_refused(second):
            await self.search(second)

    async def is_refused(self, group: Sequence[Tool]) -> bool:
        """Tells whether a request with these tools is refused, as long as requests are left."""
        if not self._left:
            self.undecided += group
            return False
        self._left -= 1
        is_refused = await self._refuses(group)
        if not is_refused:
            self.accepted = max(self.accepted, len(group))
        return is_refused


def without(dialect: Dialect, export: Export, whys: Mapping[Tool, str]) -> Export:
    """Returns an export without some of its tools."""
    others: Iterable[Tool] = (tool for tool in export.kept.values() if tool not in whys)
    left_out = tuple(LeftOut(tool.name, why) for tool, why in whys.items() if tool.name in export.kept)
    return replace(renewed := dialect.export(others), left_out=(*export.left_out, *renewed.left_out, *left_out))
