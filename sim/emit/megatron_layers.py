"""Megatron-LM's flags that treat some layers, or parts of layers, otherwise than the rest."""

from __future__ import annotations

from typing import Any

from sim.emit.common import Emission
from sim.inputs.training_config import ActivationOffload


def in_sixteen_bits(e: Emission) -> dict[str, Any]:
    """Layers that stay in 16 bits, in fp8 no more at either end than a stage has (`TransformerConfig`)."""
    s, t = e.scenario, e.training
    counts = {key: getattr(t, key) for key in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")}
    if not any(counts.values()):
        return {}
    most = s.model.layers // s.parallelism.pp
    for key, number in counts.items():
        if t.precision != "nvfp4" and number > most:
            e.refuse(f"training.{key}", f"keeps at most layers / pp = {most} layers in 16 bits at either end")
    return {"first-last-layers-bf16": True} | {key.replace("_", "-"): number for key, number in counts.items()}


def offloaded(e: Emission) -> dict[str, Any]:
    """Activations of layers in host memory, by Transformer Engine, without a pipeline and recomputation
    (`TransformerConfig`); or of parts of layers, by Megatron-Core."""
    offload = e.training.activation_offload
    if not isinstance(offload, ActivationOffload):
        return {}
    if offload.modules:
        return {"fine-grained-activation-offloading": True, "offload-modules": " ".join(offload.modules)}
    shown = f"layers: {offload.layers}"
    if e.scenario.parallelism.pp > 1:
        e.refuse("training.activation_offload", "offloads whole layers without pipeline stages only", shown)
    if e.training.recompute.mode != "none":
        e.refuse("training.activation_offload", "offloads whole layers without recomputation only", shown)
    return {"cpu-offloading-num-layers": offload.layers}
