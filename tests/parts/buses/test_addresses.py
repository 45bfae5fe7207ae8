"""Tests which buses an address names, and in which order a peer tries them."""

from __future__ import annotations

import pytest

from toolbus.errors import SetupError
from toolbus.parts.buses.addresses import Addresses, every, in_order, read_addresses
from toolbus.sdk import Plugin
from toolbus.sdk.bus_address import BusAddress, is_several
from toolbus.sdk.connection_settings import ConnectionSettings
from toolbus.sdk.credential import Credential


def addresses(text: str, **answers: list[str] | None) -> Addresses:
    """Returns the addresses of a text; a name whose answer is None cannot be looked up."""

    def look_up(name: str, port: int) -> list[str]:
        answer = answers[name.replace(".", "_")]
        if answer is None:
            raise OSError("no such name")
        return answer

    return Addresses(ConnectionSettings("work", text, instance="i"), look_up)


@pytest.mark.parametrize(
    ("text", "several"),
    [
        ("127.0.0.1:1", False),
        ("unix:/run/a,b.sock", False),
        ("unix:/run/a,b:1.sock", True),
        ("tls:a.example:1", False),
        ("a:1,b:2", True),
        ("a:1, b:2", True),
        ("unix:/run/a,b.sock,unix:/run/c", True),
        ("mtls:a:1,mtls:b:2", True),
        ("[::1]:1,[::2]:1", True),
        ("dns:a:1", True),
        ("a:1,", False),
    ],
)
def test_a_text_names_several_buses_only_where_another_address_follows_a_comma(text: str, several: bool) -> None:
    assert is_several(text) is several


def test_one_address_is_what_it_was() -> None:
    settings = ConnectionSettings("work", "127.0.0.1:48930")
    assert (settings.several, settings.bus) == (False, BusAddress("127.0.0.1:48930", "127.0.0.1:48930"))


def test_a_list_is_read_in_its_parts() -> None:
    assert read_addresses("unix:/run/a,b.sock, tls:c:1,[::1]:2")[0] == ["unix:/run/a,b.sock", "tls:c:1", "[::1]:2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a:1,b:0", "'b:0'"),
        ("a:1,http://b:2", "HTTP"),
        ("dns:a", "port"),
        ("dns:unix:/run/a", "dns: goes before HOST:PORT"),
        ("127.0.0.1:1,mtls:b:2", "asks for a client certificate"),
        (",".join(f"a{number}:1" for number in range(65)), "65 buses, it may have 64"),
    ],
)
def test_a_bad_address_of_several_is_named_when_the_peer_is_made(text: str, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        Plugin("work", address=text)


def test_a_token_never_goes_to_one_of_several_in_plain_text() -> None:
    with pytest.raises(SetupError, match="plain text"):
        ConnectionSettings("work", "127.0.0.1:1,b.example:2", token="t")
    with pytest.raises(SetupError, match="plain text"):
        ConnectionSettings("work", "127.0.0.1:1,b.example:2", credential=Credential(token="t"))


def test_buses_of_this_machine_come_first_and_peers_spread_over_the_others() -> None:
    far = [f"bus-{number}:1" for number in range(3)]
    assert in_order([*far, "127.0.0.1:1"], "x")[0] == "127.0.0.1:1"
    orders = [in_order(far, f"host-{number}") for number in range(50)]
    assert {order[0] for order in orders} == set(far)
    assert in_order(far, "host-1") == in_order(list(reversed(far)), "host-1")


async def test_a_name_stands_for_all_its_addresses_and_one_that_fails_keeps_the_last() -> None:
    answers: dict[str, list[str] | None] = {"bus_internal": ["10.0.0.1", "fd00::1"]}
    found = addresses("dns:bus.internal:48931,127.0.0.1:1", **answers)
    assert found.now() == ["127.0.0.1:1"]
    await found.refresh()
    assert sorted(found.now()) == ["10.0.0.1:48931", "127.0.0.1:1", "[fd00::1]:48931"]
    found._lookup = addresses("dns:bus.internal:1", bus_internal=None)._lookup
    await found.refresh()
    assert len(found.now()) == 3
    found.close()


async def test_the_addresses_of_a_name_still_have_to_prove_the_name() -> None:
    found = addresses("dns:tls:bus.internal:48931", bus_internal=["10.0.0.1"])
    await found.refresh()
    [address] = found.now()
    assert address == "tls:bus.internal@10.0.0.1:48931"
    bus = BusAddress.parse(address)
    assert (bus.target, bus.server_name, bus.host) == ("10.0.0.1:48931", "bus.internal", "10.0.0.1")
    found.close()


def test_a_name_that_cannot_be_looked_up_is_shown_as_it_is() -> None:
    assert every("dns:no-such-name.invalid:1") == ["no-such-name.invalid:1"]
