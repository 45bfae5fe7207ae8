"""Runs every snippet of the README and the docs, and parses every command that they show."""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.bus.gateway.on_thread import bus_on_thread
from tests.docs.pages import PAGES, ROOT, TEXTS, blocks, code_spans
from tests.docs.running import Addresses, borrowed_plugin, output_of, plugin, tool_folder
from tests.parts.models.loop.model_thread import answering
from tests.support import curl
from tests.support.commands import choose, find_command
from toolbus.v1 import tool_bus_service_pb2 as wire

HTTP = "http://127.0.0.1:48911"  # the address that the pages show
HTTPS = "https://bus.team.example:48912"  # of another machine

# Page → a plugin file of another page that has to run while its own snippets do.
_WEATHER = ("docs/start/plugins.md", "weather.py")
BORROWED = {
    "docs/start/hosts.md": _WEATHER,
    "docs/start/tool-loop.md": _WEATHER,
    "docs/start/dialects.md": _WEATHER,
    "docs/start/realtime.md": _WEATHER,
    "docs/start/councils.md": ("docs/start/extensions.md", "lore.py"),
    "docs/reference/http.md": ("docs/start/http-plugins.md", "greeter.py"),
}


@pytest.mark.parametrize("page", [page for page in PAGES if "```python\n" in TEXTS[page]])
def test_every_snippet_of_a_page_runs_and_prints_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as running:
        bus = running.enter_context(bus_on_thread())
        model = running.enter_context(answering("openai"))
        addresses = Addresses(bus.grpc_addresses[0], str(bus.http_address), model)
        for name, value in addresses.variables().items():
            monkeypatch.setenv(name, value)
        if page in BORROWED:
            lender, file = BORROWED[page]
            (lent,) = (block for block in blocks(lender) if block.file == file)
            is_of_sdk = "plugin = Plugin(" in lent.text  # an extension answers on a loop that has to run
            running.enter_context(borrowed_plugin(lent, tmp_path) if is_of_sdk else plugin(lent, tmp_path, addresses))
        drop_ins = [block for block in blocks(page) if block.is_drop_in]
        if drop_ins:
            running.enter_context(tool_folder(drop_ins, tmp_path, addresses))
        for block in blocks(page):
            if block.is_drop_in:
                continue
            if block.kind == "python" and block.is_plugin:
                running.enter_context(plugin(block, tmp_path, addresses))
            elif block.kind == "python":
                printed = output_of(block, tmp_path)
                assert block.shown is None or printed == block.shown, f"{block} prints something else"
            elif block.kind == "sh" and block.text.startswith("curl "):
                printed = curl.read(block.text, HTTP).run(f"http://{addresses.http}")
                if block.shown is None:
                    assert '"is_error":true' not in printed, f"{block} is answered with {printed}"
                else:
                    as_shown = curl.is_as_shown(block.shown, printed, block.shown_kind)
                    assert as_shown, f"{block} is answered with {printed}"


@pytest.mark.parametrize("page", PAGES)
def test_every_python_snippet_compiles(page: str) -> None:
    snippets = [block for block in blocks(page) if block.kind.startswith("python")]
    assert {block.kind for block in snippets} <= {"python", "python no-run"}
    for block in snippets:
        compile(block.text, str(block), "exec")


def _commands() -> list[tuple[str, str]]:
    """Returns where and what: every command of every shell block, and every ``toolbus …`` in prose."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.kind == "sh":
                lines = block.text.replace("\\\n", " ")
                found += [(str(block), line) for line in re.split(r"\n(?=[\w.])", lines.strip())]
        for span in code_spans(TEXTS[page]):
            if span.startswith("toolbus ") and span.split()[1].islower() and not span.startswith("toolbus ready"):
                found.append((page, span))
    return found


def _named_commands() -> list[tuple[str, str]]:
    """Returns where and what: every ``toolbus …`` with an option that a text of the program or its page names."""
    found = []
    for suffix, pattern in ((".py", r"`toolbus ([a-z][^`]*)`"), (".mjs", r"<code>toolbus ([a-z][^<]*)<")):
        for path in sorted((ROOT / "toolbus").rglob(f"*{suffix}")):
            spans = re.findall(pattern, path.read_text("utf-8"))
            found += [(path.relative_to(ROOT).as_posix(), span.replace('"', "")) for span in spans if " --" in span]
    return found


def test_every_option_that_a_text_of_the_program_names_is_one_of_its_command() -> None:
    named = _named_commands()
    assert named, "this test finds no text any more"
    for where, command in named:
        subcommand, _ = choose(command.split())
        options = {option for parameter in subcommand.params for option in parameter.opts} | {"--help"}
        unknown = set(re.findall(r"--[a-z][a-z-]*", command.partition(" -- ")[0])) - options
        assert not unknown, f"{where}: `toolbus {command}`: there is no option {', '.join(sorted(unknown))}"


@pytest.mark.parametrize(("where", "command"), _commands())
def test_every_command_parses(where: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text("utf-8")
        assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), f"{where}: the Makefile has no target {words[1]!r}"
    elif words[0] == "toolbus":
        assert find_command(words[1]) is not None, f"{where}: toolbus has no command {words[1]!r}"
        subcommand, rest = choose(words[1:])
        if rest or command not in code_spans(TEXTS.get(where, "")):  # prose may just name a command
            subcommand.make_context(words[1], rest)
    elif words[0] == "curl":
        curl.read(command, HTTPS if "https://" in command else HTTP)
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[(.*)\]", command)
        known = set(re.findall(r"^(\w+) = \[$", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE))
        assert {extra for names in extras for extra in names.split(",")} <= known
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / words[2].replace(".", "/")).exists(), f"{where}: the repository has no package {words[2]!r}"
    else:
        assert words[:2] == ["buf", "curl"], f"{where}: this test does not know {words[0]!r}"
        service, _, method = words[-1].removeprefix("http://127.0.0.1:48930/").partition("/")
        own = wire.DESCRIPTOR.services_by_name["ToolBusService"]
        assert method in own.methods_by_name if service == own.full_name else service.startswith("grpc.health.")
