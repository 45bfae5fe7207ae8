"""Names replacements for functions and objects of other systems, which scripts use and which do not exist here."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FILES = (
    "a JavaScript tool reads and writes no files: put data into the script (`var DATA = …`), or write the tool in "
    "Python with a grant in _manifest.json"
)
_NETWORK = (
    "a JavaScript tool has no network: write the tool in Python with a `connect` grant in _manifest.json, or as a "
    "plugin in any language"
)
_PROCESSES = "a JavaScript tool starts no processes: write a plugin, which runs outside the sandbox"
_BBS = (
    "there is no BBS behind a tool: what the host knows of the user is in `env`, and data of the tool belongs into the "
    "script (`var DATA = …`)"
)
MODULES = "each file is complete in itself: bundle what it imports into it"
HELPERS = f"{MODULES}, or put helpers into a file like _common.js, which only extensions do not get"
SPIDERMONKEY = "write `for (var x of list)`, `catch (error)` with an `if` in it, JSON.stringify, and XML as text"
_CLOCK = "use setTimeout and a promise"

# Names that scripts use in other systems → what to do here.
NAMES: Mapping[str, str] = {
    **dict.fromkeys(("File", "Queue", "directory", "file_exists", "fs", "Deno", "Bun"), _FILES),
    **dict.fromkeys(("fetch", "XMLHttpRequest", "WebSocket", "EventSource", "HTTPRequest", "HTTP"), _NETWORK),
    **dict.fromkeys(("Socket", "ConnectedSocket", "resolve_ip", "resolve_host"), _NETWORK),
    **dict.fromkeys(("system", "bbs", "user", "client", "server", "msg_area", "file_area", "xtrn_area"), _BBS),
    **dict.fromkeys(("MsgBase", "FileBase", "User", "conio", "js", "argv", "argc", "uifc"), _BBS),
    **dict.fromkeys(("process", "Worker", "child_process"), _PROCESSES),
    **dict.fromkeys(("module", "exports", "__dirname", "__filename", "importScripts"), MODULES),
    **dict.fromkeys(("sleep", "mswait", "yield"), _CLOCK),
    "strftime": "use `new Date()` and its methods",
    "Buffer": "use Uint8Array, TextEncoder, TextDecoder, atob and btoa",
    "Intl": "format numbers and dates by the methods of their own",
    **dict.fromkeys(("Headers", "Request", "Response", "FormData", "Blob"), "use plain objects and texts"),
    **dict.fromkeys(("Event", "EventTarget", "CustomEvent"), "only AbortSignal has events: call functions"),
    **dict.fromkeys(("window", "document", "navigator", "localStorage"), "there is no browser: use globalThis"),
    "spindle": "this file shares the scope of the folder: write `spindle.` in a file of its own, without a leading '_'",
}

# Members of `spindle`, by the first part of their name → what to do here.
MEMBERS: Mapping[str, str] = {
    "generate": "ask the host's model with spindle.generate.quiet or raw",
    "ephemeral": "an extension keeps files in spindle.storage, and other values in a variable",
    "enclave": (
        "an operator sets secrets as variables of the bus, or in the file of `toolbus run --secrets`, and "
        "grants them in _manifest.json"
    ),
    **dict.fromkeys(
        ("oauth", "webSearch"),
        "ask an API with spindle.cors, whose host an operator grants under `connect` in _manifest.json, or write the "
        "tool as a plugin in any language",
    ),
    **dict.fromkeys(
        ("chat", "chats", "characters", "personas", "world_books", "databanks", "presets", "memories"),
        "what the host shows of the conversation is in `contextMessages` and `args.context`",
    ),
}
_SPINDLE_OTHER = (
    "of `spindle` there are registerTool, unregisterTool, on('TOOL_INVOCATION'), permissions, generate, cors, storage, "
    "userStorage, enclave, manifest and log"
)

# Members that announce something, which has no effect here and needs no answer; for Python and JavaScript.
ANNOUNCES = re.compile(
    r"spindle\.((register|unregister|update|send|on)[A-Z]\w*|(toast|commands)\.\w+|(\w+\.)+(on[A-Z]\w*|register))"
)
_UNDEFINED = re.compile(r"(?:^|: )'?([A-Za-z_$][\w$]*)'? is not defined")
_ABSENT = re.compile(r"spindle\.(\w+)[\w.]* does not exist here")
_LOADED = re.compile(r"^(?:Error: )?(?:load|require)\(.*\) does not exist here")
_IMPORTED = re.compile(r"could not load module")
_SYNTAX = re.compile(r"^SyntaxError: .*(?:identifier 'each'|unexpected token in expression: '<')")


def with_remedy(text: str) -> str:
    """Returns the text of an error, with a replacement where the script used a name that does not exist here."""
    remedy = _remedy(text)
    return f"{text}: {remedy}" if remedy else text


def spindle_remedy(member: str) -> str:
    """Returns what to use instead of a member of `spindle` that does not exist here."""
    return MEMBERS.get(member, _SPINDLE_OTHER)


def is_announced(name: str) -> bool:
    """Tells whether a call of a member of `spindle`, with all its parts, only announces something."""
    return ANNOUNCES.fullmatch(name) is not None


def sentence(remedy: str) -> str:
    """Returns a remedy as a sentence of its own."""
    return f"{remedy[:1].upper()}{remedy[1:]}."


def ignored_text(name: str) -> str:
    """Returns the text, for the author of a script, about an announcement that has no effect here."""
    return f"{name} has no effect here: only the tools of an extension are used. The rest of the file works"


def _remedy(text: str) -> str:
    if match := _ABSENT.search(text):
        return spindle_remedy(match[1])
    if _LOADED.search(text):
        return HELPERS
    if _IMPORTED.search(text):
        return MODULES
    if match := _UNDEFINED.search(text):
        return NAMES.get(match[1], "")
    if _SYNTAX.search(text):
        return f"only SpiderMonkey reads this: {SPIDERMONKEY}"
    return ""
