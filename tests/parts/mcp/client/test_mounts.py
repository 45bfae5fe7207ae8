"""The mounts of a bus: which are started anew, and what is kept of their output."""

# ruff: noqa: F401, F811  # fixtures are imported by name and asked for by name

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from tests.parts.mcp.client.mount_cases import House, house
from toolbus.errors import InvalidRequest
from toolbus.parts.mcp.client.entries import MountEntry
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


async def test_only_mounts_whose_entry_changed_are_started_anew(house: House) -> None:
    def entries(**commands: str) -> dict[str, MountEntry]:
        return {name: MountEntry(name, command=command) for name, command in commands.items()}

    await house.mounts.apply(entries(a="x", b="x", c="x", d="x"))
    before = {mount.name: mount for mount in house.mounts}
    after = entries(a="x", b="y", c="x", e="x")
    after["c"] = replace(after["c"], disabled=True)
    await house.mounts.apply(after)
    now = {mount.name: mount for mount in house.mounts}
    assert now.keys() == {"a", "b", "e"}
    assert now["a"] is before["a"]
    assert now["b"] is not before["b"]
