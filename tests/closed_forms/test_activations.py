"""Saved activations against Korthikanti et al. 2022, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.core.program import ModelPart
from sim.inputs.scenario import parse_scenario
from sim.models.embedding import embedding_block
from sim.models.layer import layer_block
from sim.models.output.head import head_block
from tests.sim.models.model_programs import GPT, LLAMA, make, saved_by_part, saved_bytes

UNFUSED = {"precision": "fp16", "attention": "unfused"}
DROPOUT = GPT | {"dropout": 0.1}
S, B, H, A = 512, 2, 1024, 16


@pytest.mark.parametrize("style", ["eager", "megatron"])
def test_named_parts_of_equation_1(style):
    saved = saved_by_part(make(DROPOUT, UNFUSED | {"framework": style}))
    assert saved == {
        ModelPart.ATTENTION: 11 * S * B * H + 5 * A * S**2 * B,
        ModelPart.MLP: 19 * S * B * H,
        ModelPart.NORM: 4 * S * B * H,
    }


@settings(max_examples=25, deadline=None)
@given(
    s=st.integers(1, 32).map(lambda x: 64 * x),
    b=st.integers(1, 4),
    head_dim=st.sampled_from([32, 64, 128]),
    heads=st.sampled_from([8, 16, 24]),
    t=st.sampled_from([1, 2, 4, 8]),
    sp=st.booleans(),
)
def test_equations_1_2_4(s, b, head_dim, heads, t, sp):
    h = heads * head_dim
    model = {"layers": 1, "hidden": h, "heads": heads, "vocab": 1024, "dropout": 0.1}
    scenario = make(model, UNFUSED | {"seq_len": s, "micro_batch_size": b}, tp=t, sp=sp and t > 1)
    sbh, scores = s * b * h, 5 * heads * s**2 * b
    whole = 10 * sbh + (24 * sbh + scores) / t
    expected = (34 * sbh + scores) / t if sp and t > 1 else whole
    assert saved_bytes(layer_block(scenario, 0).saved) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("parallelism", "divisor"), [({}, 1), ({"tp": 4, "sp": True}, 4)])
def test_selective_and_full_recompute(parallelism, divisor):
    def saved(mode):
        return saved_bytes(layer_block(make(DROPOUT, UNFUSED | {"recompute": mode}, **parallelism), 0).saved)

    assert saved("selective") == 34 * S * B * H / divisor  # equation 6
    assert saved("full") == 2 * S * B * H / divisor


def test_without_dropout_and_fused():
    def saved(model, **training):
        return saved_bytes(layer_block(make(model, {"precision": "fp16", **training}), 0).saved)

    sbh, lse = S * B * H, 4 * A * S * B
    assert saved(GPT, attention="unfused") == 32 * sbh + 2 * A * S**2 * B
    assert saved(GPT) == 32 * sbh + lse
    assert saved(DROPOUT) == 34 * sbh + lse
    assert saved(GPT, precision="fp32", attention="unfused") == 2 * (32 * sbh + 2 * A * S**2 * B)
    # masks stay one byte in fp32
    assert saved(DROPOUT, precision="fp32", attention="unfused") == 66 * sbh + 9 * A * S**2 * B


@pytest.mark.parametrize(("style", "inner"), [("eager", 4), ("megatron", 3), ("compiled", 3)])
def test_llama_layer(style, inner):
    """Grouped queries keep 4 of 16 key and value heads; SwiGLU gate, up, product, and eager silu(gate).

    A compiler computes nothing again that a matmul of the backward reads (torch._functorch.partitioners:
    `is_materialized_backwards`): norms' results and SwiGLU's product are kept.
    """
    saved = saved_by_part(make(LLAMA, {"framework": style}))
    sbh, normalized = S * B * H, 2
    attention = normalized * sbh + (2 + 1) * sbh + 2 * sbh + 4 * A * S * B  # input, q, k and v, output
    mlp = normalized * sbh + inner * 2 * S * B * 2816
    assert saved == {ModelPart.ATTENTION: attention, ModelPart.MLP: mlp, ModelPart.NORM: 4 * sbh}


def test_embedding_and_head():
    embedding = embedding_block(make(DROPOUT, UNFUSED))
    assert saved_bytes(embedding.saved) == S * B * H + 8 * S * B  # mask, and the tokens themselves
    head = head_block(make(DROPOUT, UNFUSED))
    assert saved_bytes(head.saved) == 4 * S * B * H + 4 * S * B * 51200  # section 4.3
    assert head.backward_peak_bytes >= 2 * S * B * 51200 * 4
    fused = head_block(make(DROPOUT, UNFUSED | {"cross_entropy": "fused", "framework": "megatron"}))
    assert saved_bytes(fused.saved) == 4 * S * B * H + 2 * S * B * 51200
    assert fused.backward_peak_bytes < head.backward_peak_bytes / 3
    split = head_block(make(DROPOUT, UNFUSED, tp=8, sp=True))
    assert saved_bytes(split.saved) == pytest.approx((4 * S * B * H + 4 * S * B * 51200) / 8, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "precision", "bytes_a_logit"),
    [
        ("eager", "bf16", 12),
        ("megatron", "bf16", 6),
        ("eager", "fp32", 12),
        ("megatron", "fp32", 4),
    ],
)
def test_what_the_loss_holds_of_a_logit(style, precision, bytes_a_logit):
    """torch: log-softmax, the loss's gradient and its own, in fp32. Megatron's: fp32 in place, and the 16 bits outside.

    Megatron-LM, core/tensor_parallel/cross_entropy.py: `VocabParallelCrossEntropy`, forward `out=exp_logits`, `div_`;
    backward `grad_input = softmax`, `mul_`.
    """
    from sim.models.dims import dims
    from sim.models.output.head import cross_entropy

    scenario = make(LLAMA, {"precision": precision, "framework": style})
    loss = cross_entropy(dims(scenario), 32000)
    kept = saved_bytes(loss.saved)
    most = max(kept + loss.backward_bytes, kept + loss.forward_bytes)
    assert most == bytes_a_logit * S * B * 32000


@pytest.mark.parametrize(("style", "bytes_a_logit", "kernels"), [("eager", 60, 11), ("megatron", 52, 36)])
def test_the_loss_s_traffic_and_launches(style, bytes_a_logit, kernels):
    """Megatron's, from its source: in place, and 28 launches on a number a token."""
    head = head_block(make(GPT, UNFUSED | {"framework": style}))
    loss = [i for i in (*head.forward, *head.backward) if "cross_entropy" in getattr(i, "name", "")]
    assert sum(i.bytes for i in loss) / (S * B * 51200) == pytest.approx(bytes_a_logit, rel=2e-3)
    assert sum(i.kernels for i in loss) == kernels


