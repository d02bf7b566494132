"""Variables that the commands of a launch script see from it, and that no key says: a note names them.

Named is each that no reader has read, unless it is the script's own (its text expands it, so that its value is in the
command), has the value that programs take anyhow, or by its name says where files, hosts and ranks are, what is logged
or who asks (`environment` in without_effect.yaml). NCCL's user guide, "Environment Variables"; docs/envvars.rst of
NVIDIA/TransformerEngine; vllm/envs.py; torch's notes on CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

from sim.convert.scripts.script_data import Script
from sim.convert.settings import without_effect
from sim.inputs.training_config import WORKSPACES

OFF, ON = ("0", "false"), ("1", "true")
# Switches that are off by default, and on by default.
SHARP = "NCCL_COLLNET_ENABLE"  # which `inter_node.sharp` expresses
USUALLY_OFF = re.compile(
    r"(NCCL|TORCH\w*|CUDA|PYTORCH)_\w*(DISABLE\w*|BLOCKING|NO_\w+)|NCCL_COLLNET_ENABLE|NVTE_\w+_MARGIN|"
    r"NVTE_NORM_\w+|NVTE_BATCH_\w+"
)
USUALLY_ON = re.compile(r"NCCL_NVLS_ENABLE|NVTE_(ALLOW|BIAS|FLASH|FUSED|UNFUSED)_\w+|VLLM_USE_DEEP_GEMM")
ALL2ALL = "VLLM_ALL2ALL_BACKEND"  # which sim.convert.serving.scenario reads
# By whether Transformer Engine may take FlashAttention and cuDNN's kernel: the word of --attention-backend.
BACKENDS = {("0", "0"): "unfused", ("0", "1"): "fused", ("1", "0"): "flash"}


def environment_note(script: Script) -> list[str]:
    """The note on what a script sets and nothing here reads; nothing where there is none."""
    found = {name: value for name, value in script.environment.items() if value and _matters(script, name, value)}
    reduces = found.pop(SHARP, None)
    notes = (
        []
        if reduces is None
        else [f"{SHARP}={reduces}: cluster.inter_node.sharp=true has it, if NCCL finds its plugin"]
    )
    named = ", ".join(f"{name}={value}" for name, value in found.items())
    return [*notes, *([f"environment, not expressed here: {named}"] if named else [])]


def backend_of(script: Script) -> str | None:
    """The word of Megatron-LM's --attention-backend for the kernels that a script's variables allow; None for all."""
    flash, fused = script.variable("NVTE_FLASH_ATTN") or "1", script.variable("NVTE_FUSED_ATTN") or "1"
    return BACKENDS.get((flash, fused))


def workspaces_of(environment: Callable[[str], str | None]) -> str | None:
    """The sizes of cuBLAS's workspaces that a script's variables set, as `training.cublas_workspace_config` has them.

    >>> workspaces_of({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}.get)
    ':4096:8'
    """
    value = environment("CUBLAS_WORKSPACE_CONFIG") or ""
    return value if WORKSPACES.fullmatch(value) else None


def is_noted(name: str) -> bool:
    """Tell whether `environment_note` would name a variable by its name alone."""
    return name.startswith(("NCCL_", "NVTE_", "TORCH", "CUDA_", "CUBLAS_", "VLLM_", "PYTORCH_"))


def _matters(script: Script, name: str, value: str) -> bool:
    if name in script.asked or re.search(rf"\$\{{?{name}\b|\(\([^\n]*\b{name}\b", script.text):
        return False
    usual = OFF if USUALLY_OFF.fullmatch(name) else ON if USUALLY_ON.fullmatch(name) else ()
    return value.lower() not in usual and not any(fnmatchcase(name, one) for one in without_effect("environment"))
