"""Activation recomputation: what of a layer is kept and what is run again before its backward.

- none: everything is kept;
- selective: the attention core runs again, its inner tensors are not kept (Korthikanti 2022, section 5); or other
  parts of a layer (`sim.models.activation_memory.recompute_modules`);
- selective_op: of the layer's matmuls every second runs again, and everything that is no matmul, and grouped matmuls;
  outputs of the other matmuls, of fused attention, of reduce-scatters and of all-to-alls are kept (torchtitan,
  distributed/activation_checkpoint.py: `default_activation_checkpoint_policy`);
- full: the layer's forward runs again, communication included; only its input is kept. `layers: n`: the first n layers
  of each stage (Megatron's block method, per virtual stage); `every: k`: each k-th layer of the model.

With selective_op and full torch's checkpoint stops at the last tensor that the backward needs (`early_stop`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from sim.core.program import Block, BlockKind, Comm, Compute, Item, Program, Saved, TensorRole, Wait, WeightShape
from sim.models.activation_memory.recompute_modules import CORE, module_kept
from sim.models.dims import Dims
from sim.models.operators import (
    Operator,
    backward_moments,
    backward_of,
    backward_peak,
    forward_of,
    rerun,
    saved_of,
    tensors_of,
)
from sim.variants.frameworks.records import framework_of

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.inputs.training_config import RecomputeModule

RerunEnd = Literal["layer", "saved"]  # with the layer, or with the last tensor that the backward needs
KEPT_MESSAGES = ("reduce_scatter", "all_to_all")  # whose outputs selective_op keeps rather than send again


class RecomputePlan(Struct, frozen=True):
    """The outcome: the program to rerun, what is kept, the backward's transient bytes, and what it brings back for
    weight gradients. `moments`: see `Block.backward_moments`."""

    recompute: Program
    saved: tuple[Saved, ...]
    backward_peak_bytes: float
    rebuilt_bytes: float = 0.0
    moments: tuple[tuple[float, int], ...] = ()


def as_block(name: str, kind: BlockKind, key: str, parts: Sequence[Operator], kept: RecomputePlan) -> Block:
    """The parts as one piece of the model, of which `kept` stays."""
    return Block(
        name=name,
        kind=kind,
        forward=forward_of(parts),
        backward=backward_of(parts),
        recompute=kept.recompute,
        saved=kept.saved,
        params=sum(p.params for p in parts),
        tensors=tensors_of(parts),
        shared=tuple(n for p in parts if p.params for n in p.shared),
        expert_params=sum(p.expert_params for p in parts),
        frozen_params=sum(p.frozen for p in parts),
        few_bit_params=sum(p.few_bits for p in parts),
        forward_peak_bytes=max(p.forward_bytes for p in parts),
        backward_peak_bytes=kept.backward_peak_bytes,
        rebuilt_bytes=kept.rebuilt_bytes,
        backward_moments=kept.moments,
        key=key,
        matrices=_matrices(parts, False) if kind in (BlockKind.LAYER, BlockKind.MTP) else (),
        expert_matrices=_matrices(parts, True),
    )


def _matrices(parts: Sequence[Operator], experts: bool) -> tuple[WeightShape, ...]:
    """The trained weight matrices of experts, or of all else; a grouped matmul's for each of its experts."""
    found: Counter[tuple[int, int]] = Counter()
    for p in parts:
        elements = sum(n * k for n, k in p.weights)
        if not p.frozen and elements and bool(p.expert_params) is experts:
            for shape in p.products or p.weights:
                found[shape] += p.expert_params // elements if experts else 1
    return tuple(WeightShape(number, *shape) for shape, number in found.items())


def keep_all(parts: Sequence[Operator]) -> RecomputePlan:
    """Return what stays of parts that no residual stream passes by and nothing is run again of: embedding and head."""
    return RecomputePlan((), saved_of(parts), backward_peak(parts), moments=backward_moments(parts))


