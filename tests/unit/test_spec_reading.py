"""A stored spec becomes the agent's configuration and arguments; what cannot be is explained."""

from __future__ import annotations

import json
import re

import pytest

from lmcache_nodeagent.config import LIVE_OPTIONS, OPTIONS, AgentConfig
from lmcache_nodeagent.config_parsing import parse_config
from lmcache_operator.api.rules import OWNED_FLAGS
from lmcache_operator.errors import SpecError
from lmcache_operator.spec import agent_arguments, agent_config, read_spec, reaping_settings
from tests.cluster.specs.row import Judge, Row
from tests.cluster.specs.table import ROWS

UID = "0b0f7c9e-6c1f-4f4e-8a55-2f8f6e9f3c11"


def ids(row: Row) -> str:
    """Name a test by its row."""
    return row.label


@pytest.mark.parametrize("row", [row for row in ROWS if row.accepted], ids=ids)
def test_an_accepted_spec_gives_arguments_that_the_agent_takes(row: Row) -> None:
    """The agent reads from its command line the configuration that the operator meant."""
    spec = read_spec(row.spec)
    theirs = parse_config(agent_arguments(spec, uid=UID, name="kv"), {})
    meant = agent_config(spec, uid=UID, name="kv")
    for option in OPTIONS:
        if option.flag_name in OWNED_FLAGS and option not in LIVE_OPTIONS:
            assert getattr(theirs, option.field_name) == getattr(meant, option.field_name)


@pytest.mark.parametrize("row", [row for row in ROWS if row.accepted], ids=ids)
def test_live_settings_stand_in_the_file_and_nowhere_else(row: Row) -> None:
    """So that an edit of them touches no pod; the agent reads from the file what was meant."""
    spec = read_spec(row.spec)
    meant = agent_config(spec, uid=UID, name="kv")
    written = json.loads(json.dumps(reaping_settings(spec, uid=UID, name="kv")))
    names = {option.flag_name for option in LIVE_OPTIONS}
    assert written.keys() == {name.removeprefix("--") for name in names}
    for option in LIVE_OPTIONS:
        assert written[option.flag_name.removeprefix("--")] == getattr(meant, option.field_name)
    given = {argument.partition("=")[0] for argument in agent_arguments(spec, uid=UID, name="kv")}
    assert given.isdisjoint(names | {"--no-reap-idle-connected"})


@pytest.mark.parametrize("row", [row for row in ROWS if row.judge is Judge.AGENT], ids=ids)
def test_the_agent_refuses_the_figures_that_the_crd_refuses(row: Row) -> None:
    """Both name the same figures, each in its own words."""
    spec = read_spec(row.spec)
    with pytest.raises(SpecError) as caught:
        agent_config(spec, uid=UID, name="kv")
    if row.label.startswith("shared memory") or row.spec["cache"] != {"size": "1Gi"}:
        return  # quantities and per cent here, GiB, bytes and shares there
    said = set(re.findall(r"\d+", " ".join(caught.value.problems)))
    assert set(re.findall(r"\d+", row.sentence)) <= said


@pytest.mark.parametrize("row", [row for row in ROWS if row.judge is Judge.READER], ids=ids)
def test_a_spec_of_the_wrong_shape_is_explained(row: Row) -> None:
    """One stored under an older definition gives a condition, not a crash."""
    with pytest.raises(SpecError, match=r"^spec.*: correct it or leave it out$"):
        read_spec(row.spec)


def test_defaults_are_the_agents_own() -> None:
    """A flag that a field sets has the same default in both, but for what being a pod changes."""
    spec = read_spec({"cache": {"size": "1Gi"}})
    ours, theirs = agent_config(spec, uid=UID, name="kv"), AgentConfig(l1_size_gb=1)
    differing = {
        option.field_name
        for option in OPTIONS
        if getattr(ours, option.field_name) != getattr(theirs, option.field_name)
    }
    mounted = {"reaping_settings", "operator_link", "operator_token_file"}
    plugin = {
        "device_plugin_resource",
        "shm_name",
        "slots_folder",
        "slots_host_folder",
        "slot_shared_memory_bytes",
        "slot_shared_memory_host_folder",
    }
    assert differing == {
        "host",
        "http_host",
        "log_format",
        "supported_transfer_mode",
        *mounted,
        *plugin,
    }


