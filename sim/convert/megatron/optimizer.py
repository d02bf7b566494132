"""Megatron-LM's arguments of the dtypes that its optimizer keeps (core/optimizer/optimizer_config.py)."""

from __future__ import annotations

from sim.convert.settings import Settings
from sim.variants.optimizers import REMAINDERS

AWARE = "use-precision-aware-optimizer"
MOMENTS = {"fp32": "fp32", "bf16": "bf16", "torch.float32": "fp32", "torch.bfloat16": "bf16"}
OF_MOMENTS = ("exp-avg-dtype", "exp-avg-sq-dtype")


def moments(s: Settings) -> str | None:
    """Return the dtype of Adam's moments; None for fp32. Two moments of different dtypes are not simulated."""
    s.choice("main-params-dtype", {"fp32": True, "torch.float32": True}, "fp32")
    if not s.flag(AWARE):
        return None
    if len({s.values.get(name, "fp32") for name in OF_MOMENTS}) > 1:
        return None
    first, _ = (s.choice(name, MOMENTS, "fp32") for name in OF_MOMENTS)
    return first


def master_weights(s: Settings, precision: str, recipe: str | None) -> str | None:
    """Return how fp32 copies are kept: as the halves that bf16 parameters lack (`store_param_remainders`, on by
    default) where Transformer Engine keeps them: without an fp8 recipe that scales by the tensors themselves."""
    halves, away = s.flag("store-param-remainders", True), ("optimizer-cpu-offload", "offload-optimizer-states")
    told = precision == "bf16" or (precision == "fp8" and recipe in (None, "delayed"))
    sharded = s.values.get("use-distributed-optimizer") and not s.values.get("use-megatron-fsdp")
    adam = s.values.get("optimizer", "adam") == "adam"
    others = s.values.get("fp8-param-gather") or any(s.values.get(name) for name in away)
    return REMAINDERS if s.flag(AWARE) and halves and told and sharded and adam and not others else None
