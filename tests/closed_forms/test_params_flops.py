"""Parameters against published totals, flops against closed forms."""

from __future__ import annotations

from pathlib import Path

import pytest

import sim
from sim.core.program import Comm, Compute, Phase
from sim.models.embedding import embedding_block
from sim.models.flops import model_flops_per_token
from sim.models.layer import layer_block
from sim.models.output.head import head_block, tied_params
from sim.models.output.mtp import mtp_block
from sim.models.parameters import count_parameters
from tests.sim.cases import case
from tests.sim.models.model_programs import GPT, LLAMA, flops, make, saved_bytes


def total(scenario):
    layers = [layer_block(scenario, i) for i in range(scenario.model.layers)]
    ends = embedding_block(scenario).params + head_block(scenario).params
    return ends + sum(b.params + b.expert_params for b in layers)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3-8b", 8_030_261_248),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v3", 671_026_404_352),  # 671,026,419,200 with the 58 · 256 router biases
    ],
)
def test_published_totals(name, published):
    assert total(make(name, {"seq_len": 128})) == published


@pytest.mark.parametrize("model", [GPT, LLAMA, LLAMA | {"qk_norm": True, "qkv_bias": True}])
def test_sum_of_blocks_is_the_models_count(model):
    scenario = make(model)
    assert total(scenario) == count_parameters(scenario.model).total


def test_gpt_formula_and_tying():
    h, v = 1024, 51200
    assert total(make(GPT)) == 2 * h * v + 4 * (12 * h * h + 13 * h) + 2 * h
    tied = make(GPT | {"tied_embeddings": True, "positions": "learned", "max_positions": 2048})
    assert total(tied) == h * v + 2048 * h + 4 * (12 * h * h + 13 * h) + 2 * h
    assert tied_params(tied) == h * v
    assert tied_params(make(GPT)) == 0


def test_tensor_parallel_shards_and_padding():
    h = 1024
    block = layer_block(make(GPT, tp=4), 0)
    assert block.params == 12 * h * h // 4 + (3 + 4) * h // 4 + 2 * h + 4 * h
    assert embedding_block(make(GPT | {"vocab": 50257}, tp=8)).params == 51200 * h // 8
    # 4 KV heads on 8 ranks: replicated, one each
    replicated = layer_block(make(LLAMA, tp=8), 0).params
    assert replicated == h * (128 + 2 * 64) + 128 * h + 3 * h * 2816 // 8 + 2 * h


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_matmuls_are_two_flops_a_weight_and_token(model):
    scenario = make(model)
    tokens, layer = 1024, layer_block(scenario, 0)
    h = scenario.model.hidden
    vectors = 13 * h if scenario.model.bias else 2 * h  # norms and biases multiply nothing
    weights = layer.params - vectors
    assert flops(layer.forward) == 2 * weights * tokens
    for phase in (Phase.INPUT_GRAD, Phase.WEIGHT_GRAD):
        assert flops(layer.backward, phase=phase) == 2 * weights * tokens
    head = head_block(scenario)
    assert flops(head.forward) == 2 * h * scenario.model.padded_vocab(1) * tokens


@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_step_is_the_model_flops(attention):
    """6 N and attention: causal kernels do half; two batched matmuls forward and four backward do all of it.

    A fused backward recomputes the scores: 2.5 forwards instead of 2.
    """
    scenario = make(GPT, {"attention": attention})
    blocks = [layer_block(scenario, i) for i in range(4)] + [head_block(scenario)]
    items = [i for b in blocks for i in (*b.forward, *b.backward)]
    kinds = ("gemm", "attention_forward", "attention_backward")
    done = flops(items, kinds) / 1024
    forward_scores = 4 * 16 * 64 * 512 * 4  # 4·a·d·s a token, 4 layers
    expected = model_flops_per_token(scenario.model, 512, causal_half=attention == "fused")
    expected += 0.5 * forward_scores / 2 if attention == "fused" else 0
    assert done == pytest.approx(expected, rel=1e-12)


def test_model_flops_contract():
    m = make("llama3-8b").model
    matmul = 8_030_261_248 - 128256 * 4096 - (2 * 32 + 1) * 4096
    assert model_flops_per_token(m, 8192) == 6 * matmul + 12 * 32 * 32 * 128 * 8192 / 2
    assert model_flops_per_token(m, 8192, causal_half=False) == 6 * matmul + 12 * 32 * 32 * 128 * 8192


