"""What a serving rank's memory holds: weights, an iteration's tensors, and the cache in what is left."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.inputs.engine_file import engine_of
from sim.inputs.scenario import Scenario
from sim.inputs.workloads import Inference
from sim.models.activations.kernels import is_gated
from sim.models.dims import ceil_div
from sim.models.layer_inputs import layer_inputs_of
from sim.models.layers import Attention, LayerSpec, norm_elements
from sim.models.layers.grouped_query import GroupedQueryAttention as Grouped
from sim.models.layers.latent import LatentAttention
from sim.models.serving.adapters import adapter_elements
from sim.models.serving.operators import ServingDims
from sim.models.streams.sizes import streams_of
from sim.serve.cache.layer_groups import CacheGroups, Layers, room_for, state_block
from sim.serve.prices.costs import IterationCosts
from sim.serve.prices.iteration_parts import StageLayers
from sim.serve.prices.weight_offload import layer_weight_bytes
from sim.serve.requests import Request

UNLIMITED = 2**62  # blocks


class Capacity(NamedTuple):
    """Cache of one replica. `blocks` are simulated, `blocks_fit` what there is room for on the fullest stage, at most
    as many as `kv_cache.max_tokens` has; `room`: also beyond these.

    `longest_fit`: blocks of the longest request that the engine is made ready for, of which layers with windows keep
    less (`Inference.longest`). `token_bytes`: of one token on the stage with most layers (`stage_token_bytes`: the
    same, what a host copy moves per GPU). `reserve_tokens`: what a sequence holds from the start in the contiguous
    layout, else 0.
    """

    blocks: int
    blocks_fit: int
    room: int
    longest_fit: int
    reserve_tokens: int
    token_bytes: tuple[float, ...]
    weight_bytes: tuple[float, ...]
    buffer_bytes: tuple[float, ...]
    host_tokens: int

    @property
    def starts(self) -> bool:
        """Whether an engine finds room for a cache at all."""
        return self.blocks_fit > 0

    @property
    def stage_token_bytes(self) -> float:
        return max(self.token_bytes)


def _token_bytes(costs: IterationCosts, groups: CacheGroups, stage: StageLayers, length: float, states: int) -> float:
    """Cache of a stage's layers for a token of sequences of `length`, and what these keep for embeddings of n-grams;
    `states`: of a layer, for each sequence."""
    own = zip(costs.specs, stage.layers, strict=True)
    ngrams = sum([n * spec.ngrams.sequence_bytes(costs.dims) for spec, n in own if spec.ngrams is not None])
    cached = groups.sequence_bytes(costs.dims, costs.attentions, stage.attentions, length, states) / length
    return (cached + _unseen_bytes(costs, stage, length) + ngrams / length) / costs.dims.cp


def _groups(costs: IterationCosts) -> CacheGroups:
    """The groups of a model's layers, and of its draft's."""
    if not costs.host.engine.layer_groups:
        return CacheGroups()
    layers = [
        Layers(own.dims, attention, n)
        for own in (costs, costs.draft)
        if own is not None
        for stage in own.stages
        for attention, n in zip(own.attentions, stage.attentions, strict=True)
    ]
    return CacheGroups(room_for(layers), state_block(costs.dims, costs.attentions))


def _unseen_bytes(costs: IterationCosts, stage: StageLayers, length: float) -> float:
    """Cache of a token that layers with windows have room for, although none sees it, as `Engine.unseen_share` says."""
    d, share = costs.dims, costs.host.engine.unseen_share
    grouped = [(a, n) for a, n in zip(costs.attentions, stage.attentions, strict=True) if isinstance(a, Grouped)]
    if not share or all(a.window is not None for a in costs.attentions if isinstance(a, Grouped)):
        return 0.0
    found = 0.0
    for a, n in grouped:
        whole = replace(a, window=None).sequence_bytes(d, length)
        found += n * max(0.0, share * whole - a.sequence_bytes(d, length))
    return found / length


def weight_bytes(d: ServingDims, specs: tuple[LayerSpec, ...], stage: StageLayers) -> float:
    """Weights of one rank of a stage, in the formats the scenario keeps them in."""
    total = 0.0
    for spec, layers in zip(specs, stage.layers, strict=True):
        if layers:
            total += layers * (layer_weight_bytes(d, spec) + absorbed_bytes(d, spec))
    m = d.model
    tied_here = m.tied_embeddings and stage.embedding and stage.head
    entries = stage.embedding * d.vocab + (stage.head and not tied_here) * (d.head_vocab or d.vocab)
    total += entries * m.hidden * d.act_bytes
    if stage.embedding and m.positions == "learned":
        total += m.max_positions * m.hidden * d.act_bytes
    if stage.embedding and (own := layer_inputs_of(m)) is not None:
        total += own.served_table(d.tp) * d.act_bytes
    if stage.head and m.head_bias:
        total += (d.head_vocab or d.vocab) * d.act_bytes
    if stage.head:
        last = streams_of(m)
        total += last.head_parameters * (FP32_BYTES if last.in_fp32 else d.act_bytes)
    norms = (stage.head and not streams_of(m).gated) + (stage.embedding and m.embedding_norm)
    return total + norms * norm_elements(m) * d.act_bytes


def absorbed_bytes(d: ServingDims, spec: LayerSpec) -> float:
    """The up-projection of latents once more in 16 bits, where it is kept in fewer: prompts go through it, single
    tokens' queries and results absorb it (vLLM, process_weights_after_loading of its MLA layers: W_UK_T and W_UV out of
    get_and_maybe_dequant_weights; SGLang, deepseek_v2.py: w_kc and w_vc, out of a checkpoint's blocks by
    block_quant_dequant). Where it is absorbed in fp8 the keys' part alone, in fp8 (TensorRT-LLM, k_b_proj_trans);
    where it is converted each time all of it in fp8."""
    attention, d = spec.attention, spec.attention_dims(d)
    if not isinstance(attention, LatentAttention) or d.weight_bytes >= d.act_bytes:
        return 0.0
    elements = attention.matrices(d.tp)[-2].elements
    if d.latents.absorbed == "widened":
        return elements
    if d.latents.absorbed == "narrow":
        return elements * attention.plain_width / (attention.plain_width + attention.value_width)
    return elements * d.act_bytes


def routed_bytes(d: ServingDims, specs: tuple[LayerSpec, ...], stage: StageLayers) -> float:
    """Weights of a stage's routed experts on one rank."""
    own = [spec.served_elements(d).experts * spec.mlp_dims(d).expert_weight_bytes for spec in specs]
    return sum([n * each for n, each in zip(stage.layers, own, strict=True)])


