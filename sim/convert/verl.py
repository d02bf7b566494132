"""verl's PPO, GRPO and their kin, `python3 -m verl.trainer.main_ppo key=value …` or a whole YAML, with `rl`.

Names and defaults: verl 0.9.1, trainer/config/_generated_ppo_trainer.yaml and _generated_ppo_megatron_trainer.yaml. A
mini-batch has `ppo_mini_batch_size` prompts with all of their answers (trainer/ppo/ray_trainer.py). FSDP's reference is
offloaded by force (workers/engine/fsdp/transformer_impl.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sim.convert.named_models import named_model, with_prediction
from sim.convert.scripts.command_line import words_behind, words_of
from sim.convert.scripts.script_data import Script
from sim.convert.settings import ONE_TURN, Converted, Machine, Settings
from sim.convert.verl_critic import critic_of, note_critic, of_critic
from sim.convert.verl_files import as_usual, named_config, option_of, settings_of, typed_word
from sim.convert.verl_megatron import by_megatron
from sim.convert.verl_trained import (
    ACTOR,
    OF_FLASH,
    OF_PPO,
    fused_loss,
    layout_of_fsdp,
    packed,
    trained_by_megatron,
    training_of_fsdp,
)
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_input import load_model

MODULE = "verl.trainer.main_ppo"
BATCH = "data.train_batch_size"
ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{part}" for part in ("rollout", "ref", "model"))
WITH_CRITIC = "gae"
WITHOUT_CRITIC = ("grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg")
TURNS = f"{ROLLOUT}.multi_turn"
QUANTIZED = {"fp8": "fp8"}  # by the engine itself, as it loads the weights
# Versions that verl 0.9.1 requires (its metadata, extras `vllm` and `sglang`; setup.py names none of TensorRT-LLM).
PINNED = {"vllm": "vLLM 0.24.0", "sglang": "SGLang 0.5.12"}
ENGINES = {"vllm": "vllm-0.21", "sglang": "sglang-0.5.11", "trtllm": "trtllm-1.0"}
OF_RELEASE = "engine {}: verl 0.9.1 requires {}; for another release write rl.generation.engine"
USUAL_ROLLOUT = "vllm"
LENGTHS = {
    "rl.prompt_len.mean": "the mean length of its prompts, which its data would say",
    "rl.output_len.mean": "the mean length of the answers, which a run would say",
}
EAGER = "{}: the engine is simulated with CUDA graphs all the same"
PROMPT, ANSWER = "data.max_prompt_length", "data.max_response_length"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz"
BYPASSES = "algorithm.rollout_correction.bypass_mode"
CONFIG = "--config-name"


def is_verl(script: Script) -> bool:
    """Tell whether a script has verl's command of this kind, with arguments in it."""
    return MODULE in script.started and any(word in script.started for word in (BATCH, CONFIG))


def convert_verl(file: Path, script: Script, machine: Machine) -> Converted:
    """The scenario of the command's arguments.

    Raises:
        InputError: for an estimator that needs further answers, an unknown model, and sizes that do not divide.
    """
    values, megatron, notes = _arguments(file, script)
    return _converted(Settings(file, values, text=script.text, notes=notes), machine, megatron)


def convert_verl_config(file: Path, data: Mapping[str, Any], machine: Machine) -> Converted:
    """The scenario of a whole config.

    Raises:
        InputError: as `convert_verl` does.
    """
    values, inherited = settings_of(file, data)
    return _converted(Settings(file, values), machine, trained_by_megatron(file, values, OF_PPO, inherited))


def _converted(s: Settings, machine: Machine, megatron: bool) -> Converted:
    estimator = str(s.take("algorithm.adv_estimator", "gae"))
    if estimator not in (WITH_CRITIC, *WITHOUT_CRITIC):
        problem = f"found {show(estimator)}; needs further answers, which are not simulated; can be converted"
        known = ", ".join((WITH_CRITIC, *WITHOUT_CRITIC))
        raise InputError(f"{s.place('algorithm.adv_estimator')}: {problem}: {known}")
    gpus = machine.gpus or s.size("trainer.nnodes", 1) * s.size("trainer.n_gpus_per_node", 8)
    s.taken |= {f"{MODEL}.path", *OF_PPO.engine}  # in the first's place --model may stand
    model = machine.model or _model(s)
    machine = replace(machine, model=model)
    sections = {
        "model": model if s.flag(f"{MODEL}.mtp.enable") else with_prediction(model, 0),  # workers/config/model.py
        **_trained(s, machine, gpus, megatron),
        "rl": _rl(s, megatron) | (critic_of(s, model) if estimator == WITH_CRITIC else {}),
    }
    _by_model(s, sections)
    if estimator != WITH_CRITIC:
        note_critic(s)
    s.taken |= as_usual(s.file, s.values) | (set() if estimator == WITH_CRITIC else of_critic(s))
    s.missing.update(LENGTHS)
    return s.converted("verl", machine, sections)


