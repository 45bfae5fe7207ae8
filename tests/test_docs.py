"""The documents are true: snippets run, commands parse, links lead somewhere, tables are those of the code."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import grpc
import httpx
import pytest
import typer

import toolbus.loop
from tests.loop.model_thread import answering
from tests.support import curl
from toolbus.bus.config import Config, settle
from toolbus.cli.command_line import app
from toolbus.dialects import DIALECTS
from toolbus.dropin import FileGrants, env_of, read_manifest
from toolbus.errors import Code, Stage
from toolbus.loop import LoopEvent, LoopSettings
from toolbus.sdk import ToolScope
from toolbus.testing import running_bus
from toolbus.tool import KIB, MIB, Limits
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_bus_service_pb2_grpc as rpc
from toolbus.v1 import tool_pb2 as pb

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    *sorted(str(page.relative_to(ROOT)) for folder in ("docs", "lab/results") for page in (ROOT / folder).glob("*.md")),
)
TEXTS = {page: (ROOT / page).read_text("utf-8") for page in PAGES}
PROTOCOL = TEXTS["docs/protocol.md"]
HTTP = "http://127.0.0.1:48911"  # where the pages say that it listens
SECONDS = 20.0  # what anything here may take on a loaded machine; nothing waits for it to pass

# Page → a file of another page that has to run while its own snippets do.
BORROWED = {"docs/hosts.md": ("docs/authoring.md", "weather.py")}

DROPIN = "docs/dropin.md"  # whose named snippets are the files of one folder, but for the host's

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``shown`` is the ``text`` or ``json`` block right below it: what it prints."""

    page: str
    line: int
    kind: str
    text: str
    shown: str | None = None
    shown_kind: str = ""

    @property
    def file(self) -> str:
        """The name in its first line, ``# weather.py``; empty where it has none."""
        named = re.match(r"# (\w+\.py)\n", self.text)
        return named[1] if named else ""

    @property
    def is_dropin(self) -> bool:
        return self.page == DROPIN and self.kind == "python" and self.file not in ("", "host.py")

    @property
    def is_plugin(self) -> bool:
        return self.is_program or "NekoPluginBase" in self.text

    @property
    def is_program(self) -> bool:
        """Whether it is a plugin that needs no `toolbus run`."""
        return "plugin.run()" in self.text or "ThreadingHTTPServer(" in self.text

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _blocks(page: str) -> list[Block]:
    text = TEXTS[page]
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        follows = _FENCE.match(text, match.end() + 2)
        shown = (follows[2], follows[1]) if follows and follows[1] in ("text", "json") else (None, "")
        found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2], *shown))
    return found


def _prose(text: str) -> str:
    return _FENCE.sub("", text)


def _table(text: str, head: str) -> list[list[str]]:
    """Returns the cells of the rows below the table head that starts with a text."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


# -- snippets run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Where:
    """Where a bus listens, and a model."""

    grpc: str = ""
    http: str = ""
    model: str = ""

    def environment(self) -> dict[str, str]:
        own = {"TOOLBUS_ADDRESS": self.grpc, "MAIN_SERVER": f"http://{self.http}"}
        own |= {"OPENAI_BASE_URL": self.model, "OPENAI_API_KEY": "none", "NO_PROXY": "*"}
        return {**os.environ, **own, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}


@contextmanager
def _process(arguments: list[str], folder: Path, where: Where) -> Iterator[subprocess.Popen[str]]:
    """Runs Python until the block is left, then asks it to end, which it has to do with 0."""
    said = folder / "stderr"
    with said.open("a+", encoding="utf-8") as stderr, subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=where.environment(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert code == 0, f"{arguments} ended with {code}:\n{said.read_text('utf-8')}"


@contextmanager
def _bus(folder: Path) -> Iterator[Where]:
    command = ["-m", "toolbus.cli", "serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--ephemeral"]
    (folder / "settings.toml").write_text("grace_seconds = 0\n")  # so that an unknown name is unknown at once
    command += ["--config", str(folder / "settings.toml")]
    with _process(command, folder, Where()) as process:
        assert process.stdout is not None
        ready = re.fullmatch(r"toolbus ready grpc=(\S+) http=(\S+)\n", process.stdout.readline())
        assert ready is not None, (folder / "stderr").read_text("utf-8")
        yield Where(ready[1], ready[2])


@contextmanager
def _watched(address: str) -> Iterator[Iterator[wire.CatalogChange]]:
    """Yields the changes of a catalog, the full list first."""
    attach = wire.Attach(protocol_version=1, source="docs", subscribe=[wire.SUBSCRIPTION_CATALOG])
    requests: queue.SimpleQueue[wire.InvokeRequest | None] = queue.SimpleQueue()
    requests.put(wire.InvokeRequest(attach=attach))
    with grpc.insecure_channel(address) as channel:
        stream = rpc.ToolBusServiceStub(channel).Invoke(iter(requests.get, None), timeout=SECONDS)
        yield (event.catalog for frame in stream for event in frame.events)
        requests.put(None)


@contextmanager
def _plugin(block: Block, folder: Path, where: Where) -> Iterator[None]:
    """Runs a plugin file, as ``python FILE`` or as ``toolbus run`` would, from its tools' arrival on."""
    (folder / block.file).write_text(block.text, "utf-8")
    command = [block.file] if block.is_program else ["-m", "toolbus.processes.plugin_process", block.file]
    with ExitStack() as running:
        with _watched(where.grpc) as changes:
            assert next(changes).full
            running.enter_context(_process(command, folder, where))
            try:
                next(change for change in changes if change.added)
            except grpc.RpcError:
                pytest.fail(f"{block}: its tools never came\n{(folder / 'stderr').read_text('utf-8')}")
        yield


