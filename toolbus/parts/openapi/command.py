"""Implements ``toolbus plugins openapi``: offers the operations of an OpenAPI document, or shows which."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, JsonOption
from toolbus.cli.help_text import epilog

if TYPE_CHECKING:
    from toolbus.openapi import Api

EPILOG = epilog(
    (
        "toolbus plugins openapi https://petstore3.swagger.io/api/v3/openapi.json --list",
        "toolbus plugins openapi http://127.0.0.1:8000/openapi.json --allow 'get*' --allow 'POST /orders'",
        "toolbus plugins openapi pets.yaml --base-url https://pets.example/v1 --auth PETS_KEY",
    ),
    """
    Without --allow the operations are offered that only read (GET and HEAD). A pattern is the id of an operation
    (get*), its method and path (GET /pets/*) or a tag (tag:pets); * stands for any characters. --deny wins.

    Requests go to --base-url, or to the server that the document names, if that is where the document came from; to no
    other place, and redirects are followed there only.

    --auth names an environment variable with a credential, for the document's only security scheme or, as
    SCHEME=VARIABLE, for one of them: a key, a token, or USER:PASSWORD. It is sent with requests and shown nowhere.

    The command offers the tools until SIGINT or SIGTERM. API and bus may be started later. In a Python file
    `toolbus.openapi.from_openapi` does the same, for `toolbus run`.
    """,
    "0 done, 1 the document cannot be used or the bus refused, 2 wrong usage.",
)

PatternsOption = Annotated[
    list[str] | None, typer.Option("--allow", metavar="PATTERN", help="Offer these operations only; may be repeated.")
]


def openapi(
    document: Annotated[str, typer.Argument(metavar="URL|FILE", help="The OpenAPI 3 document, JSON or YAML.")],
    bus: BusOption = None,
    credential: Annotated[
        Path | None, typer.Option("--credential", metavar="FILE", help="Credential for a bus on another machine.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show what would be offered and what is left out.")] = False,
    allow: PatternsOption = None,
    deny: Annotated[
        list[str] | None, typer.Option("--deny", metavar="PATTERN", help="Never offer these; may be repeated.")
    ] = None,
    base_url: Annotated[str, typer.Option(metavar="URL", help="Where requests go.")] = "",
    auth: Annotated[
        list[str] | None,
        typer.Option("--auth", metavar="[SCHEME=]VARIABLE", help="The variable of a credential; may be repeated."),
    ] = None,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="Whose tools these are.")] = None,
    prefix: Annotated[str, typer.Option(metavar="TEXT", help="Begins the name of each tool.")] = "",
    max_tools: Annotated[int, typer.Option(min=1, help="How many tools there may be.")] = 128,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Offer the operations of an OpenAPI document as tools."""
    from toolbus.errors import ToolBusError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        options: dict[str, Any] = {
            "base_url": base_url, "allow": allow, "deny": deny or (), "auth": _read_auth(auth or []), "prefix": prefix,
            "max_tools": max_tools, "timeout": timeout,
        }  # fmt: skip
        if list_:
            _list(document, options, as_json)
            return
        from toolbus.openapi import from_openapi

        plugin = from_openapi(document, source=source, address=bus, credential=credential, **options)
        if plugin.api is not None:
            _print(plugin.api, as_json, short=True)
        plugin.run()
    except ToolBusError as error:  # of the document, its server or the bus
        terminal.fail(str(error))


def _read_auth(words: list[str]) -> Any:
    """Returns the secrets that the options name."""
    from toolbus.openapi import env

    pairs = [word.rpartition("=")[::2] for word in words]
    if len(pairs) == 1 and not pairs[0][0]:
        return env(pairs[0][1])
    if bare := next((variable for scheme, variable in pairs if not scheme), ""):
        terminal.fail(f"--auth {bare} names no security scheme: write --auth SCHEME={bare}", terminal.USAGE)
    return {scheme: env(variable) for scheme, variable in pairs} or None


def _list(document: str, options: dict[str, Any], as_json: bool) -> None:
    from toolbus.openapi import ApiSettings, read_api
    from toolbus.parts.openapi.document_loader import load_document

    _print(read_api(load_document(document), ApiSettings(**options)), as_json, short=False)


def _print(api: Api, as_json: bool, *, short: bool) -> None:
    """Prints what is offered, and unless it is to be short also what is left out and why."""
    if as_json:
        terminal.print_json(
            {
                "base_url": api.base_url,
                "tools": [
                    {"name": each.tool.name, "operation": each.title, "parameters": each.tool.parameters}
                    for each in api.tools
                ],
                "left_out": [
                    {"name": each.name, "operation": each.title, "reason": each.reason} for each in api.left_out
                ],
                "warnings": list(api.warnings),
            },
            line=short,
        )
        return
    if not short:
        rows = [(each.tool.name, each.title, "offered") for each in api.tools]
        rows += [(each.name, each.title, each.reason) for each in api.left_out]
        terminal.print_table(("NAME", "OPERATION", "STATE"), rows, range(len(api.tools), len(rows)))
        for warning in api.warnings:
            terminal.print_note(warning)
    terminal.print_lines(api.summary)
