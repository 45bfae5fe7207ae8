"""Reads the addresses of several buses: a list, and names whose addresses DNS has.

``bus-0:48931,bus-1:48931`` lists buses. ``dns:NAME:PORT`` stands for every address of a name, and ``dns:tls:NAME:PORT``
or ``dns:mtls:NAME:PORT`` for those of buses whose certificates show the name.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from toolbus.common.text import list_names, quote
from toolbus.errors import SetupError
from toolbus.functions.workers import Workers
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.connection_settings import ConnectionSettings

log = logging.getLogger("toolbus.sdk.connection")

MAX_BUSES = 64  # of one peer: a session, and for plugins a declaration, each
LOOKUP_SECONDS = 5.0  # between two look-ups of a name
CHOOSE_SECONDS = 1.0  # for a server to accept a connection of a command
_DNS = "dns:"
_BETWEEN = re.compile(r",\s*(?=[^\s:/,]+:|\[)")  # a comma in the path of a socket is none

Lookup = Callable[[str, int], Sequence[str]]


def look_up(name: str, port: int) -> list[str]:
    """Returns all IP addresses of a name.

    Raises:
        OSError: the name is not known, or no server of names answers.
    """
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


class Addresses:
    """The addresses of the buses of one peer.

    Args:
        settings: of the peer; its address names them.
        lookup: takes name and port, blocks, and returns IP addresses.

    Raises:
        SetupError: one of them breaks its rule, or the peer's token or credential cannot be used there.
    """

    def __init__(self, settings: ConnectionSettings, lookup: Lookup = look_up) -> None:
        self._settings = settings
        self._lookup = lookup
        self._worker: Workers | None = None  # looks up names; None before the first
        self._fixed, self.names = read_addresses(settings.address)
        self._found: dict[str, list[str]] = {}  # the last answer for each name, by its text
        self._failed: set[str] = set()  # names whose failure is in the log
        for each in (*self._fixed, *(name.text for name in self.names)):
            self.settings_of(each)  # raises what is wrong with it
        if (count := len(self._fixed)) > MAX_BUSES:
            raise SetupError(f"the bus's address names {count} buses, it may have {MAX_BUSES}: leave some out")

    def __repr__(self) -> str:
        return f"<Addresses {list_names(self.now())}>"

    def settings_of(self, address: str) -> ConnectionSettings:
        """Returns the settings of the connection to one of them.

        Raises:
            SetupError: it breaks its rule.
        """
        return replace(self._settings, address=address)

    def now(self) -> list[str]:
        """Returns the addresses as last known: this machine's first, the others in an order of this peer's own."""
        found = (address for name in self.names for address in self._found.get(name.text, ()))
        return in_order(dict.fromkeys((*self._fixed, *found)), self._settings.instance)[:MAX_BUSES]

    async def refresh(self) -> None:
        """Looks up the names again; a name that cannot be looked up keeps its last addresses."""
        if not self.names:
            return
        self._worker = self._worker or Workers(1, "toolbus-names")
        for name in self.names:
            answer = await self._worker.run(lambda name=name: self._ask(name))  # type: ignore[misc]
            if isinstance(answer, list):
                self._failed.discard(name.text)
                self._found[name.text] = answer
            elif name.text not in self._failed:
                self._failed.add(name.text)
                log.warning("the buses of dns:%s cannot be looked up: %s; trying again", name, answer)

    def close(self) -> None:
        """Ends the thread that looks up names."""
        if self._worker is not None:
            self._worker.stop()

    def _ask(self, name: BusAddress) -> list[str] | OSError:
        try:
            hosts = self._lookup(name.host, name.port)
        except OSError as error:
            return error
        return of_hosts(name, hosts)


def read_addresses(text: str) -> tuple[list[str], list[BusAddress]]:
    """Returns the addresses of a text with several, and those whose names DNS has to look up.

    Raises:
        SetupError: one of the latter breaks its rule.
    """
    written = [each.strip() for each in _BETWEEN.split(text)]
    names = [BusAddress.parse(each.removeprefix(_DNS)) for each in written if each.startswith(_DNS)]
    if any(name.is_unix for name in names):
        raise SetupError(f"the bus's address is {quote(text)}: dns: goes before HOST:PORT")
    fixed = [each for each in written if not each.startswith(_DNS)]
    for each in fixed:
        BusAddress.parse(each)
    return fixed, names


def of_hosts(name: BusAddress, hosts: Iterable[str]) -> list[str]:
    """Returns the addresses of a name's hosts; certificates still have to show the name."""
    scheme = "mtls:" if name.mtls else "tls:" if name.tls else ""
    shown = f"{name.host}@" if name.tls else ""
    return [f"{scheme}{shown}{f'[{host}]' if ':' in host else host}:{name.port}" for host in hosts]


def every(text: str) -> list[str]:
    """Returns all addresses of a text as they are now; a name that cannot be looked up stays as it is."""
    fixed, names = read_addresses(text)
    found = list(fixed)
    for name in names:
        with suppress(OSError):
            found += of_hosts(name, look_up(name.host, name.port))
    return list(dict.fromkeys(found)) or [name.text for name in names]


def choose(text: str) -> str:
    """Returns the first address, this machine's first, at which a server listens; the first one where none does."""
    ordered = sorted(every(text), key=lambda address: not BusAddress.parse(address).is_local)
    return next((address for address in ordered if listens(address)), ordered[0])


def listens(address: str, seconds: float = CHOOSE_SECONDS) -> bool:
    """Tells whether a server accepts connections at an address."""
    bus = BusAddress.parse(address)
    try:
        if bus.is_unix:
            with socket.socket(socket.AF_UNIX) as attempt:
                attempt.settimeout(seconds)
                attempt.connect(bus.target.removeprefix("unix:").removeprefix("//"))
        else:
            socket.create_connection((bus.host, bus.port), seconds).close()
    except OSError:
        return False
    return True


def in_order(addresses: Iterable[str], key: str) -> list[str]:
    """Returns addresses of this machine first, then the others, shuffled by a key: peers spread over the buses."""
    own = socket.gethostname()

    def place(address: str) -> tuple[bool, bytes]:
        bus = BusAddress.parse(address)
        is_far = not bus.is_local and bus.host != own
        return is_far, hashlib.sha256(f"{key} {address}".encode()).digest()

    return sorted(addresses, key=place)


async def follow(addresses: Addresses, changed: Callable[[], object], seconds: float = LOOKUP_SECONDS) -> None:
    """Looks names up again and again, and calls a function after each time; ends at once where there are no names."""
    while addresses.names:
        await addresses.refresh()
        changed()
        await asyncio.sleep(seconds)
