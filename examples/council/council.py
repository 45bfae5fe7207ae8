"""Runs a council of two: the results of their tools, and the text that the main model then gets.

It runs with no model at all, on a bus of its own. `--bus` has it use another one; `--url` and `--model` name a server
that speaks OpenAI's chat completions, and then each member has a prompt tool too.

    python examples/council/council.py "I push the door open."
"""

import argparse
import asyncio
import json
import os
import re
from contextlib import AsyncExitStack

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.panel import Panel

from toolbus import Bus, Config, Host, ToolBusError
from toolbus.extension import (
    Council,
    CouncilEvent,
    CouncilSettings,
    CouncilStarted,
    Member,
    MemberDone,
    SidecarSettings,
    bundled_prompt_tools,
    sidecar_model,
)
from toolbus.sdk import Extension, ToolInvocation

LORE = {
    "bell": "The bell of the inn rings by itself when somebody lies.",
    "door": "The door has no lock; the innkeeper says that it chooses.",
}
SO_FAR = [
    {"role": "system", "content": "A winter night at an inn below the pass."},
    {"role": "assistant", "content": "Snow has covered the path. Somewhere behind the door of the inn a bell rings."},
]


def tavern(address: str) -> Extension:
    """Returns the extension whose tools the members have."""
    extension = Extension("tavern", address=address)

    @extension.tool(display_name="Lore", council_eligible=True, host_args=True)
    def lore(context: str = "") -> str:
        """Finds what is known about anything that was mentioned."""
        words = set(re.findall(r"\w+", context.lower()))
        return "\n".join(f"- {text}" for word, text in LORE.items() if word in words) or "Nothing is known."

    extension.register_tool(name="pace", display_name="Pace", description="Measures replies.", council_eligible=True)

    @extension.on_invocation
    def pace(call: ToolInvocation) -> str:
        """Answers for all tools without a function of their own: here `pace`."""
        replies = [each["content"] for each in call["contextMessages"] or () if each["role"] == "assistant"]
        words = len(replies[-1].split()) if replies else 0
        advice = "shorten the next one" if words > 60 else "there is room for a longer one"
        return f"{call['councilMember']['name']}: the last reply has {words} words; {advice}."

    return extension


def members(shared: bool, has_model: bool) -> tuple[Member, ...]:
    """Returns the members; a shared bus may have the memory extension, and prompt tools need a model."""
    hers = ("tavern:lore", *("memory:recall",) * shared, *("analyze_character",) * has_model)
    tom = Member("tom", "Tom", ("tavern:pace", *("suggest_direction",) * has_model), role="Pacing")
    return Member("mira", "Mira", hers, role="Archivist"), tom


async def main(arguments: argparse.Namespace) -> None:
    async with AsyncExitStack() as running:
        own = Bus(Config(grpc=("127.0.0.1:0",), http="off"))
        address = arguments.bus or (await running.enter_async_context(own)).grpc_addresses[0]
        host = await running.enter_async_context(Host(address))
        await host.list(timeout=5)  # fails here if no bus is running
        extension = await running.enter_async_context(tavern(address))
        await extension.ready()
        sidecar = SidecarSettings(arguments.url, arguments.model)
        model = sidecar_model(sidecar, api_key=os.environ.get("OPENAI_API_KEY"))  # None without a URL
        who = CouncilSettings(members(bool(arguments.bus), model is not None))
        council = Council(host, who, model=model, sidecar=sidecar, prompt_tools=bundled_prompt_tools())
        console, events = Console(quiet=arguments.json, highlight=False), []

        def show(event: CouncilEvent) -> None:
            events.append(event.described())
            if isinstance(event, CouncilStarted):
                console.print(f"[bold]council[/] of {event.member_count}")
            for each in event.outcomes if isinstance(event, MemberDone) else ():
                how = "[green]ok[/]" if each.success else f"[red]{escape(each.error)}[/]"
                name = f"{escape(each.member_name)} · {escape(each.display_name)}"
                console.print(f"  {name} · {each.seconds:.2f} s · {how}")

        messages = [*SO_FAR, {"role": "user", "content": arguments.text}]
        result = await council.run(messages, user_id=arguments.user, on_event=show)
        assert result is not None  # it is None if no member takes part; these always do
        if arguments.json:
            print(json.dumps({"events": events, **result.described()}, ensure_ascii=False, indent=2))
        failed = f", {len(result.failed)} failed" * bool(result.failed)
        console.print(f"[bold]done[/], {len(result.outcomes)} results{failed} in {result.seconds:.2f} s")
        console.print(Panel(Markdown(result.block), title="what the main model gets"))


options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("text", nargs="?", default="I push the door open.", help="what the user says next")
options.add_argument("--bus", default="", help="address of a bus; without it one runs in this program")
options.add_argument("--url", default=os.environ.get("OPENAI_BASE_URL", ""), help="of a server, with its /v1")
options.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "local"), help="as that server calls it")
options.add_argument("--user", default="", help="on whose behalf tools are called")
options.add_argument("--json", action="store_true", help="events, results and block as one JSON object")
try:
    asyncio.run(main(options.parse_args()))
except ToolBusError as problem:
    raise SystemExit(f"council: {problem}") from None
