"""Async tensor parallelism of torch: chunks that copy engines move, and what a compiled backward runs again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from model_programs import GPT, LLAMA, comm_bytes, comms, make

from sim.core.program import Comm, Compute, Item, Phase, Program, Wait
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from sim.prices.rank_prices import Pricing
from sim.ranks.plan import make_plan
from topology.network import Network
from topology.presets import GPUS

SBH = 512 * 2 * 1024 * 2  # bytes of one [s, b, h] in 16 bits


def layer(model: Any = LLAMA, tp: int = 8, recompute: Any = "none", **layout: Any) -> Any:
    layout = {"sp": True, "tp_overlap": "full", **layout}
    return layer_block(make(model, {"framework": "compiled", "recompute": recompute}, tp=tp, **layout), 0)


def rows(program: Program, name: str) -> list[int]:
    return [i.shape[1] for i in program if isinstance(i, Compute) and i.kind == "gemm" and i.name.startswith(name)]


def shown(item: Item) -> str:
    return item.handle if isinstance(item, Wait) else item.name


def test_a_rank_s_own_rows_wait_for_nobody() -> None:
    """`_pipelined_multi_all_gather_and_consume`: its own rows are copied for the others and multiplied while theirs
    are on their way, two ranks' on two streams."""
    forward = layer(tp=4).forward
    first = [shown(i) for i in forward if "qkv" in shown(i)]
    names = ["qkv_gather_shared", "qkv_gather1", "qkv_gather2"]
    names += [f"qkv_{i}_chunk0" for i in range(3)] + ["qkv_gather1"] + [f"qkv_{i}_chunk1" for i in range(3)]
    assert first == [*names, "qkv_gather2", *(f"qkv_{i}_chunk2" for i in range(3))]
    assert rows(forward, "qkv_0") == [256, 512, 256]
    shared = next(i for i in forward if shown(i) == "qkv_gather_shared")
    assert isinstance(shared, Compute)
    assert shared.bytes == 4 * SBH / 4  # into the buffer, and beside what arrives


def test_a_rank_s_own_rows_of_a_sum_come_last() -> None:
    """`_pipelined_produce_and_all2all`, and the kernel that sums all ranks' results for its rows."""
    forward = layer().forward
    last = [i for i in forward if "mlp_down" in shown(i)]
    kinds = ["chunk" if isinstance(i, Compute) and i.kind == "gemm" else type(i).__name__ for i in last]
    assert kinds == ["chunk", "Comm"] * 4 + ["chunk"] + ["Wait"] * 4 + ["Compute"]
    assert rows(forward, "mlp_down") == [256, 256, 256, 128, 128]
    summed = last[-1]
    assert isinstance(summed, Compute)
    assert summed.bytes == SBH + SBH / 8


def test_all_bytes_are_sent_once() -> None:
    for program in (layer().forward, layer(GPT).backward):
        assert comm_bytes(program, "tp", "all_gather") == pytest.approx(2 * SBH)
        assert comm_bytes(program, "tp", "reduce_scatter") == pytest.approx(2 * SBH)
        messages = [i for i in program if isinstance(i, Comm) and i.group == "tp"]
        assert all(i.sms == 0 and i.within_call and not i.blocking for i in messages)


def test_copy_engines_take_no_multiprocessors() -> None:
    scenario = make(LLAMA, {"framework": "compiled"}, tp=8, sp=True, tp_overlap="full")
    costs = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])
    pricing = Pricing(make_plan(scenario), costs, Network(scenario.cluster))
    copied = next(i for i in layer().forward if isinstance(i, Comm))
    assert pricing.comm(copied, 0).slows == 0
    plain = next(i for i in layer(tp_overlap="none").forward if isinstance(i, Comm))
    assert pricing.comm(plain, 0).slows > 0


