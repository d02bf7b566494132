"""Processes beside a step: what they change, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.processes.cluster import Process
from sim.simulation import Simulation, simulate
from sim.views.timeline_page import timeline_page
from sim.views.trace import trace_events

Waiting = Generator[Any, Any, Any]


def scenario(parallelism: dict[str, Any], batch: int = 16, **more: Any) -> Scenario:
    whole = {
        "model": {"preset": "llama3.2-1b", "layers": 4},
        "cluster": "dgx-h100",
        "training": {"seq_len": 2048, "global_batch_size": batch},
        "parallelism": parallelism,
    }
    return parse_scenario({**whole, **more}, "test")


def at_once(act: Callable[[Any], Any]) -> Process:
    """A process that acts at the very start."""

    def act_at_once(env: Any, cluster: Any) -> Waiting:
        act(cluster)
        yield env.timeout(0.0)

    return act_at_once


def idle(env: Any, cluster: Any) -> Waiting:
    """Watches, marks, sets what is already so, and changes nothing."""
    cluster.set_clock(1.0)
    cluster.set_link("nic", 1.0)
    yield cluster.when("F", at="start")
    cluster.mark("first forward")
    while True:
        yield env.timeout(1e-3)


@pytest.mark.parametrize("name", ["tp8_sp", "1f1b_pp8", "zero2_llama8b_dp8", "offload_llama8b", "dp8"])
def test_a_process_that_changes_nothing_changes_no_bit(name: str) -> None:
    s = load_scenario(f"scenarios/{name}.yaml")
    plain, beside = simulate(s, engine="static"), simulate(s, engine="simpy", processes=[idle])
    assert beside.times.path == "simpy"
    assert (beside.times.start_s == plain.times.start_s).all()
    assert (beside.times.end_s == plain.times.end_s).all()
    a, b = plain.outcome.to_json(), beside.outcome.to_json()
    marks = b.pop("processes")
    assert [x["text"] for x in marks["spans"]] == ["first forward"]
    assert {k: v for k, v in a.items() if k != "engine"} == {k: v for k, v in b.items() if k != "engine"}


@pytest.mark.parametrize("name", ["tp8_sp", "1f1b_pp8", "zero2_llama8b_dp8"])
def test_half_the_clock_is_twice_the_computation(name: str) -> None:
    s = load_scenario(f"scenarios/{name}.yaml")
    half = simulate(s, processes=[at_once(lambda cluster: cluster.set_clock(0.5))])
    assert half.outcome.mean_rank.compute_s == pytest.approx(2 * simulate(s).outcome.mean_rank.compute_s, rel=1e-12)
    lasts = half.times.end_s - half.times.start_s
    kinds = half.built.graph.task_kinds
    for task, kind in enumerate(half.built.graph.task_kind.tolist()):
        if kinds[kind].compute_s:
            assert lasts[task] == pytest.approx(2 * half.built.graph.seconds[task], rel=1e-9)


def test_a_computation_under_way_stretches_for_what_is_left() -> None:
    """One GPU: T seconds, the clock at a quarter from t to t + d: d seconds do the work of d/4."""
    s, (at_s, for_s) = scenario({}, batch=4), (0.011, 0.02)

    def throttle(env: Any, cluster: Any) -> Waiting:
        yield env.timeout(at_s)
        cluster.set_clock(0.25, ranks=0)
        yield env.timeout(for_s)
        cluster.set_clock(1.0, ranks=0)

    step = simulate(s, processes=[throttle])
    assert step.step_time_s == pytest.approx(simulate(s).step_time_s + 0.75 * for_s, rel=1e-12)
    (shown,) = step.result["processes"]["spans"]
    assert (shown["kind"], shown["start_s"], shown["end_s"]) == ("CLOCK", at_s, at_s + for_s)


def test_one_slow_rank_is_a_straggler() -> None:
    """A clock of 1/1.5 from the start is `faults.stragglers` of 1.5, whoever waits for it."""
    layout = {"tp": 2, "dp": 2, "pp": 2}
    large = {"seq_len": 8192, "global_batch_size": 8}  # the host keeps ahead: a slow GPU makes no slow host
    faults = {"stragglers": [{"rank": 5, "compute_scale": 1.5}]}
    slow = simulate(
        scenario(layout, model="llama3-8b", training=large),
        processes=[at_once(lambda cluster: cluster.set_clock(1 / 1.5, ranks=5))],
    )
    fault = simulate(scenario(layout, model="llama3-8b", training=large, faults=faults))
    assert slow.step_time_s == pytest.approx(fault.step_time_s, rel=2e-3)


TWO_NODES = {"dp": 16, "dp_sync": "after_backward"}


def reduction(step: Simulation) -> tuple[float, float]:
    """When the gradients' all-reduce starts and ends."""
    spans = [span for span in step.timeline.spans() if span.kind == "ALL_REDUCE" and span.detail.bytes > 1e6]
    return spans[0].start_s, spans[0].end_s


