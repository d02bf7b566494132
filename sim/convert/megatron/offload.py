"""Megatron-LM's arguments of offloading to host memory: of the optimizer's states, and of activations."""

from __future__ import annotations

from typing import Any, get_args

from sim.convert.settings import Machine, Settings
from sim.inputs.model_input import load_model
from sim.inputs.training_config import OffloadModule
from sim.variants.activations import ACTIVATIONS

HOST_OVERLAPS = "--overlap-cpu-optimizer-d2h-h2d: transfers to and from the host are simulated beside nothing"
MODULES = get_args(OffloadModule)
FUSED_EXPERTS = "fused_group_mlp"  # all that Transformer Engine's fused operators of experts keep
LEAST = 1024 * 1024  # --min-offloaded-tensor-size's default


def optimizer_offload(s: Settings) -> Any:
    """Where the optimizer's states are: None for the GPU, cpu where the host's CPUs update all parameters, True where
    the states come to the GPU for that."""
    if s.flag("optimizer-cpu-offload"):
        share = s.number("optimizer-offload-fraction", 1.0)
        overlaps = s.flag("overlap-cpu-optimizer-d2h-h2d")
        if share == 1.0:
            s.notes += [HOST_OVERLAPS] if overlaps else []
            return "cpu"
        s.notes.append(f"--optimizer-offload-fraction {share:g}: a part is not simulated, all states stay on the GPU")
    return True if s.flag("offload-optimizer-states") else None


def activation_offload(s: Settings, machine: Machine) -> dict[str, Any] | None:
    """Layers whose activations go to the host (`validate_args`: a number above 0 is the switch), or parts of layers."""
    layers = s.integer("cpu-offloading-num-layers", 0)
    s.flag("cpu-offloading")  # of Megatron-Bridge, beside the number
    if layers:
        return {"layers": layers}
    named = str(s.take("offload-modules") or "").replace(",", " ").split()
    if not s.flag("fine-grained-activation-offloading"):
        return None
    if FUSED_EXPERTS in named:
        named = [name for name in named if name != FUSED_EXPERTS] + _kept_by_experts(s, machine)
    if unknown := [name for name in named if name not in MODULES]:
        s.notes.append(f"{s.written_as('offload-modules')}: not simulated: {', '.join(unknown)}")
    return {"modules": known} if (known := [name for name in named if name in MODULES]) else None


def _kept_by_experts(s: Settings, machine: Machine) -> list[str]:
    """The parts of an expert's MLP whose kept tensor is large enough to go, where experts are loaded evenly: the first
    matmul's input and the activation's, of all copies of a rank's tokens (core/transformer/moe/experts.py:
    `offload_fused_group_mlp`, core/pipeline_parallel/fine_grained_activation_offload.py: `min_offloaded_tensor_size`).
    """
    split = s.integer("tensor-model-parallel-size", 1) * s.integer("context-parallel-size", 1)
    if machine.model is None:
        first = s.whole("moe-latent-size") or s.integer("hidden-size")
        inner = s.size("moe-ffn-hidden-size", s.integer("ffn-hidden-size", 0)) * (2 if s.values.get("swiglu") else 1)
        copies = s.integer("moe-router-topk", 2)
    else:
        model = load_model(machine.model)
        if model.moe is None:
            return []
        gated = ACTIVATIONS[model.moe.activation or model.mlp].gated
        first, inner = model.moe.latent or model.hidden, model.moe.ffn * (2 if gated else 1)
        copies = model.moe.top_k
    rows = s.integer("seq-length") * s.integer("micro-batch-size") * copies / split
    least = s.integer("min-offloaded-tensor-size", LEAST)
    return [name for name, width in (("expert_fc1", first), ("moe_act", inner)) if rows * width >= least]
