"""Megatron-Core's kernels around the scan of a layer with a state, against torch's own operators where it has these."""

from __future__ import annotations

from typing import Any

import torch
from counted_accesses import counted
from model_programs import make, named

from sim.core.program import Compute
from sim.models.layer import layer_block

TOKENS, HEADS, WIDTH, STATE = 64, 8, 16, 16
MODEL = {"layers": 1, "hidden": 128, "heads": 4, "vocab": 1024, "bias": False, "norm": "rmsnorm"}


def block(framework: str, batch: int = 1, **state: Any) -> Any:
    own = {"heads": HEADS, "head_dim": WIDTH, "state": STATE, "groups": 4, "chunk": 16, "conv_bias": False} | state
    training = {"framework": framework, "micro_batch_size": batch, "global_batch_size": batch, "seq_len": TOKENS}
    return layer_block(make(MODEL | {"state_space": own, "mlp_pattern": ["none"]}, training), 0)


def moved(program: Any, *names: str) -> dict[str, tuple[float, int]]:
    found = [i for i in program if isinstance(i, Compute) and i.name in names]
    return {i.name: (i.bytes, i.kernels) for i in found}


def test_mamba_gates_in_the_scan_and_norms_what_is_kept_besides() -> None:
    """Accesses of the scan's result: gate 2 and norm 2, backward 3 and 5; several sequences are brought in order."""
    one, two, plain = block("megatron"), block("megatron", 2), block("eager")
    inner, projected = TOKENS * HEADS * WIDTH * 2, TOKENS * (2 * HEADS * WIDTH + 2 * 4 * STATE + HEADS) * 2
    assert moved(one.forward, "gated_norm") == {"gated_norm": (4 * inner, 1)}
    assert moved(one.backward, "gated_norm_backward") == {"gated_norm_backward": (8 * inner, 3)}
    copies = ("projected_copy", "scanned_copy", "projected_copy_backward")
    assert moved((*one.forward, *one.backward), *copies) == {}
    assert moved((*two.forward, *two.backward), *copies) == {
        "projected_copy": (4 * projected, 1),
        "scanned_copy": (4 * inner, 1),
        "projected_copy_backward": (4 * projected, 1),
    }
    assert [s.bytes for s in one.saved if s.name == "gated"] == [inner]
    assert moved(plain.forward, "gated_norm") == {"gated_norm": (3 * inner, 1)}


def test_delta_rule_copies_what_the_scan_reads() -> None:
    """Copies as torch's operators make them: `GatedDeltaNet.forward`, with one sequence."""
    keys, values = 4 * STATE, HEADS * WIDTH
    convolved, projected = 2 * keys + values, 2 * keys + 2 * values + 2 * HEADS
    x = torch.randn(1, TOKENS, projected, requires_grad=True)

    def forward() -> tuple[torch.Tensor, ...]:
        qkv, gate, _, _ = torch.split(x, [convolved, values, HEADS, HEADS], dim=-1)
        turned = qkv.transpose(1, 2).contiguous().transpose(1, 2)
        query, key, value = torch.split(turned, [keys, keys, values], dim=-1)
        query, key = (t.reshape(1, TOKENS, -1, STATE).contiguous().repeat_interleave(2, dim=2) for t in (query, key))
        value = value.reshape(1, TOKENS, -1, WIDTH).contiguous()
        return query, key, value, gate.reshape(1, TOKENS, -1, WIDTH).contiguous()

    _, found = counted(forward)
    made = moved(
        block("megatron", kind="gated_delta").forward,
        "convolved_transpose",
        "key_norms",
        "keys_repeated",
        "values_copied",
    )
    norms = 2 * 2 * TOKENS * 2 * keys  # 2 accesses of two tensors by the norm's kernels, which torch does not have
    once = 2 * TOKENS * keys  # a repeated key is read once from memory, which counts twice in torch's
    assert (sum(size for size, _ in made.values()) - norms) / 2 == found.elements - once
    assert sum(kernels for _, kernels in made.values()) - 2 == found.operators


def test_only_scans_of_which_megatron_has_the_kernels_have_them() -> None:
    for framework, kind, found in (
        ("megatron", "gated_delta", True),
        ("megatron", "kda", False),
        ("eager", "gated_delta", False),
    ):
        assert bool(named(block(framework, kind=kind).forward, "convolved_transpose")) is found
