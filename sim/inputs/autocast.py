"""torch.autocast over fp32 parameters: where a step runs under it. `sim.models.precision.casts` has its kernels.

torch's lists (aten/src/ATen/autocast_mode.h): linear layers, matmuls and attention cast their operands to 16 bits
(AT_FORALL_LOWER_PRECISION_FP); norms, powers, softmax and losses to fp32 (AT_FORALL_FP32); all else runs in what it is
given, and a sum of both dtypes is fp32 (type promotion). So the embedding gives fp32 rows, the residual stream stays in
fp32 through its sums with 16-bit branches, and its norms read and write fp32. Under FSDP it is otherwise: it casts
parameters before a layer, whose activations all have 16 bits then (`MixedPrecisionPolicy`). In torch's frameworks that
is zero 3, and zero 2, which is FSDP that does not reshard after the forward (SHARD_GRAD_OP).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sim.core.dtypes import sixteen_bit
from sim.variants.frameworks.facts import Framework
from sim.variants.frameworks.records import framework_of
from sim.variants.model_code import MODEL_CODE

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig, MoeConfig
    from sim.inputs.parallelism import Parallelism
    from sim.inputs.training_config import Training

# Keys of a model whose layers have operators that nobody has followed through autocast's lists.
_NOT_FOLLOWED = (
    "state_space",
    "compressed_attention",
    "indexer",
    "block_indexer",
    "ngram_embedding",
    "layer_embedding",
    "norm_gate_rank",
    "shared_kv_layers",
    "mtp_layers",
)


def autocasts(t: Training, p: Parallelism, model: ModelConfig) -> bool:
    """Tell whether the step's forwards run under autocast: as the scenario says, else as the framework does."""
    asked = framework_of(t).autocasts and not fsdp_casts(t, p) if t.autocast is None else t.autocast
    return asked and casts_on_use(t, p, model) and not not_under_autocast(t, p, model)


def adapter_casts(t: Training, p: Parallelism) -> Literal["", "fp32", "autocast"]:
    """Return how adapters that have fp32 beside 16-bit weights (`adapters_in_fp32`) multiply. Beside fp32 weights they
    are cast as all else is (`autocasts`).

    autocast, as Transformers' Trainer has it with `bf16`: a copy of their input in fp32, and that in 16 bits again.
    fp32: without autocast. Empty: in 16 bits, as FSDP casts them, and where all parameters have fp32.
    """
    narrow = t.lora is not None and t.param_dtype != "fp32" and not fsdp_casts(t, p)
    if not narrow or not framework_of(t).adapters_in_fp32:
        return ""
    return "fp32" if t.autocast is False else "autocast"


def fsdp_casts(t: Training, p: Parallelism) -> bool:
    """Tell whether the framework leaves casts to FSDP."""
    return p.zero == 3 or (p.zero == 2 and framework_of(t).autocasts)


def casts_on_use(t: Training, p: Parallelism, model: ModelConfig) -> bool:
    """Tell whether matmuls take whole fp32 parameters in 16 bits; a captured program's own operators do it all."""
    wide = t.param_dtype == "fp32" and t.precision != "fp32"
    return wide and p.zero < 3 and model.program is None


def not_under_autocast(t: Training, p: Parallelism, model: ModelConfig) -> str:
    """The first key with which autocast is not simulated, and its value; empty where it is."""
    framework = framework_of(t)
    found = (
        ("training.precision", t.precision, sixteen_bit(t.precision) != t.precision),
        ("training.framework", t.framework, framework.accumulates_in_matmul),
        ("training.lora.weights", "nf4", t.lora is not None and t.lora.weights == "nf4"),
        ("training.cross_entropy", t.cross_entropy, t.cross_entropy == "chunked"),
        ("parallelism.tp", p.tp, p.tp > 1),
        ("parallelism.ep", p.ep, p.ep > 1),
        ("model.moe", "given", model.moe is not None and not _follows_experts(framework, model.moe)),
        ("model.code", model.code, model.code is not None and MODEL_CODE[model.code].experts_one_by_one),
        ("model.hyper_connections", model.hyper_connections, model.hyper_connections > 1),
        *((f"model.{key}", "given", bool(getattr(model, key))) for key in _NOT_FOLLOWED),
    )
    return next((f"{key} {value}" for key, value, bad in found if bad), "")


def _follows_experts(framework: Framework, moe: MoeConfig) -> bool:
    """Tell whether it is known what autocast makes of these experts: all of their operators keep fp32."""
    own = (moe.zero_experts, moe.capacity_factor)
    return framework.experts_in_param_dtype and not any(own)
