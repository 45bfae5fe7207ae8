"""Defines `PluginContext`, the argument of a plugin's constructor."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from toolbus.functions.reply import picture_type
from toolbus.parts.moving.neko.absences import RAISING, find_absent
from toolbus.parts.moving.neko.plugin_i18n import with_master_name
from toolbus.parts.moving.neko.plugin_logger import PluginLogger
from toolbus.parts.moving.neko.sdk_errors import NotProvided

# A message in N.E.K.O. has parts (text, pictures, sound, actions of its windows), and states where it is shown and
# whether the model answers it. Its texts become the notification's text; all other parts are in the notification's
# data, for hosts that know such messages.

if TYPE_CHECKING:
    from toolbus.parts.moving.neko.plugin_config import PluginConfig

Send = Callable[[str, dict[str, Any]], object]

MAX_WAITING = 32  # messages from before the plugin is connected
MAX_INLINE = 128 * 1024  # bytes of a picture or sound: a notification's data has a limit, and base64 adds a third
_PASSED_ON = ("source", "target_lanlan", "priority", "coalesce_key", "metadata", "message_type")
_WANTS = {"respond": "reply", "read": "context", "blind": "nothing"}  # by the behavior that a message asks for
_SUBMITTED = {"submitted": True}
_FULL = {"submitted": False, "reason": "backpressure"}


class Outlet:
    """Sends a plugin's messages; safe from any thread. They wait here until `open`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._send: Send | None = None  # None until the plugin is connected
        self._waiting: list[tuple[str, dict[str, Any]]] = []

    def __repr__(self) -> str:
        return f"<Outlet {'open' if self._send else f'with {len(self._waiting)} waiting'}>"

    def open(self, send: Send) -> None:
        """Sets the function that sends messages, and sends those that waited."""
        with self._lock:
            self._send = send
            waiting, self._waiting = self._waiting, []
        for each in waiting:
            send(*each)

    def push(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message or lets it wait; returns whether it was accepted, in the form of N.E.K.O."""
        described = describe_message(message)
        with self._lock:
            if self._send is None:
                if len(self._waiting) >= MAX_WAITING:
                    return dict(_FULL)
                self._waiting.append(described)
                return dict(_SUBMITTED)
            send = self._send
        send(*described)
        return dict(_SUBMITTED)


def describe_message(message: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns a message's text and its data.

    Args:
        message: the arguments of `push_message`, those of older versions (`content`, `binary_data` …) included.
    """
    parts = message.get("parts")
    listed = [dict(each) for each in parts if isinstance(each, Mapping)] if isinstance(parts, list | tuple) else []
    if not listed:
        listed = _older_parts(message)
    texts = [str(each["text"]) for each in listed if each.get("type") == "text" and each.get("text")]
    others = [_writable(each) for each in listed if each.get("type") != "text"]
    kinds = ", ".join(dict.fromkeys(str(each.get("type") or "part") for each in others))
    text = "\n".join(texts) or str(message.get("description") or "") or (f"[{kinds}]" if kinds else "[no text]")
    text = with_master_name(text)
    data: dict[str, Any] = {key: message[key] for key in _PASSED_ON if message.get(key)}
    if others:
        data["parts"] = others
    data["visibility"] = list(message.get("visibility") or ())
    data["ai_behavior"] = behavior = str(message.get("ai_behavior") or "respond")
    data["wants"] = _WANTS.get(behavior, "nothing")
    return text, data


def _older_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if message.get("content") is not None:
        parts.append({"type": "text", "text": str(message["content"])})
    mime = str(message.get("mime") or "")
    kind = mime.partition("/")[0] if mime.startswith(("audio/", "video/")) else "image"
    if message.get("binary_data") is not None:
        parts.append({"type": kind, "data": message["binary_data"], "mime": mime})
    elif message.get("binary_url"):
        parts.append({"type": kind, "url": str(message["binary_url"]), "mime": mime})
    return parts


def _writable(part: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part that JSON can hold: bytes become base64, and too many bytes become their number."""
    written = dict(part)
    data = written.pop("data", None)
    if isinstance(data, bytes | bytearray):
        if len(data) > MAX_INLINE:
            written["omitted_bytes"] = len(data)
        else:
            written["binary_base64"] = base64.b64encode(data).decode("ascii")
    return written


class Images:
    """`ctx.images`: what it makes is sent with the message, since no server here shows pictures by an address."""

    async def upload(self, data: bytes, *, mime: str | None = None, timeout: float = 3.0) -> dict[str, Any]:
        """Returns the part of a message with a picture.

        Raises:
            TypeError: it is not bytes.
        """
        if not isinstance(data, bytes | bytearray):
            raise TypeError(f"a picture is bytes, not {type(data).__name__}")
        return {"type": "image", "data": bytes(data), "mime": mime or picture_type(bytes(data))}


@dataclass(eq=False)
class PluginContext:
    """The `ctx` that `toolbus run` passes to a plugin's constructor. A plugin may replace its attributes.

    Attributes:
        plugin_id: the plugin's id.
        logger: the plugin's logger.
        folder: the folder of the plugin's file.
        manifest: the values of its plugin.toml; empty without one.
        outlet: sends its messages.
        read: reads the values of the plugin.toml again; None where the plugin has none.
        files: those that `read` reads.
    """

    plugin_id: str
    logger: PluginLogger
    folder: Path
    manifest: Mapping[str, Any] = field(default_factory=dict)
    outlet: Outlet = field(default_factory=Outlet)
    read: Callable[[], Mapping[str, Any]] | None = None
    files: Sequence[Path] = ()

    def stamp(self) -> object:
        """Returns a value that differs after a file has changed."""
        stamps = []
        for each in self.files:
            with suppress(OSError):
                stamps.append((each, (state := each.stat()).st_mtime_ns, state.st_size, state.st_ino))
        return stamps

    def reload(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Reads the plugin.toml again, for `own_config` too; returns the values from before, and those that hold now.

        Raises:
            SetupError: it cannot be read; the values from before go on.
        """
        before = self.config
        if self.read is not None:
            self.manifest = self.read()
            self.own_config.replace_base(self.manifest)
        return before, self.config

    run_id: ClassVar[str | None] = None  # there are no runs here

    def __getattr__(self, name: str) -> Any:
        return find_absent(self, name)

    @cached_property
    def own_config(self) -> PluginConfig:
        """The configuration: plugin.toml, and the values that the plugin has set."""
        from toolbus.parts.moving.neko.plugin_config import (
            PluginConfig,  # here, so that hosts and simple plugins do not load it
        )

        return PluginConfig(self.config, self.data_dir / "config.json")

    async def get_own_config(self, timeout: float = 5.0) -> dict[str, Any]:
        """Returns the configuration as `config`, in the form of N.E.K.O.; `timeout` has no effect."""
        return {"plugin_id": self.plugin_id, "config": await self.own_config.dump()}

    async def get_own_effective_config(self, profile_name: str | None = None, timeout: float = 5.0) -> dict[str, Any]:
        """Returns what `get_own_config` does.

        Raises:
            NotProvided: of a profile.
        """
        if profile_name is not None:
            raise NotProvided("ctx.get_own_effective_config of a profile", RAISING["get_own_profile_config"])
        return await self.get_own_config()

    async def get_own_base_config(self, timeout: float = 5.0) -> dict[str, Any]:
        """Returns the values of plugin.toml as `config`."""
        return {"plugin_id": self.plugin_id, "config": await self.own_config.base_dump()}

    async def update_own_config(self, updates: Mapping[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        """Stores several values, inner dicts key by key, and returns everything as `config`."""
        return {"plugin_id": self.plugin_id, "config": await self.own_config.update(updates)}

    async def finish(self, *, data: Any = None, message: str = "", **options: Any) -> Any:
        """Returns the data, with the message if there is one, for a tool to return."""
        if data is None:
            return message or None
        return {"message": message, "data": data} if message else data

    @property
    def images(self) -> Images:
        """Makes parts of messages from pictures."""
        return Images()

    @property
    def config_path(self) -> Path:
        """The plugin's plugin.toml, whether or not it has one."""
        return self.folder / "plugin.toml"

    @property
    def data_dir(self) -> Path:
        """The folder for the plugin's own files."""
        return self.folder / "data"

    @property
    def metadata(self) -> dict[str, Any]:
        """The section ``[plugin]`` of plugin.toml."""
        section = self.manifest.get("plugin")
        return dict(section) if isinstance(section, Mapping) else {}

    @property
    def config(self) -> dict[str, Any]:
        """The content of plugin.toml, with ``[plugin]``, as N.E.K.O. hands it out."""
        return dict(self.manifest)

    def push_message(self, **message: Any) -> dict[str, Any]:
        """Sends the user a message outside a call, as a notification; returns whether it was accepted."""
        return self.outlet.push(message)
