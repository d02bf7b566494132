"""ms-swift's `megatron sft` and `megatron pt`: Megatron-LM's arguments with a model of the Hub and values for switches.

Names and defaults: swift/megatron/arguments/megatron_args.py of modelscope/ms-swift, November 2026.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sim.convert.megatron.attention import MASKLESS
from sim.convert.megatron.scenario import LISTED, convert_megatron
from sim.convert.named_models import BY_NAME, known_by_name, named_model, with_prediction
from sim.convert.scripts.command_line import SWITCHES, flags_of, words_of
from sim.convert.scripts.script_data import Script, of_words
from sim.convert.settings import OF_A_PAIR, Converted, Machine
from sim.convert.trainer_arguments.adapters import TARGETS
from sim.core.errors import InputError
from sim.inputs.input_source import Source, show
from sim.inputs.model_input import resolve_model

COMMAND = re.compile(r"(?m)(?:^|[\s/])(?:megatron|_megatron/)[ \t]*(sft|pt|rlhf|grpo)(?:\.py)?(?=[\s\\])")
DEFAULTS: dict[str, str] = {
    "bf16": "true",
    "micro-batch-size": "1",
    "global-batch-size": "16",
    "use-distributed-optimizer": "true",
    "recompute-granularity": "selective",
    "attention-backend": "flash",
    "cross-entropy-loss-fusion": "true",
    "apply-rope-fusion": "false",
}
OF_EXPERTS = {
    "moe-grouped-gemm": "true",
    "moe-token-dispatcher-type": "alltoall",
    "expert-tensor-parallel-size": "1",
}
OF_FSDP = {"data-parallel-sharding-strategy": "optim_grads_params"}
# Names of Megatron-Core, which releases since 2026 have, as Megatron-LM's flags; of switches those that turn off.
RENAMED = {
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "microbatch-group-size-per-vp-stage": "microbatch-group-size-per-virtual-pipeline-stage",
}
INVERTED = {
    **{
        f"{name}-fusion": (f"no-{name}-fusion",) for name in ("gradient-accumulation", "masked-softmax", "bias-dropout")
    },
    "bias-activation-fusion": ("no-bias-gelu-fusion", "no-bias-swiglu-fusion"),
    "apply-rope-fusion": ("no-rope-fusion",),
    "overlap-p2p-comm": ("no-overlap-p2p-communication",),
}
LENGTH, NO_RECOMPUTE = "max-length", ("recompute-granularity", "none")
TYPES, LORA = ("tuner-type", "train-type"), "lora"
MODULES = "target-modules"
MCORE_TARGETS = {"linear_qkv": "qkv", "linear_proj": "attention_out", "linear_fc1": "mlp_up", "linear_fc2": "mlp_down"}
# Of data, checkpoints and the vision tower, and the tuner's, which are read here.
OWN = (
    *("model", "load-safetensors", "save-safetensors", "dataset", "load-from-cache-file", "split-dataset-ratio"),
    *("max-epochs", "num-train-epochs", "output-dir", "save-steps", "dataloader-num-workers", "dataset-num-proc"),
    *("eval-steps", "logging-steps", "eval-interval", "save-strategy", "merge-lora", "use-hf", "model-author"),
    *(
        "model-name",
        "model-type",
        "moe-router-dtype",
        "system",
        "lora-alpha",
        "lora-bias",
        "freeze-llm",
        "freeze-vit",
    ),
    *("freeze-aligner", "cached-dataset", "packing-num-proc", "streaming", "lazy-tokenize", "add-version", "template"),
)

# Of pairs (trainers/dpo_trainer.py, rlhf_mixin.py): the reference is a second model or, beside adapters, the trained
# one without them; the other flags are of numbers that a loss multiplies.
OTHER_REFERENCES = ("ref-adapters", "ref-adapter-load", "mcore-ref-adapter")
SMALL = (
    "beta",
    "rpo-alpha",
    "label-smoothing",
    "loss-type",
    "f-divergence-type",
    "ref-load",
    "ref-model",
    "mcore-ref-model",
)
IN_MEGATRON = "-mcore"  # how its examples end a folder of weights that were turned into Megatron's, until release 4


def is_swift_megatron(script: Script) -> bool:
    """Tell whether a script runs ms-swift's trainer with Megatron-Core."""
    return COMMAND.search(script.started) is not None


