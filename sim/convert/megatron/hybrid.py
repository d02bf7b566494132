"""Megatron-LM's hybrid models (pretrain_mamba.py, pretrain_hybrid.py), of which a layer is one thing alone: Mamba 2,
attention, an MLP or experts.

Names and defaults: megatron/training/arguments.py of NVIDIA/Megatron-LM, and in core/ssm mamba_mixer.py and
mamba_hybrid_layer_allocation.py.
"""

from __future__ import annotations

from typing import Any

from sim.convert.settings import Settings
from sim.core.errors import InputError
from sim.inputs.input_source import show
from sim.inputs.model_config import MAX_LAYERS

SCRIPTS = ("pretrain-mamba", "pretrain-hybrid", "mamba-stack-spec", "hybrid-stack-spec")
PATTERNS = ("hybrid-layer-pattern", "hybrid-override-pattern")  # the newer name first
RATIOS = ("hybrid-attention-ratio", "hybrid-mlp-ratio")
MARKS = ("is-hybrid-model", *PATTERNS)  # flags of a hybrid model, besides a share
MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"
KINDS = {  # a layer's letter: its attention and its MLP
    MAMBA: ("state_space", "none"),
    ATTENTION: ("full", "none"),
    MLP: ("none", "dense"),
    EXPERTS: ("none", "experts"),
}
STAGE, PREDICTION = "|", "/"  # what begins the next pipeline stage, and layers that predict further tokens
EXPAND = 2  # times the hidden size: the width of all heads, where their number is not given


def is_hybrid(s: Settings) -> bool:
    """Tell whether the flags describe a hybrid model; shares of 0, the default, do not."""
    shares = [s.number(name, 0.0) for name in RATIOS]
    return any(shares) or any(s.values.get(name) not in (None, False, "none") for name in MARKS)


def take_sizes(s: Settings) -> None:
    """Add the number of layers, and those of each pipeline stage, to the settings where a pattern says them."""
    pattern = _pattern(s)
    if pattern is None:
        return
    stages = pattern.split(STAGE)
    found: dict[str, Any] = {"num-layers": str(sum(map(len, stages)))}
    if modules := _predicting(s, pattern):
        found["mtp-num-layers"] = str(modules)
    if len(stages) > 1:
        found["pipeline-model-parallel-layout"] = STAGE.join("t" * len(stage) for stage in stages)
    s.values = {**found, **s.values}


def kinds_of(s: Settings, model: dict[str, Any]) -> dict[str, Any]:
    """The keys of a model that say what each layer is, and the sizes of Mamba's; `model`: its other keys.

    Raises:
        InputError: for a pattern of another length than the model, or a layer that is not simulated.
    """
    s.taken.update((*MARKS, *RATIOS, "spec", "moe-layer-freq"))
    layers = s.integer("num-layers")
    letters = (_pattern(s) or _by_ratios(s, layers)).replace(STAGE, "")
    if len(letters) != layers:
        name = _name(s)
        raise InputError(f"{s.place(name)}: found {len(letters)} layers; must be as many as --num-layers, {layers}")
    if ATTENTION in letters and "window" in model:
        raise InputError(f"{s.place('window-size')}: windows beside layers of Mamba are not simulated")
    kinds = [KINDS[letter] for letter in letters]
    found: dict[str, Any] = {
        "attention_pattern": [attention for attention, _ in kinds],
        "mlp_pattern": [mlp for _, mlp in kinds],
    }
    return found | ({"state_space": _states(s)} if MAMBA in letters else {})


def _name(s: Settings) -> str:
    return next((name for name in PATTERNS if name in s.values), PATTERNS[0])


def _pattern(s: Settings) -> str | None:
    """The letters of all layers, with marks between stages; None where no pattern is given."""
    name = _name(s)
    given = s.values.get(name)
    if given in (None, "none", True):
        return None
    pattern = str(given).strip("\"' ").partition(PREDICTION)[0]
    unknown = next((letter for letter in pattern if letter not in {*KINDS, STAGE}), None)
    if unknown is not None or not 0 < len(pattern) <= MAX_LAYERS:
        allowed = "M (Mamba 2), * (attention), - (an MLP), E (experts), and | between pipeline stages"
        what = f"found {show(pattern[:40])}; can be simulated: {allowed}; not {show(unknown)}"
        raise InputError(f"{s.place(name)}: {what}")
    return pattern


def _predicting(s: Settings, pattern: str) -> int:
    """The number of modules that predict further tokens, whose layers stand behind the `pattern` of the model's.

    Raises:
        InputError: for a module of other layers than attention and the model's last kind of MLP.
    """
    name, older = _name(s), "mtp-hybrid-override-pattern"
    modules = str(s.values.get(name)).strip("\"' ").split(PREDICTION)[1:]
    own = s.take(older)
    given = [(name, module) for module in modules]
    given += [(older, str(own).strip("\"' "))] if own not in (None, "none") else []
    last = next((letter for letter in reversed(pattern) if letter in (EXPERTS, MLP)), EXPERTS)
    for flag, module in given:
        if module != ATTENTION + last:
            why = f"prediction modules of layers {ATTENTION + last} can be simulated with this model"
            raise InputError(f"{s.place(flag)}: found {show(module)}; {why}")
    return len(modules)


def _by_ratios(s: Settings, layers: int) -> str:
    """The letters by the shares of attention and of MLPs: attention evenly spaced between Mamba's layers, then MLPs in
    place of some of these (`_allocate_auto`)."""
    attention, mlps = (round(layers * (s.number(name, 0.0) or 0.0)) for name in RATIOS)
    states = layers - attention
    letters = _replaced(MAMBA * layers, ATTENTION, states / (attention + 1))
    return _replaced(letters, MLP, (states - mlps) / mlps) if mlps else letters


def _replaced(letters: str, by: str, between: float) -> str:
    """The letters with another in place of a Mamba layer after so many of them in the mean."""
    found, rest = "", between
    for letter in letters:
        replaces = letter == MAMBA and rest < 0.5
        found += by if replaces else letter
        rest += between if replaces else -1 if letter == MAMBA else 0
    return found


def _states(s: Settings) -> dict[str, Any]:
    width = s.size("mamba-head-dim", 64)
    return {
        "heads": s.size("mamba-num-heads", EXPAND * s.integer("hidden-size") // width),
        "head_dim": width,
        "state": s.size("mamba-state-dim", 128),
        "groups": s.size("mamba-num-groups", 8),
        "conv_kernel": s.size("linear-conv-kernel-dim", 4),
        "chunk": 128,
    }
