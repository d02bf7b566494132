"""The shipped processes against closed forms, and the documentation's own code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.core.errors import InputError
from sim.inputs.scenario import Scenario, parse_scenario
from sim.processes.cluster import Process
from sim.processes.examples import background_traffic, checkpoint, link_flap, storage_read, thermal_throttling
from sim.simulation import Simulation, simulate
from sim.views.headline import headline

PAGE = Path(__file__).parents[3] / "docs" / "processes.md"


def scenario(parallelism: dict[str, Any], batch: int = 16) -> Scenario:
    return parse_scenario(
        {
            "model": {"preset": "llama3.2-1b", "layers": 4},
            "cluster": {"preset": "dgx-h100", "intra_node": {"nvls_efficiency": 0.0}},  # rings, which fill the NICs
            "training": {"seq_len": 2048, "global_batch_size": batch},
            "parallelism": parallelism,
        },
        "test",
    )


PIPELINE = scenario({"pp": 4})
TWO_NODES = scenario({"dp": 16, "dp_sync": "after_backward"})


def longer_s(s: Scenario, process: Process) -> float:
    """How much longer a step takes with a process beside it."""
    step = simulate(s, processes=[process])
    return step.step_time_s - step.without_processes_s


def reduction(step: Simulation) -> tuple[float, float]:
    """When the gradients' all-reduce starts and ends."""
    (span,) = {(x.start_s, x.end_s) for x in step.timeline.spans() if x.kind == "ALL_REDUCE" and x.detail.bytes > 1e6}
    return span


def test_throttling_costs_the_work_that_is_not_done() -> None:
    """All stages throttled: for d seconds a part of the work is left, wherever the pipeline waits."""
    one = scenario({}, batch=4)
    assert longer_s(one, thermal_throttling(0, at_s=0.01, scale=0.6, for_s=0.02)) == pytest.approx(0.4 * 0.02)
    # To the end: what was left at 10 ms takes 1/0.6 times as long.
    left_s = simulate(one).step_time_s - 0.01
    assert longer_s(one, thermal_throttling(0, at_s=0.01, scale=0.6)) == pytest.approx(left_s * (1 / 0.6 - 1))
    # One data-parallel rank of sixteen: all wait for it.
    slow = thermal_throttling(5, at_s=0.0, scale=0.5)
    start_s, _ = reduction(simulate(TWO_NODES))
    optimizer_s = simulate(TWO_NODES).step_time_s - reduction(simulate(TWO_NODES))[1]
    assert longer_s(TWO_NODES, slow) == pytest.approx(start_s + optimizer_s, rel=0.01)


def test_every_flap_costs_its_length_and_only_while_bytes_flow() -> None:
    start_s, end_s = reduction(simulate(TWO_NODES))
    middle_s, node = (start_s + end_s) / 2, range(8, 16)
    assert longer_s(TWO_NODES, link_flap(node, at_s=middle_s, down_s=0.03)) == pytest.approx(0.03)
    thrice = link_flap(node, at_s=middle_s, down_s=0.03, up_s=1e-4, times=3)
    assert longer_s(TWO_NODES, thrice) == pytest.approx(0.09)
    assert longer_s(TWO_NODES, link_flap(node, at_s=0.0, down_s=start_s / 2)) == pytest.approx(0.0, abs=1e-12)


def test_background_traffic_takes_its_fair_share() -> None:
    """One flow as wide as the NICs of the GPUs that it joins halves the collective on them."""
    quiet, beside = simulate(TWO_NODES), simulate(TWO_NODES, processes=[background_traffic(0, 8, n_bytes=1e12)])
    alone_s, (start_s, end_s) = reduction(quiet)[1] - reduction(quiet)[0], reduction(beside)
    assert 1.9 * alone_s < end_s - start_s < 2.01 * alone_s


@pytest.mark.parametrize("s", [PIPELINE, TWO_NODES], ids=["pipeline", "two nodes"])
def test_a_blocking_checkpoint_costs_its_bytes(s: Scenario) -> None:
    latency_s = s.cluster.inter_node.latency_s
    assert longer_s(s, checkpoint(2e9, bytes_per_s=10e9)) == pytest.approx(latency_s + 0.2, rel=1e-9)
    share = s.cluster.inter_node.usable_bytes_per_s * s.cluster.inter_node.nics_per_node / s.cluster.gpus_per_node
    assert longer_s(s, checkpoint(2e9)) == pytest.approx(latency_s + 2e9 / share, rel=1e-9)


def test_an_asynchronous_checkpoint_costs_what_it_takes_of_the_links() -> None:
    assert longer_s(PIPELINE, checkpoint(1e8, bytes_per_s=1e9, asynchronous=True)) == pytest.approx(0.0, abs=1e-12)
    alone = simulate(TWO_NODES)
    start_s, _ = reduction(alone)
    size, rate = 1.0 * start_s * 20e9, 20e9  # over when the gradients' all-reduce begins
    assert longer_s(TWO_NODES, checkpoint(size, rate, asynchronous=True)) < 1e-3 * alone.step_time_s
    assert longer_s(TWO_NODES, checkpoint(2 * size, rate, asynchronous=True)) > 1e-3 * alone.step_time_s