def test_a_link_that_is_down_holds_its_flows_up_for_as_long() -> None:
    s = scenario(TWO_NODES)
    start_s, end_s = reduction(simulate(s))

    def flap(env: Any, cluster: Any) -> Waiting:
        yield env.timeout((start_s + end_s) / 2)
        cluster.set_link("nic", 0.0, ranks=cluster.ranks_of(1))
        yield env.timeout(0.05)
        cluster.set_link("nic", 1.0, ranks=cluster.ranks_of(1))

    step = simulate(s, processes=[flap])
    assert step.step_time_s == pytest.approx(simulate(s).step_time_s + 0.05, rel=1e-9)
    inside = simulate(s, processes=[at_once(lambda cluster: cluster.set_link("spine", 0.5))])
    assert inside.step_time_s == pytest.approx(simulate(s).step_time_s, rel=1e-12)  # nothing goes above the leaves


def test_half_the_bandwidth_is_a_link_fault() -> None:
    faults = {"links": [{"between": ["node0", "node1"], "bandwidth_scale": 0.5}]}
    slow = simulate(scenario(TWO_NODES), processes=[at_once(lambda cluster: cluster.set_link("nic", 0.5))])
    assert slow.step_time_s == pytest.approx(simulate(scenario(TWO_NODES, faults=faults)).step_time_s, rel=0.03)


def test_a_paused_rank_and_a_held_one_make_the_step_longer_by_as_much() -> None:
    s = scenario({"pp": 2})

    def pause(env: Any, cluster: Any) -> Waiting:
        yield env.timeout(0.001)
        cluster.pause(0)
        yield env.timeout(0.04)
        cluster.resume(0)

    def hold(env: Any, cluster: Any) -> Waiting:
        with cluster.hold(name="SAVE") as turn:
            yield turn.granted
            yield env.timeout(0.04)

    plain = simulate(s).step_time_s
    assert simulate(s, processes=[pause]).step_time_s == pytest.approx(plain + 0.04, rel=1e-12)
    held = simulate(s, processes=[hold])
    assert held.step_time_s == pytest.approx(plain + 0.04, rel=1e-12)
    assert [(x["kind"], x["ranks"]) for x in held.result["processes"]["spans"]] == [("SAVE", "0, 1")]
    twice = simulate(s, processes=[hold, hold])
    assert twice.step_time_s == pytest.approx(plain + 0.08, rel=1e-12)


def test_who_waits_for_an_end_wakes_before_what_follows() -> None:
    s, seen = scenario({"pp": 2}, batch=8), list[float]()

    def between(env: Any, cluster: Any) -> Waiting:
        yield cluster.when("F", rank=0, micro_batch=1)
        seen.append(env.now)
        with cluster.hold(0) as turn:
            yield turn.granted
            seen.append(env.now)
            yield env.timeout(0.01)
        yield cluster.when("F", rank=0, at="start")
        seen.append(env.now)

    step = simulate(s, processes=[between])
    first = {a: span for a, span in step.spans[0].items() if a.kind.name == "F"}
    ends = [first[a][1] for a in first if a.micro_batch == 1]
    starts = [first[a][0] for a in first if a.micro_batch == 2]
    assert seen[:2] == [ends[0], ends[0]]
    assert seen[2] in [start for start, _ in first.values()]
    assert starts[0] >= ends[0] + 0.01


def test_a_transfer_shares_links_with_the_step() -> None:
    """Alone it takes what a message does; beside an all-reduce that fills the NICs, both take longer."""
    s, ended = scenario(TWO_NODES), dict[str, float]()
    start_s, end_s = reduction(simulate(s))

    def beside(name: str, at_s: float) -> Process:
        def traffic(env: Any, cluster: Any) -> Waiting:
            yield env.timeout(at_s)
            yield cluster.transfer(1e8, source=0, target=8)
            ended[name] = env.now - at_s

        return traffic

    quiet = simulate(s, processes=[beside("quiet", 0.0)])
    busy = simulate(s, processes=[beside("busy", start_s)])
    alone_s = quiet.pricing.send(0, 8, 1e8).seconds
    assert ended["quiet"] == pytest.approx(alone_s, rel=1e-9)
    assert quiet.step_time_s == pytest.approx(simulate(s).step_time_s, rel=1e-12)
    assert ended["busy"] > 1.3 * alone_s
    assert busy.step_time_s > end_s + 0.3 * alone_s


def test_ranks_told_apart_are_enough() -> None:
    s = scenario({"tp": 2, "dp": 4, "pp": 2})
    slow = [at_once(lambda cluster: cluster.set_clock(0.8, ranks=3))]
    folded, apart = simulate(s, processes=slow, apart=[3]), simulate(s, processes=slow)
    assert len(folded.plan.classes) < len(apart.plan.classes) == 16
    assert folded.step_time_s == pytest.approx(apart.step_time_s, rel=1e-12)


