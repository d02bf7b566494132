"""prime-rl's TOML (`uv run rl @ rl.toml`, `uv run sft @ sft.toml`) as a scenario.

Names and defaults: PrimeIntellect-ai/prime-rl of 2026, packages/prime-rl-configs/src/prime_rl/configs (trainer.py,
sft.py, orchestrator.py, inference.py, rl.py). FSDP2 keeps parameters in `optimization_dtype` and computes in bf16.
Engines have GPUs of their own and never wait for the trainer. The loss starts from the engine's log-probabilities, and
there is no reference. Sequences are packed to `seq_len` tokens.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.convert.named_models import named_model, with_prediction
from sim.convert.settings import FSDP_ON_HOST, Converted, Machine, Settings, without_none
from sim.convert.trainer_arguments.adapters import layers_of
from sim.convert.verl import LENGTHS
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_input import load_model

OF_TITAN = ("training", "job", "parallelism", "metrics")
OF_SFT = ("model", "data")
SIZES = ("seq_len", "batch_size", "micro_batch_size")  # of `data`; one of them
USUAL_LENGTH, USUAL_MODEL = 2048, "Qwen/Qwen3-0.6B"
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
OPTIMIZERS = {"adamw": "adamw", "sgd": "sgd", "muon": "muon"}
ATTENTION = {
    "flash_attention_2": "flash2",
    "flash_attention_3": "flash3",
    "flash_attention_4": None,
    "fa4": None,
    "sdpa": None,
    "eager": None,
}
BACKENDS: dict[str, str | None] = {"torch": None, "deepep": "deepep"}
LORA_RANK = 16
# Of data, rewards, schedules, logs, checkpoints and how processes are started.
HARMLESS = (
    *("wandb", "log", "ckpt", "slurm", "env_vars", "output_dir", "clean_output_dir", "max_steps", "bench", "dry_run"),
    *("tokenizer", "scheduler", "weight_broadcast.", "val", "heartbeat", "dist_timeout_seconds", "gc", "name"),
    *(f"data.{key}" for key in ("type", "name", "subsets", "splits", "seed", "shuffle", "loss_mask", "probabilities")),
    *("optim.lr", "optim.weight_decay", "optim.betas", "optim.mu", "optim.momentum", "loss", "metrics_server"),
    *("model.name", "model.impl", "model.debug.random_init", "model.trust_remote_code", "model.load_using_meta"),
    *("model.ac_offloading.", "model.compile.", "model.lora.alpha", "model.moe_use_grouped_mm", "model.vlm"),
)
OF_ORCHESTRATOR = ("batch_size", "group_size", "rollouts_per_example", "seq_len", "max_async_level", "max_off_policy")
OF_ENGINE = (
    "parallel.",
    "gpu_memory_utilization",
    "enable_expert_parallel",
    "enable_prefix_caching",
    "model.",
    "server.",
)
EXPERTS = (
    "model.ep is 1, the default until it became auto, which is 8 on nodes of 8 GPUs: --set parallelism.ep=8 says so"
)
FILES = "weight_broadcast.type filesystem: new weights go over a shared disk there; their broadcast is simulated"
NEVER_WAITS = "engines never wait for the trainer there; simulated is one step ahead (rl.steps_off: 1)"


def is_prime_rl(text: str) -> bool:
    """Tell whether a TOML is one of prime-rl's, of reinforcement learning or fine-tuning."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    sizes = data.get("data") if isinstance(data.get("data"), dict) else {}
    tunes = all(key in data for key in OF_SFT) and any(key in (sizes or {}) for key in SIZES)
    return "orchestrator" in data or (tunes and not any(key in data for key in OF_TITAN))


def convert_prime_rl(file: Path, text: str, machine: Machine) -> Converted:
    """The scenario of the tables.

    Raises:
        InputError: for checkpointing of parts of a layer, an unknown model, and sizes that are missing or no divisors.
    """
    data = tomllib.loads(text)
    if "toml_files" in data:
        raise InputError(f"{file}: toml_files: is not followed; give one file with all of the keys")
    of_rl = "orchestrator" in data
    values = _flat(data)
    trains = {key.removeprefix("trainer."): value for key, value in values.items() if _trains(key, of_rl)}
    trains |= {key: values[key] for key in ("seq_len", "model.name") if key in values}
    t = Settings(file, trains, "trainer." if of_rl else "", written={"seq_len": "seq_len", "model.name": "model.name"})
    named = str(t.take("model.name", USUAL_MODEL))
    model = machine.model or named_model(file, f"{file}: model.name", named, t.notes)
    length = t.size("model.seq_len" if of_rl else "data.seq_len", t.integer("seq_len", USUAL_LENGTH))
    o = Settings(file, {key: value for key, value in values.items() if not _trains(key, of_rl)}, notes=t.notes)
    gpus, of_engines = _gpus(o if of_rl else t, machine, of_rl)
    batch = o.size("orchestrator.batch_size") if of_rl else t.size("data.batch_size", 128)
    layout = _layout(t, gpus, model)
    micro = 1 if of_rl else t.size("data.micro_batch_size", 1)
    training = {"seq_len": length, "micro_batch_size": micro, "global_batch_size": batch, **_training(t)}
    sections: dict[str, Any] = {"model": with_prediction(model, 0), "training": training, "parallelism": layout}
    if of_rl:
        sections["rl"] = _rl(o, model, length, batch, of_engines)
        t.missing.update(LENGTHS)
    return t.converted("prime_rl", machine, sections, left=_left(t) + (_left_of_rl(o) if of_rl else []))


