"""Optimizer post-validation: steps in a row whose ranks do not wait for each other, by closed forms and replays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.errors import InputError
from sim.engine.run import run_static
from sim.graph.taskgraph import Columns, Launches, TaskGraph, Waits
from sim.results.steady_state import borders, largest_mean
from sim.simulation import Simulation, simulate
from tests.sim.cases import FREE_LINKS, case, even_profile

LAYER_S = 1e-3


def run(schedule: str, p: int, m: int, post: bool = True, **training: object) -> Simulation:
    """`schedule` on p ranks with m micro-batches, one layer on each stage; a forward, B and W take LAYER_S each."""
    stages = p * (2 if schedule == "zb_v" else 1)
    scenario = case(
        {"pp": p, "schedule": schedule, "p2p_overlap": True},
        {"global_batch_size": m, "seq_len": 128, "optimizer_post_validation": post, **training},
        {"layers": stages, "hidden": 64, "heads": 1, "ffn": 64, "vocab": 128},
        FREE_LINKS,
    )
    return simulate(scenario, even_profile(scenario, LAYER_S))


def in_a_row(step: Simulation, steps: int) -> np.ndarray:
    """Return when each class of ranks ends each of so many steps, [steps, classes], as the engine runs them as one
    graph: a rank's first tasks wait for its last ones of the step before."""
    graph, columns, n = step.built.graph, step.built.graph.columns, len(step.built.graph)
    begins, ends = borders(graph)
    pairs = [np.array(np.meshgrid(e, b)).reshape(2, -1) for e, b in zip(ends, begins, strict=True)]
    across = np.concatenate(pairs, axis=1)
    shifts = range(0, steps * n, n)
    waits = [np.concatenate([side + k for k in shifts]) for side in columns.waits]
    joints = [np.concatenate([side + k for k in shifts[: steps - 1]]) for side in (across[0], across[1] + n)]
    launches = (np.concatenate([side + k for k in shifts]) for side in columns.launches[:2])
    rows = Columns(
        np.tile(columns.seconds, steps),
        np.tile(columns.task_kind, steps),
        np.tile(columns.step, steps),
        columns.steps,
        Waits(*(np.concatenate(both) for both in zip(waits, joints, strict=True))),
        Launches(*launches, np.tile(columns.launches.lag_s, steps)),
    )
    end = run_static(TaskGraph(graph.classes, graph.table, rows)).end_s.reshape(steps, n)
    return np.stack([end[:, tasks].max(axis=1) for tasks in ends], axis=1)


@settings(deadline=None, max_examples=15)
@given(p=st.integers(2, 6), more=st.integers(0, 6))
def test_zb_h2_has_no_bubble_in_the_steady_state(p: int, more: int) -> None:
    """m·(F + B + W) and the optimizer, for equal stages (the paper's figure 3); one step lasts (p−1)·F more."""
    m = 2 * p - 1 + more
    step = run("zb_h2", p, m)
    own_s = max(row.compute_s for row in step.outcome.ranks)
    assert own_s == pytest.approx(3 * m * LAYER_S, rel=0.05)
    assert step.step_time_s == pytest.approx(own_s, rel=1e-6)
    assert step.outcome.one_step_s == pytest.approx(own_s + (p - 1) * LAYER_S, rel=1e-3)
    assert max(row.bubble_s for row in step.outcome.ranks) < 0.02 * own_s
    assert sum(step.outcome.critical_path.values()) == pytest.approx(step.step_time_s)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zb_v", "1f1b", "gpipe", "zb_search"])
@pytest.mark.parametrize("tied", [False, True])
def test_steps_in_a_row_take_the_period(schedule: str, tied: bool) -> None:
    scenario = case(
        {"pp": 4, "schedule": schedule, "p2p_overlap": True, "dp": 2},
        {"global_batch_size": 16, "optimizer_post_validation": True},
        {"tied_embeddings": tied},
    )
    step = simulate(scenario, share_links=False)  # two steps would share links that one has for itself
    ends = in_a_row(step, 12)
    assert np.diff(ends, axis=0)[-3:] == pytest.approx(step.step_time_s, rel=1e-9)
    assert step.step_time_s <= step.times.step_s * (1 + 1e-12)


def test_a_rank_waits_for_the_gradient_norms_before_it() -> None:
    """1F1B ends on rank 0, whose norm the last rank needs: nothing is gained. Without a norm, what is left is a rank's
    own time."""
    synchronized, post, free = run("1f1b", 4, 8, False), run("1f1b", 4, 8), run("1f1b", 4, 8, gradient_clipping=False)
    assert post.step_time_s == pytest.approx(synchronized.step_time_s, rel=1e-3)
    own_s = max(row.compute_s for row in free.outcome.ranks)
    assert own_s < free.step_time_s < post.step_time_s


def test_tied_embeddings_are_summed_beside_weight_gradients() -> None:
    """The sum starts with both ends' last input gradients, and rank 0 does not wait for the last rank's end."""
    step = run("zb_h2", 4, 8)
    model = step.scenario.model
    for tied in (False, True):
        changed = step.scenario.unchecked_copy(update={"model": model.model_copy(update={"tied_embeddings": tied})})
        assert simulate(changed, step.profile).step_time_s == pytest.approx(step.step_time_s, rel=0.02)


def test_without_the_key_a_step_ends_with_its_last_rank() -> None:
    step = run("zb_h2", 4, 8, False)
    assert step.steady_state is None
    assert step.step_time_s == step.times.step_s
    assert step.outcome.one_step_s is None


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_largest_mean_of_all_circles(n: int, seed: int) -> None:
    """Against the growth of the heaviest walks."""
    rng = np.random.default_rng(seed)
    weights = np.where(rng.random((n, n)) < 0.4, -np.inf, rng.integers(0, 20, (n, n)).astype(float))
    weights[range(n), range(n)] = rng.integers(0, 20, n)
    mean, circle = largest_mean(weights)
    assert circle[0] == circle[-1]
    x, rounds = np.zeros(n), 60 * n
    for _ in range(rounds):
        x = (weights + x).max(axis=1)
    assert x.max() / rounds == pytest.approx(mean, abs=20 / 60)
    assert (x.max() + 0.0) >= mean * rounds - 1e-6


@pytest.mark.parametrize(
    ("parallelism", "said"),
    [
        ({}, "needs a pipeline"),
        ({"pp": 2, "schedule": "1f1b"}, "needs parallelism.p2p_overlap true"),
    ],
)
def test_where_it_cannot_be(parallelism: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        case(parallelism, {"optimizer_post_validation": True})


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2"])
@pytest.mark.parametrize("zero", [0, 2])
def test_seconds_of_every_rank_lie_within_one_step(schedule: str, zero: int) -> None:
    """The parts are those of one step, which lasts longer than steps in a row are apart; so they may exceed that."""
    layout = {"pp": 4, "dp": 2, "zero": zero, "schedule": schedule, "p2p_overlap": True}
    result = simulate(case(layout, {"global_batch_size": 16, "optimizer_post_validation": True})).outcome
    assert result.one_step_s is not None
    assert result.one_step_s > result.step_time_s
    assert max(x.compute_s + x.exposed_comm_s + x.bubble_s for x in result.ranks) <= result.one_step_s * (1 + 1e-9)
