"""What `--emit` writes for other trainers is read back by `stepsim convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.emit import TRAINERS, emit
from sim.inputs.rules.without_effect import idle_keys
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.inputs.shipped import shipped_scenarios
from sim.models.activation_memory.recompute import stops_early
from sim.models.balance import with_balanced_stages
from sim.simulation import simulate
from sim.variants.frameworks.records import frees_gradients
from sim.variants.recipes import recipe_of
from tests.sim.convert.converting import converted
from topology.presets import CLUSTERS

EITHER = [(name, trainer) for name in shipped_scenarios() for trainer in TRAINERS]


def written(name: str, trainer: str) -> str | None:
    """What `--emit` writes of a shipped scenario; None if it refuses it, or if nothing can name its own cluster."""
    try:
        scenario = scenario_for(shipped_scenarios()[name], trainer)
        return emit(scenario, trainer) if scenario.cluster.name in CLUSTERS else None
    except InputError:
        return None


def scenario_for(path: Path, trainer: str) -> Scenario:
    """The scenario; for torchtitan with parameters in fp32, which it keeps, and for its Python with whole reruns."""
    kept = ["training.param_dtype=fp32"] if trainer.startswith("torchtitan") else []
    scenario = load_scenario(path, kept)
    again = scenario.training is not None and scenario.training.recompute.mode == "full"
    if trainer == "torchtitan-python" and again and stops_early(scenario):
        return load_scenario(path, [*kept, "training.recompute.early_stop=false"])
    return scenario


@pytest.mark.slow
def test_several_scenarios_are_written_for_every_trainer() -> None:
    assert {trainer for name, trainer in EITHER if written(name, trainer)} == set(TRAINERS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trainer"), EITHER)
def test_what_emit_writes_is_read_back(tmp_path: Path, name: str, trainer: str) -> None:
    """The scenario's own sections come back, but for faults and for what only its own schedule decides."""
    text = written(name, trainer)
    if text is None:
        return
    before = with_balanced_stages(scenario_for(shipped_scenarios()[name], trainer))
    suffix = {"megatron": "sh", "torchtitan": "toml", "torchtitan-python": "py"}[trainer]
    ranks = str(before.parallelism.ranks)
    data, _ = converted(tmp_path, f"x.{suffix}", text, "--cluster", before.cluster.name, "--gpus", ranks)
    after = parse_scenario(data)
    assert sizes(after) == sizes(before)
    assert trained(after) == trained(before)
    # Megatron-LM keeps its gradient buffers, whatever it fuses; torchtitan sets gradients to none.
    assert frees_gradients(after.for_training, after.parallelism.zero) == trainer.startswith("torchtitan")
    differing = {
        key
        for key, value in before.parallelism.model_dump().items()
        if getattr(after.parallelism, key) != value and decides(before, key)
    }
    assert not differing


@pytest.mark.parametrize(
    ("moe", "layout", "expected"),
    [
        ({"max_nodes_per_token": 2}, {"ep": 32}, {"max_nodes_per_token": 2}),
        ({"groups": 8, "top_groups": 4}, {"ep": 32}, {"groups": 8, "top_groups": 4}),
        ({"router_fp32": True}, {"ep": 32}, {"router_fp32": True}),
        # No token is sent to another rank's experts, so no dispatcher is named.
        ({"max_nodes_per_token": 1}, {"ep": 1}, {"groups": 1, "top_groups": 1}),
        ({"max_nodes_per_token": 1}, {"dp": 16, "tp": 2, "sp": True, "expert_tp": 2}, {"groups": 1, "top_groups": 1}),
    ],
)
def test_how_tokens_choose_and_find_their_experts_is_read_back(
    tmp_path: Path, moe: dict[str, Any], layout: dict[str, Any], expected: dict[str, Any]
) -> None:
    experts = {"experts": 64, "top_k": 4, "ffn": 512, **moe}
    model = {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 32000, "moe": experts}
    training = {"seq_len": 1024, "global_batch_size": 32, "framework": "megatron"}
    before = {"model": model, "training": training, "parallelism": {"dp": 32, **layout}, "cluster": "dgx-h100"}
    text = emit(parse_scenario(before), "megatron")
    after, _ = converted(tmp_path, "x.sh", text, "--cluster", "dgx-h100", "--gpus", "32")
    keys = ("groups", "top_groups", "max_nodes_per_token", "router_fp32")
    assert {key: after["model"]["moe"][key] for key in keys if key in after["model"]["moe"]} == expected


@pytest.mark.parametrize("dispatcher", ["all_to_all", "deepep", "hybridep"])
def test_a_dispatcher_without_limited_nodes_is_read_back(tmp_path: Path, dispatcher: str) -> None:
    experts = {"experts": 64, "top_k": 4, "ffn": 512}
    model = {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 32000, "moe": experts}
    training = {"seq_len": 1024, "global_batch_size": 32, "framework": "megatron"}
    layout = {"dp": 32, "ep": 32, "ep_dispatcher": dispatcher}
    before = parse_scenario({"model": model, "training": training, "parallelism": layout, "cluster": "dgx-h100"})
    after, _ = converted(tmp_path, "x.sh", emit(before, "megatron"), "--cluster", "dgx-h100", "--gpus", "32")
    assert parse_scenario(after).parallelism.ep_dispatcher == dispatcher
    assert "max_nodes_per_token" not in after["model"]["moe"]


