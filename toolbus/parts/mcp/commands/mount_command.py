"""Implements ``toolbus mounts add`` and ``remove``: which MCP servers a bus offers the tools of.

Both change the file of mounts in the data directory, which a running bus follows; without one, `mount` starts the
server once itself, to show its tools.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import functools
import itertools
import math
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.bus.storage.store import LOCK, Store
from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, JsonOption, with_host
from toolbus.cli.data_directory import DataDirOption
from toolbus.cli.help_text import epilog
from toolbus.common.reader import Reader
from toolbus.common.text import list_names, shorten
from toolbus.errors import SetupError
from toolbus.parts.mcp.client.entries import ENTRY_KEYS, PER_USER, is_restriction, mount_name, read_entry, switched_off
from toolbus.parts.mcp.client.files import MAX_MOUNTS, TABLES, OwnMounts, load_document
from toolbus.parts.mcp.commands.mcp_clients import McpClientName, client_files
from toolbus.parts.mcp.commands.mounts_command import print_mount

if TYPE_CHECKING:
    from toolbus.sdk import Host

WAIT_SECONDS = 330.0  # an installation may take 300 s
DOWN_SECONDS = 3.0  # to wait for a server over HTTP that cannot be reached: the bus goes on trying
LOOK_SECONDS = 0.2
_SETTLED = ("live", "degraded", "failed", "needs login")
_GOOD = ("live", "degraded")


def show_mounted(
    name: str, data_dir: Path, bus: BusTarget, *, remote: bool, as_json: bool, former: int = 0, same: bool = False
) -> None:
    """Prints a mount that was just written, with its tools; ends the command with 1 if its server does not start.

    Args:
        former: the generation of the mount that it replaces, whose state is not of interest; 0 without one.
        same: whether the bus has that entry already, so that it starts nothing by itself.
    """
    try:
        if _is_served(data_dir):
            if same and former:
                with_host(bus, lambda host: host.call("toolbus:mount_restart", {"name": name}))
            answer = with_host(bus, lambda host: settled(lambda: _ask(host, name, former), remote=remote))
        else:
            terminal.print_note("no bus runs with this data directory: the server is started once, to show its tools")
            answer = asyncio.run(_start_once(name, data_dir))
    except SetupError as error:
        terminal.fail(str(error))
    except KeyboardInterrupt:
        terminal.fail(f"mount {name} is written; `toolbus mounts remove {name}` removes it", terminal.INTERRUPTED)
    if as_json:
        terminal.print_json(answer)
    if name in answer["refused"]:
        terminal.fail(answer["refused"][name])
    [mount] = answer["mounts"]
    if not as_json:
        print_mount(mount)
    if mount["state"] not in _GOOD:
        for line in answer.get("log", ())[-10:]:
            terminal.print_note(line)
        how = f"`toolbus mounts logs {name}` shows why, `toolbus mounts remove {name}` removes it"
        if remote and mount["state"] != "needs login":
            option = "--url" if mount["target"].startswith("http") else "--bus"
            how = f"start it or correct {option} with --replace; the bus goes on trying"
            how = f"{how}; `toolbus mounts remove {name}` removes it"
        terminal.fail(f"mount {name} is written, but its server is not ready ({mount['state']}): {how}")


def _is_served(data_dir: Path) -> bool:
    """Tells whether a bus holds the data directory."""
    try:
        handle = os.open(data_dir / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


async def _generation(host: Host, name: str) -> int:
    """Returns the generation of a mount that exists; 0 without one."""
    mounts: list[dict[str, Any]] = (await _ask(host, ""))["mounts"]
    return next((int(each.get("generation", 0)) for each in mounts if each["name"] == name), 0)


async def _ask(host: Host, name: str, former: int = 0) -> dict[str, Any]:
    result = await host.call("toolbus:mounts", {})
    if result.is_error:
        raise SetupError(f"the bus says: {result.text}")
    answer: dict[str, Any] = result.output
    if name in {mount["name"] for mount in answer["mounts"]}:
        one, log = [await host.call(f"toolbus:{tool}", {"name": name}) for tool in ("mounts", "mount_logs")]
        # A mount that is replaced is gone for a moment, and one of the generation before is the former.
        if one.is_error or (former and any(each.get("generation") == former for each in one.output["mounts"])):
            return {**answer, "mounts": [], "refused": {}}
        if any(each["state"] == "stopped" for each in one.output["mounts"]):  # its tools are known from before
            await host.call("toolbus:mount_restart", {"name": name})
        answer = {**one.output, "log": [] if log.is_error else log.output["lines"]}
    return answer


async def settled(
    look: Callable[[], Awaitable[dict[str, Any]]], *, remote: bool, down_seconds: float = DOWN_SECONDS
) -> dict[str, Any]:
    """Returns what the bus reports of a mount, as soon as its server runs or has failed.

    Args:
        remote: whether it is a server over HTTP, which needs no installation.
        down_seconds: how long to wait for such a server after its first failure.
    """
    state = ""
    clock = asyncio.get_running_loop().time
    down_since = math.inf
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                answer = await look()
                mounts = [mount for mount in answer["mounts"] if "declared" in mount]
                if (answer["refused"] and not mounts) or (mounts and mounts[0]["state"] in _SETTLED):
                    return answer
                if remote and mounts and mounts[0]["last_error"]:
                    down_since = min(down_since, clock())
                    if clock() - down_since >= down_seconds:
                        return answer
                if mounts and mounts[0]["state"] != state and mounts[0]["state"] != "stopped":
                    state = mounts[0]["state"]
                    terminal.print_note(f"{state}: {mounts[0]['reason'] or 'the server lists its tools'}")
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError:
        raise SetupError(f"the server is not ready after {WAIT_SECONDS:g} s: see `toolbus mounts`") from None


async def _start_once(name: str, data_dir: Path) -> dict[str, Any]:
    """Starts a server without a bus, and ends it; its declarations are stored for the next bus."""
    from toolbus.bus import Bus
    from toolbus.bus.config import Config
    from toolbus.bus.serve_settings import settle
    from toolbus.parts.mcp.client.files import FILE, MountsFollower, variables_for
    from toolbus.parts.mcp.client.mounts import Mounts, open_remote
    from toolbus.parts.mcp.client.offer import MOUNTS, MountManifest
    from toolbus.parts.mcp.client.room import MountTools
    from toolbus.parts.mcp.settings import McpConfig

    variables = variables_for(settle({}, os.environ).config.part(McpConfig).mcp_secrets, os.environ)
    configured = MountsFollower(data_dir / FILE, None, variables).read_first()
    async with Bus(Config(http="off"), rooms=()) as bus:  # it listens nowhere
        tools = MountTools(bus.core.audit)
        tools.configured, tools.file = configured, str(data_dir / FILE)
        with closing(Store.of(data_dir)) as store:  # locked for a moment only: a bus may start meanwhile
            store.open()
            before = store.load(MOUNTS)
        trial = Store.of(None)
        trial.write(MOUNTS, before)
        manifest = MountManifest(trial)
        mounts = Mounts(bus.core, manifest, functools.partial(open_remote, data_dir))
        tools.follow(mounts, manifest)
        try:
            entry = configured.entries.get(name)
            await mounts.apply({name: dataclasses.replace(entry, eager=True)} if entry is not None else {})
            answer = await settled(
                lambda: asyncio.to_thread(tools.show_mounts, name if entry is not None else ""),
                remote=entry is not None and entry.is_remote,
            )
            return {**answer, "log": [] if entry is None else (await tools.mount_logs(name))["lines"]}
        finally:
            await mounts.stop()
            with suppress(SetupError), closing(Store.of(data_dir)) as store:  # a bus that has started lists it itself
                store.open()
                after = trial.load(MOUNTS)
                store.write(MOUNTS, after, before.keys() - after.keys())


@dataclass(frozen=True, slots=True)
class ImportedServer:
    """A server in a client's file, and what becomes of it.

    Attributes:
        entry: what is written; its variables stay as they are.
        why: why it is skipped; "" where it is added.
    """

    name: str
    target: str
    origin: str
    entry: Mapping[str, Any]
    why: str = ""


class AnyVariable(dict[str, str]):
    """An environment in which every variable is set: what a bus lacks shows there, not when an entry is written."""

    def get(self, name: str, default: Any = None) -> Any:
        """Returns some text."""
        return "x"


def files_to_import(what: str, environment: Mapping[str, str], home: Path, project: Path) -> list[Path]:
    """Returns the files that an argument of `--import` means: those of a client that exist, or a file.

    Raises:
        SetupError: the client has no file here.
    """
    if what not in tuple(McpClientName):
        return [Path(what)]
    files = client_files(McpClientName(what), environment=environment, home=home, project=project)
    places = [path for path in (files.project, files.user) if path is not None]
    existing = [path for path in places if path.is_file()]
    if not existing:
        where = " or ".join(map(str, places))
        raise SetupError(f"{what} has no file of MCP servers here ({where}): name a file instead")
    return existing


def find_servers(paths: list[Path], taken: Mapping[str, Any], project: Path) -> list[ImportedServer]:
    """Returns the servers of files, each with what becomes of it.

    Args:
        taken: names of mounts that exist.
        project: whose servers are read where a file has those of several projects.

    Raises:
        SetupError: a file cannot be read, or has no servers.
    """
    servers: list[ImportedServer] = []
    used = set(taken)
    for path in paths:
        for written, entry, off in _entries(load_document(path), path, project):
            name = mount_name(written)
            why = _why_not(name, written, entry, path, used)
            if not why and off:
                why = f"{off} of the file switches it off"
            if not why and len(used) >= MAX_MOUNTS:
                why = f"a bus has at most {MAX_MOUNTS} mounts of its own"
            if not why:
                used.add(name)
            fields = entry.items() if isinstance(entry, dict) else ()
            ours = {key: value for key, value in fields if key in ENTRY_KEYS or is_restriction(key)}
            servers.append(ImportedServer(name or written, target_of(entry), str(path), ours, why))
    if not servers:
        raise SetupError(f"{' and '.join(map(str, paths))} configure no MCP servers: there is nothing to import")
    return servers


def target_of(entry: Any) -> str:
    """Returns what an entry runs or reaches, without arguments and queries, which may be secret."""
    if not isinstance(entry, dict):
        return ""
    url = str(entry.get("url") or "").partition("?")[0]
    return shorten(url or str(entry.get("command") or ""), 60)


def _entries(document: Any, path: Path, project: Path) -> Iterator[tuple[str, Any, str]]:
    """Yields the servers of a file: the name, the entry, and the key by which the file switches it off, or ""."""
    whole = Reader(document, str(path)).entries()
    # Claude Code keeps the servers of a project in the file of the user, VS Code its own in older settings.
    projects = document.get("projects")
    own = projects.get(str(project)) if isinstance(projects, dict) else None
    own = own if isinstance(own, dict) else {}
    for table in (whole, Reader(own, f"{path}: {project}").entries()):
        for key in TABLES:
            if key in table:
                for name, reader in table[key].entries().items():
                    yield name, reader.value, switched_off(document, name) or switched_off(own, name)


def _why_not(name: str, written: str, entry: Any, path: Path, used: set[str]) -> str:
    if not name:
        return "its name has no letter or digit"
    if name in used:
        return f"a mount {name} exists already"
    if _is_ourselves(entry):
        return "it is this bus itself"
    try:
        read_entry(Reader(entry, f"mount {written}"), name, AnyVariable(os.environ), [], str(path))
    except SetupError as error:
        return str(error).removeprefix(f"mount {written}: ")
    return ""


def _is_ourselves(entry: Any) -> bool:
    """Tells whether an entry is a bridge to a bus, which would mount itself."""
    if not isinstance(entry, dict):
        return False
    words = [str(entry.get("command") or ""), *map(str, entry.get("args") or ())]
    stems = [PurePath(word).name.removesuffix(".exe") for word in words]
    return ("toolbus", "mcp") in itertools.pairwise(stems)


EPILOG = epilog(
    (
        "toolbus mounts add files -- npx -y @modelcontextprotocol/server-filesystem ~/notes",
        "toolbus mounts add github --env GITHUB_TOKEN --deny 'delete_*' --pin block -- github-mcp-server stdio",
        "toolbus mounts add docs --url https://example.com/mcp --header 'Authorization: Bearer ${DOCS_TOKEN}'",
        "toolbus mounts add tracker --url https://example.com/mcp --login",
        "toolbus mounts add tracker --url https://example.com/mcp --user-login",
        "toolbus mounts add north --bus mtls:north.internal:48931 --credential north.toolbus",
        "toolbus mounts add --import claude-desktop",
        "toolbus mounts add --import .vscode/mcp.json --yes",
    ),
    """
    Writes the server into mcp.json of the data directory, waits until it has started, and prints its tools with their
    hints and fingerprints. A bus with this data directory has its tools at once, as NAME:TOOL. Without a bus the server
    is started once, and ended. What the server declares now is trusted; `toolbus mounts` shows what changes later.

    A server gets HOME, PATH and the like, and what --env names: --env K=V writes the value into the file, --env K has
    the bus take K from its own environment. ${K} in a --header is taken from there too. A server that is named by a
    relative path starts in the current directory, others in the home directory; --dir sets another.

    --bus mounts another bus: its own tools are called over one connection, with user, role and level. The bus that gets
    them is then that of TOOLBUS_ADDRESS, else that of the data directory.

    --import takes over the servers of a file of an MCP client, or of those of a client: claude-desktop, claude-code,
    vscode, cursor. It shows them and asks first.
    """,
    "0 mounted, 1 the server does not start or the file cannot be written, 2 wrong usage, 130 after Ctrl-C.",
)
UNMOUNT_EPILOG = epilog(
    ("toolbus mounts remove files",),
    """
    Removes the server from mcp.json of the data directory. A bus with this data directory ends it within a second. Its
    trusted declarations stay stored, for the same command line.
    """,
    "0 done, 1 unknown mount, or the file cannot be written, 2 wrong usage.",
)


def mount(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The source of its tools, NAME:TOOL.")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The program of the server, and its arguments.")
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="A server over HTTP, in place of a command.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="'K: V'", help="A header of each request to --url; may be repeated.")
    ] = None,
    login: Annotated[bool, typer.Option("--login", help="Sign in to --url in a browser (OAuth).")] = False,
    user_login: Annotated[
        bool, typer.Option("--user-login", help="Each user has a login and a process or session of their own.")
    ] = False,
    env: Annotated[
        list[str] | None, typer.Option(metavar="K[=V]", help="A variable for the server; may be repeated.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where the server starts (default: see below).")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Offer only such tools; may be repeated.")
    ] = None,
    deny: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Offer no such tools; may be repeated.")
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="Start it with the bus, not with its first call.")] = False,
    era: Annotated[
        str | None, typer.Option(metavar="auto|legacy|modern", help="The era of the protocol: found out, or demanded.")
    ] = None,
    pin: Annotated[
        str | None,
        typer.Option(metavar="warn|block", help="Whether a changed tool is marked, or waits for an approval."),
    ] = None,
    trust_hints: Annotated[
        bool, typer.Option("--trust-hints", help="Believe its hints: read-only calls may run twice.")
    ] = False,
    import_: Annotated[
        str | None,
        typer.Option("--import", metavar="FILE|CLIENT", help="Take over the servers of an MCP client's file."),
    ] = None,
    credential: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The credential for a bus that is mounted.")
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The token for it, such as '${NORTH_TOKEN}'.")
    ] = None,
    transit: Annotated[
        bool, typer.Option("--transit", help="Offer also what came to a mounted bus from other buses.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a mount of the same name.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before an import.")] = False,
    data_dir: DataDirOption = None,
    bus: Annotated[
        str | None,
        typer.Option(
            "--bus",
            metavar="ADDR",
            envvar="TOOLBUS_ADDRESS",
            show_default=False,
            help="The bus to mount, as hosts write it; with COMMAND, --url or --import the one that gets the mount.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Mount an MCP server or a bus: its tools become tools of the bus."""
    mounted = bus if _names_mounted(context, command, url, import_) else None
    if mounted is not None:
        bus = os.environ.get("TOOLBUS_ADDRESS")
    target = BusTarget(bus)
    place = _data_directory(data_dir) if bus is None else _directory_of_bus(target, data_dir)
    if import_ is not None:
        if name or command or url:
            terminal.fail("--import goes with no NAME, COMMAND and --url: it brings its own", terminal.USAGE)
        _import(import_, place, yes=yes, as_json=as_json)
        return
    if not name:
        terminal.fail("NAME is missing: write `toolbus mounts add NAME -- COMMAND...`, or --import", terminal.USAGE)
    entry = _entry_of_options(name, mounted, context.params)
    former = with_host(target, lambda host: _generation(host, name)) if replace and _is_served(place) else 0
    same = former > 0 and _entry_of(name, place) == entry
    logs_in = login and url is not None  # perhaps only the login of a mount is missing
    before = _entry_of(name, place) if logs_in and not replace else None
    if not isinstance(before, Mapping) or before.get("url") != url:
        _add(name, entry, place, replace=replace)
    if login and url is not None:
        _login(name, url, place)
    remote = url is not None or mounted is not None
    show_mounted(name, place, target, remote=remote, as_json=as_json, former=former, same=same)


