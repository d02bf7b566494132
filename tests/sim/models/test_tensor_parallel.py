"""Tensor and sequence parallelism: how many collectives, how many bytes, what overlaps what."""

from __future__ import annotations

from collections import Counter

import pytest
from model_programs import GPT, LLAMA, comm_bytes, comms, flops, make

from sim.core.program import Comm, Compute, Phase, Wait
from sim.models.embedding import embedding_block
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from sim.prices.operator_prices import Costs
from sim.prices.profiles import load_profile
from topology.presets import GPUS

SBH = 512 * 2 * 1024 * 2  # bytes of one [s, b, h] in 16 bits


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_all_reduces_of_a_layer(model):
    """Two forward, two backward, two more with full recompute (Shoeybi 2019, section 3)."""
    block = layer_block(make(model, {"recompute": {"mode": "full", "early_stop": False}}, tp=4), 0)
    for program in (block.forward, block.backward, block.recompute):
        assert comms(program, "tp") == Counter(all_reduce=2)
        assert comm_bytes(program, "tp") == 2 * SBH


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_sequence_parallelism_moves_the_same_forward(model):
    """An all-gather and a reduce-scatter for each all-reduce; backward gathers its inputs again (Korthikanti
    4.2.2).
    """
    block = layer_block(make(model, tp=4, sp=True), 0)
    assert comms(block.forward, "tp") == Counter(all_gather=2, reduce_scatter=2)
    assert comms(block.backward, "tp") == Counter(all_gather=4, reduce_scatter=2)
    assert comm_bytes(block.forward, "tp") == 4 * SBH
    assert comm_bytes(block.backward, "tp") == 6 * SBH


@pytest.mark.parametrize("framework", ["transformers", "transformers_compiled"])
def test_messages_of_transformers_plan_are_those_of_two_gloo_ranks(framework):
    """Transformers 5.24 with `tp_plan="auto"`, one layer of Llama on two ranks, recorded: forward an all-reduce for the
    embedding and each row-parallel layer, and a gather of the logits; backward one for each of the projections of
    query, key, value, gate, up and output (distributed/tensor_parallel.py: `ColwiseParallel`)."""
    scenario = make(LLAMA, {"framework": framework}, tp=2)
    embedding, layer, head = embedding_block(scenario), layer_block(scenario, 0), head_block(scenario)
    assert [comms(b.forward, "tp") for b in (embedding, layer, head)] == [
        Counter(all_reduce=1),
        Counter(all_reduce=2),
        Counter(all_gather=1),
    ]
    assert [comms(b.backward, "tp") for b in (embedding, layer, head)] == [
        Counter(),
        Counter(all_reduce=5),
        Counter(all_reduce=1),
    ]
    assert (comm_bytes(layer.forward, "tp"), comm_bytes(layer.backward, "tp")) == (2 * SBH, 5 * SBH)
    vocab = scenario.model.padded_vocab(2, 2)
    assert comm_bytes(head.forward, "tp") == 512 * 2 * vocab * 2
    torch = head_block(make(LLAMA, {"framework": framework}))
    kept = [next(s.bytes for s in b.saved if "log" in s.name) for b in (torch, head)]
    assert kept[0] == pytest.approx(kept[1], rel=0.01)  # of the whole vocabulary, whatever tp is


def test_deepspeed_s_column_layers_reduce_each_their_input_s_gradient():
    """deepspeed/module_inject/layers.py: `ColumnParallel.backward`, of every `LinearLayer`."""
    layer = layer_block(make(LLAMA, {"framework": "deepspeed"}, tp=2), 0)
    assert comms(layer.backward, "tp") == Counter(all_reduce=5)
    merged = layer_block(make(LLAMA | {"merged_projections": True}, {"framework": "deepspeed"}, tp=2), 0)
    assert comms(merged.backward, "tp") == Counter(all_reduce=2)


@pytest.mark.parametrize("beside", [True, "two_norms"])
@pytest.mark.parametrize(
    ("framework", "sp", "forward", "backward"),
    [
        ("gpt_neox", False, {"all_reduce": 1}, {"all_reduce": 2}),
        ("gpt_neox", True, {"all_gather": 2, "reduce_scatter": 1}, {"all_gather": 3, "reduce_scatter": 2}),
        ("eager", False, {"all_reduce": 2}, {"all_reduce": 2}),
        ("transformers", False, {"all_reduce": 2}, {"all_reduce": 2}),
    ],
)
def test_gpt_neox_sums_both_branches_of_a_layer_at_once(beside, framework, sp, forward, backward):
    """gpt-neox, model/transformer.py: with `gpt_j_residual` both are made with `parallel_output`, and `self.reduce`
    adds up their sum; each column-parallel layer has a `copy_to_model_parallel_region` of its own (mpu/layers.py)."""
    block = layer_block(make(GPT | {"parallel_block": beside}, {"framework": framework}, tp=4, sp=sp), 0)
    assert comms(block.forward, "tp") == Counter(forward)
    assert comms(block.backward, "tp") == Counter(backward)
    assert comm_bytes(block.forward, "tp") == sum(forward.values()) * SBH
    assert comm_bytes(block.backward, "tp") == sum(backward.values()) * SBH


