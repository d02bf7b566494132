"""DeepSpeed's JSON and Transformers' `TrainingArguments` as a scenario.

DeepSpeed: https://www.deepspeed.ai/docs/config-json/. TrainingArguments: the fields of transformers' class, as JSON or
YAML, `deepspeed` among them as a mapping or a file's name. Neither names the model or the sequence length: options do.
TRL's, LLaMA-Factory's and Axolotl's files have keys of their own for both, and for LoRA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sim.convert.named_models import named_model, with_prediction
from sim.convert.settings import FSDP_ON_HOST, Converted, Machine, Settings
from sim.convert.trainer_arguments.adapters import adapters, adapters_within
from sim.convert.trainer_arguments.axolotl import degrees, plain_names, require_ranks, shards, version_notes
from sim.convert.trainer_arguments.deepspeed_settings import OWN, settings_of
from sim.convert.trainer_arguments.deepspeed_zero import offload_of, zero_of
from sim.convert.trainer_arguments.dtypes import casts_shards, numbers_of
from sim.convert.trainer_arguments.fsdp import by_second_fsdp, of_fsdp
from sim.convert.trainer_arguments.llama_factory import is_llama_factory, refuse_other_use, with_tuner
from sim.convert.trainer_arguments.objectives import objective_of
from sim.convert.trainer_arguments.preferences import with_length, with_pairs
from sim.convert.trainer_arguments.trl import forces_reentrant, is_trl, loss_in_tiles
from sim.core.errors import InputError
from sim.inputs.model_input import load_model
from sim.variants.frameworks.records import framework_at

# Of TRL's configs, LLaMA-Factory's, FastChat's, of Transformers' run_clm.py and of DeepSpeed's examples.
LENGTHS = ("max_length", "max_seq_length", "cutoff_len", "model_max_length", "block_size", "max_seq_len")
PACKING = ("packing", "sample_packing")  # of TRL and LLaMA-Factory, of Axolotl
WITHIN_PACKING = ("padding_free", "pad_to_sequence_len", "neat_packing", "packing_strategy")
CHECKPOINTING = "activation_checkpointing"  # by Transformers 5.24 and later, which keep gradient_checkpointing
FULL_LENGTH = "every sequence is simulated at full length; without packing, shorter texts take less time"
MICRO_BATCH = 8  # TrainingArguments' default
# Keys of which a file of these trainers has at least one.
MARKS = (
    *(*OWN, "deepspeed", "fsdp", "fsdp_config", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("gradient_clipping", "output_dir", "learning_rate", "num_train_epochs", "model_name_or_path", "base_model"),
    *("optimizer", "scheduler", "bf16", "fp16", *LENGTHS),
)
# Of TrainingArguments, of LLaMA-Factory, of Axolotl's two plugins.
LIGER = ("use_liger_kernel", "enable_liger_kernel", "liger_fused_linear_cross_entropy", "cut_cross_entropy")
CCE = "cut_cross_entropy"
OF_LIGER = "its loss is simulated, its other kernels are those of separate operators"
OF_CCE = (
    "simulated as a loss in chunks, whose forward keeps the gradient; Cut Cross-Entropy computes the logits once more "
    "in the backward, so its step takes longer by one output matmul"
)
FUSED = ("auto", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
ATTENTION = {"eager": "unfused", **dict.fromkeys(FUSED, "fused")}  # by AutoModel's `attn_implementation`
# By a word in the optimizer's name.
OPTIMIZERS = {
    "sgd": "sgd",
    "muon": "muon",
    "adafactor": "adafactor",
    "ademamix": "ademamix",
    "lion": "lion",
    "adam": "adamw",
}
EIGHT_BITS = "8bit"
ADAMW_KERNELS = {"adamw_torch": "foreach", "adamw_torch_fused": "fused"}
OTHER_STATES = {  # of optimizers with Adam in their names
    **dict.fromkeys(("galore", "apollo"), "of a low rank"),
    "4bit": "4 bits",
    "fp8": "8 bits",
    "mini": "one second moment a block",
    "schedule_free": "one moment, two weights",
}
# TRL's activation_offloading, and Axolotl's, which may go to a disk too.
ON = dict.fromkeys(("True", "true", "legacy", "hidden_states"), True) | dict.fromkeys(("False", "false"), False)
PAGED = (
    "optimizer paged_…: its states are counted on the GPU; they lie in CUDA's managed memory, outside torch's "
    "allocator, and what does not fit goes to the host (bitsandbytes, optim/optimizer.py: get_state_buffer)"
)
LOGGED_NORM = (
    "max_grad_norm: 0 does not save the norm: since release 5.3 Transformers' Trainer computes it for its log, and "
    "scales all gradients by one; for earlier releases set training.gradient_clipping=false"
)
REENTRANT_COMPILED = (
    "use_reentrant: with torch_compile simulated as torch's other checkpoint, which the compiler takes into its graph"
)


def is_training_arguments(data: dict[str, Any]) -> bool:
    """Tell whether a mapping is a config of DeepSpeed, or has `TrainingArguments`."""
    return any(mark in data for mark in MARKS)


def convert_deepspeed(file: Path, data: dict[str, Any], machine: Machine, seq_len: int | None) -> Converted:
    """A scenario from either of the two, which share their keys' meaning.

    Raises:
        InputError: where model, sequence length or number of GPUs are missing, or the file that `deepspeed` names, and
            for a step that trains for something else than next tokens.
    """
    refuse_other_use(file, data)
    data, said = with_tuner(data)
    loss = objective_of(file, data)
    s, by_deepspeed = settings_of(file, plain_names(with_length(data, loss, LENGTHS)))
    s.notes += [*version_notes(data), *said]
    machine = _named_model(s, machine)
    length = _length(s, machine, seq_len)
    split = degrees(s)
    tp, cp = split.get("tp", 1), split.get("cp", 1)
    dp = s.ranks(None, machine, tp * cp, "tensor_parallel_size · context_parallel_size")
    require_ranks(s, split.get("ep", 1), dp)
    sizes = _batch(s, dp)
    layout, recomputes = ({}, False) if by_deepspeed else of_fsdp(s, machine, sizes, dp)
    casts = not by_deepspeed and casts_shards(data, layout)
    training = {"seq_len": length, **sizes, **_training(s, by_deepspeed, recomputes, casts)}
    if by_deepspeed:
        layout = zero_of(s, machine, training)
    model = _adapted(s, machine.model, training)
    if tp > 1 and training.pop("cross_entropy", None):
        s.notes.append("the loss in chunks is not simulated with tensor parallelism: all logits are, at once")
    if layout.pop("offload", False):
        training |= FSDP_ON_HOST if layout["zero"] == 3 else {"optimizer_offload": "cpu"}
    if s.flag("fp8"):
        _in_8_bits(s, training, layout)
    layout = {"dp": dp, **split, **layout, **shards(s, layout, cp)}
    training |= loss_in_tiles(s, training, tp) if loss is None else {}
    with_pairs(s, loss, training, layout)
    sections = {"model": model, "training": training, "parallelism": layout}
    return s.converted("deepspeed", machine, sections)


def _named_model(s: Settings, machine: Machine) -> Machine:
    """The machine with the model that TRL's, LLaMA-Factory's or Axolotl's file names, where the user names none.

    Raises:
        InputError: for a model that nothing describes.
    """
    named = s.take("model_name_or_path")
    if machine.model is not None or not isinstance(named, str):
        return machine
    return replace(machine, model=named_model(s.file, f"{s.file}: model", named, s.notes))


def _adapted(s: Settings, model: str | None, training: dict[str, Any]) -> Any:
    """The model that adapters stand in; `training` gets those that it has modules for. Transformers
    drops a checkpoint's modules of multi-token prediction (`_keys_to_ignore_on_load_unexpected`)."""
    if "lora" not in training or model is None:
        return model
    training["lora"] = adapters_within(s, training["lora"], load_model(model))
    return with_prediction(model, 0)


