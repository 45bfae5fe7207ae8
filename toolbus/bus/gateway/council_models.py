"""Defines the request and response bodies of the council's endpoints.

Request bodies use snake_case, as everywhere in the gateway. Records of a run, its tools and its events use camelCase,
as hosts of role-play systems know them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from toolbus.bus.catalog.policy import MAX_USER
from toolbus.bus.catalog.schema import is_deeper
from toolbus.bus.gateway.contract_models import Text
from toolbus.text import quote

MAX_MEMBERS = 100  # of a run
MAX_DEPTH = 16  # of members and settings
MAX_ID = 256  # characters of a chat's or a run's id

_MEMBER: Any = {"id": "m1", "name": "Ada", "tools": ["memory:recall"], "role": "Archivist", "chance": 100}
_MESSAGES: Any = [{"role": "user", "content": "Who lives at the lighthouse?"}]


def _shallow(value: Any) -> Any:
    """Refuses a value that is nested too deeply for members and settings."""
    if is_deeper(value, MAX_DEPTH):
        raise PydanticCustomError(
            "too_deep", "Input should not be nested deeper than {most} levels", {"most": MAX_DEPTH}
        )
    return value


# The dialects of requests to a model; those of realtime sessions and MCP are not.
CHAT_DIALECTS = ("openai", "openai-responses", "anthropic", "gemini", "ollama")


def known_chat_dialect(name: str) -> str:
    """Refuses a dialect that does not write tools for a request to a model."""
    if name not in CHAT_DIALECTS:
        raise ValueError(f"there is no dialect {quote(name)} for requests: use one of {', '.join(CHAT_DIALECTS)}")
    return name


Shallow = Annotated[dict[str, Any], AfterValidator(_shallow)]


class _Body(BaseModel):
    """A request; unknown fields are ignored, and the response names them."""

    model_config = ConfigDict(extra="allow")

    @property
    def unknown(self) -> list[str]:
        """The names of the fields that are ignored."""
        return list(self.model_extra or ())

    def known(self) -> dict[str, Any]:
        """Returns the fields that the model knows."""
        return self.model_dump(include=set(type(self).model_fields), by_alias=True)


class _CouncilBody(_Body):
    """What a council's members know, and who they are."""

    messages: Annotated[
        list[dict[str, Any]],
        Field(description="The conversation, oldest first, as providers write it: `role`, `content`, `name`."),
    ] = []
    persona: Annotated[Text, Field(description="Who the user plays.")] = ""
    character: Annotated[Text, Field(description="Who the main model plays.")] = ""
    world_info: Annotated[Text, Field(description="What is known of the world.")] = ""
    user_id: Annotated[str, Field(max_length=MAX_USER, description="For which user.")] = ""
    attributes: Annotated[
        dict[Text, Text],
        Field(description="What tools may know; `level` is the user's access level.", examples=[{"level": "50"}]),
    ] = {}
    members: Annotated[
        list[Shallow] | None,
        Field(max_length=MAX_MEMBERS, description="Instead of those of the council file."),
    ] = None
    settings: Annotated[
        Shallow | None, Field(description="In the place of those in force, as `GET /api/council` shows them.")
    ] = None


class InlineBody(_CouncilBody):
    """Asks for the members' tools as the main model is offered them."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"dialect": "openai", "members": [_MEMBER]}]})

    dialect: Annotated[
        str,
        AfterValidator(known_chat_dialect),
        Field(description="Whose format.", json_schema_extra={"enum": [*CHAT_DIALECTS]}),
    ] = "openai"


class InlineInvokeBody(InlineBody):
    """A call of the main model, by the name that it was offered."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"name": "m1_memory_recall", "arguments": {"query": "door"}, "members": [_MEMBER]}]
        }
    )

    name: Annotated[str, Field(min_length=1, max_length=MAX_ID, description="As the model wrote it.")]
    arguments: Annotated[
        dict[str, Any] | str, Field(description="An object; or text: the arguments as the model wrote them.")
    ] = {}
    schema_hash: Annotated[str, Field(description="Of the tool as it was offered; a changed tool is refused.")] = ""
    timeout_seconds: Annotated[
        float | None, Field(gt=0, description="How long it may take; null: as long as the tool says.")
    ] = None


class InlineName(BaseModel):
    """What one offered name stands for."""

    tool: Annotated[str, Field(description="The tool as the bus lists it.")]
    member_id: Annotated[str, Field(description="Empty: a tool of no member.")]
    member_name: str
    schema_hash: str


class InlineOffer(BaseModel):
    """The members' tools as the main model is offered them."""

    ok: bool
    dialect: str
    tools: Annotated[list[dict[str, Any]], Field(description="For the request to the model.")]
    names: Annotated[dict[str, InlineName], Field(description="By the names that the model sees.")]
    missing: Annotated[
        list[dict[str, str]], Field(description="Assigned tools that are not there: `memberId` and `toolName`.")
    ]
    ignored: Annotated[list[str] | None, Field(description="Keys of the request that mean nothing here.")] = None


