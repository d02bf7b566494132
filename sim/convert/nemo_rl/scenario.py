"""A config of NeMo RL (`examples/run_grpo.py --config FILE`, `run_sft.py`) as a scenario: GRPO with vLLM, and
supervised fine-tuning, by DTensor (FSDP2) or Megatron-Core.

Names and meaning: NVIDIA-NeMo/RL of 2026. The trainer has no defaults of its own: they stand in the YAMLs that a file
inherits (examples/configs). The reference's weights are on the host, and its log-probabilities are computed unless
`grpo.skip_reference_policy_logprobs_calculation` says otherwise (models/megatron/setup.py:
`setup_reference_model_state`). Engines sleep at level 1 and keep prefixes (models/generation/vllm/vllm_worker.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sim.convert.named_models import named_model, with_prediction
from sim.convert.nemo_rl.files import whole
from sim.convert.nemo_rl.trainers import by_dtensor, by_megatron
from sim.convert.settings import ONE_TURN, Converted, Machine, Settings, flat
from sim.convert.verl import LENGTHS
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_input import load_model

SIZE = "train_global_batch_size"
ALGORITHMS = ("grpo", "sft")
OTHERS = ("dpo", "rm", "ppo", "distillation", "opd")
OF_TRAINERS = ("megatron_cfg", "dtensor_cfg", "model_name")
LENGTH = "policy.max_total_sequence_length"
MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
ENGINE, VLLM = "policy.generation", "policy.generation.vllm_cfg"
OWN_GPUS = f"{ENGINE}.colocated.enabled"
PACKING, BATCHING = "policy.sequence_packing", "policy.dynamic_batching"
# Of data, rewards, the loss of a few numbers a token, schedules, logs and checkpoints.
HARMLESS = (
    *("data.", "env.", "logger.", "checkpointing.", "loss_fn.", "policy.tokenizer.", "policy.scheduler"),
    *("policy.generation_batch_size", "policy.make_sequence_length_divisible_by", "policy.megatron_recipe"),
    *(f"{VLLM}.{key}" for key in ("max_model_len", "load_format", "skip_tokenizer_init", "async_engine")),
    *(f"{VLLM}.num_{end}_layers_in_bf16" for end in ("first", "last")),
    *(f"{ENGINE}.{key}" for key in ("max_new_tokens", "stop_", "backend", "colocated.resources", "val_")),
    *(f"{MEGATRON}.{key}" for key in ("env_vars", "scheduler.", "converter_type", "train_iters", "pipeline_dtype")),
    *(f"{MEGATRON}.{key}" for key in ("empty_unused_memory_level", "moe_per_layer_logging", "force_")),
    *(f"{DTENSOR}.{key}" for key in ("env_vars", "_v2", "custom_parallel_plan", "automodel_kwargs", "clear_cache")),
    *(f"{part}.{key}" for part in (PACKING, BATCHING) for key in ("algorithm", "sequence_length_round", "logprob_mb")),
    *(f"sft.{key}" for key in ("max_num", "val_", "seed")),
    *(f"grpo.{key}" for key in ("max_num", "max_val", "val_", "seed", "normalize", "use_leave", "overlong", "reward")),
    *("grpo.adv_estimator", "grpo.calculate_adv", "grpo.async_grpo."),
)
ON_POLICY, THRESHOLD = "loss_fn.force_on_policy_ratio", "grpo.seq_logprob_error_threshold"
SKIPS_REFERENCE = "grpo.skip_reference_policy_logprobs_calculation"
PACKS = (
    "micro-batches: NeMo RL packs {tokens:,} tokens (train_mb_tokens); here {packed:,}, so that whole sequences of "
    "training.seq_len divide the batch"
)
SORTED = (
    f"{BATCHING}: sequences of like length share a micro-batch there, padded to the longest; packed ones are simulated"
)
LOGPROBS = "policy.logprob_batch_size {}: log-probabilities are simulated in micro-batches of the training's size"
AGE = "grpo.async_grpo: engines never wait for the trainer there; simulated is one step ahead (rl.steps_off: 1)"


def is_nemo_rl(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of NeMo RL, or what overrides one."""
    policy = data.get("policy")
    if not isinstance(policy, dict):
        return False
    inherits = "defaults" in data and any(key in policy for key in OF_TRAINERS)
    return inherits or (SIZE in policy and any(key in policy for key in OF_TRAINERS[:2]))


