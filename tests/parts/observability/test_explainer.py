"""Tests of `toolbus:explain`: each step that stops a call is named, and the verdict is what the call gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.bus.keys.keys_directory import KeysDirectory
from toolbus.bus import Bus
from toolbus.bus.access.identity import Globs
from toolbus.bus.catalog.policy import AccessRules
from toolbus.parts.identity.scope_texts import template
from toolbus.parts.observability.explainer import Explainer
from toolbus.sdk import CallContext, Plugin
from toolbus.testing import running_bus


@pytest_asyncio.fixture
async def bus() -> AsyncIterator[Bus]:
    rules = AccessRules.read({"tools": {"of_ann": ["ann"]}, "roles": {"cat": ["ann", "bob"]}, "sources": {"p": ["*"]}})
    async with running_bus(roles=("cat", "dog"), permissions=rules, silenced=frozenset({"mute"})) as bus:
        plugin = Plugin("p", address=bus.grpc_addresses[0])

        @plugin.tool(role="cat")
        def of_ann() -> str:
            return "yes"

        @plugin.tool(min_level=50, role="dog")
        def of_staff(limit: int = 5) -> str:
            return "yes"

        async with plugin:
            await plugin.ready()
            yield bus


async def explained(bus: Bus, tool: str, **question: Any) -> dict[str, Any]:
    result = await bus.call("toolbus:explain", {"tool": tool, **question})
    assert result.error is None, result.error
    output: dict[str, Any] = result.output
    return output


def stops(explanation: dict[str, Any]) -> dict[str, str]:
    """Returns the steps that do not let the call pass."""
    return {each["step"]: each["why"] for each in explanation["steps"] if each["passed"] is False}


@pytest.mark.parametrize(
    ("tool", "question", "step", "why"),
    [
        ("of_ann", {}, "rule tools", "is open to ann, not to a call without a user"),
        ("of_ann", {"user": "bob"}, "rule tools", "is open to ann, not to 'bob'"),
        ("of_staff", {"level": 49}, "level", "it needs access level 50, the user has 49"),
        ("of_staff", {"level": 50, "role": "cat"}, "registered", "no source has registered 'of_staff' in role 'cat'"),
        ("of_ann", {"user": "ann", "role": "cow"}, "role", "'cow' does not exist: the bus has cat, dog"),
        ("of_an", {"user": "ann"}, "registered", "similar names: of_ann"),
    ],
)
async def test_the_step_that_stops_a_call_is_named_and_the_verdict_is_what_the_call_gets(
    bus: Bus, tool: str, question: dict[str, Any], step: str, why: str
) -> None:
    explanation = await explained(bus, tool, **question)
    assert not explanation["callable"]
    assert why in stops(explanation)[step]
    context = CallContext(question.get("user", ""), {"level": str(question.get("level", 0))})
    result = await bus.call(tool, {}, role=question.get("role"), context=context)
    assert result.error is not None
    assert explanation["verdict"] == f"{result.error.code.name}: {result.error.message}"


@pytest.mark.parametrize(("tool", "question"), [("of_ann", {"user": "ann"}), ("of_staff", {"level": 50})])
async def test_nothing_stops_a_call_that_reaches_its_tool(bus: Bus, tool: str, question: dict[str, Any]) -> None:
    explanation = await explained(bus, tool, **question)
    assert explanation["callable"]
    assert not stops(explanation)


async def test_a_dialect_adds_the_name_on_the_wire_and_what_the_schema_loses(bus: Bus) -> None:
    *_, step = (await explained(bus, "of_staff", level=50, dialect="gemini"))["steps"]
    assert (step["step"], step["passed"]) == ("dialect", True)
    assert "gemini offers it as 'of_staff'" in step["why"]


async def test_a_tool_whose_plugin_disconnected_is_not_online(bus: Bus) -> None:
    plugin = Plugin("q", address=bus.grpc_addresses[0])

    @plugin.tool
    def brief() -> str:
        return "yes"

    async with plugin:
        await plugin.ready()
        assert (await explained(bus, "brief", role="dog"))["callable"]
        (peer,) = bus.core.sessions.presence.by_source["q"].values()
        peer.close("UNAVAILABLE", "test")
        bus.core.catalog.registry.lose(peer, "its connection broke", 0.0)
        explanation = await explained(bus, "brief", role="dog")
    assert "its connection broke" in stops(explanation)["online"]
    assert explanation["verdict"].startswith("UNAVAILABLE")


async def test_the_notices_that_name_a_missing_tool_or_its_file_are_quoted(bus: Bus) -> None:
    skipped = "clock.py: SyntaxError: invalid syntax (line 3)"
    plugin = Plugin("dropin", address=bus.grpc_addresses[0], notices=[skipped, "alarm-clock.py: is not allowed"])
    async with plugin:
        await plugin.ready()
        assert stops(await explained(bus, "dropin:clock"))["registered"].endswith(
            f"; source 'dropin' reports: {skipped}"
        )
        assert "reports" not in stops(await explained(bus, "cloc"))["registered"]


async def test_a_source_that_may_not_offer_tools_is_named(bus: Bus) -> None:
    await bus.call("toolbus:revoke", {"source": "p"})
    stopped = stops(await explained(bus, "of_ann", user="ann"))
    assert "`toolbus access grant p`" in stopped["registered"]


async def test_a_tool_that_was_refused_is_explained_with_the_reason(bus: Bus) -> None:
    async with Plugin("q", address=bus.grpc_addresses[0]) as plugin:
        plugin.add_tool(lambda: 1, name="endless", parameters={"$ref": "#"})
        await plugin.ready()
        why = stops(await explained(bus, "endless"))["registered"]
    assert why.startswith("source 'q' declares it, but the bus refused it: tool 'endless'")


async def test_the_scopes_of_an_identity_decide_for_it(bus: Bus, tmp_path: Path) -> None:
    keys = KeysDirectory(tmp_path)
    keys.add("laptop", replace(template("host"), call=Globs(["of_a*"]), users=Globs(["ann"])))
    explainer = Explainer(replace(bus.core, sessions=replace(bus.core.sessions, keyring=keys.ring())))
    assert explainer.explain("of_ann", user="ann", identity="laptop")["callable"]
    assert "may not act for user" in stops(explainer.explain("of_ann", user="bob", identity="laptop"))["claims"]
    hidden = explainer.explain("of_staff", user="ann", level=50, identity="laptop")
    assert "change call, never or roles in keys.toml" in stops(hidden)["identity"]
    assert not hidden["callable"]


async def test_the_remedy_for_a_role_can_be_pasted_into_a_shell_whatever_the_role_is_called(bus: Bus) -> None:
    async with Plugin("q", address=bus.grpc_addresses[0]) as plugin:
        plugin.add_tool(lambda: 1, name="waits", role="x; $(reboot)")
        await plugin.ready()
        why = stops(await explained(bus, "waits"))["registered"]
    assert "`toolbus call toolbus:role_add 'role=x; $(reboot)'`" in why