def test_what_they_did_is_on_timeline_page_and_trace() -> None:
    def mark(env: Any, cluster: Any) -> Waiting:
        yield env.timeout(0.001)
        cluster.mark("look here", ranks=1)
        cluster.set_clock(0.9, ranks=1)

    step = simulate(scenario({"pp": 2}), processes=[mark], expand=True)
    shown = [span for span in step.timeline.spans() if span.stream in ("process", "mark")]
    assert [(x.rank, x.stream, x.kind, x.detail.name) for x in shown] == [
        (1, "mark", "MARK", "mark: look here"),
        (1, "process", "CLOCK", "mark: clock × 0.9"),
    ]
    assert "look here" in timeline_page(step.outcome, step.timeline, step.memory_over(1), step.critical_rows)
    assert any(e.get("args", {}).get("name") == "mark: look here" for e in trace_events(step.timeline)["traceEvents"])


def waits_in_vain(env: Any, cluster: Any) -> Waiting:
    yield cluster.when("OPTIMIZER", rank=0)
    yield cluster.when("F", rank=0, micro_batch=0)


def test_what_was_waited_for_in_vain_is_said() -> None:
    step = simulate(scenario({"pp": 2}), processes=[waits_in_vain])
    (line,) = step.result["processes"]["waited_in_vain"]
    assert "waits_in_vain" in line
    assert "'F', rank=0, micro_batch=0" in line


def no_generator(env: Any, cluster: Any) -> None:
    """Forgets to yield."""


def yields_a_number(env: Any, cluster: Any) -> Waiting:
    yield 0.01


def one_argument(env: Any) -> Waiting:
    yield env.timeout(1)


def never_released(env: Any, cluster: Any) -> Waiting:
    hold = cluster.hold(0)
    yield hold.granted


def goes_on_for_ever(env: Any, cluster: Any) -> Waiting:
    cluster.pause(1)
    while True:
        yield env.timeout(1.0)


MISTAKES: dict[str, tuple[Any, str]] = {
    "no generator": (no_generator, "generator function"),
    "no event": (yields_a_number, "0.01 was yielded"),
    "arguments": (one_argument, r"\(env, cluster\)"),
    "held": (never_released, "never ends.*rank 0 is held"),
    "rank": (at_once(lambda c: c.set_clock(0.5, ranks=9)), "rank 9.*0 to 1"),
    "node": (at_once(lambda c: c.ranks_of(1)), "node 1.*nodes 0 to 0"),
    "clock": (at_once(lambda c: c.set_clock(-1)), "scale=-1.*at least 0"),
    "stopped": (at_once(lambda c: c.set_clock(0)), "rank 0 has clock 0"),
    "link": (at_once(lambda c: c.set_link("nvlink", 1)), "domain, nic, spine, host"),
    "kind": (at_once(lambda c: c.when("FORWARD")), "no such span.*SEND_F"),
    "resume": (at_once(lambda c: c.resume(0)), "rank 0 is not paused"),
    "transfer": (at_once(lambda c: c.transfer(1e6)), "source or a target"),
    "bytes": (at_once(lambda c: c.transfer(0, source=0)), "n_bytes=0.*above 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    process, message = MISTAKES[name]
    with pytest.raises(InputError, match=message):
        simulate(scenario({"pp": 2}), processes=[process])


def test_a_step_that_cannot_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.processes.run.STUCK_EVENTS", 1000)
    with pytest.raises(InputError, match="rank 1 is paused"):
        simulate(scenario({"pp": 2}), processes=[goes_on_for_ever])


def test_messages_without_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte at a time: the step would take hours to simulate."""
    monkeypatch.setattr("sim.processes.run.STUCK_EVENTS", 1000)

    def trickle(env: Any, cluster: Any) -> Waiting:
        while True:
            yield cluster.transfer(1.0, source=0)

    with pytest.raises(InputError, match="1,000 events passed"):
        simulate(scenario({"pp": 2}), processes=[trickle])


@pytest.mark.parametrize("layout", [{"tp": 2, "dp": 2, "pp": 2}, {"dp": 4, "zero": 3}, {"cp": 2, "dp": 2}])
def test_what_is_undone_at_once_changes_nothing(layout: dict[str, Any]) -> None:
    """Every computation is stopped and goes on, every flow is settled anew, and all ends stay."""

    def twitch(env: Any, cluster: Any) -> Waiting:
        while True:
            yield env.timeout(0.0007)
            cluster.set_clock(0.3)
            cluster.set_link("domain", 0.5)
            cluster.pause(0)
            cluster.resume(0)
            cluster.set_link("domain", 1.0)
            cluster.set_clock(1.0)

    s = scenario(layout)
    step = simulate(s, processes=[twitch])
    assert step.alone_s is not None
    assert step.step_time_s == pytest.approx(simulate(s).step_time_s, rel=1e-9)
    assert step.outcome.mean_rank.compute_s == pytest.approx(simulate(s).outcome.mean_rank.compute_s, rel=1e-9)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="engine='simpy'"):
        simulate(scenario({}), engine="static", processes=[idle])
    large = scenario({"dp": 512}, batch=512)
    with pytest.raises(InputError, match="apart="):
        simulate(large, processes=[idle])
    with pytest.raises(InputError, match=r"rank 3 is simulated as one with rank 0.*apart=\[3\]"):
        simulate(large, apart=[], processes=[at_once(lambda cluster: cluster.set_clock(0.5, ranks=3))])
