"""Defines the request and response bodies of the REST contract and of an invoke, and validates them (REST-2 to REST-8).

Fields stand in the order of the contract, since their errors are listed in that order. The contract ignores unknown
fields; an invoke, which it does not have, refuses them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.catalog.policy import MAX_USER
from toolbus.bus.gateway.callback_proof import MAX_SECRET, MIN_SECRET, is_secret
from toolbus.common.text import is_utf8, quote
from toolbus.protocol.questions import MAX_NEED, MAX_NEEDS
from toolbus.protocol.tool import (
    DEFAULT_TIMEOUT_SECONDS,
    MAX_CALL_ID,
    MAX_LEVEL,
    MAX_NAME,
    MAX_TIMEOUT_SECONDS,
    is_source,
)

MAX_DISPLAY_NAME = 256  # characters
MAX_IGNORED = 20  # keys that a response names
_PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_CALLBACK = "http://127.0.0.1:9876/tool_invoke"


def check_callback_url(text: str) -> str:
    """Refuses a callback URL that does not lead to this machine."""
    parse_callback_url(text)
    return text


def _check_name(name: str) -> str:
    """Refuses a long name, but accepts `source:name`, which may be longer than a name alone."""
    source, _, bare = name.rpartition(":")
    if len(name) > MAX_NAME and not (is_source(source) and len(bare) <= MAX_NAME):
        raise PydanticCustomError(
            "string_too_long", "String should have at most {max_length} characters", {"max_length": MAX_NAME}
        )
    return name


def _check_secret(secret: str) -> str:
    """Refuses a secret that is too short, or has other characters than it may have."""
    if secret and not is_secret(secret):
        raise PydanticCustomError(
            "callback_secret",
            "It is not {least} to {most} characters of A-Z, a-z, 0-9 and ._~+/=:-. Draw one at random: 32 bytes in "
            "hexadecimal digits.",
            {"least": MIN_SECRET, "most": MAX_SECRET},
        )
    return secret


def _check_utf8(text: str) -> str:
    """Refuses half of a surrogate pair; pydantic itself does so only where the field has a length limit."""
    if not is_utf8(text):
        raise PydanticCustomError(
            "string_unicode",
            "Input should be a valid string: it holds half of a surrogate pair, which UTF-8 cannot carry",
        )
    return text


Text = Annotated[str, AfterValidator(_check_utf8)]
RoleName = Annotated[Text | None, Field(description='One role; null and "" mean all of them.', examples=[None])]
UserId = Annotated[str, Field(max_length=MAX_USER, description="For which user; empty: for calls that name none.")]
Level = Annotated[
    int, Field(ge=0, le=MAX_LEVEL, description="The user's access level; tools that ask for more are not shown.")
]


class ToolHints(BaseModel):
    """What calling a tool may do; null: not stated."""

    read_only: bool | None = None
    idempotent: bool | None = None
    destructive: bool | None = None
    open_world: bool | None = None


class RegisterBody(BaseModel):
    """A tool and where its calls are posted."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "get_weather",
                    "description": "Looks up the weather in a city.",
                    "parameters": _PARAMETERS,
                    "callback_url": _CALLBACK,
                    "role": None,
                    "source": "weather",
                    "timeout_seconds": 30,
                }
            ]
        }
    )

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME, description="What the model calls it.")]
    description: Annotated[Text, Field(description="When and for what a model should call it.")] = ""
    parameters: Annotated[dict[str, Any], Field(description="The JSON Schema of the arguments.")] = Field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    callback_url: Annotated[
        str,
        Field(min_length=1, description="Where calls are posted: http or https on 127.0.0.0/8, ::1 or localhost."),
        AfterValidator(check_callback_url),
    ]
    role: RoleName = None
    source: Annotated[Text, Field(description="The owner of the tool, by which `clear` selects.")] = "external"
    timeout_seconds: Annotated[
        float, Field(gt=0, le=MAX_TIMEOUT_SECONDS, description="How long a call may take, in seconds.")
    ] = DEFAULT_TIMEOUT_SECONDS
    callback_secret: Annotated[
        str | None,
        Field(
            description="Bus and plugin prove themselves to each other with it, and send it never again; null and "
            '"": they do not.',
            examples=[None],
            repr=False,
        ),
        AfterValidator(lambda secret: _check_secret(secret or "")),
    ] = None
    # Fields of ours: tools over gRPC have them too.
    display_name: Annotated[
        Text | None, Field(max_length=MAX_DISPLAY_NAME, description="Its name for people.", examples=["Weather"])
    ] = None
    council_eligible: Annotated[bool | None, Field(description="Whether council members may have it.")] = None
    inline_available: Annotated[
        bool | None, Field(description="Whether a main model may call it outside a council, without a member.")
    ] = None
    min_level: Annotated[
        int | None, Field(ge=0, le=MAX_LEVEL, description="The access level that its callers' users need.")
    ] = None
    annotations: Annotated[ToolHints | None, Field(description="What calling it may do.")] = None
    validate_arguments: Annotated[
        bool | None,
        Field(alias="validate", description="Whether arguments are checked against `parameters` before they are sent."),
    ] = None
    context_headers: Annotated[
        bool | None, Field(description="Whether callbacks have the call's context, in headers `X-Toolbus-…`.")
    ] = None
    output_schema: Annotated[dict[str, Any] | None, Field(description="The JSON Schema of its output.")] = None
    validate_output: Annotated[
        bool | None, Field(description="Whether results are checked against `output_schema`.")
    ] = None
    needs: Annotated[
        list[Annotated[Text, Field(min_length=1, max_length=MAX_NEED)]] | None,
        Field(max_length=MAX_NEEDS, description="What its callers must be able to answer, such as elicitation.form."),
    ] = None
    always_background: Annotated[
        bool | None, Field(description="Whether calls become tasks at once where their callers take tasks.")
    ] = None
    via: Annotated[Any, Field(description="Buses that the tool has come through; set by `serve --upstream` only.")] = (
        None
    )


