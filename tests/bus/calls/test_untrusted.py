"""Sources that are trusted less: all that they send is looked through, and what is held back is seen nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.core_model import Core, PeerDouble, tool
from toolbus.bus.calls.call_records import RecordFilter
from toolbus.errors import Code
from toolbus.parts.tripwire.tripwire import Tripwire
from toolbus.v1 import tool_pb2 as pb

VALUE = "hunter2"
SECRET = '{"user":{"password":"hunter2"}}'
TEXT = pb.ContentBlock(text=pb.TextContent(text=SECRET))


def bus_with_a_guarded_tool(contents: bool = False) -> tuple[Core, PeerDouble, PeerDouble]:
    core = Core(untrusted=("dropin", "dropin:*"))
    core.dispatcher.seams.tripwire = Tripwire()
    core.records.contents = contents
    return core, core.plugin("dropin:users", tool("find")), core.peer("host")


@pytest.mark.parametrize(
    "sent",
    [
        {"output_json": SECRET},
        {"output_json": '"{\\"api_key\\": \\"hunter2\\"}"'},
        {"content": [TEXT]},
        {"is_error": True, "error": pb.CallError(message=SECRET)},
        {"output_json": SECRET, "is_error": True},
    ],
)
def test_a_secret_of_an_untrusted_source_is_in_no_result_and_no_record(sent: dict[str, Any]) -> None:
    core, plugin, host = bus_with_a_guarded_tool(contents=True)
    call_id = core.call(host, "find")
    core.dispatcher.results(plugin, [pb.ToolResult(call_id=next(iter(plugin.pending)), **sent)], core.now)
    (result,) = host.results[call_id]
    assert result.error is not None
    assert (result.error.code, result.content) == (Code.SECRET_BLOCKED, ())
    (record,) = core.records.after(RecordFilter(), 0, 10)
    assert VALUE not in f"{result}{record.described(0.0)}"
    assert record.outcome == "SECRET_BLOCKED"


def test_progress_of_an_untrusted_source_carries_no_part_of_the_output() -> None:
    core, plugin, host = bus_with_a_guarded_tool()
    core.call(host, "find")
    number = next(iter(plugin.pending))
    core.progress(plugin, number, progress=1.0, message="half way", output_chunk='{"pass', content=[TEXT])
    core.progress(plugin, number, progress=2.0, message=SECRET)
    assert [(sign.progress, sign.message, sign.output_chunk, len(sign.content)) for sign in host.signs] == [
        (1.0, "half way", "", 0),
        (2.0, "", "", 0),
    ]


def test_results_of_a_trusted_source_are_not_judged() -> None:
    core, _, host = bus_with_a_guarded_tool()
    plugin = core.plugin("users", tool("show"))
    call_id = core.call(host, "show")
    core.progress(plugin, next(iter(plugin.pending)), message=SECRET)
    core.dispatcher.results(plugin, [pb.ToolResult(call_id=next(iter(plugin.pending)), output_json=SECRET)], core.now)
    (result,) = host.results[call_id]
    assert (result.error, result.output_json, host.signs[0].message) == (None, SECRET, SECRET)
