"""Speaks MCP on its standard streams: what the conformance suite asks of a server beside tools. Standard library only.

    python tests/parts/mcp/official/fixture_server.py

It has prompts, resources, a template, completions, and a tool that changes the list of prompts. Each message is
answered in the era that it speaks, legacy (`initialize`) or 2026-07-28 (`_meta` in each request).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

Json = dict[str, Any]

IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
LEGACY = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN = "2026-07-28"
META = "io.modelcontextprotocol/"
INFO = {"name": "fixture-server", "version": "1.0.0"}
CAPABILITIES = {
    "tools": {"listChanged": True},
    "prompts": {"listChanged": True},
    "resources": {"subscribe": True, "listChanged": True},
    "completions": {},
}
WATCHED = "test://watched-resource"
QUESTION = {
    "method": "elicitation/create",
    "params": {
        "mode": "form",
        "message": "What context should the prompt use?",
        "requestedSchema": {
            "type": "object",
            "properties": {"context": {"type": "string"}},
            "required": ["context"],
        },
    },
}


class Refused(Exception):
    """A request is answered with an error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, **({} if data is None else {"data": data})}


def says(*content: Mapping[str, Any]) -> Json:
    """Returns the result of a prompt, one message of the user for each content."""
    return {"messages": [{"role": "user", "content": each} for each in content]}


def words(text: str) -> Json:
    return {"type": "text", "text": text}


def asked_prompt(params: Json) -> Json:
    answer = (params.get("inputResponses") or {}).get("user_context")
    if not isinstance(answer, dict):
        return {"resultType": "input_required", "inputRequests": {"user_context": QUESTION}}
    return says(words(f"Use this context: {(answer.get('content') or {}).get('context', 'none')}"))


def prompt_with_arguments(params: Json) -> Json:
    given = params.get("arguments") or {}
    return says(words(f"Prompt with arguments: arg1='{given.get('arg1')}', arg2='{given.get('arg2')}'"))


def prompt_with_resource(params: Json) -> Json:
    resource = {
        "uri": (params.get("arguments") or {}).get("resourceUri", ""),
        "mimeType": "text/plain",
        "text": "Embedded resource content for testing.",
    }
    return says({"type": "resource", "resource": resource}, words("Please process the embedded resource above."))


def prompt_with_image(params: Json) -> Json:
    return says({"type": "image", "data": IMAGE, "mimeType": "image/png"}, words("Please analyze the image above."))


def argument(name: str, description: str) -> Json:
    return {"name": name, "description": description, "required": True}


# By name: the description, the arguments, and what answers.
PROMPTS: dict[str, tuple[str, list[Json], Callable[[Json], Json]]] = {
    "test_simple_prompt": (
        "A simple prompt without arguments",
        [],
        lambda params: says(words("This is a simple prompt for testing.")),
    ),
    "test_prompt_with_arguments": (
        "A prompt with required arguments",
        [argument("arg1", "First test argument"), argument("arg2", "Second test argument")],
        prompt_with_arguments,
    ),
    "test_prompt_with_embedded_resource": (
        "A prompt that includes an embedded resource",
        [argument("resourceUri", "URI of the resource to embed")],
        prompt_with_resource,
    ),
    "test_prompt_with_image": ("A prompt that includes an image", [], prompt_with_image),
    "test_input_required_result_prompt": ("A prompt that asks the user first", [], asked_prompt),
}
RESOURCES: dict[str, Json] = {
    "test://static-text": {"mimeType": "text/plain", "text": "This is the content of the static text resource."},
    "test://static-binary": {"mimeType": "image/png", "blob": IMAGE},
    WATCHED: {"mimeType": "text/plain", "text": "Watched resource content"},
}
TEMPLATE = {
    "uriTemplate": "test://template/{id}/data",
    "name": "template",
    "description": "A template with one parameter",
    "mimeType": "application/json",
}
TRIGGER = {
    "name": "test_trigger_prompt_change",
    "description": "Adds a prompt, or removes it again",
    "inputSchema": {"type": "object", "additionalProperties": False},
}
APPEARING = "test_appearing_prompt"


