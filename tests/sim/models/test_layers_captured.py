"""Layers as their configs say: matmuls, kernels, what they move and keep, as captured programs have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from captured_layers import BATCH, CONFIGS, SEQ, capture

from sim.convert.settings import ALL_IN_BF16
from sim.core.program import EAGER_NORM, Block, Compute
from sim.inputs.scenario import parse_scenario
from sim.models.captured.operators import computes_of
from sim.models.layer import layer_block

MATMULS = ("gemm", "grouped_gemm", "attention_forward", "attention_backward")
LEFT_OUT = 12  # bytes of an element of an RMS norm's backward that `rms_norm_eager` leaves out
SORT = 11  # kernels of the sort of experts' numbers as described, of many tokens; few need fewer
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 8, "intermediate_size": 256, "num_shared_experts": 1}
COHERE = {"head_dim": 64, "sliding_window": 4096, "layer_types": ["sliding_attention"] * 3}
LATENT = {"q_lora_rank": 192, "kv_lora_rank": 128, "num_key_value_heads": 8}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
ROUTED |= {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
INDEXED = LATENT | ROUTED | {"index_n_heads": 4, "index_topk": 32}
OWN: dict[str, dict[str, Any]] = {
    "axk1": LATENT | ROUTED,
    "deepseek_v32": INDEXED,
    "glm": {"head_dim": 64},
    "glm4": {"head_dim": 64},
    "helium": {"head_dim": 64},
    "ernie4_5": {"head_dim": 64},
    "cohere2_moe": EXPERTS | COHERE,
}
SUMMED = {"expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum"}
CASES = [(name, {}) for name in OWN] + [("cohere2_moe", SUMMED)]


def described(folder: Path, name: str, keys: dict[str, Any]) -> Block:
    transformers = pytest.importorskip("transformers", reason="the configs are Transformers'")
    config = transformers.AutoConfig.for_model(name, **keys)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "global_batch_size": BATCH, "framework": "transformers"}
    data = {"model": str(folder / "config.json"), "training": sizes | ALL_IN_BF16, "cluster": {"gpu": "h200-sxm"}}
    return layer_block(parse_scenario(data), 1)


@pytest.mark.parametrize(("name", "own"), CASES)
def test_a_layer_has_the_kernels_and_keeps_what_the_captured_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, own: dict[str, Any]
) -> None:
    """GLM's gate and up are one matmul; GLM, Helium and ERNIE copy cosines in each layer and keep them; experts of
    Cohere's are weighted in 16 bits, behind a router that casts the chosen scores alone. A.X K1 norms what experts
    give; DeepSeek V3.2's indexer is separate operators, of which nothing is kept."""
    keys = CONFIGS["llama"] | {"pad_token_id": 0} | OWN[name] | own
    monkeypatch.setitem(CONFIGS, name, keys)
    program, block = capture(tmp_path, name, "sdpa", balanced=True, weights="bf16"), described(tmp_path, name, keys)
    kept = sum(s.bytes for s in program.storages if s.kind == "activation" and ".layers.1." in f"{s.name}.")
    assert sum(s.bytes for s in block.saved) == pytest.approx(kept, rel=0.002)
    for phase, items in (("forward", block.forward), ("backward", block.backward)):
        mine = [o for o in program.operators if o.phase == phase and ".layers.1." in f"{o.module}." and o.launches]
        real = [i for o in mine for i in computes_of(o)]
        found = [i for i in items if isinstance(i, Compute)]
        assert kernels(found, True) == kernels(real, True)
        sorts = [i for o in mine if o.name == "aten.sort" for i in computes_of(o)]
        fewer = SORT - sum(i.kernels for i in sorts) if sorts else 0
        assert kernels(found, False) == pytest.approx(kernels(real, False) + fewer, abs=1)
        # a described gather of tokens reads each token once, a captured one for each of its experts
        assert moved(found) == pytest.approx(moved(real), rel=0.06 if sorts or phase == "backward" else 0.03)


def kernels(items: list[Compute], matmuls: bool) -> int:
    return sum(i.kernels for i in items if (i.kind in MATMULS) == matmuls)


def moved(items: list[Compute]) -> float:
    """Bytes of what is no matmul, with those that a described norm leaves out."""
    others = [i for i in items if i.kind not in MATMULS]
    norms = [i.shape[0] for i in others if i.kernel == EAGER_NORM and i.name.endswith("norm_backward")]
    return sum(i.bytes for i in others) + LEFT_OUT * sum(norms)
