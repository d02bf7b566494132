"""verl's fine-tuning: `torchrun -m verl.trainer.sft_trainer key=value …` or its whole YAML, and `fsdp_sft_trainer` of
releases before 0.7.

Names and defaults: verl 0.9.1, trainer/config/sft_trainer_engine.yaml, whose engines are those of reinforcement
learning and whose loss is their log-probabilities (workers/utils/losses.py: `sft_loss`); train_batch_size counts texts
of all replicas (trainer/sft_trainer.py). Before: verl 0.6, trainer/config/sft_trainer.yaml and fsdp_sft_trainer.py,
which splits a batch into micro-batches of `micro_batch_size_per_gpu` texts, pads them without
`use_remove_padding` and computes torch's loss of all logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sim.convert.named_models import named_model, with_prediction
from sim.convert.scripts.command_line import flags_of, words_behind, words_of
from sim.convert.scripts.script_data import Script
from sim.convert.settings import FSDP_ON_HOST, Converted, Machine, Settings
from sim.convert.trainer_arguments.scenario import FULL_LENGTH
from sim.convert.verl_files import as_usual, named_config, option_of, settings_of, typed_word
from sim.convert.verl_megatron import by_megatron
from sim.convert.verl_trained import (
    OF_FLASH,
    OF_PPO,
    Places,
    fused_loss,
    layout_of_fsdp,
    packed,
    trained_by_megatron,
    training_of_fsdp,
)
from sim.core.errors import InputError

MODULES = ("verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray", "verl.trainer.fsdp_sft_trainer")
CONFIG = "--config-name"
OWN = "sft_trainer"  # verl's own configs are called so
PARTIAL = "model.partial_pretrain"  # the model of releases before 0.7
BATCH, EACH, LENGTH, DYNAMIC = (
    f"data.{key}" for key in ("train_batch_size", "micro_batch_size_per_gpu", "max_length", "use_dynamic_bsz")
)
TOKENS = "data.max_token_len_per_gpu"
PADDED = "use_remove_padding"
OF_SFT = Places(
    engine=("engine", "engine.strategy"),
    fsdp="engine",
    megatron="engine",
    ulysses="engine.ulysses_sequence_parallel_size",
    optimizer="optim",
    model="model",
)
BEFORE = Places(
    engine=("model.strategy",),
    fsdp="model.fsdp_config",
    megatron="",
    ulysses="ulysses_sequence_parallel_size",
    optimizer="optim",
    model="model",
)
GROUPS = ("engine", "optim", "model")  # choices of a section's file, as Hydra has them (`engine=megatron`)
PADS = "without use_remove_padding texts are padded to data.max_length, and simulated so"


def is_verl_sft(script: Script) -> bool:
    """Tell whether a script has verl's command of fine-tuning."""
    return any(module in script.started for module in MODULES)


def is_verl_sft_config(data: Mapping[str, Any]) -> bool:
    """Tell whether a mapping is a config of verl's fine-tuning."""
    of_data, model = data.get("data"), data.get("model")
    if not (isinstance(of_data, dict) and isinstance(model, dict)):
        return False
    named = "partial_pretrain" in model or ("path" in model and isinstance(data.get("engine"), dict))
    return named and bool({"train_batch_size", "micro_batch_size_per_gpu", "max_length"} & of_data.keys())


def convert_verl_sft(file: Path, script: Script, machine: Machine) -> Converted:
    """The scenario of a command's arguments.

    Raises:
        InputError: where the number of GPUs is nowhere stated, for an unknown model, and for sizes that do not divide.
    """
    words = words_of(script)
    module = next((name for name in MODULES if name in words), MODULES[0])
    behind = words_behind(file, words, module)
    pairs = [word.lstrip("+").split("=", 1) for word in behind if "=" in word and not word.startswith(("-", "~"))]
    values, inherited, notes = {key: typed_word(value) for key, value in pairs}, list[str](), list[str]()
    name = option_of(behind, CONFIG)
    if name and not name.startswith(OWN):
        config, inherited, note = named_config(file, script, name)
        values, notes = config | values, [note] if note else []
    s = Settings(file, values, text=script.text, notes=notes)
    gpus = machine.gpus or _launched(flags_of(words))
    return _converted(s, replace(machine, gpus=gpus), inherited, module == MODULES[2] or PARTIAL in values)


def convert_verl_sft_config(file: Path, data: Mapping[str, Any], machine: Machine) -> Converted:
    """The scenario of a whole config.

    Raises:
        InputError: as `convert_verl_sft` does.
    """
    values, inherited = settings_of(file, data)
    return _converted(Settings(file, values), machine, inherited, PARTIAL in values)


