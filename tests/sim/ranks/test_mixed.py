"""Clusters of nodes of two kinds: each rank has its own GPU's prices and memory, and the slower one decides."""

from typing import Any

import pytest

from sim.core.actions import Kind
from sim.core.errors import InputError
from sim.inputs.input_source import Source
from sim.inputs.scenario import Scenario, parse_scenario
from sim.search.space_of_scenario import make_space
from sim.simulation import simulate
from sim.studies.sweep_worker import attempt, pack

FAST = {"kind": "rail_optimized", "nic_bandwidth_bytes_per_s": 1e18, "latency_s": 0.0}
TWIN = {"preset": "dgx-h100", "gpu": {"preset": "h100-sxm", "name": "twin", "variant_of": "h100-sxm"}}


def scenario(cluster: Any, layout: dict[str, Any], **more: Any) -> Scenario:
    training = {"seq_len": 2048, "global_batch_size": 16}
    return parse_scenario(
        {"model": "llama3.2-1b", "training": training, "parallelism": layout, "cluster": cluster, **more}
    )


def mixed(*presets: Any, **more: Any) -> dict[str, Any]:
    return {"mixed": [{**({"preset": p} if isinstance(p, str) else p), "nodes": 1, **more} for p in presets]}


LAYOUTS = [
    {"tp": 8, "sp": True, "dp": 2},
    {"tp": 16, "sp": True},
    {"tp": 4, "pp": 4},
    {"dp": 16, "zero": 3},
    {"cp": 4, "dp": 4, "zero": 1},
    {"tp": 2, "pp": 2, "dp": 4, "schedule": "zb_h1"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_nodes_of_one_kind_under_two_names_are_a_plain_cluster(layout: dict[str, Any]) -> None:
    plain = simulate(scenario("dgx-h100", layout)).outcome
    twins = simulate(scenario(mixed("dgx-h100", TWIN), layout)).outcome
    assert [gpu.name for gpu in twins.scenario.cluster.gpus] == ["h100-sxm", "twin"]
    for figure in ("step_time_s", "peak_memory_bytes", "peak_reserved_bytes"):
        assert getattr(twins, figure) == pytest.approx(getattr(plain, figure), rel=1e-9)
    assert twins.utilization.mfu == pytest.approx(plain.utilization.mfu, rel=1e-9)


def test_data_parallelism_goes_at_the_pace_of_the_slow_node() -> None:
    """Links between nodes cost nothing: the step is then that of slow nodes alone, and the fast ones wait."""
    layout = {"tp": 8, "sp": True, "dp": 2}
    both = simulate(scenario(mixed("dgx-h100", "dgx-a100", inter_node=FAST), layout)).outcome
    slow, fast = (
        simulate(scenario({"preset": preset, "inter_node": FAST}, layout)).outcome
        for preset in ("dgx-a100", "dgx-h100")
    )
    by_rank = {row.rank: row for row in both.ranks}
    assert by_rank[8].compute_s == pytest.approx(slow.ranks[0].compute_s, rel=1e-3)
    assert by_rank[0].compute_s == pytest.approx(fast.ranks[0].compute_s, rel=1e-3)
    assert both.step_time_s == pytest.approx(slow.step_time_s, rel=2e-3)
    assert both.step_time_s > 1.5 * fast.step_time_s


def test_a_slow_last_stage_is_never_idle_between_its_first_and_last_action() -> None:
    """1F1B whose last stage is the slow one: it waits for the first forward to arrive, and then for nothing."""
    layout = {"tp": 8, "sp": True, "pp": 2, "p2p_overlap": True}
    step = simulate(scenario(mixed("dgx-h100", "dgx-a100", inter_node=FAST), layout))
    first, last = (dict(spans) for spans in step.spans)
    begins, ends = min(a for a, _ in last.values()), max(b for _, b in last.values())
    forward = next(span for action, span in first.items() if action.kind is Kind.F and action.micro_batch == 0)
    backward = max(span for action, span in first.items() if action.kind is Kind.B)
    assert sum(b - a for a, b in last.values()) == pytest.approx(ends - begins, rel=1e-3)
    rest_s = step.step_time_s - (forward[1] - forward[0]) - (ends - begins) - (backward[1] - backward[0])
    assert 0 < rest_s < 0.05 * step.step_time_s  # messages, clipping and optimizer


def test_memory_is_each_gpus_own() -> None:
    """The same bytes fit 80 GB and not 40; a stage on the small GPU decides, wherever the larger peak is."""
    cluster = mixed("dgx-a100", {"preset": "dgx-a100", "gpu": "a100-sxm-40g"})
    layout = {"tp": 8, "pp": 2, "layers_per_stage": [4, 12]}
    training = {"seq_len": 8192, "micro_batch_size": 12, "global_batch_size": 96}
    found = simulate(scenario(cluster, layout, training=training)).outcome
    of_stage = {row.rank: row.peak / 2**30 for row in found.memory}
    assert 40 < of_stage[8] < 80
    assert not found.fits_in_memory
    assert any("GiB reserved of 37.3 GiB on the fullest a100-sxm-40g rank" in warning for warning in found.warnings)
    large = {"mixed": cluster["mixed"][::-1]}
    turned = simulate(scenario(large, layout, training=training)).outcome
    assert turned.fits_in_memory == (of_stage[0] <= 40)  # GiB: the small GPU now holds the first stage


def test_a_row_of_a_sweep_fits_as_the_step_does() -> None:
    cluster = mixed("dgx-a100", {"preset": "dgx-a100", "gpu": "a100-sxm-40g"})
    layout = {"tp": 8, "pp": 2, "layers_per_stage": [4, 12]}
    training = {"seq_len": 8192, "micro_batch_size": 12, "global_batch_size": 96}
    data = {"model": "llama3.2-1b", "training": training, "parallelism": layout, "cluster": cluster}
    changes = [(("training.micro_batch_size", size),) for size in (12, 1)]
    packed = pack(Source("s", data), "s", changes)
    assert [attempt(packed, change).fits_in_memory for change in changes] == [False, True]


def test_utilization_counts_the_peaks_of_all_gpus() -> None:
    found = simulate(scenario(mixed("dgx-h100", "dgx-a100"), {"tp": 8, "dp": 2})).outcome
    peak = (989.4e12 + 312e12) / 2
    assert found.utilization.mfu == pytest.approx(found.utilization.model_flops_per_s_per_gpu / peak, rel=1e-12)
    assert found.provenance.of_other_gpus == {"a100-sxm": "a100-sxm"}
    again = parse_scenario(found.scenario.model_dump(mode="json"))
    assert simulate(again).outcome.step_time_s == found.step_time_s


def test_a_group_of_both_kinds_starts_as_the_slower_and_reduces_in_no_switch() -> None:
    from topology.network import Network

    network = Network(scenario(mixed("dgx-h100", "dgx-a100"), {"tp": 8, "dp": 2}).cluster)
    fast, slow, both = (network.group(ranks) for ranks in (range(8), range(8, 16), range(16)))
    assert (fast.nvls_share, slow.nvls_share, both.nvls_share) == (0.85, 0.0, 0.0)
    assert both.timing.ring.starts_s == slow.timing.ring.starts_s > fast.timing.ring.starts_s
    assert both.timing.ring.share == min(fast.timing.ring.share, slow.timing.ring.share)
    assert not both.fabric.lines  # NCCL: LL128 among GPUs of one compute capability
    assert both.inter_ring_bytes_per_s == pytest.approx(24e9)  # the A100's NIC


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"mixed": ["dgx-h100", "dgx-a100"]}, r"cluster.mixed\[0\].nodes: found null; must be an integer from 1"),
        ({"mixed": [{"preset": "dgx-h100", "nodes": 1}]}, "must be a list of two clusters or more"),
        (mixed("dgx-h100", "gb200-nvl72"), "nodes of dgx-h100 and of gb200-nvl72 have 8 and 4 GPUs"),
        (mixed("dgx-h100", {"preset": "dgx-a100", "inter_node": {"kind": "torus"}}), "a torus joins equal nodes only"),
        (mixed("dgx-h100", {"preset": "dgx-h100", "gpu": {"power_limit_w": 500}}), "both called h100-sxm"),
        ({**mixed("dgx-h100", "dgx-a100"), "nodes": 4}, "cluster.nodes: cannot be given with mixed"),
        (mixed("dgx-h100", "dgx-v100"), "GPU v100 has no bf16 peak"),
    ],
)
def test_what_does_not_go_together_is_refused(cluster: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scenario(cluster, {"tp": 8, "dp": 2})


def test_what_takes_one_kind_says_so() -> None:
    cluster = mixed("dgx-h100", "dgx-a100")
    requests = {"requests": {"count": 4, "prompt_len": 100, "output_len": 10}}
    with pytest.raises(InputError, match="h100-sxm and a100-sxm; requests are served on one kind"):
        parse_scenario({"model": "llama3-8b", "cluster": cluster, "inference": requests})
    with pytest.raises(InputError, match=r"calibrations\.v100: is not another GPU of this cluster"):
        scenario(cluster, {"tp": 8, "dp": 2}, calibrations={"v100": "v100"})
    training = {"seq_len": 2048, "global_batch_size": 16}
    data = {"model": "llama3.2-1b", "training": training, "cluster": cluster}
    with pytest.raises(InputError, match="a search needs GPUs of one kind"):
        make_space(Source("s", data), 16, "s")
