"""Other trainers' configurations as scenarios: what `--emit` writes is read back, and files as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.emit import TRAINERS, emit
from sim.inputs.scenario import Scenario, load_scenario, parse_scenario
from sim.inputs.shipped import shipped_scenarios
from sim.models.balance import with_balanced_stages
from sim.simulation import simulate
from tests.sim.convert.converting import converted, refused
from topology.presets import CLUSTERS

MEGATRON = """
#!/bin/bash
# a launch script as Megatron-LM's examples have them
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-4}
TP=4
PP=2   # pipeline
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
)
GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0
    --vocab-size 128256
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --bf16
    --use-distributed-optimizer
    --overlap-grad-reduce
    --recompute-activations
    --cuda-graph-scope full
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \\
    --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size $PP \\
    --sequence-parallel
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[compile]
enable = true
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
MEMORY_BUDGET = TITAN.replace('"selective"', '"memory_budget"').replace("shard_degree = -1", "shard_degree = 2")
NO_WORDS = TITAN.replace('["float8"]', "[1]").replace("shard_degree = -1", "shard_degree = 2")
SPLIT_AT_1 = """
[model]
flavor = "8B"
[parallelism]
data_parallel_shard_degree = 1
pipeline_parallel_degree = 2
pipeline_parallel_split_points = 1
"""
TITAN_PYTHON = """
from torchtitan.config import TrainingConfig, ParallelismConfig, ActivationCheckpointConfig
from . import model_registry

def debug():
    return Trainer.Config(model_spec=model_registry("debugmodel"), training=TrainingConfig(local_batch_size=8))

def llama3_8b():
    import os; os._exit(3)
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, data_parallel_shard_degree=2),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
    )
"""
TITAN_0_3 = """
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry

def train():
    return Trainer.Config(
        model_spec=model_registry("70B", converters=[MXFP8LinearConverter.Config(model_compile_enabled=True)]),
        training=TrainingConfig(local_batch_size=2, seq_len=4096),
        parallelism=ParallelismConfig(tensor_parallel_degree=4, enable_sequence_parallel=False,
            data_parallel_shard_degree=2),
        compile=CompileConfig(enable=True, enable_async_tensor_parallel=POLICY_ASYNC),
        activation_checkpoint=POLICY,
    )
"""


def emitted() -> list[tuple[str, str, str]]:
    found = []
    for name, path in shipped_scenarios().items():
        for trainer in TRAINERS:
            try:
                scenario = scenario_for(path, trainer)
                if scenario.cluster.name in CLUSTERS:  # one of its own has no name to convert to
                    found.append((name, trainer, emit(scenario, trainer)))
            except InputError:
                continue
    return found


def scenario_for(path: Path, trainer: str) -> Scenario:
    """The scenario; for torchtitan with parameters in fp32, which it keeps."""
    return load_scenario(path, ["training.param_dtype=fp32"] if trainer.startswith("torchtitan") else [])


WRITTEN = emitted()


def test_several_scenarios_are_written_for_every_trainer() -> None:
    assert {trainer for _, trainer, _ in WRITTEN} == set(TRAINERS)


@pytest.mark.parametrize(("name", "trainer", "text"), WRITTEN, ids=[f"{n} {t}" for n, t, _ in WRITTEN])
def test_what_emit_writes_is_read_back(tmp_path: Path, name: str, trainer: str, text: str) -> None:
    """The scenario's own sections come back, but for faults and for what only its own schedule decides."""
    before = with_balanced_stages(scenario_for(shipped_scenarios()[name], trainer))
    suffix = {"megatron": "sh", "torchtitan": "toml", "torchtitan-python": "py"}[trainer]
    ranks = str(before.parallelism.ranks)
    data, _ = converted(tmp_path, f"x.{suffix}", text, "--cluster", before.cluster.name, "--gpus", ranks)
    after = parse_scenario(data)
    assert sizes(after) == sizes(before)
    assert trained(after) == trained(before)
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


def sizes(scenario: Scenario) -> dict[str, Any]:
    return scenario.model.model_dump(exclude={"max_positions", "trained_positions", "moe"})


def trained(scenario: Scenario) -> dict[str, Any]:
    """What flags express: a kernel's version they do not."""
    return scenario.for_training.model_dump(exclude={"tokens", "batch_schedule", "attention_kernel"})


