"""A small MCP server on standard input and output, for tests of mounts: ``python mcp_server.py [SWITCH…]``.

Switches: ``modern`` or ``both`` (else legacy only), ``silent`` (no answer to unknown methods), ``dies`` (of anything
but a ping before `initialize`), ``noise`` (prints to standard output), ``stubborn`` (ignores the end of input and
SIGTERM), ``forks`` (starts two more processes, one in a session of its own), ``slow`` (0.3 s until it reads),
``broken`` (exits with code 1), ``mute`` (never answers), ``file=PATH`` (tools come from that JSON file, read anew for
each list), ``instructs`` (has instructions), ``tasks`` (a slow call is answered with a task), ``installs`` (writes to
its log for 1.5 s before it reads).
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

SWITCHES = set(sys.argv[1:])
FILE = next((each[5:] for each in SWITCHES if each.startswith("file=")), "")
MODERN, LEGACY = SWITCHES & {"modern", "both"}, "modern" not in SWITCHES
VERSION = "2026-07-28"
LOCK = threading.RLock()  # the handler of a signal runs in the middle of anything
PENDING: dict[object, threading.Event] = {}  # calls that sleep, by id; set when they are cancelled
ANSWERS: dict[object, "list[object]"] = {}  # of the client, by the id of our request
TASKS: dict[str, float] = {}  # when a task is done
RESOURCE, TEXT = "test://note", {"value": "first"}
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
DECLARED: dict[str, object] = {}  # by the client of a session
CANCELLED: list[object] = []  # calls that were
SUBSCRIBED: list[object] = []  # ids of listens; None for a legacy subscription


def send(**message: object) -> None:
    with LOCK:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def text(value: object, **more: object) -> dict[str, Any]:
    return {"resultType": "complete", "content": [{"type": "text", "text": str(value)}], **more}


def tools() -> list[dict[str, Any]]:
    if FILE:
        with open(FILE, encoding="utf-8") as opened:
            return list(json.load(opened))
    plain = {"type": "object", "properties": {"text": {"type": "string"}, "seconds": {"type": "number"}}}
    names = (
        "echo",
        "fail",
        "refuse",
        "sleep",
        "die",
        "last_words",
        "progress",
        "log",
        "ask",
        "env",
        "pid",
        "cancelled",
    )
    structured = {
        "name": "structured",
        "inputSchema": plain,
        "outputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    }
    hinted = {"name": "hinted", "inputSchema": plain, "annotations": {"readOnlyHint": True, "idempotentHint": True}}
    return [*({"name": name, "inputSchema": plain} for name in names), structured, hinted]


def ask(method: str, params: dict[str, Any]) -> object:
    with LOCK:
        number = f"ask-{len(ANSWERS)}"
        ANSWERS[number], ready = [], PENDING.setdefault(number, threading.Event())
    send(id=number, method=method, params=params)
    ready.wait(30)
    return ANSWERS[number][0]


def call(request: object, params: dict[str, Any]) -> None:
    name, given = params["name"], params.get("arguments") or {}
    token = (params.get("_meta") or {}).get("progressToken")
    said = given.get("text", "")
    if name not in {tool["name"] for tool in tools()}:
        return send(id=request, error={"code": -32602, "message": f"Unknown tool: {name}"})
    if "arguments" in SWITCHES:
        return send(id=request, result=text(json.dumps(given)))
    if "meta" in SWITCHES:
        return send(id=request, result=text(json.dumps(params.get("_meta") or {})))
    if name in ("sleep", "hinted") and "tasks" in SWITCHES:
        TASKS["task-1"] = time.monotonic() + given.get("seconds", 0)
        task = {"taskId": "task-1", "status": "working", "pollIntervalMs": 20, "resultType": "task"}
        return send(id=request, result=task)
    if name in ("sleep", "hinted"):
        event = PENDING.setdefault(request, threading.Event())
        if event.wait(given.get("seconds", 0)):
            CANCELLED.append(request)
            return None
    elif name == "fail":
        return send(id=request, result=text("it failed: " + said, isError=True))
    elif name == "refuse":
        return send(id=request, error={"code": -32050, "message": "refused: " + said, "data": {"why": said}})
    elif name == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "last_words":
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request, "result": text("bye")}) + "\n")
        sys.stdout.flush()
        os._exit(0)
    elif name == "progress":
        for step in (1, 2, 3):
            values = {"progressToken": token, "progress": step, "total": 3, "message": f"step {step}"}
            send(method="notifications/progress", params=values)
    elif name == "log":
        send(method="notifications/message", params={"level": "info", "data": "logged: " + said})
    elif name == "structured":
        if said:  # the whole result
            return send(id=request, result={"resultType": "complete", **json.loads(said)})
        value = {"n": 12345678901234567890123}
        return send(id=request, result=text(json.dumps(value), structuredContent=value))
    elif name == "arguments":
        return send(id=request, result=text(json.dumps(given)))
    elif name == "env":
        return send(id=request, result=text(json.dumps(dict(os.environ))))
    elif name == "pid":
        return send(id=request, result=text(os.getpid()))
    elif name == "cancelled":
        return send(id=request, result=text(len(CANCELLED)))
    elif name == "ask":
        if said == "declared":
            meta = params.get("_meta") or {}
            return send(id=request, result=text(json.dumps(meta.get(CAPABILITIES, DECLARED))))
        question = {"mode": "form", "message": "Who?", "requestedSchema": {"type": "object", "properties": {}}}
        question |= given.get("more", {})
        modern = MODERN and VERSION in str(params.get("_meta"))
        if modern and said == "sdk":  # as the official SDK for Python, whose tools can ask in the older era only
            why = "Cannot send 'elicitation/create': this transport context has no back-channel for server-initiated "
            return send(id=request, error={"code": -32600, "message": why + "requests."})
        if modern and said == "fastmcp":
            why = "elicitation via server-initiated requests is unavailable on 2026-07-28 connections."
            return send(id=request, result=text(why, isError=True))
        if modern:
            if "inputResponses" not in params:
                asked = {"who": {"method": "elicitation/create", "params": question}}
                state = {"resultType": "input_required", "inputRequests": asked, "requestState": "state-1"}
                return send(id=request, result=state)
            said = json.dumps([params["inputResponses"]["who"], params["requestState"]])
        elif said == "twice":
            said = json.dumps([ask("elicitation/create", {**question, "message": each}) for each in ("One?", "Two?")])
        elif said == "both":
            from concurrent.futures import ThreadPoolExecutor  # which no other tool needs, and takes half of the start

            with ThreadPoolExecutor() as pool:
                asking = [pool.submit(ask, "elicitation/create", {**question, "message": each}) for each in "AB"]
                said = json.dumps([each.result() for each in asking])
        else:
            method = "elicitation/create" if said in ("", "sdk", "fastmcp") else said
            said = json.dumps(ask(method, question))
    return send(id=request, result=text(said))


def take(message: dict[str, Any]) -> None:
    method, request, params = message.get("method"), message.get("id"), message.get("params") or {}
    modern = VERSION in str(params.get("_meta")) and bool(MODERN)
    if method is None:
        ANSWERS.setdefault(request, []).append(message.get("result") or message.get("error"))
        PENDING.setdefault(request, threading.Event()).set()
    elif method == "notifications/cancelled":
        PENDING.setdefault(params["requestId"], threading.Event()).set()
    elif request is None or "mute" in SWITCHES:
        return
    elif method == "initialize" and LEGACY:
        DECLARED.update(params["capabilities"])
        able = {"tools": {"listChanged": True}, "prompts": {}, "resources": {"subscribe": True}, "completions": {}}
        info = {"name": "small", "version": "1"}
        begun = {"protocolVersion": "2025-11-25", "capabilities": able, "serverInfo": info}
        send(id=request, result={**begun, **({"instructions": "Pay first."} if "instructs" in SWITCHES else {})})
    elif method == "server/discover" and MODERN:
        able = {"tools": {"listChanged": True}, "prompts": {}, "resources": {"subscribe": True}, "completions": {}}
        found = {"supportedVersions": [VERSION], "capabilities": able, "serverInfo": {"name": "small", "version": "1"}}
        send(id=request, result={"resultType": "complete", **found})
    elif method == "ping" and LEGACY:
        send(id=request, result={})
    elif method == "tools/list":
        send(id=request, result={"resultType": "complete", "tools": tools()})
    elif method == "tools/call":
        threading.Thread(target=call, args=(request, params), daemon=True).start()
    elif method == "tasks/get" and modern:
        done = time.monotonic() >= TASKS[params["taskId"]] or "cancelled" in TASKS
        status = "cancelled" if "cancelled" in TASKS else "completed" if done else "working"
        state = {"taskId": params["taskId"], "status": status, "pollIntervalMs": 20, "resultType": "complete"}
        send(id=request, result={**state, **({"result": text("task done")} if done else {})})
    elif method == "tasks/cancel":
        TASKS["cancelled"] = 0
        CANCELLED.append(params["taskId"])
        send(id=request, result={"resultType": "complete"})
    elif method == "prompts/list":
        send(id=request, result={"prompts": [{"name": "hello", "arguments": [{"name": "who"}]}]})
    elif method == "prompts/get":
        line = {"role": "user", "content": {"type": "text", "text": "Hello " + params["arguments"]["who"]}}
        send(id=request, result={"messages": [line]})
    elif method == "resources/list":
        send(id=request, result={"resources": [{"uri": RESOURCE, "name": "note"}]})
    elif method == "resources/templates/list":
        send(id=request, result={"resourceTemplates": [{"uriTemplate": "test://t/{id}", "name": "t"}]})
    elif method == "resources/read":
        send(id=request, result={"contents": [{"uri": params["uri"], "text": TEXT["value"]}]})
    elif method == "resources/subscribe":
        send(id=request, result={})
        send(method="notifications/resources/updated", params={"uri": params["uri"]})
    elif method == "resources/unsubscribe":
        send(id=request, result={})
    elif method == "completion/complete":
        send(id=request, result={"completion": {"values": ["world"]}})
    elif method == "subscriptions/listen" and modern:
        SUBSCRIBED.append(request)
        about = {"io.modelcontextprotocol/subscriptionId": request}
        wanted = params.get("notifications") or {}
        send(method="notifications/subscriptions/acknowledged", params={"notifications": wanted, "_meta": about})
        for uri in wanted.get("resourceSubscriptions", []):
            send(method="notifications/resources/updated", params={"uri": uri, "_meta": about})
    elif "silent" not in SWITCHES:
        send(id=request, error={"code": -32601, "message": f"Method not found: {method}"})


def tell_changed(*_: object) -> None:
    about = {"_meta": {"io.modelcontextprotocol/subscriptionId": SUBSCRIBED[0]}} if SUBSCRIBED else {}
    send(method="notifications/tools/list_changed", params=about)


def main() -> None:
    if "stubborn" in SWITCHES:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "forks" in SWITCHES:
        import subprocess  # slow to import, and few need it

        sleep = [sys.executable, "-c", "import signal,time; signal.signal(15, 1); time.sleep(600)"]
        subprocess.Popen(sleep, stdin=subprocess.DEVNULL)
        subprocess.Popen(sleep, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    if "broken" in SWITCHES:
        sys.exit("this server is broken")
    for _ in range(15 if "installs" in SWITCHES else 0):
        print("installing", file=sys.stderr, flush=True)
        time.sleep(0.1)
    if "slow" in SWITCHES:
        time.sleep(0.3)
    if "noise" in SWITCHES:
        print("Server ready on stdio!\n[1, 2]\n", flush=True)
    print("started", file=sys.stderr, flush=True)
    begun = False
    for line in sys.stdin:
        message = json.loads(line)
        begun = begun or message.get("method") == "initialize"
        if "dies" in SWITCHES and not begun and message.get("method") != "ping":
            os._exit(1)
        take(message)
    while "stubborn" in SWITCHES:
        time.sleep(60)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, tell_changed)
    main()
