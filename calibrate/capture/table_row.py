"""Reads how a row of a table of measurements ran its program: its keys `program` and `scenario.training`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from calibrate.capture.options import Options
from sim.core.dtypes import normalise_dtype
from sim.core.errors import InputError
from sim.core.json_values import is_count, is_positive


class _Allowed(NamedTuple):
    """The values that a key may have, as a test and in words."""

    fits: Callable[[Any], bool]
    words: str


def _may_lack(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or fits(x)


OPTIMIZER = re.compile(r"(?:torch\.optim\.)?(adamw|sgd)(?:\((.*)\))?")
SAME_KERNELS = ("lr", "betas", "eps", "weight_decay")  # of AdamW: numbers, whatever they are
KERNELS_OF_ADAMW = {
    (("fused", "true"),): "adamw",
    (("foreach", "true"),): "adamw_foreach",
    (): "adamw_foreach",  # torch's default on a GPU
}


def _optimizer(text: str) -> str | None:
    """Return the option of a table's optimizer; None if its arguments make it start kernels that no option has.

    A bare `adamw`, like null, is the fused one.

    >>> [_optimizer(x) for x in ("AdamW", "torch.optim.AdamW(lr=1e-4)", "SGD(lr=0.1)", "SGD(momentum=0.9)")]
    ['adamw', 'adamw_foreach', 'sgd', None]
    """
    found = OPTIMIZER.fullmatch(text.lower().replace(" ", ""))
    if found is None:
        return None
    name, arguments = found[1], re.findall(r"(\w+)=(\([^)]*\)|[^,]+)", found[2] or "")
    if name == "sgd":
        return "sgd" if {key for key, _ in arguments} <= {"lr"} else None
    if text.lower() == "adamw":
        return "adamw"
    return KERNELS_OF_ADAMW.get(tuple(x for x in arguments if x[0] not in SAME_KERNELS))


def _names_optimizer(x: Any) -> bool:
    return isinstance(x, str) and _optimizer(x) is not None


OPTIMIZERS = (
    "null, AdamW, AdamW(fused=True), AdamW(foreach=True) or SGD, with lr; AdamW also with betas, eps, weight_decay"
)
COUNT = _Allowed(is_count, "a whole number, at least 1")
TEXT = _Allowed(_may_lack(lambda x: isinstance(x, str)), "a text or null")
TRUTH = _Allowed(_may_lack(lambda x: isinstance(x, bool)), "true, false or null")
PROGRAM = {
    "huggingface_config": _Allowed(
        lambda x: isinstance(x, Mapping) and isinstance(x.get("model_type"), str), "the content of a config.json"
    ),
    "weights": _Allowed(_may_lack(lambda x: normalise_dtype(x) in ("fp32", "bf16")), "fp32, bf16 or null"),
    "autocast": _Allowed(_may_lack(lambda x: normalise_dtype(x) in ("bf16", "fp16")), "bf16, fp16 or null"),
    "attn_implementation": TEXT,
    "gradient_checkpointing": TRUTH,
    "torch_compile": TRUTH,
    "lora_rank": _Allowed(_may_lack(is_count), "a whole number, at least 1, or null"),
    "optimizer": _Allowed(_may_lack(_names_optimizer), OPTIMIZERS),
    "clip_grad_norm": _Allowed(_may_lack(is_positive), "a number above 0 or null"),
}


def options_of_row(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], Options]:
    """Return the config and options of a table's row with the key `program`. Other keys of it are facts beside.

    Raises:
        InputError: if a key has a value that no capture can use, or the row lacks the config or its sequence length.
    """
    program, training = row["program"], row["scenario"].get("training", {})
    if not isinstance(program, Mapping):
        raise InputError(f"{where}: program: found {str(program)[:60]!r}; must be a mapping with huggingface_config")
    for name, allowed in PROGRAM.items():
        _check(allowed, program.get(name), f"{where}: program.{name}")
    sizes = {"seq_len": training.get("seq_len"), "micro_batch_size": training.get("micro_batch_size", 1)}
    for name, size in sizes.items():
        _check(COUNT, size, f"{where}: scenario.training.{name}")
    autocast = program.get("autocast")
    return program["huggingface_config"], Options(
        **sizes,
        weights=normalise_dtype(program.get("weights") or "fp32"),
        autocast=autocast and normalise_dtype(autocast),
        attention=program.get("attn_implementation"),
        gradient_checkpointing=bool(program.get("gradient_checkpointing")),
        optimizer=_optimizer(program.get("optimizer") or "adamw") or "",
        lora_rank=program.get("lora_rank"),
        clip_grad_norm=program.get("clip_grad_norm"),
        compiled=bool(program.get("torch_compile")),
    )


def _check(allowed: _Allowed, found: Any, where: str) -> None:
    if not allowed.fits(found):
        said = "is missing" if found is None else f"found {str(found)[:60]!r}"
        raise InputError(f"{where}: {said}; must be {allowed.words}")
