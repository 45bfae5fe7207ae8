"""The address of a bus: its forms, and what is wrong with any other text."""

import pytest

from toolbus.errors import SetupError
from toolbus.sdk import Host, Plugin
from toolbus.sdk.bus_address import MAX_SOCKET_PATH, BusAddress


@pytest.mark.parametrize(
    ("text", "target", "tls", "mtls", "local"),
    [
        ("127.0.0.1:48930", "127.0.0.1:48930", False, False, True),
        ("[::1]:1", "[::1]:1", False, False, True),
        ("[fe80::1%eth0]:1", "[fe80::1%eth0]:1", False, False, False),
        ("bücher.example:65535", "bücher.example:65535", False, False, False),
        (f"{'a' * 63}.example.:1", f"{'a' * 63}.example.:1", False, False, False),
        ("tls:bus.example:1", "bus.example:1", True, False, False),
        ("mtls:[::1]:1", "[::1]:1", True, True, True),
        ("unix:/run/a b.sock", "unix:/run/a b.sock", False, False, True),
        ("unix:bus.sock", "unix:bus.sock", False, False, True),
        ("unix:///run/bus.sock", "unix:///run/bus.sock", False, False, True),
    ],
)
def test_an_address_says_what_to_connect_to_and_how(text: str, target: str, tls: bool, mtls: bool, local: bool) -> None:
    address = BusAddress.parse(text)
    assert (address.target, address.tls, address.mtls, address.is_local) == (target, tls, mtls, local)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("127.0.0.1", "add the port, for example 127.0.0.1:48930"),
        ("48930", "add the port"),
        ("tls:bus.example", "add the port"),
        ("tls:1", "add the port"),
        ("mtls:[::1]", "add the port"),
        (":48930", "write for example 127.0.0.1:48930"),
        ("bus:0", "write for example"),
        ("bus:65536", "write for example"),
        ("bus:http", "write for example"),
        ("bus:１", "write for example"),
        (" bus:1", "write for example"),
        ("bus:1 ", "write for example"),
        ("me@bus:1", "write for example"),
        ("tls:mtls:bus:1", "write for example"),
        ("tls:unix:/run/bus.sock", "write for example"),
        ("unix:", "write for example"),
        ("::1:48930", "write an IPv6 address in brackets, for example [::1]:48930"),
        ("grpc://bus:1", "write it without grpc://"),
        ("dns:///bus:1", "write it without dns://"),
        ("http://bus:1", "which is one for HTTP"),
        ("bus..example:1", "each of its parts between dots has 1 to 63 characters"),
        (f"tls:{'a' * 64}.example:1", "each of its parts"),
        (f"{'ü' * 63}.example:1", "each of its parts"),
        (f"unix:/{'a' * MAX_SOCKET_PATH}", f"its path has {MAX_SOCKET_PATH + 1} bytes and may have {MAX_SOCKET_PATH}"),
    ],
)
def test_any_other_text_is_refused_with_the_fix(text: str, fix: str) -> None:
    with pytest.raises(SetupError) as caught:
        BusAddress.parse(text)
    assert repr(text)[:20] in str(caught.value)
    assert fix in str(caught.value)


def test_a_bad_address_in_the_environment_is_refused_where_a_peer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBUS_ADDRESS", "grpc://bus:1")
    for peer in (Plugin, Host):
        with pytest.raises(SetupError, match="write it without grpc://"):
            peer() if peer is Host else peer("weather")
