"""What a slot's container gets to see, as files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lmcache_nodeagent.config import AgentConfig
from lmcache_nodeagent.contexts.segments import SHM_DIRECTORY
from lmcache_nodeagent.device_plugin.folders import MountPoint, SlotFolders
from lmcache_nodeagent.errors import LayoutError
from lmcache_nodeagent.liveness.slots import NO_SLOT, SlotRun

LIMIT = 1 << 20
POOL = "lmcache-kube.l1.kv"


class Node:
    """Folders of an agent, its L1, and what stands for its bound sockets."""

    def __init__(self, path: Path, *, shared: bool = True, group: int = 0) -> None:
        self.slots, self.shared, self.pool = path / "agent/slots", path / "shm", path / POOL
        (path / "agent/sockets").mkdir(parents=True)
        for name in ("0", "1"):
            (path / "agent/sockets" / name).write_text(f"socket {name}")
        self.pool.write_text("L1")
        self.folders = SlotFolders(
            AgentConfig(
                l1_size_gb=1,
                device_plugin_resource="kv",
                device_plugin_slots=2,
                slots_folder=f"{path}/agent",
                slots_host_folder="/host/agent",
                slot_shared_memory_bytes=LIMIT if shared else 0,
                slot_shared_memory_folder=str(self.shared),
                slot_shared_memory_host_folder="/host/shm",
                slot_shared_memory_group=group,
            )
        )
        self.folders.prepare()
        self.folders.offer_pool(self.pool)

    def leave(self, name: str, nbytes: int = 4096) -> Path:
        """A file as a worker makes it."""
        path = self.shared / "0" / name
        path.write_bytes(b"x" * nbytes)
        return path


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """With shared memory for everybody."""
    return Node(tmp_path)


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    """Names of the files in a folder."""
    return [path.name for path in folder.iterdir()]


def test_each_slot_has_its_socket_and_l1(node: Node) -> None:
    """Under the names that are the same in every container."""
    assert (node.slots / "1/agent.sock").read_text() == "socket 1"
    assert (node.shared / "1" / POOL).samefile(node.pool)
    assert (mode(node.slots / "0"), mode(node.shared / "0")) == (0o755, 0o1777)
    assert mode(node.pool) == 0o666


def test_shared_memory_of_a_group(tmp_path: Path) -> None:
    """Nobody else may write there."""
    node = Node(tmp_path, group=os.getgid() or 12)
    assert (mode(node.shared / "0"), mode(node.pool)) == (0o3770, 0o660)
    node.folders.renew("0")
    assert mode(node.shared / "0") == 0o3770
    assert (node.shared / "0").stat().st_gid == (os.getgid() or 12)


def test_a_container_is_told_where_the_host_has_them(node: Node) -> None:
    """The socket's folder it may only read."""
    assert node.folders.mounts("1") == [
        MountPoint("/run/lmcache-kube", "/host/agent/slots/1", read_only=True),
        MountPoint("/dev/shm", "/host/shm/1", read_only=False),
    ]
    assert node.folders.environment("1") == {
        "LMCACHE_KUBE_URL": "ipc:///run/lmcache-kube/agent.sock",
        "LMCACHE_KUBE_SLOT": "1",
    }


def test_without_shared_memory(tmp_path: Path) -> None:
    """The container keeps its own /dev/shm, and the agent looks in its own."""
    node = Node(tmp_path, shared=False)
    assert [mount.container_path for mount in node.folders.mounts("0")] == ["/run/lmcache-kube"]
    node.folders.renew("0")
    node.folders.withdraw_pool()
    assert node.folders.remove_left_overs("0") == 0
    assert node.folders.segments_of(SlotRun("0", 1)) == SHM_DIRECTORY
    assert not node.shared.exists()


