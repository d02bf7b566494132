"""prime-rl's TOML (`uv run rl @ rl.toml`, `uv run sft @ sft.toml`) as a scenario.

Names: PrimeIntellect-ai/prime-rl of 2026, packages/prime-rl-configs/src/prime_rl/configs (trainer.py, sft.py,
orchestrator.py, inference.py, rl.py); defaults: of the middle of that year, which a note says where they have changed
since. The text "None" turns a part off. FSDP2 keeps parameters in `optimization_dtype` and computes in bf16.
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
DEPLOYED = "deployment"  # a table that no other trainer's TOML has
SIZES = ("seq_len", "batch_size", "micro_batch_size")  # of `data`; one of them
USUAL_LENGTH, USUAL_MODEL = 2048, "Qwen/Qwen3-0.6B"
TUNED_LENGTH = 128  # of sft's `data`
SHORT = f"data.seq_len: {TUNED_LENGTH}, prime-rl's default; --set training.seq_len=N has what another file says"
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
OPTIMIZERS = {"adamw": "adamw", "sgd": "sgd", "muon": "muon"}
ATTENTION = {
    "flash_attention_2": "flash2",
    "flash_attention_3": "flash3",
    "flash_attention_4": None,
    "fa4": None,
    "auto": None,
    "sdpa": None,
    "eager": None,
}
BACKENDS: dict[str, str | None] = {"torch": None, "deepep": "deepep"}
DISPATCH = ("model.ep_comm_backend", "model.moe.dispatch.type")
VLLM = "inference.vllm"
SAMPLING = ("orchestrator.train.sampling", "orchestrator.sampling")
ANSWER = tuple(f"{part}.{key}" for part in SAMPLING for key in ("max_completion_tokens", "max_tokens"))
LORA_RANK = 16
LOSSES = {"torch": "unfused", "liger": "fused", "liger_fused": "chunked", "quack_fused": "chunked"}
# Of data, rewards, schedules, logs, checkpoints and how processes are started: keys, or tables with all of theirs.
OF_ALL = ("wandb", "log", "ckpt", "output_dir", "max_steps", "bench", "tokenizer", "heartbeat", "renderer", "env_vars")
HARMLESS = (
    *OF_ALL,
    *(
        "slurm",
        "clean",
        "clean_output_dir",
        "dry_run",
        "env_server_base_port",
        "scheduler",
        "val",
        "dist_timeout_seconds",
        "gc",
    ),
    *("loss", "metrics_server", "weight_broadcast.port", "weight_broadcast.timeout", "weight_broadcast.host"),
    *("weight_broadcast.save_sharded", "weight_broadcast.save_format", "deployment.orchestrator_on_inference"),
    *(f"data.{key}" for key in ("type", "name", "subsets", "splits", "seed", "shuffle", "loss_mask", "probabilities")),
    *("data.stopping_strategy", *(f"optim.{key}" for key in ("lr", "weight_decay", "mu", "momentum"))),
    *("optim.betas1", "optim.betas2", "model.name", "model.impl", "model.debug.random_init", "model.lora.alpha"),
    *("model.trust_remote_code", "model.load_using_meta", "model.vlm", "model.compile.fullgraph"),
    *("model.ac_offloading.pin_memory", "model.ac_offloading.max_inflight_activations"),
    *(f"orchestrator.{key}" for key in (*OF_ALL, "optim", "model.name", "model.client", "client", "env", "eval")),
    *(f"orchestrator.{key}" for key in ("train.env", "train.max_retries", "buffer", "advantage", "num_train_workers")),
    *(f"orchestrator.{key}" for key in ("prime_monitor", "collect_inference_metrics", "inference_metrics_roles")),
    *("inference.model.name", "inference.vllm.model", "inference.server", "inference.seed"),
)
EXPERTS = (
    "model.ep is 1, the default until it became auto, which is 8 on nodes of 8 GPUs: --set parallelism.ep=8 says so"
)
FILES = "weight_broadcast.type filesystem: new weights go over a shared disk there; their broadcast is simulated"
NEVER_WAITS = (
    "engines never wait for the trainer there, and max_off_policy_steps bounds an answer's age; simulated is one step "
    "ahead (rl.steps_off: 1)"
)
TURNED_ON = ("compile", "ac", "ac_offloading", "optim_cpu_offload", "fused_lm_head_token_chunk_size")
LEFT_OPEN = "{} not given: simulated as off, the default until newer releases of 2026 turned these on"


def is_prime_rl(text: str) -> bool:
    """Tell whether a TOML is one of prime-rl's, of reinforcement learning or fine-tuning."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    sizes = data.get("data") if isinstance(data.get("data"), dict) else {}
    tunes = "model" in data and (any(key in (sizes or {}) for key in SIZES) or DEPLOYED in data)
    return "orchestrator" in data or (tunes and not any(key in data for key in OF_TITAN))


