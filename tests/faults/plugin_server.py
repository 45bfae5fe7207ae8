"""A program that serves the tools of several plugins by callback URLs, as N.E.K.O.'s plugin server does.

``plugin_server.py BUS PORT TOOLS``: it registers so many tools by HTTP, and a watchdog asks for the list and registers
again what is missing. Port 0 is any; it prints the one that it has.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WATCHDOG_SECONDS = 0.25
PREFIX = "/api/llm-tools/callback/"


class Callback(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        plugin, _, tool = self.path.removeprefix(PREFIX).partition("/")
        output = {"plugin": plugin, "tool": tool, "arguments": body["arguments"]}
        answer = json.dumps({"output": output, "is_error": False}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *words: Any) -> None: ...


def ask(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as answer:
        return json.loads(answer.read())


def watch(bus: str, port: int, count: int) -> None:
    names = [f"tool_{number}" for number in range(count)]
    while True:
        try:
            listed = {tool["name"] for tools in ask(f"{bus}/api/tools")["tools_by_role"].values() for tool in tools}
            for number, name in enumerate(names):
                if name not in listed:
                    plugin = f"plugin_{number % 5}"
                    tool = {
                        "name": name,
                        "description": f"Returns what {name} got.",
                        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
                        "callback_url": f"http://127.0.0.1:{port}{PREFIX}{plugin}/{name}",
                        "source": f"plugin:{plugin}",
                        "timeout_seconds": 30,
                    }
                    ask(f"{bus}/api/tools/register", tool)
        except OSError:
            pass  # the bus is away
        time.sleep(WATCHDOG_SECONDS)


def main(bus: str, port: str, count: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Callback)
    print(server.server_port, flush=True)
    threading.Thread(target=watch, args=(bus, server.server_port, int(count)), daemon=True).start()
    server.serve_forever()


main(*sys.argv[1:])
