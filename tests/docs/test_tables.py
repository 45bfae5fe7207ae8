"""Checks the reference tables of the docs against the code, both ways."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import threading
import typing
from dataclasses import fields
from pathlib import Path

import grpc
import httpx
import pytest

import toolbus.loop
from tests.docs.configuration_table import written
from tests.docs.pages import DROP_IN, ROOT, TEXTS, blocks, code_spans, listed
from tests.support.commands import find_command
from tests.support.core_model import Core, error_of
from tests.support.waiting import WAIT_SECONDS
from toolbus import errors
from toolbus.bus.access.identity import ALL, VERBS, Scopes
from toolbus.bus.access.quota import CALLS_PER_SECOND
from toolbus.bus.calls.dispatcher import OUTPUT_SCHEMA
from toolbus.bus.config import Config
from toolbus.bus.gateway.http_connection import IDLE_SECONDS, MAX_HEAD_BYTES
from toolbus.bus.keys.keys_file import KeyRecord, parse_keys
from toolbus.bus.serve_settings import settle
from toolbus.cli import terminal
from toolbus.cli.command_line import commands
from toolbus.common.setting import part_records, settings_of
from toolbus.dialects import DIALECTS, find_dialect
from toolbus.dropin import FileGrants, env_of, read_manifest
from toolbus.errors import Code, SetupError, Stage
from toolbus.functions.tool_spec import OPTION_NAMES
from toolbus.loop import LoopEvent, LoopSettings
from toolbus.parts.console.app import PATHS as CONSOLE_PATHS
from toolbus.parts.identity.settings import Issuer
from toolbus.processes.child_environment import PLUGIN
from toolbus.protocol.limits import Timings
from toolbus.protocol.questions import ACCEPTS, NEEDS_INPUT
from toolbus.protocol.tool import KIB, MIB, CallError, Limits, Tool
from toolbus.sdk import Credential, Plugin, ToolScope
from toolbus.testing import running_bus
from toolbus.v1 import tool_bus_service_pb2 as wire
from toolbus.v1 import tool_pb2 as pb

PROTOCOL = TEXTS["docs/protocol.md"]
CONFIGURATION = TEXTS["docs/reference/configuration.md"]
COMMANDS = TEXTS["docs/reference/command-line.md"]
ERRORS = TEXTS["docs/reference/errors.md"]
HTTP = TEXTS["docs/reference/http.md"]
PLUGINS = TEXTS["docs/start/plugins.md"]
LOOP = TEXTS["docs/start/tool-loop.md"]
LOOP_SETTINGS = TEXTS["docs/start/loop-settings.md"]


# -- limits -------------------------------------------------------------------------------------------------------


def _bytes(text: str) -> int:
    first, _, less = text.partition(" − ")
    number, _, unit = first.partition(" ")
    return int(number) * {"": 1, "KiB": KIB, "MiB": MIB}[unit] - (_bytes(less) if less else 0)


def test_the_limits_of_the_reference_are_those_of_the_code_with_their_defaults() -> None:
    documented = {row[0].strip("`"): _bytes(row[1]) for row in listed(TEXTS["docs/reference/limits.md"], "# Limits")}
    assert documented == {limit.name: getattr(Limits(), limit.name) for limit in fields(Limits)}


def test_the_limits_of_http_connections_are_those_of_the_code() -> None:
    documented = {row[0]: row[2] for row in listed(TEXTS["docs/reference/limits.md"], "These are fixed:")}
    head = f"{MAX_HEAD_BYTES // KIB} KiB: 400; {Timings().head_seconds:g} s: 408"
    assert documented["request line and headers of an HTTP request"] == head
    assert documented["an HTTP connection without a request"] == f"{IDLE_SECONDS} s"


async def test_a_full_tool_refuses_as_the_limits_page_says() -> None:
    running, finish = threading.Semaphore(0), threading.Event()

    async with running_bus() as bus:
        plugin = Plugin("weather", address=bus.grpc_addresses[0], max_in_flight=8)

        @plugin.tool
        def forecast() -> None:
            running.release()
            finish.wait()

        async with plugin:
            await plugin.ready()
            calls = [asyncio.create_task(bus.call("forecast")) for _ in range(8)]
            for _ in calls:
                await asyncio.to_thread(running.acquire)
            error = (await bus.call("forecast")).error
            finish.set()
            await asyncio.gather(*calls)
    _is_as_the_limits_page_says(error, 8)


def test_a_caller_beyond_its_share_is_refused_as_the_limits_page_says() -> None:
    assert "one greedy host leaves 7 of 256 free" in " ".join(TEXTS["docs/reference/limits.md"].split())
    core = Core()
    plugin = core.plugin("weather", Tool("forecast"))
    other, batch = core.peer("other"), core.peer("batch", max_in_flight=4096)
    core.call(other, "forecast")
    core.call(batch, "forecast", call_id="met")
    for _ in range(2):
        core.answer(plugin)
    for number in range(256):
        core.call(batch, "forecast", call_id=str(number))
    _is_as_the_limits_page_says(error_of(batch, "255"), 256 - 7)


def _is_as_the_limits_page_says(error: CallError | None, limit: int) -> None:
    assert error is not None
    assert (error.code, error.stage, error.retry_safe) == (Code.OVERLOADED, Stage.NOT_DISPATCHED, True)
    assert (error.limit, error.retry_after_seconds) == (("calls_in_flight", limit), 0.05)
    (paragraph,) = (part for part in TEXTS["docs/reference/limits.md"].split("\n\n") if "no queue" in part)
    assert all(each in paragraph for each in ("calls_in_flight", "0.05", "OVERLOADED", "NOT_DISPATCHED", "retry_safe"))


# -- configuration ------------------------------------------------------------------------------------------------

_ROWS = {row[0].strip("`"): row for row in listed(CONFIGURATION, "its option and its default:")}


def test_the_configuration_page_has_every_key_that_the_bus_reads_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "toolbus.toml"
    file.write_text("no_such_key = 1\n", "utf-8")
    with pytest.raises(SetupError) as refused:
        settle({}, {}, file)
    known = str(refused.value).rpartition("known are ")[2]
    tables = {"limits", "permissions", "tripwire_allow", "pins", "issuers", "mcp", "guards", "approvals", "results"}
    assert set(_ROWS) | tables == set(re.findall(r"\w+", known))
    assert all(f"[{name}" in CONFIGURATION for name in tables)


def test_the_table_of_settings_is_what_their_declarations_make() -> None:
    assert written(CONFIGURATION) == CONFIGURATION, "run: make settings"


def test_type_checkers_know_each_setting_of_the_parts() -> None:
    """`Config` repeats their names for type checkers, since at run time it takes what the parts declare."""
    (config,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(config, ast.ClassDef)
    (block,) = (node for node in config.body if isinstance(node, ast.If))
    names = (each.target for each in block.body if isinstance(each, ast.AnnAssign))
    known = {name.id for name in names if isinstance(name, ast.Name)}
    assert known == {name for record in part_records() for name in settings_of(record)}


def test_every_key_of_the_configuration_page_is_read_from_its_variable(tmp_path: Path) -> None:
    (tmp_path / "council.toml").write_text("", "utf-8")
    (tmp_path / "mcp.json").write_text("{}", "utf-8")
    samples = {
        "grpc": "127.0.0.1:0",
        "http": "off",
        "https": "127.0.0.1:0",
        "upstream": "http://127.0.0.1:1",
        "http_origins": "http://localhost:5173",
        "tripwire": "synchronet",
        "adopt_roles": "first-use",
        "name_owner": "first",
        "record_errors": "never",
        "traces": "http://127.0.0.1:1",
        "trace_ratio": "0.5",
    }
    samples |= {"tools_dir": str(tmp_path), "council": str(tmp_path / "council.toml"), "log_level": "debug"}
    samples |= {
        "roles": "a,b",
        "silenced": "a",
        "guarded": "a",
        "offered": "tasks",
        "neighbours": "any",
        "data_dir": str(tmp_path),
        "mcp_secrets": str(tmp_path / "secrets.toml"),
        "mcp_servers": str(tmp_path / "mcp.json"),
        "overlays": str(tmp_path / "council.toml"),
        "storage": "postgresql://db.internal/toolbus",
    }
    before = settle({}, {})
    for name in _ROWS:
        switched_on = ("grpc_reflection", "console", "audit", "repair_arguments", "metrics", "lane")
        flip = "no" if name in switched_on else "yes"
        number = name.endswith("_seconds") or name.startswith("missed_") or name in ("trace_most", "metrics_tools")
        value = samples.get(name, "7" if number else flip)
        assert settle({}, {f"TOOLBUS_{name.upper()}": value}) != before, name


def test_every_option_of_the_configuration_page_is_one_of_serve() -> None:
    options = {
        option for parameter in find_command("serve").params for option in parameter.opts if option.startswith("--")
    }
    documented = {option for row in _ROWS.values() for option in re.findall(r"--[\w-]+", row[1])}
    assert documented == options - {"--help", "--config", "--json"}


def test_the_configuration_page_has_every_variable_of_the_environment() -> None:
    between_processes = {
        "TOOLBUS_SUPERVISOR",
        "TOOLBUS_MOUNT",
        "TOOLBUS_CONFORMANCE_RUN",
    }  # set and read by toolbus itself
    read = {
        node.value
        for path in (ROOT / "toolbus").rglob("*.py")
        if "TOOLBUS_" in (text := path.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and re.fullmatch(r"TOOLBUS_[A-Z_]*[A-Z]", str(node.value))
    }
    others = {row[0].strip("`") for row in listed(CONFIGURATION, "## Other variables")}
    assert others <= read
    assert read - between_processes <= others | {f"TOOLBUS_{name.upper()}" for name in _ROWS}


def test_the_configuration_page_has_every_variable_that_plugins_get() -> None:
    documented: set[str] = set()
    for row in listed(CONFIGURATION, "## Variables of plugins"):
        names = set(re.findall(r"`([^`]+)`", row[0]))
        documented |= names | ({name.lower() for name in names} if "in lower case" in row[0] else set())
    whole = {name for name in PLUGIN.names if not name.startswith(PLUGIN.prefixes)}
    assert documented == whole | {f"{prefix}*" for prefix in PLUGIN.prefixes}


# -- plugins ------------------------------------------------------------------------------------------------------


def test_the_guide_has_every_option_of_a_tool() -> None:
    documented = {name for row in listed(PLUGINS, "## Options of a tool") for name in re.findall(r"\w+", row[0])}
    assert documented == set(OPTION_NAMES)


def test_the_guide_has_every_argument_of_a_plugin() -> None:
    documented = {row[0].strip("`") for row in listed(PLUGINS, "Its other arguments:")}
    arguments = [name for name in inspect.signature(Plugin).parameters if not name.startswith("_")]
    assert documented == set(arguments) - {"source", "tools"}  # the first one, and a set that was collected before


def test_the_configuration_page_has_every_scope_and_every_field_of_a_key() -> None:
    scopes = listed(CONFIGURATION, "The scopes of an identity")
    assert [row[0].strip("`") for row in scopes] == [each.name for each in fields(Scopes)]
    (verbs,) = (row[2] for row in scopes if row[0] == "`administer`")
    assert re.findall(r"`([^`]+)`", verbs) == [*VERBS, ALL]
    rows = listed(CONFIGURATION, "A key has:")
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    assert documented == {each.name for each in fields(KeyRecord)} - {"id"}
    issuers = listed(CONFIGURATION, "`[[issuers]]`")
    assert [row[0].strip("`") for row in issuers] == [each.name for each in fields(Issuer)]


@pytest.mark.parametrize("page", ["docs/reference/configuration.md", "docs/start/beyond-one-machine.md"])
def test_the_keys_and_issuers_that_a_page_shows_are_read(page: str, tmp_path: Path) -> None:
    shown = [block.text for block in blocks(page) if block.kind == "toml"]
    identities = [text for text in shown if "[identities." in text]
    assert all(parse_keys(text.encode(), page).identities for text in identities)
    issuers = [text for text in shown if "[[issuers]]" in text]
    for text in issuers:
        file = tmp_path / "toolbus.toml"
        listener = "" if "grpc =" in text else 'grpc = ["tls:127.0.0.1:0"]\n'
        file.write_text(listener + text, "utf-8")
        assert settle({}, {}, file).config.issuers
    assert identities or issuers


# -- commands -----------------------------------------------------------------------------------------------------


def test_the_command_line_page_has_every_command_and_no_other() -> None:
    documented = {
        span.removeprefix("toolbus ")
        for row in listed(COMMANDS, "# Command line")
        for span in re.findall(r"`([^`]+)`", row[0])
    }
    assert documented == {row.name for row in commands() if row.home}


def test_the_command_line_page_has_every_shorter_name() -> None:
    (paragraph,) = (part for part in COMMANDS.split("\n\n") if part.startswith("Shorter names work too"))
    assert {row.old for row in commands() if row.old} <= set(code_spans(paragraph))


def test_the_exit_codes_are_those_of_the_commands() -> None:
    documented = [int(row[0]) for row in listed(COMMANDS, "## Exit codes")]
    assert documented == [terminal.DONE, terminal.REFUSED, terminal.USAGE, terminal.NO_BUS, terminal.INTERRUPTED]


# -- errors -------------------------------------------------------------------------------------------------------


def test_the_error_table_of_the_protocol_has_every_code_once() -> None:
    rows = listed(PROTOCOL, "## Errors of calls")
    assert [row[0] for row in rows] == [code.name for code in Code if code]
    stages = {word for row in rows for word in row[1].split(", ")} - {"any", "–"}
    assert stages <= {stage.name for stage in Stage}


def test_the_errors_page_says_for_every_code_whether_to_call_again() -> None:
    documented = " ".join(row[0] for row in listed(ERRORS, "Whether to call again:"))
    assert set(re.findall(r"[A-Z_]{4,}", documented)) == {code.name for code in Code if code}


def test_the_errors_page_has_every_stage() -> None:
    assert [row[0] for row in listed(ERRORS, "The stage says")] == [stage.name for stage in Stage if stage]


def test_the_errors_page_has_every_exception() -> None:
    exceptions = {name for name, value in vars(errors).items() if isinstance(value, type) and _is_ours(value)}
    assert {row[0].strip("`") for row in listed(ERRORS, "## Exceptions")} == exceptions


def _is_ours(kind: type) -> bool:
    return issubclass(kind, errors.ToolBusError)


def test_every_status_of_the_protocol_is_one_of_grpc() -> None:
    statuses = [row[0] for row in listed(PROTOCOL, "## How a stream ends")]
    assert statuses.pop() == "anything else"  # libraries and proxies make others
    assert set(statuses) <= {status.name for status in grpc.StatusCode}
    assert len(statuses) == len(set(statuses))


# -- HTTP ---------------------------------------------------------------------------------------------------------


async def test_the_pages_about_http_and_the_bus_know_the_same_paths() -> None:
    async with (
        running_bus(http="127.0.0.1:0", grace_seconds=0.0) as bus,
        httpx.AsyncClient(trust_env=False, timeout=WAIT_SECONDS) as client,
    ):
        served = (await client.get(f"http://{bus.http_address}/openapi.json")).json()["paths"]
    pages = HTTP + TEXTS["docs/start/http-plugins.md"] + TEXTS["docs/moving/neko.md"]
    paths = {path.partition("?")[0] for path in re.findall(r"/api/[\w/{}?-]+|/healthz|/readyz", pages)}
    paths = {re.sub(r"\{\w+(:\w+)?\}", "{}", path).rstrip("/") for path in paths}
    served |= {path: {} for _, path in CONSOLE_PATHS if path.startswith("/api/")}
    assert paths - {"/api/bus", "/api/console"} == {re.sub(r"\{\w+(:\w+)?\}", "{}", path) for path in served}


# -- hosts with a model -------------------------------------------------------------------------------------------


def test_the_page_of_settings_has_every_setting_of_the_loop_with_its_default() -> None:
    documented = {row[0].strip("`"): row[1] for row in listed(LOOP_SETTINGS, "# ")}
    shown = {setting.name: json.dumps(setting.default, default=repr) for setting in fields(LoopSettings)}
    shown |= {"may_route": "no drop-ins", "needs_approval": "destructive tools"}
    words = {"true": "`True`", "false": "`False`", "null": "`None`"}
    words |= {text: text for text in ("no drop-ins", "destructive tools")}
    assert documented == {name: words.get(default, f"`{default}`") for name, default in shown.items()}


def test_the_page_of_settings_has_every_event_of_the_loop_with_its_fields() -> None:
    documented = {row[0].strip("`"): row[1] for row in listed(LOOP_SETTINGS, "## Events")}
    kinds = typing.get_args(LoopEvent)
    assert documented == {kind.__name__: ", ".join(f"`{field.name}`" for field in fields(kind)) for kind in kinds}


def test_the_page_about_many_tools_has_every_number_of_tools_that_a_provider_takes() -> None:
    rows = listed(TEXTS["docs/start/many-tools.md"], "Providers refuse a request with more tools:")
    documented = {name.strip("` "): row[2].partition(";")[0] for row in rows for name in row[0].split(",")}
    numbers = {name: find_dialect(name).max_tools for name in DIALECTS}
    known = {name: str(number) for name, number in numbers.items() if number is not None}
    assert documented == known | {"others": "not published"}


def test_the_guides_name_every_dialect_and_every_endpoint() -> None:
    assert not [name for name in DIALECTS if f"`{name}`" not in TEXTS["docs/start/dialects.md"]]
    documented = {row[0].strip("`") for row in listed(LOOP, "endpoint of the model:")}
    endpoints = {name for name in toolbus.loop.__all__ if name.lower().startswith("endpoint") or "_endpoint" in name}
    assert documented == endpoints


# -- drop-in tools ------------------------------------------------------------------------------------------------


def test_the_manifest_that_is_shown_can_be_read_and_its_table_has_every_key(tmp_path: Path) -> None:
    (shown,) = (block.text for block in blocks(DROP_IN) if block.kind == "json")
    manifest = read_manifest(shown, tmp_path)
    assert manifest.allow
    assert all(manifest.allows(file) for file in manifest.files)
    documented = [row[0].strip("`") for row in listed(TEXTS[DROP_IN], "## `_manifest.json`")]
    assert documented == ["allow", *(grant.name for grant in fields(FileGrants))]


def test_the_keys_of_env_are_those_that_a_tool_gets() -> None:
    documented = {key for row in listed(TEXTS[DROP_IN], "## `env`") for key in re.findall(r"\w+", row[0])}
    assert documented == set(env_of(ToolScope()))


def test_the_settings_of_the_tripwire_that_are_shown_are_settings_of_the_bus(tmp_path: Path) -> None:
    (shown,) = (block.text for block in blocks(DROP_IN) if block.kind == "toml")
    (tmp_path / "toolbus.toml").write_text(shown, "utf-8")
    config = settle({}, {}, tmp_path / "toolbus.toml").config
    assert config.guarded[: len(Config().guarded)] == Config().guarded
    assert (config.tripwire, set(config.tripwire_allow)) == (Config().tripwire, {"count_words"})


# -- protocol and design ------------------------------------------------------------------------------------------


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


def test_the_comments_of_the_wire_have_the_default_of_every_limit_of_a_session() -> None:
    text = (ROOT / "proto" / "toolbus" / "v1" / "tool_bus_service.proto").read_text("utf-8")
    message = text.partition("message Limits {")[2].partition("\n}")[0]
    documented = dict(re.findall(r"By default (.+?)\.\n  \w+ (\w+) = ", message))
    documented = {name: default for default, name in documented.items()}
    assert list(documented) == list(wire.Limits.DESCRIPTOR.fields_by_name)
    grace, in_flight = documented.pop("grace_seconds"), documented.pop("calls_in_flight")
    assert {name: _bytes(shown.replace(",", "")) for name, shown in documented.items()} == {
        name: getattr(Limits(), name) for name in documented
    }
    assert grace == f"{Config().grace_seconds:g}"
    assert in_flight.endswith(f"or {Limits().calls_in_flight}")
    assert f"0 or unset means {Timings().idle_heartbeat_seconds:g}." in " ".join(text.replace("//", "").split())


def test_every_name_in_the_protocol_is_on_the_wire() -> None:
    known = _wire_names() | {limit.name for limit in fields(Limits)} | {"Check", "Watch", "List"}
    known |= {CALLS_PER_SECOND, "TOOLBUS_ADDRESS", "TOOLBUS_TOKEN"}
    # Keys of hosts that extension systems set, of a credential file and of scopes; what belongs to grpcio.
    known |= {"userId", "__userId", "__user_id"} | {each.name for each in (*fields(Credential), *fields(Scopes))}
    # What a caller accepts, reasons of errors, and of questions what the Model Context Protocol defines.
    known |= {*ACCEPTS, NEEDS_INPUT, OUTPUT_SCHEMA, "method", "params", "params.mode", "requestedSchema"}
    spans = {span for span in code_spans(PROTOCOL) if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*(\.[a-z_]+)?", span)}
    unknown = {span for span in spans - known if not span.startswith("grpc.")}
    assert not unknown, f"not in the descriptors: {sorted(unknown)}"


def test_the_design_names_every_part_of_the_package() -> None:
    design = TEXTS["docs/design.md"]
    parts = {path.name for path in (ROOT / "toolbus").iterdir() if path.suffix == ".py" and path.name != "__init__.py"}
    parts |= {f"{path.parent.name}/" for path in (ROOT / "toolbus").glob("*/__init__.py")}
    parts |= {f"bus/{path.parent.name}/" for path in (ROOT / "toolbus" / "bus").glob("*/__init__.py")}
    missing = {part for part in parts if not re.search(rf"(?<![\w/]){re.escape(part)}", design)}
    assert not missing, f"docs/design.md says nothing of {sorted(missing)}"


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 130