def decides(scenario: Scenario, key: str) -> bool:
    """Whether a key of the layout decides anything where it is and what the others are."""
    p = scenario.parallelism
    needed = {
        "tp_overlap": p.tp > 1 and p.tp_overlap != "none",
        "expert_tp": scenario.model.moe is not None,
        "sp": p.tp > 1,
        "cp_method": p.cp > 1,
        "cp_split": p.cp > 1,
        "dp_sync": p.dp * p.cp > 1,
        "bucket_bytes": False,
        "zero": p.dp * p.cp > 1,
        "shard_size": p.zero > 0,
        "param_gather_overlap": p.zero in (1, 2) and p.dp * p.cp > 1,
        "schedule": p.pp > 1,
        "p2p_overlap": p.pp > 1,
        "accumulate_unsharded": scenario.micro_batches > 1,
        "reshard_after_forward": p.zero == 3,
    }
    return needed.get(key, True)


@pytest.mark.parametrize("trainer", ["torchtitan", "torchtitan-python"])
@pytest.mark.parametrize("loss", ["fused", "unfused"])
def test_whether_the_loss_is_compiled_is_written_and_read_back(tmp_path: Path, trainer: str, loss: str) -> None:
    before = {
        "model": "llama3-8b",
        "training": {
            "seq_len": 8192,
            "global_batch_size": 8,
            "framework": "compiled",
            "param_dtype": "fp32",
            "cross_entropy": loss,
        },
        "parallelism": {"dp": 8, "zero": 3},
        "cluster": "dgx-h100",
    }
    text = emit(parse_scenario(before), trainer)
    file = "x.toml" if trainer == "torchtitan" else "x.py"
    after, _ = converted(tmp_path, file, text, "--cluster", "dgx-h100", "--gpus", "8")
    assert parse_scenario(after).for_training.cross_entropy == loss


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


def test_a_megatron_script_with_variables_and_arrays(tmp_path: Path) -> None:
    data, text = converted(tmp_path, "train.sh", MEGATRON, "--cluster", "dgx-h100")
    p, t = data["parallelism"], data["training"]
    assert (p["tp"], p["pp"], p["dp"], p["sp"], p["zero"], p["dp_sync"]) == (4, 2, 4, True, 1, "bucketed")
    assert (t["micro_batch_size"], t["global_batch_size"], t["recompute"]) == (1, 128, "selective")
    assert data["model"]["vocab"] == 128256
    assert "# not expressed here: --cuda-graph-scope" in text


@pytest.mark.parametrize(
    ("dispatcher", "expected"),
    [("alltoall", {"groups": 8, "top_groups": 4}), ("flex", {"max_nodes_per_token": 4})],
)
def test_a_choice_limited_to_groups(tmp_path: Path, dispatcher: str, expected: dict[str, int]) -> None:
    """NCCL's all-to-all sends every copy by itself, DeepEP and HybridEP a token once to a node."""
    experts = f"""    --num-experts 64 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 \\
    --moe-token-dispatcher-type {dispatcher} --sequence-parallel"""
    text = MEGATRON.replace("    --sequence-parallel", experts)
    moe = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]["moe"]
    assert {k: moe[k] for k in ("groups", "top_groups", "max_nodes_per_token") if k in moe} == expected


def test_a_capacity_that_experts_are_padded_to(tmp_path: Path) -> None:
    experts = """    --num-experts 64 --moe-router-topk 8 --moe-expert-capacity-factor 1 \\
    --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type alltoall --sequence-parallel"""
    text = MEGATRON.replace("    --sequence-parallel", experts)
    moe = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]["moe"]
    assert (moe["capacity_factor"], moe["pad_to_capacity"]) == (1.0, True)


EXPERTS = "--num-experts 64 --expert-model-parallel-size 4"


