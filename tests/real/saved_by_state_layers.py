"""Bytes that Transformers' layers with a state keep for their backward, beside stand-ins of their libraries' kernels.

`python -m tests.real.saved_by_state_layers` writes them to `tests/sim/data/saved_by_state_layers.json`, or prints them
(`--print`). In 16 bits alone, as `flash-linear-attention` runs. What the stand-ins keep: `kept_by_kernels.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.real.kept_by_kernels import put_in_place

put_in_place()

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.real import saved_by_transformers as real  # noqa: E402

FILE = Path(__file__).parents[1] / "sim" / "data" / "saved_by_state_layers.json"
MAMBA_2 = {"num_heads": 16, "head_dim": 32, "state_size": 64, "n_groups": 1, "expand": 2, "chunk_size": 64}
BESIDE = {
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
NEMOTRON = {"mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 2, "chunk_size": 64}
JAMBA = {
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_dt_rank": 16,
    "attn_layer_period": 100,
    "attn_layer_offset": 50,
    "expert_layer_period": 100,
    "expert_layer_offset": 50,
    "num_experts": 2,
}
LINEAR = {"layer_types": ["linear_attention"]}
DELTA = LINEAR | {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
QWEN = {"num_experts": 8, "shared_expert_intermediate_size": 128}
KIMI = LINEAR | {
    **real.EXPERTS,
    **real.LATENT,
    "num_key_value_heads": 8,
    "linear_num_heads": 8,
    "linear_head_dim": 32,
    "num_local_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["sparse"],
}
# family: attention, layers after which its pattern repeats, its own keys
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mamba": ("eager", 1, {"state_size": 16, "expand": 2}),
    "falcon_mamba": ("eager", 1, {"state_size": 16, "expand": 2}),
    "mamba2": ("eager", 1, MAMBA_2),
    "bamba": ("sdpa", 1, BESIDE | {"attn_layer_indices": []}),
    "granitemoehybrid": ("sdpa", 1, BESIDE | {"layer_types": ["mamba"], "num_local_experts": 0}),
    "falcon_h1": ("sdpa", 1, BESIDE | {"mamba_d_ssm": 512}),
    "nemotron_h": ("sdpa", 2, NEMOTRON | {"layer_types": ["mamba", "mlp"], "expand": 2}),
    "jamba": ("sdpa", 1, JAMBA),
    "qwen3_next": ("sdpa", 1, DELTA | real.EXPERTS | QWEN),
    "qwen3_5_text": ("sdpa", 1, DELTA),
    "olmo_hybrid": ("sdpa", 1, DELTA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "kimi_linear": ("eager", 1, KIMI),
    "bailing_hybrid": ("eager", 1, KIMI),
}
CASES["granitemoehybrid"][2]["shared_intermediate_size"] = 512
# A layer with attention stands before those that are measured, which some models want.
WITH_ATTENTION = ("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid")
BEFORE = {family: ["full_attention"] for family in WITH_ATTENTION}


def measured(family: str) -> dict[str, Any]:
    """The row of one family, as `tests.real.saved_by_transformers` has it."""
    return real.measured(family)


real.CASES.update(CASES)
real.BEFORE.clear()
real.BEFORE.update(BEFORE)
real.WAYS.clear()
real.WAYS["bf16"] = (torch.bfloat16, False)

if __name__ == "__main__":
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    rows = {family: measured(family) for family in CASES}
    table = {"versions": versions, "batch": real.BATCH, "seq_len": real.SEQ, "families": rows}
    if "--print" in sys.argv:
        print(json.dumps(table))
    else:
        FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