def test_the_next_container_gets_folders_that_nobody_has_seen(node: Node) -> None:
    """What the one before still sees is empty."""
    node.leave("segment")
    before = [os.open(folder / "0", os.O_PATH) for folder in (node.slots, node.shared)]
    node.folders.renew("0")
    assert [names(Path(f"/proc/self/fd/{fd}")) for fd in before] == [[], []]
    assert (node.slots / "0/agent.sock").read_text() == "socket 0"
    assert names(node.shared / "0") == [POOL]
    for descriptor in before:
        os.close(descriptor)
    assert {path.name for path in node.slots.iterdir()} == {"0", "1"}


def test_a_container_s_left_overs_do_not_lead_elsewhere(node: Node, tmp_path: Path) -> None:
    """Links are removed, and not what they lead to; so are folders."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (node.shared / "0/link").symlink_to(kept)
    (node.shared / "0/folder").mkdir()
    (node.shared / "0/folder/file").touch()
    assert node.folders.remove_left_overs("0") == 2
    assert names(node.shared / "0") == [POOL]
    assert (kept / "file").exists()


def test_an_agent_that_starts_anew_uses_the_folders_that_are_there(node: Node) -> None:
    """Running containers see those; what they have in them stays, but for the dead agent's L1."""
    seen = (node.slots / "0").stat().st_ino
    segment = node.leave("segment")
    node.folders.prepare()
    assert (node.slots / "0").stat().st_ino == seen
    assert segment.exists()
    assert not (node.shared / "0" / POOL).exists()
    node.folders.offer_pool(node.pool)
    assert (node.shared / "0" / POOL).exists()
    node.folders.withdraw_pool()
    assert not (node.shared / "0" / POOL).exists()
    node.folders.renew("0")
    assert names(node.shared / "0") == []


def test_a_container_may_have_only_so_much(node: Node) -> None:
    """L1 does not count; more is refused with what to do."""
    node.leave("one", LIMIT // 2)
    assert node.folders.segments_of(SlotRun("0", 1)) == node.shared / "0"
    assert node.folders.segments_of(NO_SLOT) == SHM_DIRECTORY
    node.leave("two", LIMIT)
    with pytest.raises(LayoutError, match=r"slot 0 has .* may have 1048576: make the worker's"):
        node.folders.segments_of(SlotRun("0", 1))


def test_holes_count(node: Node) -> None:
    """The agent would fill them."""
    os.truncate(node.leave("sparse"), LIMIT + 1)
    with pytest.raises(LayoutError, match=f"has {LIMIT + 1} bytes in its shared memory"):
        node.folders.segments_of(SlotRun("0", 1))


def test_nothing_is_hidden(node: Node, tmp_path: Path) -> None:
    """Not in folders, nor behind a name like the agent's; links lead nowhere."""
    (node.shared / "0/folder").mkdir()
    node.leave("folder/inner", LIMIT + 1)
    assert node.folders.use_of("0").excess
    node.folders.renew("0")
    node.leave(f"{POOL}.mine", LIMIT + 1)
    assert node.folders.use_of("0").excess
    node.folders.renew("0")
    (node.shared / "0/nowhere").symlink_to("missing")
    (tmp_path / "large").write_bytes(bytes(LIMIT + 1))
    (node.shared / "0/large").symlink_to(tmp_path / "large")
    use = node.folders.use_of("0")
    assert (use.files, use.excess) == (2, "")


def test_looking_has_an_end(node: Node) -> None:
    """Many files, or deep folders, are too much by themselves."""
    (node.shared / "0/1/2/3/4/5/6/7").mkdir(parents=True)
    assert node.folders.use_of("0").excess == ""
    (node.shared / "0/1/2/3/4/5/6/7/8").mkdir()
    assert "folders 8 deep" in node.folders.use_of("0").excess
    node.folders.renew("0")
    for number in range(4097):
        (node.shared / "0" / str(number)).touch()
    assert "more than 4096 files" in node.folders.use_of("0").excess


def test_there_is_nothing_to_measure_without_shared_memory(tmp_path: Path) -> None:
    """The container's own is none of our business."""
    assert Node(tmp_path, shared=False).folders.use_of("0").excess == ""
