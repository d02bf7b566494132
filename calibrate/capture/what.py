"""Finds the step to capture: a Hugging Face config, a function of a package, or a row of a table."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from calibrate.capture.step import Step
from sim.core.errors import InputError
from sim.core.files import read_json


@dataclass(frozen=True, slots=True)
class Options:
    """How a Hugging Face model is trained; a function of your own decides this itself."""

    seq_len: int = 1024
    micro_batch_size: int = 1
    weights: str = "fp32"
    autocast: str = ""
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    optimizer: str = "adamw"
    lora_rank: int | None = None
    clip_grad_norm: float | None = 1.0
    compiled: bool = False


def maker(what: str, options: Options) -> Callable[[], Step]:
    """Return the function that makes the step."""
    path = Path(what)
    if path.is_dir() or what.endswith(".json"):
        return huggingface_maker(_config_of(path / "config.json" if path.is_dir() else path), options)
    module, found, name = what.partition(":")
    if not found or not name:
        raise InputError(f"WHAT: found {what!r}; allowed: a config.json, its folder, or package.module:function")
    return function_maker(module, name)


def function_maker(module: str, name: str) -> Callable[[], Step]:
    """Return a maker that calls the function `name` of a module; modules in the current folder are found too."""
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise InputError(f"WHAT: found {module}:{name}; {error}") from None
    except AttributeError:
        raise InputError(f"WHAT: found {module}:{name}; the module has no {name}") from None
    finally:
        sys.path.pop(0)

    def make() -> Step:
        step = function()
        if not isinstance(step, Step):
            raise InputError(f"{module}:{name}: returned {type(step).__name__}; must return a calibrate.capture.Step")
        return step

    return make


def _config_of(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict) or "model_type" not in data:
        raise InputError(f"{path}: model_type: is missing; a Hugging Face config.json has one")
    return data


def huggingface_maker(config: Mapping[str, Any], options: Options) -> Callable[[], Step]:
    """Return a maker for a config's pre-training model, with the loss that it computes from `labels=input_ids`."""
    try:
        import transformers
    except ImportError:
        raise InputError("a Hugging Face config needs transformers: pip install transformers") from None
    if options.lora_rank is not None:
        try:
            import peft  # noqa: F401
        except ImportError:
            raise InputError("--lora needs peft: pip install peft") from None

    def make() -> Step:
        import torch

        rest = {k: v for k, v in config.items() if k != "model_type"}
        found = transformers.AutoConfig.for_model(config["model_type"], **rest)
        found.use_cache = False
        dtype = torch.float32 if options.weights == "fp32" else torch.bfloat16
        model = _auto_class(found).from_config(found, attn_implementation=options.attention, dtype=dtype)
        model.train()
        if options.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        if options.lora_rank is not None:
            model = with_adapters(model, options.lora_rank)
        ids = torch.zeros(options.micro_batch_size, options.seq_len, dtype=torch.long)

        def loss() -> torch.Tensor:
            with one_sequence_a_row():
                value: torch.Tensor = model(input_ids=ids, labels=ids).loss
            return value

        facts = {
            "model_type": config["model_type"],
            "weights": options.weights,
            "attention": options.attention,
            "gradient_checkpointing": options.gradient_checkpointing,
            "lora_rank": options.lora_rank,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        parameters = [p for p in model.parameters() if p.requires_grad]
        return Step(
            model,
            loss,
            make_optimizer(parameters, options.optimizer),
            options.seq_len,
            options.micro_batch_size,
            options.autocast,
            options.clip_grad_norm,
            facts,
            options.compiled,
        )

    return make


def _auto_class(config: Any) -> Any:
    """Return Transformers' class for pre-training a model of that config.

    A decoder predicts its next token, an encoder (BERT) masked tokens. An encoder with a decoder (T5) predicts the
    decoder's next token; both have equally many tokens.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        return transformers.AutoModelForSeq2SeqLM
    encoder = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    return transformers.AutoModelForMaskedLM if encoder else transformers.AutoModelForCausalLM


def one_sequence_a_row() -> AbstractContextManager[object]:
    """Tell Transformers that each row holds one sequence, as it cannot find that out from fake tensors."""
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    return patch.object(masking_utils, name, lambda *_, **__: None) if hasattr(masking_utils, name) else nullcontext()


def with_adapters(model: Any, rank: int) -> Any:
    """Return the model with LoRA of this rank on every linear layer but the output layer."""
    import peft

    model.enable_input_require_grads()
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))


def make_optimizer(parameters: list[Any], name: str) -> Any:
    """Make one of torch's optimizers by its option's name."""
    import torch

    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=name == "adamw", foreach=name == "adamw_foreach")


def options_of_row(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Options]:
    """Return the config and options of a table's row with the key `program`."""
    program, training = row["program"], row["scenario"].get("training", {})
    if program.get("torch_compile") and program.get("gradient_checkpointing"):
        raise InputError(f"{where}: program.torch_compile: found true; cannot be captured with gradient_checkpointing")
    text = str(program.get("optimizer") or "adamw").lower()
    name = "sgd" if "sgd" in text else "adamw" if "fused=true" in text or text == "adamw" else "adamw_foreach"
    return program["huggingface_config"], Options(
        int(training["seq_len"]),
        int(training.get("micro_batch_size", 1)),
        program.get("weights") or "fp32",
        program.get("autocast") or "",
        program.get("attn_implementation") or "sdpa",
        bool(program.get("gradient_checkpointing")),
        name,
        program.get("lora_rank"),
        program.get("clip_grad_norm"),
        bool(program.get("torch_compile")),
    )
