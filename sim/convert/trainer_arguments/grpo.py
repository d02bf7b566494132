"""GRPO and RLOO of TRL, GRPO of Axolotl, which runs TRL's trainer, and of ms-swift, as a scenario with `rl`.

TRL: trl/trainer/grpo_config.py and grpo_trainer.py, trl/scripts/grpo.py of releases 0.16 to 1.16; defaults are the
last one's. Axolotl 0.19, which has TRL 1.9: core/trainers/grpo, core/builders/rl.py, utils/schemas/trl.py. Batches
count answers. Each process writes those of `steps_per_generation` micro-batches at once, pads them to the longest, and
trains on one micro-batch after another; its states stay on the GPU meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.convert.named_models import named_reward
from sim.convert.settings import ONE_TURN, Converted, Machine, Settings, without_effect
from sim.convert.trainer_arguments.axolotl import MARK
from sim.convert.trainer_arguments.grpo_engine import (
    NEWEST,
    OF_AXOLOTL,
    OF_MS_SWIFT,
    UNTIL_027,
    Answers,
    Release,
    engine_of,
    shares_gpus,
)
from sim.convert.trainer_arguments.objectives import OF_GRPO, OF_RLOO, OF_SCRIPT, OF_SWIFT, is_rloo
from sim.convert.trainer_arguments.scenario import FULL_LENGTH, convert_deepspeed
from sim.convert.verl import LENGTHS
from sim.core.errors import InputError

SECTION, SERVER = "trl", "vllm"  # Axolotl's; the second is made of a script's command of the server, too
PROMPT, ANSWER, CONTEXT = "max_prompt_length", "max_completion_length", ("vllm_max_model_length", "vllm_max_model_len")
STEPS, BATCH, COUNT = "steps_per_generation", "generation_batch_size", "num_generations"
CORRECTION, REWARD, LIGER = "vllm_importance_sampling_correction", "reward_model_name_or_path", "use_liger_loss"
TURNS = ("multi_turn_scheduler", "max_turns", "max_tool_calling_iterations")  # the first two are ms-swift's
# Keys that are read here; the others are those of any trainer, or without effect.
READ = (
    *(PROMPT, ANSWER, *CONTEXT, STEPS, BATCH, COUNT, CORRECTION, REWARD, LIGER, *OF_GRPO, "beta", "sync_ref_model"),
    *("temperature", "top_p", "top_k", "repetition_penalty", "vllm_tensor_parallel_size", "vllm_model_impl"),
    *("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_enable_prefix_caching", "disable_dropout"),
    *("async_prefetch", SERVER, *TURNS),
    *(OF_SWIFT, "sleep_level", "offload_model", "offload_optimizer", "padding_free", "vllm_max_num_seqs"),
    *("enforce_eager", "advantage_estimator", "vllm_enable_lora", *OF_RLOO),
)
# By key: TRL's default of release 1.16, and what it was before.
DEFAULTS = {
    "vllm_mode": "colocate (before 1.0 server)",
    ANSWER: "512 (before 1.10 256)",
    "beta": "0 and so no reference (before 0.19 0.04)",
    CORRECTION: "true and so log-probabilities of the policy (before 0.23 with num_iterations above 1 alone)",
    "temperature": "1 (before 0.18 0.9, with top_k 50)",
}
DEFAULTS_OF_RLOO = {
    **{key: DEFAULTS[key] for key in ("vllm_mode", ANSWER)},
    COUNT: "2",
    "beta": "0.05 and so a reference",
}
BY_DEFAULT = "defaults of TRL 1.16: {}"
OLDER = f"{PROMPT}: is a key of TRL until 0.27, whose defaults are taken: vllm_mode server, {ANSWER} 256"
BY_TRANSFORMERS = (
    "{}; must be true: answers by Transformers' generate, or its continuous batching, are not simulated, those by vLLM "
    "are"
)
NO_LENGTH = (
    f"{{}}: {PROMPT}: is missing, and TRL cuts no prompt: give --seq-len N, the tokens of the longest prompt with its "
    "answer"
)
LONGEST = "sequence_len: taken for the longest prompt with its answer; Axolotl and TRL cut no prompt"
SEVERAL = (
    f"{STEPS}: the answers of an update are written in {{}} generations, one after another; one generation of all of "
    "them is simulated"
)
TILES = (
    "log-probabilities are computed in tiles of logits, as TRL has it since 1.15; earlier releases had all logits of "
    "the answers at once (training.cross_entropy=unfused)"
)
SCORED = "log-probabilities: those of prompts are taken as computed, too, which the trainer leaves out"
WITHOUT_ADAPTERS = (
    "rl.reference: it is the policy without its adapters; the memory of another copy of the parameters is counted here"
)
MIXED = "sync_ref_model: mixing the policy into its reference every few hundred steps is not simulated"
RULES = "reward_funcs: take no time here; rl.reward_s says how long they take"
PREFETCH = "async_prefetch: simulated is one step ahead (rl.steps_off: 1), whatever prefetch_depth says"


def convert_grpo(file: Path, data: Mapping[str, Any], machine: Machine, seq_len: int | None) -> Converted:
    """The scenario of a file or command that trains by GRPO.

    Raises:
        InputError: for answers that vLLM does not write, where the longest sequence is not known, and for sizes that do
            not divide.
    """
    s, rest = _settings(file, data)
    server = s.section(SERVER)
    release = _release(s, data)
    _require_vllm(s)
    lengths, length = _lengths(s, server, seq_len, release, data)
    found = convert_deepspeed(file, rest | ({} if release.own else {"max_length": length}), machine, length)
    sections = {key: found.scenario[key] for key in ("model", "training", "parallelism")}
    s.notes += _defaults(s, release)
    _loss(s, sections, release.tiled)
    shares, answers = shares_gpus(s, release), _answers(s, sections, release.each)
    engine = engine_of(s, server, shares, answers, sections, release)
    sections["rl"] = _rl(s, answers, sections, shares, release.beta) | lengths | {"generation": engine}
    s.missing.update(LENGTHS)
    s.notes[:0] = [note for note in found.notes if note != FULL_LENGTH]
    return s.converted("grpo", machine, sections)


def _settings(file: Path, data: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """The settings that GRPO alone has, and those that any trainer has."""
    section = own if isinstance(own := data.get(SECTION), dict) else {}
    names = {*READ, *without_effect("grpo")}
    values = {"beta": data.get("rl_beta"), **{key: data[key] for key in data if key in names}, **section}
    elsewhere = {*names, SECTION, "rl", "rl_beta", "stage", "max_length"}
    rest = {key: value for key, value in data.items() if key not in elsewhere} | {OF_SCRIPT: "grpo"}
    if values.get(LIGER):
        rest["use_liger_kernel"] = True
    values = {key: value for key, value in values.items() if value is not None}
    s = Settings(file, values, written={key: f"{SECTION}.{key}" for key in section})
    s.taken.add(LIGER)
    return s, rest


def _release(s: Settings, data: Mapping[str, Any]) -> Release:
    """Whose GRPO it is, or RLOO."""
    s.taken |= {*OF_RLOO}  # of a few numbers a token
    if s.take(OF_SWIFT) is not None:
        return OF_MS_SWIFT
    found = OF_AXOLOTL if MARK in data else UNTIL_027 if PROMPT in s.values else NEWEST
    return found._replace(each=2, beta=0.05) if is_rloo(data) else found  # trl/trainer/rloo_config.py


def _require_vllm(s: Settings) -> None:
    """Raise where the policy writes its answers by itself."""
    if not s.flag("use_vllm"):
        found = "found false" if "use_vllm" in s.values else "is missing, which is false"
        raise InputError(f"{s.place('use_vllm')}: {BY_TRANSFORMERS.format(found)}")


def _defaults(s: Settings, release: Release) -> list[str]:
    """Name the defaults that other releases of TRL have otherwise."""
    if release.name != NEWEST.name:
        return [OLDER] if release.name == UNTIL_027.name else []
    usual = DEFAULTS_OF_RLOO if release.each != NEWEST.each else DEFAULTS
    left = [f"{key} {value}" for key, value in usual.items() if key not in s.values]
    return [BY_DEFAULT.format(", ".join(left))] if left else []


def _lengths(
    s: Settings, server: Settings, longest: int | None, release: Release, data: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """The section's keys of lengths, and the longest sequence: the user's, or the file's.

    Raises:
        InputError: where nobody says it, or it leaves no room for a prompt.
    """
    prompt, answer = s.whole(PROMPT), s.whole(ANSWER) or release.answer
    contexts = [*(s.whole(key) for key in CONTEXT), server.whole("max_model_len")]
    cuts = [prompt + answer] if prompt and answer else []  # the engine ends answers at its own limit, too
    length = longest or min([*cuts, *filter(None, contexts)], default=None)
    if length is None and release.own:
        length = Settings(s.file, data).whole("sequence_len")
        s.notes += [LONGEST] if length else []
    if length is None:
        raise InputError(NO_LENGTH.format(s.file))
    if answer and length <= answer:
        raise InputError(f"{s.place(ANSWER)}: answers of {answer} tokens leave no room for a prompt in {length}")
    most = {"prompt_len": prompt or length - (answer or 0), "output_len": answer}
    return {key: {"max": size} if size and size < length else {} for key, size in most.items()}, length


def _answers(s: Settings, sections: Mapping[str, Any], each_prompt: int) -> Answers:
    """Sizes of a step. `each_prompt`: answers to a prompt, by default.

    Raises:
        InputError: where generations and updates do not end together, or a generation has no whole prompts.
    """
    training, dp = sections["training"], sections["parallelism"]["dp"]
    micro, count = training["micro_batch_size"], s.size(COUNT, each_prompt)
    if micro < 1:
        raise InputError(f"{s.file}: the micro-batch of a rank: found {micro}; must be at least 1")
    each = micro * dp
    accumulated = max(training["global_batch_size"] // each, 1)
    batch = s.whole(BATCH)
    if batch is not None and (batch < 1 or batch % each):
        raise InputError(
            f"{s.place(BATCH)}: found {batch}; must be a multiple of the {each} answers of all micro-batches"
        )
    steps = s.size(STEPS, accumulated if batch is None else batch // each)
    if steps % accumulated and accumulated % steps:
        problem = f"found {steps}; must divide gradient_accumulation_steps ({accumulated}), or be a multiple of it"
        raise InputError(f"{s.place(STEPS)}: {problem}; updates between two generations are not simulated")
    if steps * each % count:
        problem = (
            f"found {count}; must divide the {steps * each} answers of a generation (micro-batch · ranks · {STEPS})"
        )
        raise InputError(f"{s.place(COUNT)}: {problem}")
    if accumulated > steps:
        s.notes.append(SEVERAL.format(accumulated // steps))
    return Answers(max(steps, accumulated) * each // count, count, micro * steps, accumulated, steps)


def _loss(s: Settings, sections: dict[str, Any], tiled: bool) -> None:
    """Add to `training` how log-probabilities are computed, where Liger does not."""
    training = sections["training"]
    if tiled and "cross_entropy" not in training and sections["parallelism"].get("tp", 1) == 1:
        training["cross_entropy"] = "tiled"
        s.notes.append(TILES)
    s.notes.append(SCORED)
    if s.flag("disable_dropout") and "lora" in training:
        training["lora"] = {key: value for key, value in training["lora"].items() if key != "dropout"}


def _rl(s: Settings, answers: Answers, sections: Mapping[str, Any], shares: bool, beta: float) -> dict[str, Any]:
    """The section `rl` without lengths and engine. `beta`: the reference's, by default."""
    times = s.size("num_iterations", 1)
    s.notes += [ONE_TURN.format(key) for key in TURNS if s.take(key)][:1]
    ahead = s.flag("async_prefetch") and not shares
    s.notes += [PREFETCH] if ahead else []
    s.notes += [RULES] if s.take("reward_funcs") and REWARD not in s.values else []
    # grpo_trainer.py, `_generate_and_score_completions`: the policy's forward is made for the correction of what vLLM
    # computes otherwise, and where an update comes before the last use of the answers
    updates_between = answers.accumulated % (answers.steps * times) != 0
    computed = s.flag(CORRECTION, default=True) or updates_between
    level = s.integer("sleep_level", 2 if s.flag("vllm_enable_sleep_mode") else 0)  # the first is ms-swift's
    away = any([s.flag("offload_model"), s.flag("offload_optimizer")])
    s.take("advantage_estimator")  # of ms-swift: sums of rewards, which the engine's answers give alike
    return {
        "prompts_per_step": answers.prompts,
        "generations_per_prompt": answers.each,
        **({} if shares else {"colocated": False}),
        **({"steps_off": 1} if ahead else {}),
        **({"epochs": times} if times > 1 else {}),
        "reference": _reference(s, "lora" in sections["training"], shares, beta),
        **({} if computed else {"log_probs": "engine"}),
        **_reward(s),
        "sequences": "mean" if s.flag("padding_free") else "padded",
        **({"sleep_level": level, "offload_training": away} if shares else {}),
    }


def _reference(s: Settings, lora: bool, shares: bool, usual: float) -> str:
    """Where the reference is: it is loaded onto the GPU, unless `beta` is 0; ms-swift's may leave it for the engine."""
    mixes, beta = s.flag("sync_ref_model"), s.number("beta", usual)
    if not beta:
        return "none"
    s.notes += [MIXED] if mixes else []
    s.notes += [WITHOUT_ADAPTERS] if lora else []
    return (
        "host" if s.flag("offload_model") and shares and not lora else "gpu"
    )  # grpo_trainer.py of ms-swift: `offload_context`


def _reward(s: Settings) -> dict[str, Any]:
    """A reward model's key (trl/scripts/grpo.py), of which each process has a copy."""
    named = s.take(REWARD)
    return {} if named is None else named_reward(str(named), s.notes)
