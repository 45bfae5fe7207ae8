"""Defines the options of a tool, for every decorator and every method that offers one: names, types and meaning.

`declaration` checks the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from toolbus.text import quote


class ToolTraits(TypedDict, total=False):
    """The options of a tool beside its name, description and schema. None of them is required.

    Attributes:
        timeout: seconds a call may take, more than 0 and at most 300; 30 by default.
        role: the persona that it is for; None or empty means all.
        idempotent: running twice does no more than running once, so a lost call may be sent again.
        read_only: running changes nothing, so a lost call may be sent again.
        destructive: running may destroy something.
        open_world: running reaches beyond this machine.
        display_name: a name for people.
        idle_timeout: seconds without progress or result that end a call; None means no such limit.
        validate: whether the bus checks arguments against the schema; None means that it does.
        no_repair: the bus does not repair arguments that break the schema.
        no_background: a host must wait for the result.
        allow_repeat: the guard against repeated identical calls lets it pass.
        council_eligible: members of a council may be offered it.
        inline_available: the main model may be offered it outside a council.
        direct_reply: the result is the reply to the user.
        min_level: the access level that a user needs, as the host states it; 0 means all users.
        metadata: any JSON object for hosts.
        output_schema: JSON Schema of the output, or True: the return annotation's. Hosts and MCP clients see it.
        validate_output: whether the bus refuses results that break it.
        needs: the questions that its caller must be able to answer (`elicitation.form`, `sampling` …); other calls are
            refused before they run.
        always_background: a call becomes a task at once if its caller accepts tasks.
    """

    timeout: float
    role: str | None
    idempotent: bool | None
    read_only: bool | None
    destructive: bool | None
    open_world: bool | None
    display_name: str
    idle_timeout: float | None
    validate: bool | None
    no_repair: bool
    no_background: bool
    allow_repeat: bool
    council_eligible: bool
    inline_available: bool
    direct_reply: bool
    min_level: int
    metadata: Mapping[str, Any] | None
    output_schema: dict[str, Any] | bool | None
    validate_output: bool
    needs: Sequence[str]
    always_background: bool


class ToolOptions(ToolTraits, total=False):
    """All options of a tool. None of them is required.

    Attributes:
        name: its name for models, `[A-Za-z0-9_.-]{1,64}`; the function's by default, and if it is `""`.
        description: tells a model when to use it; the docstring's first paragraph by default.
        parameters: JSON Schema of the arguments; read from the type hints by default.
    """

    name: str | None
    description: str | None
    parameters: dict[str, Any] | None


OPTION_NAMES = ("name", "description", "parameters", *ToolTraits.__annotations__)


def check_option_names(tool: object, names: Iterable[str]) -> None:
    """Checks that all options exist.

    Args:
        tool: the tool's name, for the message.

    Raises:
        TypeError: one does not; the text lists those that do.
    """
    for name in names:
        if name not in OPTION_NAMES:
            known = ", ".join(OPTION_NAMES)
            raise TypeError(
                f"tool {quote(str(tool))}: {quote(name)} is not an option of a tool; the options are {known}"
            )
