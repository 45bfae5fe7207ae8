"""Holds what every room of one bus shares: the catalog, the calls, the sessions, and what changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolbus.bus.access.doorman import Doorman
from toolbus.bus.access.neighbours import Neighbours
from toolbus.bus.audit.audit import Audit
from toolbus.bus.calls.call_records import CallRecords
from toolbus.bus.calls.dispatcher import Dispatcher
from toolbus.bus.catalog.catalog_view import CatalogView
from toolbus.bus.catalog.policy import Policy
from toolbus.bus.catalog.registry import Registry
from toolbus.bus.config import Config
from toolbus.bus.embedded import EmbeddedBus
from toolbus.bus.features import Features
from toolbus.bus.keys.keyring import Keyring
from toolbus.bus.metrics.call_counts import CallMetrics
from toolbus.bus.pins.pins import Pins
from toolbus.bus.roles import Roles
from toolbus.bus.room import Rooms
from toolbus.bus.signals import Signals
from toolbus.bus.streams.presence import Presence
from toolbus.bus.tasks.task_manager import TaskManager
from toolbus.bus.web_paths import WebPaths
from toolbus.limits import Limits, Timings
from toolbus.search import IndexCache
from toolbus.stall import StallWatch


@dataclass(frozen=True, slots=True)
class Core:
    """The shared parts of one bus. A room reads and calls them; none is replaced while the bus lives.

    Attributes:
        neighbours: which users of this machine may use the bus.
        keyring: the keys of identities beyond this machine; None where no address needs them.
        doorman: who asks beyond this machine.
        roles: adds and removes roles.
        registry: what is offered, by which source.
        policy: who may offer and call what.
        view: what each caller sees of the registry.
        dispatcher: the calls in flight.
        presence: the sessions of attached peers.
        records: the newest calls.
        metrics: counts of the calls of each tool.
        audit: where parts say what was done and by whom.
        pins: what is trusted of sources whose changes are to be noticed.
        indexes: of the catalogs that are searched.
        tasks: calls that outlived their soft deadline.
        local: the bus as its own process uses it.
        signals: what changed, and who listens.
        stalls: tells when the bus stood still.
        rooms: the rooms of this bus, this one included.
        web: what rooms serve over HTTP beside the gateway's endpoints.
        features: what mounted MCP servers have beside tools.
        request_stop: requests the end of the whole bus; the program that runs it drains and stops it.
    """

    config: Config
    limits: Limits
    neighbours: Neighbours
    timings: Timings
    keyring: Keyring | None
    doorman: Doorman
    roles: Roles
    registry: Registry
    policy: Policy
    view: CatalogView
    dispatcher: Dispatcher
    presence: Presence
    records: CallRecords
    metrics: CallMetrics
    audit: Audit
    pins: Pins
    indexes: IndexCache
    tasks: TaskManager
    local: EmbeddedBus
    signals: Signals
    stalls: StallWatch
    rooms: Rooms
    web: WebPaths
    features: Features
    request_stop: Callable[[], None]

    @property
    def takes_calls(self) -> bool:
        """Whether the bus has started and is not draining."""
        return self.local.loop is not None and not self.presence.draining