def _arguments(file: Path, script: Script) -> tuple[dict[str, Any], bool, list[str]]:
    """What the command and the config that it names set, by key, whether Megatron trains, and notes."""
    behind = words_behind(file, words_of(script), MODULE)
    pairs = (word.lstrip("+").split("=", 1) for word in behind if "=" in word and not word.startswith(("-", "~")))
    values = {key: typed_word(value) for key, value in pairs}
    inherited, notes = list[str](), list[str]()
    if name := option_of(behind, CONFIG):
        config, inherited, note = named_config(file, script, name)
        if note and BATCH not in values:
            raise InputError(note)
        values, notes = config | values, [note] if note else []
    return values, trained_by_megatron(file, values, OF_PPO, inherited), notes


def _model(s: Settings) -> str:
    """The model by its path.

    Raises:
        InputError: where it is not known here.
    """
    return named_model(s.file, s.place(f"{MODEL}.path"), str(s.take(f"{MODEL}.path", "")), s.notes)


def _trained(s: Settings, machine: Machine, gpus: int, megatron: bool) -> dict[str, Any]:
    """The sections `training` and `parallelism`."""
    batch = s.size(f"{ACTOR}.ppo_mini_batch_size", 256) * s.size(f"{ROLLOUT}.n", 1)
    length = s.size(PROMPT, 512) + s.size(ANSWER, 512)
    sizes = {"seq_length": length, "micro_batch_size": 1, "global_batch_size": batch}
    if megatron:
        s.take(f"{MODEL}.enable_gradient_checkpointing")  # of FSDP alone
        s.take(f"{OF_PPO.megatron}.grad_offload")  # gradients are freed while the engine runs, either way
        training, parallelism = by_megatron(s, OF_PPO, replace(machine, gpus=gpus), sizes)
    else:
        parallelism = layout_of_fsdp(s, OF_PPO, gpus)
        training = {"seq_len": length, "micro_batch_size": 1, "global_batch_size": batch}
        training |= training_of_fsdp(s, OF_PPO) | {
            "gradient_clipping": (s.number(f"{ACTOR}.grad_clip", 1.0) or 0.0) > 0,
            **OF_FLASH,
        }
    training |= fused_loss(s, OF_PPO, parallelism)
    training["micro_batch_size"] = _micro_batch(s, length, batch, parallelism)
    return {"training": training, "parallelism": parallelism}


