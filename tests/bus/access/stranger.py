"""Tries every way into a bus that is given as JSON, and prints what came of each; a program of its own."""

from __future__ import annotations

import http.client
import json
import sys
from typing import Any

import grpc

from tests.support.other_user import become_nobody


def _rpc(channel: Any, method: str, takes_stream: bool, gives_stream: bool) -> list[Any]:
    kind = f"{'stream' if takes_stream else 'unary'}_{'stream' if gives_stream else 'unary'}"
    call = getattr(channel, kind)(method)
    request = iter([b""]) if takes_stream else b""
    try:
        answer = call(request, timeout=30)
        if gives_stream:
            next(answer, None)
            answer.cancel()
        return ["OK", ""]
    except grpc.RpcError as error:
        failed: Any = error
        return [failed.code().name, failed.details()]


def _request(address: str, method: str, path: str) -> list[Any]:
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request(method, path, headers={"Content-Type": "application/json"})
    answer = connection.getresponse()
    # A stream of events has no end; a refusal says its length.
    text = answer.read().decode() if answer.status == 403 or path in ("/healthz", "/readyz") else ""
    connection.close()
    return [answer.status, text]


def main() -> None:
    """Tries what the last argument lists, as nobody with the option --as-nobody."""
    attempts = json.loads(sys.argv[-1])
    if "--as-nobody" in sys.argv:
        grpc.insecure_channel("127.0.0.1:1").close()  # imports what it needs, as does the next line
        "localhost".encode("idna")
        become_nobody()
    seen: dict[str, Any] = {}
    for address in attempts["grpc"]:
        with grpc.insecure_channel(address) as channel:
            for method, *streams in attempts["rpcs"]:
                seen[f"{address} {method}"] = _rpc(channel, method, *streams)
    for method, path in attempts["requests"]:
        seen[f"{method} {path}"] = _request(attempts["http"], method, path)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
