"""Variables of a launch script's environment that change a step, and that no key says: a note names them.

NCCL's user guide, "Environment Variables"; docs/envvars.rst of NVIDIA/TransformerEngine; vllm/envs.py; torch's notes on
CUDA. Those that choose Transformer Engine's attention are read (`backend_of`).
"""

from __future__ import annotations

import re

from sim.convert.scripts.command_line import COMMENT
from sim.inputs.training_config import WORKSPACES

ASSIGNED = re.compile(r"(?<![\w$#{])([A-Z][A-Z0-9_]*)[\"']?(?:=|:[ \t]*)[\"']?([\w.:,^=-]*)")  # `:` of a YAML
OFF = ("0", "false")
# Off by default, on by default, and those that choose.
SHARP = "NCCL_COLLNET_ENABLE"  # which `inter_node.sharp` expresses
SWITCHES = (
    *("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", SHARP, "CUDA_LAUNCH_BLOCKING"),
    *("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN", "NVTE_NORM_FWD_USE_CUDNN"),
    *("NVTE_NORM_BWD_USE_CUDNN", "NVTE_BATCH_MHA_P2P_COMM", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"),
    *("PYTORCH_NO_CUDA_MEMORY_CACHING",),
)
ON = (
    *("NCCL_NVLS_ENABLE", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_BIAS_GELU_NVFUSION", "NVTE_BIAS_DROPOUT_FUSION"),
    *("VLLM_USE_DEEP_GEMM",),
)
CHOICES = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CGA_CLUSTER_SIZE", "NCCL_BUFFSIZE", "NCCL_NTHREADS"),
    *("NCCL_P2P_NET_CHUNKSIZE", "NCCL_SOCKET_NTHREADS", "VLLM_ATTENTION_BACKEND"),
)
ALL2ALL = "VLLM_ALL2ALL_BACKEND"  # which sim.convert.serving.scenario reads
# By whether Transformer Engine may take FlashAttention and cuDNN's kernel: the word of --attention-backend.
BACKENDS = {("0", "0"): "unfused", ("0", "1"): "fused", ("1", "0"): "flash"}


def environment_note(text: str) -> list[str]:
    """The note on what a script sets and nothing here reads; nothing where there is none.

    >>> environment_note("export NCCL_P2P_DISABLE=1  # consumer GPUs\\nNCCL_IB_DISABLE=0 NCCL_ALGO=Ring torchrun")
    ['environment, not expressed here: NCCL_P2P_DISABLE=1, NCCL_ALGO=Ring']
    >>> environment_note("NCCL_COLLNET_ENABLE=1 torchrun")[0][:56]
    'NCCL_COLLNET_ENABLE=1: cluster.inter_node.sharp=true has'
    """
    found = {name: value for name, value in assigned(text).items() if _matters(name, value.lower())}
    reduces = found.pop(SHARP, None)
    notes = (
        []
        if reduces is None
        else [f"{SHARP}={reduces}: cluster.inter_node.sharp=true has it, if NCCL finds its plugin"]
    )
    named = ", ".join(f"{name}={value}" for name, value in found.items())
    return [*notes, *([f"environment, not expressed here: {named}"] if named else [])]


def backend_of(text: str) -> str | None:
    """The word of Megatron-LM's --attention-backend for the kernels that a script's variables allow; None for all.

    >>> backend_of("export NVTE_FLASH_ATTN=0"), backend_of("NVTE_FUSED_ATTN=0 python x.py"), backend_of("")
    ('fused', 'flash', None)
    """
    given = assigned(text)
    return BACKENDS.get((given.get("NVTE_FLASH_ATTN", "1"), given.get("NVTE_FUSED_ATTN", "1")))


def workspaces_of(text: str) -> str | None:
    """The sizes of cuBLAS's workspaces that a script's variables set, as `training.cublas_workspace_config` has them.

    >>> workspaces_of("export CUBLAS_WORKSPACE_CONFIG=:4096:8"), workspaces_of("CUBLAS_WORKSPACE_CONFIG=$SIZES")
    (':4096:8', None)
    """
    value = assigned(text).get("CUBLAS_WORKSPACE_CONFIG", "")
    return value if WORKSPACES.fullmatch(value) else None


def assigned(text: str) -> dict[str, str]:
    return {name: value for name, value in ASSIGNED.findall(COMMENT.sub("", text)) if value}


def _matters(name: str, value: str) -> bool:
    return value in OFF if name in ON else name in CHOICES or (name in SWITCHES and value not in OFF)
