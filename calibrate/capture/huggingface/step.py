"""Makes the training step, or a forward alone, of a Hugging Face model from its config."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

from calibrate.capture.failure import WITHOUT_DATA, failure, first_line
from calibrate.capture.options import Options
from calibrate.capture.step import Step
from sim.core.errors import InputError

# Transformers' classes, and its tables of the configs for which each has a model; the first that has one is taken.
GENERATED = (
    ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
)
# Arguments of a forward that computes a loss.
LOSSES = {"labels", "start_positions", "return_loss", "future_values", "target_values", "class_labels"}
MASKED = ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING")
OTHERS = (
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    ("AutoModelForMultimodalLM", "MODEL_FOR_MULTIMODAL_LM_MAPPING"),
    ("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING"),
    ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
    ("AutoModelForVideoClassification", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING"),
    ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING"),
    ("AutoModelForPreTraining", "MODEL_FOR_PRETRAINING_MAPPING"),
)


def huggingface_maker(config: Mapping[str, Any], options: Options) -> Callable[[], Step]:
    """Return a maker of one training step, forward or generation of a config's pre-training model."""
    _needs("transformers", "a Hugging Face config")
    if options.lora_rank is not None:
        _needs("peft", "--lora")
    return partial(_step, config, options)


def _step(config: Mapping[str, Any], options: Options) -> Step:
    """Make the model and its batch, and what one step of them runs."""
    trains = not (options.forward or options.new_tokens)
    found = _read_config(config)
    _complete(found, trains)
    model = _model(found, options, trains)
    facts = {"model_type": config["model_type"], **_facts(found, options)}
    batch = _batch(model, found, options, trains)
    if options.lora_rank is not None:
        model = with_adapters(model, options.lora_rank)
    run = _generation(model, batch, options.new_tokens) if options.new_tokens else model

    def loss() -> Any:
        try:
            value = run(**batch)
            return _loss_of(value) if trains else value
        except Exception as error:
            if type(error).__name__ in WITHOUT_DATA:
                raise
            raise InputError(f"{failure(error, type(model).__name__)}; {_made_from_config(batch)}") from None

    parameters = [p for p in model.parameters() if p.requires_grad]
    return Step(
        model,
        loss,
        make_optimizer(parameters, options.optimizer) if trains else None,
        seq_len=options.seq_len + (options.new_tokens or 0),
        micro_batch_size=options.micro_batch_size,
        autocast=options.autocast or "",
        clip_grad_norm=options.clip_grad_norm,
        facts=facts,
        compiled=options.compiled,
    )


def _batch(model: Any, config: Any, options: Options, trains: bool) -> dict[str, Any]:
    """Make the model's inputs, numbers that are no integers in the weights' dtype."""
    import torch
    from torch.utils._pytree import tree_map_only

    from calibrate.capture.huggingface.inputs import batch_for, with_random_values

    batch = batch_for(model, options.micro_batch_size, options.seq_len, trains)
    if options.random_values:
        with_random_values(batch, config)
    if options.weights != "bf16":
        return batch
    narrow: dict[str, Any] = tree_map_only(torch.Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, batch)
    return narrow


