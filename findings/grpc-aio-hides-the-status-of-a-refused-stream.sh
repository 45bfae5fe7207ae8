#!/bin/sh
# grpcio 1.85.3: a client of grpc.aio that is refused at once often sees INTERNAL, while grpc's other client never does.
#
# One would expect: a server that refuses a stream sends its status, and the client raises that status with its text, as
# the synchronous client of the same package does: UNAUTHENTICATED asks for another key, INTERNAL for a report of a fault.
# What happens: when the status arrives while the client still writes its first messages, grpc.aio raises INTERNAL "Internal
# error from Core" in its place; code() and details() have nothing else either, so the reason is lost. It is a third to
# two thirds of all refused streams, with a server of either kind.
#
# Prints the version, and what 200 refused streams of each client raise. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grpcio==1.85.3
GRPC_VERBOSITY=NONE "$folder/venv/bin/python" - <<'PY'
import asyncio
import collections
import concurrent.futures

import grpc


class Refusing(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "this key has expired")
        )


async def of_aio(address):
    async def messages():
        for _ in range(3):
            yield b"hello"

    raised = collections.Counter()
    async with grpc.aio.insecure_channel(address) as channel:
        for _ in range(200):
            try:
                await channel.stream_stream("/service/Stream")(messages()).read()
            except grpc.aio.AioRpcError as error:
                raised[f"{error.code().name} {error.details()!r}"] += 1
    return raised


def of_threads(address):
    raised = collections.Counter()
    with grpc.insecure_channel(address) as channel:
        for _ in range(200):
            try:
                next(channel.stream_stream("/service/Stream")(iter([b"hello"] * 3)))
            except grpc.RpcError as error:
                raised[f"{error.code().name} {error.details()!r}"] += 1
    return raised


server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[Refusing()])
address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
threads, aio = of_threads(address), asyncio.run(of_aio(address))
server.stop(None)
print("grpcio", grpc.__version__)
print("grpc:", dict(threads))
print("grpc.aio:", dict(aio))
right, hidden = "UNAUTHENTICATED 'this key has expired'", "INTERNAL 'Internal error from Core'"
same = set(threads) == {right} and aio[hidden] > 0
print("grpc.aio hides the status" if same else "this has changed")
raise SystemExit(0 if same else 1)
PY
