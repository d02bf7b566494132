"""Rules between keys of a serving workload."""

from __future__ import annotations

from sim.core.dtypes import sixteen_bit
from sim.core.units import counted
from sim.inputs.engine_file import all2all_of, engine_of
from sim.inputs.input_source import Problems
from sim.inputs.rules.drafts import speculative_problems
from sim.inputs.rules.layout import ALL_RULES, first_problem
from sim.inputs.sections import Sections, sizes_of
from sim.inputs.serving_keys import HASHED_TOKENS, Sampling
from sim.inputs.workloads import Inference, RequestPattern
from sim.variants.all2all import BACKENDS
from sim.variants.engines import ENGINES


def serving_problems(sections: Sections, inference: Inference) -> Problems:
    """Return what is wrong with a serving workload."""
    for rule in (
        _inference,
        _budget,
        _graphs,
        _preemption,
        _capacity_policy,
        _conservativeness,
        _waits,
        _prompt_limit,
        _stages,
        _pools,
        _all2all,
        _asynchronous,
        _two_batches,
        _eplb,
        speculative_problems,
        _autoscaling,
        _lora,
        _sampling,
        _afd,
    ):
        yield from rule(sections, inference)
    if sections.parallelism.cp > 1 and inference.attention == "unfused":
        yield ("inference", "attention"), "found 'unfused'; prompts split over cp ranks need fused attention"


def _inference(sections: Sections, inference: Inference) -> Problems:
    path, requests = ("inference",), inference.requests
    if inference.batching == "static":
        if not isinstance(requests, RequestPattern):
            yield (*path, "requests"), "found a trace; static batching takes one batch of equal requests"
        else:
            for key in ("rate_per_s", "max_concurrency", "range_ratio"):
                if value := getattr(requests, key):
                    why = "a static batch takes equal requests, all at once; leave it out"
                    yield (*path, "requests", key), f"found {value:g}; {why}"
    if isinstance(requests, RequestPattern) and requests.burstiness != 1.0 and requests.rate_per_s is None:
        why = "needs rate_per_s; requests that come all at once have no gaps"
        yield (*path, "requests", "burstiness"), f"found {requests.burstiness:g}; {why}"
    if isinstance(requests, RequestPattern) and requests.exact_rate and requests.rate_per_s is None:
        yield (*path, "requests", "exact_rate"), "found true; needs rate_per_s"
    computed, kept = sixteen_bit(inference.precision), inference.kv_cache.dtype
    if inference.attention == "unfused" and kept != computed:
        why = f"unfused attention reads the cache without converting it; allowed: {computed} (null)"
        yield (*path, "kv_cache", "dtype"), f"found '{kept}'; {why}"
    cached = inference.prefix_cache != "none"
    if cached and not inference.fills_hashes:
        why = f"must divide {HASHED_TOKENS}, the tokens for each hash of the trace"
        yield (*path, "kv_cache", "block_tokens"), f"found {inference.kv_cache.block_tokens}; {why}"
    if cached and sections.model.state_space is not None:
        why = "a state-space layer (model.state_space) keeps no state for each prefix; allowed: none"
        yield (*path, "prefix_cache"), f"found '{inference.prefix_cache}'; {why}"
    if inference.kv_cache.tiers is not None and inference.prefix_cache != "gpu":
        why = "tiers hold prefixes that the GPU's prefix cache evicts; needs inference.prefix_cache gpu"
        found = f"found tiers with prefix_cache {inference.prefix_cache}"
        yield (*path, "kv_cache", "tiers"), f"{found}; {why}"
    if cached and inference.kv_cache.layout != "paged":
        yield (*path, "prefix_cache"), f"found '{inference.prefix_cache}'; shared prefixes need kv_cache.layout paged"