def _model(config: Any, options: Options, trains: bool) -> Any:
    """Make the model of Transformers' config, without adapters."""
    import torch

    chosen = {"attn_implementation": options.attention} if options.attention else {}
    dtype = torch.float32 if options.weights == "fp32" else torch.bfloat16
    try:
        model = _maker(config, trains)(config, dtype=dtype, **chosen)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"config.json: Transformers makes no model of it: {failure(error, 'it')}") from None
    model.train(trains)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _facts(config: Any, options: Options) -> dict[str, Any]:
    """Return what the file says of the capture; the config of a model names its implementation of attention."""
    import torch
    import transformers

    facts = {
        "weights": options.weights,
        "attention": config._attn_implementation,
        "attention_chosen": options.attention or "",
        "gradient_checkpointing": options.gradient_checkpointing,
        "lora_rank": options.lora_rank,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return facts | ({"new_tokens": options.new_tokens} if options.new_tokens else {})


def _made_from_config(batch: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name} {list(x.shape)}" if hasattr(x, "shape") else name for name, x in batch.items())
    return (
        f"the config, --micro-batch-size and --seq-len alone decide on the batch, {shown}; if the model needs another "
        "one, write a function that returns a calibrate.capture.Step, and give package.module:function"
    )


def _needs(package: str, what: str) -> None:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise failure(error, package) from None
        raise InputError(f"{what} needs {package}: pip install {package}") from None
    except ImportError as error:
        raise failure(error, package) from None


def _read_config(config: Mapping[str, Any]) -> Any:
    """Return Transformers' config; it also reads what JSON cannot hold, such as infinity.

    Raises:
        InputError: if Transformers has no such model, or refuses a value.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = config["model_type"]
    if name not in CONFIG_MAPPING:
        raise InputError(
            f"config.json: model_type: found {str(name)[:60]!r}; the installed Transformers has no such model; "
            "one with code of its own needs a function: package.module:function"
        )
    try:
        found = CONFIG_MAPPING[name].from_dict(_with_floats(config))
    except Exception as error:
        raise InputError(f"config.json: Transformers refuses it: {first_line(error)}") from None
    named = found.architectures = found.architectures or []  # where a type has several models, Transformers looks here
    if not (isinstance(named, list) and all(isinstance(x, str) for x in named)):
        raise InputError(
            f'config.json: architectures: found {str(named)[:60]!r}; expected a list of class names, as ["BertModel"]'
        )
    return found


def _generation(model: Any, batch: dict[str, Any], new_tokens: int) -> Callable[..., Any]:
    """Return `generate` with the prompt of a batch, up to `new_tokens` tokens for each of its sequences.

    Raises:
        InputError: if the model has no `generate`.
    """
    if not (hasattr(model, "can_generate") and model.can_generate()):
        raise InputError(f"--generate: {type(model).__name__} generates no tokens; --forward captures its forward")
    batch.pop("decoder_input_ids", None)
    if "input_ids" in batch:
        batch["attention_mask"] = batch["input_ids"].new_ones(batch["input_ids"].shape)  # as a tokenizer gives it
    # A sequence would end, and be padded from there, where its tokens say so; nobody knows them.
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return partial(model.generate, max_new_tokens=new_tokens, do_sample=False)


def _complete(config: Any, trains: bool) -> None:
    """Give a config what a model needs to run, if it lacks it.

    That is no cache in training, a decoder's first token, and a token of padding, from which one that classifies
    sequences reads where they end.
    """
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))):
        if trains and hasattr(part, "use_cache"):
            part.use_cache = False
    decodes = getattr(config, "is_encoder_decoder", False)
    classifies = any(str(name).endswith("ForSequenceClassification") for name in config.architectures)
    needed = ["pad_token_id"] * (decodes or classifies) + ["decoder_start_token_id"] * decodes
    for name in needed:
        if getattr(config, name, None) is None:
            setattr(config, name, 0)


def _with_floats(data: Any) -> Any:
    """Return JSON data with infinities and NaN, for which Transformers writes `{"__float__": "Infinity"}`."""
    if isinstance(data, Mapping):
        if list(data) == ["__float__"]:
            return float(data["__float__"])
        return {key: _with_floats(x) for key, x in data.items()}
    return [_with_floats(x) for x in data] if isinstance(data, list) else data


def _maker(config: Any, trains: bool) -> Callable[..., Any]:
    """Return what makes a model of a config: the class that its `architectures` names, or that for pre-training.

    A class without a loss, such as BertModel, is not trained: the one for pre-training is.
    """
    import transformers

    makes: Callable[..., Any]
    for name in config.architectures:
        found = _model_class(getattr(transformers, name, None))
        if found is not None and found.config_class is type(config) and (not trains or _has_loss(found)):
            makes = found._from_config
            return makes
    makes = _auto_class(config).from_config
    return makes


def _model_class(found: Any) -> Any:
    """Return what Transformers exports under a name, if it is the class of a model; else None."""
    import transformers

    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def _has_loss(model_class: Any) -> bool:
    """Return whether a forward takes what to predict, or its result has a field for the loss."""
    signature = inspect.signature(model_class.forward)
    results = (signature.return_annotation, *get_args(signature.return_annotation))
    return not LOSSES.isdisjoint(signature.parameters) or any(
        "loss" in getattr(x, "__annotations__", ()) for x in results
    )


def _auto_class(config: Any) -> Any:
    """Return Transformers' class for pre-training a model of that config.

    A decoder predicts its next token, an encoder (BERT) masked tokens. An encoder with a decoder (T5) predicts the
    decoder's next token; both have equally many tokens. Models of images or sound classify them. Others have no loss of
    their own.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    both = GENERATED if getattr(config, "is_encoder_decoder", False) else ()
    masked = () if getattr(config, "is_decoder", False) else (MASKED,)
    for name, table in (*both, *masked, *OTHERS):
        if type(config) in getattr(modeling_auto, table, ()) and hasattr(transformers, name):
            return getattr(transformers, name)
    if type(config) not in modeling_auto.MODEL_MAPPING:
        raise InputError(
            f"config.json: model_type: found {config.model_type!r}; AutoModel makes no model of this type; if it is a "
            "part of a model, give the config of the whole, else a function: package.module:function"
        )
    return transformers.AutoModel


def _loss_of(output: Any) -> Any:
    """Return a model's loss, or the mean square of its first result if it computes none."""
    import torch
    from torch.utils._pytree import tree_leaves

    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    return next(x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad).square().mean()


def with_adapters(model: Any, rank: int) -> Any:
    """Return the model with LoRA of this rank on every linear layer but the output layer."""
    import peft

    model.enable_input_require_grads()
    generates = model.main_input_name == "input_ids" and hasattr(model, "prepare_inputs_for_generation")
    task = "CAUSAL_LM" if generates else None
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear", task_type=task))


def make_optimizer(parameters: list[Any], name: str) -> Any:
    """Make one of torch's optimizers by its option's name."""
    import torch

    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=name == "adamw", foreach=name == "adamw_foreach")
