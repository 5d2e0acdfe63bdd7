"""The link's certificates: always there, renewed in time, trusted by everybody all the while."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import ssl
from collections.abc import Callable

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import NameOID
from structlog.testing import capture_logs

from lmcache_operator.certs.material import KeyPair, Lifetimes, Material, due_step, read, write
from lmcache_operator.certs.trust import SECRET, LinkTrust, link_hosts
from lmcache_operator.errors import Conflict, Forbidden, Unreachable
from tests.fakes.kube_objects import KubeObject, KubeObjects

DAY = 86_400.0
START = 1_800_000_000.0
HOSTS = ("lmcache-operator.ops.svc", "10.0.0.9")
LIVES = Lifetimes()


class Clock:
    """A wall clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.moment = START

    def now(self) -> float:
        """Return seconds since 1970."""
        return self.moment


@pytest.fixture
def objects() -> KubeObjects:
    """Return an empty API server."""
    return KubeObjects()


@pytest.fixture
def clock() -> Clock:
    """Return the clock."""
    return Clock()


def trust_in(objects: KubeObjects, clock: Clock, hosts: tuple[str, ...] = HOSTS) -> LinkTrust:
    """Make an operator's certificates, as its process does at its start."""
    return LinkTrust(objects, namespace="ops", hosts=hosts, now=clock.now)


def refresh(trust: LinkTrust) -> None:
    """Do one pass."""
    asyncio.run(trust.refresh())


def secret(objects: KubeObjects) -> dict[str, str]:
    """Return the texts in the Secret."""
    data = objects.peek("Secret", "ops", SECRET)["data"]
    return {name: base64.b64decode(text).decode() for name, text in data.items()}


def put_secret(objects: KubeObjects, texts: dict[str, str]) -> None:
    """Write the Secret by hand."""
    data = {name: base64.b64encode(text.encode()).decode() for name, text in texts.items()}
    put_data(objects, data)