class CouncilRunBody(_CouncilBody):
    """A run of the council."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": _MESSAGES, "chat_id": "chat-1", "members": [_MEMBER]}]}
    )

    chat_id: Annotated[
        str,
        Field(max_length=MAX_ID, description="The conversation; without it earlier results are not stored."),
    ] = ""
    regenerates: Annotated[
        bool,
        Field(
            description="Whether the reply is made again: with the setting `retain_results_for_regens` an earlier run "
            "is used, where nothing has changed."
        ),
    ] = False


class FailedTool(BaseModel):
    """One tool of one member, as `COUNCIL_TOOLS_FAILED` names it; whatever else stands there is ignored."""

    model_config = ConfigDict(alias_generator=to_camel)

    member_id: Text
    tool_name: Text


class CouncilRetryBody(_Body):
    """A run whose failed tools are to run again."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"run_id": "0123456789abcdef", "only": [{"memberId": "m1", "toolName": "memory:recall"}]}]
        }
    )

    run_id: Annotated[str, Field(min_length=1, max_length=MAX_ID, description="`runId` of its answer.")]
    only: Annotated[
        list[FailedTool] | None, Field(description="Some of those that failed; null or left out: all of them.")
    ] = None


class _Record(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)


class CouncilTool(_Record):
    """A tool that members can be assigned."""

    name: Annotated[str, Field(description="As it is assigned.")]
    qualified_name: str
    display_name: str
    description: str
    source: Annotated[str, Field(description="Whose it is; empty for prompt tools.")]
    category: str
    kind: Annotated[str, Field(examples=["extension", "prompt"])]
    available: Annotated[bool, Field(description="Whether it can run now.")]
    reason: Annotated[str, Field(description="Why it cannot; empty where it can.")]


class CouncilTools(_Record):
    """The tools that members can be assigned: those of the bus that are made for it, then prompt tools."""

    ok: bool
    count: int
    tools: list[CouncilTool]


class CouncilShown(BaseModel):
    """Settings and members in force, spelled so that a run takes them as its own."""

    ok: bool
    settings: dict[str, Any]
    members: list[dict[str, Any]]
    sidecar: Annotated[
        dict[str, Any],
        Field(description="The model of prompt tools: its settings, `available`, and `reason` where it is not."),
    ]


class CouncilResult(_Record):
    """The result of one tool of one member."""

    member_id: str
    member_name: str
    tool_name: str
    tool_display_name: str
    success: bool
    content: str
    duration_ms: int
    error: Annotated[str | None, Field(description="Only where it failed.")] = None
    timeout_ms: Annotated[int | None, Field(description="The time that it had; only where that ran out.")] = None
    result_variable: Annotated[str | None, Field(description="Only where the content is stored by name.")] = None


class SkippedTool(_Record):
    """A tool of a member who takes part that was not there."""

    member_id: str
    tool_name: str
    why: str


class CouncilRunLine(_Record):
    """A run in a list: who took part and how their tools ended."""

    run_id: str
    chat_id: Annotated[str, Field(description="Of the conversation; empty where the request named none.")]
    ended: Annotated[float, Field(description="Seconds since the epoch; retries do not change it.")]
    members: Annotated[list[str], Field(description="Names of those who took part; ids where none of their tools ran.")]
    total_duration_ms: int
    success_count: int
    failed_count: int
    skipped_count: int


class CouncilRuns(BaseModel):
    """The newest runs, the newest first."""

    ok: bool
    count: int
    runs: list[CouncilRunLine]


class CouncilAnswer(_Record):
    """The result of a run. Most fields are set only where at least one member took part."""

    ok: bool
    active: Annotated[bool, Field(description="Whether any member took part, with a tool that was there.")]
    reason: Annotated[str | None, Field(description="Why no member took part.")] = None
    results: Annotated[list[CouncilResult], Field(description="In the order of members and of their tools.")]
    run_id: str | None = None
    generation_id: Annotated[str | None, Field(description="The same, as events name it.")] = None
    deliberation: Annotated[str | None, Field(description="Markdown for the main model.")] = None
    history: Annotated[str | None, Field(description="The same of earlier runs of the chat; may be empty.")] = None
    named_results: dict[str, str] | None = None
    total_duration_ms: int | None = None
    success_count: int | None = None
    failed_count: int | None = None
    reused: Annotated[bool | None, Field(description="Whether it is an earlier run's, since nothing had changed.")] = (
        None
    )
    skipped: Annotated[
        list[SkippedTool] | None, Field(description="Tools of those who take part that were not there.")
    ] = None
    ignored: Annotated[
        list[str] | None, Field(description="Keys of the request that mean nothing here; only where there are some.")
    ] = None
