"""Finds out why a gRPC client cannot talk to a server, with one TLS handshake of the standard library.

grpc reports nearly every mistake around TLS as "Socket closed": plain text sent to a TLS port, a missing, expired or
foreign client certificate. Servers send no alert, and with TLS 1.3 the client's handshake succeeds before the server
has checked its certificate. So this opens a connection of its own and tests each step: whether the server speaks TLS,
whether its certificate is trusted and has the right name, and whether it then begins HTTP/2.

It blocks, so it runs on a thread.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from enum import Enum, auto

from toolbus.common.text import list_names
from toolbus.sdk.bus_address import BusAddress
from toolbus.sdk.credential import Credential, client_context

PROBE_SECONDS = 3.0  # for each step of the probe
PLAIN_SECONDS = 1.0  # the same without TLS, where mistakes are rare and the probe must not delay a reconnect
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and an empty SETTINGS frame
_FRAME_HEAD = 9  # bytes; the fourth is the frame's type
_SETTINGS = 4
# Of X509_V_ERR_… in openssl/x509_vfy.h.
_TOO_EARLY, _EXPIRED, _WRONG_NAME, _WRONG_ADDRESS = 9, 10, 62, 64


class TlsProbeResult(Enum):
    """How far the probe got."""

    UNREACHABLE = auto()  # no connection, or no answer in time
    NOT_TLS = auto()  # the server answers, but not with TLS
    HANGS_UP = auto()  # the server ends the connection during the handshake
    UNTRUSTED = auto()  # no authority that we trust signed its certificate
    EXPIRED = auto()  # its certificate is not valid now
    WRONG_NAME = auto()  # its certificate is for other names
    NOT_HTTP2 = auto()  # the server speaks TLS, but not HTTP/2
    REFUSES = auto()  # the server ends the connection after the handshake: it requires another client certificate
    ACCEPTS = auto()  # the server speaks HTTP/2 with us


def diagnose(address: BusAddress, credential: Credential | None, cause: str = "", seconds: float | None = None) -> str:
    """Returns why a client with a credential cannot talk to the server at an address, and how to fix it; "" if unknown.

    Args:
        cause: grpc's text, which is returned if the probe succeeds; "" returns no text then.
        seconds: for each step; None means the usual ones.
    """
    if address.is_unix:
        return ""
    if seconds is None:
        seconds = PROBE_SECONDS if address.tls else PLAIN_SECONDS
    try:
        context = _context(address, credential)
    except OSError:  # an SSLError too
        place = credential.place if credential is not None else "the credential"
        return f"{place} cannot be used, the key in it is not that of its certificate: {_renew(credential)}"
    finding = _probe(address, context, seconds)
    if not address.tls:
        return _diagnose_plain(address, finding)
    if finding is TlsProbeResult.WRONG_NAME:
        return _wrong_name(address, context, seconds)
    if finding is TlsProbeResult.REFUSES:
        return _refused(address, credential)
    if finding is TlsProbeResult.ACCEPTS and not cause:
        return ""
    return _TEXTS[finding].format(
        address=address,
        target=address.target,
        cause=cause,
        signer=f"by the ca of {credential.place}"
        if credential is not None and credential.ca
        else "by one trusted here",
        renew=_renew(credential),
    )


_TEXTS = {
    TlsProbeResult.UNREACHABLE: "",
    TlsProbeResult.NOT_TLS: (
        "the server at {address} does not speak TLS: name the port of a listener of the bus with TLS, or write "
        "{target} for a bus of this machine"
    ),
    TlsProbeResult.HANGS_UP: (
        "the server at {address} ended the connection during the TLS handshake: name the port of a listener of the bus "
        "with TLS, or {renew}"
    ),
    TlsProbeResult.UNTRUSTED: (
        "the certificate of the server at {address} is not signed {signer}: it is another bus, or its authority was "
        "replaced; check the address, or {renew}"
    ),
    TlsProbeResult.EXPIRED: (
        "the certificate of the server at {address} has expired or is not valid yet, by the clock of this machine: "
        "check the clock, or have the operator of the bus renew the certificate (toolbus keys init)"
    ),
    TlsProbeResult.NOT_HTTP2: (
        "the server at {address} speaks TLS but not gRPC: name the port of a tls: or mtls: listener of the bus, not "
        "that of https"
    ),
    TlsProbeResult.ACCEPTS: (
        "the server at {address} speaks TLS and accepts this client, so its address and keys are right: grpc reported "
        "{cause}"
    ),
}


def _diagnose_plain(address: BusAddress, finding: TlsProbeResult) -> str:
    """Returns why plain text fails at an address; "" if the server does not speak TLS."""
    if finding is TlsProbeResult.ACCEPTS:
        return (
            f"the server at {address} speaks TLS, and asks for no client certificate: write tls:{address}, and name a "
            "credential file in TOOLBUS_CREDENTIAL (toolbus keys add NAME -o FILE)"
        )
    if finding is TlsProbeResult.REFUSES:
        return (
            f"the server at {address} speaks TLS, and asks for a client certificate: write mtls:{address}, and name a "
            "credential file in TOOLBUS_CREDENTIAL (toolbus keys add NAME -o FILE)"
        )
    if finding is TlsProbeResult.NOT_HTTP2:
        return _TEXTS[finding].format(address=address)
    return _PLAIN_HTTP.format(address=address) if _speaks_http(address) else ""


_PLAIN_HTTP = (
    "the server at {address} speaks HTTP, not gRPC: give the bus's gRPC address, which `toolbus serve` prints as grpc="
)


def _speaks_http(address: BusAddress) -> bool:
    """Tells whether a server answers a request of HTTP/1.1: it is the HTTP port of a bus, or another program."""
    with suppress(OSError), socket.create_connection((address.host, address.port), PLAIN_SECONDS) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return plain.recv(7) == b"HTTP/1."
    return False


def _refused(address: BusAddress, credential: Credential | None) -> str:
    """Returns why a bus ends the connection of a client that trusts it: only the client's certificate is left."""
    if credential is None or not credential.certificate:
        whose = f", and {credential.place} has none" if credential is not None else ""
        return (
            f"the bus at {address} asks for a client certificate{whose}: write mtls:{address.target}, with a "
            "credential file that has one (toolbus keys add NAME -o FILE)"
        )
    if credential.has_expired:
        return f"the certificate of {credential.place} expired on {credential.day}: {_renew(credential)}"
    until = f", which is valid until {credential.day}" if credential.day else ""
    return (
        f"the bus at {address} refused the certificate of {credential.place}{until}: it is for another bus, or its "
        f"authority was replaced; check the address, or {_renew(credential)}"
    )


