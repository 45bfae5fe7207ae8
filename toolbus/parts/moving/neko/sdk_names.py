"""Provides the names that plugins import from ``plugin.sdk…``, in one table for all of its modules.

N.E.K.O. has moved its names between modules; here every module has all of them. A name that toolbus does not have is a
class that raises when it is used, so that a plugin that only mentions it still runs.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NoReturn

from toolbus.functions import tool_spec
from toolbus.functions.tool_spec import LlmToolMeta, ToolOptions, meta_of
from toolbus.parts.moving.neko import absences, entries, plugin_i18n, sdk_errors, sdk_results
from toolbus.parts.moving.neko.plugin_base import NekoPluginBase, PluginRouter, neko_plugin, plugin
from toolbus.parts.moving.neko.plugin_config import PluginConfig, PluginStore
from toolbus.parts.moving.neko.plugin_context import PluginContext
from toolbus.parts.moving.neko.plugin_i18n import REFERENCE
from toolbus.parts.moving.neko.plugin_lifecycle import lifecycle, timer_interval
from toolbus.parts.moving.neko.plugin_logger import PluginLogger, plugin_logger
from toolbus.parts.moving.neko.sdk_errors import Absence, ModuleNotProvided, NotProvided
from toolbus.protocol.tool import MAX_TIMEOUT_SECONDS, NAME

log = logging.getLogger("toolbus.neko.sdk_names")


def llm_tool(function: Any = None, /, **options: Any) -> Any:
    """Makes a method a tool that models may call. Returns the method itself.

    For an unknown option or a timeout above the limit it logs a warning, and the plugin still starts.

    Args:
        options: described in `ToolOptions`, none of them required.

    Raises:
        ValueError, TypeError: as for `toolbus.sdk.llm_tool`.
    """
    if function is not None:
        return tool_spec.llm_tool(function)
    return tool_spec.llm_tool(**adapted(options))


def adapted(options: Mapping[str, Any]) -> Any:
    """Returns a tool's options, without those that toolbus does not know, and with a timeout within its limit."""
    known = {key: value for key, value in options.items() if key in ToolOptions.__annotations__}
    shown = options.get("name") or "a tool"
    if dropped := sorted(options.keys() - known.keys()):
        log.warning("%s: toolbus has no option %s of llm_tool; it has no effect", shown, ", ".join(dropped))
    timeout = known.get("timeout")
    if isinstance(timeout, int | float) and timeout > MAX_TIMEOUT_SECONDS:
        known["timeout"] = MAX_TIMEOUT_SECONDS
        log.warning("%s: timeout is %g s, the limit of %g s is used", shown, timeout, MAX_TIMEOUT_SECONDS)
    description = known.get("description")
    if isinstance(description, Mapping) and REFERENCE in description:
        known["description"] = description.get("default") or description[REFERENCE]
    return known


def validate_tool_name(name: str) -> str:
    """Returns a tool's name.

    Raises:
        ValueError: it breaks the rule.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"the tool name {name!r:.80} breaks the rule [A-Za-z0-9_.-]{{1,64}}: rename the tool")
    return name


def entry_id_for_tool(tool_name: str) -> str:
    """Returns the id of the entry that a tool has in N.E.K.O."""
    return f"{TOOL_ENTRY_PREFIX}{tool_name}"


def collect_llm_tool_methods(instance: object) -> list[tuple[LlmToolMeta, Callable[..., Any]]]:
    """Returns the methods with `llm_tool` of an object, each with its record."""
    specs = [(meta_of(each.handler), each.handler) for each in tool_spec.collect(instance)]
    return [(meta, handler) for meta, handler in specs if meta is not None]


TOOL_ENTRY_PREFIX = "__llm_tool__"


def worker(function: Any = None, **options: Any) -> Any:
    """Returns the method itself: a plain function runs on a thread of its own here anyway."""
    return function if callable(function) else lambda inner: inner


def _without_effect(*args: Any, **options: Any) -> None:
    """Does nothing: logs are those of `toolbus run`."""


def _file_logging(plugin_id: str, plugin_dir: object = None, logger: Any = None, **options: Any) -> Any:
    """Returns the plugin's logger: `toolbus run` has its lines."""
    return logger or plugin_logger(plugin_id)