def _trains(key: str, of_rl: bool) -> bool:
    return key.startswith("trainer.") if of_rl else True


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted keys; an empty table, which turns a part on, as it is."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, dict) and value
        found |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def _has(s: Settings, name: str) -> bool:
    """Tell whether the file has a table of this name, be it empty."""
    s.taken |= {name, *(key for key in s.values if key.startswith(f"{name}."))}
    return any(key == name or key.startswith(f"{name}.") for key in s.values)


def _gpus(s: Settings, machine: Machine, of_rl: bool) -> tuple[int, int]:
    """GPUs that train, and those of engines (configs/rl.py and sft.py: `DeploymentConfig`)."""
    each = s.size("deployment.gpus_per_node", 8)
    several = s.take("deployment.type", "single_node") == "multi_node"
    if not of_rl:
        stated = s.size("deployment.num_nodes") * each if several else s.size("deployment.num_gpus", 1)
        return machine.gpus or stated, 0
    if not several:
        return s.size("deployment.num_train_gpus", 1), s.size("deployment.num_infer_gpus", 1)
    replicas = s.size("deployment.num_infer_replicas", 1)
    return s.size("deployment.num_train_nodes") * each, s.size("deployment.num_infer_nodes") * each * replicas


def _layout(t: Settings, gpus: int, model: str) -> dict[str, Any]:
    """FSDP2 over all GPUs, or over groups of which `dp_replicate` are alike."""
    cp, copies, experts = t.size("model.cp", 1), t.size("model.dp_replicate", 1), load_model(model).moe
    if gpus % (cp * copies):
        raise InputError(f"{t.place('model.cp')}: found {cp}; cp·dp_replicate ({cp * copies}) must divide {gpus} GPUs")
    asked = t.take("model.ep")
    ep = None if experts is None or asked == "auto" else t.size("model.ep", 1)
    if experts is not None and asked in (None, "auto"):
        ep = 1 if asked is None else min(gpus, 8)
        t.notes += [EXPERTS] if asked is None else []
    style = t.choice("model.cp_style", {"ring": "all_gather", "ulysses": "all_to_all"}, "ring")
    return without_none(
        {
            "dp": gpus // cp,
            "cp": cp if cp > 1 else None,
            "cp_method": style if cp > 1 else None,
            "ep": ep if ep != 1 else None,
            "ep_dispatcher": t.choice("model.ep_comm_backend", BACKENDS, "torch"),
            "zero": 3,
            "fsdp_version": 2,
            "shard_size": gpus // copies if copies > 1 else None,
            "reshard_after_forward": None if t.flag("model.reshard_after_forward", True) else False,
        }
    )


def _training(t: Settings) -> dict[str, Any]:
    kept, reduced = (str(t.take(f"model.{key}_dtype", "float32")) for key in ("optimization", "reduce"))
    for key, word in (("optimization", kept), ("reduce", reduced)):
        if word not in DTYPES:
            raise InputError(f"{t.place(f'model.{key}_dtype')}: found {show(word)}; must be one of {', '.join(DTYPES)}")
    in_16_bits = {"param_dtype": "bf16", "master_weights": False, "grad_dtype": "bf16", "optimizer_dtype": "bf16"}
    deepep = t.values.get("model.ep_comm_backend") == "deepep"  # which turns clipping off (`TrainerConfig`)
    kernel = t.choice("model.attn", ATTENTION, "flash_attention_2")
    optimizer = str(t.take("optim.type", "adamw"))
    if optimizer not in OPTIMIZERS:
        raise InputError(f"{t.place('optim.type')}: found {show(optimizer)}; can be converted: {', '.join(OPTIMIZERS)}")
    offloads = [t.flag(f"model.{kind}_cpu_offload") for kind in ("fsdp", "optim")]
    t.notes += [FSDP_ON_HOST] if offloads[0] else []
    chunk = t.take("model.fused_lm_head_token_chunk_size", "disabled")
    return {
        "precision": "fp8" if t.flag("model.fp8") else "bf16",
        **({"fp8_recipe": "blockwise"} if t.flag("model.fp8") else {}),
        **(in_16_bits if kept == "bfloat16" else {"param_dtype": "fp32"}),
        "grad_reduce_dtype": DTYPES[reduced],
        "gradient_clipping": not deepep and (t.number("optim.max_norm", 1.0) or 0.0) > 0,
        "attention": "unfused" if t.values.get("model.attn") == "eager" else "fused",
        **({"attention_kernel": kernel} if kernel is not None and "model.attn" in t.values else {}),
        "optimizer": OPTIMIZERS[optimizer],
        "framework": "compiled" if _has(t, "model.compile") else "transformers",
        "cross_entropy": "unfused" if chunk == "disabled" else "tiled",
        **({"optimizer_offload": "cpu"} if offloads[0] else {"optimizer_offload": True} if offloads[1] else {}),
        **_checkpoints(t),
        **_adapters(t),
    }


