"""Files and commands of TRL, LLaMA-Factory and Axolotl that train on pairs of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.inputs.scenario import parse_scenario
from tests.sim.convert.converting import converted

TRL = "model_name_or_path: llama3.2-1b\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
FACTORY = "model_name_or_path: llama3.2-1b\nstage: dpo\ncutoff_len: 512\nper_device_train_batch_size: 2\nbf16: true\n"
FACTORY += "finetuning_type: {}\ntemplate: llama3\n"
AXOLOTL = "base_model: llama3.2-1b\nsequence_len: 512\nmicro_batch_size: 2\n"
COMMAND = "accelerate launch {} --model_name_or_path llama3.2-1b --per_device_train_batch_size 2 --learning_rate 1e-6\n"
BEFORE = "precompute_ref_log_probs: true"
MACHINE = ("--cluster", "dgx-h100", "--gpus", "8", "--model", "llama3.2-1b")


@pytest.mark.parametrize(
    ("name", "text", "preference", "reference", "loss"),
    [
        (
            "a.yaml",
            TRL + "precompute_ref_log_probs: true",
            {"loss": "dpo", "reference": "precomputed"},
            "precomputed",
            1,
        ),
        ("a.yaml", TRL + "ld_alpha: 0.5", {"loss": "dpo"}, "model", 1),
        ("a.yaml", TRL + "ld_alpha: 0.5\nuse_peft: true", {"loss": "dpo"}, "adapters_off", 1),
        ("a.yaml", TRL + "center_rewards_coefficient: 0.01", {"loss": "reward"}, "none", 0),
        ("a.sh", COMMAND.format("trl/scripts/dpo.py"), {"loss": "dpo"}, "model", 1),
        ("a.sh", COMMAND.format("examples/scripts/orpo.py"), {"loss": "orpo"}, "none", 0),
        ("a.sh", COMMAND.format("reward_modeling.py"), {"loss": "reward"}, "none", 0),
        ("a.sh", COMMAND.replace("accelerate launch {}", "trl reward"), {"loss": "reward"}, "none", 0),
        ("a.yaml", FACTORY.format("full"), {"loss": "dpo"}, "model", 0),
        ("a.yaml", FACTORY.format("lora"), {"loss": "dpo"}, "adapters_off", 0),
        ("a.yaml", FACTORY.format("lora") + "ref_model: a/b", {"loss": "dpo", "reference": "model"}, "model", 0),
        ("a.yaml", FACTORY.format("full") + "pref_loss: simpo", {"loss": "dpo", "reference": "none"}, "none", 0),
        ("a.yaml", AXOLOTL + "rl: ipo", {"loss": "dpo"}, "model", 1),
        ("a.yaml", AXOLOTL + "rl: kto\nkto_desirable_weight: 0.2", {"loss": "kto"}, "model", 1),
        ("a.yaml", TRL + "desirable_weight: 1.0", {"loss": "kto"}, "model", 1),
        ("a.yaml", TRL + "loss_type: kto\nuse_peft: true", {"loss": "kto"}, "adapters_off", 1),
        ("a.sh", COMMAND.replace("accelerate launch {}", "trl kto"), {"loss": "kto"}, "model", 1),
        ("a.yaml", FACTORY.format("lora").replace("dpo", "kto"), {"loss": "kto"}, "adapters_off", 0),
        ("a.yaml", AXOLOTL + "rl: orpo", {"loss": "orpo"}, "none", 0),
        ("a.yaml", AXOLOTL + "rl: simpo\nsimpo_gamma: 0.5", {"loss": "orpo"}, "none", 0),
        ("a.yaml", AXOLOTL + "rl: simpo\ncpo_alpha: 0", {"loss": "dpo", "reference": "none"}, "none", 0),
        ("a.yaml", TRL + "cpo_alpha: 1.0", {"loss": "orpo"}, "none", 0),
        ("a.yaml", TRL + "loss_type: simpo\ncpo_alpha: 0.0", {"loss": "dpo", "reference": "none"}, "none", 0),
        ("a.yaml", TRL + "loss_type: alphapo", {"loss": "dpo", "reference": "none"}, "none", 0),
        ("a.yaml", TRL + "loss_type: simpo", {"loss": "orpo"}, "none", 0),
        ("a.yaml", TRL + "loss_type: [sigmoid, sft]", {"loss": "dpo"}, "model", 1),
        ("a.sh", COMMAND.format("examples/scripts/cpo.py"), {"loss": "orpo"}, "none", 0),
        (
            "a.sh",
            COMMAND.format("examples/scripts/cpo.py").rstrip() + " --loss_type simpo --cpo_alpha 0.0",
            {"loss": "dpo", "reference": "none"},
            "none",
            0,
        ),
        ("a.yaml", AXOLOTL + "reward_model: true", {"loss": "reward"}, "none", 0),
    ],
)
def test_pairs_are_converted(
    tmp_path: Path, name: str, text: str, preference: dict[str, Any], reference: str, loss: int
) -> None:
    """Batches of two pairs have four sequences, on eight ranks; KTO's are of single answers."""
    data, notes = converted(tmp_path, name, text, *MACHINE)
    t = parse_scenario(data).for_training
    assert data["training"]["preference"] == preference
    assert t.reference == reference
    size = 2 if preference["loss"] == "kto" else 4
    assert t.micro_batch_size == size
    assert t.global_batch_size % (8 * size) == 0
    assert data["training"].get("cross_entropy") == ("tiled" if loss else None)
    assert ("each pair of answers counts as two sequences" in notes) == (size == 4)
    assert "not expressed" not in notes


def test_trl_s_length_and_dropout(tmp_path: Path) -> None:
    """trl/trainer/dpo_config.py: `max_length` 1024, `disable_dropout` true, which is of adapters, too."""
    lora = TRL + "ld_alpha: 0.5\nuse_peft: true\n"
    data, _ = converted(tmp_path, "a.yaml", lora, *MACHINE)
    assert data["training"]["seq_len"] == 1024
    assert "dropout" not in data["training"]["lora"]
    data, _ = converted(tmp_path, "a.yaml", lora + "disable_dropout: false\nmax_length: 512\n", *MACHINE)
    assert data["training"]["seq_len"] == 512
    assert data["training"]["lora"]["dropout"] == 0.05


def test_a_key_of_several_trainers_is_taken_for_dpo_and_said(tmp_path: Path) -> None:
    data, notes = converted(tmp_path, "a.yaml", TRL + "max_length: 512\nbeta: 0.1\n", *MACHINE)
    assert data["training"]["preference"] == {"loss": "dpo"}
    assert "beta: taken for TRL's DPO" in notes
