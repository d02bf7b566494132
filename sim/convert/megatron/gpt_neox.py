"""GPT-NeoX's YAML as a scenario, by way of Megatron-LM's arguments, which its own descend from, and DeepSpeed's engine.

Names, defaults and meaning: megatron/neox_arguments (neox_args.py, arguments.py) and megatron/model/transformer.py
(`ParallelMLP`, `LLaMAParallelMLP`, `ParallelTransformerLayer`) of EleutherAI/gpt-neox, 2021 to 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.convert.megatron.megatron_deepspeed import by_engine
from sim.convert.megatron.scenario import described
from sim.convert.settings import Converted, Machine, Settings, without_none
from sim.core.dtypes import dtype_bytes
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.trainer_names import MEGATRON_FUSIONS

MARKS = ("pipe_parallel_size", "model_parallel_size")  # of which a file has one
ENGINE = (  # keys that DeepSpeed's engine reads
    *("zero_optimization", "fp16", "bf16", "gradient_clipping", "data_types", "train_micro_batch_size_per_gpu"),
    *("train_batch_size", "gradient_accumulation_steps"),
)
FLAGS = {  # Megatron-LM's arguments whose value is the same
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "num_attention_heads": "num-attention-heads",
    "seq_length": "seq-length",
    "max_position_embeddings": "max-position-embeddings",
    "make_vocab_size_divisible_by": "make-vocab-size-divisible-by",
    "padded_vocab_size": "padded-vocab-size",
    "vocab_size": "vocab-size",
    "attention_dropout": "attention-dropout",
    "hidden_dropout": "hidden-dropout",
    "model_parallel_size": "tensor-model-parallel-size",
    "no_weight_tying": "untie-embeddings-and-output-weights",
    "rotary_pct": "rotary-percent",
    "num_kv_heads": "num-query-groups",
    "sequence_parallel": "sequence-parallel",
}
POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none", "alibi": "none", "sinusoidal": "none"}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
GATED = {"swiglu": "swiglu", "geglu": "geglu"}
PLAIN = {"gelu": "gelu", "relu": "relu"}
PRECISIONS: dict[str, str | None] = {"fp16": "fp16", "bfloat16": "bf16", "fp32": None}
EXPERTS = ("num_experts", "moe_num_experts")
GPT2_TOKENIZER, GPT2_TOKENS = "GPT2BPETokenizer", 50257
LLAMA_MLP, LLAMA_MULTIPLE = "llama", 256  # releases of 2023 and 2024
OTHER_ATTENTION = ("local", "sparse", "bigbird", "bslongformer", "gmlp", "amlp", "mamba", "rwkv")
SEPARATE = "GPT-NeoX's kernels are simulated as separate operators, as without its fusions"
MIXED_BIASES = "biases are simulated in all layers or in none: here in {}"


def is_gpt_neox(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of GPT-NeoX, whose names have `-` or `_`."""
    return any(str(key).replace("-", "_") in MARKS for key in data)


def convert_gpt_neox(file: Path, data: Mapping[str, Any], machine: Machine) -> Converted:
    """A scenario from a config.

    Raises:
        InputError: for experts and soft prompts, sizes that are missing, and a missing number of GPUs.
    """
    values = {str(key).replace("-", "_"): value for key, value in data.items() if value is not None}
    own = Settings(file, values, notes=[SEPARATE])
    own.taken |= {name for name, value in values.items() if value is False and not name.startswith("use_bias")}
    asked = [name for name in EXPERTS if own.integer(name, 1) > 1]
    if asked := asked or ["soft_prompt_tuning"] * bool(own.take("soft_prompt_tuning")):
        what = f"found {show(values[asked[0]])}; experts and soft prompts of GPT-NeoX are not converted"
        raise InputError(f"{file}: {own.written_as(asked[0])}: {what}")
    gpus = _stated_gpus(own)
    flags = {flag: own.take(key) for key, flag in FLAGS.items()} | _model(own) | _training(own)
    pp = max(1, own.integer("pipe_parallel_size", 0))  # 0: no pipeline
    if own.whole("train_batch_size") is None:
        tp = own.size("model_parallel_size", 1)
        dp = own.ranks(gpus, machine, tp * pp, "model_parallel_size · pipe_parallel_size")
        micro, steps = own.size("train_micro_batch_size_per_gpu"), own.size("gradient_accumulation_steps", 1)
        flags["global-batch-size"] = micro * steps * dp
    engine = {key: own.take(key) for key in ENGINE if key in own.values}
    flags |= {"pipeline-model-parallel-size": pp, "deepspeed": True}
    # arguments.py, `is_pipe_parallel`: with one stage the model is no PipelineModule.
    flags = by_engine(Settings(file, engine, notes=own.notes), without_none(flags), own.notes, pp > 1)
    written = {flag: key for key, flag in FLAGS.items()} | {"micro-batch-size": "train_micro_batch_size_per_gpu"}
    s = Settings(file, flags, written=written, notes=own.notes)
    sections, block = described(s, machine, gpus), _block(own)
    sections["training"]["framework"] = "gpt_neox"
    if elements := Settings(file, engine).section("zero_optimization").number("reduce_bucket_size"):
        sums = sections["training"].get("grad_dtype", "fp32")
        sections["parallelism"].setdefault("bucket_bytes", int(elements * dtype_bytes(sums)))
    if "tp_overlap" in sections["parallelism"]:
        sections["parallelism"]["tp_overlap"] = "none"  # autograd's all-reduce of `F.linear` (mpu/layers.py)
    if machine.model is None:
        sections["model"] |= block
    s.missing.update(dict.fromkeys(s.missing, "vocab_size, which the tokenizer would say"))
    left = [*own.left(), *(name for name in s.left() if name in own.values)]
    return s.converted("gpt_neox", machine, sections, left=left)


