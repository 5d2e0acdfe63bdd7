"""The reaping settings in force: the flags, and over them a file that may change at any time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NoReturn

from lmcache_nodeagent.config import LIVE_OPTIONS, AgentConfig, ConfigError
from lmcache_nodeagent.config_flags import value_text
from lmcache_nodeagent.events import ReapingSettingsChanged, ReapingSettingsRefused
from lmcache_nodeagent.liveness.windows import LivenessSettings

if TYPE_CHECKING:
    from lmcache_nodeagent.config_flags import Option, Value
    from lmcache_nodeagent.events import Publish

CHECK_SECONDS = 2.0
"""A mounted ConfigMap follows an edit within a minute and a half; this adds little to that."""

_MAX_BYTES = 64 << 10
_OPTIONS: Mapping[str, Option] = {option.label: option for option in LIVE_OPTIONS}


class LiveSettings:
    """Owns the settings in force. Threads: `run` and `check` on `settings`, the rest any.

    Readers see the old settings or the new ones as a whole. A file that cannot be used changes
    nothing; without a file the flags hold.
    """

    def __init__(self, flags: AgentConfig, on_change: Callable[[], None], publish: Publish) -> None:
        self._flags = flags
        self._path = Path(flags.reaping_settings) if flags.reaping_settings else None
        self._on_change = on_change
        self._publish = publish
        self._stopping = Event()
        self._seen: bytes | str | None = None  # content, or why there is none, at the last check
        self._config = flags  # replaced as a whole
        self._settings = liveness_settings(flags)
        self._problem = ""

    def __call__(self) -> LivenessSettings:
        """Return the settings in force."""
        return self._settings

    @property
    def config(self) -> AgentConfig:
        """The configuration with the settings in force."""
        return self._config

    @property
    def problem(self) -> str:
        """Why the newest file is not in force; empty if it is, or if there is none."""
        return self._problem

    def run(self) -> None:
        """Look at the file again and again until stopped."""
        while not self._stopping.wait(CHECK_SECONDS):
            self.check()

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stopping.set()

    def check(self) -> None:
        """Look at the file, and put what it says into force if it has changed."""
        if self._path is not None:
            self.take(_content(self._path))

    def take(self, content: bytes | str | None) -> None:
        """Put what a file has into force, if it is new: a text says why it cannot be read."""
        if content == self._seen:
            return
        self._seen = content
        try:
            config = _merged(self._flags, content)
        except ConfigError as error:
            self._refuse("; ".join(error.problems))
        else:
            self._put_into_force(config)

    def _refuse(self, problem: str) -> None:
        if problem == self._problem:
            return
        self._problem = problem
        self._publish(ReapingSettingsRefused(problem))
        self._on_change()

    def _put_into_force(self, config: AgentConfig) -> None:
        changed = _differences(self._config, config)
        had_problem, self._problem = bool(self._problem), ""
        self._config, self._settings = config, liveness_settings(config)
        if changed:
            self._publish(ReapingSettingsChanged(changed))
        if changed or had_problem:
            self._on_change()


def liveness_settings(config: AgentConfig) -> LivenessSettings:
    """Take what the policy needs out of the configuration."""
    return LivenessSettings(
        reap_timeout_seconds=config.worker_reap_timeout_seconds,
        registration_grace_seconds=config.worker_registration_grace_seconds,
        heartbeat_interval_seconds=config.worker_heartbeat_interval_seconds,
        hint_confirm_seconds=config.hint_confirm_seconds,
        close_confirm_seconds=config.close_confirm_seconds,
        enforce=config.reap_mode == "enforce",
        reap_idle_connected=config.reap_idle_connected,
        operator_word=config.hints == "enforce",
        restart_when_stuck=config.stuck_release == "restart",
    )


def _content(path: Path) -> bytes | str | None:
    """Return what the file has, the problem in words, or `None` if there is no file."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"it cannot be read ({error.strerror or error}): let the agent's user read it"
    if len(content) > _MAX_BYTES:
        return f"it is larger than {_MAX_BYTES} bytes: keep to the settings"
    return content


def _merged(flags: AgentConfig, content: bytes | str | None) -> AgentConfig:
    """Put a file's settings over the flags.

    Raises:
        ConfigError: everything that is wrong with the file.
    """
    if content is None:
        return flags
    if isinstance(content, str):
        raise ConfigError([content])
    values, problems = _values(_document(content))
    try:
        merged = replace(flags, **values)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return merged


def _document(content: bytes) -> Mapping[str, object]:
    try:
        document = json.loads(
            content, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"it is no JSON ({error}): write an object of settings"]) from None
    if not isinstance(document, dict):
        raise ConfigError(['it is JSON but no object: write {"reap-mode": "enforce"}'])
    return document


def _without_duplicates(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _values(document: Mapping[str, object]) -> tuple[dict[str, Any], list[str]]:
    """Read the settings by field name, and a problem for each that cannot be read."""
    values: dict[str, Any] = {}
    problems = []
    for name, given in document.items():
        option = _OPTIONS.get(name)
        if option is None:
            known = ", ".join(_OPTIONS)
            shown = json.dumps(name)[:80]
            problems.append(f"{shown} cannot be set while the agent runs: it may have {known}")
            continue
        try:
            values[option.field_name] = _value(option, given)
        except (TypeError, OverflowError):
            words = {bool: "true or false", str: "text"}.get(option.kind, "a number")
            problems.append(f"{name} is {json.dumps(given)[:80]}, but must be {words}")
    return values, problems


def _value(option: Option, given: object) -> Value:
    """Take a JSON value for a field; numbers are no text and text is no number.

    Raises:
        TypeError: it is of another type.
        OverflowError: a number beyond what can be computed with.
    """
    if option.kind is bool and isinstance(given, bool):
        return given
    if option.kind is str and isinstance(given, str):
        return given
    if option.kind is float and isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    raise TypeError


def _differences(old: AgentConfig, new: AgentConfig) -> tuple[str, ...]:
    pairs = (
        (option.label, getattr(old, option.field_name), getattr(new, option.field_name))
        for option in LIVE_OPTIONS
    )
    return tuple(
        f"{label}: {value_text(before)} -> {value_text(after)}"
        for label, before, after in pairs
        if before != after
    )