def adapter_bytes(costs: IterationCosts, stage: StageLayers) -> float:
    """One LoRA adapter on one rank of a stage, in 16 bits."""
    lora, d = costs.lora, costs.dims
    if lora is None:
        return 0.0
    own = [adapter_elements(spec, d.tp, lora.targets, lora.rank) for spec in costs.specs]
    return sum([n * each for n, each in zip(stage.layers, own, strict=True)]) * d.act_bytes


def _places_bytes(costs: IterationCosts, stage: StageLayers) -> float:
    """What is set aside for as many adapters as may be on a GPU at once."""
    return 0.0 if costs.lora is None else costs.lora.places * adapter_bytes(costs, stage)


def buffer_bytes(
    d: ServingDims,
    specs: tuple[LayerSpec, ...],
    stage: StageLayers,
    tokens: int,
    samples: int,
    longest: int = 0,
    draws: bool = False,
) -> float:
    """The most that an iteration of `tokens` holds beside weights and cache: the residual stream and its sum, and the
    widest of what attention or the MLP make of it; at the head the logits, their fp32 copy, and what choosing tokens
    out of them holds where tokens are drawn, or room for that is kept (`Engine.room_for`).

    Unfused attention holds scores and probabilities of all its tokens against `longest` keys besides."""
    m = d.model
    inner = max((spec.mlp.widest(d.tp) for spec in specs if spec.mlp is not None), default=0.0)
    widths = [spec.attention.expanded_width(d.tp) for spec in specs if spec.attention is not None]
    wide = max(*widths, inner * (3 if is_gated(m.mlp) else 2))
    layer = tokens * (2 * d.stream_width + wide) * d.act_bytes
    if not d.fused_attention:
        heads = max(m.heads, (m.full_attention.heads if m.full_attention else None) or 0)
        layer += 2 * tokens * longest * ceil_div(heads, d.tp) * d.act_bytes
    gathered = d.head_tp // d.tp or 1  # replicas whose logits every rank has
    each = gathered * d.act_bytes + 4.0 + (d.sampler.held_bytes(samples) if draws or d.sampling else 0.0)
    logits = samples * d.vocab * d.tp * each if stage.head else 0.0
    return max(layer, tokens * d.stream_width * d.act_bytes + logits)