def test_only_the_re_gather_belongs_to_the_weight_gradient():
    block = layer_block(make(GPT, tp=4, sp=True), 0)
    late = [i for i in block.backward if isinstance(i, Comm) and i.phase is Phase.WEIGHT_GRAD]
    assert [i.kind for i in late] == ["all_gather"] * 2


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("overlap", ["none", "wgrad", "full"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective_op"])
def test_overlap_changes_the_order_alone(sp, overlap, recompute):
    """Same flops, same bytes; every asynchronous message is awaited once, after it was issued."""
    plain = layer_block(make(LLAMA, {"recompute": recompute}, tp=4, sp=sp), 0)
    block = layer_block(make(LLAMA, {"recompute": recompute}, tp=4, sp=sp, tp_overlap=overlap), 0)
    names = ("forward", "backward") if recompute == "selective_op" else ("forward", "backward", "recompute")
    for name in names:
        a, b = getattr(plain, name), getattr(block, name)
        assert flops(a) == pytest.approx(flops(b))
        assert comm_bytes(a, "tp") == pytest.approx(comm_bytes(b, "tp"))
        issued: list[str] = []
        for item in b:
            if isinstance(item, Comm):
                assert item.blocking == (item.handle == "")
                issued += [item.handle] if item.handle else []
            elif isinstance(item, Wait):
                issued.remove(item.handle)
        assert issued == []
        assert overlap != "none" or all(i.blocking for i in b if isinstance(i, Comm))


def test_wgrad_overlap_runs_beside_the_weight_gradient():
    """The input gradient's all-reduce is issued before the weight-gradient matmul and awaited after it."""
    items = layer_block(make(GPT, tp=4, tp_overlap="wgrad"), 0).backward
    names = [i.handle if isinstance(i, Wait) else i.name for i in items]
    start = names.index("qkv_dgrad_all_reduce")
    assert names[start - 1] == "qkv_dgrad"
    assert names[start + 1 : start + 4] == ["qkv_wgrad", "qkv_wgrad_accumulate", "qkv_bias_grad"] or (
        names[start + 1] == "qkv_wgrad"
    )
    assert names.index("qkv_dgrad_all_reduce", start + 1) > names.index("qkv_wgrad")


def test_full_overlap_is_chunked():
    forward = layer_block(make(GPT, tp=4, sp=True, tp_overlap="full"), 0).forward
    assert comms(forward, "tp") == Counter(all_gather=8, reduce_scatter=8)
    chunks = [i for i in forward if isinstance(i, Compute) and i.kind == "gemm" and "mlp_up" in i.name]
    assert [c.shape for c in chunks] == [(1, 256, 1024, 1024)] * 4


def test_vocabulary_parallel_ends():
    embedding, head = (f(make(GPT, tp=4)) for f in (embedding_block, head_block))
    assert comms(embedding.forward, "tp") == Counter(all_reduce=1)
    assert comm_bytes(embedding.forward, "tp") == SBH
    assert comms(head.forward, "tp") == Counter(all_reduce=3)
    assert comm_bytes(head.forward, "tp") == 3 * 4 * 1024  # one fp32 number a token each
    assert comms(head.backward, "tp") == Counter(all_reduce=1)
    split = make(GPT, tp=4, sp=True)
    assert comms(embedding_block(split).forward, "tp") == Counter(reduce_scatter=1)
    assert comms(embedding_block(split).backward, "tp") == Counter(all_gather=1)
    assert comms(head_block(split).forward, "tp") == Counter(all_reduce=3, all_gather=1)


def test_one_rank_talks_to_nobody():
    block = layer_block(make(GPT), 0)
    assert not [i for i in (*block.forward, *block.backward) if isinstance(i, Comm | Wait)]


@pytest.mark.parametrize(("recipe", "gathered"), [("tensorwise", 1), ("rowwise", 2)])
def test_gathers_move_what_is_quantized_already(recipe, gathered):
    """Gathers in 8 bits, a rank's own part quantized before; sums stay in 16 bits. A scale for each row comes later.
    What was gathered forward is kept."""
    training = {"precision": "fp8", "framework": "compiled", "fp8_recipe": recipe}
    block = layer_block(make(LLAMA, training, tp=4, sp=True), 0)
    for program in (block.forward, block.backward):
        assert comm_bytes(program, "tp", "all_gather") == 2 * SBH * gathered / 2
        assert comm_bytes(program, "tp", "reduce_scatter") == 2 * SBH
    order = [i.name for i in block.forward if i.name in ("qkv_cast", "qkv_gather")]
    assert order == (["qkv_cast", "qkv_gather"] if recipe == "tensorwise" else ["qkv_gather", "qkv_cast"])
    moved = sum(i.bytes for i in block.forward if i.name in ("qkv_largest", "qkv_cast"))
    assert moved == (5 * SBH / 2 / 4 if recipe == "tensorwise" else 3 * SBH / 2)


@pytest.mark.parametrize("framework", ["eager", "compiled"])
def test_a_compiled_graph_scatters_a_sum_of_gradients_after_its_matmuls(framework: str) -> None:
    """Async tensor parallelism of torch finds a reduce-scatter only behind one matmul."""
    scenario = make(LLAMA, {"framework": framework}, tp=4, sp=True, tp_overlap="full")
    scatters = [i for i in layer_block(scenario, 0).backward if isinstance(i, Comm) and i.kind == "reduce_scatter"]
    assert [i.blocking for i in scatters] == ([True] * 2 if framework == "compiled" else [False] * 8)


def test_transformer_engine_overlaps_a_columns_backward_in_bulk() -> None:
    """Its `initialize_ub` has qkv_dgrad, qkv_wgrad, fc1_dgrad and fc1_wgrad as "bulk": whole matmuls; qkv_fprop,
    fc1_fprop, proj_dgrad and fc2_dgrad as "ring_exchange": three messages of a rank's rows instead of a gather."""
    chunked, bulk = (
        layer_block(make(LLAMA, {"framework": f}, tp=4, sp=True, tp_overlap="full"), 0) for f in ("eager", "megatron")
    )
    for program, again in (("forward", 0), ("backward", 2)):  # both columns' inputs are gathered again
        before, now = (getattr(block, program) for block in (chunked, bulk))
        assert comm_bytes(before, "tp", "reduce_scatter") == comm_bytes(now, "tp", "reduce_scatter") > 0
        gathered = comm_bytes(before, "tp", "all_gather")
        assert comm_bytes(now, "tp", "all_gather") == again * SBH
        assert comm_bytes(now, "tp", "send_recv") == 3 / 4 * (gathered - again * SBH)
    first = [i.handle if isinstance(i, Wait) else i.name for i in bulk.forward]
    start = first.index("qkv_gather1")
    assert first.index("qkv_chunk0") < first.index("qkv_gather1", start + 1)  # its own rows wait for nobody
    names = [i.handle if isinstance(i, Wait) else i.name for i in bulk.backward]
    column = ["qkv_regather", "qkv_dgrad", "qkv_dgrad_reduce_scatter", "qkv_regather", "qkv_wgrad"]
    places = [names.index("qkv_regather")]
    for name in column[1:]:
        places.append(names.index(name, places[-1] + 1))
    assert names.index("qkv_dgrad_reduce_scatter", places[2] + 1) > places[-1]  # awaited after the weight gradient
    assert {f"attention_out_dgrad_chunk{c}" for c in range(4)} <= set(names)


def test_one_call_of_a_library_issues_chunks_and_messages() -> None:
    costs = Costs(load_profile("h100-sxm"), GPUS["h100-sxm"])
    c = costs.coefficients

    def host_s(framework: str) -> float:
        block = layer_block(make(GPT, {"framework": framework}, tp=4, sp=True, tp_overlap="full"), 0)
        chunks = [i for i in block.forward if isinstance(i, Compute) and i.kind == "gemm" and "mlp_up" in i.name]
        assert len(chunks) == 4
        return sum(costs.host_s(i) for i in chunks)

    assert host_s("megatron") == pytest.approx(c.host_operator_s + 3 * c.group_launch_s)
    assert host_s("eager") == pytest.approx(4 * c.host_operator_s)
    scenario = make(GPT, {"framework": "megatron"}, tp=4, sp=True, tp_overlap="full")
    inside = [i for i in layer_block(scenario, 0).forward if isinstance(i, Comm) and i.group == "tp"]
    assert len(inside) == 2 * 3 + 2 * 4  # messages of two gathers; chunks of two reduce-scatters
    assert all(i.within_call for i in inside)
