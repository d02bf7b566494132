"""The `config_*.sh` of NVIDIA's MLPerf submissions of language models, and of partners who run their code.

A file exports variables, of which the benchmark's YAML makes NeMo's config: for Llama 3.1 conf/custom.yaml and
pretrain.py (mlcommons/training_results_v5.1, llama31_8b and llama31_405b), for LoRA of Llama 2 70B
conf/megatron_gpt_peft_tuning_config.yaml and train.py (there, llama2_70b_lora), for GPT-3 conf/custom.yaml
(training_results_v3.1) and conf/optim/distributed_fused_adam.yaml (v4.0). Names, defaults and constants are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sim.convert.bridge.nemo_recipe import WHOLE, model_of_class
from sim.convert.bridge.scenario import convert_bridge
from sim.convert.scripts.environment import backend_of, is_noted
from sim.convert.scripts.script_data import Script
from sim.convert.settings import Converted, Machine, Settings, lacking, without_effect
from sim.core.errors import InputError
from sim.core.units import counted
from sim.inputs.input_source import show

MARKS = ("DGXNNODES", "MINIBS")  # nodes, and sequences of a replica in a step
NODES, EACH = "DGXNNODES", "DGXNGPU"
ON = ("True", "true", "1")
OFF = ("False", "false", "0", "null", "")
# By variable of the three benchmarks: section and key by Megatron-Bridge's names, and the YAML's default.
Variables = Mapping[str, tuple[str, str, Any]]
LAYOUT: Variables = {
    "TENSOR_MODEL_PARALLEL": ("dist", "tensor_model_parallel_size", None),
    "PIPELINE_MODEL_PARALLEL": ("dist", "pipeline_model_parallel_size", None),
    "INTERLEAVED_PIPELINE": ("dist", "virtual_pipeline_model_parallel_size", 12),
    "MICRO_BATCH_SIZE": ("train", "micro_batch_size", None),
    "SEQ_PARALLEL": ("dist", "sequence_parallel", True),
    "TP_COMM_OVERLAP": ("comm_overlap", "tp_comm_overlap", False),
    "OVERLAP_P2P_COMM": ("comm_overlap", "overlap_p2p_comm", True),
    "LAYER_CUDA_GRAPH": ("model", "external_cuda_graph", False),
    "DETERMINISTIC_MODE": ("model", "deterministic_mode", False),
}
FP8: Variables = {
    "FP8_PARAM_GATHER": ("mixed_precision", "fp8_param_gather", False),
    "FIRST_LAST_LAYERS_BF16": ("mixed_precision", "first_last_layers_bf16", False),
    "NUM_LAYERS_AT_START_IN_BF16": ("mixed_precision", "num_layers_at_start_in_bf16", 0),
    "NUM_LAYERS_AT_END_IN_BF16": ("mixed_precision", "num_layers_at_end_in_bf16", 0),
    "MCORE_CUDA_GRAPH": ("model", "enable_cuda_graph", False),
    "USE_TE_OPS": ("model", "use_transformer_engine_op_fuser", False),
}
OF_LLAMA31: Variables = {
    **LAYOUT,
    **FP8,
    "CONTEXT_PARALLEL": ("dist", "context_parallel_size", 4),
    "TP_PP_DP_MAPPING": ("dist", "use_tp_pp_dp_mapping", False),
    "ASYM_PP_EMBED": ("dist", "account_for_embedding_in_pipeline_split", False),
    "ASYM_PP_LOSS": ("dist", "account_for_loss_in_pipeline_split", False),
    "OVERLAP_GRAD_REDUCE": ("comm_overlap", "overlap_grad_reduce", True),
    "OVERLAP_PARAM_GATHER": ("comm_overlap", "overlap_param_gather", True),
    "OVERLAP_PARAM_GATHER_WITH_OPTIM_STEP": ("comm_overlap", "overlap_param_gather_with_optimizer_step", False),
    "DEFER_EMBEDDING_WGRAD_COMPUTE": ("comm_overlap", "defer_embedding_wgrad_compute", False),
    "WGRAD_DEFERRAL_LIMIT": ("comm_overlap", "wgrad_deferral_limit", 0),
    "OVERWRITTEN_NUM_LAYERS": ("model", "num_layers", 126),
    "GRAD_ACCUM_FUSION": ("model", "gradient_accumulation_fusion", True),
    "FUSED_QKV_ROPE": ("model", "fused_single_qkv_rope", False),
    "CROSS_ENTROPY_LOSS_FUSION": ("model", "cross_entropy_loss_fusion", True),
    "FP8_PARAMS": ("mixed_precision", "fp8_param_gather", None),  # round 5.0
    "FP8_DPA": ("mixed_precision", "fp8_dot_product_attention", None),
    "CE_FUSION_IMPL": ("model", "cross_entropy_fusion_impl", "native"),
    "FP8_RECIPE": ("mixed_precision", "fp8_recipe", "tensorwise"),
}
OF_LORA: Variables = {
    **FP8,
    "TP": ("dist", "tensor_model_parallel_size", 1),
    "PP": ("dist", "pipeline_model_parallel_size", 1),
    "CP": ("dist", "context_parallel_size", 1),
    "SP": ("dist", "sequence_parallel", False),
    "MBS": ("train", "micro_batch_size", 1),
    "MAX_SEQLEN": ("model", "seq_length", 8192),
    "OVERWRITTEN_NUM_LAYERS": ("model", "num_layers", 80),
    "TP_COMM_OVERLAP": ("comm_overlap", "tp_comm_overlap", False),
    "LAYER_CUDA_GRAPH": ("model", "external_cuda_graph", False),
    "FP8_DPA": ("mixed_precision", "fp8_dot_product_attention", False),
    "FP8_ACT": ("model", "activation_func_fp8_input_store", False),
    "FP8_ACTIVATION": ("model", "activation_func_fp8_input_store", None),  # before round 5.0
    "CP_COMM_TYPE": ("model", "cp_comm_type", "a2a"),
    "CPU_OFFLOADING": ("model", "cpu_offloading", False),
    "CPU_OFFLOADING_NUM_LAYERS": ("model", "cpu_offloading_num_layers", 20),
    "RECOMPUTE_GRANULARITY": ("model", "recompute_granularity", None),
    "RECOMPUTE_METHOD": ("model", "recompute_method", None),
    "RECOMPUTE_NUM_LAYERS": ("model", "recompute_num_layers", None),
    "FUSED_SINGLE_QKV_ROPE": ("model", "fused_single_qkv_rope", False),
    "USE_DISTRIBUTED_OPTIMIZER": ("optimizer", "use_distributed_optimizer", True),
    "DDP_OVERLAP_GRAD_REDUCE": ("comm_overlap", "overlap_grad_reduce", False),
    "DDP_OVERLAP_PARAM_GATHER": ("comm_overlap", "overlap_param_gather", False),
    "DDP_AVERAGE_IN_COLLECTIVE": ("ddp", "average_in_collective", False),
    "NCCL_UB": ("ddp", "nccl_ub", False),
    "FP8_RECIPE": ("mixed_precision", "fp8_recipe", "delayed"),
}
OF_GPT3: Variables = {
    **LAYOUT,
    "NUM_LAYERS": ("model", "num_layers", 96),
    "HIDDEN_SIZE": ("model", "hidden_size", 12288),
    "FFN_HIDDEN_SIZE": ("model", "ffn_hidden_size", None),
    "NUM_ATTENTION_HEADS": ("model", "num_attention_heads", 96),
    "ACT_CKPT_GRANULARITY": ("model", "recompute_granularity", None),
    "ACT_CKPT_METHOD": ("model", "recompute_method", None),
    "ACT_CKPT_NUM_LAYERS": ("model", "recompute_num_layers", None),
    "OVERLAP_GRAD_SYNC": ("ddp", "overlap_grad_reduce", True),
    "OVERLAP_PARAM_SYNC": ("ddp", "overlap_param_gather", True),
    "CROSS_ENTROPY_LOSS_FUSION": ("model", "cross_entropy_loss_fusion", False),
    "FP8_PARAMS": ("mixed_precision", "fp8_param_gather", False),
}
LORA = {"_target_": "LoRA", "dim": 16, "target_modules": ["linear_proj", "linear_qkv"], "dropout": 0.1}


class Benchmark(Struct, frozen=True):
    """Hold what is fixed in a benchmark's code. `uses_8_bits`, `hybrid`: the YAML's defaults of FP8 and FP8_HYBRID;
    `fixed`: sections, each with its keys; `parts`: the variables of the degrees that divide the GPUs."""

    variables: Variables
    fixed: Mapping[str, Mapping[str, Any]]
    parts: tuple[str, ...]
    uses_8_bits: bool = False
    hybrid: bool = False
    fuses_loss_later: bool = False


IN_BF16 = {"bf16": True, "grad_reduce_in_fp32": False}
UNCHECKED = {"check_for_nan_in_loss": False}  # NeMo looks at no loss while a step runs
LLAMA31 = Benchmark(
    OF_LLAMA31,
    {
        "model": {"seq_length": 8192, "vocab_size": 128256},
        "ddp": {"check_for_nan_in_grad": False, "average_in_collective": True},
        "optimizer": {"use_distributed_optimizer": True, "clip_grad": 1.0},
    },
    ("TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "CONTEXT_PARALLEL"),
)
LLAMA2_LORA = Benchmark(
    OF_LORA,
    {
        "model": {
            "vocab_size": 32000,
            "cross_entropy_loss_fusion": False,
            "gradient_accumulation_fusion": False,
            "tp_comm_overlap_disable_qkv": True,
        },
        "optimizer": {"clip_grad": 0.3},
        "peft": LORA,
    },
    ("TP", "PP", "CP"),
    uses_8_bits=True,
    hybrid=True,
)
GPT3 = Benchmark(
    OF_GPT3,
    {
        "model": {"seq_length": 2048, "vocab_size": 50257, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "optimizer": {"use_distributed_optimizer": True, "clip_grad": 1.0},
    },
    ("TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL"),
    fuses_loss_later=True,
)
CLASSES = {"8b": "Llama31Config8B", "70b": "Llama31Config70B", "405b": "Llama31Config405B"}
OF_51 = "FP8_PARAM_GATHER"  # the YAML of LoRA has it since round 5.1; before, `fp8_params` was on
FROZEN = (
    "frozen weights in 8 bits (fp8_params, until round 5.0: this file has no FP8_PARAM_GATHER); cp_comm_type a2a by "
    "default, where rounds before 5.0 have a ring: parallelism.cp_method: ring"
)
BUCKET_MIB = 100  # BUCKET_CAP_MB's default, of bf16
LATER = "cross entropy: unfused, as in rounds 3.0 to 4.0; since 4.1 training.cross_entropy: native (not in this file)"
SHARP = "cluster.inter_node.sharp=true has it"


def is_mlperf(script: Script) -> bool:
    """Tell whether a script exports what NVIDIA's submissions of language models do."""
    return script.exported.issuperset(MARKS)