def convert_swift(file: Path, script: Script, machine: Machine, seq_len: int | None = None) -> Converted:
    """The scenario of the command's arguments.

    Raises:
        InputError: for other objectives than next tokens, an unknown model and a missing length.
    """
    flags = DEFAULTS | flags_of(words_of(script), listed=(*LISTED, MODULES))
    notes: list[str] = []
    in_pairs = _in_pairs(file, script, flags)
    machine = _machine(file, script, machine, flags, notes)
    length = seq_len or flags.pop(LENGTH, None)
    if length is None:
        raise InputError(f"{file}: --max_length: is required and missing: give --seq-len N")
    model = resolve_model(machine.model, Source(str(file), {}), ("model",))
    added = {"seq-length": str(length), "num-layers": str(model.layers)}
    if model.moe is not None:
        added["num-experts"] = str(model.moe.experts)
        flags = OF_EXPERTS | flags
    if SWITCHES.get(str(flags.get("use-megatron-fsdp")).lower()):
        flags = OF_FSDP | flags
    lora, packs = _lora(file, flags), flags.pop("packing", False)
    if packs or SWITCHES.get(str(flags.get("padding-free")).lower()) is not False:
        added[MASKLESS] = "true"  # its default (template/base.py: a 4-dimensional mask without `padding_free` alone)
    read = {name: value for name, value in flags.items() if name not in OWN}
    result = convert_megatron(file, of_words(_command(read | added)), machine)
    predicted = str(flags.get("mtp-num-layers", "0"))  # none by default, whatever the checkpoint has
    if predicted.isdecimal():
        result.scenario["model"] = with_prediction(str(machine.model), int(predicted))
    if lora:
        result.scenario["training"]["lora"] = lora
    if in_pairs:
        for key in ("micro_batch_size", "global_batch_size"):
            result.scenario["training"][key] *= 2
        result.scenario["training"]["preference"] = {"loss": "dpo"}
        notes.append(OF_A_PAIR)
    packed = ["packing: a sequence is simulated as one text; training.packing describes several shorter ones"]
    return replace(result, notes=(*notes, *result.notes, *(packed if packs else ())))


def _in_pairs(file: Path, script: Script, flags: dict[str, Any]) -> bool:
    """Tell whether the command trains on pairs of answers, and take the flags of that.

    Raises:
        InputError: for other objectives than that and next tokens.
    """
    found = COMMAND.search(script.started)
    if found is None or found[1] in ("sft", "pt"):
        return False
    kind = flags.pop("rlhf-type", None)
    if found[1] != "rlhf" or kind != "dpo":
        named = f"{found[1]}{'' if kind is None else f' --rlhf_type {kind}'}"
        raise InputError(f"{file}: megatron {named}: can be converted: sft, pt, and rlhf --rlhf_type dpo")
    if odd := next((name for name in OTHER_REFERENCES if flags.get(name)), None):
        raise InputError(f"{file}: --{odd}: a reference by adapters of its own is not simulated")
    for name in SMALL:
        flags.pop(name, None)
    return True


def _machine(file: Path, script: Script, machine: Machine, flags: dict[str, Any], notes: list[str]) -> Machine:
    """The machine with the number of processes of the command's variables and the model that it names."""
    if machine.gpus is None:
        machine = replace(machine, gpus=processes_of(script))
    named = flags.get("model")
    if machine.model is not None:
        return machine
    weights = str(flags.get("load", "")).rstrip("/").removesuffix(IN_MEGATRON)
    if named is None and (found := known_by_name(weights)) is not None:
        notes.append(BY_NAME.format(f"--load {flags['load']}", found.removeprefix("hf://")).removeprefix("model: "))
        return replace(machine, model=found)
    if not isinstance(named, str):
        raise InputError(f"{file}: does not name the model: give --model NAME")
    return replace(machine, model=named_model(file, f"{file}: model", named, notes))


def processes_of(script: Script) -> int | None:
    """The processes that the launchers of ms-swift and LLaMA-Factory start, by their variables; None without them."""
    each, nodes = script.variable("NPROC_PER_NODE"), script.variable("NNODES") or "1"
    return int(each) * int(nodes) if each and each.isdecimal() and nodes.isdecimal() else None


def _lora(file: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """Adapters, and their flags taken from the others; empty where all parameters are trained.

    Raises:
        InputError: for modules that have no name here.
    """
    kind, rank = [flags.pop(name, None) for name in TYPES], flags.pop("lora-rank", 8)
    dropout = flags.pop("lora-dropout", 0.05)
    words = str(flags.pop(MODULES, "all-linear")).replace(",", " ").split()
    if LORA not in kind:
        return {}
    targets = [(MCORE_TARGETS | TARGETS).get(word) for word in words if word not in ("all-linear", "all-router")]
    if None in targets:
        raise InputError(f"{file}: --{MODULES}: found {show(' '.join(words))}; not all are simulated with adapters")
    if not str(rank).isdecimal():
        raise InputError(f"{file}: --lora-rank: found {show(rank)}; must be a whole number")
    if not re.fullmatch(r"0?\.\d+|0", str(dropout)):
        raise InputError(f"{file}: --lora-dropout: found {show(dropout)}; must be a number from 0 to below 1")
    own = {"rank": int(str(rank)), **({"dropout": float(dropout)} if float(dropout) else {})}
    return {**own, **({"targets": list(dict.fromkeys(targets))} if targets else {})}


def _command(flags: dict[str, Any]) -> str:
    """Megatron-LM's command line: a switch that is on has no value, one that is off is left out."""
    words: list[str] = []
    for given, value in flags.items():
        name, on = RENAMED.get(given, given), SWITCHES.get(str(value).lower())
        if given in INVERTED and on is not None:
            words += [] if on else [f"--{flag}" for flag in INVERTED[given]]
            continue
        if on is False or (name, value) == NO_RECOMPUTE:
            continue
        words += [f"--{name}"] if on or value is True else [f"--{name}", *map(shlex.quote, str(value).split())]
    return " ".join(words)