def ignored_fields(body: Any) -> list[str]:
    """Returns the names of the unknown fields of a registration, as they may be shown.

    Args:
        body: as it was sent; a model that collected them would refuse what is not UTF-8 in them.
    """
    fields = {field.alias or name for name, field in RegisterBody.model_fields.items()}
    names = [name for name in body if name not in fields]
    hints = body.get("annotations")
    if isinstance(hints, dict):
        names += [f"annotations.{name}" for name in hints if name not in ToolHints.model_fields]
    return [quote(name)[1:-1] for name in names[:MAX_IGNORED]]


class UnregisterBody(BaseModel):
    """A tool to unregister."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "get_weather", "role": None}]})

    name: Annotated[str, Field(min_length=1), AfterValidator(_check_name)]
    role: RoleName = None


class ClearBody(BaseModel):
    """A source whose tools are unregistered."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"source": "weather", "role": None}]})

    source: Annotated[str, Field(min_length=1)]
    role: RoleName = None


class FailedRole(BaseModel):
    """A role that did not accept a tool."""

    role: str
    error: Annotated[str, Field(description="What and why, as `Type: message`.")]


class Registered(BaseModel):
    """The result of a registration; `ok` is false, with `error`, where no role accepted it."""

    ok: bool
    registered: str
    affected_roles: list[str]
    failed_roles: list[FailedRole]
    error: str | None = None


class Unregistered(BaseModel):
    """The result of an unregister; an unknown tool is not an error."""

    ok: bool
    removed: bool
    name: str
    affected_roles: list[str]
    failed_roles: list[FailedRole]


class Cleared(BaseModel):
    """The result of a clear; a tool counts once per role."""

    ok: bool
    removed: int
    source: str
    affected_roles: list[str]
    failed_roles: list[FailedRole]


class ListedTool(BaseModel):
    """A tool as it is listed."""

    name: str
    description: str
    source: str
    callback_url: Annotated[str | None, Field(description="Null for tools of sessions and of the bus's process.")]
    is_remote: Annotated[bool, Field(description="Whether it runs in another process.")]


class Listed(BaseModel):
    """The tools of each role, in the order in which they were registered."""

    ok: bool
    tools_by_role: dict[str, list[ListedTool]]


class ContextMessage(BaseModel):
    """One message of the conversation."""

    role: str = ""
    content: str = ""
    name: str = ""