@contextmanager
def _tool_folder(blocks: list[Block], folder: Path, where: Where) -> Iterator[None]:
    """Runs the drop-in files of a page as ``toolbus run tools/`` does, from their tools' arrival on."""
    tools = folder / "tools"
    tools.mkdir()
    for block in blocks:
        (tools / block.file).write_text(block.text, "utf-8")
    with ExitStack() as running:
        with _watched(where.grpc) as changes:
            assert next(changes).full
            running.enter_context(_process(["-m", "toolbus.cli", "run", "tools/"], folder, where))
            try:
                next(change for change in changes if change.added)
            except grpc.RpcError:
                pytest.fail(f"its tools never came\n{(folder / 'stderr').read_text('utf-8')}")
        yield


def _run(block: Block, folder: Path, where: Where) -> str:
    """Runs a snippet to its end and returns what it printed."""
    file = folder / (block.file or "test_snippet.py")
    file.write_text(block.text, "utf-8")
    command = [sys.executable, "-W", "error", file.name]
    if "def test_" in block.text:
        own = str(ROOT / "pyproject.toml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", own, file.name]
    ran = subprocess.run(command, cwd=folder, env=where.environment(), capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, f"{block} ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if "```python\n" in TEXTS[page]])
def test_every_snippet_of_a_page_runs_and_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    with ExitStack() as running:
        where = replace(running.enter_context(_bus(tmp_path)), model=running.enter_context(answering("openai")))
        if page in BORROWED:
            lender, file = BORROWED[page]
            (lent,) = (block for block in _blocks(lender) if block.file == file)
            running.enter_context(_plugin(lent, tmp_path, where))
        dropins = [block for block in _blocks(page) if block.is_dropin]
        if dropins:
            running.enter_context(_tool_folder(dropins, tmp_path, where))
        for block in _blocks(page):
            if block.is_dropin:
                continue
            if block.kind == "python" and block.is_plugin:
                running.enter_context(_plugin(block, tmp_path, where))
            elif block.kind == "python":
                printed = _run(block, tmp_path, where)
                assert block.shown is None or printed == block.shown, f"{block} prints something else"
            elif block.kind == "sh" and block.text.startswith("curl "):
                printed = curl.read(block.text, HTTP).run(f"http://{where.http}")
                if block.shown is None:
                    assert '"is_error":true' not in printed, f"{block} is answered with {printed}"
                else:
                    as_shown = curl.is_as_shown(block.shown, printed, block.shown_kind)
                    assert as_shown, f"{block} is answered with {printed}"


@pytest.mark.parametrize("page", PAGES)
def test_every_python_snippet_compiles(page: str) -> None:
    blocks = [block for block in _blocks(page) if block.kind.startswith("python")]
    assert {block.kind for block in blocks} <= {"python", "python no-run"}
    for block in blocks:
        compile(block.text, str(block), "exec")


# -- commands parse -----------------------------------------------------------------------------------------------


def _commands() -> list[tuple[str, str]]:
    """Returns where and what: every command of every shell block, and every ``toolbus …`` in prose."""
    found = []
    for page in PAGES:
        for block in _blocks(page):
            if block.kind == "sh":
                lines = block.text.replace("\\\n", " ")
                found += [(str(block), line) for line in re.split(r"\n(?=\w)", lines.strip())]
        for span in _CODE.findall(_prose(TEXTS[page])):
            if span.startswith("toolbus ") and span.split()[1].islower() and not span.startswith("toolbus ready"):
                found.append((page, span))
    return found


@pytest.mark.parametrize(("where", "command"), _commands())
def test_every_command_parses(where: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text("utf-8")
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{where}: there is no target {words[1]!r}"
    elif words[0] == "toolbus":
        group = typer.main.get_command(app)
        context = group.make_context("toolbus", words[1:], resilient_parsing=True)
        subcommand = group.get_command(context, words[1])  # type: ignore[attr-defined]  # a group
        assert subcommand is not None, f"{where}: there is no command {words[1]!r}"
        if words[2:] or command not in _CODE.findall(_prose(TEXTS.get(where, ""))):  # prose may just name one
            subcommand.make_context(words[1], words[2:])
    elif words[0] == "curl":
        curl.read(command, HTTP)
    else:
        assert words[:2] == ["buf", "curl"], f"{where}: this test does not know {words[0]!r}"
        service, _, method = words[-1].removeprefix("http://127.0.0.1:48930/").partition("/")
        own = wire.DESCRIPTOR.services_by_name["ToolBusService"]
        assert method in own.methods_by_name if service == own.full_name else service.startswith("grpc.health.")


# -- links lead somewhere -----------------------------------------------------------------------------------------


def _anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", _prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_resolves(page: str) -> None:
    for link in _LINK.findall(_prose(TEXTS[page])):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), f"{page}: {link} leads nowhere"
        assert not anchor or anchor in _anchors(target.read_text("utf-8")), f"{page}: {link} has no such heading"


# -- tables are those of the code ---------------------------------------------------------------------------------


def _amount(text: str) -> int:
    first, _, less = text.partition(" − ")
    number, _, unit = first.partition(" ")
    return int(number) * {"": 1, "KiB": KIB, "MiB": MIB}[unit] - (_amount(less) if less else 0)


def test_the_limits_in_the_protocol_are_the_defaults() -> None:
    told = {row[0].strip("`"): _amount(row[1]) for row in _table(PROTOCOL, "| limit |")}
    assert told == {limit.name: getattr(Limits(), limit.name) for limit in fields(Limits)}


def test_the_limits_of_the_rest_guide_are_the_defaults() -> None:
    for row in _table(TEXTS["docs/rest.md"], "| limit |"):
        names, amounts = row[0].replace("`", "").split(", "), row[1].split(", ")
        assert [getattr(Limits(), name) for name in names] == [_amount(amount) for amount in amounts], row


async def test_the_rest_guide_and_the_bus_know_the_same_paths() -> None:
    async with running_bus(http="127.0.0.1:0", grace_seconds=0.0) as bus, httpx.AsyncClient(trust_env=False) as client:
        served = (await client.get(f"http://{bus.http_address}/openapi.json")).json()["paths"]
    told = {path.partition("?")[0] for path in re.findall(r"/api/[\w/{}?-]+|/healthz|/readyz", TEXTS["docs/rest.md"])}
    told = {re.sub(r"\{\w+(:\w+)?\}", "{}", path).rstrip("/") for path in told}
    assert told - {"/api/bus"} == {re.sub(r"\{\w+(:\w+)?\}", "{}", path) for path in served}


def test_the_error_table_has_every_code_once() -> None:
    rows = _table(PROTOCOL, "| code | stages |")
    assert [row[0] for row in rows] == [code.name for code in Code if code]
    stages = {word for row in rows for word in row[1].split(", ")} - {"any", "–"}
    assert stages <= {stage.name for stage in Stage}


def test_a_host_is_told_what_to_do_for_every_code() -> None:
    told = " ".join(row[0] for row in _table(TEXTS["docs/hosts.md"], "| code | call again? |"))
    assert set(re.findall(r"[A-Z_]{4,}", told)) == {code.name for code in Code if code}


def test_a_host_is_told_every_setting_of_the_tool_loop_with_its_default() -> None:
    told = {row[0].strip("`"): row[1] for row in _table(TEXTS["docs/hosts.md"], "| setting | default |")}
    shown = {setting.name: json.dumps(setting.default, default=repr) for setting in fields(LoopSettings)}
    shown |= {"may_route": "no drop-ins"}
    words = {"true": "`True`", "false": "`False`", "null": "`None`", "no drop-ins": "no drop-ins"}
    assert told == {name: words.get(default, f"`{default}`") for name, default in shown.items()}


def test_a_host_is_told_every_event_of_the_tool_loop_with_its_fields() -> None:
    told = {row[0].strip("`"): row[1] for row in _table(TEXTS["docs/hosts.md"], "| event | with |")}
    kinds = typing.get_args(LoopEvent)
    assert told == {kind.__name__: ", ".join(f"`{field.name}`" for field in fields(kind)) for kind in kinds}


def test_a_host_is_told_every_dialect_and_every_endpoint() -> None:
    page = TEXTS["docs/hosts.md"]
    assert not [name for name in DIALECTS if f"`{name}`" not in page]
    told = {row[0].strip("`") for row in _table(page, "| endpoint | client |")}
    assert told == {name for name in toolbus.loop.__all__ if name.lower().startswith("endpoint") or "_endpoint" in name}


def test_the_manifest_that_is_shown_can_be_read_and_its_table_has_every_word(tmp_path: Path) -> None:
    (shown,) = (block.text for block in _blocks(DROPIN) if block.kind == "json")
    manifest = read_manifest(shown, tmp_path)
    assert manifest.allow
    assert all(manifest.allows(file) for file in manifest.files)
    told = [row[0].strip("`") for row in _table(TEXTS[DROPIN], "| key | what it grants |")]
    assert told == ["allow", *(grant.name for grant in fields(FileGrants))]


def test_the_keys_of_env_are_those_that_a_tool_gets() -> None:
    told = {key for row in _table(TEXTS[DROPIN], "| key | what |") for key in re.findall(r"\w+", row[0])}
    assert told == set(env_of(ToolScope()))


def test_the_settings_of_the_tripwire_that_are_shown_are_settings_of_the_bus(tmp_path: Path) -> None:
    (shown,) = (block.text for block in _blocks(DROPIN) if block.kind == "toml")
    (tmp_path / "toolbus.toml").write_text(shown, "utf-8")
    config = settle({}, {}, tmp_path / "toolbus.toml").config
    assert config.guarded[: len(Config().guarded)] == Config().guarded
    assert (config.tripwire, set(config.tripwire_allow)) == (Config().tripwire, {"count_words"})


def test_every_status_of_the_protocol_is_one_of_grpc() -> None:
    statuses = [row[0] for row in _table(PROTOCOL, "| status |")]
    assert set(statuses) <= {status.name for status in grpc.StatusCode}
    assert len(statuses) == len(set(statuses))


def _wire_names() -> set[str]:
    names = set()
    for file in (pb.DESCRIPTOR, wire.DESCRIPTOR):
        for message in file.message_types_by_name.values():
            names |= {
                message.name,
                *message.fields_by_name,
                *(f"{message.name}.{each}" for each in message.fields_by_name),
            }
        for enum in file.enum_types_by_name.values():
            names |= {enum.name, *enum.values_by_name}
        for service in file.services_by_name.values():
            names |= {service.name, service.full_name, *service.methods_by_name}
    return names


def test_every_name_in_the_protocol_is_on_the_wire() -> None:
    known = _wire_names() | {limit.name for limit in fields(Limits)} | {"Check", "Watch", "List"}
    # Keys of hosts that extension systems set; what belongs to grpcio.
    known |= {"userId", "__userId", "__user_id"}
    spans = {
        span for span in _CODE.findall(_prose(PROTOCOL)) if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[a-z_]+)?", span)
    }
    unknown = {span for span in spans - known if not span.startswith("grpc.")}
    assert not unknown, f"not in the descriptors: {sorted(unknown)}"


def test_the_design_names_every_part_of_the_package() -> None:
    design = TEXTS["docs/design.md"]
    parts = {path.name for path in (ROOT / "toolbus").iterdir() if path.suffix == ".py" and path.name != "__init__.py"}
    parts |= {f"{path.parent.name}/" for path in (ROOT / "toolbus").glob("*/__init__.py")}
    parts |= {f"bus/{path.parent.name}/" for path in (ROOT / "toolbus" / "bus").glob("*/__init__.py")}
    missing = {part for part in parts if not re.search(rf"(?<![\w/]){re.escape(part)}", design)}
    assert not missing, f"docs/design.md says nothing of {sorted(missing)}"


def test_the_exit_codes_are_those_of_the_commands() -> None:
    from toolbus.cli import terminal

    told = [int(row[0]) for row in _table(TEXTS["README.md"], "| exit code |")]
    assert told == [terminal.DONE, terminal.REFUSED, terminal.USAGE, terminal.NO_BUS, terminal.INTERRUPTED]
