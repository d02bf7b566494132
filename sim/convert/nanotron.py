"""nanotron's YAML as a scenario: pre-training of Llama and Qwen 2 models.

Names, defaults and meaning: src/nanotron of huggingface/nanotron, April 2025: config (config.py, models_config.py,
parallelism_config.py), trainer.py, models (base.py, llama.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.convert.settings import Converted, Machine, Settings, flat, without_none
from sim.core.errors import InputError

MARKS = ("tokens", "parallelism")
KINDS = ("model.model_config.is_llama_config", "model.model_config.is_qwen2_config")
BUCKET_MIB = 25  # default of `ddp_bucket_cap_mb`
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
ENGINES = {"1f1b": "1f1b", "afab": "gpipe"}
GATHERS = "llama3"  # in the name of an attention whose context-parallel ranks gather keys and values
FUSED = "optimizer.optimizer_factory.torch_adam_is_fused"
OPTIMIZERS = {"adamW": "adamw", "adam": "adamw", "sgd": "sgd"}


def is_nanotron(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of nanotron."""
    return all(isinstance(data.get(mark), dict) for mark in MARKS)


def convert_nanotron(file: Path, data: Mapping[str, Any], machine: Machine) -> Converted:
    """A scenario from a config.

    Raises:
        InputError: for a model that is neither Llama nor Qwen 2 without experts, and sizes that are missing.
    """
    s = Settings(file, flat(data))
    model = machine.model or _model(s)
    layout = _layout(s, machine)
    if layout["pp"] > 1:
        layout |= _stages(s, layout["pp"]) if isinstance(model, dict) else {}
    micro = s.size("tokens.micro_batch_size")
    dtype = s.choice("model.dtype", DTYPES, "bfloat16") or "bf16"
    sums = "fp32" if s.flag("optimizer.accumulate_grad_in_fp32") else dtype
    training = {
        "seq_len": s.size("tokens.sequence_length"),
        "micro_batch_size": micro,
        "global_batch_size": micro * s.size("tokens.batch_accumulation_per_replica", 1) * layout["dp"],
        "precision": dtype,
        "grad_dtype": None if dtype == "fp32" else sums,
        "master_weights": None if sums == "fp32" or dtype == "fp32" else False,
        "optimizer_dtype": "bf16" if sums == "bf16" else None,
        "optimizer": s.choice("optimizer.optimizer_factory.name", OPTIMIZERS, "adamW") or "adamw",
        # helpers.py, init_optimizer_and_grad_accumulator: `fused` of torch's AdamW, which is else foreach
        "adamw_kernels": None if s.flag(FUSED, True) else "foreach",
        "gradient_clipping": (s.number("optimizer.clip_grad") or 0.0) > 0,
        "recompute": "full" if s.flag("parallelism.recompute_layer") else "none",
        "framework": "nanotron",
    }
    sections = {"model": model, "training": without_none(training), "parallelism": without_none(layout)}
    return s.converted("nanotron", machine, sections)


def _model(s: Settings) -> dict[str, Any]:
    def size(name: str, default: int | None = None) -> int:
        return s.size(f"model.model_config.{name}", default)

    experts = [name for name in s.values if name.startswith("model.model_config.moe_config.")]
    if experts or not any(list(map(s.flag, KINDS))):
        raise InputError(f"{s.file}: model.model_config: is neither Llama nor Qwen 2 without experts: give --model")
    s.choice("model.model_config.hidden_act", {"silu": True}, "silu")
    heads = size("num_attention_heads")
    window = s.whole("model.model_config.sliding_window_size")  # models/qwen.py: `CoreAttention` hands it on
    return {
        "layers": size("num_hidden_layers"),
        "hidden": size("hidden_size"),
        "heads": heads,
        "kv_heads": size("num_key_value_heads", heads),
        "ffn": size("intermediate_size"),
        "vocab": size("vocab_size"),
        "tied_embeddings": s.flag("model.model_config.tie_word_embeddings"),
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "positions": "rope",
        "bias": False,
        **({"qkv_bias": True} if s.flag("model.model_config.attention_bias") else {}),
        **({"window": window} if window else {}),
    }


def _layout(s: Settings, machine: Machine) -> dict[str, Any]:
    dp, tp, pp = (s.size(f"parallelism.{degree}", 1) for degree in ("dp", "tp", "pp"))
    cp, ep = (s.size(f"parallelism.{what}_parallel_size", 1) for what in ("context", "expert"))
    if machine.gpus not in (None, dp * tp * pp * cp):
        product = f"dp · tp · pp · context_parallel_size = {dp * tp * pp * cp}"
        raise InputError(f"{s.file}: {machine.gpus} GPUs; must be {product}")
    mode = str(s.take("parallelism.tp_mode", "ALL_REDUCE")).upper()
    asynchronous = s.flag("parallelism.tp_linear_async_communication")
    zero = s.integer("optimizer.zero_stage", 0)
    s.choice("parallelism.tp_recompute_allgather", {"True": True}, "True")  # as is simulated
    bucket = s.size("model.ddp_bucket_cap_mb", BUCKET_MIB)
    schedule = s.choice("parallelism.pp_engine", ENGINES, "afab")
    attention = str(s.take("model.model_config._attn_implementation", ""))
    return {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "zero": zero,
        "sp": mode == "REDUCE_SCATTER" if tp > 1 else None,
        "tp_overlap": "wgrad" if tp > 1 and asynchronous and mode == "REDUCE_SCATTER" else None,
        "cp": cp if cp > 1 else None,
        "cp_method": None if cp == 1 else "all_gather" if GATHERS in attention else "ring",
        "ep": ep if ep > 1 else None,
        "schedule": schedule if pp > 1 else None,
        "param_gather_overlap": False if zero else None,
        "bucket_bytes": None if bucket == BUCKET_MIB else bucket * 2**20,
    }


def _stages(s: Settings, pp: int) -> dict[str, Any]:
    """Layers of each stage: a block goes to the current one, which closes when the cost up to here passes its share
    (`LlamaModel.get_block_compute_costs`: 4h² + 3hf a layer, vocabulary · h the output)."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    layers, hidden, ffn, vocab = (s.size(f"model.model_config.{name}") for name in names)
    each = 4 * hidden * hidden + 3 * hidden * ffn
    whole = layers * each + vocab * hidden
    counts, stage = [0] * pp, 0
    for done in range(1, layers + 1):
        counts[stage] += 1
        if done * each * pp > whole * (stage + 1) and stage < pp - 1:
            stage += 1
    return {"layers_per_stage": counts}
