"""Operators that some families' own code in Transformers runs apart, as captured programs have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from captured_layers import BATCH, CONFIGS, SEQ, capture

from sim.convert.settings import ALL_IN_BF16
from sim.core.program import Block, Compute
from sim.inputs.program_file import CapturedProgram
from sim.inputs.scenario import parse_scenario
from sim.models.captured.operators import computes_of
from sim.models.layer import layer_block

ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "pad_token_id": 0}
OWN: dict[str, dict[str, Any]] = {
    "laguna": ROUTED
    | {"num_experts": 8, "head_dim": 64, "shared_expert_intermediate_size": 256, "sliding_window": 32}
    | {"gating": "per-head", "layer_types": ["full_attention", *["sliding_attention"] * 2]},
    "minimax_m3_vl_text": ROUTED
    | {"num_local_experts": 8, "head_dim": 64, "index_n_heads": 2, "index_block_size": 32, "index_topk_blocks": 2}
    | {"layer_types": ["full_attention", *["minimax_m3_sparse"] * 2], "mlp_layer_types": ["dense", *["sparse"] * 2]},
    "deepseek_v4": ROUTED
    | {"n_routed_experts": 8, "n_shared_experts": 1, "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 32}
    | {"q_lora_rank": 192, "o_lora_rank": 64, "o_groups": 2, "num_hash_layers": 0, "index_n_heads": 4}
    | {"sliding_window": 32, "layer_types": ["sliding_attention"] * 3},
}


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[CapturedProgram, Block]:
    """The captured program, and layer 1 as its config describes it."""
    transformers = pytest.importorskip("transformers", reason="the configs are Transformers'")
    keys = CONFIGS["llama"] | OWN[name]
    monkeypatch.setitem(CONFIGS, name, keys)
    (folder / "config.json").write_text(transformers.AutoConfig.for_model(name, **keys).to_json_string(use_diff=False))
    sizes = {"seq_len": SEQ, "micro_batch_size": BATCH, "global_batch_size": BATCH, "framework": "transformers"}
    data = {"model": str(folder / "config.json"), "training": sizes | ALL_IN_BF16, "cluster": {"gpu": "h200-sxm"}}
    program = capture(folder, name, "eager" if name == "deepseek_v4" else "sdpa", balanced=True, weights="bf16")
    return program, layer_block(parse_scenario(data), 1)


def run(program: CapturedProgram, phase: str, module: str, *names: str) -> list[Compute]:
    """What captured operators of a module of layer 1 compute; of all operators without `names`."""
    mine = [o for o in program.operators if o.phase == phase and o.module.endswith(f"layers.1.{module}") and o.launches]
    return [i for o in mine if not names or o.name.removeprefix("aten.") in names for i in computes_of(o)]


def described(block: Block, phase: str, *names: str) -> list[Compute]:
    return [i for i in getattr(block, phase) if isinstance(i, Compute) and i.name in names]


def totals(items: list[Compute]) -> tuple[int, float]:
    return sum(i.kernels for i in items), sum(i.bytes for i in items)


def kept(program: CapturedProgram, block: Block) -> tuple[float, float]:
    ours = sum(s.bytes for s in block.saved)
    return ours, sum(s.bytes for s in program.storages if s.kind == "activation" and ".layers.1." in f"{s.name}.")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_laguna_s_gate_is_a_softplus_in_fp32_and_its_experts_result_is_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    program, block = both(tmp_path, monkeypatch, "laguna")
    end, ahead, behind = ("", 1, 3) if phase == "forward" else ("_backward", 4, 2)
    mine = [o for o in program.operators if o.phase == phase and o.module.endswith("layers.1.self_attn") and o.launches]
    (softplus,) = (i for i, o in enumerate(mine) if o.name == f"aten.softplus{end}")
    gate = [i for o in mine[softplus - ahead : softplus + behind] for i in computes_of(o)]
    assert totals(described(block, phase, f"attention_gate{end}")) == pytest.approx(totals(gate), rel=0.01)
    assert totals(described(block, phase, f"experts_scale{end}")) == totals(run(program, phase, "mlp", "mul"))
    ours, theirs = kept(program, block)
    assert ours == pytest.approx(theirs, rel=0.002)


def test_minimax_m3_keeps_a_mask_of_each_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, block = both(tmp_path, monkeypatch, "minimax_m3_vl_text")
    (mask,) = (s.bytes for s in block.saved if s.name == "attention mask")
    assert mask == 2 * BATCH * 8 * SEQ * SEQ
    ours, theirs = kept(program, block)
    assert ours == pytest.approx(theirs, rel=0.002)
    filled = run(program, "forward", "self_attn", "zeros", "masked_fill_")
    of_heads = [i for i in filled if i.shape[0] == BATCH * 8 * SEQ * SEQ]
    copied = [i for i in run(program, "forward", "self_attn", "clone", "bitwise_not") if i.shape == of_heads[0].shape]
    numbers = [i for i in copied if i.bytes >= 2 * i.shape[0]]
    found = described(block, "forward", "attention_mask")
    assert totals(found) == pytest.approx(totals([*of_heads, *numbers]), rel=0.01)


def test_deepseek_v4_s_scores_are_fp32_from_its_sinks_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, block = both(tmp_path, monkeypatch, "deepseek_v4")
    for name, op in (("sinks", "cat"), ("shift", "sub"), ("softmax", "_softmax"), ("largest", "max")):
        real = [i for i in run(program, "forward", "self_attn", op) if i.shape[0] >= BATCH * 8 * SEQ * SEQ]
        assert totals(described(block, "forward", f"attention_{name}")) == pytest.approx(totals(real), rel=0.04)
    streams = run(program, "backward", "attn_hc") + run(program, "backward", "attn_hc.input_norm")
    real = [i for i in streams if i.kind != "gemm"]
    assert totals(described(block, "backward", "attention_streams_backward")) == pytest.approx(totals(real), rel=0.04)