def test_neither_all_reduces_nor_the_head_are_cut_up() -> None:
    """The pass finds gathers and reduce-scatters alone, in graphs of layers alone."""
    for program in (layer(sp=False).forward, layer(sp=False).backward):
        messages = [i for i in program if isinstance(i, Comm)]
        assert len(messages) == 2
        assert all(i.blocking for i in messages)
    head = head_block(make(LLAMA, {"framework": "compiled"}, tp=8, sp=True, tp_overlap="full"))
    assert comms(head.forward, "tp") == Counter(all_gather=1, all_reduce=3)


@pytest.mark.parametrize("overlap", ["none", "full"])
def test_a_compiled_backward_runs_again_what_it_reads(overlap: str) -> None:
    """The partitioners of torch 2.6, 2.8 and 2.14 under torchtitan's policy, recorded on a CPU: of query, key, value,
    output, gate, up and down the backward runs key and up again, with both gathers; query, value, gate and the first
    sum are kept."""
    block = layer(recompute="selective_op", tp_overlap=overlap)
    again = {i.name.split("_chunk")[0] for i in block.recompute if isinstance(i, Compute) and i.kind == "gemm"}
    assert again == {"qkv_1", "mlp_up_1"}
    assert comm_bytes(block.recompute, "tp") == pytest.approx(2 * SBH)
    assert not comms(block.recompute, "tp")["reduce_scatter"]
    plain = layer(recompute="selective_op", tp_overlap="none")
    assert sum(s.bytes for s in block.saved) == pytest.approx(sum(s.bytes for s in plain.saved))
    sums = [s.bytes for s in plain.saved if "reduce_scatter" in s.name]
    assert sums == [SBH / 8]


def test_without_tensor_parallelism_it_runs_the_output_again() -> None:
    """As recorded there: key, output and up; the last result is not kept."""
    block = layer(tp=1, recompute="selective_op", sp=False, tp_overlap="none")
    again = [i.name for i in block.recompute if isinstance(i, Compute) and i.kind == "gemm"]
    assert again == ["qkv_1", "attention_out", "mlp_up_1"]
    assert not [s for s in block.saved if s.name.startswith("mlp_down")]
    assert shown(block.recompute[-1]) == "swiglu"


@pytest.mark.parametrize(("more", "tp", "sums"), [({}, 8, 1), ({"software_date": "2025-03"}, 8, 2), ({}, 1, 0)])
def test_before_torch_2_8_the_last_sum_was_kept(more: dict[str, Any], tp: int, sums: int) -> None:
    """torch 2.6's partitioner takes the wait for the last reduce-scatter's result for a reader of it."""
    training = {"framework": "compiled", "recompute": "selective_op", **more}
    block = layer_block(make(LLAMA, training, tp=tp, sp=tp > 1), 0)
    assert sum("reduce_scatter" in s.name for s in block.saved) == sums
    assert shown(block.recompute[-1]) == "swiglu"


@pytest.mark.parametrize(("sequences", "copies"), [(1, 0), (2, 4)])
def test_gathered_rows_of_several_sequences_are_copied_for_weight_gradients(sequences: int, copies: int) -> None:
    """Code of torch 2.6's Inductor for a Llama layer: queries' and the MLP's inputs, and the gradients of both sums."""
    training = {"framework": "compiled", "micro_batch_size": sequences}
    backward = layer_block(make(LLAMA, training, tp=8, sp=True, tp_overlap="full"), 0).backward
    found = [i for i in backward if isinstance(i, Compute) and i.kind == "copy" and i.phase is Phase.WEIGHT_GRAD]
    assert [i.bytes for i in found] == [2 * SBH] * copies


def test_a_transposing_kernel_reads_any_order() -> None:
    training = {"framework": "compiled", "precision": "fp8"}
    backward = layer_block(make(LLAMA, training, tp=8, sp=True, tp_overlap="full"), 0).backward
    assert not [i for i in backward if isinstance(i, Compute) and i.kind == "copy" and i.phase is Phase.WEIGHT_GRAD]