def _launched(flags: Mapping[str, Any]) -> int | None:
    """The processes that torchrun's arguments start."""
    each, nodes = (str(flags.get(name, default)) for name, default in (("nproc-per-node", ""), ("nnodes", "1")))
    return int(each) * int(nodes) if each.isdecimal() and nodes.isdecimal() else None


def _converted(s: Settings, machine: Machine, inherited: list[str], before: bool) -> Converted:
    at = BEFORE if before else OF_SFT
    s.values = {key: value for key, value in s.values.items() if key not in GROUPS or key in at.engine}
    megatron = trained_by_megatron(s.file, s.values, at, inherited)
    gpus = machine.gpus or _stated(s)
    s.taken |= {*at.engine, PARTIAL, "model.path", "trainer.nnodes", "trainer.n_gpus_per_node"}
    model = machine.model or _model(s, before)
    machine = replace(machine, model=model, gpus=gpus)
    batch, length = s.size(BATCH, 256), s.size(LENGTH, 1024)
    sizes = {"seq_length": length, "micro_batch_size": 1, "global_batch_size": batch}
    if megatron:
        s.take("model.enable_gradient_checkpointing")  # of FSDP alone
        training, parallelism = by_megatron(s, at, machine, sizes)
    else:
        parallelism = layout_of_fsdp(s, at, gpus, "fsdp2" if before else "fsdp")
        training = {"seq_len": length, "micro_batch_size": 1, "global_batch_size": batch}
        training |= training_of_fsdp(s, at) | {"gradient_clipping": True, **(_before(s) if before else OF_FLASH)}
    if not before:
        training |= fused_loss(s, at, parallelism)
    training["micro_batch_size"] = _micro_batch(s, length, batch, parallelism, before)
    s.notes.append(PADS if before and not s.flag(PADDED) else FULL_LENGTH)
    s.taken |= _usual(s, at, megatron)
    trained = model if s.flag("model.mtp.enable") else with_prediction(model, 0)
    return s.converted("verl_sft", machine, {"model": trained, "training": training, "parallelism": parallelism})


def _stated(s: Settings) -> int:
    """GPUs by the config, which Ray's trainer starts (sft_trainer_ray.py).

    Raises:
        InputError: where it says none.
    """
    if (each := s.whole("trainer.n_gpus_per_node")) is None:
        raise InputError(f"{s.file}: does not say how many GPUs it runs on: give --gpus N")
    return each * s.size("trainer.nnodes", 1)


def _model(s: Settings, before: bool) -> str:
    key = PARTIAL if before else "model.path"
    if (named := s.take(key)) is None:
        raise InputError(f"{s.file}: {key}: is required and missing; or give --model")
    return named_model(s.file, s.place(key), str(named), s.notes)


def _before(s: Settings) -> dict[str, Any]:
    """What releases before 0.7 had otherwise: `CPUOffload(offload_params)`, and torch's loss under autocast."""
    on_host = all([s.flag("model.fsdp_config.cpu_offload"), s.flag("model.fsdp_config.offload_params")])
    return {"cross_entropy": "unfused", **(FSDP_ON_HOST if on_host else {})}


def _micro_batch(s: Settings, length: int, batch: int, parallelism: Mapping[str, Any], before: bool) -> int:
    """Texts of a micro-batch; of one by tokens those of full length.

    Raises:
        InputError: where a replica's share of the batch is not whole micro-batches.
    """
    replicas, cp = int(parallelism["dp"]), int(parallelism.get("cp", 1))
    if not before and s.flag(DYNAMIC, True):
        s.take(EACH)
        return packed(s, s.size(TOKENS, 8192) * cp, length, batch, replicas, "max_token_len_per_gpu")
    s.take(TOKENS)
    given = s.size(EACH, 4)
    if batch % (given * replicas):
        problem = f"found {given}; data.train_batch_size, {batch}, must be a multiple of it times {replicas} replicas"
        raise InputError(f"{s.place(EACH)}: {problem}")
    return given


def _usual(s: Settings, at: Places, megatron: bool) -> set[str]:
    """The names of settings that say what verl's engines do anyhow, by those of reinforcement learning."""
    sections = {f"{at.optimizer}.": f"{OF_PPO.optimizer}.", f"{at.model}.": f"{OF_PPO.model}."}
    if at.fsdp == "engine":
        sections["engine."] = f"{OF_PPO.megatron if megatron else OF_PPO.fsdp}."
    theirs = {
        there + name.removeprefix(own): name
        for name in s.values
        for own, there in sections.items()
        if name.startswith(own)
    }
    return {theirs[name] for name in as_usual(s.file, {name: s.values[own] for name, own in theirs.items()})}
