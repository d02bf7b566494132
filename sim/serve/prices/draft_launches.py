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
    """The launches of one replica's draft.

    `graphs`: what CUDA graphs hold. `checked`: what they hold of the pass over checked tokens on this GPU. `kernels`:
    launches of a pass over prompts or over checked tokens without graphs. `later_kernels`: those of a pass that
    computes one token of each sequence. `pieces`: launches of a pass whose graphs hold all but attention. `later`: how
    many passes follow the first. `sizes`, `later_sizes`, `prompt_sizes`: the numbers of tokens that have a graph, in
    ascending order. `on_prompts`: the draft also drafts behind prompts. `fused`: one graph holds all later passes and
    the kernels before them.
    """

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
    """The launches of a scenario's draft.

    `kernels`: of a first and of a later pass, without graphs. `pieces`: of a pass whose graphs hold all but attention.
    `sizes`: the numbers of tokens for which the model's own batches have a graph, without and with prompts. Where an
    engine counts sequences in place of tokens, a later pass of as many sequences has a graph. `overlaps`: the host
    works ahead of the GPU.
    """
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
