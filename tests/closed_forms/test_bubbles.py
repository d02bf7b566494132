"""Schedules through the whole simulator, with equal stages and free messages, against their closed forms."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.core.actions import Action, Kind
from sim.core.engines import Engine
from sim.core.errors import InputError
from sim.prices.profile import CollectiveTable
from sim.programs.stages import stage_input_bytes
from sim.ranks.plan import make_plan
from sim.schedules import FORMS
from sim.simulation import Simulation, simulate
from tests.sim.cases import FREE_LINKS, case, even_profile


def run(schedule: str, p: int, m: int, v: int | None = None, engine: str = "static", **more: object) -> Simulation:
    """`schedule` on p ranks with m micro-batches; one layer on each stage."""
    stages = p * (v or (2 if schedule in ("zb_v", "dualpipe_v") else 1))
    scenario = case(
        {"pp": p, "schedule": schedule, "virtual_stages": v, **more},
        {"global_batch_size": m, "seq_len": 128, "gradient_clipping": False},
        {"layers": stages, "hidden": 64, "heads": 1, "ffn": 64, "vocab": 128},
        FREE_LINKS,
    )
    return simulate(scenario, even_profile(scenario), engine=engine)


@settings(deadline=None, max_examples=30)
@given(schedule=st.sampled_from(["gpipe", "1f1b"]), p=st.integers(2, 12), m=st.integers(1, 24))
def test_bubble_of_gpipe_and_1f1b(schedule: str, p: int, m: int) -> None:
    """(p−1)/m (Huang 2019, section 2.3; Narayanan 2021, section 2.2.1). For 1F1B this needs m >= p micro-batches
    only for its memory, not for its bubble."""
    assert run(schedule, p, m).result["bubble_ratio"] == pytest.approx((p - 1) / m, abs=1e-8)


def unlike_stages(schedule: str, layers: list[int], m: int) -> float:
    """The bubble ratio of stages of so many layers."""
    scenario = case(
        {"pp": len(layers), "schedule": schedule, "layers_per_stage": layers},
        {"global_batch_size": m, "seq_len": 128, "gradient_clipping": False},
        {"layers": sum(layers), "hidden": 64, "heads": 1, "ffn": 64, "vocab": 128},
        FREE_LINKS,
    )
    return float(simulate(scenario, even_profile(scenario)).result["bubble_ratio"])


LAYERS = st.lists(st.integers(1, 4), min_size=2, max_size=8)


@settings(deadline=None, max_examples=25)
@given(layers=LAYERS, slow=st.integers(0, 7), m=st.integers(1, 20))
def test_bubble_of_gpipe_with_a_slowest_stage(layers: list[int], slow: int, m: int) -> None:
    """One micro-batch passes all stages, and m − 1 more pass the slowest: p·(Σn + (m − 1)·max n) of time for m·Σn of
    work, with n layers on a stage."""
    layers[slow % len(layers)] = 5
    p, n = len(layers), sum(layers)
    assert unlike_stages("gpipe", layers, m) == pytest.approx(p * (n + (m - 1) * 5) / (m * n) - 1, abs=1e-8)


@settings(deadline=None, max_examples=25)
@given(p=st.integers(2, 8), slow=st.integers(0, 7), layers=st.integers(1, 5), more=st.integers(1, 12))
def test_bubble_of_1f1b_with_one_longer_stage(p: int, slow: int, layers: int, more: int) -> None:
    """The longest stage s, of n layers where the others have one, works without a gap but for two: its first w = p − s
    forwards are done before the first backward comes back through the T = 3·(w − 1) of the stages behind it, and w − 1
    backwards before the last one. The stages before it come before and behind that. Any m above w, a multiple or not.
    """
    s = slow % p
    w, m = p - s, p - s + more
    gaps = max(0, 3 * (w - 1) - (w - 1) * layers) + max(0, 3 * (w - 1) - (w - 1) * 2 * layers)
    step = 3 * s + 3 * m * layers + gaps
    found = unlike_stages("1f1b", [1] * s + [layers] + [1] * (w - 1), m)
    assert found == pytest.approx(p * step / (3 * m * (p - 1 + layers)) - 1, abs=1e-8)


@settings(deadline=None, max_examples=10)
@given(p=st.integers(2, 6), m=st.integers(1, 12), v=st.integers(2, 4))
def test_bubble_of_looped_bfs(p: int, m: int, v: int) -> None:
    """(p−1)/(v·m), and for m below p the waits of v − 1 stages for p − m micro-batches more."""
    waits = (v - 1) * max(0, p - m)
    assert run("looped_bfs", p, m, v).result["bubble_ratio"] == pytest.approx((p - 1 + waits) / (v * m), abs=1e-8)


@settings(deadline=None, max_examples=10)
@given(p=st.integers(2, 8), m=st.integers(1, 8))
def test_bubble_of_naive(p: int, m: int) -> None:
    """One micro-batch at a time: a rank works a p-th of the time."""
    assert run("naive", p, m).result["bubble_ratio"] == pytest.approx(p - 1, abs=1e-8)


@settings(deadline=None, max_examples=20)
@given(p=st.integers(2, 6), rounds=st.integers(1, 4), v=st.integers(2, 4))
def test_bubble_of_interleaved(p: int, rounds: int, v: int) -> None:
    """(p−1)/(v·m) (Narayanan 2021, section 2.2.2)."""
    m = p * rounds
    assert run("interleaved_1f1b", p, m, v).result["bubble_ratio"] == pytest.approx((p - 1) / (v * m), abs=1e-8)


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("v", [2, 4])
@pytest.mark.parametrize("rounds", [1, 3])
def test_exposed_exchanges_of_interleaved_with_blocking_messages(p: int, v: int, rounds: int) -> None:
    """Ranks go from one exchange to the next together, so each costs a message: rank 0 has one after every entry but
    the last, and begins with (v−1)·p + 2(p−1) forwards (Megatron-LM, core/pipeline_parallel/schedules.py)."""
    m = p * rounds

    def step_s(message_s: float, overlap: bool, engine: Engine = "static") -> float:
        layout = {"pp": p, "schedule": "interleaved_1f1b", "virtual_stages": v, "p2p_overlap": overlap}
        training = {"global_batch_size": m, "seq_len": 128, "gradient_clipping": False}
        sizes = {"layers": p * v, "hidden": 64, "heads": 1, "ffn": 64, "vocab": 128}
        scenario = case(layout, training, sizes, FREE_LINKS)
        size = np.array([stage_input_bytes(make_plan(scenario))])
        message = CollectiveTable("send_recv", 2, size, np.array([message_s]), np.zeros(1))
        profile = replace(even_profile(scenario), collectives=(message,))
        return simulate(scenario, profile, engine=engine).step_time_s

    free_s, message_s = step_s(0.0, False), 1e-4
    assert free_s == pytest.approx(step_s(0.0, True), rel=1e-9)
    exchanges = m * v + (v - 1) * p + 2 * (p - 1) - 1
    assert step_s(message_s, False) == pytest.approx(free_s + exchanges * message_s, rel=1e-9)
    assert step_s(message_s, False) == step_s(message_s, False, "simpy")


@settings(deadline=None, max_examples=15)
@given(schedule=st.sampled_from(["gpipe", "1f1b", "zb_h1"]), p=st.integers(2, 8), m=st.integers(1, 16))
def test_micro_batches_in_flight(schedule: str, p: int, m: int) -> None:
    """m for GPipe, min(m, p − rank) for 1F1B and ZB-H1, counted on the simulated times."""
    sim = run(schedule, p, m)
    for rank, spans in enumerate(sim.spans):
        events = sorted(
            (start, 1) if a.kind is Kind.F else (end, -1)
            for a, (start, end) in spans.items()
            if a.kind in (Kind.F, Kind.B, Kind.I)
        )
        most = live = 0
        for _, change in events:
            live += change
            most = max(most, live)
        assert most == (m if schedule == "gpipe" else min(m, p - rank))


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zb_v", "zb_search", "dualpipe", "dualpipe_v"])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16)])
def test_split_backward_schedules_leave_less_idle(schedule: str, p: int, m: int) -> None:
    base = run("1f1b", p, m).result["bubble_ratio"]
    assert run(schedule, p, m).result["bubble_ratio"] < 0.75 * base


@pytest.mark.parametrize(
    "schedule",
    FORMS,
)
def test_every_action_runs_once_and_engines_agree(schedule: str) -> None:
    p, m = 4, 8
    static, simpy = (run(schedule, p, m, engine=e) for e in ("static", "simpy"))
    assert np.array_equal(static.times.start_s, simpy.times.start_s)
    assert np.array_equal(static.times.end_s, simpy.times.end_s)
    listed = [
        (r, part)
        for r, entries in enumerate(static.schedule.ranks)
        for e in entries
        for part in ((e,) if isinstance(e, Action) else (e.forward, e.backward))
    ]
    done = [(r, action) for r, acted in enumerate(static.built.actions) for action in acted.listed.actions]
    assert sorted(done, key=str) == sorted(listed, key=str)


@settings(deadline=None, max_examples=20)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "zb_h1", "dualpipe_v"]), overlap=st.booleans(), rounds=st.integers(2, 3)
)
def test_streams_run_one_task_at_a_time_and_messages_match(schedule: str, overlap: bool, rounds: int) -> None:
    p = 4
    overlap |= schedule == "dualpipe_v"  # two blocking exchanges at once would wait for each other
    t = run(schedule, p, 4 * rounds, p2p_overlap=overlap).timeline
    rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
    flows: dict[int, list[str]] = {}
    for span, flow in zip(t.spans(), t.flow.tolist(), strict=True):
        if not (span.stream.startswith("recv") or span.stream.startswith("send")):
            rows.setdefault((span.rank, span.stream), []).append((span.start_s, span.end_s))
        if flow >= 0:
            flows.setdefault(flow, []).append(span.kind)
    for spans in rows.values():
        spans.sort()
        assert all(b[0] >= a[1] - 1e-12 for a, b in pairwise(spans))
    assert all(sorted(k) in (["RECV_F", "SEND_F"], ["RECV_B", "SEND_B"]) for k in flows.values())


def test_blocking_messages_that_would_deadlock_are_refused() -> None:
    with pytest.raises(InputError, match="p2p_overlap"):
        run("dualpipe_v", 4, 8, p2p_overlap=False)
    with pytest.raises(InputError, match="p2p_overlap"):
        run("interleaved_1f1b", 4, 8, 2, p2p_overlap=False, micro_batch_group=8)


def test_more_actions_than_can_be_held_are_refused_at_once() -> None:
    with pytest.raises(InputError, match=r"global_batch_size: 400,000 micro-batches through 8 stages make 6,400,000"):
        run("1f1b", 8, 400_000)
