"""What a collective takes from the computation beside it: NCCL's channels, fewer between nodes than within one."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.actions import Kind
from sim.core.program import Comm, Compute, Phase, Wait
from sim.inputs.scenario import parse_scenario
from sim.models.layer import layer_block
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.rank_prices import Pricing
from sim.programs.data_parallel import make_data_parallel
from sim.programs.stages import PHASES
from sim.programs.weave import weave_backward, weave_forward
from sim.ranks.plan import make_plan
from tests.sim.cases import scenario_with
from topology.network import Network


def slows(cluster: str, group: str, kind: str = "reduce_scatter", **layout: int) -> float:
    """`Priced.slows` of a message of a group, in multiprocessors."""
    scenario = parse_scenario(
        {
            "model": "llama3-8b",
            "training": {"seq_len": 4096, "global_batch_size": layout.get("dp", 1)},
            "parallelism": layout,
            "cluster": cluster,
        },
        "test",
    )
    costs = Costs(load_profile(scenario.calibration), scenario.cluster.gpu)
    priced = Pricing(make_plan(scenario), costs, Network(scenario.cluster)).comm(
        Comm("x", kind, group, 1e8, Phase.WEIGHT_GRAD, False, "h"), 0
    )
    return priced.slows * scenario.cluster.gpu.sm_count


@pytest.mark.parametrize(
    ("cluster", "group", "layout", "channels"),
    [
        ("dgx-h100", "tp", {"tp": 8}, 24),  # within a node
        ("dgx-h100", "dp_cp", {"tp": 8, "dp": 4}, 4),  # one GPU a node, one 400 Gbit/s NIC
        ("dgx-h100", "dp_cp", {"dp": 32}, 16),  # eight GPUs a node, eight NICs
        ("dgx-a100", "dp_cp", {"tp": 8, "dp": 4}, 2),  # 200 Gbit/s: two for the NIC
        ("gb200-nvl72", "dp_cp", {"tp": 8, "dp": 8}, 24),  # one NVLink domain
    ],
)
def test_channels_of_a_group(cluster: str, group: str, layout: dict[str, Any], channels: int) -> None:
    assert slows(cluster, group, **layout) == pytest.approx(channels, rel=0.01)


def test_sends_to_all_use_a_power_of_two_of_channels() -> None:
    """NCCL's src/graph/paths.cc, ncclTopoComputeP2pChannels: pow2Up."""
    assert slows("dgx-h100", "tp", "all_to_all", tp=8) == pytest.approx(32, rel=0.01)
    assert slows("dgx-h100", "dp_cp", "all_to_all", dp=32) == pytest.approx(16, rel=0.01)


@pytest.mark.parametrize(
    ("framework", "dispatcher", "sms"),
    [
        ("megatron", "all_to_all", None),
        ("megatron", "deepep", 20),
        ("megatron", "hybridep", 16),
        ("megatron_bridge", "hybridep", 32),
    ],
)
def test_multiprocessors_of_libraries(framework: str, dispatcher: str, sms: int | None) -> None:
    """core/transformer/transformer_config.py: moe_deepep_num_sms, moe_hybridep_num_sms; the scripts of Megatron-Bridge,
    utils/overrides.py."""
    layout = {"dp": 8, "ep": 8, "ep_dispatcher": dispatcher}
    keys = {"framework": framework, "seq_len": 4096, "global_batch_size": 8}
    scenario = scenario_with(keys, layout, model="qwen3-30b-a3b", cluster="dgx-h100")
    block = layer_block(scenario, 0)
    sent = [i for i in (*block.forward, *block.backward) if isinstance(i, Comm) and i.kind == "all_to_all"]
    assert {i.sms for i in sent} == {sms}
    costs = Costs(load_profile(scenario.calibration), scenario.cluster.gpu)
    priced = Pricing(make_plan(scenario), costs, Network(scenario.cluster)).comm(sent[0], 0)
    assert priced.slows * scenario.cluster.gpu.sm_count == pytest.approx(sms or 32, rel=0.01)


def test_gathered_parameters_are_copied_into_place() -> None:
    """FSDP2: what was gathered is read and written once more, after the wait and before the layer."""
    scenario = parse_scenario(
        {
            "model": "llama3-8b",
            "training": {"seq_len": 4096, "global_batch_size": 8, "param_dtype": "fp32"},
            "parallelism": {"dp": 8, "zero": 3},
            "cluster": "dgx-h100",
        },
        "test",
    )
    dp, block = make_data_parallel(make_plan(scenario)), layer_block(scenario, 0)
    for woven in (weave_forward((block,), dp, True), weave_backward((block,), dp, PHASES[Kind.B], True)):
        gather, wait, unpack = woven[0][:3]
        assert isinstance(gather, Comm)
        assert isinstance(wait, Wait)
        assert isinstance(unpack, Compute)
        assert gather.bytes == 2 * block.params
        assert unpack.bytes == 2 * gather.bytes


@pytest.mark.parametrize(
    ("ranks", "given", "used"),
    [
        (64, {}, 72),
        (72, {}, 72),
        (128, {}, 64),
        (144, {}, 72),
        (256, {}, 64),
        (480, {}, 72),
        (256, {"nvlink_domain": 72}, 72),
    ],
)
def test_racks_give_equal_segments_to_jobs_of_a_power_of_two(ranks: int, given: dict[str, int], used: int) -> None:
    scenario = scenario_with(
        {"seq_len": 4096, "global_batch_size": ranks}, {"dp": ranks}, cluster={"preset": "gb200-nvl72", **given}
    )
    assert scenario.cluster.nvlink_domain == used
    assert parse_scenario(scenario.model_dump()).cluster == scenario.cluster


def test_experts_of_every_rack_exchange_over_nvlink() -> None:
    """Four groups of 64 on 256 GPUs: none lies across racks."""
    scenario = scenario_with(
        {"seq_len": 4096, "global_batch_size": 64},
        {"dp": 64, "ep": 64, "pp": 4, "zero": 1},
        model="deepseek-v3",
        cluster="gb200-nvl72",
    )
    costs = Costs(load_profile(scenario.calibration), scenario.cluster.gpu)
    pricing = Pricing(make_plan(scenario), costs, Network(scenario.cluster))
    sent = [pricing.comm(Comm("x", "all_to_all", "ep", 2e8, Phase.FORWARD), r).seconds for r in (0, 64, 128, 192)]
    assert len(set(sent)) == 1
    assert sent[0] == pytest.approx(2e8 * 63 / 64 / 900e9, rel=1.0)  # over NICs it would take nine times as long


def test_experts_over_nodes_exchange_only_their_part_inside_each() -> None:
    """To the same host go 7 of 128 blocks, not the 7 of 8 measured within one: over PCIe those would take longest."""
    scenario = parse_scenario(
        {
            "model": "mixtral-8x7b",
            "training": {"seq_len": 4096, "global_batch_size": 128},
            "parallelism": {"dp": 128, "ep": 8},
            "cluster": {"gpu": "h100-sxm", "intra_node": {"kind": "pcie", "bandwidth_bytes_per_s": 31.5e9}},
        },
        "test",
    )
    costs, network = Costs(load_profile(scenario.calibration), scenario.cluster.gpu), Network(scenario.cluster)
    pricing, size = Pricing(make_plan(scenario), costs, network), float(1 << 28)
    seconds = pricing.collective("all_to_all", list(range(128)), size).seconds
    assert seconds == pytest.approx(120 / 128 * size / 48e9, rel=0.01)  # one NIC each
