"""The authority and the server certificate: made, written, read, and when each is due.

Pure but for the making of keys. Moments are seconds since 1970.

An authority is replaced in two steps, so that no agent is ever without the right one: the new one
is announced beside the old, which still vouches for the server, and vouches for it itself only
when every agent has had the time to read the announcement.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = 86_400.0
_CLOCK_SLACK_SECONDS = 3_600.0  # an agent's clock may be behind
_DUE = 2 / 3  # of a life; the last third is there for an operator that is down

AUTHORITY = "ca.crt"
AUTHORITY_KEY = "ca.key"
EARLIER_AUTHORITY = "previous-ca.crt"
SERVER = "tls.crt"
SERVER_KEY = "tls.key"

_T = TypeVar("_T")


class Damaged(Exception):
    """Stored bytes that are no certificate or key, or do not belong together."""


@dataclass(frozen=True)
class Lifetimes:
    """How long things last, in seconds.

    Attributes:
        announcement_seconds: an authority is known this long before it vouches for the server.
    """

    authority_seconds: float = 730 * _DAY
    server_seconds: float = 90 * _DAY
    announcement_seconds: float = _DAY


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, which nothing prints."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(compare=False, repr=False)

    @property
    def certificate_text(self) -> str:
        """The certificate as PEM."""
        return pem(self.certificate)

    @property
    def key_text(self) -> str:
        """The key as PEM, not encrypted."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode()


@dataclass(frozen=True)
class Material:
    """Everything the link needs.

    Attributes:
        authority: the newest; signs what is issued from now on.
        earlier: the authority before it, while anybody may need it.
        server: what the operator shows; None if what was stored is of no use.
    """

    authority: KeyPair
    earlier: x509.Certificate | None = None
    server: KeyPair | None = None

    @property
    def bundle(self) -> str:
        """The authorities to trust, as PEM, newest first."""
        earlier = pem(self.earlier) if self.earlier else ""
        return self.authority.certificate_text + earlier


@dataclass(frozen=True)
class Step:
    """What to have instead, and what happened, as it is logged."""

    material: Material
    event: str


def due_step(
    material: Material | None, hosts: Sequence[str], lifetimes: Lifetimes, now: float
) -> Step | None:
    """Return the next thing that is due, or nothing; to be asked again until nothing is.

    Args:
        material: what there is, if anything.
        hosts: DNS names and addresses that the server certificate is for.
        lifetimes: of what is made.
        now: seconds since 1970.
    """
    if material is None or now >= _ends(material.authority.certificate):
        made = Material(_make_authority(lifetimes, now))
        return Step(_with_server(made, hosts, lifetimes, now), "link_authority_made")
    if _server_is_due(material, hosts, lifetimes, now):
        return Step(_with_server(material, hosts, lifetimes, now), "link_certificate_issued")
    known_for = now - _begins(material.authority.certificate)
    if material.earlier is None and _is_due(material.authority.certificate, now):
        newer = replace(
            material,
            authority=_make_authority(lifetimes, now),
            earlier=material.authority.certificate,
        )
        return Step(newer, "link_authority_announced")
    if material.earlier is not None and known_for >= 2 * lifetimes.announcement_seconds:
        return Step(replace(material, earlier=None), "link_authority_retired")
    return None


def write(material: Material) -> dict[str, str]:
    """Return the texts to store, by name."""
    texts = {
        AUTHORITY: material.authority.certificate_text,
        AUTHORITY_KEY: material.authority.key_text,
    }
    if material.earlier is not None:
        texts[EARLIER_AUTHORITY] = pem(material.earlier)
    if material.server is not None:
        texts[SERVER] = material.server.certificate_text
        texts[SERVER_KEY] = material.server.key_text
    return texts


