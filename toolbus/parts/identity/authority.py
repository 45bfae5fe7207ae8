"""Issues certificates: roots of an authority, server certificates and client certificates, ECDSA on P-256.

Pure: `key_store` knows the files. A root is valid for 10 years, a certificate that it issues for 90 days. While a root
replaces another, the old one also certifies the new one: that certificate goes with the server's, so that clients
which know only the old root accept the server too.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from toolbus.common.text import quote
from toolbus.errors import SetupError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise SetupError(f"keys need more libraries ({error}): run `pip install 'toolbus[keys]'`") from None

ROOT_DAYS = 3652
DAYS = 90  # of a certificate that a root issues
RENEW_BEFORE_DAYS = 30
EARLY = timedelta(minutes=5)  # a certificate is valid from before now: clocks of other machines may be behind
LOCAL_NAMES = ("localhost", "127.0.0.1")
URI_SCHEME = "toolbus:"
MAX_HOST = 253  # characters of a host name
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its private key, as PEM.

    Attributes:
        fingerprint: SHA-256 of the certificate (DER), in hex.
        expires: when it ends, in seconds since the epoch.
    """

    certificate: bytes
    key: bytes
    fingerprint: str
    expires: float


class Authority:
    """The root that issues, and the roots that are trusted in addition to it.

    Args:
        key: private key of the issuing root, as PEM.
        roots: the trusted roots as PEM, the issuing one among them.
        crossed: the issuing root as the one before certified it, as PEM; empty while no rotation is under way.

    Raises:
        SetupError: from the constructor: the key or a root cannot be read, or the key belongs to no root.
    """

    def __init__(self, key: bytes, roots: bytes, crossed: bytes = b"") -> None:
        try:
            loaded, self.roots = load_pem_private_key(key, None), x509.load_pem_x509_certificates(roots)
            by_old = x509.load_pem_x509_certificate(crossed) if crossed else None
        except (ValueError, TypeError) as error:
            reason = str(error).partition(".")[0]
            raise SetupError(
                f"the authority's key or its roots cannot be read ({reason}): restore ca.key and ca.pem from a copy"
            ) from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise SetupError("ca.key is not a key on an elliptic curve: restore the one of `toolbus keys init`")
        self._key: Key = loaded
        self.root_pems = roots
        issuing = [root for root in self.roots if root.public_key() == self._key.public_key()]
        if not issuing:
            raise SetupError("ca.key belongs to no root in ca.pem: restore both from one copy")
        self.root = issuing[0]
        # After a rotation that was killed halfway, the file may be about another root.
        self.crossed = crossed if by_old is not None and by_old.public_key() == self.root.public_key() else b""

    @classmethod
    def create(cls, now: float) -> tuple[Authority, bytes]:
        """Makes an authority with a new root.

        Returns:
            The authority, and the private key of its root as PEM.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        root = _root(key, _root_name(key, now), now, key, None)
        return cls(_key_pem(key), _pem(root)), _key_pem(key)

    @property
    def root_id(self) -> str:
        """Names the issuing root in the list of keys."""
        return root_id(self.root)

    def server(self, names: Sequence[str], now: float, days: float = DAYS) -> Issued:
        """Issues a server's certificate.

        Args:
            names: host names and IP addresses; the local ones are added.

        Raises:
            SetupError: a name is neither.
        """
        sans = [_general_name(name) for name in all_names(names)]
        return self._issue(all_names(names)[0], sans, ExtendedKeyUsageOID.SERVER_AUTH, now, days)

    def client(self, name: str, now: float, days: float = DAYS) -> Issued:
        """Issues a client's certificate for the identity of a name."""
        uri = x509.UniformResourceIdentifier(URI_SCHEME + name)
        return self._issue(name, [uri], ExtendedKeyUsageOID.CLIENT_AUTH, now, days)

    def rotated(self, now: float) -> tuple[Authority, bytes]:
        """Returns the authority with a new issuing root beside the old ones, and that root's private key as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _root_name(key, now)
        root = _root(key, name, now, key, None)
        crossed = _root(key, name, now, self._key, self.root)
        return Authority(_key_pem(key), _pem(root) + self.root_pems, _pem(crossed)), _key_pem(key)

    def only_current(self) -> bytes:
        """Returns the issuing root alone, as PEM."""
        return _pem(self.root)

    def _issue(
        self, subject: str, names: list[x509.GeneralName], usage: x509.ObjectIdentifier, now: float, days: float
    ) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        end = min(moment_of(now) + timedelta(days=days), self.root.not_valid_after_utc)
        certificate = (
            _builder(key, _name(subject[:64]), self.root.subject, now, end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_issuer_id(self.root), critical=False)
            .sign(self._key, SHA256())
        )
        digest = hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
        return Issued(_pem(certificate), _key_pem(key), digest, end.timestamp())


def root_id(root: x509.Certificate) -> str:
    """Returns the name of a root in the list of keys."""
    return hashlib.sha256(root.public_bytes(Encoding.DER)).hexdigest()[:16]


def all_names(names: Sequence[str]) -> list[str]:
    """Returns the names of a server's certificate: those given, and the local ones."""
    return list(dict.fromkeys([*(name.lower().strip("[]") for name in names), *LOCAL_NAMES]))


def validity_of(pem: bytes) -> tuple[float, float]:
    """Returns from when the first certificate of a PEM text is valid and until when, in seconds since the epoch."""
    certificate = x509.load_pem_x509_certificate(pem)
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def names_of(pem: bytes) -> list[str]:
    """Returns the host names and IP addresses of the first certificate of a PEM text."""
    extensions = x509.load_pem_x509_certificate(pem).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


# -- parts of certificates -------------------------------------------------------------------------------------------


def _root(key: Key, name: x509.Name, now: float, signer: Key, issuer: x509.Certificate | None) -> x509.Certificate:
    """Returns a root that certifies itself, or with an issuer one that the issuer certifies."""
    end = moment_of(now) + timedelta(days=ROOT_DAYS)
    if issuer is not None:
        end = min(end, issuer.not_valid_after_utc)
    builder = (
        _builder(key, name, name if issuer is None else issuer.subject, now, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    if issuer is not None:
        builder = builder.add_extension(_issuer_id(issuer), critical=False)
    return builder.sign(signer, SHA256())


def _builder(key: Key, name: x509.Name, issuer: x509.Name, now: float, end: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment_of(now) - EARLY)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        **dict.fromkeys((*others, "encipher_only", "decipher_only"), False),
    )


def _issuer_id(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    key_id = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    labels = name.removeprefix("*.").split(".")
    if len(name) > MAX_HOST or not all(map(_LABEL.fullmatch, labels)) or labels[-1].isdigit():
        raise SetupError(
            f"the name {quote(name)} is neither a host name nor an IP address: write it as peers dial it, without "
            "scheme and port, for example bus.team.example"
        )
    return x509.DNSName(name)


def _root_name(key: Key, now: float) -> x509.Name:
    digest = x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()
    return _name(f"toolbus {moment_of(now):%Y-%m-%d} {digest[:8]}")


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def moment_of(seconds: float) -> datetime:
    """Returns a time in seconds since the epoch, without its fraction, as certificates and TOML hold it."""
    return datetime.fromtimestamp(int(seconds), UTC)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
