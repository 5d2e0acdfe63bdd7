"""The reaper thread: sleeps until the earliest deadline, asks the policy, takes out the dead."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Protocol

from lmcache_nodeagent.clock import wall
from lmcache_nodeagent.events import (
    HeartbeatMismatch,
    InstanceReaped,
    InstanceWouldBeReaped,
    SilenceBrakeApplied,
)
from lmcache_nodeagent.liveness.journal import JournalEntry, Subject
from lmcache_nodeagent.liveness.policy import Reason, is_mass_silence, judge
from lmcache_nodeagent.liveness.stalls import STALL_SECONDS
from lmcache_nodeagent.liveness.windows import (
    fell_silent,
    heartbeat_is_mismatched,
    silence_window_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmcache_nodeagent.clock import Now
    from lmcache_nodeagent.events import Event as Fact
    from lmcache_nodeagent.events import Publish
    from lmcache_nodeagent.ids import InstanceId
    from lmcache_nodeagent.liveness.entry import LivenessEntry
    from lmcache_nodeagent.liveness.evidence import ConnectionLedger
    from lmcache_nodeagent.liveness.journal import Journal
    from lmcache_nodeagent.liveness.policy import Verdict
    from lmcache_nodeagent.liveness.reaped_lately import ReapedLately
    from lmcache_nodeagent.liveness.release import Releaser
    from lmcache_nodeagent.liveness.stalls import Stalls
    from lmcache_nodeagent.liveness.targets import InstanceLivenessTarget, ReapableEntry
    from lmcache_nodeagent.liveness.windows import LivenessSettings

_LONGEST_SLEEP_SECONDS = 30.0
_SHORTEST_SLEEP_SECONDS = 0.01
_RETRY_SECONDS = 0.1
_CAUGHT_UP_WAIT_SECONDS = 1.0


class RouterWatch(Protocol):
    """What the reaper needs of the router thread."""

    def caught_up(self, timeout_seconds: float) -> bool:
        """Wait until everything queued before this call was read and closes were checked again."""

    def last_read_at(self) -> float:
        """Moment (monotonic) at which the router last read a message from anybody."""


@dataclass(slots=True)
class _Survey:
    """What one look at all entries found. Filled under the targets' locks, acted on afterwards."""

    deadlines: list[float] = field(default_factory=list)
    due: int = 0
    pinging_peers: set[str] = field(default_factory=set)
    heard_peers: set[str] = field(default_factory=set)  # with a worker that has not fallen silent
    facts: list[Fact] = field(default_factory=list)
    journalled: list[JournalEntry] = field(default_factory=list)

    @property
    def silent_peers(self) -> int:
        """Count the peers of which every worker that used to ping has fallen silent."""
        return len(self.pinging_peers - self.heard_peers)


