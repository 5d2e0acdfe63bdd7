"""From the command line and the environment to an `AgentConfig`: flag, then variable, then default.

Nothing else in the agent reads `os.environ` or `sys.argv`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from lmcache_nodeagent.config import OPTIONS, AgentConfig
from lmcache_nodeagent.config_flags import Group, Option, Value, value_text
from lmcache_nodeagent.config_upstream import ACCEPTED_SWITCHES, REFUSED_FLAGS
from lmcache_nodeagent.errors import ConfigError

# Kubernetes sets <SERVICE>_PORT=tcp://… for every Service of the namespace; one that is called
# lmcache-kube would otherwise be read as our --port.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")

_DESCRIPTION = (
    "LMCache's multiprocess server for one node: vLLM workers keep their KV cache in it, "
    "and the memory of a worker that dies is released within seconds."
)
_EPILOG = (
    "Each flag is also an environment variable: --chunk-size is LMCACHE_KUBE_CHUNK_SIZE. "
    "A flag wins over its variable, a variable over the default."
)


def parse_config(
    argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None
) -> AgentConfig:
    """Read the configuration; by default from this process's arguments and environment.

    A value that cannot be read counts as the default where other settings are checked against it.

    Raises:
        ConfigError: everything that is wrong, together.
        SystemExit: `--help` or `--version` was asked for, and printed.
    """
    given, problems = _given_flags(sys.argv[1:] if argv is None else argv)
    texts = {**_given_variables(os.environ if environ is None else environ), **given}
    values, unreadable = _read(texts)
    problems += unreadable
    try:
        config = AgentConfig(**values)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return config


def _given_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        option.field_name: environ[option.env_name]
        for option in OPTIONS
        if option.env_name in environ and not _SERVICE_LINK.match(environ[option.env_name])
    }


def _given_flags(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the text of each known flag, and a problem for each other argument."""
    namespace, unknown = _parser().parse_known_args(argv)
    given: dict[str, Any] = vars(namespace)
    problems = [
        problem
        for flag in REFUSED_FLAGS
        for values in given.pop(flag.name, ())
        if (problem := flag.problem(values))
    ]
    return given, problems + _unknown_problems(unknown)


def _unknown_problems(arguments: Sequence[str]) -> list[str]:
    """One problem per unknown flag; a word without one is a problem only if no flag explains it."""
    flags = [argument for argument in arguments if argument.startswith("-")]
    known = [option.flag_name for option in OPTIONS]
    problems = []
    for argument in flags or arguments:
        near = difflib.get_close_matches(argument.partition("=")[0], known, n=1)
        advice = f"did you mean {near[0]}?" if near else "see --help for those it has"
        problems.append(f"{argument} is not a flag of this agent: {advice}")
    return problems


def _read(texts: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Turn texts into the values of fields; a problem for each that is missing or unreadable."""
    values: dict[str, Value] = {}
    problems = []
    for option in OPTIONS:
        text = texts.get(option.field_name)
        try:
            if text is not None:
                values[option.field_name] = option.read(text)
                continue
            if not option.required:
                continue
            problems.append(
                f"{option.label} is missing, but has no default: "
                f"give {option.flag_name} or set {option.env_name}"
            )
        except ValueError as error:
            problems.append(str(error))
        if option.required and option.flag.bounds:
            values[option.field_name] = option.flag.bounds.low  # so that the others are checked
    return values, problems


class _Parser(argparse.ArgumentParser):
    """Reports what it cannot parse like every other configuration problem."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lmcache-nodeagent",
        usage="%(prog)s --l1-size-gb GIB [flags]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--version", action="version", version=importlib.metadata.version("lmcache-kube")
    )
    for group in Group:
        section = parser.add_argument_group(group)
        for option in _of_group(group):
            _add_option(section, option)
    for flag in REFUSED_FLAGS:
        parser.add_argument(
            flag.name, dest=flag.name, nargs="*", action="append", help=argparse.SUPPRESS
        )
    for switch in ACCEPTED_SWITCHES:
        parser.add_argument(switch, action=_Ignore, nargs=0, help=argparse.SUPPRESS)
    return parser


class _Ignore(argparse.Action):
    """Takes a switch and remembers nothing."""

    def __call__(self, *_: object, **__: object) -> None:
        return


def _of_group(group: Group) -> Iterable[Option]:
    return (option for option in OPTIONS if option.flag.group is group)


def _add_option(section: argparse._ArgumentGroup, option: Option) -> None:
    """Add a flag whose text is kept as it is, to be read together with the variables."""
    text = _help_text(option).replace("%", "%%")
    if option.kind is bool:
        section.add_argument(
            option.flag_name, dest=option.field_name, action="store_const", const="true", help=text
        )
        section.add_argument(
            f"--no-{option.label}",
            dest=option.field_name,
            action="store_const",
            const="false",
            help=argparse.SUPPRESS,
        )
    else:
        section.add_argument(
            option.flag_name, dest=option.field_name, metavar=_metavar(option), help=text
        )


def _metavar(option: Option) -> str:
    if option.choices:
        return "{" + ",".join(option.choices) + "}"
    return option.flag.unit.upper() or ("TEXT" if option.kind is str else "NUMBER")


def _help_text(option: Option) -> str:
    notes = [] if option.choices else [option.bounds_words()]
    if option.required:
        notes.append("required")
    elif option.default not in ("", None):
        notes.append(f"default {value_text(option.default)}")
    shown = "; ".join(filter(None, notes))
    return f"{option.flag.about} [{shown}]" if shown else option.flag.about