@pytest.mark.parametrize(
    ("flags", "section", "expected"),
    [
        ("--bf16", "training", {"grad_dtype": "fp32"}),
        ("--bf16 --main-grads-dtype bf16", "training", {"grad_dtype": "bf16"}),
        ("--fp16", "training", {"grad_dtype": "fp16"}),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "training", {"grad_dtype": "fp32"}),
        ("--optimizer dist_muon", "training", {"optimizer": "muon"}),
        ("", "training", {"global_batch_size": 4, "micro_batch_size": 1}),
        ("--overlap-grad-reduce", "parallelism", {"bucket_bytes": 4 * 40_000_000}),
        ("--overlap-grad-reduce --ddp-bucket-size 10", "parallelism", {"bucket_bytes": 40}),
        ("--use-megatron-fsdp", "parallelism", {"zero": 0}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "parallelism", {"zero": 3}),
        (
            "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
            "parallelism",
            {"zero": 3, "reshard_after_forward": False},
        ),
    ],
)
def test_what_megatron_s_flags_and_those_left_out_say(
    tmp_path: Path, flags: str, section: str, expected: dict[str, Any]
) -> None:
    """Defaults of arguments.py, of `validate_args`, and of DistributedDataParallel's buckets."""
    text = MEGATRON.replace("--sequence-parallel", f"--sequence-parallel {flags}")
    for line in ("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--global-batch-size 128"):
        text = text.replace(f"    {line}\n", "")
    found = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0][section]
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--transformer-impl local", "not expressed here: --cuda-graph-scope, --transformer-impl\n"),
        ("--no-bias-swiglu-fusion", "--no-bias-swiglu-fusion\n"),
        ("--cp-comm-type a2a+p2p", "--cp-comm-type, --cuda-graph-scope\n"),
        ("--no-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion\n"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            "--recompute-num-layers\n",
        ),
        (EXPERTS, "--moe-token-dispatcher-type allgather, the default: an all-to-all is simulated"),
        (f"{EXPERTS} --moe-token-dispatcher-type allgather", "--cuda-graph-scope, --moe-token-dispatcher-type\n"),
        (EXPERTS, "simulated as with --moe-grouped-gemm and --moe-permute-fusion\n"),
        (f"{EXPERTS} --moe-grouped-gemm", "simulated as with --moe-permute-fusion\n"),
    ],
)
def test_what_of_megatron_s_flags_is_not_simulated_is_said(tmp_path: Path, flags: str, note: str) -> None:
    text = MEGATRON.replace("--sequence-parallel", f"--sequence-parallel {flags}")
    if "--recompute" in flags:
        text = text.replace("    --recompute-activations\n", "")
    assert note in converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[1]


def test_a_model_that_is_named_takes_the_place_of_a_script_s_flags(tmp_path: Path) -> None:
    text = MEGATRON.replace("    --vocab-size 128256\n", "    --no-masked-softmax-fusion\n")
    data, said = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100", "--model", "llama3-8b")
    assert data["model"] == "llama3-8b"
    assert "# not expressed here: --cuda-graph-scope\n" in said


@pytest.mark.parametrize(
    ("frequency", "dense", "pattern"),
    [
        ("1", None, None),
        ("'([0]*3+[1]*29)'", 3, None),
        ("2", None, ["experts", "dense"] * 16),
        ('"([0]*1+[1]*3)*8"', None, ["dense", "experts", "experts", "experts"] * 8),
        ("$FREQUENCY", 2, None),
    ],
)
def test_which_layers_have_experts(
    tmp_path: Path, frequency: str, dense: int | None, pattern: list[str] | None
) -> None:
    """gpt_layer_specs.py: every so-many-th layer, counted from the first, or a list."""
    flags = f"--sequence-parallel --num-experts 8 --moe-layer-freq {frequency}"
    text = 'FREQUENCY="([0]*2+[1]*30)"' + MEGATRON.replace("--sequence-parallel", flags)
    model = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["model"]
    assert model["moe"].get("dense_layers") == dense
    assert model.get("mlp_pattern") == pattern


@pytest.mark.parametrize("frequency", ["0", "'[1]*33'", "'[2]*32'", "'[1]*10**9'", "'open(1)'", "'['"])
def test_layers_with_experts_that_are_no_list_are_refused(tmp_path: Path, frequency: str) -> None:
    text = MEGATRON.replace("--sequence-parallel", f"--sequence-parallel --num-experts 8 --moe-layer-freq {frequency}")
    said = refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    assert "--moe-layer-freq: found" in said
    assert "a list of 0 and 1 for 32 layers" in said


def test_a_layout_of_stages_is_unrolled_as_megatron_does(tmp_path: Path) -> None:
    text = MEGATRON.replace(
        "--sequence-parallel", '--sequence-parallel --pipeline-model-parallel-layout "Ettt*2|(tt|)*6,(t|)*16L"'
    )
    parallelism = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100")[0]["parallelism"]
    assert parallelism["layers_per_stage"] == [4, *[2] * 6, *[1] * 16, 0]
    assert parallelism["virtual_stages"] == 12


def test_a_torchtitan_file_with_degrees_left_to_the_launcher(tmp_path: Path) -> None:
    data, _ = converted(tmp_path, "llama.toml", TITAN, "--cluster", "dgx-h100", "--gpus", "32")
    p, t = data["parallelism"], data["training"]
    assert (p["dp"], p["tp"], p["zero"], p["shard_size"]) == (16, 2, 3, 8)
    assert (t["precision"], t["framework"], t["recompute"]) == ("fp8", "compiled", "selective_op")
    assert t["global_batch_size"] == 2 * 16
    assert data["model"] == "llama3.1-8b"