class Reaper:
    """Owned by `ManagementModule`. Thread: reaper, but for `wake` and `stop` (any)."""

    def __init__(
        self,
        targets: Sequence[InstanceLivenessTarget],
        ledger: ConnectionLedger,
        stalls: Stalls,
        settings: Callable[[], LivenessSettings],
        releaser: Releaser,
        journal: Journal,
        reaped_lately: ReapedLately,
        publish: Publish,
        now: Now,
        housekeeping: Callable[[float], float],
    ) -> None:
        """`housekeeping` is done with every scan, and says when it shall be done again at last."""
        self._targets = targets
        self._ledger = ledger
        self._stalls = stalls
        self._settings = settings
        self._releaser = releaser
        self._journal = journal
        self._reaped_lately = reaped_lately
        self._publish = publish
        self._now = now
        self._housekeeping = housekeeping
        self._router: RouterWatch | None = None
        self._brake_until: float | None = None
        self._woken = Event()
        self._stopping = Event()

    def watch(self, router: RouterWatch) -> None:
        """Connect the router; before `run`."""
        self._router = router

    def run(self) -> None:
        """Scan until stopped."""
        while not self._stopping.is_set():
            earliest = self._now() + _SHORTEST_SLEEP_SECONDS
            next_scan = max(self.scan(), earliest)
            self._woken.wait(max(_SHORTEST_SLEEP_SECONDS, next_scan - self._now()))
            self._woken.clear()
            self._note_lateness(next_scan)

    def stop(self) -> None:
        """Make `run` return soon."""
        self._stopping.set()
        self._woken.set()

    def wake(self) -> None:
        """Scan now: there is new evidence."""
        self._woken.set()

    def _note_lateness(self, expected: float) -> None:
        """A scan that runs late puts off every deadline that began before the delay.

        It may be late because of an overslept wait, or because the scan before it took so long.
        """
        now = self._now()
        if now - expected > STALL_SECONDS:
            self._stalls.record(expected, now)

    def scan(self) -> float:
        """Look at every entry once, take out the dead, return when to look again (monotonic)."""
        now = self._now()
        settings = self._settings()
        housekeeping_due_at = self._housekeeping(now)
        survey = self._survey(now, settings)
        survey.deadlines.append(housekeeping_due_at)
        if not is_mass_silence(survey.silent_peers, len(survey.pinging_peers)):
            self._brake_until = None
        if survey.due and settings.reaps:
            router = self._router
            if router is not None and not router.caught_up(_CAUGHT_UP_WAIT_SECONDS):
                survey.deadlines.append(now + _RETRY_SECONDS)
            else:
                self._reap(now, settings, survey)
        for fact in survey.facts:
            self._publish(fact)
        for entry in survey.journalled:
            self._journal.append(entry)
        overdue_at = self._releaser.report_overdue()
        if overdue_at is not None:
            survey.deadlines.append(overdue_at)
        return min([*survey.deadlines, now + self._longest_sleep(settings)])

    @staticmethod
    def _longest_sleep(settings: LivenessSettings) -> float:
        timeout = settings.reap_timeout_seconds
        return min(timeout / 4, _LONGEST_SLEEP_SECONDS) if timeout else _LONGEST_SLEEP_SECONDS

    def _survey(self, now: float, settings: LivenessSettings) -> _Survey:
        survey = _Survey()
        surroundings = self._ledger.surroundings()

        def visit(entry: ReapableEntry) -> None:
            verdict = judge(entry, now, settings, surroundings, self._stalls, describe=False)
            _note_silence(entry, now, settings, survey)
            if verdict.reason is not None:
                survey.due += 1
                if not settings.reaps:
                    described = judge(entry, now, settings, surroundings, self._stalls)
                    _note_would_reap(entry, described, now, survey)
            elif verdict.deadline is not None:
                survey.deadlines.append(verdict.deadline)
            _note_mismatch(entry, settings, survey)

        for target in self._targets:
            target.visit_entries(visit)
        return survey

    def _reap(self, now: float, settings: LivenessSettings, survey: _Survey) -> None:
        """Judge again, with everything read that was queued at `now`, and take out the condemned.

        `now` is the start of the scan, not the present: what came in since may still be unread.
        """
        surroundings = self._ledger.surroundings()
        braked = self._brake(now, settings, survey)
        verdicts: dict[InstanceId, Verdict] = {}

        def decide(entry: LivenessEntry) -> bool:
            verdict = judge(entry, now, settings, surroundings, self._stalls)
            if verdict.reason is None:
                if verdict.deadline is not None:
                    survey.deadlines.append(verdict.deadline)
                return False
            if braked and verdict.reason is Reason.HEARTBEAT_TIMEOUT:
                return False
            verdicts[entry.instance_id] = verdict
            return True

        for target in self._targets:
            for entry in target.reap_stale_instances(decide):
                self._release(entry, verdicts[entry.instance_id], now)

    def _brake(self, now: float, settings: LivenessSettings, survey: _Survey) -> bool:
        """Tell whether silence reaps wait: mass silence that looks like our own fault.

        They wait once for as long as a mass silence lasts, `scan` forgets it with its end.
        """
        silent, pinging = survey.silent_peers, len(survey.pinging_peers)
        if not is_mass_silence(silent, pinging) or not self._looks_at_fault(now, settings):
            return False
        if self._brake_until is None:
            seconds = settings.reap_timeout_seconds
            self._brake_until = now + seconds
            survey.facts.append(SilenceBrakeApplied(silent, pinging, seconds))
        if now >= self._brake_until:
            return False
        survey.deadlines.append(self._brake_until)
        return True

    def _looks_at_fault(self, now: float, settings: LivenessSettings) -> bool:
        """Tell whether scans overslept, or the router read nothing from anybody meanwhile."""
        timeout = settings.reap_timeout_seconds
        if self._stalls.any_since(now - 2 * timeout):
            return True
        return self._router is not None and now - self._router.last_read_at() > timeout / 2

    def verdicts(self, *, describe: bool = True) -> Sequence[tuple[ReapableEntry, Verdict, float]]:
        """Judge every entry now, for others: (entry, verdict, silent seconds). Threads: any."""
        now, settings = self._now(), self._settings()
        surroundings = self._ledger.surroundings()
        found: list[tuple[ReapableEntry, Verdict, float]] = []

        def visit(entry: ReapableEntry) -> None:
            verdict = judge(entry, now, settings, surroundings, self._stalls, describe=describe)
            found.append((entry, verdict, now - entry.last_seen))

        for target in self._targets:
            target.visit_entries(visit)
        return found

    @property
    def brake_until(self) -> float | None:
        """End of the mass-silence brake (monotonic), None if it does not hold. Threads: any."""
        return self._brake_until

    def _release(self, entry: ReapableEntry, verdict: Verdict, now: float) -> None:
        """Release one entry and journal it once its bytes are back, or are known to be stuck."""
        reason = verdict.reason.value if verdict.reason else ""
        mapped, decided_at, happened_at = entry.nbytes, self._now(), wall()
        self._reaped_lately.add(entry, reason, decided_at)
        self._publish(
            InstanceReaped(
                entry.instance_id,
                entry.model,
                reason,
                verdict.evidence,
                now - entry.last_seen,
                mapped,
            )
        )

        def journal(release_seconds: float | None) -> None:
            released = release_seconds is not None
            since = decided_at if verdict.since is None else verdict.since
            self._journal.append(
                JournalEntry(
                    kind="reaped",
                    subject=Subject.of(entry),
                    reason=reason,
                    evidence=verdict.evidence,
                    silent_seconds=now - entry.last_seen,
                    happened_at=happened_at,
                    release_seconds=release_seconds,
                    released_bytes=mapped if released else 0,
                    latency_seconds=max(0.0, self._now() - since) if released else None,
                    trigger=verdict.trigger,
                )
            )

        self._releaser.start(entry, journal)


