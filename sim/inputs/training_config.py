"""What a scenario's `training` section may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, WithJsonSchema

from sim.dtypes import Precision, StorageDtype, sixteen_bit
from sim.inputs.input_source import Written, as_tuple

RecomputeMode = Literal["none", "selective", "selective_op", "full"]


class Recompute(Written):
    """What is computed again before backward. With mode full, `layers`: so many; `every`: each n-th one."""

    mode: RecomputeMode
    layers: int | None = Field(default=None, ge=0, le=10_000)
    every: int | None = Field(default=None, ge=1, le=10_000)


def _recompute(value: Any) -> Any:
    if not isinstance(value, (str, dict, Recompute)):
        raise ValueError(f"must be one of {', '.join(get_args(RecomputeMode))}, or a mapping with mode")
    return {"mode": value} if isinstance(value, str) else value


def _recompute_schema() -> WithJsonSchema:
    modes = {"enum": list(get_args(RecomputeMode))}
    fields = {"mode": modes, "layers": {"type": ["integer", "null"]}, "every": {"type": ["integer", "null"]}}
    mapping = {"type": "object", "properties": fields, "required": ["mode"], "additionalProperties": False}
    return WithJsonSchema({"anyOf": [modes, mapping], "default": "none"})


def _param_dtype(data: dict[str, Any]) -> Any:
    return sixteen_bit(data["precision"])


LoraTarget = Literal["qkv", "attention_out", "mlp_up", "mlp_down"]


class Lora(Written):
    """Low-rank adapters on frozen weights. `targets`: the linear layers that have one for each of their matrices."""

    rank: int = Field(default=16, ge=1, le=1_000_000)
    targets: Annotated[tuple[LoraTarget, ...], BeforeValidator(as_tuple), Field(min_length=1, max_length=4)] = (
        "qkv", "attention_out", "mlp_up", "mlp_down",
    )  # fmt: skip


class Training(Written):
    """One training step. Sizes: tokens and sequences, global unless said otherwise."""

    seq_len: int = Field(ge=1, le=100_000_000)
    global_batch_size: int = Field(ge=1, le=1_000_000_000)
    micro_batch_size: int = Field(default=1, ge=1, le=1_000_000)
    precision: Precision = "bf16"
    param_dtype: StorageDtype = Field(default_factory=_param_dtype, description="null: precision's 16-bit dtype")
    grad_dtype: StorageDtype = "fp32"
    grad_reduce_dtype: StorageDtype = Field(
        default_factory=lambda data: data["grad_dtype"], description="null: grad_dtype"
    )
    optimizer: Literal["adamw", "sgd"] = "adamw"
    gradient_clipping: bool = Field(default=True, description="norm of all gradients, and their scaling by it")
    recompute: Annotated[Recompute, BeforeValidator(_recompute), _recompute_schema()] = Field(
        default=Recompute(mode="none"), json_schema_extra={"default": "none"}
    )
    attention: Literal["fused", "unfused"] = "fused"
    attention_kernel: Literal["flash1", "flash2", "flash3", "cudnn", "triton"] | None = Field(
        default=None, description="which fused kernel; null: the profile's usual, or Transformer Engine's"
    )
    cross_entropy: Literal["unfused", "fused", "chunked"] = "unfused"
    elementwise: Literal["eager", "megatron", "compiled"] = "eager"
    activation_offload: bool = False
    lora: Lora | None = Field(default=None, description="null: all parameters are trained")