def convert_nemo_rl(file: Path, data: Mapping[str, Any], machine: Machine) -> Converted:
    """The scenario of the config and what it inherits.

    Raises:
        InputError: for another algorithm or engine, an unknown model, keys that are missing, and sizes that do not
            divide.
    """
    values = flat(whole(file, data))
    s = Settings(file, values)
    algorithm = _algorithm(s)
    s.taken.add("policy.model_name")
    place = f"{file}: policy.model_name"
    model = machine.model or named_model(file, place, str(values.get("policy.model_name", "")), s.notes)
    gpus, of_engines = _gpus(s, machine, algorithm)
    sections = _trained(s, replace(machine, model=model, gpus=gpus), algorithm)
    if algorithm == "grpo":
        sections["rl"] = _rl(s, model, of_engines)
        s.missing.update(LENGTHS)
    return s.converted("nemo_rl", machine, sections, left=_left(s, sections))


def _algorithm(s: Settings) -> str:
    of_file = {key.partition(".")[0] for key in s.values}
    if other := next((name for name in OTHERS if name in of_file), None):
        raise InputError(f"{s.file}: {other}: is not simulated with NeMo RL's trainer; can be converted: {ALGORITHMS}")
    found = next((name for name in ALGORITHMS if name in of_file), None)
    if found is None:
        raise InputError(f"{s.file}: has none of the sections {', '.join(ALGORITHMS)}; can be converted")
    return found


def _gpus(s: Settings, machine: Machine, algorithm: str) -> tuple[int, int | None]:
    """GPUs that train, and those of engines where they have their own (algorithms/grpo.py: `setup`)."""
    nodes, each = s.size("cluster.num_nodes"), s.size("cluster.gpus_per_node")
    everything = machine.gpus or nodes * each
    if algorithm != "grpo" or s.flag(OWN_GPUS, True):
        return everything, None
    own = f"{ENGINE}.colocated.resources"
    engines = s.size(f"{own}.gpus_per_node") if nodes == 1 else s.size(f"{own}.num_nodes") * each
    if engines >= everything:
        raise InputError(f"{s.file}: {own}: found {engines} GPUs of engines; must leave some of {everything} to train")
    return everything - engines, engines


def _trained(s: Settings, machine: Machine, algorithm: str) -> dict[str, Any]:
    """The sections `model`, `training` and `parallelism`."""
    length, batch = s.size(LENGTH), s.size(f"policy.{SIZE}")
    megatron = s.flag(f"{MEGATRON}.enabled")
    if not megatron and not s.flag(f"{DTENSOR}.enabled"):
        raise InputError(f"{s.file}: policy: neither megatron_cfg.enabled nor dtensor_cfg.enabled is true")
    found = (by_megatron if megatron else by_dtensor)(s, machine, {"seq_length": length, "global_batch_size": batch})
    replicas = found["parallelism"]["dp"]
    found["training"]["micro_batch_size"] = _micro_batch(s, length, batch, replicas, algorithm)
    model = str(machine.model)
    return {"model": with_prediction(model, 0), **found}


def _packs(s: Settings) -> str | None:
    """The section that makes micro-batches by tokens, if one does."""
    on = [part for part in (PACKING, BATCHING) if s.flag(f"{part}.enabled")]
    s.taken |= {f"{part}.train_mb_tokens" for part in (PACKING, BATCHING)}
    return on[0] if on else None


