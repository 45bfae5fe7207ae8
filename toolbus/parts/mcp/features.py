"""Collects the prompts, resources, resource templates and completions of mounted MCP servers.

The endpoint for MCP clients serves them. Neither side knows the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from toolbus.bus.access.identity import LOCAL, Identity
from toolbus.bus.core import Core
from toolbus.bus.keys.seal import Sealer
from toolbus.protocol.tool import Progress

Kind = Literal["prompts", "resources"]
OnUpdate = Callable[[str], None]  # gets the URI of a resource that was updated


@dataclass(frozen=True, slots=True)
class Requester:
    """Who makes a request to a provider.

    Attributes:
        accepts: what the client can answer in the middle of a request, in words of `ToolCall.accepts`.
        identity: whose request it is.
        user_id: the user; "" where none is named.
        source: as which the client calls tools.
        on_progress: gets progress; None: progress is dropped.
    """

    accepts: Collection[str] = ()
    identity: Identity = LOCAL
    user_id: str = ""
    on_progress: Callable[[Progress], None] | None = None
    source: str = ""


class FeatureProvider(Protocol):
    """A mounted server, as the endpoint sees it. Declarations are objects as MCP has them, names unqualified.

    Attributes:
        source: the mount.
        role: that it is for; "" for all.
        min_level: the access level that a user needs.
        capabilities: of `prompts`, `resources`, `completions`, `subscribe`.
        instructions: of the server to models; "" unless its operator lets clients see them.
    """

    source: str
    role: str
    min_level: int
    instructions: str
    capabilities: Collection[str]

    def declared(self, kind: str) -> Sequence[Mapping[str, Any]]:
        """Returns what is declared now of a kind: `prompts`, `resources`, or their `templates`."""
        ...

    async def request(self, method: str, params: Mapping[str, Any], asker: Requester) -> dict[str, Any]:
        """Makes a request: `prompts/get`, `resources/read` or `completion/complete`, with the server's own names.

        Returns:
            The result as protocol 2026-07-28 has it, so it may be `input_required`.

        Raises:
            RpcError: the server refused, or could not be reached.
        """
        ...

    def subscribe(self, uri: str, on_update: OnUpdate) -> Callable[[], None]:
        """Reports each update of a resource from now on. Returns a function that ends this."""
        ...


class Features:
    """The providers of one bus, in the order in which they came.

    Args:
        data_dir: of the bus; None where it has none.
    """

    def __init__(self, data_dir: Path | None = None) -> None:
        self._data_dir = data_dir
        self._providers: dict[str, FeatureProvider] = {}  # by source
        self._listeners: list[Callable[[Kind], None]] = []

    def __repr__(self) -> str:
        return f"<Features of {len(self._providers)}>"

    @functools.cached_property
    def bus_id(self) -> str:
        """Names the bus in the path of what it lists (`messages.hops`); the same after a restart with its data.

        Not the id that peers see: that one is made of the names of host and addresses, which two machines may share.

        Raises:
            SetupError: the file of its key cannot be used.
        """
        return Sealer.of(self._data_dir).sign("", "bus")[1:]

    @property
    def providers(self) -> list[FeatureProvider]:
        return list(self._providers.values())

    def add(self, provider: FeatureProvider) -> None:
        """Adds a provider in the place of an earlier one of the same source."""
        self._providers[provider.source] = provider
        self._all_changed()

    def remove(self, source: str) -> None:
        """Removes the provider of a source, if it has one."""
        if self._providers.pop(source, None) is not None:
            self._all_changed()

    def changed(self, kind: Kind) -> None:
        """Notifies that a provider now declares other prompts or resources."""
        for listener in list(self._listeners):
            listener(kind)

    def on_change(self, listener: Callable[[Kind], None]) -> Callable[[], None]:
        """Calls a listener with the kind at each change. Returns a function that ends this."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _all_changed(self) -> None:
        self.changed("prompts")
        self.changed("resources")


def features_of(core: Core) -> Features:
    """Returns the features that the rooms of a bus share; some of its own where there is no endpoint for clients."""
    return core.rooms.provider(Features) or Features(core.config.data_dir)
