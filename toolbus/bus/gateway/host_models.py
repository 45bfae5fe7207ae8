"""Defines the request and response bodies of the endpoints for hosts and operators: exports, search, tasks, records."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from toolbus.bus.catalog.policy import MAX_USER
from toolbus.protocol.tool import MAX_LEVEL

UserId = Annotated[
    str,
    Field(max_length=MAX_USER, description="For which user; empty: for calls that name none."),
]
Level = Annotated[
    int,
    Field(ge=0, le=MAX_LEVEL, description="The user's access level; tools that ask for more are not shown."),
]


# -- tools for a model -----------------------------------------------------------------------------------------------


class ExportLoss(BaseModel):
    """What a schema lost on its way into a dialect."""

    tool: str
    path: Annotated[str, Field(description="Where in its schema, as a JSON pointer; empty is the root.")]
    keyword: str
    why: str


class ExportLeftOut(BaseModel):
    """A tool that is not among those exported, and why."""

    tool: str
    why: str


class Exported(BaseModel):
    """Tools as one provider's API takes them, in the order of the catalog."""

    ok: bool
    dialect: str
    revision: Annotated[int, Field(description="Of the catalog.")]
    tools: Annotated[list[dict[str, Any]], Field(description="For the provider, as they are.")]
    names: Annotated[dict[str, str], Field(description="The way back: from the name that a model writes to the bus's.")]
    hashes: Annotated[dict[str, str], Field(description="By the bus's name: to be sent with a call as `schema_hash`.")]
    losses: list[ExportLoss]
    left_out: list[ExportLeftOut]
    tokens: Annotated[int, Field(description="What they cost a model, as an estimate.")]


class FoundTool(BaseModel):
    """A tool that was found."""

    name: str
    description: str
    parameters: Annotated[dict[str, Any] | None, Field(description="Only with `include_parameters`.")] = None
    score: Annotated[float, Field(description="Higher is better, within one answer.")]


class FoundTools(BaseModel):
    """What was found, best first; `success` is false, with `error`, where the mode does not exist."""

    success: bool
    mode: Annotated[str, Field(description="The one that answered.")]
    fallback: Annotated[bool, Field(description="Whether that is not the requested one.")]
    query: str
    result_count: int
    results: list[FoundTool]
    error: str | None = None


# -- records ---------------------------------------------------------------------------------------------------------


class RecordedRepair(BaseModel):
    """What the bus did to arguments before the tool got them; no values."""

    path: Annotated[str, Field(examples=["days", "where.city"])]
    from_type: Annotated[str, Field(alias="from", description="A type of JSON Schema, or `absent`.")]
    to: Annotated[str, Field(description="A type of JSON Schema, or `absent`.")]


class RecordedLimit(BaseModel):
    """A limit that a call exceeded."""

    name: str
    value: float


class RecordedFailure(BaseModel):
    """How a call failed."""

    message: Annotated[str, Field(description="Empty where it could repeat arguments or an output.")]
    stage: Annotated[str, Field(description="How far the call had got.", examples=["not_dispatched", "accepted"])]
    retry_safe: Annotated[bool, Field(description="Whether a retry repeats nothing.")]
    limit: RecordedLimit | None


class RecordedCall(BaseModel):
    """One call that has ended."""

    number: Annotated[int, Field(description="Which ended call of this bus it was, from 1.")]
    id: Annotated[str, Field(description="The bus's own id of the call; empty: it was refused.")]
    call_id: str
    name: str
    source: Annotated[str, Field(description="Whose tool was called.")]
    caller: str
    user_id: str
    round: Annotated[int, Field(description="The round of a turn that made the call, from 1; 0: unknown.")]
    order: Annotated[int, Field(description="Its place among the calls of that round, from 0.")]
    started: Annotated[float, Field(description="Seconds since the epoch.")]
    ended: float
    seconds: float
    outcome: Annotated[str, Field(description="`OK`, or the code of its error.", examples=["OK", "TOOL"])]
    arguments_size: int
    output_size: int
    repairs: Annotated[list[RecordedRepair], Field(description="At most 20; left out where there are none.")] = []
    parent: Annotated[str, Field(description="The `id` of the call that made it; left out where it is not nested.")] = (
        ""
    )
    trace_id: Annotated[str, Field(description="Of its trace; left out where that is not sampled.")] = ""
    failure: Annotated[RecordedFailure | None, Field(description="Left out where the call succeeded.")] = None
    arguments: Annotated[str | None, Field(description="Only where the bus keeps contents.")] = None
    output: Annotated[str | None, Field(description="Only where the bus keeps contents.")] = None


class ShownNotification(BaseModel):
    """What a plugin said to a user outside a call."""

    number: Annotated[int, Field(description="Rises with each, also over restarts of the bus.")]
    source: str
    user_id: Annotated[str, Field(description="Whom it is for; empty: everyone.")]
    text: str
    data: Annotated[Any, Field(description="JSON for programs; null: none.")]
    time_seconds: Annotated[float, Field(description="When the bus got it, since the epoch.")]


class Notifications(BaseModel):
    """The newest notifications."""

    ok: bool
    newest: Annotated[int, Field(description="The number of the newest that the bus has had: the next `since`.")]
    notifications: list[ShownNotification]


class RecordedCalls(BaseModel):
    """Records of ended calls."""

    ok: bool
    newest: Annotated[int, Field(description="The number of the newest record there is: the next `since`.")]
    calls: list[RecordedCall]
