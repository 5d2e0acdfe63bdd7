"""An instance belongs to a pod only if no other pod could be meant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmcache_nodeagent.operator_link.messages import SlotPod
from lmcache_operator.workers.mapping import Mapping, Registration, Unmapped, map_instance
from lmcache_operator.workers.pod import Pod, read_pod
from tests.fakes.pods import Json, container_status, pod, running, terminated

BEGAN = 1000.0
RUNS = container_status("engine", running(BEGAN), run="containerd://a")


def pods(*documents: Json) -> list[Pod]:
    """Read pods."""
    return [read_pod(document) for document in documents]


def origin(
    peer: str = "10.1.0.1", registered_at: float = 1010.0, claimed: str = ""
) -> Registration:
    """Make a registration on node n1."""
    return Registration("n1", peer, registered_at, claimed)


class TestByAddress:
    """Exactly one running pod of the node owns it."""

    def test_one_owner(self) -> None:
        """Its only container, and the run that goes on."""
        assert map_instance(origin(), pods(pod(RUNS))) == Mapping(
            "uid-1", "engine", "containerd://a"
        )

    def test_a_finished_pod_still_shows_the_address(self) -> None:
        """The new pod is meant, whatever becomes of the old one."""
        old = pod(container_status("engine", terminated(900, 950)), phase="Succeeded", uid="uid-0")
        assert map_instance(origin(), pods(old, pod(RUNS))) == Mapping(
            "uid-1", "engine", "containerd://a"
        )

    def test_an_address_is_used_again_before_the_old_pods_end_is_written(self) -> None:
        """Both look as if they ran: neither is meant."""
        old = pod(container_status("engine", running(900)), uid="uid-0")
        assert map_instance(origin(), pods(old, pod(RUNS))) is Unmapped.SEVERAL

    def test_an_address_is_used_again_and_the_instance_is_older(self) -> None:
        """Only the old pod ran when it registered, also if it has ended since."""
        old = container_status("engine", running(900), run="containerd://old")
        found = map_instance(origin(registered_at=950), pods(pod(old, uid="uid-0"), pod(RUNS)))
        assert found == Mapping("uid-0", "engine", "containerd://old")
        ended = pod(container_status("engine", terminated(900, 960)), phase="Failed", uid="uid-0")
        found = map_instance(origin(registered_at=950), pods(ended, pod(RUNS)))
        assert found == Mapping("uid-0", "engine", "")

    @pytest.mark.parametrize("phase", ["Pending", "Unknown"])
    def test_another_pod_has_the_address_and_nothing_is_known_of_its_start(
        self, phase: str
    ) -> None:
        """It may be the owner; unless its kubelet took it over only later."""
        newer = pod(phase=phase, uid="uid-2")
        assert map_instance(origin(), pods(pod(RUNS), newer)) is Unmapped.SEVERAL
        later = pod(phase=phase, uid="uid-2", startTime="1970-01-01T00:16:55Z")
        found = map_instance(origin(), pods(pod(RUNS), later))
        assert found == Mapping("uid-1", "engine", "containerd://a")

    def test_an_evicted_pod_is_not_in_the_way(self) -> None:
        """It keeps its address for days, and nothing is said of when it ran."""
        evicted = pod(phase="Failed", reason="Evicted", uid="uid-0")
        assert isinstance(map_instance(origin(), pods(evicted, pod(RUNS))), Mapping)
        assert map_instance(origin(), pods(evicted)) is Unmapped.NOBODY

    def test_a_running_pod_of_which_no_start_is_reported(self) -> None:
        """The only one it can be."""
        bare = pod({"name": "engine", "containerID": "containerd://a"})
        assert map_instance(origin(), pods(bare)) == Mapping("uid-1", "engine", "")

    def test_a_pod_that_restarted_often(self) -> None:
        """Its first runs are forgotten; when it was taken over is not."""
        restarted = pod(
            container_status("engine", running(1200), last=terminated(1100, 1150)),
            startTime="1970-01-01T00:16:00Z",
        )
        assert map_instance(origin(registered_at=1010), pods(restarted)) == Mapping(
            "uid-1", "engine", ""
        )

    @pytest.mark.parametrize("peer", ["", "not an address", "10.1.0.1:5555"])
    def test_what_is_no_address_has_no_owner(self, peer: str) -> None:
        """Whatever an agent says."""
        assert map_instance(origin(peer), pods(pod(RUNS))) is Unmapped.NO_ADDRESS
        claimed = origin(peer, claimed="uid-1")
        assert map_instance(claimed, pods(pod(RUNS))) is Unmapped.CLAIM_DISPUTED

    def test_host_network(self) -> None:
        """Pods that share their node's address cannot be told apart by it, even one alone."""
        one = pod(RUNS, host_network=True, addresses=("10.0.0.1",))
        two = pod(RUNS, host_network=True, addresses=("10.0.0.1",), uid="uid-2")
        assert map_instance(origin("10.0.0.1"), pods(one, two)) is Unmapped.NOBODY
        assert map_instance(origin("10.0.0.1"), pods(one)) is Unmapped.NOBODY

    def test_a_pod_without_an_address_yet(self) -> None:
        """It is nobody's owner."""
        assert map_instance(origin(), pods(pod(addresses=(), phase="Pending"))) is Unmapped.NOBODY

    @pytest.mark.parametrize("peer", ["fd00::1", "FD00:0::1", "::ffff:10.1.0.1"])
    def test_every_address_of_a_pod_counts(self, peer: str) -> None:
        """Of either family, in any notation."""
        dual = pod(RUNS, addresses=("10.1.0.1", "fd00::1"))
        assert isinstance(map_instance(origin(peer), pods(dual)), Mapping)

    def test_a_pod_of_another_node(self) -> None:
        """Addresses of other nodes' pods mean nothing here."""
        assert map_instance(origin(), pods(pod(RUNS, node="n2"))) is Unmapped.NOBODY

    def test_an_instance_that_is_older_than_the_pod(self) -> None:
        """Its pod is another one, gone by now."""
        found = map_instance(origin(registered_at=990), pods(pod(RUNS)))
        assert found is Unmapped.REGISTERED_EARLIER

    def test_an_earlier_run_of_the_same_pod(self) -> None:
        """The pod is meant, and not the present run."""
        restarted = container_status("engine", running(1200), last=terminated(1000, 1100))
        found = map_instance(origin(), pods(pod(restarted)))
        assert found == Mapping("uid-1", "engine", "")

    def test_a_unix_socket_has_no_address(self) -> None:
        """Then silence and the process itself have to tell."""
        assert map_instance(origin(peer=""), pods(pod(RUNS))) is Unmapped.NO_ADDRESS