@pytest.mark.parametrize(
    "own",
    [
        {"norm": "layernorm", "bias": False, "norm_bias": True, "mlp": "relu2", "rope_share": 0.5},  # Nemotron
        {"window": 128, "attention_pattern": ["sliding", "full"], "sinks": True, "mlp": "clamped_swiglu"},  # gpt-oss
        {"window": 128, "attention_pattern": ["sliding", "sliding", "sliding", "full"], "no_rope_every": 4},
        {"window": 4096},
        {"attention_gate": True, "qk_norm": True},
        {"norm": "layernorm", "qk_norm": "layernorm"},  # Persimmon
        {"moe": {"experts": 8, "top_k": 2, "ffn": 512, "shared_ffn": 768, "shared_gate": True}},  # Qwen2-MoE
        {"moe": {"experts": 8, "top_k": 2, "ffn": 512, "shared_experts": 2}},
    ],
)
def test_variations_of_layers_are_read_back(tmp_path: Path, own: dict[str, Any]) -> None:
    base = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 32000, "positions": "rope", "norm": "rmsnorm"}
    training = {"seq_len": 1024, "global_batch_size": 8, "framework": "megatron"}
    before = parse_scenario({"model": {**base, **own}, "training": training, "cluster": "dgx-h100"})
    script = emit(before, "megatron")
    after = parse_scenario(converted(tmp_path, "x.sh", script, "--cluster", "dgx-h100", "--gpus", "1")[0])
    assert sizes(after) == sizes(before)
    assert after.model.moe == before.model.moe


def sizes(scenario: Scenario) -> dict[str, Any]:
    """The model's keys that decide anything: no trainer here runs Transformers' code, Megatron has one GELU, and only
    serving reads weights as they are published."""
    idle = {"max_positions", "trained_positions", "moe", "code", "checkpoint_quantization", "checkpoint_cache"}
    kept = scenario.model.model_dump(exclude=idle)
    return kept | {"mlp": kept["mlp"].removesuffix("_new")}


def trained(scenario: Scenario) -> dict[str, Any]:
    """What flags express: a kernel's version they do not, gradients between steps are the trainer's affair, and so are
    chunks that Liger chooses."""
    left = {"tokens", "batch_schedule", "attention_kernel", "zero_grad", "loss_chunks"}
    kept = scenario.for_training.model_dump(exclude=left)
    return kept | {"fp8_recipe": recipe_of(scenario.for_training)}


def decides(scenario: Scenario, key: str) -> bool:
    """Whether a key of the layout decides anything where it is and what the others are."""
    p = scenario.parallelism
    needed = {
        "tp_overlap": p.tp > 1 and p.tp_overlap != "none",
        "expert_tp": scenario.model.moe is not None,
        "sp": p.tp > 1,
        "bucket_bytes": False,
        "accumulate_unsharded": scenario.micro_batches > 1,
    }
    return needed.get(key, True) and ("parallelism", key) not in idle_keys(scenario)


@pytest.mark.parametrize("trainer", ["torchtitan", "torchtitan-python"])
@pytest.mark.parametrize("framework", ["compiled", "eager"])
@pytest.mark.parametrize("loss", ["fused", "unfused"])
def test_what_is_compiled_is_written_and_read_back(tmp_path: Path, trainer: str, loss: str, framework: str) -> None:
    before = {
        "model": "llama3-8b",
        "training": {
            "seq_len": 8192,
            "global_batch_size": 8,
            "framework": framework,
            "param_dtype": "fp32",
            "cross_entropy": loss,
        },
        "parallelism": {"dp": 8, "zero": 3},
        "cluster": "dgx-h100",
    }
    text = emit(parse_scenario(before), trainer)
    file = "x.toml" if trainer == "torchtitan" else "x.py"
    after, _ = converted(tmp_path, file, text, "--cluster", "dgx-h100", "--gpus", "8")
    training = parse_scenario(after).for_training
    assert (training.cross_entropy, training.framework) == (loss, framework)


def test_experts_with_more_replicas_than_layers_are_sharded_by_the_flags_too(tmp_path: Path) -> None:
    """At dp 1, experts that are not cut as layers are have two replicas, and ZeRO-1 halves their states."""
    before = {
        "model": {"preset": "qwen3-30b-a3b", "layers": 4},
        "training": {"seq_len": 4096, "global_batch_size": 8, "framework": "megatron"},
        "parallelism": {"tp": 2, "sp": True, "ep": 1, "expert_tp": 1, "zero": 1},
        "cluster": "dgx-h100",
    }
    text = emit(parse_scenario(before), "megatron")
    after, _ = converted(tmp_path, "x.sh", text, "--cluster", "dgx-h100", "--gpus", "2")
    assert after["parallelism"]["zero"] == 1
    one, other = (simulate(parse_scenario(x)).outcome.peak_memory_bytes for x in (before, after))
    assert one == other


