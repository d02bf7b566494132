"""Experts: flops of the active ones, exchanges and their bytes, uneven routing; latent attention."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_programs import LLAMA, MOE, TOKENS, comm_bytes, comms, flops, make, named, saved_by_part, saved_bytes

from sim.core.program import Compute, ModelPart
from sim.inputs.model_config import MoeConfig
from sim.models.dims import Shard
from sim.models.layer import layer_block
from sim.models.moe.chance import copies_beyond
from sim.models.moe.routing import expert_load
from sim.models.parameters import count_parameters

# Copies of the fullest of four ranks ÷ the mean, where Megatron-Core balances experts by chance.
FULLEST = 1.0 + copies_beyond(MoeConfig(**MOE["moe"]), 4 * TOKENS, 4) / (2 * TOKENS)
KINDS = ("gemm", "grouped_gemm")


def places(experts: int, top_k: int, among: int) -> float:
    """On how many of `among` places a token's experts lie, counted over all choices of different experts."""
    return among * (1 - math.comb(experts - experts // among, top_k) / math.comb(experts, top_k))


def test_flops_are_those_of_the_active_experts():
    block = layer_block(make(MOE), 0)
    assert flops(block.forward, ("grouped_gemm",)) == 2 * TOKENS * 2 * 3 * 1024 * 512
    assert flops(block.backward, ("grouped_gemm",)) == 2 * flops(block.forward, ("grouped_gemm",))
    assert flops(block.forward, ("grouped_gemm",)) == pytest.approx(
        flops(layer_block(make(MOE, dp=4, ep=4), 0).forward, ("grouped_gemm",))
    )


@pytest.mark.parametrize(("dispatch", "size"), [(None, 2), ("fp8", 1)])
def test_dispatch_and_combine(dispatch, size):
    """Two all-to-alls each way of tokens · top_k · hidden; 8 bits for the dispatch and the combine's
    gradient.
    """
    block = layer_block(make(MOE, dp=4, ep=4, ep_dispatch_dtype=dispatch), 0)
    for program in (block.forward, block.backward):
        assert comms(program, "ep") == Counter(all_to_all=2)
        assert comm_bytes(program, "ep") == TOKENS * 2 * 1024 * (size + 2)
    assert comms(layer_block(make(MOE), 0).forward, "ep") == Counter()


def test_copies_are_counted_over_all_ranks_that_share_the_experts():
    """64-bit counts of each expert from every rank of ep and expert_tp; a capacity drops copies and fills none up."""
    capped = MOE | {"moe": MOE["moe"] | {"capacity_factor": 1.0}}
    for model in (MOE, capped):
        for layout, group, ranks in (
            ({"ep": 4}, "ep", 4),
            ({"ep": 2, "expert_tp": 2}, "ep", 4),
            ({"expert_tp": 2}, "expert_tp", 2),
        ):
            found = layer_block(make(model, {"framework": "megatron"}, dp=4, **layout), 0).forward
            assert [(i.group, i.bytes) for i in found if getattr(i, "name", "") == "gather_counts"] == [
                (group, ranks * 16 * 8)
            ]
    alone = layer_block(make(MOE, {"framework": "megatron"}, dp=4), 0).forward
    assert not [i for i in alone if getattr(i, "name", "") in ("gather_counts", "count_copies")]
    # DeepEP, which sends a token once to a node, counts in one kernel and gathers within its exchange.
    limited = MOE | {"moe": MOE["moe"] | {"max_nodes_per_token": 1}}
    sent = layer_block(make(limited, {"framework": "megatron"}, dp=4, ep=4), 0).forward
    names = [getattr(i, "name", "") for i in sent]
    assert "dispatch_layout" in names
    assert "gather_counts" not in names
    # Within one rank of ep it has nothing to send; counts go over expert_tp as always.
    split = layer_block(make(limited, {"framework": "megatron"}, dp=4, expert_tp=2), 0).forward
    assert [i.group for i in named(split, "gather_counts")] == ["expert_tp"]


@pytest.mark.parametrize("framework", ["megatron", "eager"])
def test_who_sends_tokens_once_to_a_rank_copies_them_on_arrival(framework):
    """One exchange there with indices and weights, one back, of a token for each rank with experts of it; each way
    copies are made of what arrived, or added up, once."""
    limited = MOE | {"moe": MOE["moe"] | {"max_nodes_per_token": 1}}
    block = layer_block(make(limited, {"framework": framework}, dp=4, ep=4), 0)
    most = FULLEST if framework == "megatron" else 1.0
    size, once = most * TOKENS * 2 * 1024 * 2, places(16, 2, 4) / 2
    sent, choices = once * size, once * most * TOKENS * 2 * 2
    found = [i.bytes for p in (block.forward, block.backward) for i in p if getattr(i, "kind", "") == "all_to_all"]
    assert found == pytest.approx([sent + choices * (8 + 4), sent, sent, sent + choices * 4])
    for program, read in ((block.forward, 1), (block.backward, 1 if framework == "megatron" else 2)):
        moved = [i.bytes for i in program if getattr(i, "kind", "") == "permute"]
        assert sorted(moved) == pytest.approx([size + sent, read * size + sent])


def test_hybridep_gathers_the_map_and_sends_the_weights_of_all_experts_of_the_domain():
    """A byte for each token and expert of all ranks, four bytes for each expert of the domain beside each token and its
    gradient; rows of 8-bit experts are filled up on arrival."""
    own = {"framework": "megatron", "precision": "fp8"}
    deep, hybrid = (layer_block(make(MOE, own, dp=4, ep=4, ep_dispatcher=n), 0) for n in ("deepep", "hybridep"))
    (gather,), (layout,) = named(hybrid.forward, "gather_map"), named(hybrid.forward, "dispatch_layout")
    assert (gather.kind, gather.bytes, layout.bytes) == ("all_gather", 4 * TOKENS * 16, 4 * TOKENS * 16)
    tokens = FULLEST * TOKENS * places(16, 2, 4)

    def sent(block: Any) -> list[float]:
        programs = (block.forward, block.backward)
        return [i.bytes for p in programs for i in p if getattr(i, "kind", "") == "all_to_all"]

    alike = [tokens * 1024 * 2] * 4
    assert sent(hybrid) == pytest.approx([n + tokens * more for n, more in zip(alike, (64, 0, 0, 64), strict=True)])
    assert sent(deep) == pytest.approx([n + tokens * more for n, more in zip(alike, (24, 0, 0, 8), strict=True)])
    assert [bool(named(b.forward, "experts_padding")) for b in (deep, hybrid)] == [True, False]


def test_node_limited_routing_sends_each_token_to_few_nodes():
    """At most once to each node of the ep group; within one node once to each rank."""
    limited = MOE | {"moe": MOE["moe"] | {"experts": 64, "top_k": 8, "max_nodes_per_token": 4}}
    free = MOE | {"moe": MOE["moe"] | {"experts": 64, "top_k": 8}}

    def parts(ranks: int, **layout: Any) -> float:
        few, many = (layer_block(make(m, dp=ranks, ep=ranks, **layout), 0).forward for m in (limited, free))
        (home,), (every,) = named(few, "combine"), named(many, "combine")
        return home.bytes / every.bytes

    assert parts(64) == 4 / 8  # eight nodes, of which four
    assert parts(16) == pytest.approx(places(64, 8, 2) / 8)  # two nodes
    assert parts(8) == pytest.approx(places(64, 8, 8) / 8)  # one
    assert parts(8, pp=2, rank_order="tp-cp-pp-dp") == pytest.approx(places(64, 8, 2) / 8)


@pytest.mark.parametrize(
    ("framework", "dispatcher", "kernels", "again"),
    [("megatron", "deepep", [4, 1], 2), ("megatron", "hybridep", [1], 0), ("eager", "deepep", [1], 0)],
)
def test_maps_of_what_arrived_are_made_once(framework, dispatcher, kernels, again):
    """Megatron-Core hands DeepEP each token's experts as numbers, of a top-k of its map (two kernels, two back), and
    makes maps of what arrives: 12 bytes of each choice and 34 of each of a rank's experts, and 4 and 8 back."""
    block = layer_block(make(MOE, {"framework": framework}, dp=4, ep=4, ep_dispatcher=dispatcher), 0)
    items = [*block.forward, *block.backward]
    made = [i for i in items if getattr(i, "name", "").startswith("sort_chunks") and i.name.endswith("_map")]
    assert [i.kernels for i in made] == kernels
    assert sum(i.kernels for i in items if getattr(i, "kind", "") == "permute") == 4  # one copy each way, and back
    chosen = [i for i in items if getattr(i, "name", "").startswith("dispatch_top_k")]
    assert [i.kernels for i in chosen] == [2, 2][:again]
    experts, top_k = made[0].shape[0], MOE["moe"]["top_k"]
    if again:
        arrived = experts / (MOE["moe"]["experts"] / 4)
        assert made[0].bytes == pytest.approx(12 * arrived * top_k + 34 * experts, rel=1e-3)
        assert made[1].bytes == pytest.approx(4 * arrived * top_k + 8 * experts, rel=1e-3)


@pytest.mark.parametrize("dispatcher", ["deepep", "hybridep"])
def test_a_token_is_sent_once_to_each_node_or_rank_that_chance_gives_its_experts(dispatcher):
    """Of N nodes; within one node of its ranks: no rank has two of a token's experts where each has one."""
    free = MOE | {"moe": MOE["moe"] | {"experts": 64, "top_k": 8}}

    def part(ranks: int) -> float:
        few, many = (
            layer_block(make(free, dp=ranks, ep=ranks, ep_dispatcher=name), 0).forward
            for name in (dispatcher, "all_to_all")
        )
        (home,), (every,) = named(few, "combine"), named(many, "combine")
        return home.bytes / every.bytes

    assert part(32) == pytest.approx(places(64, 8, 4) / 8)
    assert part(8) == pytest.approx(places(64, 8, 8) / 8)
    few = {"experts": 8, "top_k": 2, "ffn": 64}
    blocks = (layer_block(make(MOE | {"moe": few}, dp=8, ep=8, ep_dispatcher=n), 0) for n in (dispatcher, "all_to_all"))
    one, every = (named(block.forward, "combine")[0].bytes for block in blocks)
    assert one == pytest.approx(every)


def test_parameters_split_over_experts():
    whole, split = (layer_block(make(MOE, dp=4, ep=e), 0) for e in (1, 4))
    assert split.expert_params == whole.expert_params / 4 == 4 * 3 * 1024 * 512
    assert split.params == whole.params
    halves = layer_block(make(MOE, dp=4, ep=2, expert_tp=2), 0)
    assert halves.expert_params == split.expert_params
    assert comms(halves.forward, "expert_tp") == Counter(all_gather=1, reduce_scatter=1)
    assert comms(halves.backward, "expert_tp") == Counter(all_gather=1, reduce_scatter=1)
    sorts = [i for i in halves.forward if getattr(i, "name", "") in ("sort_chunks", "unsort_chunks")]
    assert [i.bytes for i in sorts] == [2 * (2 * TOKENS * 2 * 1024 * 2)] * 2  # both ranks' copies, read and written


def test_tensor_parallel_ranks_share_the_tokens():
    """With sequence parallelism a rank routes its own tokens; without, they gather one another's results."""
    sp = layer_block(make(MOE, tp=4, sp=True, ep=4), 0)
    assert comm_bytes(sp.forward, "ep") == TOKENS / 4 * 2 * 1024 * 2 * 2
    assert comms(sp.forward, "tp") == Counter(all_gather=1, reduce_scatter=1)
    plain = layer_block(make(MOE, tp=4, ep=4), 0)
    assert comms(plain.forward, "tp") == Counter(all_reduce=1, all_gather=1)
    assert flops(plain.forward, ("grouped_gemm",)) == flops(sp.forward, ("grouped_gemm",))


def test_dense_and_shared():
    model = MOE | {"moe": MOE["moe"] | {"dense_layers": 1, "shared_experts": 2}}
    dense, sparse = (layer_block(make(model, dp=2, ep=2), i) for i in (0, 1))
    assert dense.expert_params == 0
    assert comms(dense.forward, "ep") == Counter()
    shared = 2 * 3 * 1024 * 512
    assert sparse.params == layer_block(make(MOE, dp=2, ep=2), 0).params + shared
    assert count_parameters(make(model).model).shared_experts == 3 * shared


@settings(max_examples=50, deadline=None)
@given(
    experts=st.integers(1, 64),
    top_k=st.integers(1, 8),
    zipf=st.floats(0, 3),
    seed=st.integers(0, 99),
    tokens=st.integers(1, 4096),
)
def test_uneven_routing_keeps_the_tokens(experts, top_k, zipf, seed, tokens):
    """Every copy goes somewhere, no expert sees a token twice, the same seed draws the same load."""
    top_k = min(top_k, experts)
    moe = MoeConfig(experts=experts, top_k=top_k, ffn=8, imbalance={"seed": seed, "zipf": zipf})
    load = expert_load(moe, tokens, 3)
    assert sum(load) == pytest.approx(tokens * top_k)
    assert max(load) <= tokens * (1 + 1e-9)
    assert load == expert_load(moe, tokens, 3)
    capped = expert_load(moe.model_copy(update={"capacity_factor": 1.0}), tokens, 3)
    assert max(capped) <= -(-tokens * top_k // experts)
    assert sum(capped) <= sum(load) + 1e-6


def test_ranks_differ_by_their_experts_load():
    model = MOE | {"moe": MOE["moe"] | {"imbalance": {"seed": 1, "zipf": 1.0}}}
    scenario = make(model, dp=4, ep=4)
    work = [flops(layer_block(scenario, 0, Shard(ep_rank=r)).forward, ("grouped_gemm",)) for r in range(4)]
    assert len(set(work)) == 4
    balanced = flops(layer_block(make(MOE, dp=4, ep=4), 0).forward, ("grouped_gemm",))
    assert sum(work) == pytest.approx(4 * balanced)
    other = [flops(layer_block(scenario, 1, Shard(ep_rank=r)).forward, ("grouped_gemm",)) for r in range(4)]
    assert other != work


def test_saved_bytes_of_experts():
    """Router input and fp32 probabilities, indices and weights of copies, copies in, gate, silu(gate) and up, product,
    results for the weights.
    """
    saved = saved_by_part(make(MOE))
    copies, h, f = TOKENS * 2, 1024, 512
    expected = TOKENS * h * 2 + TOKENS * 16 * 4 + copies * (32 + (h + 3 * f + f + h) * 2)
    assert saved[ModelPart.EXPERTS] == expected


@pytest.mark.parametrize(("mlp", "kept", "in_flight"), [("swiglu", 3, 3 * 2), ("gelu", 3, 3 * 4 + 2)])
def test_megatrons_experts_by_hand(mlp, kept, in_flight):
    """What TEGroupedMLP keeps of a copy's inner width, in 16 bits, and the bytes in flight at the fullest moment.

    SwiGLU, weighted within its kernel: gate, up and down's input; then the gradients of all three. GELU, weighted by
    torch in fp32: its input, its output and down's input; then three fp32 tensors and a 16-bit one. Down's input is
    gone by then. Maps of 32-bit numbers: places and experts of each token's copies, and two sorts of the rows.
    """
    inner, copies = 8192, TOKENS * 2
    maps = 4 * (TOKENS * (2 * 16 + 1) + 2 * copies)
    model = LLAMA | {"mlp": mlp, "moe": {"experts": 16, "top_k": 2, "ffn": inner}}
    scenario = make(model, {"framework": "megatron"}, dp=4, ep=4)
    expected = TOKENS * 1024 * 2 + TOKENS * 16 * 4 + maps + copies * (1024 + kept * inner) * 2
    assert saved_by_part(scenario)[ModelPart.EXPERTS] == expected
    residual = TOKENS * 1024 * 2
    assert layer_block(scenario, 0).backward_peak_bytes == residual + copies * inner * (in_flight - 2)


def test_megatron_copies_tokens_by_a_map_which_grows_with_the_experts():
    """Three kernels make the map; then one kernel copies tokens, and one adds copies up, in each direction."""
    kernels = {"permute": 1, "sort_chunks": 2, "unsort_chunks": 2, "unpermute": 1}
    back = {"permute_backward": 1, "sort_chunks_backward": 1, "unsort_chunks_backward": 1, "unpermute_backward": 1}
    moved = []
    for experts in (16, 64):
        model = LLAMA | {"moe": {"experts": experts, "top_k": 2, "ffn": 512}}
        block = layer_block(make(model, {"framework": "megatron"}, dp=4, ep=4), 0)
        found = {i.name: i for i in (*block.forward, *block.backward) if isinstance(i, Compute)}
        assert {name: found[name].kernels for name in kernels | back} == kernels | back
        assert found["permutation_map"].kernels == 3
        moved.append(found["permutation_map"].bytes)
    assert moved == [25 * TOKENS * 16, 25 * TOKENS * 64]
    assert not any("map" in i.name for i in layer_block(make(MOE, dp=4, ep=4), 0).forward if isinstance(i, Compute))


def test_latent_attention():
    """DeepSeek-V3's layer: five projections' flops, heads of 192 and 128, latents gathered under sequence
    parallelism.
    """
    scenario = make("deepseek-v3", {"seq_len": 512, "micro_batch_size": 1})
    block = layer_block(scenario, 0)
    h, a, q, kv, rope = 7168, 128, 1536, 512, 64
    attention = h * q + q * a * 192 + h * (kv + rope) + kv * a * 256 + a * 128 * h
    assert flops(block.forward) == 2 * 512 * (attention + 3 * h * 18432)
    core = [i for i in block.forward if getattr(i, "kind", "") == "attention_forward"]
    assert core[0].shape == (1, a, a, 512, 512, 192, 128, 1)
    assert core[0].flops == 512 * 512 * a * (192 + 128)
    split = layer_block(make("deepseek-v3", {"seq_len": 512}, tp=8, sp=True), 0)
    gathered = comm_bytes(split.forward, "tp", "all_gather")
    assert gathered == 2 * 1024 * (q + kv + rope + h)
    summed = layer_block(make("deepseek-v3", {"seq_len": 512}, tp=8), 0)  # every rank has its heads' gradients
    assert comm_bytes(summed.backward, "tp", "all_reduce") == 2 * 1024 * (q + kv + rope + h)


def test_experts_weights_are_quantized_once_a_step():
    """Read in 16 bits, written twice in 8: (2 + 2) bytes a weight over the step's micro-batches."""

    def moved(batches: int) -> float:
        block = layer_block(
            make(MOE, {"precision": "fp8", "framework": "megatron", "global_batch_size": 2 * batches}), 0
        )
        return sum(
            c.bytes
            for c in block.forward
            if getattr(c, "kind", "") == "cast" and "weight" in c.name and c.name.startswith("experts")
        )

    assert moved(1) == 4 * 16 * 3 * 1024 * 512
    assert moved(4) == moved(1) / 4


def test_a_word_about_expert_tp_where_the_framework_would_split() -> None:
    moe = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "ffn": 512}}

    def said(framework: str, **parallelism: Any) -> list[str]:
        scenario = make(moe, {"framework": framework}, tp=2, **parallelism)
        return [note for note in scenario.warnings if "expert_tp" in note]

    words = "parallelism.expert_tp: 1, the default here; framework megatron's own default is tp, 2"
    assert said("megatron") == [words]
    assert said("megatron", expert_tp=1) == said("eager") == []


def test_a_word_about_experts_that_megatron_would_not_train() -> None:
    """MoELayer.forward raises in training with tp above 1 and without sequence parallelism."""
    moe = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "ffn": 512}}

    def said(model: dict[str, Any], framework: str, **parallelism: Any) -> list[str]:
        return [note for note in make(model, {"framework": framework}, **parallelism).warnings if ".sp:" in note]

    words = "parallelism.sp: false; framework megatron itself refuses to train experts with tp above 1 without sp"
    assert said(moe, "megatron", tp=2) == [words]
    assert said(moe, "megatron", tp=2, sp=True) == said(moe, "megatron") == said(moe, "eager", tp=2) == []
    assert said(LLAMA, "megatron", tp=2) == []


