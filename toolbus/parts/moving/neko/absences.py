"""Lists the attributes of N.E.K.O. plugins that toolbus does not have: the purpose of each, and what to use instead.

Those of `RAISING` raise when they are used, since a plugin would continue with a wrong value; those of `OBJECTS` may be
handed on before. Those of `IGNORED` have no effect, which is logged once: they only change windows of that system.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from toolbus.parts.moving.neko.sdk_errors import Absence, NotProvided

log = logging.getLogger("toolbus.neko.absences")

_WARNED = "_toolbus_warned"  # on a plugin object: the names of IGNORED that were logged
_STORE = "Store the values in self.store, or in a file at self.data_path(name)."
_DATABASE = Absence("is a SQL database", 'Use sqlite3.connect(self.data_path("plugin.db")).')
_STATE = Absence("saves attributes while the plugin is frozen", _STORE)
_OTHERS = Absence(
    "calls entries of other plugins",
    "Call the other plugin's tool: give the handler a parameter `scope: ToolScope` (from toolbus.sdk) and await "
    "scope.call(name, arguments).",
)
_STREAMS = Absence(
    "reads the messages, events and memories of the main server",
    "Take what the tool needs as its arguments; scope.context of a ToolScope says who is asking.",
)
_MEMORY = Absence("searches the memories of the main server", "Take what the tool needs as its arguments.")
_SYSTEM = Absence("reads the main server's configuration", "Use self.config, os.environ or the platform module.")

_PROFILES = Absence(
    "switches between sets of configuration", "Use self.config.set(path, value), or one plugin.toml for each set."
)

RAISING: dict[str, Absence] = {
    "plugins": _OTHERS,
    "trigger_plugin_event": _OTHERS,
    "query_plugins": _OTHERS,
    "bus": _STREAMS,
    "memory": _MEMORY,
    "query_memory": _MEMORY,
    "db": _DATABASE,
    "state": _STATE,
    "system_info": _SYSTEM,
    "get_system_config": _SYSTEM,
    "get_own_profiles_state": _PROFILES,
    "get_own_profile_config": _PROFILES,
    "upsert_own_profile_config": _PROFILES,
    "delete_own_profile_config": _PROFILES,
    "set_own_active_profile": _PROFILES,
}
# Those that are objects there. A plugin hands them on while it starts, and may never use them.
OBJECTS = frozenset(("plugins", "bus", "memory", "db", "state", "system_info"))


@dataclass(frozen=True, slots=True)
class Ignored:
    """A method that has no effect here.

    Attributes:
        reason: why, and what to use instead, as sentences.
        returns: its return value; a tuple becomes a new list for each call.
        awaited: whether it is async.
    """

    reason: str
    returns: Any = None
    awaited: bool = False


_NO_STATUS = (
    "toolbus does not show the status of plugins: use self.logger, or scope.progress() of a ToolScope in a call."
)
_NO_RUN = "There are no runs here: report with scope.progress() of a ToolScope, and return the result."
_NO_PAGES = "No window shows a plugin's pages here: serve them from the plugin itself."
_NO_ENTRIES = "Entries are called by that system's agent: register_llm_tool() offers a function to models."
_NO_PLAYER = "toolbus plays no music: return the address from the tool."
_NO_FREEZE = "toolbus freezes no plugin: use self.store."

IGNORED: dict[str, Ignored] = {
    "report_status": Ignored(_NO_STATUS),
    "update_status": Ignored(_NO_STATUS),
    "run_update": Ignored(_NO_RUN, awaited=True),
    "export_push": Ignored(_NO_RUN, awaited=True),
    **{
        f"{name}{way}": Ignored(_NO_RUN, awaited=way != "_sync")
        for name in ("run_progress", "export_push_text", "export_push_binary", "export_push_binary_url")
        for way in ("", "_async", "_sync")
    },
    **{
        f"{name}{way}": Ignored(_NO_RUN, awaited=way == "_async")
        for name in ("run_update", "export_push_url", "export_push")
        for way in ("_async", "_sync")
    },
    "export_push_url": Ignored(_NO_RUN, awaited=True),
    "register_static_ui": Ignored(_NO_PAGES, False),
    "get_static_ui_config": Ignored(_NO_PAGES),
    "set_list_actions": Ignored(_NO_PAGES, True),
    "register_list_action": Ignored(_NO_PAGES, True),
    "clear_list_actions": Ignored(_NO_PAGES),
    "get_list_actions": Ignored(_NO_PAGES, ()),
    "register_dynamic_entry": Ignored(_NO_ENTRIES, True),
    "unregister_dynamic_entry": Ignored(_NO_ENTRIES, False),
    "enable_entry": Ignored(_NO_ENTRIES, False),
    "disable_entry": Ignored(_NO_ENTRIES, False),
    "is_entry_enabled": Ignored(_NO_ENTRIES),
    "list_entries": Ignored(_NO_ENTRIES, ()),
    "collect_entries": Ignored(_NO_ENTRIES, ()),
    "register_music_domains": Ignored(_NO_PLAYER),
    # Methods that plugins call for pages of their own making, although they are not public there.
    **dict.fromkeys(
        ("_notify_host_comm", "_notify_static_ui_registered", "_notify_list_actions_updated"), Ignored(_NO_PAGES)
    ),
    **dict.fromkeys(("_notify_dynamic_entry_registered", "_notify_dynamic_entry_unregistered"), Ignored(_NO_ENTRIES)),
    "freeze": Ignored(_NO_FREEZE),
    "unfreeze": Ignored(_NO_FREEZE),
}


def find_absent(owner: object, name: str) -> Any:
    """Returns a substitute for an attribute that an object does not have.

    Raises:
        NotProvided: N.E.K.O. has this method and toolbus does not; the text says what to use.
        AttributeError: neither has it.
    """
    if name in OBJECTS:
        return AbsentObject(f"self.{name}", RAISING[name])
    if name in RAISING:
        raise NotProvided(f"self.{name}", RAISING[name])
    if name in IGNORED:
        return _without_effect(owner, name, IGNORED[name])
    raise AttributeError(
        f"{type(owner).__name__!r} object has no attribute {name!r}, and toolbus has none of that name for plugins: "
        "set it in the class, or do without it",
        name=name,
        obj=owner,
    )


class AbsentObject:
    """An object of N.E.K.O. that toolbus does not have: it may be handed on, is false, and raises when it is used.

    Args:
        shown: what the plugin wrote for it.
        absence: its purpose and what to use instead.
    """

    __slots__ = ("_absence", "_shown")

    def __init__(self, shown: str, absence: Absence) -> None:
        self._shown = shown
        self._absence = absence

    def __repr__(self) -> str:
        return f"<{self._shown} of N.E.K.O., which toolbus does not have>"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what copies and inspects objects asks for these
            raise AttributeError(name)
        raise NotProvided(self._shown, self._absence)

    def _use(self, *args: Any, **options: Any) -> NoReturn:
        raise NotProvided(self._shown, self._absence)

    __call__ = __getitem__ = __setitem__ = __contains__ = __iter__ = __len__ = _use
    __await__ = __aiter__ = __enter__ = __exit__ = __aenter__ = __aexit__ = _use


def warn_once(owner: object, name: str, reason: str) -> None:
    """Logs that a method or option has no effect here, once for each plugin object."""
    warned = owner.__dict__.setdefault(_WARNED, set())
    if name not in warned:
        warned.add(name)
        log.warning("%s: %s has no effect. %s", getattr(owner, "plugin_id", "") or type(owner).__name__, name, reason)


def _without_effect(owner: object, name: str, ignored: Ignored) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        warn_once(owner, f"{name}()", ignored.reason)
        return list(ignored.returns) if isinstance(ignored.returns, tuple) else ignored.returns

    async def call_later(*args: Any, **options: Any) -> Any:
        return call()

    return call_later if ignored.awaited else call
