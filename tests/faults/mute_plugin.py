"""A plugin in a process of its own that takes calls and never answers: ``mute_plugin.py ADDRESS``.

It tells its standard output how many calls it has, so that a test knows when to stop or kill it.
"""

from __future__ import annotations

import queue
import sys

import grpc

from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb


def main(address: str) -> None:
    outbox: queue.SimpleQueue[wire.InvokeRequest] = queue.SimpleQueue()
    outbox.put(
        wire.InvokeRequest(
            attach=wire.Attach(protocol_version=1, source="mute", tools=[pb.Tool(name="mute")], max_in_flight=500)
        )
    )
    calls = 0
    with grpc.insecure_channel(address) as channel:
        for frame in rpc.ToolBusServiceStub(channel).Invoke(iter(outbox.get, None)):
            calls += len(frame.calls)
            if frame.HasField("heartbeat"):
                outbox.put(wire.InvokeRequest(heartbeat=frame.heartbeat))
            print(calls, flush=True)


main(sys.argv[1])