def _checkpoints(t: Settings) -> dict[str, Any]:
    """What is computed again, and what lies on the host until then."""
    mode, every = t.take("model.ac.mode", "full"), t.size("model.ac.freq", 1)
    on, to_host = _has(t, "model.ac"), _has(t, "model.ac_offloading")
    if mode != "full":
        raise InputError(f"{t.place('model.ac.mode')}: found {show(mode)}; can be converted: full")
    if not (on or to_host):
        return {}
    again: Any = "full" if every == 1 else {"mode": "full", "every": every}
    return {"recompute": again, **({"activation_offload": True} if to_host else {})}


def _adapters(t: Settings) -> dict[str, Any]:
    given = any(key.startswith("model.lora.") or key == "model.lora" for key in t.values)
    if not given:
        return {}
    share, named = t.number("model.lora.dropout", 0.0), t.listed("model.lora.target_modules")
    found = layers_of(named) if named else []
    if named and not found:
        raise InputError(f"{t.place('model.lora.target_modules')}: found {show(named)}; none of them is known")
    lora = {"rank": t.size("model.lora.rank", LORA_RANK), **({"targets": found} if found else {})}
    return {"lora": lora | ({"dropout": share} if share else {})}


def _rl(o: Settings, model: str, length: int, batch: int, of_engines: int) -> dict[str, Any]:
    """The section `rl`."""
    group_key = "orchestrator.rollouts_per_example"
    group = o.size("orchestrator.group_size" if group_key not in o.values else group_key)
    if batch % group:
        raise InputError(
            f"{o.file}: orchestrator.batch_size: found {batch}; must be a multiple of {group} answers a group"
        )
    ahead = o.integer("orchestrator.max_async_level", 1) > 0
    o.notes += [NEVER_WAITS] if ahead else []
    o.notes += [FILES] if o.take("weight_broadcast.type", "filesystem") == "filesystem" else []
    answer = o.whole("orchestrator.train.sampling.max_completion_tokens")
    answer = answer if answer is not None else o.whole("orchestrator.sampling.max_tokens")
    return {
        "prompts_per_step": batch // group,
        "generations_per_prompt": group,
        "prompt_len": {},
        "output_len": {} if answer is None else {"max": min(answer, length)},
        "colocated": False,
        **({"steps_off": 1} if ahead else {}),
        "reference": "none",
        "log_probs": "engine",
        "sequences": "packed",
        "generation": _generation(o, model, of_engines),
    }


def _generation(o: Settings, model: str, gpus: int) -> dict[str, Any]:
    tp = o.size("inference.parallel.tp", 1)
    if gpus % tp:
        raise InputError(f"{o.file}: inference.parallel.tp: found {tp}; must divide {gpus} GPUs of engines")
    splits, found = o.flag("inference.enable_expert_parallel"), load_model(model)
    if splits and o.size("inference.parallel.dp", 1) > 1:
        why = "attention by data parallelism beside experts is not simulated in an rl step"
        raise InputError(f"{o.file}: inference.enable_expert_parallel: found true with parallel.dp above 1; {why}")
    if o.flag("inference.model.enforce_eager"):
        o.notes.append("inference.model.enforce_eager: the engine is simulated with CUDA graphs all the same")
    prefixes = o.flag("inference.enable_prefix_caching", True) and found.state_space is None
    return {
        "engine": "vllm-v1",
        "replicas": gpus // tp,
        "tp": tp,
        **(({"ep": tp} if splits else {"expert_tp": tp}) if found.moe is not None and tp > 1 else {}),
        "kv_cache": {"memory_fraction": o.number("inference.gpu_memory_utilization", 0.9)},
        "prefix_cache": "gpu" if prefixes else "none",
    }


def _left(s: Settings) -> list[str]:
    """Names that nothing read and that may change a step."""
    own = {s.written_as(name): name for name in set(s.values) - s.taken}
    told = {said: name for said, name in own.items() if s.values[name] not in (False, "", [], {}, 0)}
    return sorted(said for said, name in told.items() if not name.startswith(HARMLESS))


def _left_of_rl(o: Settings) -> list[str]:
    """The same of the engine; the orchestrator's keys are of data and rewards, but for those read."""
    found = [name for name in _left(o) if not name.startswith(("orchestrator.", "seq_len", "model.", "deployment."))]
    return [name for name in found if name.startswith("inference.")]
