"""DeepSpeed's JSON and Transformers' `TrainingArguments` as a scenario.

DeepSpeed: https://www.deepspeed.ai/docs/config-json/. TrainingArguments: the fields of transformers' class, as JSON or
YAML, `deepspeed` among them as a mapping. Neither names the model or the sequence length: options do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.convert.settings import Converted, Machine, Settings
from sim.core.errors import InputError

AUTO = "auto"  # DeepSpeed's word for what Transformers fills in
OFF = ("no", "", False, None)


def convert_deepspeed(file: Path, data: dict[str, Any], machine: Machine, seq_len: int | None) -> Converted:
    """A scenario from either of the two, which share their keys' meaning.

    Raises:
        InputError: where model, sequence length or number of GPUs are missing.
    """
    own = data["deepspeed"] if isinstance(data.get("deepspeed"), dict) else {}
    flat = {k: v for k, v in {**data, **own}.items() if v != AUTO and k != "deepspeed"}
    s = Settings(file, flat)
    length = seq_len or s.take("max_length") or s.take("max_seq_length")
    for what, option, found in (("model", "--model NAME", machine.model), ("sequence length", "--seq-len N", length)):
        if found is None:
            raise InputError(f"{file}: does not name the {what}: give {option}")
    dp = s.ranks(None, machine, 1, "1")
    zero, notes = _zero(s)
    micro = s.integer("train_micro_batch_size_per_gpu", s.integer("per_device_train_batch_size", 8))
    accumulated = s.integer("gradient_accumulation_steps", 1)
    training = {
        "seq_len": int(length or 0),
        "micro_batch_size": micro,
        "global_batch_size": s.integer("train_batch_size", micro * accumulated * dp),
        **_numbers(s),
        "gradient_clipping": float(s.take("gradient_clipping", s.take("max_grad_norm", 1.0))) > 0,
        "framework": "compiled" if s.flag("torch_compile") else "eager",
        "recompute": "full" if s.flag("gradient_checkpointing") else "none",
        "optimizer": "sgd" if "sgd" in str(s.take("optim", s.take("optimizer", ""))).lower() else "adamw",
    }
    scenario = {
        "version": 1,
        "name": file.stem,
        "model": machine.model,
        "training": training,
        "parallelism": {"dp": dp, **zero},
        "cluster": machine.cluster,
    }
    return Converted(scenario, (*notes, f"not read: {', '.join(s.left())}") if s.left() else tuple(notes))


def _numbers(s: Settings) -> dict[str, Any]:
    """Precision and dtypes: DeepSpeed keeps 16-bit parameters and an fp32 copy, Transformers casts under autocast."""
    deepspeed = isinstance(s.values.get("bf16"), dict) or isinstance(s.values.get("fp16"), dict)
    on = {
        name: value.get("enabled", True) if isinstance(value := s.take(name, False), dict) else bool(value)
        for name in ("bf16", "fp16")
    }
    precision = "bf16" if on["bf16"] else "fp16" if on["fp16"] else "fp32"
    if precision == "fp32":
        return {"precision": precision}
    return {"precision": precision, "param_dtype": precision if deepspeed else "fp32"}


def _zero(s: Settings) -> tuple[dict[str, Any], list[str]]:
    section, fsdp = s.take("zero_optimization"), s.take("fsdp")
    notes: list[str] = []
    if isinstance(section, dict):
        for key in ("offload_optimizer", "offload_param"):
            if (section.get(key) or {}).get("device", "none") != "none":
                notes.append(f"zero_optimization.{key}: offloading states is not simulated")
        bucket = section.get("reduce_bucket_size")
        plain = isinstance(bucket, (int, float)) and not isinstance(bucket, bool)
        overlaps = "bucketed" if section.get("overlap_comm", int(section.get("stage", 0)) == 3) else "after_backward"
        sizes = {"bucket_bytes": int(2 * float(bucket))} if plain and bucket else {}  # elements of 16 bits
        return {"zero": int(section.get("stage", 0)), "dp_sync": overlaps, **sizes}, notes
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    if fsdp in OFF or not words:
        return {"zero": 0}, notes
    if "offload" in words:
        notes.append("fsdp: offload is not simulated")
    return {"zero": 2 if "shard_grad_op" in words else 3}, notes