def _budget(sections: Sections, inference: Inference) -> Problems:
    """vLLM ends with a ValueError where an iteration has too few tokens (config.py, SchedulerConfig._verify_args; since
    0.11 config/scheduler.py, verify_max_model_len), or a draft model leaves none (0.20, config/vllm.py,
    _set_max_num_scheduled_tokens)."""
    budget, running, engine = inference.max_batch_tokens, inference.max_running_requests, engine_of(inference.engine)
    path, words = ("inference", "max_batch_tokens"), f"engine {inference.engine} does not start with fewer than"
    if inference.batching != "static" and engine.slots_of_all and inference.drafts == "model" and budget <= running:
        why = f"engine {inference.engine} keeps one token of it for each of max_running_requests ({running:,})"
        yield path, f"found {budget:,}; {why}, for the draft model of inference.speculative; allowed: more than these"
    if inference.batching == "static" or not engine.budget_for_all:
        return
    if budget < running:
        yield path, f"found {budget:,}; {words} max_running_requests ({running:,})"
    longest = inference.max_request_tokens or 0
    if budget < longest and not inference.chunked_prefill:
        why = "and computes prompts whole (chunked_prefill false)"
        yield path, f"found {budget:,}; {words} max_request_tokens ({longest:,}) {why}"


def _graphs(sections: Sections, inference: Inference) -> Problems:
    """Some engines have a flag for sizes of CUDA graphs. The largest size and a list of sizes must agree (vLLM,
    config/vllm.py, _set_cudagraph_sizes, and TensorRT-LLM, llmapi/llm_args.py, CudaGraphConfig: a ValueError)."""
    largest, sizes = inference.cuda_graph_max_size, inference.cuda_graph_sizes
    for key, value in (("cuda_graph_max_size", largest), ("cuda_graph_sizes", sizes)):
        if value is not None and engine_of(inference.engine).asked_graphs is None:
            able = ", ".join([name for name, engine in ENGINES.items() if engine.asked_graphs is not None])
            shown = value if isinstance(value, int) else list(value)
            why = f"engine {inference.engine} has no flag for sizes of CUDA graphs; allowed with: {able}"
            yield ("inference", key), f"found {shown}; {why}"
    if largest is not None and sizes is not None and largest != max(sizes):
        why = f"the largest of cuda_graph_sizes is {max(sizes):,}; leave one of the two keys out"
        yield ("inference", "cuda_graph_max_size"), f"found {largest:,}; {why}"


def _preemption(sections: Sections, inference: Inference) -> Problems:
    """`preemption: swap` needs an engine that preempts sequences and can swap their cache to the host."""
    engine = engine_of(inference.engine)
    never = engine.never_preempts(inference.capacity_policy)
    if inference.preemption == "recompute" or inference.batching == "static" or never or engine.swaps:
        return
    able = ", ".join([name for name, other in ENGINES.items() if other.swaps])
    yield ("inference", "preemption"), f"found 'swap'; engine {inference.engine} swaps no requests; allowed with {able}"


def _capacity_policy(sections: Sections, inference: Inference) -> Problems:
    """`capacity_policy` needs an engine that has both policies."""
    if inference.capacity_policy is None or engine_of(inference.engine).admission.policies:
        return
    able = ", ".join([name for name, other in ENGINES.items() if other.admission.policies])
    why = f"engine {inference.engine} lets requests in by a rule of its own; allowed with: {able}"
    yield ("inference", "capacity_policy"), f"found '{inference.capacity_policy}'; {why}"


def _conservativeness(sections: Sections, inference: Inference) -> Problems:
    """`schedule_conservativeness` needs an engine that keeps a share of output free."""
    value = inference.schedule_conservativeness
    if value is not None and not engine_of(inference.engine).prompts_lead:
        able = ", ".join([name for name, other in ENGINES.items() if other.prompts_lead])
        why = f"engine {inference.engine} keeps no share of running requests' output free; allowed with: {able}"
        yield ("inference", "schedule_conservativeness"), f"found {value:g}; {why}"


def _waits(sections: Sections, inference: Inference) -> Problems:
    """`batch_wait` and `balanced_prompts` need an engine that has them. The first is for replicas on their own, the
    second for replicas that share experts (_torch/pyexecutor/py_executor.py, _schedule)."""
    p = sections.parallelism
    shared = max([one.sharing_replicas for one in inference.layouts(p)])
    for key, of_shared in (("batch_wait", False), ("balanced_prompts", True)):
        path, value = ("inference", key), getattr(inference, key)
        if value is None:
            continue
        if not engine_of(inference.engine).admission.waits:
            able = ", ".join([name for name, other in ENGINES.items() if other.admission.waits])
            yield path, f"engine {inference.engine} lets no prompts wait; allowed with: {able}"
        if inference.disaggregated is None and (shared > 1) != of_shared:
            yield path, f"needs replicas that share {'' if of_shared else 'no '}experts (parallelism.ep, expert_tp)"
        if p.pp > 1:
            yield path, f"is not simulated with pipeline stages (parallelism.pp {p.pp}); leave it out"