class Context(BaseModel):
    """What the tool may know about the circumstances; nothing of it comes from the model."""

    model_config = ConfigDict(extra="forbid")  # as a call: with `userId` it would be one without a user

    user_id: str = ""
    attributes: dict[str, str] = {}
    member: dict[str, Any] | None = None
    messages: list[ContextMessage] = []
    traceparent: str = ""


class InvokeBody(BaseModel):
    """A call. An unknown field is refused: a `user_id` beside the context would else be lost without a word."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"name": "get_weather", "arguments": {"city": "Oslo"}, "timeout_seconds": 10}]},
    )

    name: Annotated[str, Field(min_length=1, description="The tool's listed name.")]
    arguments: Annotated[
        Any,
        Field(description="An object; or text: the arguments as the model wrote them.", examples=[{"city": "Oslo"}]),
    ] = None
    role: RoleName = None
    call_id: Annotated[
        str,
        Field(max_length=MAX_CALL_ID, description="The host's own name for the call; one is drawn where it is empty."),
    ] = ""
    timeout_seconds: Annotated[
        float | None, Field(gt=0, le=MAX_TIMEOUT_SECONDS, description="Null: the tool's own.")
    ] = None
    context: Context | None = None
    schema_hash: Annotated[
        str, Field(description="Refuses the call where the tool has changed since it was listed.")
    ] = ""
    background_after_seconds: Annotated[
        float | None,
        Field(
            gt=0,
            le=MAX_TIMEOUT_SECONDS,
            description="After so long the call becomes a task: the answer's output is then an object with its "
            "`task_id`, and the work goes on. Null: never.",
        ),
    ] = None
    accepts: Annotated[
        list[str],
        Field(
            max_length=MAX_NEEDS,
            description="What the client can answer where the tool asks something: elicitation.form, "
            "elicitation.url, sampling, roots.",
        ),
    ] = []
    input_responses: Annotated[
        dict[str, Any] | None, Field(description="Answers to the `input_requests` of the call before, by their keys.")
    ] = None
    request_state: Annotated[str, Field(description="The `request_state` that came with them, unchanged.")] = ""


class Limit(BaseModel):
    """A limit that ended a call."""

    name: str
    value: float


class CallFault(BaseModel):
    """Why a call failed."""

    code: Annotated[str, Field(examples=["TOOL", "DEADLINE_EXCEEDED"])]
    message: str
    stage: Annotated[str, Field(examples=["NOT_DISPATCHED", "ACCEPTED"])]
    retry_safe: Annotated[bool, Field(description="Whether calling again cannot run the tool twice.")]
    limit: Limit | None = None
    retry_after_seconds: float = 0.0
    reason: str = ""


class Invoked(BaseModel):
    """How a call ended."""

    call_id: str
    output: Any
    is_error: bool
    error: CallFault | None = None
    content: Annotated[
        list[dict[str, Any]], Field(description="Parts that JSON cannot hold, as the wire has them.")
    ] = []
    input_requests: Annotated[
        dict[str, Any] | None,
        Field(description="What the tool asks before it goes on; only there where it asks. Call again with answers."),
    ] = None
    request_state: Annotated[str | None, Field(description="Goes back with the answers; only there where it asks.")] = (
        None
    )


class CallbackBody(BaseModel):
    """A call as a main server posts it (REST-40)."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "get_weather",
                    "arguments": {"city": "Oslo"},
                    "call_id": "call_1",
                    "raw_arguments": '{"city":"Oslo"}',
                }
            ]
        }
    )

    name: Any = ""
    arguments: Any = None
    call_id: Any = ""
    raw_arguments: Any = ""


class Envelope(BaseModel):
    """A result as a main server expects it (REST-42)."""

    output: Any
    is_error: bool
    error: str | None = None


class Problem(BaseModel):
    """Why a request was refused."""

    detail: str


class FieldProblem(BaseModel):
    """One rule that a request breaks."""

    type: str
    loc: list[str | int]
    msg: str
    input: Any = None
    ctx: dict[str, Any] | None = None


class Invalid(BaseModel):
    """Every rule that a request breaks, in the order of its fields."""

    detail: list[FieldProblem]
