"""Chats with a model of this machine that may call the tools of the bus. Ctrl-C ends a turn, Ctrl-D the chat."""

import argparse
import asyncio
import os
from contextlib import suppress

from openai import AsyncOpenAI, OpenAIError

from toolbus import Host, ToolBusError
from toolbus.loop import CallEnded, CallStarted, TextDelta, ToolLoop, openai_endpoint


async def answer(loop, items):
    async for event in loop.stream(items):
        match event:
            case TextDelta(text):
                print(text, end="", flush=True)
            case CallStarted(call):
                print(f"\n→ {call.name} {call.arguments_json}", flush=True)
            case CallEnded(done):
                print(f"← {done.name} {done.outcome}: {done.result.text[:200]}", flush=True)
    return event.reply.items


options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"))
options.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "local"))
given, items = options.parse_args(), []
client = AsyncOpenAI(base_url=given.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
with asyncio.Runner() as runner:
    loop = ToolLoop(host := Host(), openai_endpoint(client, given.model))
    with suppress(EOFError, KeyboardInterrupt):
        while line := input("\n> "):
            try:
                items = runner.run(answer(loop, [*items, {"role": "user", "content": line}]))
            except (KeyboardInterrupt, OpenAIError, ToolBusError) as problem:
                print(f"\n{type(problem).__name__}: {problem}")
    runner.run(host.close())
