"""What the operator says about an instance, in the form that is kept with it and judged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PodOwner:
    """The object that controls a pod. Only kept and repeated: the operator forgets it otherwise."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class PodRun:
    """Where an instance runs. `container` and `run` (the runtime's id) are empty if not known."""

    namespace: str
    name: str
    uid: str
    container: str = ""
    run: str = ""
    owner: PodOwner | None = None

    @property
    def words(self) -> str:
        """Name it for people."""
        return f"pod {self.namespace}/{self.name}" + (self.container and f" ({self.container})")


@dataclass(frozen=True, slots=True)
class Registered:
    """One registration of an instance; replaced as a whole, so that readers see one or the other.

    Attributes:
        serial: number of the registration, rising over the life of the agent; evidence names it,
            so that what was seen of one owner of an id is never taken for the next one's.
        at: seconds since 1970 by the node's clock, which is the kubelet's too.
        pod: where it runs, as the operator says; `None` until it does.
    """

    serial: int = 0
    at: float = 0.0
    pod: PodRun | None = None


NOT_NUMBERED = Registered()


@dataclass(frozen=True, slots=True)
class Hint:
    """The operator's word that an instance has ended. Moments are monotonic.

    Attributes:
        trigger: what the operator saw.
        received_at: the hint's window starts here; another machine's clock has no say in it.
        ended_at: when the run ended, if the kubelet says so and nothing contradicts it: proof.
            By the kubelet's clock, rounded down to a second.
        refuted_after: a sign of life that is read later than this was sent after that end.
    """

    trigger: str
    received_at: float
    ended_at: float | None = None
    refuted_after: float = 0.0

    def survives(self, sign_of_life_at: float) -> bool:
        """Tell whether a sign of life leaves it standing: a proof, and a word from before it."""
        return self.ended_at is not None and sign_of_life_at <= self.refuted_after


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What a sign of life took back: a shortened window, or nothing (`window` is empty).

    `silent_seconds` is the silence that it ended.
    """

    window: str = ""
    hints: tuple[Hint, ...] = ()
    silent_seconds: float = 0.0


NOTHING_CANCELLED = Cancelled()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorEvidence:
    """One piece of evidence as the operator sends it, about one registration.

    Attributes:
        id: the same for repeats of one observation.
        boot_id: of the agent it is meant for.
        proof: the kubelet's own word that the run has ended; else a hint.
        finished_at: seconds since 1970 by the node's clock; `None` if not known.
    """

    id: str
    boot_id: str
    instance_id: int
    registration: int
    pod_uid: str
    container: str
    trigger: str
    proof: bool
    finished_at: float | None
