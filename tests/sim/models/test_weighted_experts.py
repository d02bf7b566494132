"""Results of experts weighted and added up, and their router's choice, as captured programs of Transformers have it."""

from __future__ import annotations

from pathlib import Path

import pytest
from captured_layers import BATCH, LAYER, MODELS, SEQ, capture
from model_programs import make

from sim.core.program import Compute
from sim.models.captured.operators import compute_of, computes_of
from sim.models.layer import layer_block

TOP_K = 2
COPIES = BATCH * SEQ * TOP_K * MODELS["llama"]["hidden"]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "phimoe"])
def test_16_bit_weights_multiply_results_in_16_bits(name: str, tmp_path: Path) -> None:
    """Qwen2MoeTopKRouter, GptOssTopKRouter and PhimoeTopKRouter return weights of the logits' dtype."""
    program = capture(tmp_path, name, "eager", weights="bf16")
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "framework": "transformers", "attention": "unfused"}
    block = layer_block(make(MODELS[name], {**sizes, "param_dtype": "bf16"}), 1)
    own = [o for o in program.operators if o.module.endswith(f"{LAYER[name]}.mlp.experts") and o.launches]
    ahead = [o for o in own if o.phase == "forward"]
    last = max(i for i, o in enumerate(ahead) if "grouped_mm" in o.name)
    home = [compute_of(o) for o in ahead[last + 1 :] if not o.name.endswith(("index_put_", "arange"))]
    found = sum(i.bytes for i in home if i.shape[0] >= COPIES // TOP_K and "bias" not in i.name)
    mine = [i for i in block.forward if isinstance(i, Compute) and i.name in ("unpermute", "unpermute_singly")]
    biased = 3 * 2.0 * COPIES if name == "gpt_oss" else 0.0  # of the second matmul, added to each copy
    assert sum(i.bytes for i in mine) == pytest.approx(found - biased, rel=0.02)
    gate = "gate" if name == "qwen3_moe" else "router"
    chosen = [o for o in program.operators if o.module.endswith(f"{LAYER[name]}.mlp.{gate}") and o.phase == "forward"]
    launched = sum(c.kernels for o in chosen if o.launches and "mm" not in o.name for c in computes_of(o))
    parts = ("router_scores", "router_top_k")
    assert launched == sum(i.kernels for i in block.forward if isinstance(i, Compute) and i.name in parts)
