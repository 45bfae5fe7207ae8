import asyncio
import enum
from collections.abc import Callable
from typing import Any

from toolbus.functions.runner import run_handler
from toolbus.functions.tool_spec import ToolSpec, describe, spec_of
from toolbus.protocol.tool import Result
from toolbus.sdk import ToolScope


def spec(function: Callable[..., Any], **options: Any) -> ToolSpec:
    return spec_of(function, describe(function, **{"name": "tool", **options}))


async def run(
    function: Callable[..., Any], arguments: Any = None, scope: ToolScope | None = None, **options: Any
) -> Result:
    async def run_sync(job: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(job)

    return await run_handler(spec(function, **options), arguments or {}, scope or ToolScope("c1", "tool"), run_sync)


class Color(enum.Enum):
    RED = "red"