def read(texts: Mapping[str, bytes]) -> tuple[Material, str]:
    """Read what was stored; also return what of it is of no use and can be made again.

    Raises:
        Damaged: there is no usable authority.
    """
    authority = _read_pair(texts, AUTHORITY, AUTHORITY_KEY)
    if not _may_sign(authority.certificate):
        raise Damaged(f"{AUTHORITY} may not sign certificates")
    problem = ""
    earlier = server = None
    try:
        if EARLIER_AUTHORITY in texts:
            earlier = _read_certificate(texts, EARLIER_AUTHORITY)
        server = _read_pair(texts, SERVER, SERVER_KEY)
    except Damaged as damage:
        problem = str(damage)
    return Material(authority, earlier, server), problem


def pem(certificate: x509.Certificate) -> str:
    """Write a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _server_is_due(
    material: Material, hosts: Sequence[str], lifetimes: Lifetimes, now: float
) -> bool:
    if material.server is None:
        return True
    shown, newest = material.server.certificate, material.authority.certificate
    if _hosts(shown) != frozenset(hosts):
        return True
    if _signed_by(shown, newest):
        return _is_due(shown, now)
    if material.earlier is None or not _signed_by(shown, material.earlier):
        return True  # nobody that agents trust vouches for it
    announced = now >= _begins(newest) + lifetimes.announcement_seconds
    return announced or now >= _ends(shown) or now >= _ends(material.earlier)


def _with_server(
    material: Material, hosts: Sequence[str], lifetimes: Lifetimes, now: float
) -> Material:
    authority = material.authority
    key = ec.generate_private_key(ec.SECP256R1())
    end = min(now + lifetimes.server_seconds, _ends(authority.certificate))
    builder = _builder(_name("lmcache-operator"), authority.certificate.subject, key, now, end)
    builder = builder.add_extension(
        x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False
    )
    builder = builder.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
    )
    builder = builder.add_extension(_usage(signs=False), critical=True)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    vouches = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(vouches, critical=False)
    return replace(material, server=KeyPair(builder.sign(authority.key, hashes.SHA256()), key))


def _make_authority(lifetimes: Lifetimes, now: float) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    day = dt.datetime.fromtimestamp(now, dt.UTC).date()
    name = _name(f"lmcache-operator link authority of {day}")
    builder = _builder(name, name, key, now, now + lifetimes.authority_seconds)
    builder = builder.add_extension(_usage(signs=True), critical=True)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return KeyPair(builder.sign(key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: float, end: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime.fromtimestamp(now - _CLOCK_SLACK_SECONDS, dt.UTC))
        .not_valid_after(dt.datetime.fromtimestamp(end, dt.UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _hosts(certificate: x509.Certificate) -> frozenset[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return frozenset()
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return frozenset([*names.get_values_for_type(x509.DNSName), *addresses])


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        found = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (x509.ExtensionNotFound, ValueError):
        return False
    return found.ca


def _signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _begins(certificate: x509.Certificate) -> float:
    """Return when it was made: it counts as valid from earlier on."""
    return certificate.not_valid_before_utc.timestamp() + _CLOCK_SLACK_SECONDS


def _ends(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


def _is_due(certificate: x509.Certificate, now: float) -> bool:
    made, end = _begins(certificate), _ends(certificate)
    return now >= made + (end - made) * _DUE


def _read_pair(texts: Mapping[str, bytes], certificate_name: str, key_name: str) -> KeyPair:
    certificate = _read_certificate(texts, certificate_name)
    key = _readable(texts, key_name, lambda text: serialization.load_pem_private_key(text, None))
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Damaged(f"{key_name} is no key of an elliptic curve")
    if key.public_key() != certificate.public_key():
        raise Damaged(f"{key_name} is not the key of {certificate_name}")
    return KeyPair(certificate, key)


def _read_certificate(texts: Mapping[str, bytes], name: str) -> x509.Certificate:
    return _readable(texts, name, x509.load_pem_x509_certificate)


def _readable(texts: Mapping[str, bytes], name: str, load: Callable[[bytes], _T]) -> _T:
    if name not in texts:
        raise Damaged(f"{name} is missing")
    try:
        return load(texts[name])
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise Damaged(f"{name} cannot be read") from None  # the reason might quote a key
