"""What a fine-tuning config or command trains for: next tokens of given texts, pairs of answers, and good and bad ones
are converted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from sim.core.errors import InputError
from sim.inputs.training_config import PreferenceLoss

Objective = PreferenceLoss | Literal["grpo", "gkd"]
PAIRS = "trains on pairs of answers"
GENERATES = "generates answers in each step, which a scenario with `rl` describes (docs/rl.md)"
# By the names of LLaMA-Factory's `stage`, Axolotl's `rl`, TRL's commands and its scripts: what is converted, as
# `training.preference.loss` or as `rl`, and what is not.
CONVERTED: dict[str, Objective] = {
    "dpo": "dpo",
    "ipo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "reward": "reward",
    **dict.fromkeys(("cpo", "simpo"), "orpo"),  # whose operators it has (`_of_cpo`)
    # The second adds several rewards up otherwise (Axolotl's), the third weighs answers otherwise.
    **dict.fromkeys(("grpo", "gdpo", "rloo"), "grpo"),
    "gkd": "gkd",  # of given texts
}
OBJECTIVES = {
    "bco": "has a reference model read each answer, too, and an estimate of the answers' density",
    "rm": f"{PAIRS}, with a head for rewards beside the vocabulary's",
    "prm": "trains on the steps of answers, with a head for rewards",
    **dict.fromkeys(("ppo", "nash", "xpo", "online"), GENERATES),
    "gkd_trainer": "has a teacher read each answer, which a scenario with `distillation` describes "
    "(docs/distillation.md)",
    "ebft": GENERATES,  # Axolotl's, whose strided rollouts are short
}
OF_SCRIPT = "objective of the script"  # a key of ours beside a command's arguments
OF_SWIFT = "rlhf_type"  # of ms-swift alone
KEYS = ("stage", "rl", OF_SCRIPT)
OTHER = "trains for something else than next tokens"
# Axolotl's switches (utils/schemas, integrations/gkd).
SWITCHES = {"gkd_trainer": "gkd_trainer", "reward_model": "reward", "process_reward_model": "prm"}
# Axolotl's plugins that train otherwise, by their part of the name and their section (src/axolotl/integrations).
PLUGINS = {
    "diffusion": "trains on masked tokens with attention in both directions, which is not simulated",
    "hatchery": "trains on the GPUs of a service",
    "kd": "learns from a teacher's likeliest tokens, which an earlier run wrote down",
    "spectrum": "trains some of the parameters",
}
OF_TRL = "{}, a key of TRL's {}"
# Keys of TRL's other trainers, which its SFTConfig and `TrainingArguments` lack (release 1.16: trl/trainer/*_config.py,
# trl/scripts, trl/experimental; those of DPO and KTO that earlier releases had, too).
TRAINERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "PPO": (GENERATES, ("num_ppo_epochs", "response_length", "reward_model_path", "missing_eos_penalty", "rloo_k")),
}
# Keys of trainers that are converted; the last of `OF_PAIRS` may be another one's, too.
OF_GRPO = (
    *("num_generations", "max_completion_length", "use_vllm", "vllm_mode", "num_iterations", "reward_funcs"),
    *("generation_batch_size", "steps_per_generation", "scale_rewards", "reward_weights", "epsilon_high"),
    *("mask_truncated_completions", "log_completions"),
)
OF_GKD = ("teacher_model_name_or_path", "seq_kd", "lmbda")
RLOO, OF_RLOO = "rloo", ("normalize_advantages", "reward_clip_range")
OF_PAIRS: dict[PreferenceLoss, tuple[str, ...]] = {
    "reward": ("center_rewards_coefficient",),
    "kto": (
        *("desirable_weight", "undesirable_weight", "kto_desirable_weight", "kto_undesirable_weight"),
        *("kto_chosen_weight", "kto_rejected_weight"),
    ),
    "dpo": (
        *("precompute_ref_log_probs", "precompute_ref_batch_size", "sync_ref_model", "ref_model_sync_steps"),
        *("f_divergence_type", "f_alpha_divergence_coef", "ld_alpha", "discopop_tau", "rpo_alpha"),
        *("reference_free", "use_weighting", "loss_weights"),
    ),
}
OF_CPO = ("cpo_alpha", "simpo_gamma")  # whose zero is a value
# `loss_type` by trainer, where TRL's SFT has none of the name; CPO has some of DPO's, too.
LOSS_TYPES = {
    **dict.fromkeys(("simpo", "alphapo"), "cpo"),
    **dict.fromkeys(("kto", "apo_zero_unpaired"), "kto"),
    **dict.fromkeys(("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"), "dpo"),
    **dict.fromkeys(("aot", "aot_pair", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm"), "dpo"),
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"), "grpo"),
}
OF_SEVERAL = ("beta", "max_prompt_length", "disable_dropout")
COMMAND = "trl"  # whose next word is an objective
UNSET = (None, False, "false", "False")
PARTS = re.compile(r"[_\-.]")


def objective_of(file: Path, data: Mapping[str, Any]) -> Objective | None:
    """The loss over pairs that a config trains with, or GRPO; None for next tokens.

    Raises:
        InputError: where it trains for something else, naming the key, and what such a step does besides.
    """
    for key in KEYS:
        word = str(data.get(key)).lower()
        of_ppo = word == RLOO and any(data.get(name) not in UNSET for name in TRAINERS["PPO"][1])  # before TRL 0.22
        if word in CONVERTED and not of_ppo:
            return "dpo" if is_simpo(data) else CONVERTED[word]
        if (what := OBJECTIVES.get(word)) is not None:
            raise _error(file, f"{key} {data[key]}", what)
    if isinstance(other := data.get("rl"), str) and other:
        raise _error(file, f"rl {other}", OTHER)
    if key := next((name for name in SWITCHES if data.get(name) is True), ""):
        if SWITCHES[key] in CONVERTED:
            return CONVERTED[SWITCHES[key]]
        raise _error(file, key, OBJECTIVES[SWITCHES[key]])
    _refuse_plugins(file, data)
    for trainer, (what, keys) in TRAINERS.items():
        if key := next((name for name in keys if data.get(name) not in UNSET), ""):
            raise _error(file, OF_TRL.format(key, trainer), what)
    if any(data.get(name) not in UNSET for name in (*OF_GRPO, *OF_RLOO)):
        return "grpo"
    if any(data.get(name) is not None for name in OF_GKD):
        return "gkd"
    if _of_cpo(data):
        return "dpo" if is_simpo(data) else CONVERTED["cpo"]
    for loss, keys in (*OF_PAIRS.items(), ("dpo", OF_SEVERAL)):
        if any(data.get(name) not in UNSET for name in keys):
            return CONVERTED[loss]
    if (what := OBJECTIVES.get(kind := _kind(data))) is not None:
        raise _error(file, f"loss_type {_loss_type(data)}", what)
    return CONVERTED.get(kind)


def is_rloo(data: Mapping[str, Any]) -> bool:
    """Tell whether what `objective_of` calls GRPO is TRL's RLOO, which computes the same with defaults of its own."""
    named = any(str(data.get(key)).lower() == RLOO for key in KEYS)
    return named or any(data.get(name) not in UNSET for name in OF_RLOO)


