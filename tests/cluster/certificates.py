"""Certificates for one test control plane: a new authority, and what it signs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = dt.timedelta(days=30)
_CLOCK_SLACK = dt.timedelta(minutes=5)
_SERVER_AND_CLIENT = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority that lives in one folder. All keys are P-256: fast to make."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("lmcache-kube test authority")
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self.certificate = folder / "ca.crt"
        builder = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(self._identifier, critical=False)
        )
        self.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(
        self, file_name: str, common_name: str, *, group: str = "", hosts: tuple[str, ...] = ()
    ) -> KeyPair:
        """Make a key and its certificate; Kubernetes reads user and group from the subject."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(_name(common_name, group), self._name, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_SERVER_AND_CLIENT), critical=False)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier),
                critical=False,
            )
        )
        if hosts:
            names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        pair = KeyPair(self._folder / f"{file_name}.crt", self._folder / f"{file_name}.key")
        pair.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        _write_key(pair.key, key)
        return pair

    def signing_key(self, file_name: str) -> Path:
        """Make a bare key, for ServiceAccount tokens."""
        path = self._folder / f"{file_name}.key"
        _write_key(path, ec.generate_private_key(ec.SECP256R1()))
        return path


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SLACK)
        .not_valid_after(now + _LIFETIME)
    )


def _name(common_name: str, group: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*parts, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,  # as Kubernetes reads it
            serialization.NoEncryption(),
        )
    )
