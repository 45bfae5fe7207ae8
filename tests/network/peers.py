"""Offers a tool and calls it, over each address that is given: ``python peers.py PLUGIN HOST ADDRESS…``.

PLUGIN and HOST are credential files. What must not be seen on the line is in `hidden_words.py`.
"""

from __future__ import annotations

import asyncio
import sys

from tests.network.hidden_words import ARGUMENT, PLUGIN, RESULT, TOOL, USER
from toolbus import Host, Plugin
from toolbus.sdk import CallContext


async def main(plugin_file: str, host_file: str, *addresses: str) -> None:
    for address in addresses:
        plugin = Plugin(PLUGIN, address=address, credential=plugin_file)

        @plugin.tool(name=TOOL)
        def reveal(text: str) -> str:
            return RESULT if text == ARGUMENT else ""

        async with plugin, Host(address, credential=host_file) as host:
            await plugin.ready()
            for _ in range(20):
                result = await host.call(TOOL, {"text": ARGUMENT}, context=CallContext(user_id=USER))
                assert result.unwrap() == RESULT
            assert TOOL in [each.name for each in await host.list()]
    print("answered")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
