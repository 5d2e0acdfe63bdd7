"""The programs run with as little as the manifests say, from an image that holds little else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.kube.worker_pods import ServedNamespace

BUILD_TOOLS = ("pip", "setuptools", "hatchling", "uv")

pytestmark = pytest.mark.timeout(600)


def facts(process_id: int) -> dict[str, str]:
    """Return what the kernel says of a process."""
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_neither_program_has_any_power(served: ServedNamespace) -> None:
    """No root, no capability, no way to gain any, system calls filtered, nothing to write to."""
    for process_id in (served.agent_process_id(), served.operator_process_id()):
        found = facts(process_id)
        assert set(found["Uid"].split()) == {"65532"}
        assert set(found["Gid"].split()) == {"65532"}
        sets = {found[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
        assert set(map(int, sets)) == {0}
        assert found["NoNewPrivs"] == "1"
        assert found["Seccomp"] == "2"  # a filter
        mounts = Path(f"/proc/{process_id}/mounts").read_text().splitlines()
        (options,) = [line.split()[3] for line in mounts if line.split()[1] == "/"]
        assert "ro" in options.split(",")


def test_the_image_holds_no_build_tools(served: ServedNamespace) -> None:
    """They stay in the stage that builds."""
    asked = f"import importlib.util as u; print([m for m in {BUILD_TOOLS} if u.find_spec(m)])"
    pod = served.agent_pod()["metadata"]["name"]
    words = ("exec", "-n", served.name, pod, "--", "python3", "-c", asked)
    assert served.cluster.kubectl(*words).strip() == "[]"


@pytest.mark.parametrize("program", ["lmcache-nodeagent", "lmcache-operator"])
def test_the_image_has_both_programs(served: ServedNamespace, program: str) -> None:
    """Under their names, with all that they import."""
    pod = served.agent_pod()["metadata"]["name"]
    words = ("exec", "-n", served.name, pod, "--", program, "--help")
    assert program in served.cluster.kubectl(*words)
