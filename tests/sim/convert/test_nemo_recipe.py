"""Recipes of NeMo 2, as `--to-yaml` writes them, as scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.convert.bridge.nemo_recipe import _models, model_of_class
from sim.inputs.model_input import load_model
from tests.sim.convert.converting import converted, of, refused

# What `llama3_70b.pretrain_recipe(performance_mode=True)` of NeMo 2.4.0 gives, without files and schedules.
RECIPE = """
_partial_: true
_target_: nemo.collections.llm.api.pretrain
data: {_target_: nemo.collections.llm.gpt.data.mock.MockDataModule, global_batch_size: 512, micro_batch_size: 1,
       seq_length: 8192}
model:
  _target_: nemo.collections.llm.gpt.model.llama.LlamaModel
  config: {_target_: nemo.collections.llm.gpt.model.llama.Llama3Config70B}
optim:
  config: {_target_: megatron.core.optimizer.optimizer_config.OptimizerConfig, bf16: true, clip_grad: 1.0,
           optimizer: adam, use_distributed_optimizer: true}
trainer:
  devices: 8
  num_nodes: 8
  callbacks:
  - {_target_: nemo.utils.exp_manager.TimingCallback}
  - {_target_: nemo.lightning.pytorch.callbacks.megatron_comm_overlap.MegatronCommOverlapCallback,
     defer_embedding_wgrad_compute: true, tp_comm_overlap: true, wgrad_deferral_limit: 22}
  plugins:
    _target_: nemo.lightning.pytorch.plugins.mixed_precision.MegatronMixedPrecision
    grad_reduce_in_fp32: false
    params_dtype: {_call_: false, _target_: torch.bfloat16}
    precision: bf16-mixed
  strategy:
    _target_: nemo.lightning.pytorch.strategies.megatron_strategy.MegatronStrategy
    context_parallel_size: 2
    ddp: {average_in_collective: true, check_for_nan_in_grad: true, grad_reduce_in_fp32: true,
          overlap_grad_reduce: true, overlap_param_gather: true}
    pipeline_model_parallel_size: 4
    sequence_parallel: true
    tensor_model_parallel_size: 4
    virtual_pipeline_model_parallel_size: 5
