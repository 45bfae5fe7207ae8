"""Makes a plugin whose every text attacks what shows it: markup, scripts, escapes of terminals, reordered text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.parts.console.page.world import World
from tests.support.processes import Running
from tests.support.waiting import WAIT_SECONDS, within
from toolbus import Host, Plugin
from toolbus.functions.scope import ToolScope
from toolbus.sdk import CallContext, Extension
from toolbus.testing import running_bus

TARGET = "http://evil.test:9/"
MARKUP = (
    f"<img src={TARGET}img onerror=\"globalThis.broken='img'\">",
    "<svg/onload=globalThis.broken='svg'>",
    "\"><script>globalThis.broken='script'</script>",
    f"</textarea><iframe src={TARGET}frame></iframe>",
    f"<style>@import '{TARGET}style'; *{{background:url({TARGET}css)}}</style>",
    f"<link rel=stylesheet href={TARGET}link><base href={TARGET}>",
    "' autofocus onfocus='alert(1)' x='",
    '<a href="javascript:alert(1)">here</a>',
    "javascript:alert(1)",
    "{{constructor.constructor('alert(1)')()}}${alert(1)}",
    f"url({TARGET}value);}}*{{display:none}}",
)
ESCAPES = (
    "\x1b[31;1mred\x1b[0m \x1b]0;title\x07 \x1b]8;;http://evil.test\x1b\\link\x1b]8;;\x1b\\ \x9b2J \x1b[2K\rover\b\b"
)
REORDERED = "\u202egnp.exe\u202c \u2066first\u2067second\u2069 \u200f\u061c"
ATTACK = " ".join((*MARKUP, ESCAPES, REORDERED, "\u2028\u2029\ufeff\u0000"))
SAFE = ATTACK.replace("\0", "").replace("\ufeff", "")  # where NUL is refused
NAMES = ("__proto__", "constructor", "hasOwnProperty", "toString", "javascript.alert", "-", "..", "0")
SOURCE = "javascript:alert"

SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": SAFE,
    "description": SAFE,
    "properties": {
        SAFE: {"type": "string", "title": SAFE, "description": SAFE, "default": SAFE, "examples": [SAFE]},
        "__proto__": {"type": "object", "properties": {"constructor": {"const": SAFE}}, "description": SAFE},
        "choice": {"enum": [*MARKUP, ESCAPES, REORDERED], "default": MARKUP[0], "description": SAFE},
        "either": {"anyOf": [{"title": SAFE, "type": "string", "pattern": "<.*>"}, {"type": "null", "title": SAFE}]},
        "constructor": {"type": "array", "items": {"type": "string", "title": SAFE, "default": SAFE}},
        "when": {"type": "string", "format": MARKUP[0]},
    },
}
PRINTING = f"""
import asyncio, logging, sys
from toolbus import Plugin

ATTACK = {SAFE!r}
plugin = Plugin("prints")

@plugin.tool
def speak(**given) -> str:
    '''Prints.'''
    print(ATTACK, flush=True)
    sys.stderr.write(ATTACK + "\\n")
    logging.getLogger(ATTACK).warning("%s", ATTACK)
    return ATTACK
"""


def attacker(address: str) -> tuple[Plugin, ...]:
    """Returns plugins that attack in every text that the protocol lets them choose."""
    plugin = Plugin(SOURCE, address=address, notices=(SAFE,))
    extension = Extension("__proto__", address=address)

    async def answers(ctx: ToolScope, **given: Any) -> dict[str, Any]:
        ctx.progress(1, total=2, message=SAFE, chunk=SAFE)
        return {**given, "__proto__": SAFE, SAFE: [SAFE, {"html": SAFE}], "constructor": None}

    async def fails(ctx: ToolScope, **given: Any) -> None:
        ctx.progress(1, message=SAFE)
        raise RuntimeError(SAFE)

    async def waits(ctx: ToolScope, **given: Any) -> None:
        ctx.progress(1, message=SAFE, chunk=SAFE)
        await asyncio.sleep(WAIT_SECONDS)

    traits: dict[str, Any] = {"description": SAFE, "display_name": SAFE, "metadata": {SAFE: SAFE, "icon": TARGET}}
    for name in NAMES:
        plugin.add_tool(answers, name=name, parameters=SCHEMA, validate=False, **traits)
    plugin.add_tool(fails, name="fails", parameters=SCHEMA, validate=False, **traits)
    plugin.add_tool(waits, name="waits", parameters={"type": "object"}, timeout=0.2, **traits)
    extension.tool(name="lore", council_eligible=True, **traits)(answers)
    return plugin, extension


@asynccontextmanager
async def attacked_world(folder: Path) -> AsyncIterator[World]:
    """Runs a bus with the attacker, after calls of all its tools for users whose names attack as well."""
    (folder / "prints.py").write_text(PRINTING, "utf-8")
    member = {"id": SAFE[:80], "name": SAFE, "role": SAFE, "avatarUrl": TARGET, "tools": ["__proto__:lore"]}
    run = {"members": [member], "chat_id": SAFE[:90], "messages": [{"role": "user", "content": SAFE}]}
    async with running_bus(http="127.0.0.1:0", record_contents=True, data_dir=folder / "data") as bus:
        address, http = bus.grpc_addresses[0], str(bus.http_address)
        first, second = attacker(address)
        async with first, second, Host(address, source="assistant") as host:
            await within(first.ready())
            await within(second.ready())
            async with Running(folder, "run", folder / "prints.py", "--bus", address) as supervisor:
                await within(asyncio.to_thread(supervisor.says, "attached to the bus"))
                user = CallContext(user_id=SAFE[:60], attributes={"level": "0"})
                for name in (*NAMES, "fails", "waits", "speak"):
                    await host.call(name, {SAFE: SAFE, "choice": MARKUP[0]}, context=user)
                await host.call("fails", {}, context=user, background_after=0.001)
                bus.permit("tools", "constructor", [SAFE[:60]])
                world = World(address, http, host)
                await world.post("/api/council/run", run)
                yield world
