"""What the operator can be told: one frozen object; flags, variables and `--help` derive from it.

Each flag is also a variable: `--link-port` is `LMCACHE_KUBE_LINK_PORT`. A flag wins over its
variable, a variable over the default. Nothing else in the operator reads `os.environ`, except the
Kubernetes clients, which find their credentials by themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import re
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lmcache_operator.api.fields import DNS_LABEL
from lmcache_operator.errors import ConfigError

RELEASE = importlib.metadata.version("lmcache-kube")

_IMAGE_NAME = "ghcr.io/lmcache-kube/lmcache-kube"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_HIGHEST_PORT = 65_535

# Kubernetes sets <SERVICE>_PORT=tcp://… for every Service of the namespace, which may look like a
# flag's variable.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")

_T = TypeVar("_T")

_DESCRIPTION = (
    "Operator of LMCacheServer objects: runs an LMCache agent on each node they select, tells the "
    "agents early which worker pods died, and reports what happens on the objects. It needs the "
    "CustomResourceDefinition to be installed. Credentials come from KUBECONFIG, or from the pod."
)
_EPILOG = (
    "Each flag is also an environment variable: --link-port is LMCACHE_KUBE_LINK_PORT; lists are "
    "separated by commas. A flag wins over its variable, a variable over the default. Exit status: "
    "0 after a stop, 1 after a failure or when another operator took over, 2 for wrong flags."
)


@dataclass(frozen=True, slots=True)
class _About:
    words: str
    metavar: str
    choices: tuple[str, ...] = ()
    shown_default: str = ""


def _flag(
    words: str,
    default: _T,
    metavar: str = "TEXT",
    *,
    choices: tuple[str, ...] = (),
    shown: str = "",
) -> _T:
    about = _About(words, metavar, choices, shown)
    return field(default=default, metadata={"about": about})


def _default_identity() -> str:
    return f"{socket.gethostname()}_{uuid.uuid4()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorConfig:
    """The settings of one operator.

    Raises:
        ConfigError: all broken rules together, each with value, limit and fix.
    """

    namespace: tuple[str, ...] = _flag(
        "Namespace to serve: LMCacheServers and workers elsewhere are left alone. May be given "
        "several times.",
        (),
        "NAME",
        shown="every namespace",
    )
    operator_namespace: str = _flag(
        "Namespace of the operator itself: its Lease, its certificates, its Service.",
        "",
        "NAME",
        shown="that of the pod",
    )
    agent_image: str = _flag(
        "Image of agents whose spec.image leaves something out.",
        f"{_IMAGE_NAME}:{RELEASE.replace('+', '-')}",
        "IMAGE",
    )
    link_host: str = _flag("Address for the agents' streams; * for all.", "*", "ADDRESS")
    link_port: int = _flag("TCP port for the agents' streams; 0 takes a free one.", 8443, "PORT")
    link_url: str = _flag(
        "Where agents find the operator.",
        "",
        "URL",
        shown="wss://lmcache-operator.<operator namespace>.svc:<link port>",
    )
    http_host: str = _flag("Address for /healthz, /readyz and /metrics; * for all.", "*", "ADDRESS")
    http_port: int = _flag("TCP port for HTTP; 0 takes a free one.", 8081, "PORT")
    lease_name: str = _flag(
        "Lease whose holder acts; other operators of that name wait.", "lmcache-operator", "NAME"
    )
    identity: str = _flag(
        "Name of this process in the Lease.", "", shown="host name and a new uuid"
    )
    log_level: str = _flag(
        "Least severe records written.",
        "info",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = _flag(
        "auto is console on a terminal and JSON lines elsewhere.",
        "auto",
        choices=("auto", "json", "console"),
    )
    kubeconfig: str = ""

    def __post_init__(self) -> None:
        """Check the fields."""
        if problems := [*self._name_problems(), *self._port_problems(), *self._other_problems()]:
            raise ConfigError(problems)

    @property
    def every_namespace(self) -> bool:
        """Whether no namespace is left alone."""
        return not self.namespace

    @property
    def told_link_url(self) -> str:
        """What agents are told; with port 0, first replace `link_port` by the bound one."""
        host = f"lmcache-operator.{self.operator_namespace}.svc"
        return self.link_url or f"wss://{host}:{self.link_port}"

    def serves(self, namespace: str) -> bool:
        """Tell whether a namespace is not left alone."""
        return self.every_namespace or namespace in self.namespace

    def _name_problems(self) -> list[str]:
        if not self.operator_namespace:
            missing = "operator-namespace is missing, and this is no pod"
            return [f"{missing}: give --operator-namespace or LMCACHE_KUBE_OPERATOR_NAMESPACE"]
        named = [("operator-namespace", self.operator_namespace), ("lease-name", self.lease_name)]
        named += [("namespace", name) for name in self.namespace]
        return [
            f'{label} is "{name}", but must be a DNS label such as gpu-serving: correct it'
            for label, name in named
            if not re.fullmatch(DNS_LABEL, name)
        ]

    def _port_problems(self) -> list[str]:
        ports = [("link-port", self.link_port), ("http-port", self.http_port)]
        problems = [
            f"{label} is {port}, but must be 0 to {_HIGHEST_PORT}: give another port"
            for label, port in ports
            if not 0 <= port <= _HIGHEST_PORT
        ]
        if self.link_port and self.link_port == self.http_port:
            problems.append(
                f"http-port is {self.http_port}, but must differ from link-port: give it another"
            )
        return problems

    def _other_problems(self) -> list[str]:
        problems = [
            f'{label} is "{value}", but must be one of {", ".join(about.choices)}: choose one'
            for label, about, value in self._chosen()
            if value not in about.choices
        ]
        if self.link_url and not self.link_url.startswith("wss://"):
            problems.append(
                f'link-url is "{self.link_url}", but agents connect over TLS only: begin it with '
                "wss://"
            )
        return problems

    def _chosen(self) -> list[tuple[str, _About, str]]:
        return [
            (_label(option.name), option.metadata["about"], getattr(self, option.name))
            for option in _OPTIONS
            if option.metadata["about"].choices
        ]


_OPTIONS = tuple(f for f in dataclasses.fields(OperatorConfig) if "about" in f.metadata)


def listen_host(host: str) -> str | None:
    """Return what asyncio's servers take: None for all addresses."""
    return None if host == "*" else host


