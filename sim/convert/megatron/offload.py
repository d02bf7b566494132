"""Megatron-LM's arguments of offloading to host memory: of the optimizer's states, and of activations."""

from __future__ import annotations

from typing import Any, get_args

from sim.convert.settings import Settings
from sim.inputs.training_config import OffloadModule

HOST_OVERLAPS = "--overlap-cpu-optimizer-d2h-h2d: transfers to and from the host are simulated beside nothing"
MODULES = get_args(OffloadModule)


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


def activation_offload(s: Settings) -> dict[str, Any] | None:
    """Layers whose activations go to the host (`validate_args`: a number above 0 is the switch), or parts of layers."""
    layers = s.integer("cpu-offloading-num-layers", 0)
    s.flag("cpu-offloading")  # of Megatron-Bridge, beside the number
    if layers:
        return {"layers": layers}
    named = str(s.take("offload-modules") or "").replace(",", " ").split()
    if not s.flag("fine-grained-activation-offloading"):
        return None
    if unknown := [name for name in named if name not in MODULES]:
        s.notes.append(f"{s.written_as('offload-modules')}: not simulated: {', '.join(unknown)}")
    return {"modules": known} if (known := [name for name in named if name in MODULES]) else None
