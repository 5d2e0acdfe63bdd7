"""Whatever happens in whatever order: agents are told what is so, and nothing that is not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.flow_history import History
from tests.fakes.flow_world import FlowWorld
from tests.fakes.virtual_loop import run_in_virtual_time

steps = st.lists(st.tuples(st.integers(0, 35), st.integers(0, 29)), max_size=60)

Steps = list[tuple[int, int]]


async def play(script: Steps, *, reuses_early: bool = False) -> History:
    """Play a history, whose steps are checked as they are made, up to where nothing moves."""
    history = History(FlowWorld(), reuses_early=reuses_early)
    await history.start_operator()
    for number, choice in script:
        await history.step(number, choice)
    await history.calm_down()
    return history


async def check_the_end(script: Steps) -> None:
    """Everybody whose end is reported is told of, and a new operator would tell the same."""
    history = await play(script)
    world, agent = history.world, history.world.agent()
    for worker in history.present():
        true = worker.pod
        mapped = agent.mapped_to(worker.report)
        assert mapped in {"", true.uid}, "mapped to a stranger"
        shared = [p for p in history.pods if p.address == true.address]
        if len(shared) == 1 and not (true.gone or true.evicted) and true.labelled:
            assert mapped == true.uid, "not mapped"
        if mapped and (true.gone or worker.run.ended is not None):
            assert agent.of(worker.report), "nothing is told of an end"
    told = {each.id for each in agent.evidence}
    before = len(agent.evidence)
    mappings = len(agent.mappings)
    await world.stop_operator()
    await world.start_operator()
    await world.settle(seconds=30)
    assert {each.id for each in agent.evidence[before:]} <= told | _second_thoughts(history)
    assert len(agent.mappings) == mappings
    await world.stop_operator()


def _second_thoughts(history: History) -> set[str]:
    """Return what only a new operator says: hints about pods whose proof it has not seen."""
    agent = history.world.agent()
    gone = {worker.pod.uid for worker in history.present() if worker.pod.gone}
    return {each.id for each in agent.evidence if each.pod_uid in gone and not each.proof}


@settings(max_examples=60, deadline=None)
@given(steps)
def test_histories(script: Steps) -> None:
    """Of pods, workers, kubelets, agents, operators and watches."""
    run_in_virtual_time(check_the_end(script))


@settings(max_examples=60, deadline=None)
@given(steps)
def test_histories_in_which_addresses_are_given_away_early(script: Steps) -> None:
    """Before the last owner's end is reported: then too, proof is of who has ended."""
    run_in_virtual_time(_play_early(script))


async def _play_early(script: Steps) -> None:
    history = await play(script, reuses_early=True)
    await history.world.stop_operator()