def _wrong_name(address: BusAddress, context: ssl.SSLContext, seconds: float) -> str:
    """Returns the text about a server whose certificate is for other names."""
    context.check_hostname = False
    names: list[str] = []
    with (
        suppress(OSError),
        socket.create_connection((address.host, address.port), seconds) as raw,
        context.wrap_socket(raw, server_hostname=address.server_name) as tls,
    ):
        names = [str(pair[1]) for pair in (tls.getpeercert() or {}).get("subjectAltName", ())]
    return (
        f"the certificate of the server at {address} is for {list_names(names)}, not for {address.server_name}: use "
        "one of these names in the address, or have the operator of the bus add this one (toolbus keys init --name "
        f"{address.server_name})"
    )


def _renew(credential: Credential | None) -> str:
    """Returns how to get another credential file."""
    if credential is None:
        return "name a credential file in TOOLBUS_CREDENTIAL (toolbus keys add NAME -o FILE)"
    return f"write the file anew on the machine of the bus (`{credential.renew_command}`) and copy it here"


def _context(address: BusAddress, credential: Credential | None) -> ssl.SSLContext:
    """Returns the TLS settings of a client with a credential; at a plain address it trusts every certificate.

    Raises:
        OSError: the key is not that of the certificate.
    """
    if address.tls:
        context = client_context(credential)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _probe(address: BusAddress, context: ssl.SSLContext, seconds: float) -> TlsProbeResult:
    """Opens a connection and returns how far it gets."""
    try:
        raw = socket.create_connection((address.host, address.port), seconds)
    except (OSError, ValueError):  # no such name, or one that cannot be a name
        return TlsProbeResult.UNREACHABLE
    with raw:
        try:
            tls = context.wrap_socket(raw, server_hostname=address.server_name)
        except ssl.SSLCertVerificationError as error:
            return _VERIFY.get(error.verify_code, TlsProbeResult.UNTRUSTED)
        except (TimeoutError, ValueError):
            return TlsProbeResult.UNREACHABLE
        except (ssl.SSLEOFError, ConnectionError):
            return TlsProbeResult.HANGS_UP
        except ssl.SSLError as error:
            return TlsProbeResult.REFUSES if "ALERT" in (error.reason or "") else TlsProbeResult.NOT_TLS
        with tls:
            return _first_frame(tls)


def _first_frame(tls: ssl.SSLSocket) -> TlsProbeResult:
    """Begins HTTP/2 and judges the server's answer."""
    if tls.selected_alpn_protocol() != "h2":
        return TlsProbeResult.NOT_HTTP2
    head = b""
    try:
        tls.sendall(_PREFACE)
        while len(head) < _FRAME_HEAD and (piece := tls.recv(_FRAME_HEAD - len(head))):
            head += piece
    except TimeoutError:
        return TlsProbeResult.UNREACHABLE
    except OSError:  # an alert, or a reset
        return TlsProbeResult.REFUSES
    if not head:
        return TlsProbeResult.REFUSES
    return TlsProbeResult.ACCEPTS if len(head) == _FRAME_HEAD and head[3] == _SETTINGS else TlsProbeResult.NOT_HTTP2


_VERIFY = {
    _TOO_EARLY: TlsProbeResult.EXPIRED,
    _EXPIRED: TlsProbeResult.EXPIRED,
    _WRONG_NAME: TlsProbeResult.WRONG_NAME,
    _WRONG_ADDRESS: TlsProbeResult.WRONG_NAME,
}