FIRST_STAGES = [[f"layers.{n}" for n in range(*ends)] for ends in ((0, 10), (10, 20), (20, 32))]


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ("", [8, 9, 8, 7]),
        ("pipeline_parallel_last_stage_less_layers = 3", [8, 9, 9, 6]),
        ('pipeline_parallel_split_points = ["layers.10", "layers.20", "norm"]', [10, 10, 12, 0]),
        (f"module_fqns_per_model_part = {[*FIRST_STAGES, ['norm', 'output']]}", [10, 10, 12, 0]),
        ('pipeline_parallel_schedule = "Interleaved1F1B"', [4, 5, 4, 4, 4, 4, 4, 3]),
        ('pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 3', [2, *[3] * 9, 2, 1]),
    ],
)
def test_torchtitan_counts_embedding_and_output_as_layers_of_a_pipeline(
    tmp_path: Path, keys: str, layers: list[int]
) -> None:
    """distributed/pipeline_parallel.py: _generate_llm_fqn_per_model_part."""
    text = TITAN.replace("[parallelism]\n", f"[parallelism]\npipeline_parallel_degree = 4\n{keys}\n")
    text = text.replace("local_batch_size = 2", "local_batch_size = 4")
    data, _ = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")
    assert data["parallelism"]["layers_per_stage"] == layers
    assert data["parallelism"]["virtual_stages"] == len(layers) // 4


def test_torchtitan_s_settings_without_effect_are_not_listed(tmp_path: Path) -> None:
    keys = 'gc_freq = 50\n[optimizer]\nname = "AdamW"\nlr = 3e-4\nimplementation = "foreach"\n[parallelism]'
    text = TITAN.replace("[parallelism]", keys)
    said = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "32")[1]
    assert "# not expressed here: optimizer.implementation\n" in said


@pytest.mark.parametrize("dtype", [None, "bf16", "fp8"])
def test_whether_fsdp_gathers_8_bits_survives_torchtitan_s_file(tmp_path: Path, dtype: str | None) -> None:
    """Off where nothing is said (torchtitan's default); what is simulated in 8 bits says so."""
    said = "" if dtype == "bf16" else "[float8]\nenable_fsdp_float8_all_gather = true\n"
    data, _ = converted(
        tmp_path,
        "llama.toml",
        TITAN.replace("replicate_degree = 2", "replicate_degree = 1") + said,
        "--cluster",
        "dgx-h100",
        "--gpus",
        "16",
    )
    assert data["parallelism"].get("param_gather_dtype") == ("bf16" if dtype == "bf16" else None)
    data["parallelism"]["param_gather_dtype"] = dtype
    text = emit(parse_scenario(data), "torchtitan")
    assert ("enable_fsdp_float8_all_gather = true" in text) == (dtype != "bf16")
    again, _ = converted(tmp_path, "again.toml", text, "--cluster", "dgx-h100", "--gpus", "16")
    assert again["parallelism"].get("param_gather_dtype") == ("bf16" if dtype == "bf16" else None)