def mode_of_layer(scenario: Scenario, layer: int) -> str:
    """none, selective, selective_op or full for layer `layer`, counted over the whole model."""
    t = scenario.training
    if t is None or t.recompute.mode != "full":
        return "none" if t is None else t.recompute.mode
    if t.recompute.every is not None:
        return "full" if layer % t.recompute.every == 0 else "none"
    if t.recompute.layers is not None:
        return "full" if _place_in_stage(scenario.parallelism.stage_layers, layer) < t.recompute.layers else "none"
    return "full"


def _place_in_stage(stage_layers: Sequence[int], layer: int) -> int:
    for count in stage_layers:
        if layer < count:
            return layer
        layer -= count
    return layer


def rerun_end(scenario: Scenario, in_parts: bool = False) -> RerunEnd:
    """Where the recomputation of a layer, full or by operator, ends. `in_parts`: torch's checkpoint is around the parts
    of a layer that are compiled, and torchtitan's ends with the layer unless a switch says otherwise
    (config/job_config.py of 0.2.2: `early_stop`)."""
    t = scenario.training
    if in_parts and t is not None and t.recompute.early_stop is None:
        return "layer"
    return "saved" if stops_early(scenario) else "layer"


def stops_early(scenario: Scenario) -> bool:
    """Tell whether recomputation, full or by operator, ends at the last tensor that the backward needs: as the scenario
    says, else as the framework's checkpoint does."""
    t = scenario.training
    if t is None or t.recompute.early_stop is not None:
        return t is not None and bool(t.recompute.early_stop)
    return bool(framework_of(t).checkpoint_stops_early)


def modules_of(scenario: Scenario) -> tuple[RecomputeModule, ...]:
    """The parts of a layer that mode selective runs again."""
    return CORE if scenario.training is None else scenario.training.recompute.modules


def keep(
    d: Dims,
    parts: Sequence[Operator],
    mode: str,
    end: RerunEnd = "layer",
    modules: Sequence[RecomputeModule] = CORE,
) -> RecomputePlan:
    """Apply `mode` to a layer's parts in forward order; `end`: see `rerun_end`."""
    saved, stream = saved_of(parts), d.stream_bytes
    whole = sum(s.bytes for s in saved)
    peak = backward_peak(parts, stream)
    if mode == "none":
        return RecomputePlan((), saved, peak)
    layer_input = Saved("input", stream, role=TensorRole.INPUT, module="layer_input" if mode == "full" else "")
    rebuilt = sum(s.bytes for s in saved if s.late)
    if mode == "full":
        again = forward_of(parts) if end == "layer" else _until_last_saved(parts)
        return RecomputePlan(rerun(again), (layer_input,), peak + whole - stream, rebuilt)
    if mode == "selective":
        again, kept = module_kept(parts, modules)
        late = rebuilt - sum(s.bytes for s in kept if s.late)
        return RecomputePlan(rerun(again), kept, peak + whole - sum(s.bytes for s in kept), late)
    again, outputs = _by_operator(d, parts, end)
    kept = (layer_input, *outputs)
    return RecomputePlan(rerun(again), kept, max(stream, peak + whole - sum(s.bytes for s in kept)), rebuilt)


def _until_last_saved(parts: Sequence[Operator]) -> Program:
    """A forward up to the last tensor kept: all of it but, without dropout, the last matmul, the sum of its result over
    tensor-parallel ranks, and the residual sum.

    torch.utils.checkpoint (not reentrant, from 2.1): what comes after the last tensor saved is not run, messages
    included, on all ranks alike.
    """
    last, made_before = _last_saved(parts)
    casts = [i for i in parts[last].forward if made_before and isinstance(i, Compute) and i.kind == "cast"]
    return forward_of(parts[: last + (not made_before)]) + tuple(casts)


def _last_saved(parts: Sequence[Operator]) -> tuple[int, bool]:
    """Return the place of the last part that keeps a tensor, and whether all that it keeps is there before it runs: its
    inputs, which it may cast."""
    last = max((i for i, p in enumerate(parts) if saved_of([p])), default=-1)
    return last, last >= 0 and all(s.role is TensorRole.INPUT for s in saved_of([parts[last]]))


