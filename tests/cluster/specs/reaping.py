"""Specs about reaping: windows, their relations, and how people write durations."""

from __future__ import annotations

from tests.cluster.specs.row import agent, at_least, at_most, reader, yes

_YEAR = 31_536_000
_TYPE = 'must be of type integer: "{}"'

WINDOWS = (
    yes("the defaults", reaping={"reapTimeoutSeconds": 120, "registrationGraceSeconds": 3600}),
    yes("least timeout", reaping={"reapTimeoutSeconds": 30}),
    agent(
        "timeout of 29",
        "reapTimeoutSeconds is 29, but must be 0 (off) or 30 or more: raise it to 30",
        reaping={"reapTimeoutSeconds": 29, "heartbeatIntervalSeconds": 1},
    ),
    agent(
        "timeout of 1",
        "reapTimeoutSeconds is 1, but must be 0 (off) or 30 or more: raise it to 30",
        reaping={"reapTimeoutSeconds": 1},
    ),
    agent(
        "timeout below zero",
        at_least("reaping.reapTimeoutSeconds", 0),
        reaping={"reapTimeoutSeconds": -5},
    ),
    agent(
        "timeout of more than a year",
        at_most("reaping.reapTimeoutSeconds", _YEAR),
        reaping={"reapTimeoutSeconds": _YEAR + 1, "registrationGraceSeconds": _YEAR},
    ),
    yes(
        "timeout of a year",
        reaping={"reapTimeoutSeconds": _YEAR, "registrationGraceSeconds": _YEAR},
    ),
    yes("timeout off", reaping={"reapTimeoutSeconds": 0}),
    yes(
        "timeout off, no relation holds",
        reaping={
            "reapTimeoutSeconds": 0,
            "registrationGraceSeconds": 1,
            "heartbeatIntervalSeconds": 600,
            "hints": {"confirmSeconds": 5, "closeConfirmSeconds": 500},
        },
    ),
    agent(
        "timeout off, close confirmation too short all the same",
        at_least("reaping.hints.closeConfirmSeconds", 3),
        reaping={"reapTimeoutSeconds": 0, "hints": {"closeConfirmSeconds": 2}},
    ),
    yes("grace equal to the timeout", reaping={"registrationGraceSeconds": 120}),
    agent(
        "grace below the timeout",
        "registrationGraceSeconds is 119, but must be reapTimeoutSeconds (120) or more: "
        "raise the grace to 120 or lower the timeout",
        reaping={"registrationGraceSeconds": 119},
    ),
    agent(
        "timeout above the grace that is the default",
        "registrationGraceSeconds is 3600, but must be reapTimeoutSeconds (4000) or more",
        reaping={"reapTimeoutSeconds": 4000},
    ),
    agent(
        "no grace",
        at_least("reaping.registrationGraceSeconds", 1),
        reaping={"registrationGraceSeconds": 0},
    ),
    yes("timeout of three heartbeats", reaping={"heartbeatIntervalSeconds": 40}),
    agent(
        "heartbeat above a third of the timeout",
        "reapTimeoutSeconds is 120, but must be 3 x heartbeatIntervalSeconds (41) = 123 or more: "
        "raise the timeout to 123 or lower the interval to 40",
        reaping={"heartbeatIntervalSeconds": 41},
    ),
    agent(
        "least timeout, heartbeat of 11",
        "reapTimeoutSeconds is 30, but must be 3 x heartbeatIntervalSeconds (11) = 33 or more",
        reaping={"reapTimeoutSeconds": 30, "heartbeatIntervalSeconds": 11},
    ),
    agent(
        "no heartbeat",
        at_least("reaping.heartbeatIntervalSeconds", 1),
        reaping={"heartbeatIntervalSeconds": 0},
    ),
    yes("confirmation equal to the timeout", reaping={"hints": {"confirmSeconds": 120}}),
    agent(
        "confirmation above the timeout",
        "confirmSeconds is 121, but must be reapTimeoutSeconds (120) or less: lower it to 120",
        reaping={"hints": {"confirmSeconds": 121}},
    ),
    agent(
        "confirmation below the least",
        at_least("reaping.hints.confirmSeconds", 3),
        reaping={"hints": {"confirmSeconds": 2, "closeConfirmSeconds": 3}},
    ),
    yes("least confirmations", reaping={"hints": {"confirmSeconds": 3, "closeConfirmSeconds": 3}}),
    agent(
        "close confirmation below the least",
        at_least("reaping.hints.closeConfirmSeconds", 3),
        reaping={"hints": {"closeConfirmSeconds": 2}},
    ),
    yes("close confirmation equal to the other", reaping={"hints": {"closeConfirmSeconds": 15}}),
    agent(
        "close confirmation above the other",
        "closeConfirmSeconds is 16, but must be confirmSeconds (15) or less: lower it to 15, or "
        "raise confirmSeconds to 16",
        reaping={"hints": {"closeConfirmSeconds": 16}},
    ),
    agent(
        "confirmation below the close confirmation that is the default",
        "closeConfirmSeconds is 10, but must be confirmSeconds (5) or less: lower it to 5, or "
        "raise confirmSeconds to 10",
        reaping={"hints": {"confirmSeconds": 5}},
    ),
    yes("observe", reaping={"mode": "Observe", "reapIdleConnected": True}),
    reader(
        "mode in small letters",
        'supported values: "Enforce", "Observe"',
        reaping={"mode": "observe"},
    ),
    reader(
        "mode that YAML reads as no", 'must be of type string: "boolean"', reaping={"mode": False}
    ),
    yes("hints disabled", reaping={"hints": {"mode": "Disabled"}}),
    reader("unknown mode of hints", 'Unsupported value: "Off"', reaping={"hints": {"mode": "Off"}}),
    yes("restart on a stuck release", reaping={"stuckRelease": {"action": "RestartServer"}}),
    reader(
        "unknown action",
        'supported values: "Alert", "RestartServer"',
        reaping={"stuckRelease": {"action": "Reboot"}},
    ),
    reader(
        "switch as a word",
        'must be of type boolean: "string"',
        reaping={"reapIdleConnected": "yes"},
    ),
)

DURATIONS = (
    *(
        reader(
            f"timeout written {form!r}",
            _TYPE.format("string"),
            reaping={"reapTimeoutSeconds": form},
        )
        for form in ("120", "120s", "2m", "1h30m", "0", "-5s", "30d", "", "1e2s", "99999999h")
    ),
    reader("timeout of 120.5", _TYPE.format("number"), reaping={"reapTimeoutSeconds": 120.5}),
    reader(
        "grace written '1h'",
        _TYPE.format("string"),
        reaping={"registrationGraceSeconds": "1h"},
    ),
    reader(
        "heartbeat written '10s'",
        _TYPE.format("string"),
        reaping={"heartbeatIntervalSeconds": "10s"},
    ),
    reader(
        "confirmation written '15s'",
        _TYPE.format("string"),
        reaping={"hints": {"confirmSeconds": "15s"}},
    ),
)
