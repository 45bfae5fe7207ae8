"""Makes certificates for tests: an authority, and what it signs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: str
    key: str


class Authority:
    """Signs certificates, as the authority of a bus does."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        now = datetime.now(UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=900))
            .not_valid_after(now + timedelta(days=900))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> str:
        """Its own certificate."""
        return self._certificate.public_bytes(Encoding.PEM).decode()

    def server(self, *names: str, days: float = 90) -> Pair:
        """Returns a certificate for a server of these names and addresses, for so many days from now."""
        return self._sign(names[0], [_general_name(name) for name in names], ExtendedKeyUsageOID.SERVER_AUTH, days)

    def client(self, name: str, days: float = 90) -> Pair:
        """Returns a certificate for a client; it has expired where ``days`` is below 0."""
        uri = x509.UniformResourceIdentifier(f"toolbus:{name}")
        return self._sign(name, [uri], ExtendedKeyUsageOID.CLIENT_AUTH, days)

    def _sign(self, name: str, names: list[x509.GeneralName], usage: x509.ObjectIdentifier, days: float) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        end = datetime.now(UTC) + timedelta(days=days)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(end - timedelta(days=100))
            .not_valid_after(end)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Pair(certificate.public_bytes(Encoding.PEM).decode(), private.decode())


def server_credentials(pair: Pair, clients: Authority | None = None) -> grpc.ServerCredentials:
    """Returns what a listener shows; it asks for certificates of clients that an authority signed."""
    root = clients.pem.encode() if clients else None
    return grpc.ssl_server_credentials([(pair.key.encode(), pair.certificate.encode())], root, clients is not None)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
