"""LLM Foundry's YAML as a scenario: MPT models and those of the Hub, trained by Composer with FSDP.

Names and defaults: scripts/train/yamls and llmfoundry/models/mpt/configuration_mpt.py of mosaicml/llm-foundry;
`sharding_strategy` and `mixed_precision` of mosaicml/composer (distributed/mosaic_fsdp_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.convert.named_models import named_model
from sim.convert.settings import Converted, Machine, Settings, without_none
from sim.convert.trainer_arguments.adapters import PEFT_MODULES, layers_of
from sim.convert.trainer_arguments.fsdp import UNLIMITED, gathers_late
from sim.core.errors import InputError
from sim.inputs.input_source import show

MARKS = ("global_train_batch_size", "device_train_microbatch_size")
ENCODER = "bert"
ALL_LINEAR = "all-linear"  # PEFT's word
VARIABLES = "variables"  # a section that others refer to
VARIABLE = re.compile(r"\$\{([\w.]+)\}")
PRECISIONS = {"amp_bf16": "bf16", "amp_fp16": "fp16", "fp32": "fp32", "amp_fp8": "fp8"}
SHARDING: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"zero": 3},
    "SHARD_GRAD_OP": {"zero": 3, "reshard_after_forward": False},
    "NO_SHARD": {"zero": 3, "shard_size": 1},  # all-reduces whole gradients after each micro-batch's backward
}
# composer/distributed/mosaic_parallelism.py, get_mixed_precision: 16 bits in which gradients are reduced and parameters
# gathered; in which parameters are; fp32 for both.
MIXED = ("PURE", "DEFAULT", "FULL")
METRICS = "model.use_train_metrics: false is not simulated; the metrics' two cross-entropies are computed all the same"
AHEAD = "fsdp_config.forward_prefetch: true is not simulated; each layer is gathered one layer ahead"
ATTENTION = {"torch": "unfused", "flash": "fused", "triton": "fused"}
NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}
OF_TENSORS = "splits a model's MLPs by its strategy, which is not simulated; without it can be converted"
LOW = "low_precision_"
# llmfoundry/models/layers/norm.py: LPLayerNorm casts its input, and torch's autocast casts that of the others.
IN_FP32 = "runs in fp32 under autocast; it is simulated in 16 bits, as those named low_precision run"
BACKWARD_POST = "BACKWARD_POST"  # Composer's default, which framework composer is for
KINDS = {"mptmlp": "gelu", "te_ln_mlp": "gelu", "mptglu": "geglu"}


def is_llm_foundry(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of LLM Foundry."""
    data = parameters_of(data)
    model = data.get("model")
    return isinstance(model, dict) and "name" in model and any(mark in data for mark in MARKS)