def test_what_only_the_weight_gradient_needs():
    """After the input gradient a split backward keeps the inputs of the four matmuls: 2 + 2 + 2 + 8 sbh."""
    saved = layer_block(make(DROPOUT, UNFUSED), 0).saved
    assert saved_bytes(s for s in saved if s.late) == 14 * S * B * H


def test_eight_bit_inputs_are_kept_in_eight_bits():
    wide, narrow = (layer_block(make(LLAMA, {"precision": p}), 0).saved for p in ("bf16", "fp8"))
    inputs = saved_bytes(s for s in wide if s.late)
    output = 2 * S * B * H  # FlashAttention's backward reads it in 16 bits
    assert saved_bytes(wide) - saved_bytes(narrow) == inputs / 2 - output
    plain = {"attention": "unfused"}
    unfused = [saved_bytes(layer_block(make(LLAMA, {"precision": p} | plain), 0).saved) for p in ("bf16", "fp8")]
    assert unfused[0] - unfused[1] == inputs / 2


def test_full_recompute_holds_one_layer_again():
    none, full = (layer_block(make(GPT, {"recompute": r}), 0) for r in ("none", "full"))
    again = saved_bytes(none.saved) - saved_bytes(full.saved)
    assert full.backward_peak_bytes == pytest.approx(none.backward_peak_bytes + again)


def test_a_full_rerun_stops_at_the_last_tensor_needed():
    """Torch's checkpoint leaves the last matmul out, and the message behind it; with dropout its mask is needed."""

    def rerun(model, style="eager", date=None, stops=None, **parallelism):
        again = {"mode": "full", "early_stop": stops}
        training = {"recompute": again, "framework": style, "software_date": date, "global_batch_size": 4}
        block = layer_block(make(model, training, dp=2, **parallelism), 0)
        again, whole = ([getattr(i, "name", "") for i in p] for p in (block.recompute, block.forward))
        assert again == whole[: len(again)]
        return whole[len(again) :]

    assert rerun(GPT) == rerun(LLAMA) == rerun(GPT, zero=3) == ["mlp_down", "mlp_residual"]
    summed = rerun(GPT, tp=2)  # the sum over ranks, too
    assert [summed[0], summed[-1]] == ["mlp_down", "mlp_residual"]
    assert len(summed) > 2
    assert rerun(DROPOUT) == rerun(GPT, "megatron") == rerun(GPT, stops=False) == []
    # torch 2.1; Transformers 5
    assert rerun(GPT, date="2023-09") == rerun(LLAMA, "transformers", "2025-06") == []
    assert rerun(LLAMA, "compiled", "2025-03") == rerun(LLAMA, "transformers") == ["mlp_down", "mlp_residual"]
    # Recorded with the partitioners of torch 2.6, 2.8 and 2.14 on a CPU.
    assert rerun(LLAMA, "compiled", "2025-03", tp=2)[0] == rerun(LLAMA, "compiled", tp=2)[0] == "mlp_down"


