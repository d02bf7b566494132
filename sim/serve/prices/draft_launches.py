"""What an engine's host launches for a draft's passes, one kernel or one piece of a graph after another.

The passes of an iteration are those of `sim.serve.scheduling.speculation.drafting`. Where prompts are computed beside
tokens that are checked, the draft computes both in one pass (vLLM, v1/spec_decode/llm_base_proposer.py,
`set_inputs_first_pass`), which has the graphs of prompts. Left out: what the host does between two passes beside
launching, as building attention's metadata in Python (vLLM, `build_for_drafting`).
"""

from __future__ import annotations

from msgspec import Struct

from sim.inputs.scenario import Scenario
from sim.serve.prices.load import Load
from sim.variants.engines.drafting import DraftGraphs, Graphs
from sim.variants.engines.record import Engine


class DraftLaunches(Struct, frozen=True):
    """A draft beside one replica. `kernels`: of the pass over prompts and of that over checked tokens, of which one has
    the graphs `checked`; `later_kernels`: of a pass of one token of each sequence; `pieces`: of either with graphs of
    all but attention; `later`: passes after the first; `sizes`, `later_sizes`, `prompt_sizes`: tokens with a graph;
    `fused`: a graph of later passes has what is before them, too."""

    graphs: DraftGraphs
    checked: Graphs
    kernels: int
    later_kernels: int
    pieces: int
    later: int
    sizes: tuple[int, ...]
    later_sizes: tuple[int, ...]
    prompt_sizes: tuple[int, ...]
    on_prompts: bool
    fused: bool

    def launches(self, load: Load) -> tuple[int, ...]:
        """Launches of each of the draft's passes in an iteration of the model, in their order."""
        out, drafting = list[int](), load.decodes if load.queries > 1 else 0
        if load.prefills:
            out.append(self._of(self.graphs.prompts, self.kernels, load.tokens, self.prompt_sizes))
        if drafting:
            first = 0 if load.prefills else self._of(self.checked, self.kernels, load.tokens, self.sizes)
            out.append(first)
        if self.on_prompts:
            drafting += load.sequences - load.decodes
        if drafting:
            later = self._of(self.graphs.later, self.later_kernels, drafting, self.later_sizes)
            out += [later if self.fused and not later else later + self.graphs.steps] * self.later
        return tuple(out)

    def _of(self, graphs: Graphs, kernels: int, tokens: int, sizes: tuple[int, ...]) -> int:
        if graphs == "none" or not sizes or tokens > sizes[-1]:
            return kernels
        return self.pieces if graphs == "pieces" else 0


def draft_launches_of(
    scenario: Scenario,
    engine: Engine,
    kernels: tuple[int, int],
    pieces: int,
    sizes: tuple[tuple[int, ...], tuple[int, ...]],
    overlaps: bool,
) -> DraftLaunches:
    """The launches of a scenario's draft, which has so many `kernels` in a first and in a later pass. `sizes`: tokens
    of the model's own batches with a graph, of single tokens and with prompts. An engine whose graphs are of so many
    sequences has them for a later pass of as many. `overlaps`: the host works beside the GPU."""
    served, asked = scenario.for_serving, engine.asked_graphs
    steps, checked_each = (0, 1) if (own := served.speculative) is None else (own.tokens, 1 + own.checked)
    graphs = engine.draft_graphs[served.drafts == "model"]
    each = checked_each if asked is not None and asked.sequences else 1
    later_sizes = tuple([n // each for n in sizes[0]])
    gpu, latent = scenario.cluster.gpu.kernel_architecture, scenario.model.mla is not None
    checked = graphs.of_checked(gpu, latent, served.of_trees, overlaps)
    later = max(0, steps - 1)
    passes, graphed = (*kernels, pieces, later), (sizes[0], later_sizes, sizes[1])
    fused = gpu in graphs.fused and not latent
    return DraftLaunches(graphs, checked, *passes, *graphed, engine.drafts_on_prompts, fused)
