"""`sim.run --schema`, `--emit`, `--chakra`: what they print and refuse."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.emit import emit
from sim.emit.common import Reason
from sim.inputs.scenario import Scenario, parse_scenario
from tests.modules import run_module

SCENARIOS = Path(__file__).parents[3] / "scenarios"
LLAMA: dict[str, Any] = {
    "model": "llama3-70b",
    "cluster": "dgx-h100",
    "parallelism": {
        "dp": 8,
        "tp": 8,
        "sp": True,
        "pp": 4,
        "zero": 3,
        "schedule": "interleaved_1f1b",
        "accumulate_unsharded": True,
    },
    "training": {"seq_len": 8192, "global_batch_size": 256, "param_dtype": "fp32", "recompute": "full"},
}

# Of `add_argument` in megatron/training/arguments.py, NVIDIA/Megatron-LM at 000c4ac: those that can be written.
MEGATRON_TEXT = """
accumulate-allreduce-grads-in-fp32 add-qkv-bias attention-backend attention-dropout bf16 ckpt-format clip-grad
context-parallel-size cp-comm-type cross-entropy-fusion-impl cross-entropy-loss-fusion data-parallel-sharding-strategy
ddp-bucket-size
disable-bias-linear eval-iters exp-avg-dtype exp-avg-sq-dtype
expert-model-parallel-size expert-tensor-parallel-size ffn-hidden-size fp16 fp4-format
fp8-format fp8-recipe global-batch-size grad-reduce-in-bf16 group-query-attention hidden-dropout hidden-size
kv-channels kv-lora-rank log-interval lr make-vocab-size-divisible-by max-position-embeddings micro-batch-size mock-data
moe-expert-capacity-factor moe-ffn-hidden-size moe-grouped-gemm moe-layer-freq moe-permute-fusion
moe-pad-expert-input-to-capacity
moe-router-force-load-balancing moe-router-padding-for-quantization
moe-router-dtype moe-router-group-topk moe-router-num-groups moe-router-topk moe-shared-expert-intermediate-size
moe-token-dispatcher-type mtp-num-layers first-last-layers-bf16 num-layers-at-start-in-bf16
num-layers-at-end-in-bf16 cpu-offloading-num-layers fine-grained-activation-offloading offload-modules
multi-latent-attention use-precision-aware-optimizer no-bias-dropout-fusion no-bias-gelu-fusion
no-bias-swiglu-fusion no-gradient-accumulation-fusion no-masked-softmax-fusion no-overlap-p2p-communication
no-rope-fusion no-check-for-nan-in-loss-and-grad ddp-average-in-collective normalization num-attention-heads
num-distributed-optimizer-instances num-experts num-layers
microbatch-group-size-per-virtual-pipeline-stage
num-query-groups num-virtual-stages-per-pipeline-rank optimizer overlap-grad-reduce
overlap-moe-expert-parallel-comm delay-wgrad-compute overlap-param-gather pipeline-model-parallel-layout
pipeline-model-parallel-size position-embedding-type q-lora-rank qk-head-dim qk-layernorm qk-pos-emb-head-dim
recompute-granularity recompute-method recompute-num-layers seq-length sequence-parallel squared-relu swiglu
tensor-model-parallel-size tokenizer-type tp-comm-overlap train-iters untie-embeddings-and-output-weights
use-distributed-optimizer use-megatron-fsdp use-tp-pp-dp-mapping v-head-dim vocab-size nnodes nproc-per-node
activation-func-clamp-value glu-linear-offset no-rope-freq quick-geglu rotary-percent softmax-type
window-attn-skip-freq window-size
hierarchical-context-parallel-sizes sgd-momentum calculate-per-token-loss
"""
MEGATRON = set(re.findall(r"\S+", MEGATRON_TEXT))
# Of the dataclasses in torchtitan/config/job_config.py of torchtitan 0.2.2.
TITAN = {
    "model": {"name", "flavor", "converters"},
    "training": {
        "local_batch_size",
        "global_batch_size",
        "seq_len",
        "max_norm",
        "steps",
        "mixed_precision_param",
        "mixed_precision_reduce",
    },
    "parallelism": {
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "fsdp_reshard_after_forward",
        "tensor_parallel_degree",
        "enable_async_tensor_parallel",
        "pipeline_parallel_degree",
        "module_fqns_per_model_part",
        "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size",
        "context_parallel_degree",
        "context_parallel_rotate_method",
    },
    "activation_checkpoint": {"mode", "selective_ac_option", "early_stop"},
    "compile": {"enable"},
    "quantize": {"linear"},
}


def scenario(**sections: Any) -> Scenario:
    """LLAMA with some keys changed."""
    return parse_scenario(
        {k: v | sections.get(k, {}) if isinstance(v, dict) else sections.get(k, v) for k, v in LLAMA.items()}
    )


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return run_module("sim.run", *args)


# --- commands


def test_commands() -> None:
    schema = run("--schema")
    assert json.loads(schema.stdout)["title"] == "stepsim scenario"
    assert run("--explain", "model.vocab").stdout.startswith("model.vocab: whole number")
    for args in (["--explain", "nothing"], [], ["--schema", "--engine", "x"]):
        done = run(*args)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


# --- emit


@pytest.mark.parametrize("name", ["tp8", "serve_batch1", "rl_grpo_llama8b"])
def test_a_refusal_begins_with_the_file(name: str) -> None:
    file = SCENARIOS / f"{name}.yaml"
    done = run(str(file), "--emit", "torchtitan")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {file}: ")


def test_torchtitan_takes_the_same_layout() -> None:
    tables = tomllib.loads(emit(scenario(), "torchtitan"))
    assert {k: set(v) <= TITAN[k] for k, v in tables.items()} == dict.fromkeys(tables, True)
    p = tables["parallelism"]
    assert (p["data_parallel_shard_degree"], p["tensor_parallel_degree"], p["pipeline_parallel_degree"]) == (8, 8, 4)
    assert p["pipeline_parallel_schedule"] == "Interleaved1F1B"
    parts = p["module_fqns_per_model_part"]
    assert [next(n for n in part if "." in n) for part in parts] == [f"layers.{n}" for n in range(0, 80, 10)]
    assert (parts[0][0], parts[-1][-2:]) == ("tok_embeddings", ["norm", "output"])
    assert tables["training"]["local_batch_size"] == 32  # 32 micro-batches of 1, all in one pipeline step
    assert tables["activation_checkpoint"] == {"mode": "full", "early_stop": True}
    alone = {"pp": 1, "virtual_stages": None, "accumulate_unsharded": False}
    hybrid = scenario(parallelism=alone | {"cp": 2, "shard_size": 4})
    p = tomllib.loads(emit(hybrid, "torchtitan"))["parallelism"]
    assert (p["data_parallel_replicate_degree"], p["data_parallel_shard_degree"]) == (4, 2)
    assert p["fsdp_reshard_after_forward"] == "default"  # which keeps the output's unit, as simulated


# Fields of the classes in torchtitan/config/configs.py and of what `Trainer.Config` takes, in torchtitan 0.3.0.
TITAN_PYTHON = {
    "TrainingConfig": TITAN["training"] | {"disable_cuda_graphs"},
    "ParallelismConfig": TITAN["parallelism"] - {"context_parallel_rotate_method", "enable_async_tensor_parallel"}
    | {"enable_sequence_parallel"},
    "CompileConfig": {"enable", "enable_async_tensor_parallel"},
    "CrossEntropyLoss.Config": {"global_vocab_size"},
    "default_adamw": {"lr"},
    "HuggingFaceTextDataLoader.Config": {"dataset"},
    "Trainer.Config": {
        "model_spec",
        "loss",
        "optimizer",
        "dataloader",
        "training",
        "parallelism",
        "activation_checkpoint",
        "compile",
    },
}


def test_torchtitan_keeps_gradients_where_a_cuda_graph_adds_to_them() -> None:
    """torchtitan/trainer.py of 0.3.0, train_step: zero_grad(set_to_none=disable_cuda_graphs)."""
    alone = {"pp": 1, "virtual_stages": None, "accumulate_unsharded": False}

    def python(graphs: str, zero_grad: str | None) -> str:
        training = {"cuda_graphs": graphs, "zero_grad": zero_grad}
        return emit(scenario(parallelism=alone, training=training), "torchtitan-python")

    assert "zero_grad" not in python("step", "keep")
    assert "torchtitan keeps them beside its CUDA graph" in python("step", None)
    assert "zero_grad" not in python("none", None)
    for graphs, zero_grad in (("step", "set_to_none"), ("none", "keep")):
        with pytest.raises(InputError, match=f"training.zero_grad: found {zero_grad}"):
            python(graphs, zero_grad)


def test_torchtitan_s_python_config_has_the_classes_and_fields_of_today() -> None:
    tree = ast.parse(emit(scenario(), "torchtitan-python"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.keywords]
    given = {ast.unparse(c.func): {k.arg for k in c.keywords} for c in calls}
    assert given.keys() == TITAN_PYTHON.keys()
    assert all(names <= TITAN_PYTHON[name] for name, names in given.items())
    parts = next(k.value for c in calls for k in c.keywords if k.arg == "module_fqns_per_model_part")
    stages = ast.literal_eval(parts)
    assert len(stages) == 8
    assert (stages[0][0], stages[-1][-2:]) == ("tok_embeddings", ["norm", "lm_head"])
    assert sum(name.startswith("layers.") for stage in stages for name in stage) == 80
    with pytest.raises(InputError, match="--emit torchtitan writes TOML"):
        emit(scenario(training={"precision": "fp8"}), "torchtitan-python")


def flags(text: str) -> dict[str, str]:
    """The flags of a command line, with their values."""
    assert text.count("\n") == text.count(" \\\n") + sum(line.startswith("#") for line in text.splitlines())
    return {m[1]: m[2].strip() for m in re.finditer(r"--([a-z0-9-]+)([^\\\n]*?)(?= \\|$| --)", text, re.M)}


def test_megatron_takes_the_same_layout() -> None:
    changes = {"training": {"param_dtype": None}, "parallelism": {"zero": 1}}
    found = flags(emit(scenario(**changes), "megatron"))
    assert set(found) <= MEGATRON
    expected = {
        "tensor-model-parallel-size": "8",
        "pipeline-model-parallel-size": "4",
        "sequence-parallel": "",
        "num-virtual-stages-per-pipeline-rank": "2",
        "use-distributed-optimizer": "",
        "num-layers": "80",
        "num-query-groups": "8",
        "ffn-hidden-size": "28672",
        "recompute-granularity": "full",
        "swiglu": "",
        "global-batch-size": "256",
        "nnodes": "32",
    }
    assert {k: found.get(k) for k in expected} == expected
    assert "ddp-bucket-size" not in found
    sized = scenario(training={"param_dtype": None}, parallelism={"zero": 1, "bucket_bytes": 100_000_000})
    assert flags(emit(sized, "megatron"))["ddp-bucket-size"] == "25000000"
    uneven = scenario(
        training={"param_dtype": None},
        parallelism={"zero": 1, "schedule": "1f1b", "layers_per_stage": [19, 21, 21, 19]},
    )
    layout = flags(emit(uneven, "megatron"))["pipeline-model-parallel-layout"].strip('"').split("|")
    assert [s.count("t") for s in layout] == [19, 21, 21, 19]
    assert (layout[0][0], layout[-1][-1]) == ("E", "L")


def test_megatron_gets_what_its_own_checks_ask_for() -> None:
    text = emit(scenario(training={"param_dtype": None}, parallelism={"zero": 1}), "megatron")
    assert "\nCUDA_DEVICE_MAX_CONNECTIONS=1 torchrun" in text  # asserted where tp or cp is above 1
    found = flags(text)
    moe = {"experts": 8, "top_k": 2, "ffn": 512}
    pairs = scenario(
        model={"preset": "llama3-8b", "moe": moe},
        training={"param_dtype": None, "recompute": "none"},
        parallelism={"zero": 1, "ep": 2, "expert_tp": 1, "ep_overlap": True},
    )
    assert "\nCUDA_DEVICE_MAX_CONNECTIONS=32 torchrun" in emit(pairs, "megatron")
    assert flags(emit(pairs, "megatron")).keys() >= {"overlap-moe-expert-parallel-comm", "delay-wgrad-compute"}
    assert found["vocab-size"] == "128255"  # its NullTokenizer adds one, and 128256 rows stay 128256
    assert (found["log-interval"], found["eval-iters"]) == ("1", "0")
    long = scenario(training={"param_dtype": None, "seq_len": 262_144}, parallelism={"zero": 1})
    assert int(flags(emit(long, "megatron"))["max-position-embeddings"]) >= 262_144
    alone = {"pp": 1, "virtual_stages": None, "accumulate_unsharded": False}
    fsdp = emit(scenario(training={"param_dtype": None}, parallelism=alone), "megatron")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in fsdp  # its FSDP refuses 1
    assert flags(fsdp)["ckpt-format"] == "fsdp_dtensor"


@pytest.mark.parametrize(
    ("trainer", "changes", "words"),
    [
        (
            "torchtitan",
            {"parallelism": {"zero": 1}},
            ["parallelism.zero: found 1; torchtitan shards everything (zero: 3)"],
        ),
        ("torchtitan", {"parallelism": {"sp": False}}, ["parallelism.sp: found false"]),
        ("torchtitan", {"parallelism": {"p2p_overlap": False}}, ["parallelism.p2p_overlap: found false"]),
        ("torchtitan", {"parallelism": {"accumulate_unsharded": False}}, ["reduces gradients once a step at pp 4"]),
        ("torchtitan", {"parallelism": {"pp": 1, "virtual_stages": None}}, ["once a micro-batch at pp 1"]),
        (
            "torchtitan",
            {"model": {"preset": "llama3-70b", "dropout": 0.1}},
            ["model.dropout: found 0.1; torchtitan has no dropout"],
        ),
        ("torchtitan", {"model": {"preset": "llama3-70b", "qkv_bias": True}}, ["has the llama3 flavors 8B, 70B"]),
        (
            "torchtitan",
            {"training": {"grad_dtype": "bf16", "grad_reduce_dtype": "fp32"}},
            ["training.grad_dtype: found bf16; torchtitan keeps"],
        ),
        ("torchtitan", {"training": {"param_dtype": None}}, ["training.param_dtype: found bf16"]),
        ("torchtitan", {"model": "llama2-7b"}, ["has the llama3 flavors 8B, 70B, 405B"]),
        (
            "torchtitan",
            {"parallelism": {"zero": 0}, "training": {"recompute": "selective"}},
            ["parallelism.zero: found 0", "training.recompute: found selective"],
        ),
        (
            "megatron",
            {},
            ["training.param_dtype: found fp32", "parallelism.pp: found 4", "Megatron-LM reduces FSDP's gradients"],
        ),
        (
            "megatron",
            {"parallelism": {"schedule": "zb_v"}},
            ["found zb_v; Megatron-LM has the schedules 1f1b and interleaved_1f1b"],
        ),
        ("megatron", {"training": {"framework": "compiled"}}, ["training.framework: found compiled"]),
        (
            "megatron",
            {"training": {"precision": "fp32", "grad_dtype": "bf16", "grad_reduce_dtype": "bf16"}},
            ["training.grad_dtype: found bf16/bf16; Megatron-LM accumulates and reduces in fp32"],
        ),
        (
            "megatron",
            {"parallelism": {"dp": 3, "tp": 1, "sp": False}, "training": {"global_batch_size": 240}},
            ["ranks: found 12; Megatron-LM is started by torchrun with as many ranks on every node, here 8"],
        ),
        (
            "megatron",
            {"parallelism": {"pp": 2, "p2p_overlap": False}},
            ["interleaves with blocking messages from pp 3 on"],
        ),
        (
            "megatron",
            {"model": "mixtral-8x7b", "parallelism": {"sp": False}},
            ["parallelism.sp: found false; Megatron-LM needs sequence parallelism"],
        ),
        (
            "megatron",
            {"model": {"preset": "llama3-70b", "norm": "layernorm", "qk_norm": True}},
            ["model.qk_norm: found true; Megatron-LM takes layer norms there, too; write qk_norm: layernorm"],
        ),
        ("deepspeed", {}, ["must be one of torchtitan, torchtitan-python, megatron"]),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_every_reason(
    trainer: str, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        emit(scenario(**changes), trainer)
    assert all(w in str(caught.value) for w in words), caught.value


def outcome(loaded: Scenario, trainer: str) -> tuple[str, str]:
    """The flags, or why there are none."""
    try:
        return emit(loaded, trainer), ""
    except InputError as error:
        return "", str(error)


def test_every_shipped_scenario_is_emitted_or_refused_with_a_reason() -> None:
    from sim.inputs.scenario import load_scenario

    written = 0
    for file in sorted(SCENARIOS.glob("*.yaml")):
        loaded = load_scenario(file)
        for trainer in ("torchtitan", "megatron"):
            text, refusal = outcome(loaded, trainer)
            assert bool(text) != bool(refusal)
            reasons = ("cannot express this scenario:\n  - ", "training: is missing", "rl: --emit writes no flags")
            assert not refusal or any(reason in refusal for reason in reasons)
            assert trainer == "torchtitan" or set(flags(text)) <= MEGATRON
            written += bool(text)
    assert written >= 10


def test_chakra_files_are_written_beside_each_other(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(
        json.dumps(
            {
                "model": {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1000},
                "cluster": "dgx-h100",
                "parallelism": {"pp": 2, "dp": 2},
                "training": {"seq_len": 128, "global_batch_size": 8},
            }
        )
    )
    done = run(str(file), "--chakra", str(tmp_path / "step"))
    assert done.returncode == 0, done.stderr
    names = sorted(p.name for p in tmp_path.glob("step.*"))
    assert names == ["step.0.et", "step.1.et", "step.2.et", "step.3.et", "step.groups.json"]
    assert "Step time" in done.stdout
    assert run(str(file), "--chakra", str(tmp_path / "none" / "step")).returncode == 2


def test_a_reason_holds_for_every_layout_if_no_layout_changes_its_key() -> None:
    keys = ("model", "model.moe.imbalance", "training.precision", "training.recomputed", "distillation")
    of_layouts = ("training.recompute", "training.recompute.every", "training.micro_batch_size", "parallelism", "ranks")
    for group, expected in ((keys, True), (of_layouts, False)):
        found = {key: Reason(tuple(key.split(".")), "").of_every_layout for key in group}
        assert found == dict.fromkeys(group, expected)


def test_norms_of_latents_are_asked_for() -> None:
    """Megatron-LM has them with --qk-layernorm alone (gpt_layer_specs.py: `MLASelfAttentionSubmodules`)."""
    mla = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    model = {"layers": 2, "hidden": 256, "heads": 8, "vocab": 1000, "norm": "rmsnorm", "bias": False, "mlp": "swiglu"}
    sizes = {"model": model | {"mla": mla, "positions": "rope"}, "training": LLAMA["training"] | {"param_dtype": None}}
    latent = parse_scenario(LLAMA | sizes | {"parallelism": {"zero": 1}})
    assert "qk-layernorm" in flags(emit(latent, "megatron"))
