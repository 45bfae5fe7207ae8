"""Lists the commands of ``toolbus`` as a table, and loads the one that runs: no other module of a command is imported.

`toolbus --help` and the completion of names read the table alone. The commands of parts come from `toolbus.parts`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from toolbus.cli import terminal
from toolbus.cli.help_text import epilog
from toolbus.common.grpc_switch import set_switch
from toolbus.common.part import PartCommand, load, parts
from toolbus.parts import NOUNS

_HELP = "A tool bus for LLM applications: plugins offer tools, hosts call them."
_MANUAL = epilog(
    ("toolbus serve", "toolbus run weather.py", "toolbus list", "toolbus call get_weather city=Paris"),
    """
    `toolbus COMMAND --help` shows the options of a command, with examples. Commands find the bus by --bus, then
    TOOLBUS_ADDRESS, then the address in the credential (--credential, TOOLBUS_CREDENTIAL), then 127.0.0.1:48930.

    If GRPC_EXPERIMENTS is not set, it is set to the values that make calls fastest; TOOLBUS_GRPC_EXPERIMENTS=keep
    prevents that.
    """,
    "of every command: 0 done, 1 the tool or the bus refused, 2 wrong usage, 3 no bus found, 130 after Ctrl-C.",
)
_DAILY = "Every day"
_DEFAULTS = ("show", "run")  # what a noun does without a verb, where it has one of these
_RAW = {"ignore_unknown_options": True, "allow_extra_args": True}


def _row(name: str, home: str, help_: str, group: str = "", old: str = "") -> PartCommand:
    return PartCommand(name, home and f"toolbus.cli.{home}", help_, group, old=old)


_CORE = (
    _row("serve", "serve_command:serve", "Run a bus."),
    _row("run", "run_command:run", "Run plugins as supervised processes."),
    _row("call", "call_command:call", "Call a tool, and print its result."),
    _row("list", "catalog_commands:list_", "List the tools that the bus offers."),
    _row("watch", "catalog_commands:watch", "Print each change of the tools as it comes."),
    _row("access", "", "Who may call and offer tools", NOUNS),
    _row("access show", "operator_commands:permissions", "Show which users may call what.", old="permissions"),
    _row("access permit", "operator_commands:permit", "Set who may call tools.", old="permit"),
    _row("access grant", "operator_commands:grant", "Allow a source to offer tools.", old="grant"),
    _row("access revoke", "operator_commands:revoke", "Forbid a source to offer tools.", old="revoke"),
    _row("access confirm", "operator_commands:confirm", "Trust the plugin of restored tools.", old="confirm"),
    _row("plugins", "", "Plugins, and what they say", NOUNS),
    _row("plugins drain", "operator_commands:drain", "Shut down a source, or the bus, gracefully.", old="drain"),
    _row("plugins notifications", "catalog_commands:notifications", "Print notifications.", old="notifications"),
    _row("plugins notify", "operator_commands:notify", "Send users a message.", old="notify"),
    _row("dev", "", "For authors of plugins, clients and buses", NOUNS),
)


def commands() -> tuple[PartCommand, ...]:
    """Returns all commands, those of the core first."""
    return (*_CORE, *(each for part in parts() for each in part.commands))


class _Command(TyperCommand):
    """A command whose numbers are numbers: ``float`` also reads ``nan`` and ``inf``, which JSON does not know."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for each in self.params:
            if isinstance(value := ctx.params.get(each.name), float) and not math.isfinite(value):
                ctx.fail(f"{each.opts[0]} is {value}, it must be a number such as 1.5")
        return rest


class _Table(TyperGroup):
    """Shows the commands of the table that stand below its name, and loads the one that is chosen."""

    def __init__(self, *, name: str | None = None, **attributes: Any) -> None:
        super().__init__(name=name, **attributes)
        self._rows: dict[str, PartCommand] = {}
        for row in commands():
            noun, _, verb = row.name.rpartition(" ")
            if noun == (name or ""):
                self._add(verb, row, hidden=row.hidden)
        if not name:
            for row in commands():
                if row.old:
                    self._add(row.old, row, hidden=True)

    def _add(self, word: str, row: PartCommand, *, hidden: bool) -> None:
        self._rows[word] = row
        panel = (row.group or _DAILY) if not self.name else None
        self.add_command(TyperCommand(word, help=_line(row), rich_help_panel=panel, hidden=hidden), word)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_verb = args[0] in (*self.commands, "-h", "--help") if args else ctx.resilient_parsing
        default = [verb for verb in _DEFAULTS if verb in self.commands]
        if self.name and default and not is_verb:
            args = [*default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        word, _, rest = super().resolve_command(ctx, args)
        return word, word and _load(word, self._rows[word]), rest


def _line(row: PartCommand) -> str:
    """Returns the line of a command in the list; that of a noun ends with its verbs."""
    if row.home:
        return row.help
    verbs = [each.name.split()[1] for each in commands() if each.name.startswith(f"{row.name} ")]
    return f"{row.help}: {', '.join(verbs)}"


def _load(word: str, row: PartCommand) -> Any:
    """Returns a command as it runs; ends the program where its part is missing."""
    with terminal.wrong_usage():
        home: Any = load(row.home) if row.home else None
    if isinstance(home, typer.Typer):
        return typer.main.get_command(home)
    if home is None:
        program = typer.Typer(
            name=row.name, cls=_Table, help=_line(row), epilog=_noun_epilog(row), add_completion=False,
            no_args_is_help=True, rich_markup_mode="rich",
        )  # fmt: skip
        program.callback()(lambda: None)
        return typer.main.get_command(program)
    program = typer.Typer(add_completion=False, rich_markup_mode="rich")
    if row.raw:
        program.command(word, help=row.help, add_help_option=False, context_settings=_RAW)(_raw(home))
    else:
        program.command(word, cls=_Command, epilog=_epilog_of(home))(home)
    return typer.main.get_command(program)


def _raw(function: Callable[[list[str]], None]) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        function(context.args)

    return run


def _epilog_of(function: Callable[..., None]) -> str:
    """Returns the end of a command's help: NAME_EPILOG of its module, else EPILOG."""
    module = vars(sys.modules[function.__module__])
    text: str = module.get(f"{function.__name__.strip('_').upper()}_EPILOG") or module["EPILOG"]
    return text


def _noun_epilog(noun: PartCommand) -> str:
    below = [each for each in commands() if each.name.startswith(f"{noun.name} ")]
    return next(
        (_epilog_of(load(each.home)) for each in below if each.name.endswith(_DEFAULTS)),
        epilog(
            [f"toolbus {each.name} --help" for each in below],
            "Each of these shows its options, --json among them, and examples.",
            "0 done, 1 the bus refused, 2 wrong usage, 3 no bus found.",
        ),
    )


def _print_version(requested: bool) -> None:
    if requested:
        from toolbus.common.version import VERSION

        terminal.print_lines(f"toolbus {VERSION}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app = typer.Typer(
    cls=_Table, help=_HELP, epilog=_MANUAL, no_args_is_help=True, rich_markup_mode="rich",
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.callback()(_common)


def main() -> None:
    """Runs the command that the words of this process choose."""
    set_switch()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the commands print their own error texts
    if os.getpid() == 1:  # the first process of a container, which has to wait for orphans
        from toolbus.processes.lifeline import work_below_init  # here: no other start needs it

        work_below_init()
    app()
