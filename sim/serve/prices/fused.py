"""Which of an engine's kernels of a served model also do what comes next, or run beside each other: all-reduces that
norm, kernels that write their result in few bits, rope with norms of heads, shared experts beside routed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.core.dtypes import dtype_bytes, sixteen_bit
from sim.core.quantization import QUANTIZATIONS, Quantizing
from sim.inputs.engine_file import engine_of
from sim.models.serving.operators import ServedRope
from sim.variants.engines.kernel_facts import is_datacenter_blackwell

if TYPE_CHECKING:
    from sim.inputs.model_config import ModelConfig
    from sim.inputs.scenario import Scenario
    from sim.variants.engines.kernel_facts import SummedNorms

# Of a fused shared expert's tokens, up to which its own launches and waves count (an assumption): more keep the time of
# kernels of their own.
FUSED_TOKENS = 1024
LLAMA = {  # what a model of Llama's code has
    **dict.fromkeys(("code", "moe", "mla", "state_space")),
    **dict.fromkeys(("qk_norm", "qkv_bias", "merged_projections", "parallel_block"), False),
    "norm": "rmsnorm",
    "norm_position": "pre",
}


def quantizing(scenario: Scenario, linear: str) -> tuple[Quantizing, ...]:
    """What writes inputs in few bits itself; nothing without torch.compile (--enforce-eager) where it fuses, nor beside
    LoRA adapters where the engine does (`Engine.quantizing_compiled`).

    A checkpoint's blocks in fp8 are quantized by an operator of its own (vLLM, config/vllm.py: `+quant_fp8`), which
    torch.compile fuses with nothing, but vLLM's own passes with some (`Engine.quantizing_blocks`).
    """
    i = scenario.for_serving
    checkpoint = QUANTIZATIONS[scenario.model.checkpoint_quantization]
    engine, blocks = engine_of(i.engine), linear == "fp8" and checkpoint.in_fp8
    if blocks:
        fused = _compiled(scenario) and scenario.cluster.gpu.kernel_architecture == "hopper"
        return engine.quantizing_blocks if fused else ()
    if not _compiled(scenario) if engine.quantizing_compiled else i.lora is not None:
        return ()
    own, norms = engine.quantizing.get(linear, ()), engine.summed_norms
    sums = norms is not None and linear in norms.llama_writes and is_llama(scenario.model, norms.llama_above)
    return (*own, "sums") if sums else own


def norm_in_sum_bytes(scenario: Scenario, norms: SummedNorms | None, linear: str) -> float:
    """The largest all-reduce over tp that also adds and norms, in kernels that need NVLink within a node, for linear
    layers that multiply in `linear`."""
    p, cluster, i, m = scenario.parallelism, scenario.cluster, scenario.for_serving, scenario.model
    if norms is None or p.tp > cluster.gpus_per_node or cluster.intra_node.kind == "pcie":
        return 0.0
    compiled = norms.compiled and not own_selected(scenario)
    if (compiled and not _compiled(scenario)) or (norms.alone and (p.dp > 1 or p.pp > 1)):
        return 0.0
    if norms.codes and m.code not in norms.codes and not is_llama(m, norms.llama_above):
        return 0.0
    if (m.state_space is not None and not norms.states) or (m.indexer is not None and not norms.selected):
        return 0.0
    if cluster.gpu.name in norms.but or (norms.experts and (p.sharing_replicas > 1 or i.all2all_backend == "deepep")):
        return 0.0
    kernels = engine_of(i.engine).own_all_reduces.get(cluster.gpu.kernel_architecture)
    if kernels is not None and is_llama(m, kernels.but_llama_above):
        return 0.0
    if norms.llama_below is not None and linear in norms.llama_writes and is_llama(m, norms.llama_above):
        return norms.llama_below.get(p.tp, 0.0)
    token_bytes = m.hidden * dtype_bytes(sixteen_bit(i.precision))
    return norms.most_bytes(cluster.gpu.kernel_architecture, cluster.gpu.memory_bytes, p.tp, token_bytes)


def experts_sum_norms(scenario: Scenario) -> bool:
    """Whether the all-reduces of experts' results also add and norm, as others do."""
    norms, alone = engine_of(scenario.for_serving.engine).summed_norms, scenario.parallelism.sharing_replicas == 1
    return norms is not None and (norms.experts or (own_selected(scenario) and alone))


def own_selected(scenario: Scenario) -> bool:
    """Whether the model selects keys, and the engine has code of its own for it (`Engine.own_selected`)."""
    return engine_of(scenario.for_serving.engine).own_selected and scenario.model.indexer is not None


def rope_of(scenario: Scenario) -> ServedRope:
    """The kernels of rope, and of norms on queries and keys."""
    own = engine_of(scenario.for_serving.engine).rope_kernels
    if own.eager is not None and not _compiled(scenario):
        own = own.eager
    return ServedRope(own.rope, own.normed, own.writes)


def shared_experts(scenario: Scenario) -> tuple[float, bool]:
    """The most tokens of which shared experts run beside routed ones, and whether they are routed experts themselves
    (`SharedExperts`)."""
    own, m, i = engine_of(scenario.for_serving.engine).shared_experts, scenario.model, scenario.for_serving
    travels = scenario.parallelism.ep * scenario.parallelism.expert_tp > scenario.parallelism.tp
    if m.moe is None or i.afd is not None or (travels and (i.two_batch_overlap or not own.sent)):
        return 0.0, False
    gpu, one = scenario.cluster.gpu, m.moe.shared_experts == 1
    alike = m.code == "deepseek_v3" and m.moe.experts in own.fused and one and scenario.parallelism.ep == 1
    other = i.lora is not None or i.two_batch_overlap or i.all2all_backend == "deepep"
    large = is_datacenter_blackwell(gpu.kernel_architecture, gpu.memory_bytes)
    fused = alike and not other and not large and "fp4" not in i.quantization
    if fused:
        return FUSED_TOKENS, True
    return (0.0 if own.graphed and not i.cuda_graphs else own.tokens), False


def _compiled(scenario: Scenario) -> bool:
    """Whether torch.compile makes a model's kernels: not with --enforce-eager, nor for DeepSeek V4, MiniMax M3 and
    those that `own_selected` names (vLLM, config/vllm.py, architectures with VLLM_USE_BREAKABLE_CUDAGRAPH)."""
    m = scenario.model
    own = m.compressed_attention is not None or m.block_indexer is not None or own_selected(scenario)
    return scenario.for_serving.cuda_graphs and not own


def is_llama(m: ModelConfig, above: int | None) -> bool:
    """Whether a model has Llama's code and is wider than `above` (None: it is not)."""
    return above is not None and m.hidden > above and all(getattr(m, key) == value for key, value in LLAMA.items())