def _by_operator(d: Dims, parts: Sequence[Operator], end: RerunEnd) -> tuple[Program, list[Saved]]:
    """Return what mode selective_op runs again, and the outputs that it keeps: of every second matmul, and of
    messages. Grouped matmuls of experts are not in torchtitan's list, and run again; so does a router's, which is not
    counted (`force_recompute_mm_shapes_by_fqns`).

    torchao's 8-bit matmuls count as well: the policy sees `aten.mm` of two quantized tensors, before it becomes
    `aten._scaled_mm`. torch.utils.checkpoint caches outputs while the forward runs (`_CachingTorchDispatchMode`), also
    those of operators that a rerun ending early (`_StopRecomputationError`) does not come to.
    """
    again: list[Item] = []
    kept: list[Saved] = []
    matmuls = 0
    last, made_before = _last_saved(parts)
    compiled = d.framework.uses_torch_compile
    stops = end == "saved" and not compiled
    for place, part in enumerate(parts):
        if part.core:
            statistics = [] if d.framework.reruns_attention else _statistics(part)
            kept += [Saved("attention output", part.output_bytes), *statistics] if statistics else []
            again += () if statistics else part.forward
            continue
        products, seen = 0 if part.always_again else _products(d, part), 0
        unread = compiled and _unread(part, place - last)
        reads = not unread and not (stops and place + made_before > last)
        for item in part.forward:
            size: float | None = None  # of the output, where it is kept
            if isinstance(item, Compute) and item.kind == "gemm" and not part.always_again:
                batch, m, n, _ = item.shape
                number, seen = matmuls + 1 + seen % products, seen + 1
                size = batch * m * n * d.act_bytes if number % 2 and not unread else None
            elif isinstance(item, Comm) and item.kind in KEPT_MESSAGES:
                size = item.bytes / d.tp if item.kind == "reduce_scatter" else item.bytes
            if size is not None and not isinstance(item, Wait):
                needless = unread and place >= last and not d.framework.keeps_unread_sums
                kept += [] if needless else [Saved(f"{item.name} output", size)]
            elif reads or (isinstance(item, Compute) and item.kind == "cast" and not (stops and place > last)):
                again.append(item)  # of a part whose result is not read: casts that weight gradients read
        matmuls += products
    return tuple(again), kept


def _products(d: Dims, part: Operator) -> int:
    """Count a part's matmuls; the chunks of one (`tp_overlap: full`), for each of its weights in turn, are one."""
    count = sum(isinstance(item, Compute) and item.kind == "gemm" for item in part.forward)
    chunked = d.tp_overlap == "full" and d.lora is None and part.weights and count % len(part.weights) == 0
    return len(part.weights) if chunked else count


def _unread(part: Operator, behind: int) -> bool:
    """Tell whether a backward reads nothing that a part makes, `behind` parts behind the last one that keeps a tensor.

    A compiled backward runs again what it reads alone (torch/_functorch/partitioners.py:
    `_extract_graph_with_inputs_outputs`, `reordering_to_mimic_autograd_engine`; recorded with torch 2.6, 2.8 and 2.14):
    no matmul before a reduce-scatter, whose sum is kept, and neither the last matmul nor what follows it. It keeps no
    result of these, but for the last sum under `Framework.keeps_unread_sums`.
    """
    ends_in_sum = any(isinstance(i, Comm) and i.kind == "reduce_scatter" for i in part.forward)
    return behind > 0 or (bool(part.weights) and (behind == 0 or ends_in_sum))


def _statistics(core: Operator) -> list[Saved]:
    """Return what a fused core's backward starts from beside its output; nothing of an unfused one, which runs again
    whole (its batched matmuls are not among the operators whose outputs torchtitan's policy saves)."""
    return [s for s in core.saved if s.role is TensorRole.STATISTICS]