def _length(s: Settings, machine: Machine, seq_len: int | None) -> int:
    """The sequence length: the user's, or the file's.

    Raises:
        InputError: where nobody names it, or the model.
    """
    lengths = [s.whole(name) for name in LENGTHS]
    length = seq_len or next((x for x in lengths if x), None)
    if machine.model is None or length is None:
        what = "model: give --model NAME" if machine.model is None else "sequence length: give --seq-len N"
        raise InputError(f"{s.file}: does not name the {what}")
    if any(lengths):
        _note_lengths(s)
    return length


def _in_8_bits(s: Settings, training: dict[str, Any], layout: dict[str, Any]) -> None:
    """torchao's matmuls with a scale for each tensor, as Accelerate has them by default: LLaMA-Factory
    (train/fp8_utils.py), Axolotl (monkeypatch/trainer_accelerator_args.py)."""
    backend = str(s.take("fp8_backend", "auto"))
    if backend not in ("auto", "torchao") or training["precision"] != "bf16" or "lora" in training:
        s.notes.append(f"fp8 (backend {backend}): matmuls are simulated in {training['precision']}")
        return
    training |= {"precision": "fp8", "fp8_recipe": "tensorwise"}
    if layout["zero"] == 3 and not s.flag("fp8_enable_fsdp_float8_all_gather"):
        layout["param_gather_dtype"] = "bf16"