class TestBySlot:
    """The kubelet itself says whose it is; nothing else is looked at."""

    whose = SlotPod(namespace="default", name="pod-uid-2", container="engine")

    def over_slot(self, owner: SlotPod | None, **changes: float | str) -> Registration:
        """Make a registration that came over slot 5."""
        came = Registration("n1", "", 1010.0, slot="5", slot_pod=owner)
        return replace(came, **changes)  # type: ignore[arg-type]

    def test_the_kubelet_names_the_pod(self) -> None:
        """Among others, without an address, and also if all of them share the node's."""
        one = pod(RUNS, host_network=True, addresses=("10.0.0.1",))
        two = pod(RUNS, host_network=True, addresses=("10.0.0.1",), uid="uid-2")
        found = map_instance(self.over_slot(self.whose), pods(one, two))
        assert found == Mapping("uid-2", "engine", "containerd://a")

    def test_it_comes_before_address_and_claim(self) -> None:
        """Whatever the worker says of itself, and wherever it seems to come from."""
        other, its = pod(RUNS), pod(RUNS, uid="uid-2", addresses=("10.1.0.2",))
        lies = self.over_slot(self.whose, peer="10.1.0.1", claimed_uid="uid-1")
        assert map_instance(lies, pods(other, its)) == Mapping("uid-2", "engine", "containerd://a")

    def test_the_container_is_known_too(self) -> None:
        """Of several, whatever the spec names."""
        several = pod(
            RUNS,
            container_status("proxy", running(BEGAN)),
            containers=("engine", "proxy"),
            uid="uid-2",
        )
        registration = self.over_slot(self.whose)
        found = map_instance(registration, pods(several), container_name="proxy")
        assert found == Mapping("uid-2", "engine", "containerd://a")

    def test_the_kubelet_has_not_said_it_yet(self) -> None:
        """Then nobody knows, and no address is taken instead."""
        came = self.over_slot(None, peer="10.1.0.1")
        assert map_instance(came, pods(pod(RUNS))) is Unmapped.SLOT_UNLISTED

    def test_a_pod_that_is_no_worker(self) -> None:
        """It lacks the label, or is in another namespace; or only just begins."""
        came = self.over_slot(self.whose)
        assert map_instance(came, pods(pod(RUNS))) is Unmapped.SLOT_POD_UNKNOWN
        elsewhere = replace_namespace(self.whose, "other")
        its = pod(RUNS, uid="uid-2")
        assert map_instance(self.over_slot(elsewhere), pods(its)) is Unmapped.SLOT_POD_UNKNOWN
        pending = pods(pod(phase="Pending", uid="uid-2"))
        assert map_instance(came, pending) is Unmapped.SLOT_POD_UNKNOWN

    def test_a_later_pod_of_the_same_name(self) -> None:
        """A StatefulSet's: the one that had the slot is gone, and this one is another."""
        later = pod(container_status("engine", running(1020)), uid="uid-2")
        found = map_instance(self.over_slot(self.whose), pods(later))
        assert found is Unmapped.REGISTERED_EARLIER