"""
CLUSTER = ("--cluster", "dgx-h100")


def changed(**keys: Any) -> str:
    """The recipe with other values, by their paths with `__` for a dot."""
    data = yaml.safe_load(RECIPE)
    for path, value in keys.items():
        section = data
        *outer, last = path.split("__")
        for key in outer:
            section = section[key]
        section[last] = value
    return yaml.safe_dump(data)


def test_a_recipe_is_what_its_objects_do_when_they_start(tmp_path: Path) -> None:
    data, said = converted(tmp_path, "r.yaml", RECIPE, *CLUSTER)
    assert of(data, "parallelism", "dp", "tp", "pp", "cp", "virtual_stages") == [2, 4, 4, 2, 5]
    assert of(data, "parallelism", "zero", "dp_sync", "param_gather_overlap") == [1, "bucketed", True]
    assert data["parallelism"]["bucket_bytes"] == 128 * 2**20 * 2  # of the callback, with gradients in bf16
    assert of(data, "parallelism", "tp_overlap", "p2p_overlap", "wgrad_deferral_limit") == ["full", True, 22]
    assert of(data, "training", "grad_dtype", "cross_entropy", "precision") == ["bf16", "native", "bf16"]
    assert "not expressed" not in said


def test_a_mock_module_without_a_tokenizer_has_gpt2s(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "r.yaml", RECIPE, *CLUSTER)
    assert data["model"]["vocab"] == 50257
    null = {"_target_": "get_nmt_tokenizer", "library": "null", "model_name": "NullTokenizer", "vocab_size": 128256}
    data, _ = converted(tmp_path, "r.yaml", changed(data__tokenizer=null), *CLUSTER)
    assert data["model"]["vocab"] == 128257
    other = changed(data___target_="nemo.collections.llm.gpt.data.squad.SquadDataModule")
    assert "add --set model.vocab=N" in refused(tmp_path, "r.yaml", other, *CLUSTER)


def test_without_the_callback_nothing_but_ddps_own_keys_overlaps(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "r.yaml", changed(trainer__callbacks=[]), *CLUSTER)
    assert of(data, "parallelism", "tp_overlap", "p2p_overlap", "dp_sync") == ["wgrad", False, "bucketed"]
    assert data["parallelism"]["bucket_bytes"] == 40_000_000 * 2  # Megatron-Core's own


def test_qwens_classes_fuse_less_than_llamas(tmp_path: Path) -> None:
    """collections/llm/gpt/model/qwen2.py sets no fusion, and `TransformerConfig` has them off."""
    text = changed(model__config={"_target_": "nemo.collections.llm.gpt.model.qwen2.Qwen2Config72B"})
    off = ("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion")
    data, _ = converted(tmp_path, "r.yaml", text, *CLUSTER)
    assert of(data, "training", *off) == [False] * 3
    data, _ = converted(tmp_path, "r.yaml", RECIPE, *CLUSTER)
    assert of(data, "training", *off) == [None] * 3


def test_unchecked_gradients_are_how_nvidias_scripts_run(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "r.yaml", changed(trainer__strategy__ddp__check_for_nan_in_grad=False), *CLUSTER)
    assert of(data, "training", "framework", "cross_entropy") == ["megatron_bridge", "native"]


def test_fp8_lora_and_fsdp_of_a_recipe(tmp_path: Path) -> None:
    plugin = {"precision": "bf16-mixed", "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True}
    text = changed(trainer__plugins=plugin)
    data, _ = converted(tmp_path, "r.yaml", text, *CLUSTER)
    assert of(data, "training", "precision", "fp8_recipe", "fp8_param_gather") == ["fp8", "tensorwise", True]
    lora = {"_target_": "nemo.collections.llm.peft.lora.LoRA", "dim": 16, "target_modules": ["linear_qkv"]}
    data, _ = converted(tmp_path, "r.yaml", changed(peft=lora), *CLUSTER)
    assert data["training"]["lora"] == {"rank": 16, "targets": ["qkv"]}
    data = yaml.safe_load(RECIPE)
    data["trainer"]["strategy"] |= {"fsdp": "megatron", "pipeline_model_parallel_size": 1}
    data["trainer"]["strategy"]["ddp"]["data_parallel_sharding_strategy"] = "optim_grads_params"
    del data["trainer"]["strategy"]["virtual_pipeline_model_parallel_size"]
    found, _ = converted(tmp_path, "r.yaml", yaml.safe_dump(data), *CLUSTER)
    assert of(found, "parallelism", "zero", "dp_sync", "dp") == [3, "bucketed", 8]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    text = changed(model__config={"_target_": "nemo.collections.llm.gpt.model.gemma.GemmaConfig2B"})
    said = refused(tmp_path, "r.yaml", text, *CLUSTER)
    assert "r.yaml: model.config._target_: found 'GemmaConfig2B'; sizes are known of" in said
    assert "--model" in said
    said = refused(tmp_path, "r.yaml", changed(trainer__strategy="ddp"), *CLUSTER)
    assert "r.yaml: trainer.strategy: found 'ddp'; can be converted: nemo's MegatronStrategy" in said
    for degree in ("tensor_model_parallel_size", "virtual_pipeline_model_parallel_size"):
        said = refused(tmp_path, "r.yaml", changed(**{f"trainer__strategy__{degree}": "two"}), *CLUSTER)
        assert f"trainer.strategy.{degree}: found 'two'; must be a whole number" in said
    said = refused(tmp_path, "r.yaml", changed(trainer__num_nodes=1), *CLUSTER)
    assert "8 GPUs; must be a multiple of 32" in said
    data, _ = converted(tmp_path, "r.yaml", changed(trainer__num_nodes=1), *CLUSTER, "--gpus", "64")
    assert data["parallelism"]["dp"] == 2


def test_what_the_strategy_is_told_and_nothing_reads_is_noted(tmp_path: Path) -> None:
    """NeMo's recipe of Llama 4 has `expert_tensor_model_parallel_size`, which no class knows."""
    data = yaml.safe_load(RECIPE)
    data["trainer"]["strategy"] |= {"use_sharp": True, "expert_tensor_model_parallel_size": 8, "ckpt_async_save": True}
    _, said = converted(tmp_path, "r.yaml", yaml.safe_dump(data), *CLUSTER)
    assert "trainer.strategy.use_sharp: cluster.inter_node.sharp=true has it" in said
    assert "not expressed here: trainer.strategy.expert_tensor_model_parallel_size\n" in said