def test_active_experts_only():
    m = make("mixtral-8x7b").model
    idle = 32 * 6 * 3 * 4096 * 14336
    counted = count_parameters(m)
    norms, look_up = counted.norms, counted.embedding
    assert model_flops_per_token(m, 0) == 6 * (counted.total - idle - norms - look_up)


def test_recompute_shares():
    """Full recompute adds a third of the matmuls; the attention core a few per cent (Korthikanti 2022)."""
    kinds = ("gemm", "attention_forward", "attention_backward")
    big = {"layers": 1, "hidden": 12288, "heads": 96, "vocab": 51200}

    def share(mode):
        again = mode if mode == "selective" else {"mode": mode, "early_stop": False}
        b = layer_block(make(big, {"recompute": again, "seq_len": 2048, "attention": "unfused"}), 0)
        return flops(b.recompute, kinds) / flops((*b.forward, *b.backward), kinds)

    assert share("full") == pytest.approx(1 / 3)
    assert 0.005 < share("selective") < 0.03
    assert 0.1 < share("selective_op") < 1 / 3


def test_which_layers_recompute():
    def reruns(recompute, **parallelism):
        scenario = make(GPT | {"layers": 8}, {"recompute": recompute, "global_batch_size": 16}, **parallelism)
        return [bool(layer_block(scenario, i).recompute) for i in range(8)]

    assert reruns({"mode": "full", "every": 2}) == [True, False] * 4
    assert reruns({"mode": "full", "layers": 1}, pp=4) == [True, False] * 4
    assert reruns({"mode": "full", "layers": 3}) == [True] * 3 + [False] * 5


def test_selective_op_keeps_every_second_matmul():
    block = layer_block(make(LLAMA, {"recompute": "selective_op"}), 0)
    again = [i.name for i in block.recompute if isinstance(i, Compute) and i.kind == "gemm"]
    assert again == ["qkv_1", "attention_out", "mlp_up_1"]
    assert not any(i.kind == "attention_forward" for i in block.recompute if isinstance(i, Compute))
    sbh = 2 * 512 * 2 * 1024
    # input, q, v (a quarter), attention and its log-sum-exp, gate, down
    expected = sbh * (1 + 1 + 0.25 + 1 + 2816 / 1024 + 1) + 4 * 16 * 512 * 2
    assert saved_bytes(block.saved) == expected


@pytest.mark.parametrize("sp", [False, True])
def test_selective_op_stops_at_the_last_tensor_that_the_backward_needs(sp):
    """torch.utils.checkpoint, `_recomputation_hook`: it raises `_StopRecomputationError` once it has all tensors saved.

    The last ones are the inputs of the last matmul, so that neither this, the sum of its result over tp, nor the
    residual sum runs again; what the forward has cached of these stays (`_CachingTorchDispatchMode`).
    """
    model = LLAMA | {"mlp": "gelu"}  # four matmuls, of which the fourth is not kept

    def block(**recompute):
        return layer_block(make(model, {"recompute": {"mode": "selective_op"} | recompute}, tp=2, sp=sp), 0)

    whole, ended = block(early_stop=False), block()
    more = [i.name for i in whole.recompute[len(ended.recompute) :]]
    assert more == ["mlp_down", *([] if sp else ["mlp_down_all_reduce"]), "mlp_residual"]
    assert ended.recompute == whole.recompute[: -len(more)]
    assert ended.saved == whole.saved


def test_selective_op_runs_unfused_attention_again():
    """Its batched matmuls and softmax are not among the operators whose outputs are saved, nor is its output kept."""
    block = layer_block(make(GPT, {"recompute": "selective_op", "attention": "unfused"}), 0)
    again = [i.name for i in block.recompute if isinstance(i, Compute) and i.kind in ("gemm", "softmax")]
    assert again == ["attention_scores", "attention_softmax", "attention_context", "attention_out"]
    assert [s.name for s in block.saved] == ["input", "qkv output", "mlp_up output"]


@pytest.mark.parametrize(
    ("date", "again"), [("2025-09", False), ("2025-10", True), ("2025-11", True), ("2025-12", False)]
)
def test_selective_op_ran_cudnns_attention_again(date, again):
    """torchtitan took cuDNN's kernel first from October 2025 on; pull request 2095 of December put it on the list."""
    block = layer_block(make(LLAMA, {"recompute": "selective_op", "framework": "compiled", "software_date": date}), 0)
    kinds = [i.kind for i in block.recompute if isinstance(i, Compute)]
    assert ("attention_forward" in kinds) is again
    assert ("attention output" in [s.name for s in block.saved]) is not again


