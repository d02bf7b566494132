"""What a fine-tuning config or command trains for: only next tokens of given texts are converted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from sim.core.errors import InputError

PAIRS = "trains on pairs of answers"
REFERENCE = f"{PAIRS}, which a reference model reads, too"
GENERATES = "generates answers in each step, which a scenario with `rl` describes (docs/rl.md)"
# By the names of LLaMA-Factory's `stage`, Axolotl's `rl`, TRL's commands and its scripts: what is not converted.
OBJECTIVES = {
    **dict.fromkeys(("dpo", "ipo"), REFERENCE),
    **dict.fromkeys(("orpo", "simpo", "cpo"), PAIRS),
    **dict.fromkeys(("bco", "kto"), "has a reference model read each answer, too"),
    **dict.fromkeys(("rm", "reward", "prm"), f"{PAIRS}, with a head for rewards"),
    **dict.fromkeys(("ppo", "grpo", "gdpo", "rloo", "nash", "xpo", "online"), GENERATES),
    "ebft": GENERATES,  # Axolotl's, whose strided rollouts are short
    "gkd": "has a teacher read each answer, which a scenario with `distillation` describes (docs/distillation.md)",
}
KEYS = ("stage", "rl")
OTHER = "trains for something else than next tokens"
# Axolotl's switches (utils/schemas, integrations/gkd).
SWITCHES = {"gkd_trainer": "gkd", "reward_model": "reward", "process_reward_model": "prm"}
OF_TRL = "{}, a key of TRL's {}"
# Keys of TRL's other trainers, which its SFTConfig and `TrainingArguments` lack (release 1.16: trl/trainer/*_config.py,
# trl/scripts, trl/experimental; those of DPO and KTO that earlier releases had, too).
TRAINERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "GRPO": (
        GENERATES,
        (
            *("num_generations", "max_completion_length", "use_vllm", "vllm_mode", "num_iterations", "reward_funcs"),
            *("generation_batch_size", "steps_per_generation", "scale_rewards", "reward_weights", "epsilon_high"),
            *("mask_truncated_completions", "log_completions"),
        ),
    ),
    "PPO": (GENERATES, ("num_ppo_epochs", "response_length", "reward_model_path", "missing_eos_penalty", "rloo_k")),
    "GKD": (OBJECTIVES["gkd"], ("teacher_model_name_or_path", "seq_kd", "lmbda")),
    "KTO": (OBJECTIVES["kto"], ("desirable_weight", "undesirable_weight")),
    "CPO": (PAIRS, ("cpo_alpha", "simpo_gamma")),
    "RewardTrainer": (OBJECTIVES["reward"], ("center_rewards_coefficient",)),
    "DPO": (
        REFERENCE,
        (
            *("precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model", "ref_model_sync_steps"),
            *("f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "discopop_tau", "rpo_alpha"),
            *("reference_free", "use_weighting", "loss_weights"),
        ),
    ),
    "trainers of preferences": (f"{PAIRS} or generates them", ("beta", "max_prompt_length", "disable_dropout")),
}
COMMAND = "trl"  # whose next word is an objective
UNSET = (None, False, "false", "False")
PARTS = re.compile(r"[_\-.]")


def refuse_objective(file: Path, data: Mapping[str, Any]) -> None:
    """Raise where a config trains for something else than next tokens.

    Raises:
        InputError: naming the key, and what such a step does besides.
    """
    for key in KEYS:
        if (what := OBJECTIVES.get(str(data.get(key)).lower())) is not None:
            raise _error(file, f"{key} {data[key]}", what)
    if isinstance(word := data.get("rl"), str) and word:
        raise _error(file, f"rl {word}", OTHER)
    if key := next((name for name in SWITCHES if data.get(name) is True), ""):
        raise _error(file, key, OBJECTIVES[SWITCHES[key]])
    for trainer, (what, keys) in TRAINERS.items():
        if key := next((name for name in keys if data.get(name) not in UNSET), ""):
            raise _error(file, OF_TRL.format(key, trainer), what)


def refuse_script(file: Path, words: list[str]) -> None:
    """Raise where a command's script, or `trl`'s first word, is named after another objective (`dpo.py`, `trl dpo`).

    Raises:
        InputError: naming the script, and what such a step does besides.
    """
    for before, word in pairwise(["", *words]):
        name = word.rpartition("/")[2]
        if not (name.endswith(".py") or before.rpartition("/")[2] == COMMAND):
            continue
        if what := next((OBJECTIVES[part] for part in PARTS.split(name) if part in OBJECTIVES), None):
            raise _error(file, name, what)


def _error(file: Path, where: str, what: str) -> InputError:
    return InputError(f"{file}: {where}: {what}; can be converted: training on given texts (sft, pt)")
