"""Which kernels, devices and process groups a what-if means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.inputs.scenario import load_scenario
from sim.simulation import simulate
from sim.traces.chakra_out import write_chakra
from sim.traces.changes import MATMUL, Change, doubts, dp_change, gpu_pair, network_of
from sim.traces.kineto import read_kineto
from sim.traces.matching import join
from sim.traces.reading import load
from sim.traces.recording import Message, Node, Recording
from sim.traces.replay import replay
from tests.sim.traces import programs as p

SCENARIOS = Path(__file__).parents[3] / "scenarios"


@pytest.mark.parametrize(
    ("device", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", ""),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_a_device_is_the_preset_of_its_own_name(device: str, preset: str) -> None:
    if preset:
        assert gpu_pair("b300-sxm", device)[0].name == preset
    else:
        with pytest.raises(ValueError, match="is no preset; say --gpu FROM=b300-sxm"):
            gpu_pair("b300-sxm", device)


@pytest.mark.parametrize(
    ("kernel", "arithmetic"),
    [
        ("sm90_xmma_gemm_bf16bf16", True),
        ("triton_tem_fused_mm_3", True),
        ("aten::convolution", True),
        ("triton_poi_fused_addmm_relu_0", False),
        ("triton_red_fused_convert_element_type_3", False),
        ("void at::native::convert_kernel", False),
    ],
)
def test_generated_elementwise_kernels_are_no_matmuls(kernel: str, arithmetic: bool) -> None:
    assert bool(MATMUL.search(kernel)) == arithmetic


def test_an_unknown_collective_is_no_computation() -> None:
    """Traces of before torch 2.2 do not say what a kernel of NCCL carries out."""
    _, traces = p.run([[p.Kernel(1000, 1000, 50_000, 7), p.Kernel(1000, 1000, 20_000, 20, True)]])
    for event in traces[0]["traceEvents"]:
        event.get("args", {}).pop("Collective name", None)
    recording = join([read_kineto("rank0.json", 0, json.dumps(traces[0]).encode())])
    device = [n for n in recording.nodes if n.name.startswith(("ampere", "nccl"))]
    assert [(n.name.split("_")[0], n.message, n.compute) for n in device] == [
        ("ampere", None, True),
        ("ncclDevKernel", None, False),
    ]


def two_by_two() -> Recording:
    """Ranks 0 to 3: tensor-parallel pairs (0, 1) and (2, 3) reduce 1 kB, then data-parallel (0, 2) and (1, 3) 1 MB."""
    nodes = []
    for rank in range(4):
        tp, dp = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        for at, (ranks, size) in enumerate(((tp, 1e3), (dp, 1e6))):
            name = f"{ranks[0]}-{ranks[1]}"
            message = Message("all_reduce", name, ranks, size, (name,))
            waits = [(len(nodes) - 1, 0)] if at else []
            nodes.append(Node(rank, "comm", "ALL_REDUCE", name, 1000 * at, 1000 * at + 1000, waits, message))
    return Recording("by hand", (0, 1, 2, 3), nodes, 4)


def test_all_data_parallel_groups_of_a_layout_change() -> None:
    recording = two_by_two()
    change = Change(dp=dp_change(recording, 4, None))
    assert change.dp == (frozenset({"0-2", "1-3"}), 2, 4)
    assert replay(recording, change).end_s[1::2] == pytest.approx([2.5e-6] * 4)  # 2·3/4 for 2·1/2, for every pair
    fewer = replay(recording, Change(dp=dp_change(recording, 1, None)))
    assert fewer.step_time_s == pytest.approx(1e-6)  # and no pair still reduces
    assert dp_change(recording, 4, "2-3")[0] == {"0-1", "2-3"}
    assert "others reduce too, of which --dp-group takes one: '0-1', '2-3'" in doubts(recording, change)[0]
    assert doubts(recording, Change()) == []
    # Ranks of the larger groups keep their distance: 0, 2, 4, … lie on other nodes too.
    network = network_of("dgx-h100", 32)
    priced = replay(recording, Change(dp=dp_change(recording, 16, None), network=network))
    seconds = [
        network.collective("all_reduce", ranks, size).seconds for ranks, size in (((0, 1), 1e3), (range(0, 32, 2), 1e6))
    ]
    assert priced.end_s[1] == pytest.approx(sum(seconds), rel=1e-6)


def test_a_repair_changes_the_transfers_of_its_kind_bytes_and_ranks_alone() -> None:
    repaired = replay(
        two_by_two(), Change(transfers={("all_reduce", 1e3, (0, 1)): 0.5, ("all_gather", 1e6, (0, 2)): 0.5})
    )
    assert repaired.end_s == pytest.approx([0.5e-6, 2e-6, 0.5e-6, 2e-6, 1e-6, 2e-6, 1e-6, 2e-6])


def test_a_barrier_has_no_bytes_and_is_priced_as_an_all_reduce_of_four() -> None:
    nodes = [
        Node(rank, "comm", kind.upper(), kind, 0, 1000, [], Message(kind, "", (0, 1), 0.0, (kind,)))
        for kind in ("barrier", "all_gather")
        for rank in (0, 1)
    ]
    recording, network = Recording("by hand", (0, 1), nodes, 2), network_of("dgx-h100", 2)
    change = Change(network=network)
    assert doubts(recording, change) == [
        "--cluster: the traces do not say the bytes of 2 transfers, which keep their seconds"
    ]
    priced_s = network.collective("all_reduce", (0, 1), 4.0).seconds
    assert replay(Recording("by hand", (0, 1), nodes[:2], 2), change).step_time_s == pytest.approx(priced_s)


def test_a_written_step_takes_as_long_as_on_shared_links(tmp_path: Path) -> None:
    keys = ["model.layers=2", "parallelism.dp=4", "parallelism.tp=2", "parallelism.sp=true"]
    scenario = load_scenario(SCENARIOS / "zero3_llama8b_dp64.yaml", [*keys, "training.global_batch_size=4"])
    simulation = simulate(scenario, expand=True)
    assert simulation.step_time_s > simulate(scenario, share_links=False).step_time_s
    *files, groups = write_chakra(simulation, tmp_path / "step")
    recording = load(files, groups=groups)
    assert recording.step_ns * 1e-9 == pytest.approx(simulation.step_time_s, abs=1e-6)
    gpus = gpu_pair("h100-sxm=b200-sxm", "")
    assert "stand for several operators each" in doubts(recording, Change(gpus=gpus))[0]


def test_a_kernels_name_does_not_say_how_many_operators_it_is() -> None:
    """A file's attribute does; names that others write may hold any words."""
    named = Recording("by hand", (0,), [Node(0, "compute", "F", "first … last", 0, 1000, compute=True)], 1)
    assert doubts(named, Change(gpus=gpu_pair("h100-sxm=b200-sxm", ""))) == []
