"""Number formats of a serving workload: of weights in memory, of linear layers' matmuls, of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sim.core.dtypes import dtype_bytes, sixteen_bit
from sim.core.quantization import QUANTIZATIONS, Part, Quantization
from sim.inputs.engine_file import all2all_of, engine_of

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.workloads import Inference
    from sim.variants.engines.defaults import Defaults
    from topology.spec import GpuSpec

# of linear layers, beside which TensorRT-LLM keeps the cache in fp8 (bench/benchmark/utils/general.py: _KV_CACHE_MAP)
NARROW = ("fp8", "mxfp8", "nvfp4")


def is_published(inference: Inference, model: ModelConfig) -> bool:
    """Tell whether weights are kept as the model's checkpoint stores them, which then decides about its parts and
    about the cache."""
    return inference.quantization == model.checkpoint_quantization != "none"


def linear_format(
    inference: Inference,
    peaks: Mapping[str, float],
    quantization: Quantization | None = None,
    part: Part = "attention",
    group: int | None = None,
) -> tuple[str, float]:
    """The dtype linear layers multiply in on GPUs of these peaks, and their weights' bytes per element; `quantization`:
    of a `part` of layers that has its own, `group`: as `QuantizationFormat.bytes_of`."""
    form, act = QUANTIZATIONS[quantization or inference.quantization], sixteen_bit(inference.precision)
    size, matmul = form.bytes_of(part, group), form.matmul_of(part)
    if size is None:
        return inference.precision, dtype_bytes(inference.precision)
    return matmul if matmul and matmul in peaks else act, size


def dispatch_dtype(inference: Inference, peaks: Mapping[str, float]) -> str:
    """What an engine sends tokens to experts in, where the scenario does not say it."""
    linear, _ = linear_format(inference, peaks)
    backend = all2all_of(inference)
    narrow = (backend.narrow or (backend.gathers and engine_of(inference.engine).gathers_narrow)) and linear == "fp8"
    return "fp8" if narrow else sixteen_bit(inference.precision)


def cache_dtype(inference: Inference, gpu: GpuSpec, model: ModelConfig) -> str:
    """What keys and values are kept in where `kv_cache.dtype` is left out.

    Unfused attention reads the cache without converting it, so that it stays in 16 bits there. A model that is
    published in fp8 has block scales (DeepSeek V3), beside which TensorRT-LLM keeps 16 bits unless the checkpoint says
    otherwise (_torch/model_config.py, load_hf_quant_config: FP8_BLOCK_SCALES, which _KV_CACHE_MAP has not).
    """
    engine = engine_of(inference.engine)
    linear, _ = linear_format(inference, gpu.peak_flops_per_s)
    said = is_published(inference, model) and model.checkpoint_cache == "fp8"
    usual = linear in NARROW and not is_published(inference, model)
    selected = model.mla is not None and model.indexer is not None and gpu.kernel_architecture == "blackwell"
    narrow = (said and (engine.fp8_cache or engine.checkpoint_cache)) or (usual and engine.fp8_cache)
    narrow |= engine.fp8_selected and selected
    narrow &= inference.attention == "fused"
    return "fp8" if narrow else sixteen_bit(inference.precision)


def with_block_tokens(own: Defaults, inference: Inference, model: ModelConfig, gpu: GpuSpec) -> Defaults:
    """An engine's defaults with the blocks that its kernel of latent attention takes on these GPUs. A model with states
    keeps the usual ones: its blocks follow its states (vLLM, HybridAttentionMambaModelConfig)."""
    if model.mla is None or model.state_space is not None:
        return own
    kept = inference.kv_cache.dtype or cache_dtype(inference, gpu, model)
    kernel = gpu.kernel_architecture, gpu.memory_bytes, dtype_bytes(kept) < 2, model.indexer is not None
    tokens = engine_of(inference.engine).latent_blocks.on(*kernel)
    return own._replace(block_tokens=tokens) if tokens else own