def _refuse_plugins(file: Path, data: Mapping[str, Any]) -> None:
    listed = data.get("plugins")
    names = " ".join(map(str, listed)) if isinstance(listed, list) else ""
    for word, what in PLUGINS.items():
        if data.get(word) not in UNSET or f".integrations.{word}." in names or data.get(f"{word}_trainer") is True:
            raise _error(file, f"plugin {word}", what)


def is_simpo(data: Mapping[str, Any]) -> bool:
    """Tell whether TRL's CPO trainer trains without its chosen answers' next tokens, as SimPO does: `cpo_alpha` is 0,
    as `alphapo` makes it (trl/experimental/cpo: CPOConfig, `concatenated_forward`)."""
    alpha = data.get("cpo_alpha")
    zero = alpha is not None and str(alpha) not in ("False", "false") and _number(alpha) == 0
    return _of_cpo(data) and (zero or _loss_type(data) == "alphapo")


def _of_cpo(data: Mapping[str, Any]) -> bool:
    """Tell whether TRL's CPO trainer runs, alone or for Axolotl. It computes what its ORPO trainer does: a forward and
    a backward over both halves, the log-probabilities of all labels, and a cross-entropy of the chosen half."""
    named = [str(data[key]).lower() for key in KEYS if data.get(key)]
    if named:
        return bool({*named} & {"cpo", "simpo"})
    return _kind(data) == "cpo" or any(data.get(key) not in (None, "") for key in OF_CPO)


def _loss_type(data: Mapping[str, Any]) -> str:
    """The first of `loss_type`, of which DPO may have several."""
    given = data.get("loss_type")
    return str(given[0] if isinstance(given, list) and given else given)


def _kind(data: Mapping[str, Any]) -> str:
    return LOSS_TYPES.get(_loss_type(data), "")


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def script_objective(file: Path, words: list[str]) -> str | None:
    """The objective that a command's script, or `trl`'s first word, is named after (`dpo.py`, `trl dpo`); None: none.

    Raises:
        InputError: for one that is not converted, naming the script, and what such a step does besides.
    """
    for before, word in pairwise(["", *words]):
        name = word.rpartition("/")[2]
        if not (name.endswith(".py") or before.rpartition("/")[2] == COMMAND):
            continue
        parts = PARTS.split(name)
        if what := next((OBJECTIVES[part] for part in parts if part in OBJECTIVES), None):
            raise _error(file, name, what)
        if found := next((part for part in parts if part in CONVERTED), None):
            return found
    return None


def _error(file: Path, where: str, what: str) -> InputError:
    converted = (
        "training on given texts (sft, pt), on pairs of answers (dpo, orpo, cpo, simpo, reward), on good "
        "and bad ones (kto), with a teacher (gkd), or by GRPO or RLOO"
    )
    return InputError(f"{file}: {where}: {what}; can be converted: {converted}")