def put_data(objects: KubeObjects, data: dict[str, str] | None) -> None:
    """Write the encoded data of the Secret by hand."""
    metadata = {"namespace": "ops", "name": SECRET, "labels": {"kept": "yes"}}
    objects.put({"kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data})


def shake_hands(server: ssl.SSLContext, bundle: str, host: str = HOSTS[0]) -> None:
    """Do a TLS handshake in memory; certificates are valid at any moment of the fake clock.

    Raises:
        ssl.SSLError: the client does not trust what the server shows.
    """
    client = ssl.create_default_context(cadata=bundle)
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = 0
    while done < len(ends):
        done = sum(_moved_on(end) for end in ends)


def _moved_on(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def test_the_first_pass_makes_everything(objects: KubeObjects, clock: Clock) -> None:
    """Before it there is nothing; after it the Secret, a bundle and a certificate are there."""
    trust = trust_in(objects, clock)
    assert (trust.ca_bundle(), trust.server_expires_at()) == ("", None)
    assert not trust.ready.is_set()
    refresh(trust)
    assert trust.ready.is_set()
    assert set(secret(objects)) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    assert trust.ca_bundle() == secret(objects)["ca.crt"]
    assert trust.server_expires_at() == START + 90 * DAY
    assert trust.counts == {"link_authority_made": 1}


def test_a_pass_with_nothing_due_writes_nothing(objects: KubeObjects, clock: Clock) -> None:
    """Also in the next process, which shows the same certificate."""
    first = trust_in(objects, clock)
    refresh(first)
    refresh(first)
    second = trust_in(objects, clock)
    refresh(second)
    assert second.ca_bundle() == first.ca_bundle()
    assert objects.writes == [("create", "Secret", SECRET)]


@pytest.mark.parametrize("host", HOSTS)
def test_clients_with_the_bundle_trust_it(objects: KubeObjects, host: str) -> None:
    """By each of its names, by the strict rules of newer Pythons."""
    trust = LinkTrust(objects, namespace="ops", hosts=HOSTS)
    refresh(trust)
    shake_hands(trust.context, trust.ca_bundle(), host)
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        shake_hands(trust.context, trust.ca_bundle(), "elsewhere.example")


def test_no_session_ticket_follows_the_handshake(objects: KubeObjects) -> None:
    """A client that reads one while another thread writes its request may lose the request."""
    trust = LinkTrust(objects, namespace="ops", hosts=HOSTS)
    refresh(trust)
    assert trust.context.num_tickets == 0


def test_the_certificate_is_renewed_before_it_ends(objects: KubeObjects, clock: Clock) -> None:
    """After two thirds of its life, by the same authority: nobody has to learn anything."""
    trust = trust_in(objects, clock)
    refresh(trust)
    bundle, before = trust.ca_bundle(), secret(objects)["tls.crt"]
    clock.moment = START + 59 * DAY
    refresh(trust)
    assert secret(objects)["tls.crt"] == before
    clock.moment = START + 61 * DAY
    refresh(trust)
    assert secret(objects)["tls.crt"] != before
    assert trust.ca_bundle() == bundle
    assert trust.server_expires_at() == START + 151 * DAY
    assert trust.counts["link_certificate_issued"] == 1


def test_an_authority_is_announced_before_it_vouches(objects: KubeObjects, clock: Clock) -> None:
    """Whoever knows only the old one can connect for a day; then all know both."""
    trust = trust_in(objects, clock)
    heard: list[str] = []
    trust.on_change(lambda: heard.append(trust.ca_bundle()))
    bundles = []
    for day in range(489):
        clock.moment = START + day * DAY
        refresh(trust)
        bundles.append(trust.ca_bundle())
    old = bundles[0]
    assert set(bundles[:487]) == {old}
    both = bundles[487]
    newest = both.removesuffix(old)
    assert newest not in {"", both}
    assert secret(objects)["previous-ca.crt"] == old
    assert heard == [old, both]
    clock.moment = START + 490 * DAY
    refresh(trust)
    assert trust.ca_bundle() == newest
    assert "previous-ca.crt" not in secret(objects)
    assert heard == [old, both, newest]


def test_every_agent_is_served_throughout_a_rotation() -> None:
    """Through ten years the bundles of now and of half a day ago vouch for the server."""
    material: Material | None = None
    history: list[Material] = []
    for half in range(10 * 365 * 2):
        now = START + half * DAY / 2
        while step := due_step(material, HOSTS, LIVES, now):
            material = step.material
        assert material is not None
        assert material.server is not None
        shown = material.server.certificate
        assert shown.not_valid_before_utc.timestamp() <= now
        assert shown.not_valid_after_utc.timestamp() > now + 10 * DAY
        history.append(material)
        for known in history[-2:]:
            issuers = [known.authority.certificate, *([known.earlier] if known.earlier else [])]
            assert shown.issuer in {issuer.subject for issuer in issuers}
    assert len({each.authority.certificate.serial_number for each in history}) > 5


def test_new_names_get_a_new_certificate(objects: KubeObjects, clock: Clock) -> None:
    """When agents are told another URL; the authority stays."""
    first = trust_in(objects, clock)
    refresh(first)
    second = trust_in(objects, clock, (*HOSTS, "link.example.com"))
    refresh(second)
    assert second.ca_bundle() == first.ca_bundle()
    assert second.counts == {"link_certificate_issued": 1}
    refresh(second)
    assert second.counts == {"link_certificate_issued": 1}


def test_after_years_without_an_operator_all_is_new(objects: KubeObjects, clock: Clock) -> None:
    """An authority that has ended vouches for nothing."""
    refresh(trust_in(objects, clock))
    clock.moment = START + 800 * DAY
    trust = trust_in(objects, clock)
    refresh(trust)
    assert trust.counts == {"link_authority_made": 1}
    assert trust.server_expires_at() == clock.moment + 90 * DAY


def test_weeks_without_an_operator(objects: KubeObjects, clock: Clock) -> None:
    """Both due at once: the old authority vouches once more, the new one is announced."""
    refresh(trust_in(objects, clock))
    clock.moment = START + 700 * DAY
    trust = trust_in(objects, clock)
    refresh(trust)
    assert trust.counts == {"link_certificate_issued": 1, "link_authority_announced": 1}
    assert "previous-ca.crt" in secret(objects)


def _without(name: str) -> Callable[[dict[str, str]], None]:
    def change(texts: dict[str, str]) -> None:
        del texts[name]

    return change


def _with(name: str, text: str) -> Callable[[dict[str, str]], None]:
    def change(texts: dict[str, str]) -> None:
        texts[name] = text

    return change


def _swap_keys(texts: dict[str, str]) -> None:
    texts["tls.key"], texts["ca.key"] = texts["ca.key"], texts["tls.key"]


def _server_as_authority(texts: dict[str, str]) -> None:
    texts["ca.crt"], texts["ca.key"] = texts["tls.crt"], texts["tls.key"]


DAMAGE: dict[str, tuple[Callable[[dict[str, str]], None], str, str]] = {
    "no authority": (_without("ca.crt"), "ca.crt is missing", "authority"),
    "no authority's key": (_without("ca.key"), "ca.key is missing", "authority"),
    "keys swapped": (_swap_keys, "ca.key is not the key of ca.crt", "authority"),
    "not an authority": (_server_as_authority, "ca.crt may not sign", "authority"),
    "cut off": (_with("ca.crt", "-----BEGIN CERTIFICATE-----\nMII"), "cannot be read", "authority"),
    "no certificate": (_without("tls.crt"), "tls.crt is missing", "certificate"),
    "no key": (_with("tls.key", "-----BEGIN PRIVATE KEY-----"), "cannot be read", "certificate"),
    "bad earlier": (_with("previous-ca.crt", ""), "previous-ca.crt cannot", "certificate"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_secret_is_replaced(name: str, objects: KubeObjects, clock: Clock) -> None:
    """Visibly, and no more of it than must be; what stands beside it stays."""
    change, problem, lost = DAMAGE[name]
    refresh(trust_in(objects, clock))
    good = secret(objects)
    texts = dict(good)
    change(texts)
    put_secret(objects, texts)
    trust = trust_in(objects, clock)
    with capture_logs() as logs:
        refresh(trust)
    (record,) = [each for each in logs if each["event"] == "link_secret_damaged"]
    assert problem in record["problem"]
    assert record["log_level"] == "warning"
    assert (secret(objects)["ca.crt"] == good["ca.crt"]) == (lost == "certificate")
    assert objects.peek("Secret", "ops", SECRET)["metadata"]["labels"] == {"kept": "yes"}
    refresh(trust)
    assert trust.counts["link_secret_damaged"] == 1


@pytest.mark.parametrize("data", [None, {}, {"ca.crt": "%%%", "ca.key": "x"}])
def test_a_secret_without_anything(
    data: dict[str, str] | None, objects: KubeObjects, clock: Clock
) -> None:
    """An empty one, as a manifest may ship it, is filled; so is one that is no base64."""
    put_data(objects, data)
    trust = trust_in(objects, clock)
    refresh(trust)
    assert trust.ca_bundle() == secret(objects)["ca.crt"]
    assert trust.counts["link_authority_made"] == 1


@pytest.mark.parametrize("how", ["dropped", "emptied", "damaged"])
def test_what_agents_trust_is_written_again(how: str, objects: KubeObjects, clock: Clock) -> None:
    """An operator that runs still knows it: nobody is dropped."""
    trust = trust_in(objects, clock)
    refresh(trust)
    bundle, texts = trust.ca_bundle(), secret(objects)
    if how == "dropped":
        objects.drop("Secret", "ops", SECRET)
    else:
        put_data(objects, {} if how == "emptied" else {"ca.crt": "bad"})
    refresh(trust)
    assert trust.ca_bundle() == bundle
    assert secret(objects) == texts
    assert trust.counts["link_secret_restored"] == 1


def test_somebody_else_was_faster(objects: KubeObjects, clock: Clock) -> None:
    """Then nothing is used that is not stored; the next pass takes what is."""
    trust = trust_in(objects, clock)

    class Racing(KubeObjects):
        async def create(self, obj: KubeObject) -> bool:
            """Be late."""
            return not obj

    late = trust_in(Racing(), clock)
    with pytest.raises(Conflict, match="somebody else"):
        refresh(late)
    assert late.ca_bundle() == ""
    assert not late.ready.is_set()
    assert not late.counts
    refresh(trust)
    assert trust.ready.is_set()


def test_an_operator_that_may_not_make_secrets(clock: Clock) -> None:
    """Its manifests have made one; if that is gone before a start, the fix is said."""

    class Forbidding(KubeObjects):
        async def create(self, obj: KubeObject) -> bool:
            """Refuse."""
            raise Forbidden(403, "Forbidden", f"cannot create {obj['kind']}")

    with pytest.raises(Forbidden, match=r"make the Secret ops/lmcache-operator-link without data"):
        refresh(trust_in(Forbidding(), clock))


def test_an_api_server_that_is_away(objects: KubeObjects, clock: Clock) -> None:
    """The loop goes on, says so once, and catches up; certificates stay in use meanwhile."""

    class Enough(Exception):
        """Ends the loop of the test."""

    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise Enough
        objects.failure = None if len(pauses) == 3 else Unreachable("no answer")

    trust = LinkTrust(objects, namespace="ops", hosts=HOSTS, now=clock.now, sleep=sleep)
    with capture_logs() as logs, pytest.raises(Enough):
        asyncio.run(trust.run())
    assert [each["event"] for each in logs].count("link_secret_not_checked") == 1
    assert pauses == [60, 2, 2, 60]
    assert trust.ready.is_set()


def test_keys_are_not_printed(objects: KubeObjects, clock: Clock) -> None:
    """Neither by logs nor by what a debugger or traceback would show."""
    trust = trust_in(objects, clock)
    with capture_logs() as logs:
        refresh(trust)
        put_secret(objects, {**secret(objects), "tls.key": secret(objects)["ca.key"]})
        refresh(trust_in(objects, clock))
    texts = secret(objects)
    material, problem = read({name: text.encode() for name, text in texts.items()})
    assert problem == ""
    shown = f"{logs} {material!r}"
    assert "PRIVATE" not in shown
    assert texts["ca.key"].splitlines()[1] not in shown
    assert write(material) == texts


def test_what_the_certificate_is_for() -> None:
    """The host that agents are told, and the names of the Service within the cluster."""
    hosts = link_hosts("wss://[fd00::7]:8443", "ops")
    assert hosts[0] == "fd00::7"
    assert "lmcache-operator.ops.svc.cluster.local" in hosts
    within = link_hosts("wss://lmcache-operator.ops.svc:8443", "ops")
    assert len(within) == len(set(within)) == 4


def bare(key: CertificateIssuerPrivateKeyTypes, signer: KeyPair | None = None) -> dict[str, str]:
    """Make a certificate without any extension, by default signed by its own key."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "by hand")])
    builder = x509.CertificateBuilder(
        subject_name=name,
        issuer_name=signer.certificate.subject if signer else name,
        public_key=key.public_key(),
        serial_number=7,
        not_valid_before=dt.datetime.fromtimestamp(START - DAY, dt.UTC),
        not_valid_after=dt.datetime.fromtimestamp(START + 90 * DAY, dt.UTC),
    )
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    signed = builder.sign(signer.key if signer else key, hashes.SHA256())
    return {
        "certificate": signed.public_bytes(serialization.Encoding.PEM).decode(),
        "key": key.private_bytes(serialization.Encoding.PEM, form, plain).decode(),
    }


@pytest.mark.parametrize(
    ("make_key", "problem"),
    [
        (lambda: rsa.generate_private_key(65537, 2048), "ca.key is no key of an elliptic curve"),
        (lambda: ec.generate_private_key(ec.SECP256R1()), "ca.crt may not sign certificates"),
    ],
    ids=["RSA", "no authority"],
)
def test_an_authority_by_hand(
    make_key: Callable[[], CertificateIssuerPrivateKeyTypes],
    problem: str,
    objects: KubeObjects,
    clock: Clock,
) -> None:
    """What the operator cannot go on with is replaced."""
    made = bare(make_key())
    put_secret(objects, {"ca.crt": made["certificate"], "ca.key": made["key"]})
    trust = trust_in(objects, clock)
    with capture_logs() as logs:
        refresh(trust)
    assert [each["problem"] for each in logs if "problem" in each] == [problem]
    assert trust.counts["link_authority_made"] == 1


@pytest.mark.parametrize("signed", [True, False])
def test_a_certificate_by_hand(objects: KubeObjects, clock: Clock, *, signed: bool) -> None:
    """One for no name, or that the authority did not sign, is of no use to agents."""
    refresh(trust_in(objects, clock))
    texts = secret(objects)
    material, _ = read({name: text.encode() for name, text in texts.items()})
    made = bare(ec.generate_private_key(ec.SECP256R1()), material.authority if signed else None)
    put_secret(objects, {**texts, "tls.crt": made["certificate"], "tls.key": made["key"]})
    trust = trust_in(objects, clock)
    refresh(trust)
    assert trust.counts == {"link_certificate_issued": 1}
    assert secret(objects)["ca.crt"] == texts["ca.crt"]


def test_a_certificate_that_tls_refuses(objects: KubeObjects, clock: Clock) -> None:
    """Whatever the reason of the library is, it is replaced as a damaged one."""
    refresh(trust_in(objects, clock))
    texts = secret(objects)
    material, _ = read({name: text.encode() for name, text in texts.items()})
    made = bare(ec.generate_private_key(ec.SECP192R1()), material.authority)
    put_secret(objects, {**texts, "tls.crt": made["certificate"], "tls.key": made["key"]})
    trust = trust_in(objects, clock)
    refresh(trust)
    assert trust.counts["link_secret_damaged"] == 1
    assert trust.ready.is_set()
    assert secret(objects)["tls.crt"] != made["certificate"]
