"""What the pipeline stages of a served model hold, and what their host launches."""

from __future__ import annotations

from collections import Counter

from sim.core.operator_kinds import MOE_LAYER
from sim.core.program import Compute
from sim.inputs.serving_keys import ServedLora
from sim.models.layers import Attention, LayerSpec
from sim.models.serving.adapters import adapter_products
from sim.models.serving.operators import ServingDims, embedding_tokens, head_samples
from sim.prices.kernel_file import kernel_file
from sim.prices.profile import Profile
from sim.ranks.plan import Plan
from sim.serve.prices.iteration_parts import StageLayers


def attentions_of(specs: tuple[LayerSpec, ...]) -> tuple[Attention, ...]:
    """The distinct ones of the layers that have any."""
    return tuple(dict.fromkeys([spec.attention for spec in specs if spec.attention is not None]))


def launched_kernels(
    d: ServingDims,
    specs: tuple[LayerSpec, ...],
    attentions: tuple[Attention, ...],
    stage: StageLayers,
    lora: ServedLora | None,
) -> int:
    """Launches of an iteration of single tokens on a stage, collectives among them."""
    parts = [
        *((spec.serve_tokens(d, 1), n) for spec, n in zip(specs, stage.layers, strict=True)),
        *((attention.decode(d, 1, 1), n) for attention, n in zip(attentions, stage.attentions, strict=True)),
        (embedding_tokens(d, 1), stage.embedding),
        (head_samples(d, 1), stage.head),
    ]
    if lora is not None:
        added = [adapter_products(d, spec, lora.targets, lora.rank, 1, 1) for spec in specs]
        parts += list(zip(added, stage.layers, strict=True))
    return sum(n * sum(item.kernels if isinstance(item, Compute) else 1 for item in part) for part, n in parts)


def launched_pieces(d: ServingDims, attentions: tuple[Attention, ...], stage: StageLayers) -> int:
    """Launches of an iteration on a stage whose CUDA graphs have all but attention: in every layer the kernels of
    attention, what writes keys and values to the cache, and the graph before these; a last graph (vLLM,
    config/compilation.py, splitting_ops; v1/attention/backends/flash_attn.py: `reshape_and_cache_flash` and attention
    are in one split operator).
    """
    each = [sum(i.kernels if isinstance(i, Compute) else 1 for i in a.decode(d, 1, 1)) + 2 for a in attentions]
    return sum(n * launches for n, launches in zip(stage.attentions, each, strict=True)) + 1


def experts_measured(profile: Profile, dims: ServingDims) -> bool:
    """Whether the profile has whole layers of experts in their format."""
    known = {table.op for table in profile.points}
    known |= {name.op for name in kernel_file(profile.kernels).tables} if profile.kernels else set()
    if dims.expert_table and f"{MOE_LAYER}:{dims.expert_table}" in known:
        return True
    if dims.expert_weight_bytes != dims.weight_bytes:
        return False
    alike = {"fp16": "bf16", "mxfp8": "fp8"}.get(dims.experts_dtype, dims.experts_dtype)
    own = {table.dtype for table in profile.points if table.op == MOE_LAYER}
    own |= {t.dtype for t in kernel_file(profile.kernels).tables if t.op == MOE_LAYER} if profile.kernels else set()
    return alike in own


def stages_of(
    plan: Plan, specs: tuple[LayerSpec, ...], kinds: tuple[LayerSpec, ...], attentions: tuple[Attention, ...]
) -> tuple[StageLayers, ...]:
    """Parts dealt to pipeline ranks in turn; serving runs a rank's parts one after another."""
    pp, out = plan.scenario.parallelism.pp, []
    for i in range(pp):
        parts = plan.parts[i::pp]
        layers = Counter([specs[n] for part in parts for n in part.layers])
        attending = Counter(specs[n].attention for part in parts for n in part.layers)
        first, last = any(p.embedding for p in parts), any(p.head for p in parts)
        counts = tuple([layers[kind] for kind in kinds]), tuple([attending[a] for a in attentions])
        out.append(StageLayers(i * plan.mesh.strides["pp"], *counts, first, last))
    return tuple(out)
