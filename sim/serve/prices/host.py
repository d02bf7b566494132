"""Seconds that an engine's host adds to an iteration of its GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from sim.inputs.engine_file import all2all_of
from sim.inputs.engine_server import server_of
from sim.inputs.scenario import Scenario
from sim.inputs.workloads import Inference
from sim.models.dims import ceil_div
from sim.serve.prices.draft_launches import DraftLaunches, draft_launches_of
from sim.serve.prices.front import Front, front_of
from sim.serve.prices.load import Load
from sim.variants.engines.host_times import HostTimes
from sim.variants.engines.kernel_facts import PromptGraphs, is_datacenter_blackwell
from sim.variants.engines.record import THREADED_FROM, Engine, PaddedExperts

MEETING = 4  # as of a training step's launches: (h⁴ + d⁴)^¼ of a host that takes h and a device that takes d seconds


class Host(Struct, frozen=True):
    """One engine's host beside one replica. `kernels`: launches of an iteration on each pipeline stage without a CUDA
    graph; `pieces`: with graphs of all but attention; `graph_sizes`: tokens of batches with a CUDA graph;
    `prompt_sizes`: with prompts among them; `overlaps`: it works while the GPU does; `whole_to`: the most tokens of a
    whole iteration's graph, None: of all of these sizes; `grouped`: a token's group of experts is chosen first;
    `masked`: tokens of the vocabulary of which a grammar forbids some, 0: no grammars; `logprobs`: that go with each
    token; `stream_interval`: tokens in a streamed piece; `workers`: processes beside the engine's, one for each GPU;
    `searches`: it looks drafts up in the text; `draft`: what it launches for a draft."""

    engine: Engine
    times: HostTimes
    tp: int
    kernels: tuple[int, ...]
    pieces: tuple[int, ...]
    graph_sizes: tuple[int, ...] = ()
    prompt_sizes: tuple[int, ...] = ()
    overlaps: bool = False
    whole_to: int | None = None
    grouped: bool = False
    masked: int = 0
    logprobs: int = 0
    stream_interval: int = 1
    workers: bool = False
    searches: bool = False
    draft: DraftLaunches | None = None

    @property
    def front(self) -> Front | None:
        """The server's processes behind the engine."""
        return front_of(self.times, self.engine, self.logprobs, self.stream_interval)

    def padded(self, tokens: int, prompts: bool = False) -> int:
        """Tokens that are computed where an iteration has `tokens`: those of the next larger CUDA graph."""
        sizes = self.prompt_sizes if prompts else self.graph_sizes
        return next((size for size in sizes if size >= tokens), tokens)

    def routed(self, tokens: int, prompts: bool, split: bool) -> int:
        """How many of an iteration's padded tokens choose experts of their own, which may be `split` over ranks."""
        computed = self.padded(tokens, prompts)
        return {"own": computed, "alike": min(computed, tokens + 1), "none": tokens}[self._padding_chooses(split)]

    def pooled(self, loads: Sequence[Load], replicas: int, split: bool) -> int:
        """Tokens of the mean one of `replicas` that share experts, `split` over ranks or not, and compute `loads`;
        those that are missing have none.

        Where an engine pads all to the tokens of the fullest one, so many of each choose experts and travel to them,
        unless padding tokens choose none. An engine that gathers tokens by sums where prompts are among them does not
        pad then.
        """
        engine, graphed = self.engine, all(map(self._graphed, loads))
        summed = engine.sums_prompts[0] and any(load.prompts for load in loads)
        pads = engine.pads_replicas == "always" or (engine.pads_replicas == "graphed" and graphed and not summed)
        padded = pads and bool(self.graph_sizes)
        if padded and self._padding_chooses(split) == "own":
            return max([self.padded(load.tokens, load.prompts) for load in loads])
        return max(1, round(sum([load.tokens for load in loads]) / replicas))

    def _padding_chooses(self, split: bool) -> PaddedExperts:
        """The experts that padding tokens choose."""
        return (self.engine.padded_grouped if self.grouped else None) or self.engine.padded_experts[split]

    def seconds_each(
        self, stage: int, device_s: list[float], load: Load, draft_s: float = 0.0, copied_s: float = 0.0
    ) -> list[float]:
        """Seconds of iterations on a stage whose GPU computes for `device_s` of them, and in each drafts tokens for
        `draft_s` besides, while its copy engine copies weights for `copied_s`; they differ in nothing but the GPU's
        seconds.

        Work between iterations is the first stage's. Kernels outside of a graph are issued one by one, by the host that
        does the other work as well: one that overlaps has all of it beside the GPU, max(GPU, launches + own work)
        (vLLM, v1/engine/core.py, `step_with_batch_queue`; SGLang, srt/managers/scheduler.py, `event_loop_overlap`;
        TensorRT-LLM, _torch/pyexecutor/py_executor.py, `_executor_loop_overlap`: one thread does all). The GPU drafts
        right after it has checked, from tokens that never left it, while an overlapping host prepares the next
        iteration: max(GPU + draft, host) (vLLM, v1/worker/gpu_model_runner.py: `propose_draft_token_ids` of EAGLE and
        of draft models takes the GPU's sampled tokens and does not wait for `_bookkeeping_sync`). What grammars forbid
        may be marked beside the GPU, which is waited for before tokens are sampled (`beside_s`).
        """
        busy_s = self.launched_each(stage, device_s, load)
        if draft_s or copied_s:
            busy_s = [max(s + draft_s, copied_s) for s in busy_s]
        if stage or not self.engine.host:
            return busy_s
        own_s = self.own_s(load)
        if beside_s := self.beside_s(load):
            busy_s = [max(s, beside_s) for s in busy_s]
        return [max(s, own_s) for s in busy_s] if self.overlaps else [s + own_s for s in busy_s]

    def stage_seconds(self, each: list[tuple[float, float, float]], load: Load) -> tuple[float, ...]:
        """Seconds of one iteration on every stage, of its GPU's seconds, those of drafting and of copied weights there.
        Of many stages most are as the one before: as long, with as many launches, and that is not the first."""
        out = list[float]()
        for stage, parts in enumerate(each):
            alike = stage > 1 and parts == each[stage - 1]
            if (
                alike
                and self.kernels[stage] == self.kernels[stage - 1]
                and self.pieces[stage] == self.pieces[stage - 1]
            ):
                out.append(out[-1])
            else:
                out.append(self.seconds_each(stage, [parts[0]], load, *parts[1:])[0])
        return tuple(out)

    def launched_each(self, stage: int, device_s: list[float], load: Load) -> list[float]:
        """Seconds for which a stage's GPU computes, with the gaps in which it waits for a kernel's launch."""
        launches_s = self.launches_s(stage, load)
        return [_met(s, launches_s) for s in device_s] if launches_s else device_s

    def drafted_each(self, device_s: list[float], load: Load) -> list[float]:
        """Likewise of each of a draft's passes in an iteration of the model."""
        if self.draft is None or not self.times.launch_s:
            return device_s
        launches = self.draft.launches(load)
        return [_met(s, n * self.times.launch_s) for s, n in zip(device_s, launches, strict=True)]

    def between_s(self, load: Load) -> float:
        """The host's own work for an iteration. Where each GPU has a process, vLLM's engine core pickles an iteration
        for all of them and waits for one's tokens (v1/executor/multiproc_executor.py, `collective_rpc`; since 0.12
        `sample_tokens` is a call of its own, which is sent and waited for beside the GPU); on one GPU the worker is
        part of the engine's process (v1/executor/uniproc_executor.py)."""
        t = self.times
        own_s = t.iteration_s + (self.tp - 1) * t.rank_s + load.sequences * t.sequence_s
        own_s += bool(load.prefills) * t.prompt_s
        if self.workers:
            own_s += t.message_s + load.sequences * t.message_sequence_s
        if self.engine.sized_tokens is not None and load.tokens > self.engine.sized_tokens:
            own_s += load.tokens * self.tp * t.oversize_s
        if self.masked:
            own_s += load.samples * t.accept_s + (0.0 if self.beside_s(load) else self.masks_s(load))
        return own_s

    def beside_s(self, load: Load) -> float:
        """Seconds in which a host that does not overlap works beside its GPU all the same: it marks what grammars
        forbid (vLLM, v1/engine/core.py, `step`: `get_grammar_bitmask` comes right behind `execute_model`)."""
        beside = self.masked and self.engine.masks == "beside" and not self.overlaps
        return self.masks_s(load) if beside else 0.0

    def masks_s(self, load: Load) -> float:
        """Seconds in which the host marks what grammars forbid each sequence's next token to be. Assumption: threads
        share the work evenly (xgrammar's code is C++)."""
        rows = load.samples
        if rows > THREADED_FROM:
            rows = ceil_div(rows, self.engine.mask_threads)
        return rows * self.masked * self.times.mask_s

    def search_s(self, load: Load) -> float:
        """Seconds in which the host looks drafts up in the text of an iteration's sequences, one after another, while
        the GPU waits (vLLM 0.32, v1/spec_decode/ngram_proposer.py: num_numba_thread_available is at most 1)."""
        if not self.searches:
            return 0.0
        seen = load.decode_kv + sum([kv * alike for _, kv, alike in load.prefills])
        return load.sequences * self.times.search_s + seen * self.times.search_token_s

    def own_s(self, load: Load) -> float:
        """Seconds of the first stage's host for an iteration that are no part of its GPU's: of one that overlaps also
        those of launches, in which it does nothing else. A draft is on the last stage."""
        if not self.overlaps:
            return self.between_s(load)
        drafting = 0 if self.draft is None or len(self.kernels) > 1 else sum(self.draft.launches(load))
        return self.between_s(load) + self.launches_s(0, load) + drafting * self.times.launch_s

    def launches_s(self, stage: int, load: Load) -> float:
        """Seconds in which a stage's host launches one by one."""
        launch_s = self.times.launch_s
        return self.launches(stage, load) * launch_s if launch_s else 0.0

    def launches(self, stage: int, load: Load) -> int:
        """What a stage's host launches one by one; the one graph of a whole iteration does not count."""
        if not self._graphed(load):
            return self.kernels[stage]
        whole = self.engine.whole_graphs and not load.prefills and self._all_checked(load)
        if whole and self.whole_to is not None and self.padded(load.tokens) > self.whole_to:
            whole = False
        return 0 if whole else self.pieces[stage]

    def _all_checked(self, load: Load) -> bool:
        """Whether all sequences have as many tokens, drafted ones where drafts come from the text: a whole graph is for
        these alone (vLLM 0.10.2 to 0.32, v1/worker/gpu_model_runner.py, `uniform_decode_query_len`)."""
        return not self.searches or (load.queries > 1 and load.tokens == load.decodes * load.queries)

    def _graphed(self, load: Load) -> bool:
        """Whether CUDA graphs have the iteration's kernels, or all but those of attention."""
        sizes = self.prompt_sizes if load.prefills else self.graph_sizes
        return bool(sizes) and load.tokens <= sizes[-1]


