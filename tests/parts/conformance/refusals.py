"""Has each client connect in ways that cannot work: its author has to read the address, the reason and how to fix it.

    python -m tests.parts.conformance.refusals [NAME …]

The program of `toolbus conformance` connects with a wrong token, with certificates that have expired or that the other
side does not know, without TLS to a port that has it, and so on. What is final ends it at once; what an operator may
repair meanwhile is written to standard error once, while it goes on trying. The exit code is 1 where something is
missing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.parts.conformance.matrix import PROGRAMS, chosen
from tests.sdk.played_bus import PlayedStream, played_bus
from tests.support.certificates import Authority, Pair, server_credentials

START_SECONDS = 30.0  # until a client has written why it does not attach
ATTEMPTS_SECONDS = 1.5  # for more attempts, which write nothing more
MAX_LINES = 3  # of one reason
AUTHORITY, FOREIGN = Authority(), Authority("another authority")
SERVER = AUTHORITY.server("127.0.0.1", "bus.example")
SECURE, MUTUAL = server_credentials(SERVER), server_credentials(SERVER, AUTHORITY)
REFUSAL = "the token is not a key of this bus"
_GRPC = re.compile(r"^(I\d{4} |\(node:\d+\)|\(Use `node)")  # of the libraries below a client


@dataclass(frozen=True, slots=True)
class Mistake:
    """A way to connect that cannot work.

    Attributes:
        listener: what the bus shows; None for plain text.
        words: what the client writes: `ADDRESS` and `TARGET` (without its prefix) stand for those of the bus, `FILE`
            for the path of the credential.
        final: whether the client ends at once.
    """

    name: str
    listener: grpc.ServerCredentials | None
    prefix: str
    words: Sequence[str]
    ca: str = AUTHORITY.pem
    own: Pair | None = None
    final: bool = False
    refuses: bool = False


MISTAKES = (
    Mistake("a wrong token", SECURE, "tls:", ("ADDRESS", REFUSAL, "FILE"), final=True, refuses=True),
    Mistake(
        "an unknown authority", SECURE, "tls:", ("ADDRESS is not signed", "FILE", "keys renew chat"), ca=FOREIGN.pem
    ),
    Mistake(
        "an expired certificate",
        MUTUAL,
        "mtls:",
        ("ADDRESS", "certificate", "FILE", "keys renew chat"),
        own=AUTHORITY.client("chat", -1),
    ),
    Mistake(
        "a certificate of another authority",
        MUTUAL,
        "mtls:",
        ("ADDRESS", "certificate", "FILE", "keys renew chat"),
        own=FOREIGN.client("chat"),
    ),
    Mistake(
        "tls: to a port that asks for certificates",
        MUTUAL,
        "tls:",
        ("ADDRESS", "asks for a client certificate", "FILE"),
    ),
    Mistake("mtls: without a certificate", MUTUAL, "mtls:", ("ADDRESS", "client certificate", "FILE"), final=True),
    Mistake("plain text to a port with TLS", SECURE, "", ("ADDRESS speaks TLS", "write tls:TARGET")),
    Mistake("tls: to a port without it", None, "tls:", ("ADDRESS does not speak TLS", "TARGET")),
    Mistake(
        "another name",
        server_credentials(AUTHORITY.server("bus.example")),
        "tls:",
        ("ADDRESS is for bus.example", "keys init"),
    ),
    Mistake(
        "an expired certificate of the bus",
        server_credentials(AUTHORITY.server("127.0.0.1", days=-1)),
        "tls:",
        ("ADDRESS has expired", "clock"),
    ),
)


async def _accept(stream: PlayedStream) -> None:
    await stream.accept()
    while await stream.read() is not None:
        pass


async def _refuse(stream: PlayedStream) -> None:
    await stream.read_until("attach")
    await stream.end(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


def _credential(file: Path, mistake: Mistake) -> Path:
    file.touch(0o600)
    texts = {"token": "tbk_1_PAWPAW", "name": "chat", "ca": mistake.ca}
    if mistake.own is not None:
        texts |= {"certificate": mistake.own.certificate, "key": mistake.own.key}
    file.write_text("".join(f'{name} = """\n{text}"""\n' for name, text in texts.items()), "ascii")
    return file


@asynccontextmanager
async def _client(command: Sequence[str], address: str, credential: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    variables = {**os.environ, "TOOLBUS_ADDRESS": address, "TOOLBUS_CREDENTIAL": str(credential)}
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=variables, stdout=null, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def play(command: Sequence[str], mistake: Mistake) -> tuple[str, list[str]]:
    """Makes a mistake with a client; returns what is wrong ("" if nothing is), and what the client wrote."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            played_bus(*[_refuse if mistake.refuses else _accept] * 9, tls=mistake.listener)
        )
        file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "chat.toolbus")
        address = mistake.prefix + bus.address
        process = await stack.enter_async_context(_client(command, address, _credential(file, mistake)))
        values = {"ADDRESS": address, "TARGET": bus.address, "FILE": str(file)}
        missing = [re.sub("ADDRESS|TARGET|FILE", lambda word: values[word[0]], text) for text in mistake.words]
        lines: list[str] = []
        assert process.stderr is not None
        until = time.monotonic() + START_SECONDS
        while line := await _next(process.stderr, until):
            if line.strip() and not _GRPC.match(line):
                lines.append(line.rstrip())
            missing = [text for text in missing if text not in line]
            if not missing and not mistake.final:
                until = min(until, time.monotonic() + ATTEMPTS_SECONDS)
        if missing:
            return f"it does not write {', '.join(map(repr, missing))}", lines
        if mistake.final and not await _ends(process):
            return "it goes on, and this mistake is final", lines
        if process.returncode is not None and not mistake.final:
            return "it ended, and this may be repaired while it runs", lines
        return "" if len(lines) <= MAX_LINES else f"it wrote {len(lines)} lines, it may write {MAX_LINES}", lines


async def _next(reader: asyncio.StreamReader, until: float) -> str:
    """Returns the next line until a moment; "" if none came, or at the end."""
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0)):
            return (await reader.readline()).decode()
    except TimeoutError:
        return ""


async def _ends(process: asyncio.subprocess.Process) -> bool:
    try:
        async with asyncio.timeout(START_SECONDS):
            return await process.wait() == 1
    except TimeoutError:
        return False


async def table(names: Sequence[str], *, shown: bool) -> bool:
    """Makes every mistake with every client; prints what is wrong, and returns whether nothing is."""
    right = True
    for mistake in MISTAKES:
        for name in names:
            wrong, lines = await play(PROGRAMS[name], mistake)
            right = right and not wrong
            print(f"{mistake.name}, {name}: {wrong or 'explained'}", flush=True)
            if wrong or shown:
                print(*(f"    {line}" for line in lines), sep="\n", flush=True)
    return right


def main() -> int:
    """Reads the command line and plays."""
    parser = argparse.ArgumentParser(description="Have each client connect in ways that cannot work.")
    parser.add_argument("--show", action="store_true", help="print what the clients write")
    options = chosen(parser)
    return 0 if asyncio.run(table(options.names, shown=options.show)) else 1


if __name__ == "__main__":
    sys.exit(main())
