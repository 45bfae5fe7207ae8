"""Whatever is registered, withdrawn and overwritten: after a restart each role lists what a plain model does, in order.

What is not kept (tools of sessions and of the bus's process) leaves its place when the bus ends, the others keep
theirs. A role that is new lists what is for all roles, in the order in which that came.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.faults.callbacks import Legacy, catalog
from tests.support.examples import examples
from toolbus.bus import Bus, Config
from toolbus.functions.tool_spec import spec_of
from toolbus.sdk import llm_tool
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

LOCAL = "local"  # the source that is not kept
NOBODY = "http://127.0.0.1:1/run"  # registered all the same: listings with what is away show it
ROLES = st.sampled_from("ABC")
SOME_ROLE = st.none() | ROLES
NAMES = st.sampled_from(["t1", "t2", "t3", "t4"])
SOURCES = st.sampled_from(["s1", "s2"])
# Name → the sources that offer it, the owner last; a dict keeps the place of what is replaced.
Table = dict[str, tuple[str, ...]]


def with_owner(table: Table, name: str, source: str) -> None:
    """Gives a name to a source."""
    table[name] = (*(each for each in table.get(name, ()) if each != source), source)


class KeptMachine(RuleBasedStateMachine):
    """One data directory, and the buses that use it one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="toolbus-"))
        self._runner = asyncio.Runner()
        self._bus: Bus | None = None  # None until started
        self.tables: dict[str, Table] = {}
        self.absent: dict[str, Table] = {}  # of roles that the last bus was not told of
        self.to_come: Table = {}
        self.configured: tuple[str, ...] = ()  # of the bus that runs, or ran last
        self.added: dict[str, None] = {}  # roles that were added at run time, in order

    @property
    def bus(self) -> Bus:
        assert self._bus is not None
        return self._bus

    def _of(self, role: str | None) -> list[Table]:
        if role is not None:
            return [self.tables[role]]
        return [*self.tables.values(), *self.absent.values(), self.to_come]

    def _ask(self, verb: str, request: object) -> None:
        async def ask() -> None:
            async with Legacy.of(self.bus) as legacy:
                await getattr(legacy.stub, verb)(request)

        self._runner.run(ask())

    def _start(self) -> None:
        config = Config(
            grpc=("127.0.0.1:0",), http="off", roles=self.configured, data_dir=self._folder, grace_seconds=0
        )

        async def start() -> Bus:
            bus = Bus(config)  # here, since grpc binds itself to the loop that runs
            await bus.start()
            return bus

        self._bus = self._runner.run(start())

    def _stop(self) -> None:
        if self._bus is not None:
            self._runner.run(self._bus.stop())
            self._bus = None

    def _is_there(self, role: str | None) -> bool:
        return role is None or role in self.tables

    # -- what is done ------------------------------------------------------------------------------------------------

    @initialize(roles=st.sets(ROLES, min_size=1))
    def begin(self, roles: set[str]) -> None:
        self.tables = {role: {} for role in sorted(roles)}
        self.configured = tuple(self.tables)
        self._start()

    @rule(name=NAMES, source=SOURCES, role=SOME_ROLE)
    def register(self, name: str, source: str, role: str | None) -> None:
        if self._is_there(role):
            tool = pb.Tool(name=name, callback_url=NOBODY, role=role, description=source)
            self._ask("Register", wire.RegisterRequest(source=source, tools=[tool]))
            for table in self._of(role):
                with_owner(table, name, source)

    @rule(name=NAMES, role=SOME_ROLE)
    def overwrite(self, name: str, role: str | None) -> None:
        if self._is_there(role):
            self.bus.add_tool(spec_of(llm_tool(name=name, description="d", role=role)(lambda: 1)), LOCAL)
            for table in self._of(role):
                with_owner(table, name, LOCAL)

    @rule(name=NAMES, role=SOME_ROLE)
    def unregister(self, name: str, role: str | None) -> None:
        if self._is_there(role):
            self._ask("Unregister", wire.UnregisterRequest(name=name, role=role))
            for table in self._of(role):
                table.pop(name, None)

    @rule(source=SOURCES, role=SOME_ROLE)
    def clear(self, source: str, role: str | None) -> None:
        if self._is_there(role):
            self._ask("Clear", wire.ClearRequest(source=source, role=role))
            for table in self._of(role):
                self._without(table, source)

    @rule(role=ROLES)
    def role_add(self, role: str) -> None:
        self.bus.add_role(role)
        self._configure(role)
        if role not in self.configured:
            self.added[role] = None

    @precondition(lambda self: len(self.tables) > 1)
    @rule(role=ROLES)
    def role_remove(self, role: str) -> None:
        if role in self.tables:
            self.bus.remove_role(role)
            del self.tables[role]
            self.added.pop(role, None)

    @rule(roles=st.sets(ROLES, min_size=1), as_before=st.booleans())
    def restart(self, roles: set[str], as_before: bool) -> None:
        self._stop()
        for table in self._of(None):
            self._without(table, LOCAL)
        self.configured = tuple(self.tables) if as_before else tuple(sorted(roles))
        self.absent.update(self.tables)
        self.tables = {}
        for role in dict.fromkeys((*self.configured, *self.added)):
            self._configure(role)
        self._start()

    @staticmethod
    def _without(table: Table, source: str) -> None:
        """Withdraws a source: its names go back to their earlier owners."""
        others = {name: tuple(each for each in sources if each != source) for name, sources in table.items()}
        table.clear()
        table.update({name: sources for name, sources in others.items() if sources})

    def _configure(self, role: str) -> None:
        if role not in self.tables:
            waiting = self.absent.pop(role, None)
            self.tables[role] = dict(self.to_come) if waiting is None else waiting  # REST-12

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def lists_agree(self) -> None:
        if self._bus is not None:
            assert catalog(self.bus) == {
                role: [(name, sources[-1]) for name, sources in table.items()] for role, table in self.tables.items()
            }

    def teardown(self) -> None:
        self._stop()
        self._runner.close()
        shutil.rmtree(self._folder)


TestKept = KeptMachine.TestCase
TestKept.settings = settings(
    max_examples=examples(6), stateful_step_count=16, suppress_health_check=[HealthCheck.too_slow]
)