def _training(s: Settings, by_deepspeed: bool, recomputes: bool, casts: bool) -> dict[str, Any]:
    """All but sizes; `recomputes`: so says `fsdp_config`; `casts`: FSDP's parameters are cast to fp32."""
    lora = adapters(s)
    old = s.flag("gradient_checkpointing") and not isinstance(s.values.get(CHECKPOINTING), bool)
    recomputed = [recomputes, old, _by_sections(s), _by_default(s)]
    kwargs = _of_checkpoint(s)
    if lora is not None and by_deepspeed and forces_reentrant(s):
        kwargs = {**kwargs, "use_reentrant": True}
    framework, offloads = _framework(s, by_deepspeed), s.choice("activation_offloading", ON, "false")
    training = {
        **numbers_of(s, by_deepspeed, lora, casts),
        "gradient_clipping": _clips(s, by_deepspeed),
        "framework": framework,
        "attention": s.choice(*_attention(s), "auto") or "fused",
        "recompute": _recompute(s, any(recomputed), framework, kwargs),
        **_optimizer(s, by_deepspeed),
        **offload_of(s.values.get("zero_optimization")),
        **({"activation_offload": True} if offloads or (any(recomputed) and kwargs.get("offload")) else {}),
        **({} if lora is None else {"lora": lora}),
    }
    if liger := [name for name in LIGER if s.flag(name)]:
        training["cross_entropy"] = "chunked"
        s.notes.append(f"{liger[0]}: {OF_CCE if liger == [CCE] else OF_LIGER}")
    return training


def _clips(s: Settings, by_deepspeed: bool) -> bool:
    """Whether gradients get a norm and are scaled by it; both defaults are 1 (runtime/constants.py, training_args.py).

    Transformers' Trainer, since release 5.3, clips to infinity where `max_grad_norm` is 0, for the norm that it logs:
    Accelerate takes the norm and scales all gradients by one (trainer.py: `_get_grad_norm`). DeepSpeed tells its own.
    """
    clips = (s.number("gradient_clipping", s.number("max_grad_norm", 1.0)) or 0.0) > 0
    s.notes += [] if clips or by_deepspeed else [LOGGED_NORM]
    return clips or not by_deepspeed


def _by_sections(s: Settings) -> bool:
    """Whether `activation_checkpointing` asks for recomputation: Axolotl's switch, or DeepSpeed's section, which
    configures calls of `deepspeed.checkpointing` in the model's code. Transformers' models have none."""
    asked = s.flag("activation_checkpointing")
    if not (asked and isinstance(s.values["activation_checkpointing"], dict)):
        return asked
    by_trainer = "per_device_train_batch_size" in s.values
    said = "of no effect on Transformers' models, which gradient_checkpointing recomputes"
    taken = "taken for full recomputation; the model's code decides it"
    s.notes.append(f"activation_checkpointing: {said if by_trainer else taken}")
    return not by_trainer


def _of_checkpoint(s: Settings) -> dict[str, Any]:
    """The arguments of the checkpoint; the older name is an alias, read where the newer is not set
    (transformers/training_args.py of 5.24)."""
    older, newer = (s.take(f"{name}_kwargs") for name in ("gradient_checkpointing", CHECKPOINTING))
    given = older if newer is None else newer
    if isinstance(given, dict) and given.get("selective"):
        s.notes.append("selective, of the checkpoint: whole layers are simulated as recomputed")
    return given if isinstance(given, dict) else {}


def _recompute(s: Settings, asked: bool, framework: str, kwargs: dict[str, Any]) -> Any:
    """Full, of every n-th layer (`every_n_layers`), or none; by torch's reentrant checkpoint, which runs the whole
    forward again, where the file asks for it, and by default in LLaMA-Factory (hparams/model_args.py:
    `use_reentrant_gc`), except with FSDP2 (model_utils/checkpointing.py: `prepare_model_for_training`). Beside
    torch.compile a note says that it is not simulated."""
    reentrant = kwargs.get("use_reentrant") is True
    if is_llama_factory(s.values):
        reentrant = s.flag("use_reentrant_gc", default=True) and not by_second_fsdp(s)
    if not asked:
        return "none"
    found: dict[str, Any] = {"every": each} if type(each := kwargs.get("every_n_layers")) is int and each > 1 else {}
    if reentrant and framework_at(framework, None).uses_torch_compile:
        s.notes.append(REENTRANT_COMPILED)
    elif reentrant:
        found["early_stop"] = False
    return {"mode": "full", **found} if found else "full"


