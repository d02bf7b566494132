"""Fusions of Megatron-Core that a script turns off (`apply_rope_fusion`, `bias_activation_fusion` and the like)."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.emit import emit
from sim.models.layer import layer_block
from sim.models.optimizers.step import gradient_buffer_items
from sim.variants.frameworks.megatron import FUSIONS
from tests.sim.cases import case

LLAMA = {"mlp": "swiglu", "positions": "rope", "bias": False}


def kernels(
    layout: dict[str, Any], training: dict[str, Any], model: dict[str, Any], *names: str
) -> list[tuple[int, float]]:
    """Launches and bytes of the named operators of a layer, forward and backward."""
    block = layer_block(case(layout, {"framework": "megatron", **training}, model), 0)
    out = []
    for program in (block.forward, block.backward):
        items = [i for i in program if isinstance(i, Compute) and i.name.startswith(names)]
        out.append((sum(i.kernels for i in items), sum(i.bytes for i in items)))
    return out


def test_rope_in_torchs_operators_is_what_megatrons_code_launches() -> None:
    """rope_utils.py: `_apply_rotary_pos_emb_bshd`, once for queries and once for keys. Cosine and sine: 3 kernels each.
    The rest: two products, a negative, two joins and a sum; backward seven."""
    (fused, _), (fused_back, _) = kernels({}, {}, LLAMA, "rope")
    (apart, moved), (apart_back, moved_back) = kernels({}, {"apply_rope_fusion": False}, LLAMA, "rope")
    assert (fused, fused_back) == (2, 2)
    assert (apart, apart_back) == (2 * (6 + 6), 2 * 7)
    ((_, tables), _) = kernels({}, {"apply_rope_fusion": False}, LLAMA, "rope_cosines")
    assert (moved - tables) / moved_back == pytest.approx(12 / 14)  # accesses


def test_an_activation_in_torchs_operators() -> None:
    """mlp.py: silu of one half times the other (2); both products' gradients, silu's, and torch.cat (4)."""
    assert [n for n, _ in kernels({}, {}, LLAMA, "swiglu")] == [1, 1]
    assert [n for n, _ in kernels({}, {"bias_activation_fusion": False}, LLAMA, "swiglu")] == [2, 4]


def test_a_bias_is_added_before_an_activation_that_does_not_add_it() -> None:
    def names(training: dict[str, Any]) -> list[tuple[int, float]]:
        return kernels({}, training, {"mlp": "gelu", "bias": True}, "mlp_up_bias", "gelu")

    (fused, moved), (apart, more) = (names(t)[0] for t in ({}, {"bias_activation_fusion": False}))
    assert (fused, apart, more / moved) == (1, 2, 2.0)


def test_bias_dropout_and_residual_apart_only_matter_where_there_is_one() -> None:
    """fusions/fused_bias_dropout.py: without bias and dropout a sum is all that is left."""
    names = ("attention_residual", "attention_dropout", "attention_bias", "attention_out_bias")
    plain, with_both = LLAMA, {"dropout": 0.1, "bias": True}
    assert kernels({}, {}, plain, *names) == kernels({}, {"bias_dropout_fusion": False}, plain, *names)
    fused, apart = (kernels({}, t, with_both, *names) for t in ({}, {"bias_dropout_fusion": False}))
    assert fused[0][0] < apart[0][0]
    assert fused[0][1] < apart[0][1]


@pytest.mark.parametrize("key", FUSIONS)
def test_only_megatron_core_has_these_switches(key: str) -> None:
    with pytest.raises(InputError, match=rf"training\.{key}: found false; needs framework megatron, megatron_bridge"):
        case({}, {"framework": "eager", key: False})
    case({}, {"framework": "megatron_bridge", key: False})


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("apply_rope_fusion", "--no-rope-fusion"),
        ("bias_activation_fusion", "--no-bias-swiglu-fusion"),
        ("bias_dropout_fusion", "--no-bias-dropout-fusion"),
    ],
)
def test_megatron_is_told(key: str, flag: str) -> None:
    told = [flag in emit(case({}, {"framework": "megatron", key: value}), "megatron") for value in (None, False)]
    assert told == [False, True]


def test_rope_that_a_model_has_not_is_noted() -> None:
    s = case({}, {"framework": "megatron", "apply_rope_fusion": False}, {"positions": "learned"})
    assert any("apply_rope_fusion: of no effect with model.positions learned" in text for text in s.warnings)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_one_kernel_rotates_and_splits_the_projection(kv_heads: int) -> None:
    """apply_fused_qkv_rotary_pos_emb reads queries, keys and values and writes them, forward and backward. Nothing is
    copied out of the projection's result, and no gradients are joined."""
    model = LLAMA | {"heads": 8, "kv_heads": kv_heads, "hidden": 512}
    whole = case({}, {}, model).training.seq_len * 64 * (8 + 2 * kv_heads) * 2
    fused = {"fused_single_qkv_rope": True}
    assert kernels({}, fused, model, "rope") == [(1, 2 * whole), (1, 2 * whole)]
    assert kernels({}, fused, model, "split_copies") == [(0, 0), (0, 0)]
    assert kernels({}, {}, model, "split_copies") != [(0, 0), (0, 0)]
    # attention.py asks for `fused_single_qkv_rope` alone before it leaves the projection's result in one
    assert kernels({}, fused | {"apply_rope_fusion": False}, model, "rope") == [(1, 2 * whole), (1, 2 * whole)]


def test_gradients_by_tokens_take_the_place_of_the_mean_over_ranks() -> None:
    """distributed_data_parallel.py: `gradient_scaling_factor` is 1; finalize_model_grads.py: `scale_gradients`, a pass
    that the recipes' average in the collective had not."""

    def passes(framework: str, replicas: int, per_token: bool) -> list[tuple[str, float]]:
        t = case({}, {"framework": framework, "calculate_per_token_loss": per_token}).for_training
        return [(i.name, i.bytes / 1000) for i in gradient_buffer_items(1000, t, replicas) if "scale" not in i.name]

    for replicas in (1, 4):
        names = dict(passes("megatron", replicas, True))
        assert names["grad_per_token"] == 2 * 4
        assert "grad_average" not in names
    assert sum(n for _, n in passes("megatron", 4, True)) == sum(n for _, n in passes("megatron", 4, False))
    more = [sum(n for _, n in passes("megatron_bridge", 4, per_token)) for per_token in (True, False)]
    assert more[0] - more[1] == 2 * 2  # gradients of 16 bits