def parse_config(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> OperatorConfig:
    """Read the configuration; by default from this process's arguments and environment.

    Raises:
        ConfigError: everything that is wrong, together.
        SystemExit: `--help` or `--version` was asked for, and printed.
    """
    variables = os.environ if environ is None else environ
    flags = vars(_parser().parse_args(sys.argv[1:] if argv is None else argv))
    texts = {**_given_variables(variables), **flags}
    values: dict[str, Any] = {}
    problems = []
    for option in _OPTIONS:
        if option.name in texts:
            try:
                values[option.name] = _READERS[str(option.type)](texts[option.name])
            except ValueError:
                problems.append(
                    f'{_label(option.name)} is "{texts[option.name]}", but must be a whole '
                    "number: correct it"
                )
    values.setdefault("operator_namespace", _own_namespace())
    values.setdefault("identity", _default_identity())
    values["kubeconfig"] = variables.get("KUBECONFIG", "")
    try:
        config = OperatorConfig(**values)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return config


def _given_variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        option.name: text
        for option in _OPTIONS
        if (text := variables.get(_variable(option.name))) and not _SERVICE_LINK.match(text)
    }


def _read_list(given: str | list[str]) -> tuple[str, ...]:
    texts = given.split(",") if isinstance(given, str) else given
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": str,
    "int": int,
    "tuple[str, ...]": _read_list,
}


class _Parser(argparse.ArgumentParser):
    """Reports what it cannot parse like every other configuration problem."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message}: see --help for the flags there are"])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lmcache-operator",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=RELEASE)
    for option in _OPTIONS:
        about: _About = option.metadata["about"]
        several = option.type == "tuple[str, ...]"
        metavar = "{" + ",".join(about.choices) + "}" if about.choices else about.metavar
        shown = about.shown_default or option.default
        parser.add_argument(
            f"--{_label(option.name)}",
            dest=option.name,
            metavar=metavar,
            action="append" if several else "store",
            help=f"{about.words} [default {shown}]".replace("%", "%%"),
        )
    return parser


def _label(name: str) -> str:
    return name.replace("_", "-")


def _variable(name: str) -> str:
    return f"LMCACHE_KUBE_{name.upper()}"


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return ""
