"""NeMo's YAML as scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.inputs.model_input import load_model
from tests.sim.convert.converting import converted, of, refused

NEMO = """
trainer: {num_nodes: 4, devices: 8, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 128
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 2
  encoder_seq_length: 8192
  max_position_embeddings: 8192
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  normalization: rmsnorm
  activation: fast-swiglu
  bias: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  activations_checkpoint_granularity: full
  optim: {name: mcore_distributed_optim, overlap_grad_sync: true, overlap_param_sync: true}
"""


def test_nemo_says_its_gpus_and_not_its_vocabulary(tmp_path: Path) -> None:
    assert "add --set model.vocab=N" in refused(tmp_path, "n.yaml", NEMO, "--cluster", "dgx-h100")
    data, _ = converted(tmp_path, "n.yaml", NEMO, "--cluster", "dgx-h100", "--set", "model.vocab=128256")
    data["model"].pop("dropout")
    described = load_model("llama3-8b")
    assert all(getattr(described, key) == value for key, value in data["model"].items() if key != "max_positions")
    assert of(data, "parallelism", "dp", "schedule", "virtual_stages", "zero") == [4, "interleaved_1f1b", 2, 1]
    assert of(data, "training", "precision", "recompute", "grad_dtype") == ["bf16", "full", "fp32"]


def test_nemo_says_what_gradients_are_reduced_in(tmp_path: Path) -> None:
    text = NEMO.replace("overlap_grad_sync: true", "overlap_grad_sync: true, grad_sync_dtype: bf16")
    data, _ = converted(tmp_path, "n.yaml", text, "--cluster", "dgx-h100", "--set", "model.vocab=128256")
    assert data["training"]["grad_dtype"] == "bf16"


def test_lora_of_nemo(tmp_path: Path) -> None:
    peft = "peft: {peft_scheme: lora, lora_tuning: {adapter_dim: 8, target_modules: [attention_qkv, mlp]}}"
    text = NEMO.replace("model:\n", f"model:\n  {peft}\n").replace("pipeline_model_parallel_size: 4", "x: 4")
    data, _ = converted(tmp_path, "n.yaml", text, "--cluster", "dgx-h100", "--set", "model.vocab=128256")
    assert data["training"]["lora"] == {"rank": 8, "targets": ["qkv", "mlp_up", "mlp_down"]}
    other = text.replace("peft_scheme: lora", "peft_scheme: ptuning")
    assert "model.peft.peft_scheme: found 'ptuning'" in refused(tmp_path, "n.yaml", other, "--cluster", "dgx-h100")


APEX = """optim:
    name: distributed_fused_adam
    overlap_grad_sync: true
    overlap_param_sync: true
    bucket_cap_mb: 125
"""


OF_NEMO = ("--cluster", "dgx-h100", "--set", "model.vocab=128256")


def with_optimizer(text: str) -> str:
    return NEMO[: NEMO.index("optim:")] + text


def test_apexs_optimizer_shards_its_states_as_megatrons_does(tmp_path: Path) -> None:
    """NVIDIA/apex, contrib/optimizers/distributed_fused_adam.py: buckets of so many MiB, gradients in fp32."""
    data, said = converted(tmp_path, "n.yaml", with_optimizer(APEX), *OF_NEMO)
    assert of(data, "parallelism", "zero", "dp_sync", "param_gather_overlap") == [1, "bucketed", True]
    assert data["parallelism"]["bucket_bytes"] == 125 * 2**20
    assert data["training"]["grad_dtype"] == "fp32"
    assert "store_param_remainders" in said
    low = with_optimizer(APEX.replace("bucket_cap_mb: 125", "grad_sync_dtype: bf16"))
    data, _ = converted(tmp_path, "n.yaml", low, *OF_NEMO)
    assert (data["training"]["grad_dtype"], data["parallelism"]["bucket_bytes"]) == ("bf16", 100 * 2**20)


def test_nemos_framework_is_its_own_but_for_megatron_cores_buckets(tmp_path: Path) -> None:
    """megatron_gpt_model.py: `setup_mcore_distributed_parallel` wraps the model in Megatron-Core's, for that name."""
    for text, framework in ((with_optimizer(APEX), "nemo"), (NEMO, "megatron")):
        data, said = converted(tmp_path, "n.yaml", text, *OF_NEMO)
        assert data["training"]["framework"] == framework
        assert ("training.software_date" in said) == (framework == "nemo")


def test_the_models_name_is_not_its_optimizers(tmp_path: Path) -> None:
    text = NEMO.replace("model:\n", "model:\n  name: megatron_gpt_full_te_layer_autocast\n")
    data, _ = converted(tmp_path, "n.yaml", text, *OF_NEMO)
    assert data["parallelism"]["zero"] == 1


def test_nemos_fsdp(tmp_path: Path) -> None:
    text = with_optimizer("fsdp: true\n  fsdp_grad_reduce_dtype: bf16\n  optim: {name: fused_adam}\n")
    text = text.replace("  pipeline_model_parallel_size: 4\n  virtual_pipeline_model_parallel_size: 2\n", "")
    data, _ = converted(tmp_path, "n.yaml", text, *OF_NEMO)
    assert (data["parallelism"]["zero"], data["parallelism"].get("reshard_after_forward")) == (3, None)
    assert of(data, "training", "param_dtype", "grad_reduce_dtype") == ["fp32", "bf16"]
    kept = text.replace("fsdp: true", "fsdp: true\n  fsdp_sharding_strategy: grad")
    data, _ = converted(tmp_path, "n.yaml", kept, *OF_NEMO)
    assert data["parallelism"]["reshard_after_forward"] is False


@pytest.mark.parametrize(
    ("more", "section", "key", "value"),
    [
        ("transformer_engine: false", "training", "attention", "unfused"),
        ("transformer_engine: true", "training", "attention", "fused"),
        ("rotary_percentage: 0.5", "model", "rope_share", 0.5),
        ("qkv_bias: true", "model", "qkv_bias", True),
        ("tokenizer: {library: huggingface, type: Qwen/Qwen3-8B}", "model", "vocab", 151936),
    ],
)
def test_nemos_own_names(tmp_path: Path, more: str, section: str, key: str, value: object) -> None:
    options = OF_NEMO[:2] if key == "vocab" else OF_NEMO
    data, _ = converted(tmp_path, "n.yaml", NEMO.replace("model:\n", f"model:\n  {more}\n"), *options)
    assert data[section][key] == value


@pytest.mark.parametrize(
    ("more", "overlaps"),
    [("overlap_p2p_comm: true", True), ("overlap_p2p_comm: false", False), ("seed: 1", False)],
)
def test_messages_between_interleaved_stages_that_nemo_waits_for(tmp_path: Path, more: str, overlaps: bool) -> None:
    """core/model_parallel_config.py: off by default."""
    data, said = converted(tmp_path, "n.yaml", NEMO.replace("model:\n", f"model:\n  {more}\n"), *OF_NEMO)
    assert data["parallelism"]["p2p_overlap"] is overlaps
    assert "overlap_p2p_comm: interleaved stages" not in said


def test_sizes_that_nemo_computes_from_others(tmp_path: Path) -> None:
    text = NEMO.replace("ffn_hidden_size: 14336", "ffn_hidden_size: ${multiply:4, ${.hidden_size}}")
    text = text.replace("max_position_embeddings: 8192", "max_position_embeddings: ${.encoder_seq_length}")
    data, _ = converted(tmp_path, "n.yaml", text, *OF_NEMO)
    assert (data["model"]["ffn"], data["model"]["max_positions"]) == (16384, 8192)


def test_what_nemo_asks_for_in_place_of_swiglu(tmp_path: Path) -> None:
    for activation, mlp in (("fast-geglu", "geglu"), ("squared-relu", "relu2"), ("gelu", "gelu")):
        data, _ = converted(tmp_path, "n.yaml", NEMO.replace("fast-swiglu", activation), *OF_NEMO)
        assert data["model"]["mlp"] == mlp


def test_nemos_parameters_without_half_precision_copies(tmp_path: Path) -> None:
    text = with_optimizer(APEX).replace("model:\n", "model:\n  megatron_amp_O2: false\n")
    data, said = converted(tmp_path, "n.yaml", text, *OF_NEMO)
    assert data["training"]["param_dtype"] == "fp32"
    assert "megatron_amp_O2: false" in said


@pytest.mark.parametrize(
    ("key", "off", "noted"),
    [
        ("gradient_accumulation_fusion: true", "", False),
        ("gradient_accumulation_fusion: false", "gradient_accumulation_fusion", False),
        ("masked_softmax_fusion: true", "", False),
        ("apply_rope_fusion: false", "apply_rope_fusion", False),
        ("bias_activation_fusion: false", "bias_activation_fusion", False),
        ("bias_dropout_add_fusion: false", "bias_dropout_fusion", False),
    ],
)
def test_fusions_that_a_file_switches_by_their_own_names(tmp_path: Path, key: str, off: str, noted: bool) -> None:
    data, said = converted(tmp_path, "n.yaml", NEMO.replace("bias: false", f"bias: false\n  {key}"), *OF_NEMO)
    switched = [name for name, value in data["training"].items() if "_fusion" in name and value is False]
    assert switched == [off] * bool(off)
    assert (f"not expressed here: model.{key.partition(':')[0]}" in said) is noted
    assert "did you mean" not in said
