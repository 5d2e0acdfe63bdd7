"""What kubelet and operator may say about the workers of a `World`: true, but late or twice.

The operator's view may be stale: it may take a registration for one of the container's run before,
or of the pod that had the address before. Hints may come at any time: a pod can be deleted from
the API while its processes run on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from lmcache_nodeagent.liveness.operator_word import Outcome
from lmcache_nodeagent.liveness.testimony import OperatorEvidence, PodRun
from tests.fakes.liveness_processes import Worker
from tests.fakes.liveness_world import World

LATE_REGISTRATION_SECONDS = 2.0
"""As the operator has it: a registration this much after an end is of another run."""


@dataclass
class Kubelet:
    """Both of them at once."""

    world: World
    said: list[OperatorEvidence] = field(default_factory=list)
    numbers: count[int] = field(default_factory=lambda: count(1))

    def map(self, worker: Worker) -> None:
        """Say where a worker runs."""
        self._map_to(worker, worker)

    def _map_to(self, worker: Worker, run: Worker) -> None:
        assert worker.entry is not None
        pod = PodRun("default", run.address, f"uid-{run.address}", run.container)
        self.world.word.take_mapping(worker.instance_id, worker.entry.registered.serial, pod)

    def prove(self, worker: Worker, of: Worker | None = None) -> Outcome:
        """Report the end of a run, `of` the worker itself or one that it is taken for."""
        run = of or worker
        assert worker.entry is not None
        assert not run.alive
        self._map_to(worker, run)
        outcome = self._say(worker, run, "container_terminated", proof=True)
        if run is worker and outcome in {Outcome.APPLIED, Outcome.CONTRADICTED}:
            worker.proven_at = worker.proven_at or self.world.now()
        return outcome

    def hint(self, worker: Worker) -> Outcome:
        """Say that a worker's pod is gone."""
        self.map(worker)
        return self._say(worker, worker, "pod_gone", proof=False)

    def may_take_for(self, worker: Worker) -> list[Worker]:
        """The ended runs that a stale view takes a registration for."""
        registered = worker.entry.registered if worker.entry else None
        return [
            run
            for run in self.world.ended
            if registered is not None
            and run is not worker
            and run.container == worker.container
            and registered.at <= run.finished_at + LATE_REGISTRATION_SECONDS
        ]

    def repeat(self, evidence: OperatorEvidence) -> Outcome:
        """Say something again, at any later time."""
        return self.world.word.take_evidence(evidence)

    def _say(self, worker: Worker, run: Worker, trigger: str, *, proof: bool) -> Outcome:
        assert worker.entry is not None
        made = OperatorEvidence(
            id=str(next(self.numbers)),
            boot_id="boot",
            instance_id=worker.instance_id,
            registration=worker.entry.registered.serial,
            pod_uid=f"uid-{run.address}",
            container=run.container,
            trigger=trigger,
            proof=proof,
            finished_at=run.finished_at if proof else None,
        )
        self.said.append(made)
        return self.world.word.take_evidence(made)