def test_torch_skips_the_message_behind_the_last_saved_tensor():
    """torch.utils.checkpoint: what follows the last tensor that a backward needs does not run again, on any rank."""
    torch = pytest.importorskip("torch", reason="it runs torch's checkpoint")
    from torch.utils.checkpoint import checkpoint

    sent = []

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            sent.append("all_reduce")
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    first, last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    y = checkpoint(lambda x: x + Summed.apply(last(torch.relu(first(x)))), x, use_reentrant=False)
    y.sum().backward()
    assert sent == ["all_reduce"]


def test_empty_weight_gradients_of_transformer_engine():
    """One for every shape of a layer's four matrices, kept; the output layer's own while it runs."""
    scenario = make(LLAMA, {"framework": "megatron", "cross_entropy": "fused"})
    layer, head = layer_block(scenario, 0), head_block(scenario)
    assert layer.workspace_bytes == 2 * (layer.params - 2 * H)
    assert head.backward_peak_bytes == 2 * H * 32000 + 2 * S * B * H
    assert layer_block(make(LLAMA), 0).workspace_bytes == 0


def test_quantized_weights_stand_beside_the_16_bit_ones():
    """Two 8-bit copies of the layers' matrices, by rows and by columns; norms, router and output stay in 16 bits."""
    dense = H * (1024 + 2 * 256) + H * H + 3 * H * 2816
    experts = {"experts": 16, "top_k": 2, "ffn": 512}
    fp8 = {"precision": "fp8", "framework": "megatron"}
    assert layer_block(make(LLAMA, fp8), 0).quantized_bytes == 2 * dense
    assert layer_block(make(LLAMA, fp8, tp=2), 0).quantized_bytes == dense
    moe = layer_block(make(LLAMA | {"moe": experts}, fp8, dp=4, ep=4), 0)
    assert moe.quantized_bytes == 2 * (dense - 3 * H * 2816 + 4 * 3 * H * 512)
    assert head_block(make(LLAMA, fp8)).quantized_bytes == layer_block(make(LLAMA), 0).quantized_bytes == 0


def test_simumax_peaks():
    """Llama 3 405B cut to 4 layers on 8 tensor-parallel B200: measured 41,418,589,696 bytes allocated at the
    peak.

    18 bytes a parameter, the saved activations, and the head's backward (SimuMax 1.2, b200 release summary).
    """
    model = LLAMA | {"hidden": 16384, "heads": 128, "kv_heads": 16, "ffn": 53248, "vocab": 128256}
    training = {"seq_len": 4096, "micro_batch_size": 1, "framework": "megatron", "cross_entropy": "fused"}
    scenario = make(model, training, tp=8, sp=True)
    layer, head, embedding = layer_block(scenario, 0), head_block(scenario), embedding_block(scenario)
    params = 4 * layer.params + head.params + embedding.params
    kept = 4 * saved_bytes(layer.saved) + saved_bytes(head.saved) + saved_bytes(embedding.saved)
    peak = 18 * params + kept + layer.workspace_bytes + head.backward_peak_bytes
    assert peak == pytest.approx(41_418_589_696, rel=0.005)


@pytest.mark.parametrize(
    ("recipe", "an_element", "a_weight"),
    [("blockwise", 4 + 2 / 32, 4 + 2 / 4096), ("mxfp8", 2 + 2 * 33 / 32, 2 + 2 * 33 / 32), ("nvfp4", 5.125, 5.125)],
)
def test_quantizing_reads_and_writes_rows_and_columns(recipe, an_element, a_weight):
    """nvfp4 looks for the tensor's largest value before; weights are quantized once a step."""
    precision = recipe if recipe in ("mxfp8", "nvfp4") else "fp8"
    low = {"precision": precision, "framework": "megatron", "fp8_recipe": recipe}
    for batches in (1, 4):
        training = {"seq_len": S, "micro_batch_size": B, "global_batch_size": B * batches, **low}
        block = layer_block(parse_scenario({"model": LLAMA, "training": training, "cluster": "dgx-b200"}), 0)
        found = {c.name: c for c in block.forward if getattr(c, "kind", "") == "cast"}
        assert found["qkv_cast"].bytes == pytest.approx(an_element * S * B * H)
        assert found["attention_out_weight_cast"].bytes == pytest.approx(a_weight * H * H / batches, rel=1e-3)
    for reshard in (True, False):  # what ZeRO-3 gathers anew is quantized anew
        training = {"precision": "fp8", "framework": "megatron", "global_batch_size": 2 * B * 4}
        sharded = make(LLAMA, training, dp=2, zero=3, reshard_after_forward=reshard)
        found = {c.name: c for c in layer_block(sharded, 0).forward if getattr(c, "kind", "") == "cast"}
        assert found["attention_out_weight_cast"].bytes == 4 * H * H / (1 if reshard else 4)