def _met(device_s: float, launches_s: float) -> float:
    """Seconds in which a host launches what its GPU computes."""
    return math.pow(device_s**MEETING + launches_s**MEETING, 1 / MEETING)


def host_of(scenario: Scenario, engine: Engine, kernels: tuple[int, ...], pieces: tuple[int, ...]) -> Host:
    """The host of a scenario's engine, which launches so many `kernels` an iteration on each pipeline stage, or
    `pieces` of it."""
    gpu, p, served = scenario.cluster.gpu, scenario.parallelism, scenario.for_serving
    drafts = served.speculative
    server = server_of(gpu, scenario.model, served, p, p.pp)
    own = engine.defaults_on(gpu.kernel_architecture, server, served.longest(scenario.model))
    each = 1 if drafts is None or engine.drafting_tokens is None else 1 + drafts.checked
    overlaps = engine.overlaps_with(served.async_scheduling, served.drafts, p.pp, served.of_trees)
    graphs = _graphs(engine, served, own.graphs_to, each) if served.cuda_graphs else ()
    prompts = graphs if engine.prompt_graphs else prompt_sizes(scenario, engine)
    tokens = served.max_running_requests * (1 if drafts is None else 1 + drafts.checked)
    whole_to = tokens if engine.whole_to_running else None
    times = engine.host_on(gpu.kernel_architecture)
    moe = scenario.model.moe
    grouped = moe is not None and moe.chooses_groups and moe.groups != 1
    asked = served.sampling
    masked = scenario.model.vocab if asked is not None and asked.structured_outputs else 0
    logprobs = 0 if asked is None or asked.logprobs is None else 1 + asked.logprobs
    graphed = (graphs, prompts, overlaps, whole_to, grouped)
    asked_for = masked, logprobs, served.stream_interval
    return Host(
        engine,
        times,
        p.tp,
        kernels,
        pieces,
        *graphed,
        *asked_for,
        workers=p.tp * p.cp * p.pp > 1,
        searches=served.drafts == "text",
    )


