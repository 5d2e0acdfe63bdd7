"""What holds in every world: the living are never reaped, the dead go in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcache_nodeagent.liveness.policy import PROOFS
from lmcache_nodeagent.liveness.windows import hint_window_seconds, silence_window_seconds
from tests.fakes.liveness_parts import FakeEntry
from tests.fakes.liveness_processes import Pipe, Worker

if TYPE_CHECKING:
    from tests.fakes.liveness_world import World

ROUNDING_SECONDS = 1e-6  # 1030.1 - 1000.1 is less than 30
GRANULARITY_SECONDS = 0.5
"""A scan comes with the deadline; the router may need to be asked again."""


class Truth:
    """Compares what the agent did with what is so."""

    def __init__(self, world: World) -> None:
        self._world = world

    def check_reap(self, worker: Worker) -> None:
        """Only the dead are reaped, and those that were silent for their whole window."""
        assert self._world.settings.reaps, "reaped although nothing may be"
        assert worker.entry is not None
        if worker.alive:
            assert worker.entry.has_liveness_signal, f"idle and alive, but reaped: {worker}"
            silent = self._world.now() - worker.last_sent
            window = silence_window_seconds(worker.entry, self._world.settings)
            if (reason := self._reason(worker)) == "pod_hint":
                window = hint_window_seconds(worker.entry, self._world.settings)
                told_at = min(hint.received_at for hint in worker.entry.hints)
                assert self._world.now() - told_at >= window - ROUNDING_SECONDS
            assert reason not in PROOFS, f"alive, whatever was proven: {worker}"
            assert silent >= window - ROUNDING_SECONDS, f"silent for {silent} s only: {worker}"

    def _reason(self, worker: Worker) -> str:
        """Why the agent reaped a worker."""
        serial = worker.entry.registered.serial if worker.entry else 0
        return next(
            numbered.entry.reason
            for numbered in self._world.journal.unacknowledged()
            if numbered.entry.subject.registered.serial == serial
        )

    def check_kept(self, worker: Worker, entry: FakeEntry) -> None:
        """The dead go when their window ends, unless somebody might be them, come back."""
        if not self._world.settings.reaps:
            return
        settings, now = self._world.settings, self._world.now()
        if entry.has_liveness_signal:
            latest = max(worker.last_sent, entry.last_seen) + self._world._disturbed_seconds
            latest += silence_window_seconds(entry, settings)
            brake = settings.reap_timeout_seconds
            assert now < latest + brake + GRANULARITY_SECONDS, f"kept beyond silence: {worker}"
        self._check_proven(worker)
        later = [p for p in self._world.pipes if p is not worker.pipe and self._might_be(p, entry)]
        if any(pipe.is_open for pipe in later):
            return
        quiet = max(
            worker.down_since,
            self._world._last_disturbance,
            *(pipe.closed_at for pipe in later),
            0.0,
        )
        window = max(settings.close_confirm_seconds, hint_window_seconds(entry, settings))
        assert now < quiet + window + GRANULARITY_SECONDS, f"kept beyond its close: {worker}"

    def _check_proven(self, worker: Worker) -> None:
        """Whose end the kubelet has reported goes at once, if nothing was late meanwhile."""
        if worker.proven_at is None or worker.entry is None:
            return
        clock_is_set = self._world._clock_set_at + 3600.0 > worker.killed_at - 1.0
        if not clock_is_set and self._world._last_disturbance < worker.killed_at:
            assert self._world.now() < worker.proven_at + GRANULARITY_SECONDS, f"kept: {worker}"

    def _might_be(self, pipe: Pipe, entry: FakeEntry) -> bool:
        """A connection newer than the one the instance was last heard on that gave nothing away."""
        bound = entry.last_connection.accept_serial
        known = pipe.link is not None and pipe.link.serial > bound
        return known and not pipe.tells and not self._spoke_for_another(pipe, entry)

    @staticmethod
    def _spoke_for_another(pipe: Pipe, entry: FakeEntry) -> bool:
        made = pipe.connection
        return made is not None and bool(made.spoke_for - {entry.instance_id})