def test_a_slow_read_delays_the_first_forward() -> None:
    latency_s = PIPELINE.cluster.inter_node.latency_s
    read = storage_read(5e7, bytes_per_s=0.5e9)
    step = simulate(PIPELINE, processes=[read])
    assert longer_s(PIPELINE, read) == pytest.approx(latency_s + 0.1, rel=1e-9)
    first = min(span.start_s for span in step.timeline.spans() if span.kind == "F")
    assert first == pytest.approx(latency_s + 0.1)
    assert {span.kind for span in step.timeline.spans() if span.stream == "process"} == {"LOAD", "READ"}


ENTRIES: dict[str, tuple[dict[str, Any], Process]] = {
    "thermal_throttling": ({"ranks": [1], "at_s": 0.01, "scale": 0.5}, thermal_throttling([1], 0.01, 0.5)),
    "link_flap": ({"at_s": 0.03, "down_s": 0.1}, link_flap(None, 0.03, 0.1)),
    "background_traffic": ({"source": 0, "target": 8, "n_bytes": 1e9}, background_traffic(0, 8, 1e9)),
    "checkpoint": ({"n_bytes": 1e9}, checkpoint(1e9)),
    "storage_read": ({"n_bytes": 1e9, "bytes_per_s": 1e9}, storage_read(1e9, 1e9)),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_scenario_lists_them(name: str) -> None:
    entry, process = ENTRIES[name]
    listed = parse_scenario({**TWO_NODES.model_dump(mode="json"), "processes": {name: [entry]}})
    assert parse_scenario(listed.model_dump(mode="json")) == listed
    step, same = simulate(listed, engine="static"), simulate(TWO_NODES, processes=[process])
    assert step.step_time_s == same.step_time_s > simulate(TWO_NODES).step_time_s
    assert step.result["processes"] == same.result["processes"]


def test_one_rank_needs_no_list() -> None:
    whole = TWO_NODES.model_dump(mode="json")
    one, listed = ({"thermal_throttling": [{"ranks": ranks, "scale": 0.9}]} for ranks in (7, [7]))
    assert parse_scenario({**whole, "processes": one}) == parse_scenario({**whole, "processes": listed})


def test_many_ranks_stay_folded_but_for_those_named() -> None:
    large = {"parallelism": {"dp": 512}, "training": {"seq_len": 2048, "global_batch_size": 512}}
    whole = {**TWO_NODES.model_dump(mode="json"), **large, "cluster": "dgx-h100"}
    slow = {"thermal_throttling": [{"ranks": [7], "scale": 0.9}]}
    step = simulate(parse_scenario({**whole, "processes": slow}))
    assert len(step.plan.classes) == 2
    assert step.step_time_s > step.without_processes_s


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ({"link_flaps": []}, "link_flap"),
        ({"link_flap": [{"at_s": 0.1}]}, r"link_flap\[0\]\.down_s"),
        ({"link_flap": [{"at_s": 0.1, "down_s": 1.0, "ranks": [16]}]}, "below the number of ranks"),
        ({"background_traffic": [{"source": 3, "target": 3, "n_bytes": 1.0}]}, "which is the source"),
        ({"checkpoint": [{"n_bytes": 0}]}, r"checkpoint\[0\]\.n_bytes"),
        ({"checkpoint": [{"n_bytes": 1, "ranks": []}]}, "found an empty list; must have at least 1 entry"),
        ({"checkpoint": [{"n_bytes": 1, "ranks": 99}]}, "found 99; must be below the number of ranks"),
    ],
)
def test_a_wrong_entry_is_named(processes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_scenario({**TWO_NODES.model_dump(mode="json"), "processes": processes})


def test_the_documentations_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    longer = [float(after) > float(before) for after, before in (re.findall(r"[\d.]+(?= s)", x) for x in lines[1:])]
    assert longer == [True, True, True, True, False, True]  # only what goes on beside the step costs nothing


def test_each_disturbance_of_the_shipped_scenario_costs_something() -> None:
    path = PAGE.parents[1] / "scenarios" / "processes_dp16.yaml"
    whole = yaml.safe_load(path.read_text(encoding="utf-8"))
    step_s = simulate(parse_scenario(whole)).step_time_s
    for name in whole["processes"]:
        others = {key: value for key, value in whole["processes"].items() if key != name}
        assert simulate(parse_scenario({**whole, "processes": others})).step_time_s < step_s


def test_the_headline_says_in_seconds_how_much_longer_a_step_takes() -> None:
    processes = {"checkpoint": [{"n_bytes": 30e9, "bytes_per_s": 10e9}]}
    read = parse_scenario({**PIPELINE.model_dump(mode="json"), "processes": processes})
    (said,) = [number for number in headline(simulate(read).outcome) if number.name == "By processes"]
    assert (said.value, said.note) == ("+3.000 s", "checkpoint")
