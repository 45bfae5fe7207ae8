"""An MCP server on standard input and output that writes what a test tells it to: ``python mcp_script.py SCRIPT``.

The script is JSON: for each method, the lines that are written when it comes, byte for byte, with ``$ID`` for the id of
the request, and ``$OTHER`` for the same id as text or number. ``""`` stands for every other request. ``holds`` names
methods that are answered only after the request of the server with that id has been answered. What the client answers
goes to standard error.
"""

import json
import sys


def main() -> None:
    script = json.loads(sys.argv[1])
    holds: dict[str, object] = script.pop("holds", {})
    waiting: dict[object, list[str]] = {}
    answered: set[object] = set()

    def write(lines: list[str], request: object) -> None:
        for line in lines:
            sys.stdout.write(line.replace("$ID", json.dumps(request)) + "\n")
        sys.stdout.flush()

    for text in sys.stdin:
        message = json.loads(text)
        method, request = message.get("method"), message.get("id")
        if method is None:
            print("answered", json.dumps(message), file=sys.stderr, flush=True)
            answered.add(request)
            write(waiting.pop(request, []), None)
            continue
        lines = script.get(method, script.get("", []) if request is not None else [])
        other = int(request) if isinstance(request, str) and request.isdecimal() else str(request)
        lines = [line.replace("$ID", json.dumps(request)).replace("$OTHER", json.dumps(other)) for line in lines]
        if method in holds and holds[method] not in answered:
            waiting.setdefault(holds[method], []).extend(lines)
        else:
            write(lines, request)


if __name__ == "__main__":
    main()
