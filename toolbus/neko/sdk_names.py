"""Provides the names that plugins import from ``plugin.sdk…``, in one table for all of its modules.

N.E.K.O. has moved its names between modules; here every module has all of them. A name that toolbus does not have is a
class that raises when it is used, so that a plugin that only mentions it still runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from toolbus.functions.declaration import LlmToolMeta
from toolbus.neko import absences, marks, sdk_errors, sdk_results
from toolbus.neko.neko_tool import llm_tool
from toolbus.neko.older_base import OlderPluginBase
from toolbus.neko.plugin_base import NekoPluginBase, neko_plugin, plugin
from toolbus.neko.plugin_config import PluginConfig
from toolbus.neko.plugin_context import PluginContext
from toolbus.neko.plugin_i18n import PluginI18n, tr
from toolbus.neko.plugin_lifecycle import lifecycle, timer_interval
from toolbus.neko.plugin_logger import PluginLogger, plugin_logger
from toolbus.neko.plugin_router import PluginRouter
from toolbus.neko.plugin_store import PluginStore
from toolbus.neko.sdk_errors import Absence, ModuleNotProvided, NotProvided


class _PluginDecorators:
    """`plugin`: the class decorator of the documents, and the namespace of decorators of the SDK."""

    entry = marks.plugin_entry
    event = marks.on_event
    hook = marks.hook
    message = marks.message
    custom_event = marks.custom_event
    lifecycle = staticmethod(lifecycle)
    timer = staticmethod(timer_interval)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return plugin(*args, **options)


class _AbsentKind(type):
    """The class of classes that raise when they are used."""

    absence: Absence

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        raise NotProvided(cls.__name__, cls.absence)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotProvided(f"{cls.__name__}.{name}", cls.absence)


_ADAPTER = Absence("turns another protocol into entries", "Offer the functions as tools with self.register_llm_tool().")
_ABSENT_CLASSES: dict[str, Absence] = {
    "Plugins": absences.RAISING["plugins"],
    "SystemInfo": absences.RAISING["system_info"],
    "MemoryClient": absences.RAISING["memory"],
    "PluginDatabase": absences.RAISING["db"],
    "PluginStatePersistence": absences.RAISING["state"],
    **dict.fromkeys(
        ("NekoAdapterPlugin", "AdapterGatewayCore", "DefaultPolicyEngine", "AdapterBase", "AdapterConfig"), _ADAPTER
    ),
}
_SETTINGS = Absence("checks configuration with pydantic", "Install pydantic, or read self.config.")

_DECORATORS = (
    *("plugin_entry", "on_event", "message", "custom_event", "hook", "before_entry", "after_entry", "around_entry"),
    *("replace_entry", "quick_action", "ui"),
)
_ERRORS = (
    *("SdkError", "ResultError", "ValidationError", "NotFoundError", "TransportError", "ConflictError"),
    *("PluginCallError", "EntryConflictError"),
)
_RESULTS = (
    *("Ok", "Err", "Result", "is_ok", "is_err", "unwrap", "unwrap_or", "raise_for_err", "must", "map_result"),
    *("capture", "ok", "fail"),
)
# Older names of the same exceptions.
_ALIASES = {
    **dict.fromkeys(("InvalidArgumentError", "ConfigPathError", "ConfigValidationError"), "ValidationError"),
    **dict.fromkeys(("CapabilityUnavailableError", "BusError", "BusTransportError"), "TransportError"),
    **dict.fromkeys(("PluginRouterError", "CircularCallError", "CallChainTooDeepError"), "PluginCallError"),
    "PluginConfigError": "ValidationError",
    "AuthorizationError": "SdkError",
}
# Names that only stand in annotations.
_TYPES: dict[str, Any] = {
    "JsonValue": Any,
    "JsonObject": dict[str, Any],
    "JsonScalar": str | int | float | bool | None,
    "Metadata": Mapping[str, Any],
    "InputSchema": Mapping[str, Any],
    "EntryHandler": Callable[..., Any],
    "PushMessageResult": dict[str, Any],
    "PluginContextProtocol": PluginContext,
    "SdkContext": PluginContext,
    "PluginMeta": dict[str, Any],
    "EntryKind": str,
    "LoggerLike": PluginLogger,
}

NAMES: dict[str, Any] = {
    "NekoPluginBase": NekoPluginBase,
    "PluginBase": NekoPluginBase,
    "neko_plugin": neko_plugin,
    "plugin": _PluginDecorators(),
    "llm_tool": llm_tool,
    "LlmToolMeta": LlmToolMeta,
    "lifecycle": lifecycle,
    "timer_interval": timer_interval,
    "PluginContext": PluginContext,
    "PluginConfig": PluginConfig,
    "PluginStore": PluginStore,
    "PluginRouter": PluginRouter,
    "PluginI18n": PluginI18n,
    "tr": tr,
    "get_plugin_logger": plugin_logger,
    "get_logger": plugin_logger,
    "NEKO_PLUGIN_TAG": "__neko_plugin__",
    "NEKO_PLUGIN_META_ATTR": "__neko_plugin_meta__",
    "EVENT_META_ATTR": "__neko_event_meta__",
    **_TYPES,
    **{name: getattr(marks, name) for name in _DECORATORS},
    **{name: getattr(sdk_errors, name) for name in _ERRORS},
    **{name: getattr(sdk_errors, of) for name, of in _ALIASES.items()},
    **{name: getattr(sdk_results, name) for name in _RESULTS},
    **{name: _AbsentKind(name, (), {"absence": absence}) for name, absence in _ABSENT_CLASSES.items()},
}


OLDER_MODULES = ("plugin.sdk", "plugin.sdk.base")  # their base class is the older one


def is_absent(name: str) -> bool:
    """Tells whether a name is a class that raises when it is used."""
    return isinstance(NAMES.get(name), _AbsentKind)


def find_name(module: str, name: str) -> Any:
    """Returns the object for a name that a plugin imports from ``plugin.sdk…``.

    Raises:
        ModuleNotProvided: toolbus does not have it; the text says what to do.
    """
    if name == NekoPluginBase.__name__ and module in OLDER_MODULES:
        return OlderPluginBase
    if name in NAMES:
        return NAMES[name]
    if name in ("PluginSettings", "SettingsField"):
        return _settings(f"{module}.{name}")[name]
    raise ModuleNotProvided(
        f"{module}.{name}",
        Absence("is a part of its plugin server", "Remove the import, or copy what it does into the plugin's folder."),
    )


def _settings(shown: str) -> dict[str, Any]:
    """Returns the base of typed settings and its fields, which need pydantic there too."""
    try:
        pydantic = importlib.import_module("pydantic")
    except ImportError:
        raise ModuleNotProvided(shown, _SETTINGS) from None

    def field(default: Any = ..., *, hot: bool = False, **options: Any) -> Any:
        return pydantic.Field(default, **options)

    rules = {"extra": "ignore", "validate_default": True}
    base = type("PluginSettings", (pydantic.BaseModel,), {"__module__": __name__, "model_config": rules})
    return {"PluginSettings": base, "SettingsField": field}