def keys_on_their_way(d: ServingDims, attentions: tuple[Attention, ...], longest: int) -> float:
    """Context parallelism: keys and values of one layer that a rank holds beside its own. Two parts in a ring, one in
    use and one arriving; all of the longest prompt's where they are gathered."""
    if d.cp == 1:
        return 0.0
    tokens = 2 * ceil_div(longest, d.cp) if d.cp_method == "ring" else longest
    return max([a.sequence_bytes(d, tokens) for a in attentions])


def iteration_tokens(inference: Inference, requests: Items[Request]) -> int:
    """The most tokens of an iteration. An engine that cuts no prompts must be told more where `max_batch_tokens` has no
    room for the longest prompt and, where prompts run beside tokens, one token of every request that runs.

    TensorRT-LLM schedules requests in the order of their arrival and stops at the first that exceeds the tokens (cpp/
    tensorrt_llm/batch_manager/microBatchScheduler.cpp): a prompt of just so many tokens waits until no other request
    runs, and a longer one is refused (llmapi/llm.py, _check_arguments). So whoever runs such prompts tells it more
    (bench/benchmark/utils/general.py). vLLM 0.6: no less than max_model_len (config.py)."""
    most, longest = inference.max_batch_tokens, max([r.prompt_tokens for r in requests])
    engine = engine_of(inference.engine)
    if inference.chunked_prefill or not engine.whole_prompts:
        return most
    beside = min(inference.max_running_requests, len(requests)) if engine.prompts_beside else 0
    return max(most, longest + beside)


class _Held(NamedTuple):
    """Bytes on a GPU: weights, an iteration's tensors, and the cache of each token; of a draft in `drafts`."""

    weights: float
    buffers: float
    token: float
    drafts: tuple[float, float] = (0.0, 0.0)  # weights, and the cache of each token


def _held(
    i: Inference, costs: IterationCosts, weights: tuple[float, ...], buffers: tuple[float, ...], length: float
) -> list[_Held]:
    """What the GPUs of each stage hold, a token's cache as in sequences of `length`; a draft is the last stage's."""
    states = 1 if i.speculative is None else 1 + i.speculative.checked
    groups = _groups(costs)
    per_token = [_token_bytes(costs, groups, s, length, states) for s in costs.stages]
    held = [_Held(*of_stage) for of_stage in zip(weights, buffers, per_token, strict=True)]
    if (draft := costs.draft) is not None:
        (own,) = draft.stages
        if i.drafts == "layer":  # the tables are the last stage's, but EAGLE-3's output matrix
            own = replace(own, embedding=len(costs.stages) > 1, head=_own_head(i))
        token = groups.sequence_bytes(draft.dims, draft.attentions, own.attentions, length) / length
        held[-1] = held[-1]._replace(drafts=(weight_bytes(draft.dims, draft.specs, own), token))
    return held


def _own_head(i: Inference) -> bool:
    """Whether a draft that reads hidden states has an output matrix: EAGLE-3's, of a vocabulary of its own (vLLM 0.33,
    v1/spec_decode/llm_base_proposer.py, _maybe_share_lm_head)."""
    return i.speculative is not None and i.speculative.hidden_states > 1


