"""Parts of a layer whose kept tensors go to host memory, by Megatron-Core's names (`--offload-modules`).

Megatron-Core's hooks take what autograd keeps while a part runs (core/pipeline_parallel/
fine_grained_activation_offload.py; the parts: `off_interface` in core/transformer/attention.py,
multi_latent_attention.py, transformer_layer.py and moe/experts.py). Tensors of less than a million numbers stay
(`min_offloaded_tensor_size`), such as softmax's statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.program import TensorRole
from sim.inputs.training_config import ActivationOffload, OffloadModule
from sim.models.operators import Operator

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario

# The part that a norm belongs to where it is no module of its own; a dense MLP is none.
OF_MATMUL: dict[str, OffloadModule | None] = {"attn_norm": "qkv_linear", "mlp_norm": None}


def by_module(scenario: Scenario, parts: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """The operators, whose kept tensors say which of these parts keeps them, where parts are offloaded."""
    offload = scenario.for_training.activation_offload
    if not isinstance(offload, ActivationOffload) or not offload.modules:
        return parts
    return tuple(_named(part) for part in parts)


def _named(part: Operator) -> Operator:
    module = part.module
    if module in OF_MATMUL and "layernorm" not in part.within:  # `Framework.joins_norms`
        module = OF_MATMUL[module]
    module = "core_attn" if part.core else "moe_act" if "moe_act" in part.within else module
    large = (s if s.role is TensorRole.STATISTICS else s._replace(module=module or "") for s in part.saved)
    return replace(part, saved=tuple(large))