SHIPPED = {
    "Llama3Config8B": "llama3-8b",
    "Llama31Config405B": "llama3.1-405b",
    "Llama2Config70B": "llama2-70b",
    "MixtralConfig8x7B": "mixtral-8x7b",
    "Qwen3Config30B_A3B": "qwen3-30b-a3b",
    "DeepSeekV3Config": "deepseek-v3",
    "GPTConfig175B": "gpt3-175b",
}


@pytest.mark.parametrize(("name", "model"), SHIPPED.items())
def test_a_class_has_the_sizes_of_the_shipped_model(tmp_path: Path, name: str, model: str) -> None:
    keys, shipped = model_of_class(tmp_path / "r.yaml", name), load_model(model)
    assert keys["num_layers"] == shipped.layers
    assert (keys["hidden_size"], keys["num_attention_heads"]) == (shipped.hidden, shipped.heads)
    assert keys.get("num_query_groups", shipped.heads) == shipped.kv_heads or shipped.mla is not None
    if shipped.moe is None:
        assert keys["ffn_hidden_size"] == shipped.ffn
    else:
        assert keys["num_moe_experts"] == shipped.moe.experts
        assert keys.get("moe_ffn_hidden_size", keys["ffn_hidden_size"]) == shipped.moe.ffn


def test_every_known_class_is_a_model(tmp_path: Path) -> None:
    classes = [name for family in _models().values() for name in family if name != "family"]
    assert len(classes) == len({*classes}) > 60
    for name in classes:
        own = {"_target_": name, "cross_entropy_fusion_impl": "native"}
        config = changed(model__config=own, trainer__strategy__virtual_pipeline_model_parallel_size=None)
        layout = yaml.safe_load(config)
        strategy = layout["trainer"]["strategy"]
        strategy |= {f"{kind}_parallel_size": 1 for kind in ("pipeline_model", "tensor_model", "context")}
        data, _ = converted(tmp_path, "r.yaml", yaml.safe_dump(layout), *CLUSTER, "--set", "model.vocab=32000")
        assert data["training"]["seq_len"] == 8192, name


def test_callbacks_set_a_capacity_of_experts_and_deepep(tmp_path: Path) -> None:
    """lightning/pytorch/callbacks: moe_token_drop.py, and deepep.py, which looks at the GPU."""
    drops, deepep = ({"_target_": f"nemo.lightning.pytorch.callbacks.{name}"} for name in CALLBACKS)
    data = yaml.safe_load(RECIPE)
    data["model"]["config"] = {"_target_": "nemo.collections.llm.gpt.model.mixtral.MixtralConfig8x7B"}
    data["trainer"]["strategy"] |= {"expert_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
    data["trainer"]["callbacks"].append(drops)
    found, _ = converted(tmp_path, "r.yaml", yaml.safe_dump(data), *CLUSTER)
    assert of(found["model"], "moe", "capacity_factor", "pad_to_capacity") == [1.0, True]
    data["trainer"]["callbacks"][-1] = deepep
    found, _ = converted(tmp_path, "r.yaml", yaml.safe_dump(data), *CLUSTER)
    assert (found["parallelism"]["ep_dispatcher"], found["model"]["moe"].get("capacity_factor")) == ("deepep", None)
    found, _ = converted(tmp_path, "r.yaml", yaml.safe_dump(data), "--cluster", "dgx-b200")
    assert found["parallelism"].get("ep_dispatcher") is None


CALLBACKS = ("moe_token_drop.MegatronTokenDropCallback", "deepep.DeepEPCallback")