def test_every_owned_flag_is_written_out() -> None:
    """No variable of the pod and no later default changes what the spec says."""
    spec = read_spec({"cache": {"size": "4G"}, "server": {"maxCPUWorkers": 1, "maxGPUWorkers": 3}})
    written = {argument.partition("=")[0] for argument in agent_arguments(spec, uid=UID, name="kv")}
    live = {option.flag_name for option in LIVE_OPTIONS}
    assert written == OWNED_FLAGS.keys() - live - {"--no-reap-idle-connected"}


def test_owned_flags_exist() -> None:
    """A flag that is renamed in the agent is renamed in the rule that guards it."""
    known = {option.flag_name for option in OPTIONS}
    assert OWNED_FLAGS.keys() - known == {"--no-reap-idle-connected"}


def test_a_size_is_exact_to_the_byte() -> None:
    """Through GiB and text and back nothing is lost."""
    for size, meant in [
        ("4G", 4_000_000_000),
        ("1288490188800m", 1_288_490_189),
        (2**49 + 1, 2**49 + 1),
    ]:
        spec = read_spec({"cache": {"size": size}})
        assert parse_config(agent_arguments(spec, uid=UID, name="kv"), {}).l1_size_bytes == meant


def test_memory_sharing_names_the_region_by_the_objects_uid() -> None:
    """Two servers on a node share /dev/shm and must not meet."""
    spec = read_spec({"cache": {"size": "1Gi"}, "transport": {"memorySharing": "HostShm"}})
    assert agent_config(spec, uid=UID, name="kv").shm_name == UID


@pytest.mark.parametrize(
    ("sharing", "inside"),
    [
        ("None", "/dev/shm/slots"),
        ("HostShm", f"/dev/shm/lmcache-kube-{UID}/slots"),
        ("HostIPC", f"/dev/shm/lmcache-kube-{UID}/slots"),
    ],
)
def test_the_device_plugin_offers_the_objects_name(sharing: str, inside: str) -> None:
    """Its folders are one and the same for the agent and the node, whatever they call them."""
    spec = read_spec({"cache": {"size": "1Gi"}, "transport": {"memorySharing": sharing}})
    config = agent_config(spec, uid=UID, name="kv")
    assert (config.device_plugin_resource, config.device_plugin_slots) == ("kv", 64)
    assert (config.slots_folder, config.slots_host_folder) == (
        "/run/lmcache-kube",
        f"/run/lmcache-kube/{UID}",
    )
    assert config.slot_shared_memory_bytes == 64 << 30
    assert config.slot_shared_memory_folder == inside
    assert config.slot_shared_memory_host_folder == f"/dev/shm/lmcache-kube-{UID}/slots"
    assert config.shm_name == UID


@pytest.mark.parametrize("plugin", [{"mode": "Disabled"}, {"sharedMemory": 0}])
def test_slots_that_share_no_memory(plugin: dict[str, object]) -> None:
    """The agent's region stays its own, and nothing is said of the memory of slots."""
    spec = read_spec({"cache": {"size": "1Gi"}, "transport": {"devicePlugin": plugin}})
    config = agent_config(spec, uid=UID, name="kv")
    assert (config.slot_shared_memory_bytes, config.shm_name) == (0, "")
    assert bool(config.device_plugin_resource) is ("mode" not in plugin)


def test_shared_memory_that_is_no_quantity() -> None:
    """As an earlier definition may have stored it: the field is named."""
    plugin = {"sharedMemory": "lots"}
    spec = read_spec({"cache": {"size": "1Gi"}, "transport": {"devicePlugin": plugin}})
    with pytest.raises(SpecError, match=r"^spec\.transport\.devicePlugin\.sharedMemory: 'lots'"):
        agent_config(spec, uid=UID, name="kv")


def test_further_arguments_come_last() -> None:
    """They are the user's, in their order."""
    extra = ["--session-ttl-seconds", "60"]
    spec = read_spec({"cache": {"size": "1Gi"}, "server": {"extraArgs": extra}})
    assert agent_arguments(spec, uid=UID, name="kv")[-2:] == extra
