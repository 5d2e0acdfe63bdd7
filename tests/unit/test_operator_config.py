"""What the operator is told: flag, then variable, then default; what cannot be, all together."""

from __future__ import annotations

import pytest

from lmcache_operator.config import OperatorConfig, listen_host, parse_config
from lmcache_operator.errors import ConfigError

NEEDED = {"LMCACHE_KUBE_OPERATOR_NAMESPACE": "ops"}


def problems(*flags: str, **variables: str) -> tuple[str, ...]:
    """Return what is wrong."""
    with pytest.raises(ConfigError) as caught:
        parse_config(flags, {**NEEDED, **variables})
    return caught.value.problems


def test_only_its_own_namespace_need_be_known() -> None:
    """Everything else has a default; agents are told the name of the Service."""
    config = parse_config([], NEEDED)
    assert config.every_namespace
    assert config.told_link_url == "wss://lmcache-operator.ops.svc:8443"
    assert config.identity != parse_config([], NEEDED).identity
    assert ":" in config.agent_image


def test_a_flag_wins_over_its_variable() -> None:
    """And a variable over the default."""
    variables = {**NEEDED, "LMCACHE_KUBE_LINK_PORT": "1", "LMCACHE_KUBE_HTTP_PORT": "2"}
    config = parse_config(["--link-port=3"], variables)
    assert (config.link_port, config.http_port) == (3, 2)


def test_namespaces_are_a_list_in_either_form() -> None:
    """Several flags, or commas; the others are not served."""
    flags = parse_config(["--namespace=a", "--namespace=b"], NEEDED)
    variable = parse_config([], {**NEEDED, "LMCACHE_KUBE_NAMESPACE": "a, b,"})
    assert flags.namespace == variable.namespace == ("a", "b")
    assert flags.serves("a")
    assert not flags.serves("c")
    assert parse_config([], NEEDED).serves("c")


def test_variables_that_kubernetes_makes_of_services_are_no_flags() -> None:
    """A Service called lmcache-kube-link makes LMCACHE_KUBE_LINK_PORT an address."""
    variables = {**NEEDED, "LMCACHE_KUBE_LINK_PORT": "tcp://10.0.0.1:8443"}
    assert parse_config([], variables).link_port == 8443


def test_everything_that_is_wrong_is_said_at_once() -> None:
    """With value, limit and fix."""
    found = problems(
        "--link-port=many",
        "--http-port=70000",
        "--link-url=ws://operator",
        "--log-level=loud",
        "--namespace=A",
    )
    assert len(found) == 5
    assert any("many" in problem and "whole number" in problem for problem in found)
    assert any("70000" in problem and "65535" in problem for problem in found)
    assert any("wss://" in problem for problem in found)
    assert any("loud" in problem and "warning" in problem for problem in found)
    assert any('"A"' in problem for problem in found)


def test_ports_differ() -> None:
    """Unless both are free ones."""
    (problem,) = problems("--link-port=8081")
    assert "8081" in problem
    assert parse_config(["--link-port=0", "--http-port=0"], NEEDED).link_port == 0


def test_a_flag_that_does_not_exist() -> None:
    """Also not as the beginning of one that does."""
    (problem,) = problems("--link-po=1")
    assert "--help" in problem


def test_without_a_namespace_of_its_own() -> None:
    """Outside a pod it has to be given."""
    with pytest.raises(ConfigError, match="LMCACHE_KUBE_OPERATOR_NAMESPACE"):
        parse_config([], {})


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """With what it is for and its default."""
    with pytest.raises(SystemExit):
        parse_config(["--help"], NEEDED)
    page = capsys.readouterr().out
    fields = (name for name in OperatorConfig.__dataclass_fields__ if name != "kubeconfig")
    for name in fields:
        assert f"--{name.replace('_', '-')} " in page
    assert "KUBECONFIG" in page
    assert "Exit status" in page


def test_a_star_stands_for_all_addresses() -> None:
    """Which asyncio writes as None."""
    assert listen_host("*") is None
    assert listen_host("::1") == "::1"
