"""nanotron's configs as scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import converted, refused

TEXT = """
general: {project: debug, run: llama, seed: 42}
logging: {iteration_step_info_interval: 1, log_level: info}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method: {std: 0.025}
  model_config: {is_llama_config: true, hidden_act: silu, hidden_size: 2048, intermediate_size: 8192,
    num_attention_heads: 32, num_hidden_layers: 16, num_key_value_heads: 8, rope_scaling: null,
    tie_word_embeddings: true, vocab_size: 131072}
optimizer: {accumulate_grad_in_fp32: true, clip_grad: 1.0, zero_stage: 1, weight_decay: 0.01,
  optimizer_factory: {name: adamW, torch_adam_is_fused: true}}
parallelism: {dp: 4, tp: 2, pp: 2, pp_engine: 1f1b, recompute_layer: false, tp_linear_async_communication: true,
  tp_mode: REDUCE_SCATTER, expert_parallel_size: 1, tp_recompute_allgather: true}
tokens: {batch_accumulation_per_replica: 8, micro_batch_size: 2, sequence_length: 4096, train_steps: 15}
"""
ON = ("--cluster", "dgx-h100")


def test_a_llama(tmp_path: Path) -> None:
    data, notes = converted(tmp_path, "llama.yaml", TEXT, *ON)
    t, p, m = data["training"], data["parallelism"], data["model"]
    assert (m["layers"], m["hidden"], m["kv_heads"], m["tied_embeddings"]) == (16, 2048, 8, True)
    assert (t["micro_batch_size"], t["global_batch_size"], t["grad_dtype"]) == (2, 64, "fp32")
    assert (p["dp"], p["tp"], p["sp"], p["tp_overlap"], p["zero"], p["schedule"]) == (4, 2, True, "wgrad", 1, "1f1b")
    assert t["framework"] == "nanotron"
    assert "not expressed" not in notes
    assert parse_scenario(data).parallelism.ranks == 16


def test_the_kernels_of_adamw(tmp_path: Path) -> None:
    data, notes = converted(tmp_path, "llama.yaml", TEXT.replace("is_fused: true", "is_fused: false"), *ON)
    assert data["training"]["adamw_kernels"] == "foreach"
    assert "not expressed" not in notes
    assert parse_scenario(data)


@pytest.mark.parametrize(("pp", "layers"), [(2, [11, 5]), (4, [6, 5, 5, 0])])
def test_stages_by_cost(tmp_path: Path, pp: int, layers: list[int]) -> None:
    """models/base.py: the output matrix counts as four layers, and a stage closes behind its share."""
    data, _ = converted(tmp_path, "llama.yaml", TEXT.replace("pp: 2", f"pp: {pp}"), *ON)
    assert data["parallelism"]["layers_per_stage"] == layers


@pytest.mark.parametrize(
    ("old", "new", "key", "value"),
    [
        ("pp_engine: 1f1b, ", "", "schedule", "gpipe"),
        ("tp_mode: REDUCE_SCATTER", "tp_mode: ALL_REDUCE", "sp", False),
        ("expert_parallel_size: 1", "context_parallel_size: 2", "cp", 2),
    ],
)
def test_layouts(tmp_path: Path, old: str, new: str, key: str, value: object) -> None:
    data, _ = converted(tmp_path, "llama.yaml", TEXT.replace(old, new), *ON)
    assert data["parallelism"][key] == value
    assert parse_scenario(data)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("is_llama_config", "is_starcoder2_config", "is neither Llama nor Qwen 2 without experts: give --model"),
        ("rope_scaling: null", "moe_config: {num_experts: 8}", "is neither Llama nor Qwen 2 without experts"),
        ("sequence_length: 4096, ", "", "tokens.sequence_length: is required and missing"),
    ],
)
def test_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in refused(tmp_path, "llama.yaml", TEXT.replace(old, new), *ON)


def test_a_number_of_gpus_that_the_degrees_do_not_have(tmp_path: Path) -> None:
    assert "must be dp · tp · pp · context_parallel_size = 16" in refused(
        tmp_path, "llama.yaml", TEXT, *ON, "--gpus", "8"
    )


def test_without_sums_in_fp32_the_optimizer_updates_bf16_parameters_with_moments_like_them(tmp_path: Path) -> None:
    """helpers.py: `init_optimizer_and_grad_accumulator`; torch/optim/adam.py: `exp_avg = zeros_like(p)`."""
    data, _ = converted(tmp_path, "llama.yaml", TEXT.replace("fp32: true", "fp32: false"), *ON)
    found = data["training"]
    assert (found["master_weights"], found["grad_dtype"], found["optimizer_dtype"]) == (False, "bf16", "bf16")
    assert "optimizer_dtype" not in converted(tmp_path, "llama.yaml", TEXT, *ON)[0]["training"]


def test_a_window_of_attention(tmp_path: Path) -> None:
    """models/qwen.py: `CoreAttention`."""
    text = TEXT.replace("is_llama_config: true", "is_qwen2_config: true, sliding_window_size: 512")
    data, notes = converted(tmp_path, "qwen.yaml", text, *ON)
    assert data["model"]["window"] == 512
    assert "not expressed" not in notes
    assert set(parse_scenario(data).model.attention_pattern) == {"sliding"}