def _attention(s: Settings) -> tuple[str, dict[str, str]]:
    """The key that names the implementation of attention, and its words."""
    if is_llama_factory(s.values):  # llamafactory/model/model_utils/attention.py
        return "flash_attn", {"disabled": "unfused", **dict.fromkeys(("auto", "sdpa", "fa2", "fa3"), "fused")}
    return "attn_implementation", ATTENTION


def _by_default(s: Settings) -> bool:
    """Whether activations are recomputed without being asked: by LLaMA-Factory (model_utils/checkpointing.py), and by
    TRL since it has `max_length` (trl/trainer/sft_config.py)."""
    if is_llama_factory(s.values):
        return not s.flag("disable_gradient_checkpointing")
    said = isinstance(s.values.get(CHECKPOINTING), bool) or s.take("gradient_checkpointing") is not None
    if not is_trl(s) or said:
        return False
    s.notes.append("gradient_checkpointing: on, as TRL has it by default since mid-2025; before it was off")
    return True


def _note_lengths(s: Settings) -> None:
    """Say what is taken for the lengths of a data set's texts."""
    s.taken.update(WITHIN_PACKING)
    if {name for name in PACKING if s.flag(name)}:  # all are asked for, so that none is reported
        s.notes.append("packing: a sequence is simulated as one text; training.packing describes several shorter ones")
    else:
        s.notes.append(FULL_LENGTH)


def _batch(s: Settings, dp: int) -> dict[str, int]:
    """Sizes of batches. What is left out follows from the others (deepspeed/runtime/config.py:
    `_set_batch_related_parameters`), and all three must agree (`_batch_assertion`)."""
    accumulated, whole = s.size("gradient_accumulation_steps", 1), s.whole("train_batch_size")
    of_arguments = s.whole("per_device_train_batch_size")
    micro = s.whole("train_micro_batch_size_per_gpu") or of_arguments
    if micro is None and whole is not None:
        micro = max(1, whole // (dp * accumulated))
    if whole and micro and "gradient_accumulation_steps" in s.values and whole != micro * accumulated * dp:
        product = f"{micro} · {accumulated} · {dp} = {micro * accumulated * dp}"
        why = f"micro-batch · gradient_accumulation_steps · ranks = {product}: change one, or leave one out"
        raise InputError(f"{s.file}: train_batch_size: found {whole}; must be {why}")
    if micro is None:
        micro = MICRO_BATCH
        s.notes.append(f"the file gives no micro-batch: {MICRO_BATCH}, Transformers' default")
    return {"micro_batch_size": micro, "global_batch_size": whole or micro * accumulated * dp}


def _framework(s: Settings, by_deepspeed: bool) -> str:
    compiled = s.flag("torch_compile") or (isinstance(c := s.take("compile"), dict) and bool(c.get("deepcompile")))
    if by_deepspeed and compiled:
        s.notes.append("torch_compile: with DeepSpeed separate operators are simulated")
    return "deepspeed" if by_deepspeed else "transformers_compiled" if compiled else "transformers"


def _optimizer(s: Settings, by_deepspeed: bool) -> dict[str, Any]:
    """AdamW, where no other name is given; 8-bit moments (bitsandbytes); torch's kernels (transformers/trainer.py:
    `_get_adamw_torch` passes `fused` for one name alone)."""
    section, argument = s.take("optimizer", {}), s.take("optim", "")
    own = section.get("type") if isinstance(section, dict) else section
    name = str(own or argument).lower()  # DeepSpeed's own goes first (integrations/deepspeed.py)
    name = "muon" if s.flag("use_muon") else name  # LLaMA-Factory's
    found = next((ours for word, ours in OPTIMIZERS.items() if word in name), None)
    if name and found is None:
        s.notes.append(f"optimizer {name}: is simulated as AdamW")
    if special := next((word for word in OTHER_STATES if word in name), ""):
        s.notes.append(f"optimizer {name}: its states ({OTHER_STATES[special]}) are simulated as AdamW's")
    s.notes += [PAGED] if name.startswith("paged_") and not by_deepspeed else []
    kernels = None if by_deepspeed else ADAMW_KERNELS.get(name)
    return {
        "optimizer": found or "adamw",
        **({"optimizer_dtype": "int8"} if EIGHT_BITS in name else {}),
        **({"adamw_kernels": kernels} if kernels else {}),
    }