def test_megatron_sends_the_weights_of_copies_beside_them():
    """Four bytes a copy each way, by an all-to-all of their own (MoEAlltoAllTokenDispatcher.token_dispatch)."""
    plain, megatron = (layer_block(make(MOE, {"framework": name}, dp=4, ep=4), 0) for name in ("eager", "megatron"))
    for which in ("forward", "backward"):
        own, more = getattr(plain, which), getattr(megatron, which)
        assert comms(more, "ep")["all_to_all"] == comms(own, "ep")["all_to_all"] + 1
        assert comm_bytes(more, "ep", "all_to_all") == pytest.approx(FULLEST * (comm_bytes(own, "ep") + TOKENS * 2 * 4))


def test_the_fullest_rank_by_chance_is_that_of_random_logits():
    """400 layers, drawn as Megatron-Core's `apply_random_logits` draws."""
    rng = np.random.default_rng(0)
    beyond = []
    for _ in range(400):
        logits = rng.standard_normal((256, 16))
        chosen = np.argpartition(logits, -2, axis=1)[:, -2:]
        beyond.append(np.bincount((chosen // 4).ravel(), minlength=4).max() - 256 * 2 / 4)
    assert copies_beyond(MoeConfig(**MOE["moe"]), 256, 4) == pytest.approx(float(np.mean(beyond)), rel=0.06)


def test_all_ranks_wait_for_the_fullest_but_keep_what_they_get():
    """In each layer another rank is the fullest: its work counts, while the memory is that of the mean."""
    even = MOE | {"moe": MOE["moe"] | {"capacity_factor": 1.0, "pad_to_capacity": True}}
    mean, fullest = (layer_block(make(m, {"framework": "megatron"}, dp=4, ep=4), 0) for m in (even, MOE))
    assert flops(fullest.forward, ("grouped_gemm",)) == pytest.approx(FULLEST * flops(mean.forward, ("grouped_gemm",)))
    assert saved_bytes(fullest.saved) == pytest.approx(saved_bytes(mean.saved))
    assert fullest.backward_peak_bytes == pytest.approx(mean.backward_peak_bytes)
