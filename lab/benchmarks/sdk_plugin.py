"""A plugin written with the SDK, for the faults that an SDK takes part in.

It offers one tool under a given name. A call prints ``started``, never ends by itself, and prints ``cancelled`` with
the moment (``time.monotonic_ns``, one clock for the whole machine) at which its handler learned of its cancel.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from toolbus.sdk import Plugin


async def hold() -> None:
    """Waits until it is cancelled."""
    print("started", flush=True)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        print(f"cancelled {time.monotonic_ns()}", flush=True)
        raise


def main() -> None:
    """Reads the command line and runs the plugin until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("name")
    options = parser.parse_args()
    plugin = Plugin(f"bench-{options.name}", address=options.address)
    plugin.tool(name=options.name, description="Waits until it is cancelled.")(hold)
    plugin.run()


if __name__ == "__main__":
    main()
