"""Beyond the table: any windows and any text for a size are judged alike by CRD and agent."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmcache_operator.api.crd import PLURAL
from lmcache_operator.errors import SpecError
from lmcache_operator.spec import agent_config, read_spec
from tests.cluster.api import Api
from tests.cluster.specs.row import Row

UID = "0b0f7c9e-6c1f-4f4e-8a55-2f8f6e9f3c11"
EXAMPLES = 150  # some milliseconds each

# Around the bounds and the relations, where a difference would be.
seconds = st.one_of(
    st.sampled_from([0, 1, 2, 3, 4, 9, 10, 11, 29, 30, 31, 33, 90, 120, 3600]),
    st.integers(-1, 130),
)
quantities = st.one_of(
    st.from_regex(
        r"[+-]?[0-9]{0,8}\.?[0-9]{0,3}([KMGTPE]i?|[numk]|[eE][+-]?[0-9]{1,2})?", fullmatch=True
    ),
    st.text("0123456789.+-eEKMGTPinumk \n", max_size=8),
)


def judged_alike(kind: str, api: Api, spec: dict[str, Any]) -> None:
    """Give a spec to both; each has the other's verdict."""
    path = f"{kind}/namespaces/default/{PLURAL}?fieldValidation=Strict&dryRun=All"
    answer = api.request("POST", path, Row("", spec).document)
    assert answer.status in {HTTPStatus.CREATED, HTTPStatus.UNPROCESSABLE_ENTITY}
    assert answer.ok == (not (problems := _problems(spec))), (answer.message, problems)


def _problems(spec: dict[str, Any]) -> tuple[str, ...]:
    try:
        agent_config(read_spec(spec), uid=UID, name="kv")
    except SpecError as error:
        return error.problems
    return ()


@settings(max_examples=EXAMPLES, deadline=None)
@given(seconds, seconds, seconds, seconds, seconds)
def test_windows(
    kind: str, api: Api, timeout: int, grace: int, interval: int, confirm: int, close: int
) -> None:
    """Five numbers, their bounds and their four relations."""
    hints = {"confirmSeconds": confirm, "closeConfirmSeconds": close}
    reaping = {
        "reapTimeoutSeconds": timeout,
        "registrationGraceSeconds": grace,
        "heartbeatIntervalSeconds": interval,
        "hints": hints,
    }
    judged_alike(kind, api, {"cache": {"size": "1Gi"}, "reaping": reaping})


@settings(max_examples=EXAMPLES, deadline=None)
@given(quantities)
@example("1.Gi")
@example("+.5Gi")
@example("1e1.5")
@example("1e400")
@example("1e-400")
@example("9223372036854775808")
@example("0.001Gi")
@example("1073741.824k")
@example("1Gi\n")
def test_sizes(kind: str, api: Api, size: str) -> None:
    """The API server's quantities and ours."""
    judged_alike(kind, api, {"cache": {"size": size}})