def _note_silence(
    entry: LivenessEntry, now: float, settings: LivenessSettings, survey: _Survey
) -> None:
    """Sort the peers whose workers ping into silent and heard ones, for the brake."""
    if entry.has_liveness_signal:
        peer = entry.last_connection.pod_identity
        survey.pinging_peers.add(peer)
        if not fell_silent(entry, now, settings):
            survey.heard_peers.add(peer)


def _note_would_reap(entry: ReapableEntry, verdict: Verdict, now: float, survey: _Survey) -> None:
    """Report once per silence what enforcing would have done. Runs under the target's lock."""
    if entry.would_reap_reported:
        return
    entry.would_reap_reported = True
    reason = verdict.reason.value if verdict.reason else ""
    silent_seconds = now - entry.last_seen
    survey.facts.append(
        InstanceWouldBeReaped(
            entry.instance_id, entry.model, reason, verdict.evidence, silent_seconds
        )
    )
    survey.journalled.append(
        JournalEntry(
            kind="would_reap",
            subject=Subject.of(entry),
            reason=reason,
            evidence=verdict.evidence,
            silent_seconds=silent_seconds,
            happened_at=wall(),
            trigger=verdict.trigger,
        )
    )


def _note_mismatch(entry: LivenessEntry, settings: LivenessSettings, survey: _Survey) -> None:
    """Report once that a worker pings too slowly for T. Runs under the target's lock."""
    mismatched = heartbeat_is_mismatched(entry, settings)
    if mismatched and not entry.mismatch_reported:
        survey.facts.append(
            HeartbeatMismatch(
                entry.instance_id,
                entry.observed_interval_seconds,
                silence_window_seconds(entry, settings),
            )
        )
    entry.mismatch_reported = mismatched