def test_selective_op_does_not_count_the_router():
    """torchtitan: `force_recompute_mm_shapes_by_fqns` is ["moe.router.gate"]; the shared expert's matmuls follow it."""
    block = layer_block(make("deepseek-v3", {"recompute": "selective_op"}), 5)
    kept = [s.name for s in block.saved if s.name.endswith("output")]
    assert "router output" not in kept
    matmuls = [i.name for i in block.forward if isinstance(i, Compute) and i.kind == "gemm" and i.name != "router"]
    assert [name for name in kept if name.removesuffix(" output") in matmuls] == [f"{m} output" for m in matmuls[::2]]


@pytest.mark.parametrize(
    ("date", "early_stop", "whole"),
    [("2025-10", None, False), ("2025-11", None, True), ("2025-11", True, False), ("2026-05", None, False)],
)
def test_torch_s_checkpoint_was_around_compiled_parts_of_layers_with_experts(date, early_stop, whole):
    """torchtitan 0.2.1 and 0.2.2, models/llama4/infra/parallelize.py, apply_compile; 0.3.0 compiles whole layers."""
    recompute = {"mode": "full", "early_stop": early_stop}
    training = {"recompute": recompute, "framework": "compiled", "software_date": date}
    block = layer_block(make("mixtral-8x7b", training, ep=2, dp=2), 0)
    assert (len(block.recompute) == len(block.forward)) is whole
    assert (block.recompute[-1].name == block.forward[-1].name) is whole
    dense = layer_block(make(LLAMA, training), 0)
    assert len(dense.recompute) < len(dense.forward)


def test_selective_op_runs_experts_again():
    """torchtitan's list has no aten._grouped_mm."""
    block = layer_block(make("mixtral-8x7b", {"recompute": "selective_op"}), 0)
    ahead, again = ([i for i in p if isinstance(i, Compute)] for p in (block.forward, block.recompute))
    grouped = [i.name for i in ahead if i.kind == "grouped_gemm"]
    assert grouped
    assert [i.name for i in again if i.kind == "grouped_gemm"] == grouped
    assert [i.name for i in again if i.kind == "gemm"] == ["qkv_1", "attention_out", "router"]


def test_mtp_module():
    scenario = make("deepseek-v3", {"seq_len": 128})
    block = mtp_block(scenario)
    assert block.params + block.expert_params == count_parameters(scenario.model).mtp


PRESETS = sorted(p.stem for p in (Path(sim.__file__).parent / "presets" / "models").glob("*.yaml"))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_the_sum_of_its_blocks(name):
    """Padding of the vocabulary apart, which only the blocks have."""
    scenario = make(name, {"seq_len": 128})
    m = scenario.model
    padding = (m.padded_vocab(1) - m.vocab) * m.hidden * (1 if m.tied_embeddings else 2)
    kinds = [(m.is_moe_layer(i), m.attention_kind(i)) for i in range(m.layers)]
    blocks = {kind: layer_block(scenario, i) for i, kind in enumerate(kinds)}
    layers = sum(blocks[kind].params + blocks[kind].expert_params for kind in kinds)
    ends = embedding_block(scenario).params + head_block(scenario).params
    assert layers + ends - padding == count_parameters(m).total


@pytest.mark.parametrize("sp", [False, True])
def test_mtp_projection_is_split_over_tensor_parallel_ranks(sp: bool) -> None:
    """Column-parallel (Megatron-LM, core/transformer/multi_token_prediction.py: `eh_proj`); its columns gathered."""
    made = [case({"tp": tp, "sp": sp and tp > 1}, None, {"mtp_layers": 1}) for tp in (1, 4)]
    whole, part = (mtp_block(s) for s in made)
    flops = [
        sum(i.flops for i in b.forward if isinstance(i, Compute) and i.name == "mtp_projection") for b in (whole, part)
    ]
    assert flops[1] == flops[0] / 4
    size = 512 * 1024 * 2
    found = [(i.name, i.kind, i.bytes) for i in part.forward if isinstance(i, Comm) and i.name.startswith("mtp_")]
    gathers = [("mtp_projection_gather", "all_gather", 2.0 * size)] if sp else []
    assert found == [*gathers, ("mtp_projection_output", "all_gather", size)]