@pytest.mark.parametrize("grad_dtype", ["fp16", "fp32"])
def test_gradients_of_fp16_and_the_fusion_of_experts_rows_are_written(tmp_path: Path, grad_dtype: str) -> None:
    training = {"seq_len": 4096, "global_batch_size": 8, "framework": "megatron", "precision": "fp16"}
    before = {"model": "llama3-8b", "training": {**training, "grad_dtype": grad_dtype}, "cluster": "dgx-h100"}
    text = emit(parse_scenario(before), "megatron")
    after, _ = converted(tmp_path, "x.sh", text, "--cluster", "dgx-h100", "--gpus", "1")
    assert after["training"]["grad_dtype"] == grad_dtype
    experts = {**before, "model": "qwen3-30b-a3b", "training": {**training, "precision": "bf16"}}
    text = emit(parse_scenario(experts), "megatron")
    assert "simulated as with" not in converted(tmp_path, "x.sh", text, "--cluster", "dgx-h100", "--gpus", "1")[1]


def test_graphs_that_no_flag_asks_for_are_refused() -> None:
    training = {"seq_len": 4096, "global_batch_size": 8, "framework": "megatron", "cuda_graphs": "layers"}
    scenario = parse_scenario({"model": "llama3-8b", "training": training, "cluster": "dgx-h100"})
    with pytest.raises(
        InputError, match=r"training\.cuda_graphs: found layers; Megatron-LM launches kernels one by one"
    ):
        emit(scenario, "megatron")


@pytest.mark.parametrize(
    ("cluster", "kernel", "backend"),
    [
        ("dgx-h100", None, "auto"),
        ("dgx-h100", "cudnn", "fused"),
        ("dgx-h100", "flash2", "flash"),
        ("dgx-a100", "flash2", "flash"),
        ("dgx-b200", None, "auto"),
    ],
)
def test_the_kernel_of_attention_is_written_and_read_back(
    tmp_path: Path, cluster: str, kernel: str | None, backend: str
) -> None:
    training = {"seq_len": 8192, "global_batch_size": 1, "framework": "megatron", "attention_kernel": kernel}
    before = {"model": {"preset": "llama3-8b", "layers": 4}, "training": training, "cluster": cluster}
    text = emit(parse_scenario(before), "megatron")
    assert f"--attention-backend {backend} " in text
    after, _ = converted(tmp_path, "x.sh", text, "--cluster", cluster, "--gpus", "1")
    one, other = (simulate(parse_scenario(x)).outcome.step_time_s for x in (before, after))
    assert one == other


def test_flash_attention_3_is_named_beside_its_flag() -> None:
    training = {"seq_len": 8192, "global_batch_size": 1, "framework": "megatron", "attention_kernel": "flash3"}
    text = emit(parse_scenario({"model": "llama3-8b", "training": training, "cluster": "dgx-h100"}), "megatron")
    assert "--attention-backend flash " in text
    assert "only where flash-attn-3 is installed" in text


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v2"])
def test_what_recipes_set_is_written_for_their_framework_and_read_back(tmp_path: Path, model: str) -> None:
    """scripts/performance of Megatron-Bridge: no check of losses and gradients, averages in the messages."""
    layout = {"dp": 8, "zero": 1} | ({} if model == "llama3-8b" else {"ep": 8})
    for framework in ("megatron", "megatron_bridge"):
        before = parse_scenario(
            {
                "version": 1,
                "model": {"preset": model, "layers": 4, **({"indexer": None} if model == "deepseek-v2" else {})},
                "training": {
                    "seq_len": 4096,
                    "micro_batch_size": 1,
                    "global_batch_size": 16,
                    "framework": framework,
                    "precision": "fp8",
                },
                "parallelism": layout,
                "cluster": "dgx-h100",
            }
        )
        text = emit(before, "megatron")
        assert ("--no-check-for-nan-in-loss-and-grad" in text) == (framework == "megatron_bridge")
        data, said = converted(tmp_path, "x.sh", text, "--cluster", "dgx-h100", "--gpus", "8")
        assert data["training"]["framework"] == framework
        after = parse_scenario(data)
        assert recipe_of(after.training) == recipe_of(before.training)
        assert simulate(after).outcome.step_time_s == simulate(before).outcome.step_time_s
        assert "not expressed" not in said


@pytest.mark.parametrize("graphs", ["none", "step"])
def test_the_graph_of_a_step_is_written(tmp_path: Path, graphs: str) -> None:
    """torchtitan 0.3.0 captures a step unless `disable_cuda_graphs` says otherwise."""
    changed = ["training.param_dtype=fp32", "model=llama3-8b", f"training.cuda_graphs={graphs}"]
    changed += ["parallelism.zero=3", "training.framework=compiled"]
    text = emit(load_scenario(shipped_scenarios()["dp8"], changed), "torchtitan-python")
    assert f"disable_cuda_graphs={graphs == 'none'}" in text
    data, _ = converted(tmp_path, "x.py", text, "--cluster", "dgx-h100", "--gpus", "8")
    assert data["training"].get("cuda_graphs", "none") == graphs