def _stated_gpus(own: Settings) -> int | None:
    nodes, each, whole = own.whole("num_nodes"), own.whole("num_gpus"), own.whole("world_size")
    return whole if whole or each is None else each * (nodes or 1)


def _model(own: Settings) -> dict[str, Any]:
    """Flags of the model beside those that have the same value."""
    norm = own.choice("norm", NORMS, "layernorm") or "LayerNorm"
    positions = own.choice("pos_emb", POSITIONS, "learned")
    biases = [own.flag("use_bias_in_attn_linear", True), own.flag("use_bias_in_mlp", not _is_llamas(own))]
    own.taken.update(("use_bias_in_norms",) if norm == "RMSNorm" else ())
    if len({*biases}) > 1:
        own.notes.append(MIXED_BIASES.format("all" if biases[0] else "none"))
    return {
        "normalization": norm,
        "position-embedding-type": positions or "none",
        "disable-bias-linear": None if biases[0] else True,
        "group-query-attention": True if own.values.get("num_kv_heads") else None,
        "vocab-size": own.take("vocab_size", GPT2_TOKENS if own.take("tokenizer_type") == GPT2_TOKENIZER else None),
        "ffn-hidden-size": _width(own),
    }


def _width(own: Settings) -> int:
    """The MLP's width; that of two matrices for a gated activation, which has two thirds of what is given."""
    hidden = own.size("hidden_size")
    given = own.whole("intermediate_size") or int((own.number("expansion_factor") or 4) * hidden)
    multiple = own.size("mlp_multiple_of", 1)
    if _is_llamas(own):
        return own.whole("intermediate_size") or -(-int(2 * hidden * 4 / 3) // LLAMA_MULTIPLE) * LLAMA_MULTIPLE
    width = int(given * 2 / 3) // 2 if _is_gated(own) else given
    return -(-width // multiple) * multiple


def _is_llamas(own: Settings) -> bool:
    return bool(own.take("mlp_type") == LLAMA_MLP)


def _is_gated(own: Settings) -> bool:
    return own.values.get("activation") in GATED


def _block(own: Settings) -> dict[str, Any]:
    """What Megatron-LM has no flag for: attention and MLP beside each other, and the activation."""
    beside, tied = own.flag("gpt_j_residual"), own.flag("gpt_j_tied")
    if _is_llamas(own):
        own.take("activation")
        activation = "swiglu"
    else:
        activation = own.choice("activation", GATED | PLAIN, "gelu") or "gelu"
    return {"mlp": activation, **({"parallel_block": True if tied else "two_norms"} if beside else {})}


def _training(own: Settings) -> dict[str, Any]:
    """Precision, attention, recomputation and the optimizer."""
    precision = own.choice("precision", PRECISIONS, "fp32")
    on = [name for name in ("fp16", "bf16") if isinstance(x := own.values.get(name), dict) and x.get("enabled")]
    kept = precision or next(iter(on), None)
    if precision and precision not in on:  # filled in (arguments.py: `configure_distributed_args`)
        own.values = {**own.values, precision: {"enabled": True}}
    optimizer = own.take("optimizer")
    name = str(optimizer.get("type", "adam") if isinstance(optimizer, dict) else "adam").lower()
    recompute = own.flag("checkpoint_activations")
    own.choice("checkpoint_num_layers", {"1": True}, "1")
    own.taken.update(("partition_activations",) if not recompute else ())
    return {
        **({kept: True} if kept else {}),
        "optimizer": "adam" if "adam" in name else name,
        "recompute-granularity": "full" if recompute else None,
        "attention-backend": _attention(own),
        **{f"no-{fusion}-fusion": True for fusion in MEGATRON_FUSIONS},
    }


def _attention(own: Settings) -> str:
    """The backend by `attention_config`, a list of kinds, each with its repetitions; Transformer Engine's attention
    replaces all (`te_mha`). Keys of its 8 bits count with `te_fp8_mha` alone (model/transformer.py)."""
    in_8_bits = own.flag("te_fp8_mha")
    own.taken |= set() if in_8_bits else {name for name in own.values if name.startswith("te_fp8_")}
    own.taken -= {"te_fp8_mha"} if in_8_bits else set()  # reported: not simulated
    if own.flag("te_mha") or in_8_bits:
        own.take("attention_config")
        return "auto"
    given = own.values.get("attention_config")
    kinds = {kind for kind in ("flash", "global") if kind in str(given)} if given else {"global"}
    if len(kinds) == 1 and not any(word in str(given) for word in OTHER_ATTENTION):
        own.take("attention_config")
    return "flash" if "flash" in kinds else "unfused"