def unmount(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The mount.")],
    data_dir: DataDirOption = None,
    bus: BusOption = None,
    as_json: JsonOption = False,
) -> None:
    """Unmount an MCP server: end it and withdraw its tools."""
    from toolbus.parts.mcp.client.authorization import remove_tokens

    is_named = data_dir is not None and str(data_dir) != os.environ.get("TOOLBUS_DATA_DIR")
    place = _data_directory(data_dir) if bus is None or is_named else _directory_of_bus(BusTarget(bus), data_dir)
    own = OwnMounts(place)
    with terminal.refusing():
        removed = own.remove(name)
        if removed:
            remove_tokens(own.path.parent, name)
        names = list(own.entries())
    if not removed:
        terminal.fail(f"{own.path} has no mount {name}; it has {list_names(names)}")
    terminal.print_outcome(f"{name} is unmounted", {"name": name, "file": str(own.path), "removed": True}, as_json)


def _data_directory(given: Path | None) -> Path:
    """Returns the data directory of the bus: as `toolbus serve` finds it."""
    if given is not None:
        return given
    from toolbus.bus.serve_settings import settle

    with terminal.wrong_usage():
        data_dir = settle({}, os.environ).config.data_dir
    if data_dir is None:
        why = "the bus stores nothing here (ephemeral), so no mount can be added"
        terminal.fail(f"{why}: give --data-dir", terminal.USAGE)
    return data_dir


