"""Training on pairs of answers with TRL, LLaMA-Factory or Axolotl as `training.preference`.

TRL 1.16: trl/trainer/dpo_trainer.py, reward_trainer.py, trl/experimental/orpo and cpo. CPO's operators are ORPO's, and
those of its SimPO DPO's without a reference, whose loss has all logits at once. LLaMA-Factory: train/dpo/trainer.py and
hparams/finetuning_args.py; its ORPO and SimPO compute no more than DPO without a reference does. Axolotl runs TRL's
trainers (core/trainers/dpo/trainer.py). All count a batch in pairs, and KTO's in answers.
"""

from __future__ import annotations

from typing import Any

from sim.convert.settings import OF_A_PAIR, Settings
from sim.convert.trainer_arguments.objectives import (
    KEYS,
    OF_CPO,
    OF_PAIRS,
    OF_SCRIPT,
    OF_SEVERAL,
    OF_SWIFT,
    SWITCHES,
    Objective,
    is_simpo,
)
from sim.core.errors import InputError
from sim.inputs.training_config import WITH_REFERENCE, PreferenceLoss

TRL_LENGTH = 1024  # trl/trainer/dpo_config.py, reward_config.py, experimental/orpo/orpo_config.py
# By LLaMA-Factory's `pref_loss` (hparams/finetuning_args.py: `use_ref_model`).
WITHOUT_REFERENCE = ("orpo", "simpo")
# Keys that change numbers and no operator of a size that counts.
SMALL = (
    *("beta", "label_smoothing", "loss_weights", "truncation_mode", "max_completion_length", "padding_value"),
    *("pref_beta", "pref_loss", "dpo_label_smoothing", "simpo_gamma", "orpo_alpha", "simpo_margin", "dpo_beta"),
    *("center_rewards_coefficient", "ref_model_mixup_alpha", "padding_free", "rl_beta"),
)
OTHERS = (None, "grpo", "gkd")  # than losses over answers
UNPAIRED = "apo_zero_unpaired"
SEVERAL = "{}: taken for TRL's DPO, as the file names no trainer; KTO, ORPO and others have it, too"
TILES = (
    "log-probabilities are computed in tiles of logits, as TRL 1.16 does; earlier releases had all logits at once "
    "(training.cross_entropy=unfused). Prompts are taken as scored, too, which TRL leaves out"
)
FSDP = (
    "the reference is simulated as FSDP shards the trained model; TRL 1.16 makes one unit of it with FSDP 2, which is "
    "gathered whole, and LLaMA-Factory does not shard it"
)


def with_length(data: dict[str, Any], loss: Objective | None, lengths: tuple[str, ...]) -> dict[str, Any]:
    """The arguments with TRL's own length where a file of its trainers leaves it out."""
    others = ("stage", "base_model", *lengths)
    return data if loss in OTHERS or any(data.get(key) for key in others) else {**data, "max_length": TRL_LENGTH}


def with_pairs(s: Settings, loss: Objective | None, training: dict[str, Any], layout: dict[str, Any]) -> None:
    """Add to `training` what a loss over pairs says of it: nothing for others. Sizes count two sequences a pair."""
    if loss is None or loss == "grpo":
        s.take(OF_SCRIPT)
        return
    if loss == "gkd":  # which has a section of its own
        return
    s.taken |= {
        *KEYS,
        *SWITCHES,
        *OF_PAIRS["dpo"],
        *OF_PAIRS["kto"],
        *OF_SEVERAL,
        *OF_CPO,
        *SMALL,
        OF_SWIFT,
        "loss_type",
        "force_use_ref_model",
    }
    _note_guess(s)
    if loss == "kto":
        _require_others(s)
    else:
        for key in ("micro_batch_size", "global_batch_size"):
            training[key] *= 2
        s.notes.append(OF_A_PAIR)
    training.pop("cross_entropy", None)  # Liger's is for next tokens
    training["preference"] = {"loss": loss, **_reference(s, loss)}
    if s.flag("disable_dropout", default=True) and "lora" in training:  # adapters' own, too
        training["lora"] = {key: value for key, value in training["lora"].items() if key != "dropout"}
    if loss not in WITH_REFERENCE or is_simpo(s.values):
        return
    if s.values.keys().isdisjoint(("finetuning_type", OF_SWIFT)) and layout.get("tp", 1) == 1:
        training["cross_entropy"] = "tiled"
        s.notes.append(TILES)
    whole = "reference" not in training["preference"] and "lora" not in training
    if whole and layout["zero"] == 3 and training["framework"] != "deepspeed":
        s.notes.append(FSDP)


def _require_others(s: Settings) -> None:
    """Refuse KTO's variant that reads no other answers."""
    if str(s.values.get("loss_type")) == UNPAIRED:
        problem = f"found {UNPAIRED}; its models read no other answers, which is not simulated; can be converted: kto"
        raise InputError(f"{s.place('loss_type')}: {problem}")


def _note_guess(s: Settings) -> None:
    given = any(s.values.get(key) is not None for key in (*OF_CPO, "loss_type"))
    named = (
        given
        or any(s.values.get(key) for key in (*KEYS, *SWITCHES))
        or any(s.values.get(key) not in (None, False) for keys in OF_PAIRS.values() for key in keys)
    )
    if not named:
        s.notes.append(SEVERAL.format(next(key for key in OF_SEVERAL if s.values.get(key))))


def _reference(s: Settings, loss: PreferenceLoss) -> dict[str, str]:
    """Where the reference's log-probabilities come from, if not from where they do by default."""
    named = s.take("ref_model") or s.take("ref_model_path")
    if loss not in WITH_REFERENCE:
        return {}
    if is_simpo(s.values):
        return {"reference": "none"}
    if s.flag("precompute_ref_log_probs"):
        return {"reference": "precomputed"}
    if s.flag("reference_free") or s.values.get("pref_loss") in WITHOUT_REFERENCE:
        return {"reference": "none"}
    if s.flag("sync_ref_model"):
        s.notes.append("sync_ref_model: mixing the model into its reference every few hundred steps is not simulated")
    return {"reference": "model"} if named else {}