def test_a_torchtitan_python_config_is_read_and_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "llama3"
    folder.mkdir()
    options = ("--cluster", "dgx-h100", "--config", "llama3_8b")
    data, _ = converted(folder, "config_registry.py", TITAN_PYTHON, *options)
    assert (data["model"], data["training"]["recompute"], data["name"]) == ("llama3.1-8b", "full", "llama3_8b")
    assert (data["parallelism"]["tp"], data["parallelism"]["dp"], data["parallelism"]["zero"]) == (8, 2, 3)
    assert "debug, llama3_8b" in refused(folder, "config_registry.py", TITAN_PYTHON, "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("policy", "mode"), [("FullAC.Config()", "full"), ("SelectiveAC.Config()", "selective_op"), ("None", "none")]
)
def test_what_torchtitan_0_3_says_elsewhere_is_read(tmp_path: Path, policy: str, mode: str) -> None:
    text = TITAN_0_3.replace("POLICY_ASYNC", str(mode == "none")).replace("POLICY", policy)
    text = text.replace("enable_sequence_parallel=False", f"enable_sequence_parallel={mode == 'none'}")
    data, _ = converted(tmp_path, "config.py", text, "--cluster", "dgx-b200")
    assert (data["training"]["recompute"], data["training"]["precision"]) == (mode, "mxfp8")
    assert data["parallelism"]["sp"] is (mode == "none")
    assert data["parallelism"].get("tp_overlap") == ("full" if mode == "none" else None)
    assert data["training"]["cuda_graphs"] == "step"  # unless training.disable_cuda_graphs says otherwise
    launched = text.replace("seq_len=4096", "seq_len=4096, disable_cuda_graphs=True")
    data, _ = converted(tmp_path, "config.py", launched, "--cluster", "dgx-b200")
    assert "cuda_graphs" not in data["training"]
    assert "found MemoryBudgetAC; can be simulated: SelectiveAC, FullAC" in refused(
        tmp_path, "config.py", text.replace(policy, "MemoryBudgetAC.Config()"), "--cluster", "dgx-b200"
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "[model\n", "not TOML"),
        ("a.py", "def f(:\n", "not Python"),
        ("a.py", "x = 1\n", "holds no torchtitan config"),
        ("a.sh", "echo hello\n", "whose configuration it is cannot be told"),
        ("a.sh", "torchrun pretrain_gpt.py --num-layers four", "--gpus N"),
        ("a.sh", "--nproc-per-node 8 --nnodes 1 --num-layers four --seq-length 8", "is required and missing"),
        ("a.sh", "--nproc-per-node 9 --nnodes 1 --tensor-model-parallel-size 2", "must be a multiple of 2"),
        ("a.sh", f"{MEGATRON} --clip-grad x", "clip-grad: found 'x'; must be a number"),
        ("a.sh", f"{MEGATRON} --kv-channels x", "kv-channels: found 'x'; must be a whole number"),
        ("a.sh", f"{MEGATRON} --context-parallel-size 0", "--context-parallel-size: found 0; must be at least 1"),
        ("a.toml", TITAN.replace("replicate_degree = 2", "replicate_degree = 0"), "found 0; must be at least 1"),
        ("a.toml", NO_WORDS, "converters: found a list of 1; must be a list of texts"),
        ("a.toml", SPLIT_AT_1, "pipeline_parallel_split_points: found 1; must be a list of texts"),
        ("a.toml", MEMORY_BUDGET, "found 'memory_budget'; can be simulated: none, selective, full"),
        ("a.json", "[1]", "holds no mapping"),
        ("a.toml", '[parallelism]\ndata_parallel_shard_degree = 1\n[model]\nname = "flux"', "found flux None"),
    ],
)
def test_what_cannot_be_read_is_one_message(tmp_path: Path, name: str, text: str, message: str) -> None:
    output = refused(tmp_path, name, text, "--cluster", "dgx-h100")
    assert message in output
    assert "Traceback" not in output


def test_variables_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    bomb = "\n".join(f"A{i}={'$A' + str(i + 1):s}{('$A' + str(i + 1)) * 60}" for i in range(6)) + "\nA6=" + "x" * 1000
    assert "characters" in refused(tmp_path, "a.sh", bomb + "\n--num-layers $A0 $A0 $A0", "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("converters", "sections", "precision"),
    [
        ("[]", "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n", "bf16"),
        ('""', "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = false\n", "bf16"),
        ('"float8"', "[float8]\nenable_fsdp_float8_all_gather = true\n", "fp8"),
        ('["quantize.linear.float8"]', "[quantize.linear.float8]\nrecipe_name = 'rowwise'\n", "fp8"),
    ],
)
def test_model_converters_decide_about_torchtitan_s_precision(
    tmp_path: Path, converters: str, sections: str, precision: str
) -> None:
    """A section of a converter that is not on does nothing; a converter may be a text, as in torchtitan's own files."""
    text = TITAN.replace('["float8"]', converters) + sections
    text += "filter_fqns = ['output']\n"
    data, said = converted(tmp_path, "llama.toml", text, "--cluster", "dgx-h100", "--gpus", "16")
    assert data["training"]["precision"] == precision
    assert ("# not expressed here: float8.filter_fqns\n" in said) == (precision == "fp8") == ("# not" in said)


def test_the_vocabulary_that_a_tokenizer_says_can_be_set(tmp_path: Path) -> None:
    text = MEGATRON.replace("--vocab-size 128256", "--vocab-file vocab.json --merge-file merges.txt")
    assert "add --set model.vocab=N" in refused(tmp_path, "train.sh", text, "--cluster", "dgx-h100")
    data, _ = converted(tmp_path, "train.sh", text, "--cluster", "dgx-h100", "--set", "model.vocab=50257")
    assert data["model"]["vocab"] == 50257