def convert_prime_rl(file: Path, text: str, machine: Machine) -> Converted:
    """The scenario of the tables.

    Raises:
        InputError: for checkpointing of parts of a layer, fp8, an unknown model, and sizes that are missing or do not
            divide.
    """
    data = tomllib.loads(text)
    if "toml_files" in data:
        raise InputError(f"{file}: toml_files: is not followed; give one file with all of the keys")
    of_rl = "orchestrator" in data
    values = _flat(data)
    trains = {key.removeprefix("trainer."): value for key, value in values.items() if _trains(key, of_rl)}
    if of_rl:
        trains |= {key: values[key] for key in ("seq_len", "model.name") if key in values}
    t = Settings(file, trains, "trainer." if of_rl else "", written={"seq_len": "seq_len", "model.name": "model.name"})
    named = str(t.take("model.name", USUAL_MODEL))
    model = machine.model or named_model(file, f"{file}: model.name", named, t.notes)
    usual = t.integer("seq_len", USUAL_LENGTH) if of_rl else TUNED_LENGTH
    if not of_rl and "data.seq_len" not in t.values:
        t.notes.append(SHORT)
    length = t.size("model.seq_len" if of_rl else "data.seq_len", usual)
    of_others = {k: v for k, v in values.items() if not _trains(k, of_rl) and v is not None}
    o = Settings(file, of_others, notes=t.notes, taken={"seq_len", "model.name"})
    batch = _batch(o) if of_rl else t.size("data.batch_size", 128)
    starts = o if of_rl else t
    gpus, of_engines = _gpus(starts, machine, of_rl)
    layout = _layout(t, gpus, model, _copies(t, starts, gpus))
    micro = 1 if of_rl else t.size("data.micro_batch_size", 1)
    training = {"seq_len": length, "micro_batch_size": micro, "global_batch_size": batch, **_training(t)}
    t.notes += _left_open(t)
    sections: dict[str, Any] = {"model": with_prediction(model, 0), "training": training, "parallelism": layout}
    if of_rl:
        _sends(t, o)
        sections["rl"] = _rl(o, model, length, batch, of_engines)
        t.missing.update(LENGTHS)
    return t.converted("prime_rl", machine, sections, left=sorted({*_left(t), *_left(o)}))


def _trains(key: str, of_rl: bool) -> bool:
    return key.startswith("trainer.") if of_rl else True


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted keys; an empty table, which turns a part on, as it is; "None" as None."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, dict) and value
        found |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": None if value == "None" else value}
    return found


def _has(s: Settings, name: str) -> bool:
    """Tell whether the file has a table of this name, be it empty."""
    s.taken.add(name)
    return s.values.get(name) is not None or any(key.startswith(f"{name}.") for key in s.values)


def _left_open(t: Settings) -> list[str]:
    """A note of parts that the file does not name and that newer releases turn on."""
    names = [f"model.{key}" for key in TURNED_ON]
    absent = [name for name in names if name not in t.values and not any(k.startswith(f"{name}.") for k in t.values)]
    return [LEFT_OPEN.format(", ".join(map(t.written_as, absent)))] if absent else []


def _first(s: Settings, *names: str) -> str:
    """The one of several names of a setting that the file has; else the first."""
    return next((name for name in names if name in s.values), names[0])


def _gpus(s: Settings, machine: Machine, of_rl: bool) -> tuple[int, int]:
    """GPUs that train, and those of engines (configs/rl.py and sft.py: `DeploymentConfig`)."""
    each = s.size("deployment.gpus_per_node", 8)
    several = s.take("deployment.type", "single_node") == "multi_node"
    if not of_rl:
        nodes, gpus = (f"deployment.num_train_{of}" for of in ("nodes", "gpus"))  # newer names than the others
        count = s.size(_first(s, nodes, "deployment.num_nodes"), 2) * each
        return machine.gpus or (count if several else s.size(_first(s, gpus, "deployment.num_gpus"), 1)), 0
    if several:
        replicas = s.size("deployment.num_infer_replicas", 1)
        trains, engines = s.size("deployment.num_train_nodes") * each, s.size("deployment.num_infer_nodes") * each
        engines *= replicas
    else:
        trains, engines = s.size("deployment.num_train_gpus", 1), s.size("deployment.num_infer_gpus", 1)
    if machine.gpus not in (None, trains + engines):
        words = f"--gpus {machine.gpus}: the file has {trains} GPUs that train and {engines} of engines"
        raise InputError(f"{s.file}: deployment: {words}; leave the option out, or change the file")
    return trains, engines


