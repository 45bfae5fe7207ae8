"""Asks for the health of a bus every 20 ms until it is terminated, and prints how often, and the longest wait in ms.

In a process of its own, so that what a test does itself keeps no answer waiting: ``python health_probe.py HOST:PORT``.
"""

from __future__ import annotations

import signal
import sys
import threading
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PAUSE = 0.02


def main(address: str) -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    waits = []
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while not ended.wait(PAUSE):
            asked_at = time.monotonic()
            health = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                raise SystemExit(f"the bus is not healthy: {health}")
            waits.append(time.monotonic() - asked_at)
            if len(waits) == 1:
                print("asking", flush=True)
                waits[0] = 0.0  # the connection is made in it
    print(f"asked {len(waits)} {max(waits) * 1e3:.0f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
