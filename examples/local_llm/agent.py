"""Chats with a model on this machine that may call the tools of the bus. Ctrl-C ends a turn, Ctrl-D the chat."""

import argparse
import asyncio
import os
from contextlib import suppress

from openai import AsyncOpenAI, OpenAIError

from toolbus import Host, ToolBusError
from toolbus.loop import CallEnded, CallStarted, Finished, Reply, TextDelta, ToolLoop, ask_on_terminal, openai_endpoint


async def answer(loop: ToolLoop, last: Reply | None, line: str) -> Reply | None:
    async for event in loop.stream([*(last.items if last else ()), {"role": "user", "content": line}]):
        match event:
            case TextDelta(text):
                print(text, end="", flush=True)
            case CallStarted(call):
                print(f"\n→ {call.name} {call.arguments_json}", flush=True)
            case CallEnded(done):
                print(f"← {done.name} {done.outcome}: {done.result.text[:200]}", flush=True)
    return event.reply if isinstance(event, Finished) else last  # `Finished` is the last event of a turn


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"))
parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "local"))
options, reply = parser.parse_args(), None
client = AsyncOpenAI(base_url=options.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
with asyncio.Runner() as runner:
    loop = ToolLoop(host := Host(), openai_endpoint(client, options.model), approve=ask_on_terminal)
    with suppress(EOFError, KeyboardInterrupt):
        while line := input("\n> "):
            try:
                reply = runner.run(answer(loop, reply, line))
            except (KeyboardInterrupt, OpenAIError, ToolBusError) as error:
                print(f"\n{type(error).__name__}: {error}")
    runner.run(host.close())