def with_draft(host: Host, first: Host, later: Host, scenario: Scenario) -> Host:
    """The host with what it launches for a draft, whose first passes in an iteration have the kernels of `first`."""
    kernels, sizes = (first.kernels[0], later.kernels[0]), (host.graph_sizes, host.prompt_sizes)
    pieces, overlaps = first.pieces[0], host.overlaps
    return replace(host, draft=draft_launches_of(scenario, host.engine, kernels, pieces, sizes, overlaps))


def _graphs(engine: Engine, served: Inference, to: int, each: int) -> tuple[int, ...]:
    """Tokens of batches with a CUDA graph, the largest of the size `to`; `each`: of a sequence."""
    running, asked = served.max_running_requests, engine.asked_graphs
    if served.graphs_to is None or asked is None:
        drafting = engine.drafting_tokens
        return engine.graph_sizes(to, running) if each == 1 or drafting is None else drafting(to, running, each)
    sizes = served.cuda_graph_sizes
    found = asked.up_to(to, running, each) if sizes is None else asked.of(sizes, running, each)
    return tuple([n for n in found if n <= served.max_batch_tokens])


def prompt_sizes(scenario: Scenario, engine: Engine) -> tuple[int, ...]:
    """Tokens of iterations with prompts that have graphs of sizes of their own."""
    graphs, served = engine.own_prompt_graphs, scenario.for_serving
    if graphs is None or not served.cuda_graphs or not (_beside(graphs, scenario) and _of_model(graphs, scenario)):
        return ()
    return graphs.sizes(served.max_batch_tokens, scenario.model.mla is not None)