def replace_namespace(owner: SlotPod, namespace: str) -> SlotPod:
    """Return a pod of the same name elsewhere."""
    return SlotPod(namespace=namespace, name=owner.name, container=owner.container)


class TestByClaim:
    """The worker sent its pod's uid."""

    def test_confirmed_by_the_address(self) -> None:
        """Also among hostNetwork pods that share it."""
        one = pod(RUNS, host_network=True, addresses=("10.0.0.1",))
        two = pod(RUNS, host_network=True, addresses=("10.0.0.1",), uid="uid-2")
        found = map_instance(origin("10.0.0.1", claimed="uid-2"), pods(one, two))
        assert found == Mapping("uid-2", "engine", "containerd://a")

    def test_of_another_pods_address(self) -> None:
        """Whoever claims a stranger's uid gets none, not even its own."""
        other = pod(RUNS, uid="uid-2", addresses=("10.1.0.2",))
        found = map_instance(origin(claimed="uid-2"), pods(pod(RUNS), other))
        assert found is Unmapped.CLAIM_DISPUTED

    def test_unknown(self) -> None:
        """No pod of the selection on this node."""
        assert map_instance(origin(claimed="uid-9"), pods(pod(RUNS))) is Unmapped.CLAIM_UNKNOWN


class TestContainer:
    """Which container, where there are several."""

    several = pod(RUNS, container_status("proxy", running(BEGAN)), containers=("engine", "proxy"))

    def test_none_is_named(self) -> None:
        """The pod is known, the container is not."""
        assert map_instance(origin(), pods(self.several)) == Mapping("uid-1", None, "")

    def test_it_is_named(self) -> None:
        """By `spec.workers.containerName`."""
        found = map_instance(origin(), pods(self.several), container_name="engine")
        assert found == Mapping("uid-1", "engine", "containerd://a")

    def test_the_name_is_not_of_this_pod(self) -> None:
        """Then only the pod is known."""
        found = map_instance(origin(), pods(pod(RUNS)), container_name="other")
        assert found == Mapping("uid-1", None, "")
