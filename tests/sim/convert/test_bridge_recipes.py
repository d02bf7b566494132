"""What performance recipes of Megatron-Bridge 0.6 set, in a YAML that overrides a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted
from tests.sim.convert.test_bridge import DENSE, WITH_8B


def test_fsdp_has_units_in_place_of_buckets(tmp_path: Path) -> None:
    own = "  num_buckets: 48\n  use_megatron_fsdp: true\n  data_parallel_sharding_strategy: optim_grads_params\n"
    _, said = converted(tmp_path, "o.yaml", DENSE + own, *WITH_8B)
    assert "num_buckets" not in said


def test_nccl_ep_is_simulated_as_the_library_whose_kernels_it_has(tmp_path: Path) -> None:
    more = "  moe_token_dispatcher_type: flex\n  moe_flex_dispatcher_backend: ncclep\n"
    data, said = converted(
        tmp_path,
        "o.yaml",
        DENSE.replace("model:\n", f"model:\n{more}"),
        *("--cluster", "dgx-h100", "--gpus", "64", "--model", "qwen3-30b-a3b"),
    )
    assert data["parallelism"]["ep_dispatcher"] == "hybridep"
    assert "model.moe_flex_dispatcher_backend ncclep: simulated as hybridep, whose kernels it has" in said


@pytest.mark.parametrize(
    ("model", "beside"), [("deepseek-v3", True), ("qwen3-30b-a3b", None), ("nemotron3-super-120b-a12b", None)]
)
def test_shared_experts_of_a_named_model_run_beside_exchanges(tmp_path: Path, model: str, beside: bool | None) -> None:
    """Where the model has some, and its experts see whole tokens."""
    text = DENSE.replace("model:\n", "model:\n  moe_shared_expert_overlap: true\n")
    text = text.replace("pipeline_model_parallel_size: 2", "pipeline_model_parallel_size: 1")
    named = ("--cluster", "dgx-h100", "--gpus", "64", "--model", model)
    data, said = converted(tmp_path, "o.yaml", text, *named)
    assert data["training"].get("moe_shared_expert_overlap") is beside
    assert ("not expressed here: model.moe_shared_expert_overlap" in said) is not bool(beside)


@pytest.mark.parametrize(("layers", "repeated"), [(2, True), (1, None)])
def test_a_module_that_is_repeated_is_one(tmp_path: Path, layers: int, repeated: bool | None) -> None:
    more = f"  mtp_num_layers: {layers}\n  mtp_use_repeated_layer: true\n"
    text = DENSE.replace("model:\n", f"model:\n{more}").replace("  pipeline_model_parallel_size: 2\n", "")
    named = ("--cluster", "dgx-b200", "--gpus", "64", "--model", "nemotron3-super-120b-a12b")
    data, said = converted(tmp_path, "o.yaml", text, *named)
    model = data["model"] if isinstance(data["model"], dict) else {}
    assert (model.get("mtp_layers"), model.get("mtp_repeated")) == ((2, True) if repeated else (None, None))
    assert "mtp_use_repeated_layer" not in said


def test_a_mapping_of_precision_has_its_own_default_of_scales(tmp_path: Path) -> None:
    """`MixedPrecisionConfig.fp8_recipe` of Megatron-Bridge is tensorwise, where Megatron-LM's argument is delayed."""
    data, _ = converted(tmp_path, "o.yaml", DENSE + "mixed_precision: {bf16: true, fp8: hybrid}\n", *WITH_8B)
    assert (data["training"]["precision"], data["training"]["fp8_recipe"]) == ("fp8", "tensorwise")


@pytest.mark.parametrize(
    ("modules", "found"), [("[]", None), ("null", "selective"), ("[mlp]", {"mode": "selective", "modules": ["mlp"]})]
)
def test_an_empty_list_of_modules_runs_nothing_again(tmp_path: Path, modules: str, found: object) -> None:
    """transformer_config.py: `if self.recompute_modules is None: self.recompute_modules = ["core_attn"]`; recipes of
    DeepSeek V3 in MXFP8 on GB300 have an empty list."""
    more = f"  recompute_granularity: selective\n  recompute_modules: {modules}\n"
    data, _ = converted(tmp_path, "o.yaml", DENSE.replace("model:\n", f"model:\n{more}"), *WITH_8B)
    assert data["training"].get("recompute") == found


@pytest.mark.parametrize(
    ("least", "modules"),
    [(None, ["expert_fc1", "moe_act"]), (200_000_000, ["moe_act"]), (500_000_000, None)],
)
def test_large_tensors_of_fused_experts_are_offloaded(
    tmp_path: Path, least: int | None, modules: list[str] | None
) -> None:
    """Megatron-Bridge's recipes of Nemotron 3 Ultra offload the activation's input alone, by a least size. A rank has
    8,192 tokens and 22 copies of each: their input has 1,024 numbers, the activation's 2,688."""
    more = "  fine_grained_activation_offloading: true\n  offload_modules: [fused_group_mlp]\n"
    more += "  recompute_granularity: selective\n  recompute_modules: [moe_act]\n"
    more += f"  min_offloaded_tensor_size: {least}\n" if least else ""
    text = DENSE.replace("model:\n", f"model:\n{more}").replace("  pipeline_model_parallel_size: 2\n", "")
    text = text.replace("tensor_model_parallel_size: 4", "tensor_model_parallel_size: 1").replace("sequence_p", "# ")
    named = ("--cluster", "gb200-nvl72", "--gpus", "64", "--model", "nemotron3-super-120b-a12b")
    data, said = converted(tmp_path, "o.yaml", text, *named)
    assert data["training"].get("activation_offload") == ({"modules": modules} if modules else None)
    assert "not simulated: fused_group_mlp" not in said