def _prompt_limit(sections: Sections, inference: Inference) -> Problems:
    """`max_prompt_tokens` needs an engine that has such a limit and computes prompts in chunks."""
    if inference.max_prompt_tokens is None:
        return
    path, found = ("inference", "max_prompt_tokens"), f"found {inference.max_prompt_tokens:,}"
    if inference.batching == "static" or not inference.chunked_prefill:
        yield path, f"{found}; it limits chunks of prompts; needs batching continuous and chunked_prefill true"
    if engine_of(inference.engine).prompt_limit == "none":
        able = ", ".join([name for name, other in ENGINES.items() if other.prompt_limit != "none"])
        why = f"engine {inference.engine} has no limit for one prompt; allowed with: {able}"
        yield path, f"{found}; {why}; elsewhere max_batch_tokens limits all prompts of an iteration"


def _stages(sections: Sections, inference: Inference) -> Problems:
    """Each pipeline stage of an engine has a layer, for whose keys and values it makes its cache."""
    pp, layers = sections.parallelism.pp, sections.model.layers
    if pp > layers:
        yield ("parallelism", "pp"), f"found {pp}; the model has {counted(layers, 'layer')}, and each stage needs one"


def _pools(sections: Sections, inference: Inference) -> Problems:
    """Disaggregated pools say how they are split; each must suit the model and find its GPUs."""
    pools, path = inference.disaggregated, ("inference", "disaggregated")
    if pools is None:
        return
    p = sections.parallelism
    for key in ("dp", "tp", "cp", "pp", "ep", "expert_tp"):
        if (value := getattr(p, key)) != 1:
            why = "each disaggregated pool has its own replicas, tp and ep; leave it out"
            yield ("parallelism", key), f"found {value}; {why}"
    for name, pool in (("prefill", pools.prefill), ("decode", pools.decode)):
        if problem := first_problem(ALL_RULES, sizes_of(sections)._replace(**pool.degrees(sections.model))):
            key = problem[0][-1] if problem[0][-1] in ("ep", "expert_tp") else "tp"
            yield (*path, name, key), problem[1]
    gpus = sections.cluster.nodes * sections.cluster.gpus_per_node
    if pools.ranks > gpus:
        yield path, f"found pools of {counted(pools.ranks, 'GPU')}; the cluster has {gpus:,} (or leave nodes out)"
    if inference.batching == "static":
        yield path, "found pools; all requests of a static batch start and end together; needs batching continuous"
    if sections.faults is not None:
        yield ("faults",), "is not simulated with inference.disaggregated; leave one of them out"


def _all2all(sections: Sections, inference: Inference) -> Problems:
    """The engine has the backend, and experts that have their own GPUs are sent what they need."""
    own, path = engine_of(inference.engine).all2all, ("inference", "all2all_backend")
    for key in ("dense_over_replicas", "head_over_replicas"):
        if getattr(inference, key) and not engine_of(inference.engine).dp_attention:
            able = ", ".join([name for name, engine in ENGINES.items() if engine.dp_attention])
            yield ("inference", key), f"found true; engine {inference.engine} cannot do that; allowed with: {able}"
    if (name := inference.all2all_backend) is None:
        return
    if name not in own:
        yield path, f"found '{name}'; engine {inference.engine} has {', '.join(own)}"
    layouts = inference.layouts(sections.parallelism)
    if not BACKENDS[name].gathers and any(one.ep == 1 and one.sharing_replicas > 1 for one in layouts):
        fit = ", ".join([one for one in own if BACKENDS[one].gathers])
        yield path, f"found '{name}'; each rank has a part of every expert (ep 1) and needs all tokens; allowed: {fit}"
    if inference.afd is not None and BACKENDS[name].gathers:
        yield path, f"found '{name}'; with inference.afd no rank gathers all tokens; allowed: all_to_all, deepep"