def _micro_batch(s: Settings, length: int, batch: int, replicas: int, algorithm: str) -> int:
    """Sequences of full length that a micro-batch has room for."""
    given, log_probs = s.size("policy.train_micro_batch_size"), s.whole("policy.logprob_batch_size")
    if (part := _packs(s)) is None:
        if algorithm == "grpo" and log_probs not in (None, given):
            s.notes.append(LOGPROBS.format(log_probs))
        return given
    tokens = s.size(f"{part}.train_mb_tokens")
    found = next((n for n in range(max(tokens // length, 1), 1, -1) if batch % (n * replicas) == 0), 1)
    s.notes.append(PACKS.format(tokens=tokens, packed=found * length))
    s.notes += [SORTED] if part == BATCHING else []
    return found


def _rl(s: Settings, model: str, of_engines: int | None) -> dict[str, Any]:
    """The section `rl`."""
    length, shares = s.size(LENGTH), of_engines is None
    longest = min(s.integer("data.max_input_seq_length", length), length - 1)
    answer = s.integer(f"{ENGINE}.max_new_tokens", length)
    ahead = s.flag("grpo.async_grpo.enabled")
    if ahead:
        s.notes.append(AGE)
    if (turns := s.integer("grpo.max_rollout_turns", 1)) > 1:
        s.notes.append(ONE_TURN.format(f"grpo.max_rollout_turns {turns}"))
    return {
        "prompts_per_step": s.size("grpo.num_prompts_per_step"),
        "generations_per_prompt": s.size("grpo.num_generations_per_prompt"),
        "prompt_len": {"max": longest},
        "output_len": {"max": min(answer, length)},
        "reference": "none" if s.flag(SKIPS_REFERENCE) else "host",
        **({"log_probs": "engine"} if _on_policy(s) else {}),
        "sequences": "packed" if _packs(s) else "padded",
        **({} if shares else {"colocated": False}),
        **({"steps_off": 1} if ahead and not shares else {}),
        "generation": _generation(s, model, of_engines),
    }


def _on_policy(s: Settings) -> bool:
    """Tell whether no forward gives log-probabilities (`_policy_logprobs_required`)."""
    return s.flag(ON_POLICY) and s.values.get(THRESHOLD) is None


def _generation(s: Settings, model: str, of_engines: int | None) -> dict[str, Any]:
    """The engine's keys."""
    if (backend := s.values.get(f"{ENGINE}.backend", "vllm")) != "vllm":
        raise InputError(f"{s.file}: {ENGINE}.backend: found {show(backend)}; can be converted: vllm")
    tp, pp = s.size(f"{VLLM}.tensor_parallel_size", 1), s.size(f"{VLLM}.pipeline_parallel_size", 1)
    ep = s.size(f"{VLLM}.expert_parallel_size", 1)
    if ep not in (1, tp):
        why = "attention by data parallelism beside experts is not simulated in an rl step"
        raise InputError(f"{s.file}: {VLLM}.expert_parallel_size: found {ep}; must be 1 or {tp}; {why}")
    described = load_model(model)
    experts = described.moe is not None and tp > 1
    if s.flag(f"{VLLM}.enforce_eager"):
        s.notes.append(f"{VLLM}.enforce_eager: the engine is simulated with CUDA graphs all the same")
    return {
        "engine": "vllm-v1",
        "tp": tp,
        "pp": pp,
        **({} if of_engines is None else {"replicas": max(of_engines // (tp * pp), 1)}),
        **(({"ep": ep} if ep > 1 else {"expert_tp": tp}) if experts else {}),
        **_limits(s),
        "prefix_cache": _prefixes(s, described.state_space is not None),
        **_drawn(s),
    }


def _limits(s: Settings) -> dict[str, Any]:
    most = {"max_running_requests": "max_num_seqs", "max_batch_tokens": "max_num_batched_tokens"}
    found = {key: s.whole(f"{ENGINE}.vllm_kwargs.{name}") for key, name in most.items()}
    cache = {"memory_fraction": s.number(f"{VLLM}.gpu_memory_utilization")}
    if (dtype := s.choice(f"{VLLM}.kv_cache_dtype", {"auto": "", "fp8": "fp8", "fp8_e4m3": "fp8"}, "auto")) == "fp8":
        cache["dtype"] = dtype  # type: ignore[assignment]
    bits = s.choice(f"{VLLM}.precision", {"bfloat16": "", "float16": "", "fp8": "fp8"}, "bfloat16")
    return {
        **{key: value for key, value in found.items() if value is not None},
        "kv_cache": {key: value for key, value in cache.items() if value is not None},
        **({"quantization": "fp8"} if bits == "fp8" else {}),
    }


def _prefixes(s: Settings, has_state: bool) -> str:
    return "gpu" if s.flag(f"{VLLM}.enable_prefix_caching", True) and not has_state else "none"


def _drawn(s: Settings) -> dict[str, Any]:
    found = {"temperature": s.number(f"{ENGINE}.temperature", 1.0), "top_p": s.number(f"{ENGINE}.top_p", 1.0)}
    top_k = s.integer(f"{ENGINE}.top_k", -1)
    usual = found == {"temperature": 1.0, "top_p": 1.0} and top_k <= 0
    return {} if usual else {"sampling": found | ({"top_k": top_k} if top_k > 0 else {})}


def _left(s: Settings, sections: Mapping[str, Any]) -> list[str]:
    """Names that nothing read and that may change a step. What is null or of the other trainer changes none."""
    megatron = s.values.get(f"{MEGATRON}.enabled") is True
    other = (f"{DTENSOR}.", "policy.optimizer.") if megatron else (f"{MEGATRON}.",)
    of_engine = () if "rl" in sections else (f"{ENGINE}.",)
    return [name for name in s.left() if not name.startswith((*HARMLESS, *other, *of_engine))]
