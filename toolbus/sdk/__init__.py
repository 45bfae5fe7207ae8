"""Lists the public names for authors of plugins and hosts, each loaded from its own module when it is first used.

No module of this package may be called ``plugin`` or ``llm_tool``: those names are the decorators'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.common.lazy import lazily

if TYPE_CHECKING:
    from toolbus.errors import CallFailed, Code, SetupError, Stage, ToolBusError
    from toolbus.functions.call_context import CallContext, ContextMessage, Inputs
    from toolbus.functions.reply import Err, Ok, Reply, audio, image, link, resource, text
    from toolbus.functions.scope import ToolScope
    from toolbus.functions.tool_spec import LlmToolMeta, ToolDefinition, llm_tool
    from toolbus.parts.extension.extension import Extension, ToolInvocation
    from toolbus.parts.moving.neko.plugin_base import NekoPluginBase, neko_plugin, plugin
    from toolbus.parts.moving.neko.plugin_context import PluginContext
    from toolbus.parts.moving.neko.plugin_lifecycle import lifecycle
    from toolbus.parts.moving.neko.sdk_errors import EntryConflictError
    from toolbus.protocol.questions import Answer, Question
    from toolbus.protocol.tool import CallError, Progress, Result, Tool
    from toolbus.sdk.attempt import RefusedTool, WaitingTool
    from toolbus.sdk.credential import Credential
    from toolbus.sdk.generation import Generation, GenerationRequest
    from toolbus.sdk.host import Host, SyncHost
    from toolbus.sdk.listing import CatalogChange, ListedTool, Listing, ToolRef
    from toolbus.sdk.notification import Notification
    from toolbus.sdk.plugin_client import Permissions, Plugin

__all__ = [
    # the two kinds of peers
    "Plugin", "Host", "SyncHost",
    # the proof of a peer's identity, for a bus on another machine
    "Credential",
    # tools that the bus does not offer, or not yet
    "RefusedTool", "WaitingTool",
    # extensions of role-play hosts
    "Extension", "ToolInvocation", "Permissions",
    # declaring tools
    "llm_tool", "LlmToolMeta",
    # answering calls
    "ToolScope", "CallContext", "ContextMessage", "Reply", "Ok", "Err", "text", "image", "audio", "link",
    "resource",
    # asking in the middle of a call
    "Question", "Answer", "Inputs",
    # records for hosts
    "Progress", "Listing", "ListedTool", "CatalogChange", "Notification",
    # a host that lends its model
    "GenerationRequest", "Generation", "ToolRef",
    # plugins as N.E.K.O. writes them
    "NekoPluginBase", "neko_plugin", "plugin", "lifecycle", "PluginContext", "ToolDefinition", "EntryConflictError",
    # records and errors
    "Tool", "Result", "CallError", "Code", "Stage", "ToolBusError", "SetupError", "CallFailed",
]  # fmt: skip

__getattr__, __dir__ = lazily(
    __name__,
    {
        "sdk.plugin_client": "Plugin Permissions",
        "sdk.host": "Host SyncHost",
        "sdk.credential": "Credential",
        "sdk.generation": "Generation GenerationRequest",
        "sdk.notification": "Notification",
        "sdk.listing": "CatalogChange ListedTool Listing ToolRef",
        "functions.tool_spec": "LlmToolMeta llm_tool ToolDefinition",
        "sdk.attempt": "RefusedTool WaitingTool",
        "parts.extension.extension": "Extension ToolInvocation",
        "functions.call_context": "CallContext ContextMessage Inputs",
        "functions.scope": "ToolScope",
        "functions.reply": "Err Ok Reply audio image link resource text",
        "parts.moving.neko.plugin_base": "NekoPluginBase neko_plugin plugin",
        "parts.moving.neko.plugin_context": "PluginContext",
        "parts.moving.neko.plugin_lifecycle": "lifecycle",
        "parts.moving.neko.sdk_errors": "EntryConflictError",
        "protocol.questions": "Answer Question",
        "protocol.tool": "CallError Progress Result Tool",
        "errors": "CallFailed Code SetupError Stage ToolBusError",
    },
)