def _copies(t: Settings, s: Settings, gpus: int) -> int:
    """Copies of the model, each over a group of GPUs: of so many nodes, or as many as `dp_replicate` says."""
    copies, nodes = t.size("model.dp_replicate", 1), s.whole("deployment.nodes_per_fsdp_group")
    if nodes is None:
        return copies
    each = nodes * s.size("deployment.gpus_per_node", 8)
    if each < 1 or gpus % each:
        place = s.place("deployment.nodes_per_fsdp_group")
        raise InputError(f"{place}: found {nodes}; groups of so many nodes must divide {gpus} GPUs")
    return gpus // each


def _layout(t: Settings, gpus: int, model: str, copies: int) -> dict[str, Any]:
    """FSDP2 over all GPUs, or over groups of which `copies` are alike."""
    cp, experts = t.size("model.cp", 1), load_model(model).moe
    if gpus % (cp * copies):
        raise InputError(f"{t.place('model.cp')}: found {cp}; cp·dp_replicate ({cp * copies}) must divide {gpus} GPUs")
    asked = t.take("model.ep")
    ep = None if experts is None or asked == "auto" else t.size("model.ep", 1)
    if experts is not None and asked in (None, "auto"):
        ep = 1 if asked is None else min(gpus // copies, 8)
        t.notes += [EXPERTS] if asked is None else []
    style = t.choice("model.cp_style", {"ring": "all_gather", "ulysses": "all_to_all"}, "ring")
    return without_none(
        {
            "dp": gpus // cp,
            "cp": cp if cp > 1 else None,
            "cp_method": style if cp > 1 else None,
            "ep": ep if ep != 1 else None,
            "ep_dispatcher": t.choice(_first(t, *DISPATCH), BACKENDS, "torch"),
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
    deepep = t.values.get(_first(t, *DISPATCH)) == "deepep"  # which turns clipping off (`TrainerConfig`)
    kernel = t.choice("model.attn", ATTENTION, "flash_attention_2")
    optimizer = str(t.take("optim.type", "adamw"))
    if optimizer not in OPTIMIZERS:
        raise InputError(f"{t.place('optim.type')}: found {show(optimizer)}; can be converted: {', '.join(OPTIMIZERS)}")
    offloads = [t.flag(f"model.{kind}_cpu_offload") for kind in ("fsdp", "optim")]
    _refuse_fp8(t)
    return {
        "precision": "bf16",
        **(in_16_bits if kept == "bfloat16" else {"param_dtype": "fp32"}),
        "grad_reduce_dtype": DTYPES[reduced],
        "gradient_clipping": not deepep and (t.number("optim.max_norm", 1.0) or 0.0) > 0,
        "attention": "unfused" if t.values.get("model.attn") == "eager" else "fused",
        **({"attention_kernel": kernel} if kernel is not None and "model.attn" in t.values else {}),
        "optimizer": OPTIMIZERS[optimizer],
        "framework": "compiled_real_rope" if _has(t, "model.compile") else "transformers",
        "cross_entropy": _loss(t),
        **(FSDP_ON_HOST if offloads[0] else {"optimizer_offload": True} if offloads[1] else {}),
        **_checkpoints(t),
        **_adapters(t),
    }


def _refuse_fp8(t: Settings) -> None:
    """Raise for linears in fp8: DeepGEMM's have scales of blocks, which torch's modules are not simulated with."""
    for name, on in (("model.fp8", t.flag("model.fp8")), ("model.quantization.type", True)):
        if on and (word := t.values.get(name)) is not None:
            raise InputError(
                f"{t.place(name)}: found {show(word)}; its fp8 is not simulated: convert the file without it"
            )


def _loss(t: Settings) -> str:
    """How the loss is computed: sft's `loss_impl`, or the head in chunks of tokens and words (layers/lm_head.py)."""
    if (chunk := t.take("model.fused_lm_head_token_chunk_size", "disabled")) not in ("disabled", None):
        return "unfused" if chunk == "auto" and not t.prefix else "tiled"
    found = "unfused" if t.prefix else t.choice("loss_impl", LOSSES, "torch")
    return found or "unfused"


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


def _sends(t: Settings, o: Settings) -> None:
    """Note that files carry new weights, which is the default."""
    names = ("weight_broadcast.type", "orchestrator.weight_broadcast.type")
    by = t.take("weight_broadcast.type", o.take(_first(o, *names), "filesystem"))
    o.taken |= set(names)
    o.notes += [FILES] if by == "filesystem" else []


def _batch(o: Settings) -> int:
    """Answers of a step (configs/orchestrator.py: `resolve_batching`).

    Raises:
        InputError: for a batch in tokens.
    """
    by_tokens = "orchestrator.token_batch_size"
    if by_tokens in o.values:
        raise InputError(
            f"{o.file}: {by_tokens}: a batch in tokens is not simulated; orchestrator.batch_size, in answers, is"
        )
    return o.size("orchestrator.batch_size", 128)


def _group(o: Settings) -> int:
    """Answers to a prompt: those of the orchestrator, or of its environments, which overrule it.

    Raises:
        InputError: where environments differ.
    """
    keys = ("group_size", "rollouts_per_example")
    usual = o.size(_first(o, *(f"orchestrator.{key}" for key in keys)), 1)
    name = _first(o, "orchestrator.train.env", "orchestrator.env")
    found = {next((env[key] for key in keys if key in env), usual) for env in o.listed(name, dict)} or {usual}
    if len(found) > 1 or not all(type(size) is int and size > 0 for size in found):
        words = " and ".join(sorted(map(str, found)))
        raise InputError(f"{o.file}: {name}: found group_size {words}; must be the same whole number in all")
    return int(found.pop())


def _rl(o: Settings, model: str, length: int, batch: int, of_engines: int) -> dict[str, Any]:
    """The section `rl`; an answer has room up to its own limit and the orchestrator's."""
    group = _group(o)
    if batch % group:
        raise InputError(
            f"{o.file}: orchestrator.batch_size: found {batch}; must be a multiple of {group} answers a group"
        )
    ahead = o.integer("orchestrator.max_async_level", 1) > 0
    o.notes += [NEVER_WAITS] if ahead else []
    o.taken.add("orchestrator.max_off_policy_steps")
    limits = (o.whole(_first(o, *ANSWER)), o.whole("orchestrator.seq_len"))
    most = min([length, *(limit for limit in limits if limit is not None)])
    return {
        "prompts_per_step": batch // group,
        "generations_per_prompt": group,
        "prompt_len": {},
        "output_len": {} if limits == (None, None) else {"max": most},
        "colocated": False,
        **({"steps_off": 1} if ahead else {}),
        "reference": "none",
        "log_probs": "engine",
        "sequences": "packed",
        "generation": _generation(o, model, of_engines),
    }


def _generation(o: Settings, model: str, gpus: int) -> dict[str, Any]:
    degree = _first(o, "inference.parallel.tp", f"{VLLM}.tensor_parallel_size")
    if gpus % (tp := o.size(degree, 1)):
        raise InputError(f"{o.file}: {degree}: found {tp}; must divide {gpus} GPUs of engines")
    names = ("enable_expert_parallel", "enable_prefix_caching", "gpu_memory_utilization", "model.enforce_eager")
    experts, caches, share, eager = (
        _first(o, f"inference.{name}", f"{VLLM}.{name.removeprefix('model.')}") for name in names
    )
    replicas = o.size(_first(o, "inference.parallel.dp", f"{VLLM}.data_parallel_size"), 1)
    splits, found = o.flag(experts), load_model(model)
    if splits and replicas > 1:
        why = "attention by data parallelism beside experts is not simulated in an rl step"
        raise InputError(f"{o.file}: {experts}: found true with {replicas} data-parallel replicas; {why}")
    if o.flag(eager):
        o.notes.append(f"{eager}: the engine is simulated with CUDA graphs all the same")
    prefixes = o.flag(caches, True) and found.state_space is None
    heat = o.number(_first(o, *(f"{part}.temperature" for part in SAMPLING)), 1.0)
    return {
        "engine": "vllm-v1",
        "replicas": gpus // tp,
        "tp": tp,
        **(({"ep": tp} if splits else {"expert_tp": tp}) if found.moe is not None and tp > 1 else {}),
        "kv_cache": {"memory_fraction": o.number(share, 0.9)},
        "prefix_cache": "gpu" if prefixes else "none",
        **({} if heat == 1.0 else {"sampling": {"temperature": heat, "top_p": 1.0}}),
    }


def _left(s: Settings) -> list[str]:
    """Names that nothing read and that may change a step; what is "None" is as if it were not there."""
    told = [name for name in set(s.values) - s.taken if s.values[name] is not None]
    harmless = [name for name in told if any(name == key or name.startswith(f"{key}.") for key in HARMLESS)]
    return sorted(s.written_as(name) for name in told if name not in harmless)