def _asynchronous(sections: Sections, inference: Inference) -> Problems:
    """Engines that can prepare an iteration beside the one before do so by themselves, or told to; none does where it
    cannot beside stages or drafts (vLLM, config/vllm.py: told to, it ends with a ValueError then)."""
    engine, path = engine_of(inference.engine), ("inference", "async_scheduling")
    if not inference.async_scheduling:
        return
    if not (engine.overlaps or engine.may_overlap):
        able = ", ".join([name for name, other in ENGINES.items() if other.overlaps or other.may_overlap])
        yield path, f"found true; engine {inference.engine} cannot do that; allowed with: {able}"
    elif not engine.overlaps_with(True, inference.drafts, sections.parallelism.pp, inference.of_trees):
        beside = "pipeline stages" if sections.parallelism.pp > 1 else "drafted tokens"
        yield path, f"found true; engine {inference.engine} cannot do that with {beside}; allowed: null, false"


def _two_batches(sections: Sections, inference: Inference) -> Problems:
    """Two halves overlap on engines that can, where experts' messages travel."""
    if not inference.two_batch_overlap:
        return
    path = ("inference", "two_batch_overlap")
    if engine_of(inference.engine).two_batches is None:
        able = [name for name, engine in ENGINES.items() if engine.two_batches is not None]
        yield path, f"found true; engine {inference.engine} cannot do that; allowed with: {', '.join(able)}"
    sent = any(one.sharing_replicas > 1 for one in inference.layouts(sections.parallelism))
    if not sent:
        yield (
            path,
            "found true; no tokens are sent to experts on other replicas; needs parallelism.ep, or a pool's, above tp",
        )
    engine, backend = engine_of(inference.engine), all2all_of(inference)
    if sent and engine.two_batches is not None and not backend.beside:
        fit = ", ".join([name for name in engine.all2all if BACKENDS[name].beside])
        why = f"engine {inference.engine} overlaps none of {backend.name}'s messages; needs all2all_backend {fit}"
        yield path, f"found true; {why}"
    for key in ("lora", "weight_offload"):
        if getattr(inference, key) is not None:
            yield ("inference", key), "is not simulated with inference.two_batch_overlap; leave one of them out"


def _eplb(sections: Sections, inference: Inference) -> Problems:
    """Experts are placed by popularity on engines that do, where ranks have experts of their own."""
    eplb, p, pools = inference.eplb, sections.parallelism, inference.disaggregated
    if eplb is None:
        return
    path = ("inference", "eplb")
    if not engine_of(inference.engine).eplb:
        able = [name for name, engine in ENGINES.items() if engine.eplb]
        yield path, f"engine {inference.engine} does not place experts by popularity; allowed with: {', '.join(able)}"
    if max([p.ep] if pools is None else [pools.prefill.ep, pools.decode.ep]) == 1:
        yield path, "every rank has a part of every expert; needs parallelism.ep, or a pool's, above 1"
    if eplb.redundant_experts and sections.model.moe is not None and sections.model.moe.capacity_factor is not None:
        why = "copies of experts that drop tokens (model.moe.capacity_factor) are not simulated; allowed: 0"
        yield (*path, "redundant_experts"), f"found {eplb.redundant_experts}; {why}"


def _autoscaling(sections: Sections, inference: Inference) -> Problems:
    """Replicas start and stop one by one, in each pool by itself."""
    rule, path, p = inference.autoscaling, ("inference", "autoscaling"), sections.parallelism
    if rule is None:
        return
    most, pools = [("parallelism.dp", p.dp)], inference.disaggregated
    if pools is not None:
        most = [(f"disaggregated.{name}.replicas", size.replicas) for name, size in pools]
    for key, n in most:
        if rule.min_replicas > n:
            yield (*path, "min_replicas"), f"found {rule.min_replicas}; {key} ({n}) is the most replicas"
    if inference.batching == "static":
        yield path, "found a rule; all requests of a static batch start and end together; needs batching continuous"
    if any(one.sharing_replicas > 1 for one in inference.layouts(p)):
        yield path, "found replicas that share experts (ep above tp); such a replica cannot stop by itself"