def parameters_of(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping, or what one of MosaicML's platform has under `parameters` (llm-foundry: mcli/*.yaml)."""
    own = data.get("parameters")
    return own if isinstance(own, dict) and ("compute" in data or "command" in data) else data


def convert_llm_foundry(file: Path, data: Mapping[str, Any], machine: Machine) -> Converted:
    """A scenario from a training config.

    Raises:
        InputError: for an encoder, a model that has no key here, and a missing number of GPUs.
    """
    compute, data = data.get("compute"), parameters_of(data)
    gpus = compute.get("gpus") if isinstance(compute, dict) else None
    s = Settings(file, _flat({key: value for key, value in data.items() if key != VARIABLES}, data))
    if ENCODER in (name := str(s.take("model.name"))):  # mosaicml/examples, examples/bert
        raise InputError(f"{file}: model.name {name}: an encoder is trained on masked tokens, which is not simulated")
    own = name == "mpt_causal_lm" and machine.model is None
    described = _mpt(s) if own else _of_the_hub(s, machine)
    if s.values.get("tp_config.tensor_parallel_degree") not in (None, 1):
        raise InputError(f"{file}: tp_config: {OF_TENSORS}")
    dp = s.ranks(gpus if type(gpus) is int else None, machine, 1, "1")
    batch = _batch(s, dp)
    layout = {"dp": dp, **(_fsdp(s) if dp > 1 else {"zero": 0})}
    kinds = _number_formats(s, layout)
    sections = {"model": described, "training": without_none(batch | kinds | _training(s)), "parallelism": layout}
    return s.converted("llm_foundry", machine, sections)


def _batch(s: Settings, dp: int) -> dict[str, int]:
    """Tokens of a sequence, sequences of a step, and those of a micro-batch on each of `dp` ranks."""
    micro, whole = s.take("device_train_microbatch_size"), s.size("global_train_batch_size")
    of_rank = max(1, whole // dp)
    if not isinstance(micro, int):
        micro = of_rank
        s.notes.append(f"device_train_microbatch_size: auto: taken for all {micro} sequences of a rank, as if they fit")
    return {"seq_len": s.size("max_seq_len"), "micro_batch_size": min(micro, of_rank), "global_batch_size": whole}


def _number_formats(s: Settings, layout: dict[str, Any]) -> dict[str, Any]:
    """Number formats of a step's matmuls, parameters and reduced gradients; those of gathers go into `layout`."""
    precision = s.choice("precision", PRECISIONS, "amp_bf16") or "bf16"
    mixed = s.choice("fsdp_config.mixed_precision", {word: word for word in MIXED}, "DEFAULT")
    casts = layout["zero"] == 3 and precision != "fp32"
    if casts and mixed == "FULL":
        layout["param_gather_dtype"] = "fp32"
    reduced = "bf16" if casts and mixed == "PURE" else None
    return {"precision": precision, "param_dtype": "fp32", "grad_reduce_dtype": reduced}


def _training(s: Settings) -> dict[str, Any]:
    """The keys of `training` that follow from neither the batch nor a number format."""
    if not s.flag("model.use_train_metrics", True):
        s.notes.append(METRICS)
    optimizer = str(s.take("optimizer.name", "decoupled_adamw"))
    lion = "lion" in optimizer  # llmfoundry/optim: DecoupledLionW
    if "adam" not in optimizer and not lion:
        s.notes.append(f"optimizer {optimizer}: is simulated as AdamW")
    return {
        "gradient_clipping": s.take("algorithms.gradient_clipping.clipping_threshold") is not None,
        "optimizer": "lion" if lion else None,
        "framework": "composer",
        "recompute": _recompute(s),
        "activation_offload": s.flag("fsdp_config.activation_cpu_offload") or None,
        "attention": s.choice("model.attn_config.attn_impl", ATTENTION, "flash"),
        "lora": _lora(s),
    }


def _flat(data: Mapping[str, Any], whole: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Values by the names of their sections and their own, `${name}` replaced by what the file has for the name."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            found |= _flat(value, whole, f"{before}{key}.")
        elif value is not None:
            found[f"{before}{key}"] = _value(value, whole)
    return found


def _value(value: Any, whole: Mapping[str, Any]) -> Any:
    named = VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if named is None:
        return value
    found: Any = whole
    for part in named[1].split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return value if found is None or isinstance(found, Mapping) else found


def _of_the_hub(s: Settings, machine: Machine) -> str:
    named = s.take("model.pretrained_model_name_or_path")
    s.taken |= {"model.pretrained", "model.use_flash_attention_2"}
    if machine.model is not None:
        return machine.model
    if not isinstance(named, str):
        raise InputError(f"{s.file}: model.name: is neither mpt_causal_lm nor a model of the Hub: give --model")
    return named_model(s.file, f"{s.file}: model", named, s.notes)


def _mpt(s: Settings) -> dict[str, Any]:
    hidden, heads = s.size("model.d_model"), s.size("model.n_heads")
    kind = str(s.take("model.attn_config.attn_type", "multihead_attention"))
    grouped = s.whole("model.attn_config.kv_n_heads")
    alibi, rope = s.flag("model.attn_config.alibi"), s.flag("model.attn_config.rope")
    learned = s.flag("model.learned_pos_emb", True) and not (alibi or rope)
    ffn = s.whole("model.ffn_config.ffn_hidden_size") or int((s.number("model.expansion_ratio", 4) or 4) * hidden)
    named = str(s.take("model.norm_type", LOW + "layernorm"))
    norm = named.removeprefix(LOW)
    if norm == named and s.values.get("precision", "amp_bf16") != "fp32":
        s.notes.append(f"model.norm_type {named}: {IN_FP32}")
    s.take("model.max_seq_len")
    return {
        "layers": s.size("model.n_layers"),
        "hidden": hidden,
        "heads": heads,
        "ffn": ffn,
        "kv_heads": 1 if kind == "multiquery_attention" else grouped or heads,
        "vocab": s.size("model.vocab_size", 50368),
        "mlp": s.choice("model.ffn_config.ffn_type", KINDS, "mptmlp") or "gelu",
        "norm": NORMS.get(norm, "layernorm"),
        "bias": not s.flag("model.no_bias"),
        "tied_embeddings": s.flag("model.tie_word_embeddings", True),
        "positions": "learned" if learned else "rope" if rope else "none",
        **({"max_positions": s.size("max_seq_len")} if learned else {}),
        **_attention(s, NORMS.get(norm, "layernorm")),
    }


def _attention(s: Settings, norm: str) -> dict[str, Any]:
    """Windows, norms of queries and keys, and caps of scores and logits (models/layers/attention.py, of release 0.22:
    `window_size=(w, w)`, so that a query sees w keys before it and its own; `qk_ln` over all heads, `qk_gn` over each).
    """
    window = s.whole("model.attn_config.sliding_window_size")
    over, heads = (s.flag(f"model.attn_config.qk_{kind}") for kind in ("ln", "gn"))
    if over and norm == "layernorm":
        over, heads = False, True
        s.notes.append("model.attn_config.qk_ln: layer norms over all heads are simulated as those of each head")
    caps = {
        "attention_softcap": s.number("model.attn_config.attn_logit_softcapping"),
        "logit_softcap": s.number("model.final_logit_softcapping"),
    }
    return {
        **({"window": window + 1} if window is not None and window >= 0 else {}),
        **({"qk_norm": norm if norm == "layernorm" else True} if over or heads else {}),
        **({"qk_norm_over": "all_heads"} if over else {}),
        **without_none(caps),
    }


def _fsdp(s: Settings) -> dict[str, Any]:
    """FSDP as its section says; torch's DDP where there is none (llmfoundry/command_utils/train.py hands on None;
    composer/trainer/trainer.py: `prepare_ddp_module`). Composer reduces gradients of FSDP in each micro-batch, those of
    DDP in the last (composer/distributed/dist_strategy.py: `ddp_sync_context`)."""
    if not any(key.startswith("fsdp_config.") for key in s.values):
        return {"zero": 0}
    if not s.flag("fsdp_config.limit_all_gathers", True):
        s.notes.append(UNLIMITED)
    if s.flag("fsdp_config.forward_prefetch"):
        s.notes.append(AHEAD)
    late = gathers_late(str(s.take("fsdp_config.backward_prefetch", BACKWARD_POST)))
    layout = s.choice("fsdp_config.sharding_strategy", SHARDING, "FULL_SHARD") or SHARDING["FULL_SHARD"]
    return layout | late if layout["zero"] == 3 else dict(layout)


def _recompute(s: Settings) -> Any:
    """Full, by torch's reentrant checkpoint unless the file says otherwise, which runs whole layers again, or none
    (composer/utils/parallelism.py, FSDPConfig: `activation_checkpointing_reentrant`)."""
    reentrant = s.flag("fsdp_config.activation_checkpointing_reentrant", True)
    if not s.flag("fsdp_config.activation_checkpointing"):
        return "none"
    return {"mode": "full", "early_stop": False} if reentrant else "full"


def _lora(s: Settings) -> dict[str, Any] | None:
    rank = s.whole("model.peft_config.r")
    if rank is None:
        return None
    s.taken |= {f"model.peft_config.{key}" for key in ("peft_type", "task_type", "lora_alpha", "bias")}
    named = s.take("model.peft_config.target_modules")
    words = named if isinstance(named, list) else [named]
    targets = layers_of(words if named else PEFT_MODULES)  # models/hf/hf_base.py: `LoraConfig(**…)`
    if not targets and ALL_LINEAR not in words:
        raise InputError(f"{s.file}: model.peft_config.target_modules: found {show(named)}; none of them is known")
    dropout = s.number("model.peft_config.lora_dropout", 0.0)
    own = {"rank": rank, **({"dropout": dropout} if dropout else {})}
    return {**own, **({"targets": targets} if targets else {})}
