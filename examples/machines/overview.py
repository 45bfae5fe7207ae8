"""Prints what the machines of a bus report: a host for a bus on another machine.

python overview.py CREDENTIAL
"""

from __future__ import annotations

import asyncio
import sys

from toolbus import Host, SetupError, ToolBusError

SECONDS = 10.0  # for the bus to answer


async def overview(credential: str | None) -> None:
    """Calls the report of every machine, all at once."""
    async with Host(source="host:overview", credential=credential) as host:
        try:
            await asyncio.wait_for(host.ready(), SECONDS)
        except TimeoutError:
            raise host.unanswered(SECONDS) from None
        until = f"{host.expires:%Y-%m-%d}" if host.expires else "ever"
        print(f"attached as {host.identity or 'a program of this machine'}, good until {until}")
        names = [entry.tool.name for entry in await host.list() if entry.tool.name.endswith(":report")]
        for name, result in zip(names, await host.call_many([(name, {}) for name in names]), strict=True):
            print(f"{name}: {result.text}")


def main() -> int:
    """Reads the command line, and says in one line what went wrong."""
    try:
        asyncio.run(overview(sys.argv[1] if len(sys.argv) > 1 else None))  # None: TOOLBUS_CREDENTIAL
    except SetupError as error:
        print(error, file=sys.stderr)
        return 2
    except ToolBusError as error:  # a refused key is Unauthenticated, a bus that cannot be reached PeerLost
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