class _ErrorCodes(type):
    """The class of `ErrorCode`."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class ErrorCode(metaclass=_ErrorCodes):
    """Codes of failures for `fail`: each is its own name."""


# Provides the base class of older N.E.K.O. plugins, from ``plugin.sdk.base``: their store is not awaited.
#
# Their configuration is awaited where a loop runs, and not awaited elsewhere.

_METHODS_OF_CONFIG = ("dump", "get", "require", "get_bool", "get_int", "get_str", "set", "update", "base_dump")


class OlderConfig:
    """The configuration of a `PluginConfig`; its methods are awaited only where a loop runs.

    Args:
        config: reads and writes it.
    """

    def __init__(self, config: PluginConfig) -> None:
        self._config = config

    def __repr__(self) -> str:
        return f"<OlderConfig of {self._config!r}>"

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._config, name)
        if name not in _METHODS_OF_CONFIG:
            return method

        def call(*args: Any, **options: Any) -> Any:
            answer = method(*args, **options)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return asyncio.run(answer)
            return answer

        return call


class OlderPluginBase(NekoPluginBase):
    """Base of plugin classes that import it from ``plugin.sdk.base`` or ``plugin.sdk``."""

    @cached_property
    def store(self) -> Any:
        """Keys and values that persist between runs."""
        return super().store.plain

    @cached_property
    def config(self) -> Any:
        """The configuration: plugin.toml, and the values that the plugin has set."""
        return OlderConfig(super().config)


class _PluginDecorators:
    """`plugin`: the class decorator of the documents, and the namespace of decorators of the SDK."""

    entry = entries.plugin_entry
    event = entries.on_event
    hook = entries.hook
    message = entries.message
    custom_event = entries.custom_event
    lifecycle = staticmethod(lifecycle)
    timer = staticmethod(timer_interval)

    def __getattr__(self, name: str) -> Any:
        """Returns a name of the module that is called so as well: `from plugin.sdk import plugin as sdk`."""
        if name not in NAMES:
            raise AttributeError(f"plugin.sdk.plugin has no {name!r} in toolbus", name=name, obj=self)
        return NAMES[name]

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
_EXTENSION = Absence("runs inside another plugin", "Copy its methods with @llm_tool into that plugin.")
_CARD = Absence("shows a page in its windows", "Return the text from the tool, or send it with self.push_message().")
_TRANSPORT = Absence("carries messages of its plugin server", "Send them with self.push_message().")
_ACTIVITY = Absence("tells what the user does at the machine", "Read it with a package such as psutil.")
_FINISH = Absence("writes the envelope of a task's result", "Return the result, or use self.finish().")
_COMPUTER = Absence("stores what its agent clicks", "Store it with self.store.")
_IMAGES = Absence("uploads pictures to its main server", "Put them into parts of self.push_message(), or return them.")
_INNER = Absence(
    "serves the SDK itself", "Use the plugin's own methods, such as self.config, self.data_path, self.logger."
)
_CHAIN = Absence("follows calls from plugin to plugin", "Remove it: the bus ends chains of calls that are too long.")
_ABSENT: tuple[tuple[Absence, str], ...] = (
    (
        absences.RAISING["plugins"],
        "Plugins PluginRef EntryRef EventRef PluginDescriptor parse_entry_ref parse_event_ref",
    ),
    (absences.RAISING["system_info"], "SystemInfo"),
    (absences.RAISING["memory"], "MemoryClient"),
    (absences.RAISING["db"], "PluginDatabase PluginKVStore"),
    (absences.RAISING["state"], "PluginStatePersistence StatePersistence"),
    (
        _ADAPTER,
        "NekoAdapterPlugin AdapterGatewayCore DefaultPolicyEngine AdapterBase AdapterConfig AdapterContext AdapterMode "
        "AdapterMessage AdapterResponse Protocol on_adapter_event on_adapter_startup on_adapter_shutdown on_mcp_tool "
        "on_nonebot_message RouteRule RouteTarget RouteMode RouteDecision RouteEngine ExternalRequest ExternalEnvelope "
        "GatewayAction GatewayError GatewayRequest GatewayResponse PluginInvoker PolicyEngine RequestNormalizer "
        "ResponseSerializer TransportAdapter",
    ),
    (
        _EXTENSION,
        "NekoExtensionBase ExtensionMeta ExtensionEntryMeta ExtensionHookMeta ExtensionRuntime extension "
        "extension_entry extension_hook",
    ),
    (_CARD, "ChatCard PluginView create_card create_view card_fields ReplyTailClient"),
    (_TRANSPORT, "MessagePlaneTransport MessagePlaneRpcClient translate_push_message"),
    (_FINISH, "build_finish_envelope normalize_structured_data normalize_delivery"),
    (_COMPUTER, "CuaCache CuaCacheEntry CuaPathCache"),
    (_IMAGES, "PluginImages"),
    (
        absences.RAISING["bus"],
        "SdkBusContext SdkBusList SdkBusDelta SdkBusWatcher SdkBusMessageRecord SdkBusEventRecord "
        "SdkBusLifecycleRecord SdkBusConversationRecord SdkBusMemoryRecord SdkMessagesBus SdkEventsBus SdkLifecycleBus "
        "SdkConversationsBus SdkMemoryBus ensure_sdk_bus_context BusFilter BusList BusRecord BusReplayContext "
        "MemoryList MemoryRecord MessageClient MessageList MessageRecord EventClient EventList EventRecord "
        "LifecycleClient LifecycleList LifecycleRecord ConversationClient ConversationList ConversationRecord",
    ),
    (
        _INNER,
        "HookExecutorMixin resolve_entry_timeout prepare_entry_kwargs deep_merge_config get_active_profile_name "
        "get_profile_names unwrap_config_payload unwrap_profile_payload unwrap_profiles_state validate_profile_name "
        "resolve_plugin_dir resolve_plugin_data_dir resolve_plugin_cache_dir resolve_plugin_storage_dir "
        "resolve_plugin_runtime_config_path format_push_message_v1_static_diagnostic is_envelope get_error_name "
        "get_http_status PluginFileLogger",
    ),
    (_ACTIVITY, "OsActivitySnapshot get_os_activity_snapshot"),
    (_CHAIN, "CallChain AsyncCallChain get_call_chain get_call_depth is_in_call_chain"),
)
_SETTINGS = Absence("checks configuration with pydantic", "Install pydantic, or read self.config.")

_DECORATORS = (
    "plugin_entry on_event message custom_event hook before_entry after_entry around_entry replace_entry quick_action "
    "ui"
)
_ERRORS = (
    "SdkError ResultError ValidationError NotFoundError TransportError ConflictError PluginCallError EntryConflictError"
)
_RESULTS = (
    "Ok Err Result is_ok is_err unwrap unwrap_or raise_for_err must map_result capture ok fail map_err_result "
    "bind_result match_result"
)
_TEXTS = (
    "PluginI18n tr load_plugin_i18n_from_dir load_plugin_i18n_from_meta clear_plugin_i18n_cache is_i18n_ref "
    "resolve_i18n_refs locale_candidates interpolate_text DEFAULT_LOCALE"
)
# Older names of the same exceptions.
_ALIASES = {
    **dict.fromkeys(("InvalidArgumentError", "ConfigPathError", "ConfigValidationError"), "ValidationError"),
    **dict.fromkeys(("CapabilityUnavailableError", "BusError", "BusTransportError"), "TransportError"),
    **dict.fromkeys(("PluginRouterError", "CircularCallError", "CallChainTooDeepError"), "PluginCallError"),
    **dict.fromkeys(
        ("PluginConfigError", "ConfigProfileError", "InvalidEntryRefError", "InvalidEventRefError"), "ValidationError"
    ),
    "GatewayErrorException": "TransportError",
    "CardSubmissionError": "TransportError",
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
    **dict.fromkeys(
        (
            *("PushMessageFailureReason", "PushMessageSubmitted", "PushMessageRejected", "LogLevel", "PrivacyState"),
            *("BusProtocol", "BusMessagesProtocol", "BusEventsProtocol", "BusLifecycleProtocol", "BusMemoryProtocol"),
            *("BusConversationsProtocol", "MutableStateProtocol", "RouterProtocol", "RouteHandler"),
            *("EventMeta", "EventHandler", "HookMeta", "HookHandler", "HookTiming", "HookDecoratorMeta"),
            *("PluginConfigBaseView", "PluginConfigProfiles", "AsyncSessionProtocol", "PluginResultError"),
        ),
        Any,
    ),
}
# Names of attributes and values, which plugins read and compare.
_CONSTANTS: dict[str, Any] = {
    "NEKO_PLUGIN_TAG": "__neko_plugin__",
    "NEKO_PLUGIN_META_ATTR": "__neko_plugin_meta__",
    "EVENT_META_ATTR": "__neko_event_meta__",
    "HOOK_META_ATTR": "__neko_hook_meta__",
    "PERSIST_ATTR": "_neko_persist",
    "CHECKPOINT_ATTR": "_neko_persist",
    "WORKER_MODE_ATTR": "_neko_worker_mode",
    "UI_CONTEXT_META_ATTR": "__neko_ui_context__",
    "UI_ACTION_META_ATTR": "__neko_ui_action__",
    "EXTENSION_ENTRY_META": "__neko_extension_entry__",
    "EXTENSION_HOOK_META": "__neko_extension_hook__",
    "LLM_TOOL_META_ATTR": "__neko_llm_tool_meta__",
    "LLM_TOOL_ENTRY_PREFIX": TOOL_ENTRY_PREFIX,
    "I18N_REF_KEY": REFERENCE,
    "DEFAULT_PLUGIN_VERSION": "0.0.0",
    "SDK_VERSION": "0.0.0",
    "EXTENDED_TYPES": (),
    "ERROR_NAMES": {},
    "SCHEMA_VERSION": "push_message.v2",
    "DEPRECATION_REMOVAL_VERSION": "v0.9",
    "VISIBILITY_VALUES": ("chat", "hud"),
    "AI_BEHAVIOR_VALUES": ("respond", "read", "blind"),
    "DEFAULT_VISIBILITY": [],
    "DEFAULT_AI_BEHAVIOR": "respond",
    "LEGACY_MESSAGE_TYPES": ("proactive_notification", "music_play_url", "music_allowlist_add"),
    "LEGACY_PUSH_MESSAGE_FIELD_MIGRATIONS": {},
    "LEGACY_PUSH_MESSAGE_POSITIONAL_FIELDS": (),
    "LEGACY_PUSH_MESSAGE_TRUTHY_ONLY_FIELDS": frozenset(("unsafe", "fast_mode")),
    "DELIVERY_MODES": ("proactive", "passive", "silent"),
    "DEFAULT_DELIVERY": "proactive",
    "ADAPTER_EVENT_META": "__neko_adapter_event__",
    "ADAPTER_LIFECYCLE_META": "__neko_adapter_lifecycle__",
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
    **dict.fromkeys(("get_plugin_logger", "get_logger", "get_sdk_logger", "get_extension_logger"), plugin_logger),
    **dict.fromkeys(
        ("setup_sdk_logging", "configure_sdk_default_logger", "intercept_standard_logging"), _without_effect
    ),
    "enable_plugin_file_logging": _file_logging,
    "plugin_file_logger": lambda **options: lambda cls: cls,  # every plugin has `file_logger`
    "ensure_sdk_context": lambda ctx: ctx,
    "worker": worker,
    "ErrorCode": ErrorCode,
    "validate_tool_name": validate_tool_name,
    "entry_id_for_tool": entry_id_for_tool,
    "collect_llm_tool_methods": collect_llm_tool_methods,
    "format_log_text": str,
    "build_component_name": lambda *names: ".".join(map(str, names)),
    **_CONSTANTS,
    **_TYPES,
    **{name: getattr(entries, name) for name in _DECORATORS.split()},
    **{name: getattr(sdk_errors, name) for name in _ERRORS.split()},
    **{name: getattr(sdk_errors, of) for name, of in _ALIASES.items()},
    **{name: getattr(sdk_results, name) for name in _RESULTS.split()},
    **{name: getattr(plugin_i18n, name) for name in _TEXTS.split()},
    **{name: _AbsentKind(name, (), {"absence": absence}) for absence, names in _ABSENT for name in names.split()},
}


SETTINGS = ("PluginSettings", "SettingsField", "create_settings_safe", "get_hot_fields")  # they need pydantic
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
    if name in SETTINGS:
        return _settings(f"{module}.{name}")[name]
    raise ModuleNotProvided(
        f"{module}.{name}",
        Absence("is a part of its plugin server", "Remove the import, or copy what it does into the plugin's folder."),
    )


_HOT = ("hot", True)  # on a field


def _settings(shown: str) -> dict[str, Any]:
    """Returns the base of typed settings and its fields, which need pydantic there too."""
    try:
        pydantic = importlib.import_module("pydantic")
    except ImportError:
        raise ModuleNotProvided(shown, _SETTINGS) from None

    def field(default: Any = ..., *, hot: bool = False, **options: Any) -> Any:
        described = pydantic.Field(default, **options)
        if hot:
            described.metadata.append(_HOT)
        return described

    def hot_fields(settings: Any) -> set[str]:
        return {name for name, each in settings.model_fields.items() if _HOT in each.metadata}

    def create_safe(settings: Any, section: Mapping[str, Any] | None) -> Any:
        values = dict(section or {})
        try:
            return settings.model_validate(values)
        except pydantic.ValidationError as problem:
            wrong = {str(each["loc"][0]) for each in problem.errors() if each["loc"]}
            log.warning("%s: these have their defaults, since their values are wrong: %s", shown, ", ".join(wrong))
            return settings.model_validate({key: value for key, value in values.items() if key not in wrong})

    rules = {"extra": "ignore", "validate_default": True}
    base = type("PluginSettings", (pydantic.BaseModel,), {"__module__": __name__, "model_config": rules})
    return dict(zip(SETTINGS, (base, field, create_safe, hot_fields), strict=True))
