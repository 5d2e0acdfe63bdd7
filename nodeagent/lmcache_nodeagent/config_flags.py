"""How a configuration field says what it is: group, help, unit, bounds; and what follows from it.

`config.py` puts a `Flag` on each field. Everything people meet is derived from the field here:
the flag's and the variable's name, the reading of text, the bounds in words, the check.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Value = str | int | float | bool | None
"""What a field can hold; `None` only where the field is optional."""

ENV_PREFIX = "LMCACHE_KUBE_"
_METADATA_KEY = "flag"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class Group(StrEnum):
    """Headings of `--help` and of the reference, in their order."""

    MESSAGES = "Message port"
    HTTP = "HTTP"
    CACHE = "Cache"
    TRANSFERS = "Transfers and pools"
    LIVENESS = "Worker liveness"
    PLUGIN = "Device plugin"
    LINK = "Operator link"
    LOGS = "Identity and logs"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Both ends inclusive. With `zero_is_off`, 0 is allowed below `low` and switches off."""

    low: float
    high: float
    zero_is_off: bool = False


YEAR_SECONDS = 31_536_000
LIFETIME = Bounds(1, YEAR_SECONDS)
"""Of whatever ends after a time in seconds, and need not be switched off."""


@dataclass(frozen=True, slots=True)
class Flag:
    """What a field's type and default do not say.

    `bounds` are in `unit`. `refused` gives the reason for well-known values that this agent does
    not offer. A non-empty text must match all of `pattern`; `pattern_words` says it in words.
    """

    group: Group
    about: str
    unit: str = ""
    bounds: Bounds | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    pattern: str = ""
    pattern_words: str = ""

    @property
    def metadata(self) -> dict[str, Flag]:
        """The `metadata` of the dataclass field that this describes."""
        return {_METADATA_KEY: self}


@dataclass(frozen=True, slots=True)
class Option:
    """One field as people meet it. `choices` is empty unless the field's type is a `Literal`."""

    field_name: str
    kind: type[str | int | float | bool]
    choices: tuple[str, ...]
    required: bool
    default: Value
    flag: Flag

    @property
    def label(self) -> str:
        """Name in messages, `worker-reap-timeout-seconds`."""
        return self.field_name.replace("_", "-")

    @property
    def flag_name(self) -> str:
        """Name on the command line, `--worker-reap-timeout-seconds`."""
        return f"--{self.label}"

    @property
    def env_name(self) -> str:
        """Name in the environment, `LMCACHE_KUBE_WORKER_REAP_TIMEOUT_SECONDS`."""
        return ENV_PREFIX + self.field_name.upper()

    def bounds_words(self) -> str:
        """Say what values are allowed, or nothing if the type says it all."""
        bounds = self.flag.bounds
        if self.choices:
            return _either(self.choices)
        if bounds is None:
            return self.flag.pattern_words
        words = f"{value_text(bounds.low)} to {value_text(bounds.high)}"
        return f"0 or {words}" if bounds.zero_is_off else words

    def read(self, text: str) -> Value:
        """Turn the text of a flag or variable into this field's type.

        Raises:
            ValueError: the text is no such value; the message is the whole problem.
        """
        if self.kind is bool:
            return self._read_switch(text)
        try:
            return self.kind(text)
        except ValueError:
            noun = "a whole number" if self.kind is int else "a number"
            problem = f"{self.label} is {text!r}, but must be {noun}: write it as {self._example()}"
            raise ValueError(problem) from None

    def problem(self, value: Value) -> str | None:
        """Say what is wrong with a value of the right type: value, limit and fix; or `None`."""
        match value:
            case None | bool():
                return None
            case str():
                return self._text_problem(value)
            case _:
                return self._number_problem(value)

    def argument(self, value: str | float) -> str:
        """Write a value as one command-line argument."""
        if isinstance(value, bool):
            return self.flag_name if value else f"--no-{self.label}"
        return f"{self.flag_name}={value_text(value)}"

    def _read_switch(self, text: str) -> bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError(f"{self.label} is {text!r}, but must be true or false: write one of them")

    def _text_problem(self, value: str) -> str | None:
        if self.choices and value not in self.choices:
            fix = self.flag.refused.get(value, "choose one of these")
            return f"{self.label} is {value!r}, but must be {_either(self.choices)}: {fix}"
        if self.flag.pattern and value and not re.fullmatch(self.flag.pattern, value):
            words = self.flag.pattern_words
            return f"{self.label} is {value!r}, but must be {words}: change it to fit"
        if not value and self.default and not self.choices:
            return f"{self.label} is empty, but must have a value: leave it out for {self.default}"
        return None

    def _number_problem(self, value: float) -> str | None:
        if not math.isfinite(value):
            fix = f"write it as {self._example()}"
            return f"{self.label} is {value}, but must be a finite number: {fix}"
        bounds = self.flag.bounds
        if bounds is None or bounds.low <= value <= bounds.high:
            return None
        if bounds.zero_is_off and value == 0:
            return None
        shown, low, high = map(value_text, (value, bounds.low, bounds.high))
        if value > bounds.high:
            return f"{self.label} is {shown}, but must be {high} or less: lower it to {high}"
        off = "0 (off) or " if bounds.zero_is_off else ""
        return f"{self.label} is {shown}, but must be {off}{low} or more: raise it to {low}"

    def _example(self) -> str:
        bounds = self.flag.bounds
        low = bounds.low if bounds else 0
        return f"{self.flag_name} {value_text(low if self.default is None else self.default)}"


def options_of(config: type) -> tuple[Option, ...]:
    """Derive the options of a configuration dataclass, group by group, then as its fields stand."""
    hints, groups = typing.get_type_hints(config), tuple(Group)
    found = [_option(item, hints[item.name]) for item in dataclasses.fields(config)]
    return tuple(sorted(found, key=lambda option: groups.index(option.flag.group)))


def value_text(value: Value) -> str:
    """Write a value the way people write it on a command line: 30, not 30.0."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _option(item: dataclasses.Field[Value], hint: object) -> Option:
    required = item.default is dataclasses.MISSING
    arguments = typing.get_args(hint)
    is_literal = typing.get_origin(hint) is typing.Literal
    is_optional = isinstance(hint, types.UnionType)
    kind = str if is_literal else arguments[0] if is_optional else hint
    return Option(
        field_name=item.name,
        kind=typing.cast("type[str | int | float | bool]", kind),
        choices=arguments if is_literal else (),
        required=required,
        default=None if required else typing.cast("Value", item.default),
        flag=item.metadata[_METADATA_KEY],
    )


def _either(choices: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))
