"""Implements ``toolbus console``: opens the page for operators in a browser, or prints where it is."""

from __future__ import annotations

import json
import ssl
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from toolbus.cli import terminal
from toolbus.cli.bus_client import BusOption, BusTarget, CredentialOption, JsonOption
from toolbus.cli.call_command import call_bus_tool
from toolbus.cli.help_text import epilog

if TYPE_CHECKING:
    from toolbus.sdk import Credential

EPILOG = epilog(
    (
        "toolbus console",
        "toolbus console --print",
        "toolbus console --bus mtls:bus.example:48931 --credential ops.toolbus",
        "toolbus console --bus https://bus.example:48912 --credential ops.toolbus",
    ),
    """
    On the bus's own machine the page is http://127.0.0.1:48911/console, and needs no login. With --print the address
    is printed instead of opened, for a machine without a screen.

    For a bus on another machine the credential is exchanged for a code, which stands in the address behind a #, so
    that no server and no log gets it. The code is good once, for 60 s. The browser exchanges it for a login of 12
    hours, which ends when the key is revoked. The identity needs `calls` in its scope administer. The browser has to
    trust the certificate of the bus, as any other.
    """,
    "0 done, 1 the bus refused or has no console, 2 wrong usage, 3 no bus found.",
)
CODE_PATH = "/api/console/code"
SECONDS = 10.0  # until the bus has to answer
_NOT_SERVED = "start it with --https ADDRESS, or open the console on the bus's own machine"


def console(
    bus: BusOption = None,
    credential: CredentialOption = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the address of the page instead of opening it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Open the console in a browser: what a bus does, for operators."""
    url = _page(BusTarget(bus, credential))
    if as_json:
        terminal.print_json({"url": url})
        return
    if not print_only:
        import webbrowser

        if webbrowser.open(url):
            terminal.print_note("the console was opened in your browser")
            return
        terminal.print_note("no browser was found on this machine: open this address in one")
    terminal.print_lines(url)


def _page(bus: BusTarget) -> str:
    """Returns the address of the page, with a code where one is needed; ends the command if the bus has no page."""
    from toolbus.sdk.connection_settings import find_credential

    with terminal.wrong_usage():
        credential = find_credential(bus.credential)
    address = bus.address or (credential.address if credential is not None else "")
    if not address.startswith(("http://", "https://")):
        return _page_of(bus)
    try:
        parts = urlsplit(address)
    except ValueError as error:
        terminal.fail(f"the bus's address is {address!r} ({error}): write https://HOST:PORT", terminal.USAGE)
    if parts.scheme == "http":
        return f"http://{parts.netloc}/console"
    return _with_code(parts.netloc, credential)


def _page_of(bus: BusTarget) -> str:
    """Returns the address of the page of a bus that was named by its gRPC address: the bus reports where it listens."""
    address, credential = bus.read()
    listens: dict[str, Any] = call_bus_tool(bus, "digest", {})["addresses"]
    if not address.tls and address.is_local:
        if not listens["http"]:
            terminal.fail(
                f"the bus at {address} serves no HTTP, so it has no console: drop --http off, or use `toolbus top`"
            )
        return f"http://{listens['http']}/console"
    if not listens["https"]:
        terminal.fail(f"the bus at {address} serves no HTTPS, so other machines have no console: {_NOT_SERVED}")
    host = f"[{address.host}]" if ":" in address.host else address.host
    return _with_code(f"{host}:{listens['https'].rpartition(':')[2]}", credential)


def _with_code(place: str, credential: Credential | None) -> str:
    """Returns the address of the page with a code for a credential."""
    if credential is None:
        terminal.fail(
            f"the bus at https://{place} needs a key: name a credential with --credential FILE, as `toolbus keys add` "
            "writes it",
            terminal.USAGE,
        )
    answer = _post(place, credential)
    return f"https://{place}/console#code={answer['code']}"


def _post(place: str, credential: Credential) -> dict[str, Any]:
    """Requests a code; ends the command if the bus refuses or does not answer."""
    import http.client

    from toolbus.common.text import clean_line
    from toolbus.sdk.credential import client_context

    try:
        connection = http.client.HTTPSConnection(place, timeout=SECONDS, context=client_context(credential))
        connection.request("POST", CODE_PATH, headers=dict(credential.metadata))
        answer = connection.getresponse()
        body = answer.read(65_536)
    except ssl.SSLCertVerificationError as error:
        terminal.fail(
            f"the server at https://{place} is not the bus of the credential ({clean_line(error.verify_message)}): "
            "name the host as the certificate of the bus does, or use the credential of that bus",
            terminal.NO_BUS,
        )
    except (OSError, UnicodeError, http.client.HTTPException) as error:  # UnicodeError: a host that is not a name
        why = clean_line(str(error))
        terminal.fail(f"no bus at https://{place} ({why}): set its address with --bus", terminal.NO_BUS)
    connection.close()
    try:
        content = json.loads(body)
    except ValueError:
        content = {}
    if answer.status in (404, 501):
        terminal.fail(f"the bus at https://{place} has no console: drop console = false from its configuration")
    content = content if isinstance(content, dict) else {}
    if answer.status != 200 or "code" not in content:
        terminal.fail(clean_line(str(content.get("detail", f"the bus answered {answer.status}"))))
    return content
