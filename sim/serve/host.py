"""Seconds that an engine's host adds to an iteration of its GPU."""

from __future__ import annotations

from msgspec import Struct

from sim.inputs.scenario import Scenario
from sim.serve.engine_record import Engine, HostTimes

MEETING = 4  # as of a training step's launches: (h⁴ + d⁴)^¼ of a host that takes h and a device that takes d seconds


class Host(Struct, frozen=True):
    """One engine's host beside one replica. `kernels`: launches of an iteration on each pipeline stage;
    `graph_sizes`: tokens of batches with a CUDA graph; `overlaps`: it works while the GPU does."""

    engine: Engine
    times: HostTimes
    tp: int
    kernels: tuple[int, ...]
    graph_sizes: tuple[int, ...] = ()
    overlaps: bool = False

    def padded(self, tokens: int, prompts: bool = False) -> int:
        """Tokens that are computed where an iteration has `tokens`: those of the next larger CUDA graph."""
        if prompts and not self.engine.prompt_graphs:
            return tokens
        return next((size for size in self.graph_sizes if size >= tokens), tokens)

    def routed(self, tokens: int, prompts: bool, split: bool) -> int:
        """How many of an iteration's padded tokens choose experts of their own, which may be `split` over ranks."""
        computed, kind = self.padded(tokens, prompts), self.engine.padded_experts[split]
        return {"own": computed, "alike": min(computed, tokens + 1), "none": tokens}[kind]

    def stage_seconds(self, stage: int, device_s: float, tokens: int, sequences: int, prompts: bool) -> float:
        """Seconds of an iteration on a stage whose GPU computes for `device_s` of them."""
        return self.seconds_each(stage, [device_s], tokens, sequences, prompts)[0]

    def seconds_each(
        self, stage: int, device_s: list[float], tokens: int, sequences: int, prompts: bool
    ) -> list[float]:
        """As `stage_seconds`, of iterations that differ in nothing but the GPU's seconds.

        Work between iterations is the first stage's. Kernels outside of a graph are issued one by one.
        """
        busy_s = self.busy_each(stage, device_s, tokens, prompts)
        if stage:
            return busy_s
        own_s = self.between_s(tokens, sequences, prompts)
        return [max(s, own_s) for s in busy_s] if self.overlaps else [s + own_s for s in busy_s]

    def busy_each(self, stage: int, device_s: list[float], tokens: int, prompts: bool) -> list[float]:
        """As `seconds_each`, without the host's work between iterations."""
        if not self.times.launch_s or self._graphed(tokens, prompts):
            return device_s
        launches_s = self.kernels[stage] * self.times.launch_s
        return [(s**MEETING + launches_s**MEETING) ** (1 / MEETING) for s in device_s]

    def between_s(self, tokens: int, sequences: int, prompts: bool) -> float:
        """The host's own work for an iteration."""
        t = self.times
        own_s = t.iteration_s + (self.tp - 1) * t.rank_s + sequences * t.sequence_s + prompts * t.prompt_s
        if self.engine.sized_tokens is not None and tokens > self.engine.sized_tokens:
            own_s += tokens * self.tp * t.oversize_s
        return own_s

    def _graphed(self, tokens: int, prompts: bool) -> bool:
        """Whether a CUDA graph has the iteration's kernels."""
        if not self.graph_sizes or (prompts and not self.engine.prompt_graphs):
            return False
        return tokens <= self.graph_sizes[-1]


def host_of(scenario: Scenario, engine: Engine, kernels: tuple[int, ...]) -> Host:
    """The host of a scenario's engine, which launches so many `kernels` an iteration on each pipeline stage."""
    gpu, p, served = scenario.cluster.gpu, scenario.parallelism, scenario.for_serving
    drafts = served.speculative
    sizes = gpu.memory_bytes, p.tp, p.pp, scenario.model.longest, drafts is not None
    own = engine.defaults_on(gpu.architecture, *sizes)
    most = own.graphs_to, served.max_running_requests
    graphs, overlaps = engine.graph_sizes(*most), engine.overlaps
    if drafts is not None:
        overlaps = overlaps and engine.overlaps_drafting[drafts.draft is not None]
        if engine.drafting_sizes is not None:
            graphs = tuple([n * (1 + drafts.tokens) for n in engine.drafting_sizes(*most)])
    return Host(engine, engine.host_on(gpu.architecture), p.tp, kernels, graphs if served.cuda_graphs else (), overlaps)