def _lora(sections: Sections, inference: Inference) -> Problems:
    """No adapters on layers that the model lacks, or beside keys that they are not simulated with."""
    lora, path = inference.lora, ("inference", "lora")
    if lora is None:
        return
    have = ["attention_out"] if sections.model.mla else ["qkv", "attention_out"]
    have += ["mlp_up", "mlp_down"] if sections.model.has_dense_layers else []
    if wrong := [t for t in lora.targets if t not in have]:
        found = f"found '{wrong[0]}'" if "targets" in lora.model_fields_set else f"left out, so '{wrong[0]}' is one"
        on = ", ".join(have)
        yield (*path, "targets"), f"{found}; adapters of this model are on {on} (targets: [{on}])"
    if inference.speculative is not None and not engine_of(inference.engine).adapters_drafting:
        able = ", ".join([name for name, engine in ENGINES.items() if engine.adapters_drafting])
        why = f"engine {inference.engine} has no adapters beside inference.speculative; allowed with engine {able}"
        yield path, f"{why}; or leave one of them out"
    if inference.batching == "static" and lora.places < lora.adapters:
        why = "a static batch starts all requests at once and so needs all adapters on the GPU; allowed: null"
        yield (*path, "max_loras"), f"found {lora.max_loras}; {why}"


def _sampling(sections: Sections, inference: Inference) -> Problems:
    """Tokens are drawn on engines whose sampler was read."""
    asked, engine = inference.sampling, engine_of(inference.engine)
    if asked is None:
        return
    if engine.sampler.filters is not None:
        if asked.repetition_penalty != 1 and engine.sampler.penalties is None:
            path = ("inference", "sampling", "repetition_penalty")
            yield path, f"found {asked.repetition_penalty}; engine {inference.engine} has no penalties; allowed: 1"
        yield from _beside_tokens(asked, inference.engine)
        return
    able = [name for name, one in ENGINES.items() if one.sampler.filters is not None]
    why = f"engine {inference.engine} is simulated with the choice of the largest logit alone; leave it out, or use"
    yield ("inference", "sampling"), f"{why} {', '.join(able)}"


def _beside_tokens(asked: Sampling, name: str) -> Problems:
    """Log probabilities and grammars on engines of which they were read."""
    known = engine_of(name)
    why = f"how engine {name} does this was not read; leave it out, or use engine"
    if asked.logprobs is not None and known.sampler.logprobs is None:
        able = ", ".join([n for n, engine in ENGINES.items() if engine.sampler.logprobs is not None])
        yield ("inference", "sampling", "logprobs"), f"found {asked.logprobs}; {why} {able}"
    if asked.structured_outputs and known.masks is None:
        able = ", ".join([n for n, engine in ENGINES.items() if engine.masks is not None])
        yield ("inference", "sampling", "structured_outputs"), f"found true; {why} {able}"


def _afd(sections: Sections, inference: Inference) -> Problems:
    """Experts on GPUs of their own suit the model, find these GPUs, and stand beside keys that they know."""
    afd, path, p = inference.afd, ("inference", "afd"), sections.parallelism
    if afd is None:
        return
    if sections.model.moe is None:
        yield path, "the model has no experts (model.moe); leave it out"
        return
    for key in ("cp", "pp", "ep"):
        if (value := getattr(p, key)) != 1:
            why = "parallelism is of the GPUs that compute attention: tp and dp; leave it out"
            yield ("parallelism", key), f"found {value}; {why}"
    n = afd.expert_gpus
    if sections.model.moe.experts % n:
        yield (*path, "expert_gpus"), f"found {n}, which must divide model.moe.experts ({sections.model.moe.experts})"
    gpus = sections.cluster.nodes * sections.cluster.gpus_per_node
    if p.ranks + n > gpus:
        found = f"found {counted(n, 'GPU')} beside {p.ranks:,} that compute attention"
        yield (*path, "expert_gpus"), f"{found}; the cluster has {gpus:,} (or leave nodes out)"
    for key in ("disaggregated", "speculative", "lora", "weight_offload", "eplb", "autoscaling", "two_batch_overlap"):
        if getattr(inference, key):
            yield ("inference", key), "is not simulated with inference.afd; leave one of them out"
    if sections.faults is not None:
        yield ("faults",), "is not simulated with inference.afd; leave one of them out"
