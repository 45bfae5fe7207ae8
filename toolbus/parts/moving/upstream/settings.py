"""Declares the setting of a bus for its main server, and where HTTP listens beside one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolbus.bus.callback_url import parse_callback_url
from toolbus.bus.config import check_port
from toolbus.bus.loopback import mask
from toolbus.common.setting import TEXT, CheckedRecord, Option, setting
from toolbus.errors import SetupError

if TYPE_CHECKING:
    from toolbus.bus.config import Config

DEFAULT_PORT = 48916  # of a bus that offers its tools to a main server, which has the other one
PORT_VARIABLE = "NEKO_USER_PLUGIN_SERVER_PORT"


def _check_upstream(name: str, url: str | None) -> None:
    if url is None:
        return
    try:
        target = parse_callback_url(url)
    except ValueError:
        raise SetupError(
            f"{name} {mask(url)!r} is not http://HOST:PORT of this machine: write for example http://127.0.0.1:48911"
        ) from None
    if target.scheme != "http" or target.user or target.url.partition("://")[2].partition("/")[2]:
        raise SetupError(f"{name} {target.shown!r} is not http://HOST:PORT: write for example http://127.0.0.1:48911")


@dataclass(frozen=True, slots=True)
class UpstreamSettings(CheckedRecord):
    """The main server that a bus offers its tools to; None: it has none."""

    upstream: str | None = setting(
        None,
        TEXT,
        "`http://HOST:PORT` of a [main server](../moving/neko.md) to which the bus offers its tools",
        check=_check_upstream,
        option=Option("Also register the tools with the main server at http://HOST:PORT.", "URL"),
    )

    @property
    def reserved(self) -> str:
        """The address on this machine that the bus leaves to the main server; "" for none."""
        return (self.upstream or "").rstrip("/")

    def check_beside(self, config: Config) -> None:
        """Checks what the setting needs of others.

        Raises:
            SetupError: they contradict each other.
        """
        if self.upstream is not None and config.http == "off":
            raise SetupError("upstream needs http, since the main server calls tools back over it: drop http off")
        if self.upstream is None and config.adopt_roles == "upstream":
            raise SetupError("adopt_roles upstream needs a main server whose roles are taken: set upstream")

    @staticmethod
    def derive(settings: Mapping[str, Any], above_file: Collection[str], environ: Mapping[str, str]) -> dict[str, Any]:
        """Returns where HTTP listens beside a main server, unless a flag or variable says so (REST-51).

        The port is that of the main server's own plugin server, which may run as well: then the next one is taken.
        """
        if not settings.get("upstream") or "http" in above_file:
            return {}
        port = environ.get(PORT_VARIABLE)
        if not port and "http" in settings:
            return {"http": settings["http"]}
        number = check_port(PORT_VARIABLE, port) if port else DEFAULT_PORT
        return {"http": f"127.0.0.1:{number}", "http_fallback": True}
