"""Kernels around latent attention, counted against torch's own operators as Megatron-Core's functions call them."""

from __future__ import annotations

import torch
from counted_accesses import counted

from sim.core.program import Compute
from sim.inputs.scenario import Scenario, parse_scenario
from sim.models.layer import layer_block

TOKENS, HEADS, PLAIN, ROPE, VALUE = 32, 8, 128, 64, 128


def turned(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs that lie side by side are put apart, then turned; what is left of the head is empty."""
    t, rest = t[..., :ROPE], t[..., ROPE:]
    t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
    low, high = torch.chunk(t, 2, dim=-1)
    return torch.cat((t * cos + torch.cat((-high, low), dim=-1) * sin, rest), dim=-1)


def scenario(framework: str, software_date: str | None = None) -> Scenario:
    mla = {"kv_lora_rank": 512, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
    model = {"layers": 1, "hidden": 1024, "heads": HEADS, "ffn": 2048, "vocab": 1024, "mla": mla, "norm": "rmsnorm"}
    model["positions"] = "rope"
    training = {"seq_len": TOKENS, "global_batch_size": 1, "framework": framework}
    training["software_date"] = software_date
    return parse_scenario({"model": model, "training": training, "cluster": "dgx-h100"})


def said(framework: str, name: str, software_date: str | None = None) -> Compute:
    block = layer_block(scenario(framework, software_date), 0)
    return next(i for i in (*block.forward, *block.backward) if isinstance(i, Compute) and i.name == name)


def test_rope_of_latents_is_seven_kernels_a_tensor() -> None:
    """14 accesses an element forward, 21 backward; cos and sin, which all heads share, are left out."""
    cos, sin = torch.ones(TOKENS, 1, 1, ROPE), torch.ones(TOKENS, 1, 1, ROPE)
    elements, operators, backward = 0, 0, 0
    for heads in (HEADS, 1):
        t = torch.randn(TOKENS, 1, heads, ROPE, requires_grad=True)
        out, found = counted(lambda t=t: turned(t, cos, sin))
        elements, operators = elements + found.elements - cos.numel() - sin.numel(), operators + found.operators
        ones = torch.ones_like(out)
        _, again = counted(lambda t=t, out=out, ones=ones: torch.autograd.grad(out, t, ones))
        # Each half of the pairs comes back into zeros of its own: a fill, and a copy of half as much, which torch runs
        # as one operator, here seen as half a read and a write.
        backward += again.elements - cos.numel() - sin.numel() + t.numel()
    size = TOKENS * (HEADS + 1) * ROPE
    assert (elements, operators) == (14 * size, 14)
    assert backward == 21 * size
    ahead, back = (said("megatron", name, software_date="2026-01") for name in ("rope", "rope_backward"))
    assert (ahead.bytes, ahead.kernels) == (14 * size * 2, 14)
    assert (back.bytes, back.kernels) == (21 * size * 2, 28)
    # Two joins, and two products with the half that is negated; a compiler's kernels hide such arithmetic.
    assert (ahead.single_elements, back.single_elements) == (4.5 * size, 4.5 * size)
    assert not said("transformers_compiled", "rope").single_elements
    for fused in ("transformers_compiled", "megatron", "megatron_bridge"):
        assert said(fused, "rope").bytes == 2 * size * 2


def test_queries_keys_and_values_are_put_together() -> None:
    """Forward: two concatenations, a copy of the values. Backward: two concatenations, the rope key's sum."""
    query = torch.randn(TOKENS, 1, HEADS, PLAIN + ROPE, requires_grad=True)
    merged = torch.randn(TOKENS, 1, HEADS, PLAIN + VALUE, requires_grad=True)
    shared = torch.randn(TOKENS, 1, 1, ROPE, requires_grad=True)

    def put_together() -> tuple[torch.Tensor, ...]:
        plain, turned = torch.split(query, [PLAIN, ROPE], dim=-1)
        key, value = torch.split(merged, [PLAIN, VALUE], dim=-1)
        keys = torch.cat([key, shared.expand(-1, -1, HEADS, -1)], dim=-1)
        return torch.cat([plain, turned], dim=-1), keys, value.contiguous()

    out, forward = counted(put_together)
    ones = [torch.ones_like(t) for t in out]
    _, backward = counted(lambda: torch.autograd.grad(out, [query, merged, shared], ones))
    assert said("megatron", "assemble_qk", "2026-01").bytes == 2 * forward.elements
    assert said("megatron", "assemble_qk_backward", "2026-01").bytes == 2 * (backward.elements - shared.numel())
    # values are a view of what is kept anyway, and of an empty tensor that keys are put into nothing is read
    filled = 2 * TOKENS * HEADS * (2 * VALUE + ROPE)
    assert said("transformers", "assemble_qk").bytes == 2 * forward.elements - filled


def test_the_kernel_that_turns_the_shared_key_writes_keys_and_values() -> None:
    """Megatron-Core's fusions/fused_mla_yarn_rope_apply.py: keys without rope and values are read, keys and values
    written, and backward their gradients the other way round; queries are turned in place."""
    block = layer_block(scenario("megatron_bridge"), 0)
    found = [i for p in (block.forward, block.backward) for i in p if isinstance(i, Compute) and "assemble" in i.name]
    moved = 2 * TOKENS * HEADS * (PLAIN + VALUE + PLAIN + ROPE + VALUE)
    assert [(i.bytes, i.kernels) for i in found] == [(moved, 1), (moved, 1)]


def test_without_positions_nothing_turns_the_latents() -> None:
    """Kimi Linear's latent attention has no rope (`mla_use_nope`); each second layer may go without."""
    mla = {
        "kv_lora_rank": 512,
        "q_lora_rank": 64,
        "qk_nope_head_dim": PLAIN,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
    }
    model = {"layers": 2, "hidden": 1024, "heads": HEADS, "vocab": 1024, "mla": mla, "norm": "rmsnorm", "bias": False}

    def turns(**own: object) -> list[bool]:
        training = {"seq_len": TOKENS, "global_batch_size": 1}
        parsed = parse_scenario({"model": model | own, "training": training, "cluster": "dgx-h100"})
        blocks = (layer_block(parsed, layer) for layer in range(2))
        return [any(item.name == "rope" for item in block.forward if isinstance(item, Compute)) for block in blocks]

    assert turns(positions="rope") == [True, True]
    assert turns(positions="rope", no_rope_every=2) == [True, False]
    assert turns() == [False, False]
    selecting = {"heads": 4, "head_dim": 32, "top_k": 8}  # of fewer keys than there are: one latent for all heads
    assert turns(positions="rope", indexer=selecting) == [True, True]
    assert turns(indexer=selecting) == [False, False]