def _beside(graphs: PromptGraphs, scenario: Scenario) -> bool:
    """Whether an engine has prompts' graphs beside all of a scenario's options."""
    p, served = scenario.parallelism, scenario.for_serving
    host_copies = served.prefix_cache == "cpu" or served.kv_cache.tiers is not None
    gathers = all2all_of(served).gathers
    return not (
        (served.speculative is not None and not graphs.drafts)
        or (served.lora is not None and not graphs.adapters)
        or (p.pp > 1 and not graphs.stages)
        or (p.sharing_replicas > 1 and not (graphs.replicas and gathers and not served.two_batch_overlap))
        or (served.disaggregated is not None and not graphs.pools)
        or ((host_copies or served.weight_offload is not None or served.eplb is not None) and not graphs.offload)
    )


def _of_model(graphs: PromptGraphs, scenario: Scenario) -> bool:
    """Whether an engine has prompts' graphs of a scenario's model on its GPUs."""
    m, gpu = scenario.model, scenario.cluster.gpu
    large = is_datacenter_blackwell(gpu.kernel_architecture, gpu.memory_bytes)
    if large and m.code == "qwen2_moe" and not graphs.experts_blackwell:
        return False
    if m.state_space is not None and m.code == "qwen2_moe" and not graphs.states:
        return False
    if m.indexer is not None:
        return graphs.selected
    return m.mla is None or (graphs.latent and (graphs.latent_blackwell or not (large and m.code == "deepseek_v3")))