def _micro_batch(s: Settings, length: int, batch: int, parallelism: dict[str, Any]) -> int:
    """Sequences of full length that a micro-batch has room for; of a batch by tokens so many that they divide it."""
    per_gpu, of_all = (f"{ACTOR}.ppo_micro_batch_size{end}" for end in ("_per_gpu", ""))
    replicas: int = parallelism["dp"]
    if s.flag(DYNAMIC):
        s.taken |= {per_gpu, of_all}
        tokens = s.size(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384) * int(parallelism.get("cp", 1))
        return packed(s, tokens, length, batch, replicas, "ppo_max_token_len_per_gpu")
    s.take(f"{ACTOR}.ppo_max_token_len_per_gpu")
    if (given := s.whole(per_gpu)) is not None:
        return given
    if (given := s.whole(of_all)) is None:
        raise InputError(f"{s.file}: {per_gpu}: is required and missing without use_dynamic_bsz")
    return max(given // replicas, 1)


def _rl(s: Settings, megatron: bool) -> dict[str, Any]:
    """The section `rl`. FSDP's reference is on the host in any case."""
    states = OF_PPO.megatron if megatron else OF_PPO.fsdp
    offloads = [s.flag(f"{states}.{what}_offload") for what in ("param", "optimizer")]
    if len({*offloads}) > 1:
        s.notes.append(f"{states}: only one of param_offload and optimizer_offload is true; both are simulated as true")
    uses_reference = any([s.flag(f"{ACTOR}.use_kl_loss"), s.flag("algorithm.use_kl_in_reward")])
    on_host = s.flag(f"{REF}.megatron.param_offload", offloads[0])
    s.taken |= {*(f"{REF}.fsdp_config.{key}" for key in ("param_offload", "offload_policy")), *_as_the_actor(s)}
    if s.flag(f"{TURNS}.enable"):
        s.notes.append(ONE_TURN.format(f"{TURNS}.enable"))
        s.taken |= {key for key in s.values if key.startswith((f"{TURNS}.", f"{ROLLOUT}.agent."))}
    joined, epochs = s.flag(f"{MODEL}.use_remove_padding", True), s.size(f"{ACTOR}.ppo_epochs", 1)
    return {
        "prompts_per_step": s.size(BATCH, 1024),
        "generations_per_prompt": s.size(f"{ROLLOUT}.n", 1),
        "prompt_len": {"max": s.size(PROMPT, 512)},
        "output_len": {"max": s.size(ANSWER, 512)},
        "reference": ("host" if on_host or not megatron else "gpu") if uses_reference else "none",
        **({"epochs": epochs} if epochs > 1 else {}),
        **({"log_probs": "engine"} if s.flag(BYPASSES) else {}),
        "sequences": "packed" if s.flag(DYNAMIC) else "mean" if joined else "padded",
        "sleep_level": 2 if s.flag(f"{ROLLOUT}.free_cache_engine", True) else 0,
        "offload_training": any(offloads),
        "generation": _generation(s),
    }


def _as_the_actor(s: Settings) -> set[str]:
    """The reference's keys that repeat the actor's: it has the policy's layout here."""
    of_reference = [key for key in s.values if key.startswith(f"{REF}.")]
    return {key for key in of_reference if s.values[key] == s.values.get(key.replace(REF, ACTOR, 1))}


def _by_model(s: Settings, sections: dict[str, Any]) -> None:
    """What the engine does by its model: how it splits experts, and whether answers share their prompt's cache.

    vLLM and SGLang split experts within tp, or over `expert_parallel_size`; TensorRT-LLM by the latter within tp
    (workers/config/rollout.py).
    """
    ep, generation = s.size(f"{ROLLOUT}.expert_parallel_size", 1), sections["rl"]["generation"]
    within, tp = s.size(f"{ROLLOUT}.moe_tensor_parallel_size", 1), generation["tp"]
    model = load_model(sections["model"])
    if model.moe is not None and tp > 1:
        if within > 1 and ep == 1:
            ep = tp // within
        generation |= {"ep": ep} if ep > 1 else {"expert_tp": tp}
        if within > 1:
            generation["expert_tp"] = within
    if model.state_space is not None and generation["prefix_cache"] != "none":
        generation["prefix_cache"] = "none"
        s.notes.append(f"{ROLLOUT}.enable_prefix_caching: no prefix of a state-space layer is kept in the simulation")


def _generation(s: Settings) -> dict[str, Any]:
    """The engine's keys."""
    engine = s.choice(f"{ROLLOUT}.name", ENGINES, USUAL_ROLLOUT)
    name = str(s.values.get(f"{ROLLOUT}.name", USUAL_ROLLOUT))
    s.notes += [OF_RELEASE.format(engine, PINNED[name])] if name in PINNED else []
    if s.flag(f"{ROLLOUT}.enforce_eager"):
        s.notes.append(EAGER.format(f"{ROLLOUT}.enforce_eager"))
    drawn = {"temperature": s.number(f"{ROLLOUT}.temperature", 1.0), "top_p": s.number(f"{ROLLOUT}.top_p", 1.0)}
    top_k = s.integer(f"{ROLLOUT}.top_k", -1)
    sampling = drawn | ({"top_k": top_k} if top_k > 0 else {})
    s.flag(f"{ROLLOUT}.enable_chunked_prefill", True)
    return {
        "engine": engine or ENGINES[USUAL_ROLLOUT],
        "tp": s.size(f"{ROLLOUT}.tensor_model_parallel_size", 2),
        "pp": s.size(f"{ROLLOUT}.pipeline_model_parallel_size", 1),
        "max_running_requests": s.size(f"{ROLLOUT}.max_num_seqs", 256),
        "max_batch_tokens": s.size(f"{ROLLOUT}.max_num_batched_tokens", 8192),
        "kv_cache": {"memory_fraction": s.number(f"{ROLLOUT}.gpu_memory_utilization", 0.5)},
        "prefix_cache": "gpu" if s.flag(f"{ROLLOUT}.enable_prefix_caching", True) else "none",
        **({"quantization": stored} if (stored := s.choice(f"{ROLLOUT}.quantization", QUANTIZED, "none")) else {}),
        **({} if sampling == {"temperature": 1.0, "top_p": 1.0} else {"sampling": sampling}),
    }
