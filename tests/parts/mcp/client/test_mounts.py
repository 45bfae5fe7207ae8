"""The output of mounted MCP servers: what is kept of it, and until when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from toolbus.errors import InvalidRequest
from toolbus.parts.mcp.client.mount import Mount
from toolbus.parts.mcp.client.mounts import MountOutput


async def test_the_output_of_mounts_that_were_removed_goes_with_the_next_new_one() -> None:
    mounts = [cast(Mount, SimpleNamespace(name=name)) for name in ("files", "mail")]
    output = MountOutput(lambda: mounts)
    for mount in mounts:
        output.take(mount.name, f"{mount.name} runs")
    del mounts[0]
    mounts.append(cast(Mount, SimpleNamespace(name="clock")))
    output.take("clock", "clock runs")
    assert [(await output.read(name, 9, -1, 0.0))["lines"][0]["text"] for name in ("mail", "clock")] == [
        "mail runs",
        "clock runs",
    ]
    with pytest.raises(InvalidRequest, match="there is no mount 'files'"):
        await output.read("files", 9, -1, 0.0)
