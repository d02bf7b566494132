"""Megatron-LM's commands whose flags do not say what is trained."""

from __future__ import annotations

import re
from pathlib import Path

from sim.convert.scripts.command_line import flags_of
from sim.convert.settings import Machine
from sim.core.errors import InputError

# By a training script.
OTHER_MODELS = {
    "pretrain-bert": "an encoder",
    "pretrain-t5": "an encoder and a decoder",
    "pretrain-ict": "two encoders",
    "pretrain-retro": "a model with a retriever",
    "pretrain-vlm": "a model with a vision encoder",
    **dict.fromkeys(
        ("pretrain-vision-classify", "pretrain-vision-dino", "pretrain-vision-inpaint"), "a vision encoder"
    ),
}
GENERATES = re.compile(r"inference|text-generation")  # in a script's name
INFERENCE = ("text is generated, and nothing trained", "a scenario with `inference` describes it (docs/inference.md)")
RL = ("a step of reinforcement learning", "a scenario with `rl` describes it (docs/rl.md)", False)
# Which a model's flags do not describe, so --model replaces them.
OTHERS = {
    **dict.fromkeys(("decoder-num-layers", "decoder-seq-length"), "an encoder and a decoder"),
    "patch-dim": "images, which a vision encoder reads",
    "retro-add-retriever": "a model with a retriever",
}
OF_PATCH = (
    "experts that read each token, by a patch of Megatron-LM",
    "write their width in all as --moe-shared-expert-intermediate-size",
    True,
)
LATENT, OF_LATENT = "multi-latent-attention", ("q-lora-rank", "kv-lora-rank")
# By a flag: what it means, what to do, and whether --model replaces it (training/arguments.py).
ELSEWHERE = {
    "yaml-cfg": ("Megatron-LM takes all arguments from this file", "write them as flags", False),
    **dict.fromkeys(("perform-rl-step", "rollout-batch-size"), RL),  # the latter of THUDM/slime
    "num-tokens-to-generate": (*INFERENCE, False),
    "export-kd-teacher-load": (
        "a teacher reads each sequence, too",
        "a scenario with `distillation` describes it (docs/distillation.md)",
        False,
    ),
    **{name: (what, "give --model", True) for name, what in OTHERS.items()},
    # Of alibaba/Pai-Megatron-Patch (megatron_patch/arguments.py), whose models read them.
    **dict.fromkeys(("num-shared-experts", "enable-shared-expert", "shared-moe-ffn-hidden-size"), OF_PATCH),
    "heterogeneous-layers-config-path": ("each layer has sizes of its own, by this file", "give --model", True),
}


def require_described(file: Path, words: list[str], machine: Machine) -> None:
    """Refuse models that the flags of a GPT do not describe, and flags that put a file, or another kind of step, in
    the place of what the other flags say.

    Raises:
        InputError: naming what is trained instead.
    """
    for word in words if machine.model is None else []:
        if (what := OTHER_MODELS.get(plain_name(word))) is not None:
            name = word.rpartition("/")[2]
            raise InputError(f"{file}: {name} means {what}, which flags do not describe here: give --model config.json")
    if (script := next((word for word in words if _generates(word)), None)) is not None:
        raise InputError(f"{file}: {script.rpartition('/')[2]}: {': '.join(INFERENCE)}")
    given = flags_of(words)
    for name, (what, way, of_model) in ELSEWHERE.items():
        if name in given and not (of_model and machine.model):
            raise InputError(f"{file}: --{name}: {what}: {way}")
    ranks = [name for name in OF_LATENT if name in given]
    if ranks and LATENT not in given and machine.model is None:  # Megatron-LM reads them with that flag alone
        way = f"add --{LATENT} where a patched Megatron-LM computes it without that flag, or leave this one out"
        raise InputError(f"{file}: --{ranks[0]}: a rank of latent attention, without --{LATENT}: {way}")


def _generates(word: str) -> bool:
    return word.endswith(".py") and GENERATES.search(plain_name(word)) is not None


def plain_name(word: str) -> str:
    """A script's name without folder and ending, with `-` for `_`."""
    return word.rpartition("/")[2].replace("_", "-").removesuffix(".py")