def _blocks_fit(scenario: Scenario, others_bytes: float, static: bool, held: _Held) -> int:
    """Blocks of a cache of f·(m·memory - weights - buffers) bytes on a GPU, of m `memory_fraction` and f
    `free_fraction`. The memory is what CUDA shows, which engines ask it for (vLLM, utils/mem_utils.py: mem_get_info).

    vLLM has m alone (gpu_memory_utilization), TensorRT-LLM f alone (free_gpu_memory_fraction). SGLang's m is of the
    model's weights and cache (mem_fraction_static); buffers and the draft, which is loaded later and has as many tokens
    in its own cache, have room in the rest (srt/managers/scheduler.py; srt/model_executor/model_runner.py,
    draft_runner_cache_size), since 0.5.14 in m as well (`Engine.drafts_inside`). Static batching allocates what it
    needs. `memory_bytes` take the place of both, as far as the GPU has them (vLLM, v1/worker/gpu_worker.py,
    determine_available_memory: kv_cache_memory_bytes).

    What others hold when the engine starts (a trainer that takes turns with it) is no part of vLLM's m, which must be
    free beside it (v1/worker/utils.py, request_memory; utils/mem_utils.py, memory_profiling: what its own process
    adds). SGLang's m is of what is free then (srt/model_executor/model_runner.py, profile_max_num_token). What the
    process takes beside tensors (`Engine.outside`) no cache can have. vLLM takes what it counts of this off its share;
    SGLang has its share of what all of it leaves.
    """
    cache, memory = scenario.for_serving.kv_cache, scenario.cluster.gpu.shown_bytes
    engine, own, f = engine_of(scenario.for_serving.engine), outside_of(scenario), cache.free_fraction
    free, share = memory - others_bytes - own.held, cache.memory_fraction
    kept = free * share if engine.activations_outside else min(memory * share - own.counted, free)
    taken, token = held.weights + held.drafts[0] + held.buffers, held.token + held.drafts[1]
    if static or cache.memory_bytes is not None:
        rooms = [(free - taken, token), *([] if static else [(cache.memory_bytes or 0.0, token)])]
    elif engine.activations_outside:
        inside = (held.weights + held.drafts[0], token) if engine.drafts_inside else (held.weights, held.token)
        rooms = [((kept - inside[0]) * f, inside[1]), ((free - taken) * f, token)]
    else:
        rooms = [((kept - taken) * f, token)]
    return min(int(max(0.0, room) // (each * cache.block_tokens)) for room, each in rooms)


class Outside(NamedTuple):
    """Bytes of a GPU beside an engine's tensors: all `held`, and what is `counted` in the engine's share, of these or
    for CUDA graphs."""

    held: float = 0.0
    counted: float = 0.0


def outside_of(scenario: Scenario) -> Outside:
    """What an engine's process takes of a GPU beside its tensors; nothing is known of hosts without a GPU."""
    p, cluster = scenario.parallelism, scenario.cluster
    if cluster.gpu.architecture == "cpu":
        return Outside()
    outside = engine_of(scenario.for_serving.engine).outside
    server = p.tp * p.cp * p.pp * p.sharing_replicas, cluster.intra_node.kind == "pcie"
    graphs = outside.graphs * cluster.gpu.shown_bytes if scenario.for_serving.cuda_graphs else 0.0
    return Outside(outside.bytes(*server), outside.counted_bytes(*server) + graphs)


def _most_blocks(i: Inference) -> int:
    """Whole blocks that a cache may have where somebody limits its tokens; a static batch takes what it needs (vLLM,
    v1/core/kv_cache_utils.py, may_override_num_blocks; SGLang, model_executor/model_runner_kv_cache_mixin.py,
    _apply_token_constraints)."""
    if i.kv_cache.max_tokens is None or i.batching == "static":
        return UNLIMITED
    return i.kv_cache.max_tokens // i.kv_cache.block_tokens


def _for_all(scenario: Scenario, weights: tuple[float, ...]) -> bool:
    """Whether a server that does not start for its weights is simulated with a cache for all that may run: where its
    iterations cannot be taken together, those of one request after another would take minutes."""
    i, memory = scenario.for_serving, scenario.cluster.gpu.shown_bytes
    one_by_one = scenario.parallelism.sharing_replicas > 1 or i.speculative is not None or i.lora is not None
    return one_by_one and any(own > memory for own in weights)


def _samples(scenario: Scenario, sequences: int, requests: Items[Request]) -> int:
    """Of `sequences` that may run, the most that choose a token in an iteration."""
    samples = min(sequences, len(requests))
    if engine_of(scenario.for_serving.engine).activations_outside:  # which sets nothing aside for more than run
        samples = min(samples, ceil_div(len(requests), scenario.parallelism.dp))
    return samples


def _buffers(scenario: Scenario, costs: IterationCosts, requests: Items[Request], samples: int) -> tuple[float, ...]:
    """Bytes on each stage of the tensors of the iteration that has room beside the cache (`Engine.room_for`), in which
    `samples` sequences choose a token where the requests decide; a static batch is computed in one."""
    i, d, dp = scenario.for_serving, costs.dims, scenario.parallelism.dp
    prompts, prompt = sum(r.prompt_tokens for r in requests), max(r.prompt_tokens for r in requests)
    most = tokens = iteration_tokens(i, requests)
    room = engine_of(i.engine).room_for if i.batching == "continuous" else "requests"
    if i.batching == "static":
        tokens = ceil_div(prompts, dp)
    elif room == "requests":
        tokens = min(most, prompts + len(requests))
    elif room == "limits":
        samples = min(i.max_running_requests, most)
    passing = keys_on_their_way(d, costs.attentions, prompt)
    sizes = ceil_div(tokens, d.cp), samples, prompt, room == "limits"
    return tuple([buffer_bytes(d, costs.specs, s, *sizes) + passing for s in costs.stages])


def cache_capacity(
    scenario: Scenario, costs: IterationCosts, requests: Items[Request], held_bytes: float = 0.0
) -> Capacity:
    """Blocks that fit beside weights, buffers and others' `held_bytes` (`_blocks_fit`).

    Every stage must hold its layers' part of every block, so the stage with least room decides. Where not even the
    longest request fits (for static batching: the whole batch), just enough blocks for it are simulated; where not even
    the weights fit and iterations are simulated one by one, enough for all that may run, which are fewer. A block's
    bytes are those of a sequence of the requests' mean length, where layers with windows keep less than others. A
    draft has its weights and its part of every block on the last stage's ranks; the model's own layer also a copy of
    the embedding there, where that is not the first stage (vLLM, v1/spec_decode/llm_base_proposer.py,
    _maybe_share_embeddings).
    """
    i, d = scenario.for_serving, costs.dims
    drafted = 0 if i.speculative is None else i.speculative.checked
    longest = max(r.prompt_tokens + r.output_tokens for r in requests) + drafted
    contiguous = i.kv_cache.layout == "contiguous"
    reserve = max(longest, d.model.max_positions if d.model.max_positions > 1 else 0) if contiguous else 0
    block = i.kv_cache.block_tokens
    static = i.batching == "static"
    sequences = ceil_div(len(requests), scenario.parallelism.dp) if static else i.max_running_requests
    samples = _samples(scenario, sequences, requests)
    buffers = _buffers(scenario, costs, requests, samples)
    weights = tuple(weight_bytes(d, costs.specs, s) + _places_bytes(costs, s) for s in costs.stages)
    if costs.afd is not None:  # other GPUs have them
        weights = tuple([w - routed_bytes(d, costs.specs, s) for w, s in zip(weights, costs.stages, strict=True)])
    if costs.offloaded:
        weights = tuple([w - own.host_bytes for w, own in zip(weights, costs.offloaded, strict=True)])
        buffers = tuple([b + own.room_bytes for b, own in zip(buffers, costs.offloaded, strict=True)])
    mean = sum(r.prompt_tokens + r.output_tokens for r in requests) / len(requests)
    held = _held(i, costs, weights, buffers, mean)
    per_token = tuple([of_stage.token + of_stage.drafts[1] for of_stage in held])
    alone, weights = weights, tuple([of_stage.weights + of_stage.drafts[0] for of_stage in held])

    def room(stages: list[_Held]) -> int:
        return min(_blocks_fit(scenario, held_bytes, static, of_stage) for of_stage in stages if of_stage.token)

    allowed, all_fit = _most_blocks(i), room(held)
    fit = min(allowed, all_fit)
    longest_fit = min(allowed, room(_held(i, costs, alone, buffers, i.longest(d.model) or mean)))
    each = -(-max(longest - 1, reserve) // block)
    engine = engine_of(i.engine)  # a block more where no sequence goes on without a free one, or computes one again
    spare = int(engine.watermark is not None or (engine.drops_last_hit and i.drafts == "layer"))
    needed = each * (sequences if static else samples if _for_all(scenario, weights) else 1) + spare
    host_bytes = scenario.cluster.gpu.memory_bytes
    host_tokens = int(host_bytes // max(per_token))
    return Capacity(max(fit, needed), fit, all_fit, longest_fit, reserve, per_token, weights, buffers, host_tokens)