def _directory_of_bus(bus: BusTarget, given: Path | None) -> Path:
    """Returns the data directory of the bus that the command names; ends it where the entry would go elsewhere."""
    file = with_host(bus, lambda host: _ask(host, ""))["file"]
    if not file:
        terminal.fail(f"the bus at {bus.read()[0]} stores nothing (ephemeral), so no mount can be added to it")
    place = Path(file).parent
    if str(given) == os.environ.get("TOOLBUS_DATA_DIR"):  # where this shell starts a bus, which is not the named one
        given = None
    if given is not None and given.expanduser().resolve() != place.resolve():
        terminal.fail(f"the bus at {bus.read()[0]} has the data directory {place}, not {given}: leave one of them out")
    if not place.is_dir():
        terminal.fail(f"the bus at {bus.read()[0]} reads {file}, which is not on this machine: run the command there")
    return place


def _entry_of_options(name: str, mounted: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entry that the options of the command ask for; ends the command where they do not go together.

    Args:
        mounted: the address of a bus that is mounted; None for a server.
    """

    def refuse(options: Sequence[str], text: str) -> None:
        if any(given[each] for each in options):
            terminal.fail(text, terminal.USAGE)

    # Here, other than in the arguments of a command, a path is a text.
    credential, directory = (Path(given[each]) if given[each] else None for each in ("credential", "directory"))
    if mounted is not None:
        why = "--header, --login, --user-login, --env, --dir and --era do not go with a bus: it is not an MCP server"
        refuse(("header", "login", "user_login", "env", "directory", "era"), why)
        entry = _of_bus(name, mounted, credential, given["token"])
    else:
        why = "--credential, --token and --transit go with --bus ADDR, without COMMAND and --url"
        refuse(("credential", "token", "transit"), why)
        if given["url"] is not None:
            why = "--url goes with no COMMAND, --env and --dir: it is a server elsewhere"
            refuse(("command", "env", "directory"), why)
            headers = dict(map(_header, given["header"] or ()))
            entry = {"type": "http", "url": given["url"], **({"headers": headers} if headers else {})}
        else:
            entry = _of_command(given["command"] or (), given["env"] or (), directory)
            refuse(("header", "login"), "--header and --login go with --url, not with a command")
    ours = {key: given[key] for key in ("allow", "deny", "eager", "era", "pin", "trust_hints", "login", "transit")}
    ours["login"] = PER_USER if given["user_login"] else given["login"]
    if chosen := {key: value for key, value in ours.items() if value}:
        entry["toolbus"] = chosen
    return entry


def _of_command(words: Sequence[str], env: Sequence[str], directory: Path | None) -> dict[str, Any]:
    if not words:
        terminal.fail("no COMMAND is given: write it behind --, or give --url", terminal.USAGE)
    program, arguments = os.path.expanduser(words[0]), list(words[1:])
    if "/" in program:
        program = str(Path(program).absolute())
    found = shutil.which(program)
    if found is None:
        terminal.fail(f"no program {words[0]!r} is found in PATH: install it, or give its path", terminal.USAGE)
    entry: dict[str, Any] = {"command": str(Path(found).absolute()), "args": arguments}  # the bus has another PATH
    if env:
        entry["env"] = dict(_variable(text) for text in env)
    if directory is None and any(_is_relative_file(word) for word in arguments):
        directory = Path.cwd()
    if directory is not None:
        if not directory.is_dir():
            terminal.fail(f"--dir {directory} is not a directory: create it or name another one", terminal.USAGE)
        entry["cwd"] = str(directory.absolute())
    return entry


def _names_mounted(context: typer.Context, *others: object) -> bool:
    """Tells whether --bus names what is mounted: it stands on the command line, and nothing else that could be."""
    source = context.get_parameter_source("bus")
    return source is not None and source.name == "COMMANDLINE" and not any(others)


def _of_bus(name: str, address: str, credential: Path | None, token: str | None) -> dict[str, Any]:
    """Returns the entry of a bus; ends the command if its address cannot be used, or not with the credential."""
    from toolbus.sdk.connection_settings import ConnectionSettings
    from toolbus.sdk.credential import Credential

    file = credential.expanduser().absolute() if credential is not None else None
    try:
        proof = Credential.read(file) if file else None
        ConnectionSettings(f"bus:{name}", address, token=token or "", credential=proof)
    except SetupError as error:
        terminal.fail(str(error).replace("in TOOLBUS_CREDENTIAL", "with --credential"), terminal.USAGE)
    return {"bus": address, **({"credential": str(file)} if file else {}), **({"token": token} if token else {})}


def _is_relative_file(word: str) -> bool:
    return bool(word) and not word.startswith(("-", "/", "~")) and Path(word).exists()


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return name, value if equals else f"${{{name}}}"


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        how = "write for example 'Authorization: Bearer ${TOKEN}'"
        terminal.fail(f"--header is not 'NAME: VALUE': {how}", terminal.USAGE)
    return name.strip(), value.strip()


def _add(name: str, entry: Mapping[str, Any], place: Path, *, replace: bool) -> None:
    """Checks an entry and writes it; ends the command if it is refused."""
    with terminal.wrong_usage():
        read_entry(Reader(entry, f"mount {name}"), name, AnyVariable(), [])
    with terminal.refusing():
        OwnMounts(place).add({name: entry}, replace=replace)


def _entry_of(name: str, place: Path) -> Any:
    """Returns the entry of a mount in the bus's own file; None without one."""
    with terminal.refusing():
        return OwnMounts(place).entries().get(name)


def _login(name: str, url: str, place: Path) -> None:
    """Logs the user in; the bus sees the token by itself."""
    from toolbus.parts.mcp.client.authorization import EXTRA, has_extra

    if not has_extra():
        terminal.fail(f"logging in needs the extra {EXTRA}: run `pip install 'toolbus[{EXTRA}]'`")
    from toolbus.parts.mcp.client.oauth import login  # which needs it

    with terminal.refusing():
        if not login(place, name, url, show=lambda text: terminal.print_lines(text, stream=sys.stderr)):
            terminal.print_lines(f"{url} asks for no login", stream=sys.stderr)


def _import(what: str, place: Path, *, yes: bool, as_json: bool) -> None:
    own = OwnMounts(place)
    with terminal.refusing():
        paths = files_to_import(what, os.environ, Path.home(), Path.cwd())
        servers = find_servers(paths, own.entries(), Path.cwd())
        rows = [(each.name, "skip" if each.why else "add", each.target, each.why) for each in servers]
        terminal.print_table(("MOUNT", "ACTION", "SERVER", "WHY"), rows, stream=sys.stderr if as_json else None)
        added = {each.name: each.entry for each in servers if not each.why}
        if added:
            if not yes:
                what = "Each is a program that runs as you, or a server elsewhere."
                terminal.ask(f"Add {len(added)} to {own.path}? {what}")
            own.add(added)
    if as_json:
        skipped = {each.name: each.why for each in servers if each.why}
        terminal.print_json({"file": str(own.path), "added": list(added), "skipped": skipped})
    elif added:
        terminal.print_note(f"{len(added)} mounts were added; `toolbus mounts` shows how they are")