def convert_mlperf(file: Path, script: Script, machine: Machine) -> Converted:
    """The scenario of a submission's variables.

    Raises:
        InputError: for variables that are missing or are no numbers, and as `convert_bridge` does.
    """
    benchmark = _benchmark(script)
    script.asked.update(name for name in script.variables if not is_noted(name))
    given = _values(file, script, benchmark)
    s = Settings(file, given, text=script.text)
    sections, names = _sections(s, benchmark)
    if machine.gpus is None:
        machine = replace(machine, gpus=s.size(NODES, 1) * s.size(EACH, 8))
    gpus, divisor = machine.gpus or 0, 1
    for name in benchmark.parts:
        divisor *= s.size(name, benchmark.variables[name][2])
    if gpus % divisor:
        raise InputError(
            f"{file}: {counted(gpus, 'GPU')}; must be a multiple of {' · '.join(benchmark.parts)}, {divisor}"
        )
    sections["train"]["global_batch_size"] = s.size(MARKS[1]) * (gpus // divisor)
    if (kernel := backend_of(script)) is not None:
        sections["model"]["attention_backend"] = kernel
    found = convert_bridge(file, sections, machine, names, script)
    notes = [*found.notes, *_notes(s, script, benchmark)]
    return Converted({**found.scenario, "name": file.stem}, tuple(notes), found.missing)


def _benchmark(script: Script) -> Benchmark:
    names = script.variables
    if "TENSOR_MODEL_PARALLEL" not in names:
        return LLAMA2_LORA
    return LLAMA31 if names.keys() & {"CONTEXT_PARALLEL", "MODEL_SIZE"} else GPT3


def _values(file: Path, script: Script, benchmark: Benchmark) -> dict[str, Any]:
    """The variables' last values; those that the script does not set are left out."""
    found = script.variables
    known = {*benchmark.variables, NODES, EACH, MARKS[1]}
    for name in known & found.keys():
        if "$" in found[name]:
            raise InputError(
                f"{Settings(file, {}, text=script.text).place(name)}: found {show(found[name])}{lacking(found[name])}"
            )
    return {name: value for name, value in found.items() if value != ""}


def _decoded(text: Any) -> Any:
    """A variable's value as `oc.decode` reads it.

    >>> [_decoded(text) for text in ("True", "0", "null", "1e-3", "te")]
    [True, 0, None, '1e-3', 'te']
    """
    if not isinstance(text, str):
        return text
    text = text.strip("'\"")
    words = {"true": True, "false": False, "null": None, "none": None}
    return words[text.lower()] if text.lower() in words else int(text) if text.isdecimal() else text


def _sections(s: Settings, benchmark: Benchmark) -> tuple[dict[str, Any], dict[str, str]]:
    """Megatron-Bridge's sections, and the variable of each of their keys."""
    sections: dict[str, Any] = {
        **WHOLE,
        **{section: {} for section in ("train", "comm_overlap", "ddp", "dist")},
        "model": _model(s, benchmark),
        "mixed_precision": dict(IN_BF16),
        "rerun_state_machine": UNCHECKED,
    }
    for section, keys in benchmark.fixed.items():
        sections[section] = {**sections.get(section, {}), **keys}
    names: dict[str, str] = {}
    for name, (section, key, default) in benchmark.variables.items():
        usual = sections["model"].get(key, default) if key == "num_layers" else default
        value = _decoded(s.take(name, usual))
        if value is None and name in LAYOUT and default is None:
            raise InputError(f"{s.file}: {name}: is required and missing")
        if value is not None:
            sections[section][key] = value
            names[f"{section}.{key}"] = name
    _set_precision(s, benchmark, sections, names)
    _set_graphs(s, sections)
    if benchmark is GPT3:
        _use_apex(s, sections)
    if _decoded(s.take("FSDP")) == "megatron":
        sections["ddp"] |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    return sections, names


def _model(s: Settings, benchmark: Benchmark) -> dict[str, Any]:
    """The keys of the class that the code takes; none for GPT-3, whose YAML has the sizes.

    Raises:
        InputError: for another size of Llama 3.1.
    """
    if benchmark is GPT3:
        return {}
    wanted = "Llama2Config70B"
    if benchmark is LLAMA31:
        size = str(s.take("MODEL_SIZE", "405b")).lower()
        if size not in CLASSES:
            raise InputError(f"{s.place('MODEL_SIZE')}: found {show(size)}; must be one of {', '.join(CLASSES)}")
        wanted = CLASSES[size]
    return {key: value for key, value in model_of_class(s.file, wanted).items() if key != "overlap_p2p_comm"}


def _use_apex(s: Settings, sections: dict[str, Any]) -> None:
    """What NeMo before 2.0 has in the model, and the buckets of Apex's optimizer, of bf16."""
    sections["ddp"]["bucket_size"] = s.size("BUCKET_CAP_MB", BUCKET_MIB) * 2**20 // 2
    sections["model"] |= sections.pop("comm_overlap")


def _set_precision(s: Settings, benchmark: Benchmark, sections: dict[str, Any], names: dict[str, str]) -> None:
    """FP8's format, or FP4's.

    Raises:
        InputError: for both, which the code refuses.
    """
    uses_8_bits, uses_4_bits = _decoded(s.take("FP8", benchmark.uses_8_bits)), _decoded(s.take("FP4", False))
    hybrid, precision = _decoded(s.take("FP8_HYBRID", benchmark.hybrid)), sections["mixed_precision"]
    s.take("FP4_RECIPE")
    if uses_8_bits and uses_4_bits and benchmark is not GPT3:
        raise InputError(f"{s.place('FP4')}: cannot be set together with FP8")
    if uses_8_bits:
        precision["fp8"] = "hybrid" if hybrid else "e4m3"
        names["mixed_precision.fp8"] = "FP8"
    if uses_4_bits:
        precision["fp4"] = "e2m1"
        names["mixed_precision.fp4"] = "FP4"
    if benchmark is GPT3:  # Transformer Engine's only recipe then
        precision["fp8_recipe"] = "delayed"
    if benchmark is LLAMA2_LORA and OF_51 not in s.values and uses_8_bits:
        precision["fp8_param_gather"] = True


def _set_graphs(s: Settings, sections: dict[str, Any]) -> None:
    """What is captured: the iteration, or layers (`MCORE_CUDA_GRAPH`, `FULL_CUDA_GRAPH`)."""
    whole = _decoded(s.take("FULL_CUDA_GRAPH", False))
    if not sections["model"].get("enable_cuda_graph") and not whole:
        return
    usual = "full_iteration" if whole or "peft" in sections else "full"
    sections["model"] |= {"enable_cuda_graph": True, "cuda_graph_scope": s.take("CUDA_GRAPH_SCOPE", usual)}


def _notes(s: Settings, script: Script, benchmark: Benchmark) -> list[str]:
    """Variables that nothing here reads and that may change a step."""
    harmless = {*without_effect("mlperf")}
    known = {*s.taken, *harmless, *benchmark.variables, NODES, EACH, *MARKS}
    names = [name for name in sorted(script.variables) if name not in known and not is_noted(name)]
    found = {name: s.values.get(name) for name in names}
    left = [f"{name}={value}" for name, value in found.items() if value is not None and value not in OFF]
    reduces = [name for name in ("SHARP", "USE_SHARP") if str(script.variables.get(name)) in ON]
    notes = [f"{name}: {SHARP}" for name in reduces]
    left = [one for one in left if one.partition("=")[0] not in reduces]
    if benchmark.fuses_loss_later and "CROSS_ENTROPY_LOSS_FUSION" not in s.values:
        notes.append(LATER)
    if benchmark is LLAMA2_LORA and OF_51 not in s.values:
        notes.append(FROZEN)
    return [*notes, *([f"not expressed here: {', '.join(left)}"] if left else [])]
