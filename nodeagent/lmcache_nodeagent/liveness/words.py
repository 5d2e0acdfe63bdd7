"""What is known of an instance, in words: for the journal, for Events and for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmcache_nodeagent.liveness.entry import LivenessEntry
    from lmcache_nodeagent.liveness.slots import SlotWord
    from lmcache_nodeagent.liveness.testimony import Hint


def describe(
    entry: LivenessEntry,
    now: float,
    hints: Sequence[Hint],
    candidates: int,
    slot_word: SlotWord | None = None,
) -> tuple[str, ...]:
    """Say what is known; `hints` are those that count."""
    lines = [f"silent for {now - entry.last_seen:.1f} s"]
    lines.append("has pinged" if entry.has_liveness_signal else "never pinged")
    if entry.observed_interval_seconds:
        lines.append(f"pings every {entry.observed_interval_seconds:.1f} s")
    last = entry.last_connection
    if last.closed_at is None or last.close_kind is None:
        lines.append(f"connection from {last.peer.text} open")
    else:
        ago = now - last.closed_at
        lines.append(
            f"connection from {last.peer.text} closed {ago:.1f} s ago ({last.close_kind.value})"
        )
    if last.process_gone:
        lines.append("process exited (pidfd)")
    if candidates:
        lines.append(f"{candidates} connection(s) might be the worker come back")
    if slot_word is not None:
        lines.extend(_slot_words(entry, now, slot_word))
    if entry.registered.pod is not None:
        lines.append(entry.registered.pod.words)
    lines.extend(hint_words(hint, now) for hint in hints)
    return tuple(lines)


def _slot_words(entry: LivenessEntry, now: float, word: SlotWord) -> Iterator[str]:
    """Say what the kubelet said about the instance's slot."""
    slot = f"slot {entry.slot.slot}"
    if entry.slot.run < word.run:
        yield f"{slot}: the kubelet began to start the next run {now - word.began_at:.1f} s ago"
    elif word.given_up_at is not None:
        yield f"{slot}: its pod has not had it for {now - word.given_up_at:.1f} s"


def hint_words(hint: Hint, now: float) -> str:
    """Say what the operator said."""
    told = f"{hint.trigger}, told {now - hint.received_at:.1f} s ago"
    if hint.ended_at is None:
        return f"hint: {told}"
    return f"proof: {told}, ended {now - hint.ended_at:.0f} s ago by the kubelet's clock"