class Server:
    """One conversation on the standard streams."""

    def __init__(self) -> None:
        self._prompts = dict(PROMPTS)
        self._listening: dict[int | str, Json] = {}  # open `subscriptions/listen` of 2026-07-28, by their ids
        self._subscribed: set[str] = set()  # resources of a legacy client
        self._legacy = False  # whether the client said `initialize`

    def run(self) -> None:
        """Answers until the input ends."""
        for line in sys.stdin.buffer:
            message = json.loads(line)
            if "method" not in message:
                continue
            if "id" not in message:
                if message["method"] == "notifications/cancelled":
                    self._listening.pop(message["params"].get("requestId"), None)
                continue
            try:
                result = self._answer(message["method"], message.get("params") or {}, message["id"])
            except Refused as refused:
                send({"jsonrpc": "2.0", "id": message["id"], "error": refused.error})
            else:
                if result is not None:
                    send({"jsonrpc": "2.0", "id": message["id"], "result": result})

    def _answer(self, method: str, params: Json, id: int | str) -> Json | None:
        version = (params.get("_meta") or {}).get(f"{META}protocolVersion")
        if version is None:
            result = self._legacy_answer(method, params)
            return self._common(method, params, -32002) if result is None else result
        if version != MODERN:
            raise Refused(-32022, "Unsupported protocol version", {"supported": [MODERN], "requested": version})
        if method == "subscriptions/listen":
            self._listening[id] = params.get("notifications") or {}
            self._tell_listener(id, "notifications/subscriptions/acknowledged", notifications=self._listening[id])
            return None  # it stays open
        result = self._common(method, params, -32602)
        cached = {"ttlMs": 0, "cacheScope": "private"} if method in _CACHED else {}
        return {"resultType": "complete", **cached, **result, "_meta": {f"{META}serverInfo": INFO}}

    def _legacy_answer(self, method: str, params: Json) -> Json | None:
        if method == "initialize":
            self._legacy = True
            version = params["protocolVersion"] if params.get("protocolVersion") in LEGACY else LEGACY[-1]
            return {"protocolVersion": version, "capabilities": CAPABILITIES, "serverInfo": INFO}
        if method in ("ping", "logging/setLevel"):
            return {}
        if method == "resources/subscribe":
            self._subscribed.add(params["uri"])
            return {}
        if method == "resources/unsubscribe":
            self._subscribed.discard(params["uri"])
            return {}
        return None

    def _common(self, method: str, params: Json, unknown_resource: int) -> Json:
        match method:
            case "server/discover":
                return {"supportedVersions": [MODERN], "capabilities": CAPABILITIES, "serverInfo": INFO}
            case "tools/list":
                return {"tools": [TRIGGER]}
            case "tools/call" if params.get("name") == TRIGGER["name"]:
                return self._change_prompts()
            case "prompts/list":
                return {"prompts": [_prompt(name, each) for name, each in self._prompts.items()]}
            case "prompts/get" if params.get("name") in self._prompts:
                return self._prompts[params["name"]][2](params)
            case "resources/list":
                return {"resources": [_resource(uri, each) for uri, each in RESOURCES.items()]}
            case "resources/templates/list":
                return {"resourceTemplates": [TEMPLATE]}
            case "resources/read":
                return {"contents": [_contents(str(params.get("uri")), unknown_resource)]}
            case "completion/complete":
                start = str((params.get("argument") or {}).get("value", ""))
                values = [each for each in ("paris", "park", "party") if each.startswith(start)]
                return {"completion": {"values": values, "total": len(values), "hasMore": False}}
            case "tools/call" | "prompts/get":
                raise Refused(-32602, f"there is no {params.get('name')!r}")
        raise Refused(-32601, f"Method not found: {method}")

    def _change_prompts(self) -> Json:
        if self._prompts.pop(APPEARING, None) is None:
            self._prompts[APPEARING] = ("Is there for a while", [], lambda params: says(words("I am here.")))
        for id, wanted in self._listening.items():
            if wanted.get("promptsListChanged"):
                self._tell_listener(id, "notifications/prompts/list_changed")
        if self._legacy:
            send({"jsonrpc": "2.0", "method": "notifications/prompts/list_changed"})
        return {"content": [words("Prompt list changed")], "isError": False}

    def _tell_listener(self, id: int | str, method: str, **params: Any) -> None:
        send({"jsonrpc": "2.0", "method": method, "params": {**params, "_meta": {f"{META}subscriptionId": id}}})


_CACHED = {
    "server/discover",
    "tools/list",
    "prompts/list",
    "resources/list",
    "resources/templates/list",
    "resources/read",
}


def _prompt(name: str, prompt: tuple[str, list[Json], Callable[[Json], Json]]) -> Json:
    description, arguments, _ = prompt
    return {"name": name, "description": description, **({"arguments": arguments} if arguments else {})}


def _resource(uri: str, resource: Json) -> Json:
    name = uri.removeprefix("test://")
    return {"uri": uri, "name": name, "description": f"The {name}", "mimeType": resource["mimeType"]}


def _contents(uri: str, unknown: int) -> Json:
    if uri in RESOURCES:
        return {"uri": uri, **RESOURCES[uri]}
    id = uri.removeprefix("test://template/").removesuffix("/data")
    if uri != f"test://template/{id}/data" or not id:
        raise Refused(unknown, "Resource not found", {"uri": uri})
    text = json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"}, separators=(",", ":"))
    return {"uri": uri, "mimeType": "application/json", "text": text}


def send(message: Json) -> None:
    """Writes a message as one line."""
    sys.stdout.write(json.dumps(message, separators=(",", ":")) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Server().run()
