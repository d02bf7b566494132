"""Rules about drafted tokens beside a scenario's other sections."""

from __future__ import annotations

from sim.core.units import counted
from sim.inputs.engine_file import engine_of
from sim.inputs.input_source import Problems
from sim.inputs.sections import Sections
from sim.inputs.workloads import Inference, Speculative
from sim.variants.engines import ENGINES


def speculative_problems(sections: Sections, inference: Inference) -> Problems:
    """A draft has the model's vocabulary and lies on the same tensor-parallel ranks, or is the model's own layer."""
    speculative, path = inference.speculative, ("inference", "speculative")
    if speculative is None:
        return
    draft, p, pools = speculative.draft, sections.parallelism, inference.disaggregated
    splits = [("parallelism.tp", p.tp)]
    if pools is not None:
        splits = [(f"disaggregated.{name}.tp", size.tp) for name, size in pools]
    if inference.drafts == "text":
        yield from _from_text(inference, speculative)
    elif draft is None and speculative.hidden_states:
        yield (*path, "hidden_states"), f"found {speculative.hidden_states}; needs a draft that reads them; allowed: 0"
    elif draft is None:
        if not sections.model.mtp_layers:
            yield (*path, "draft"), "found null; the model has no prediction layer (model.mtp_layers); name a model"
    elif draft.vocab > sections.model.vocab if speculative.hidden_states else draft.vocab != sections.model.vocab:
        why = f"has a vocabulary of {draft.vocab}; the model that checks its tokens has {sections.model.vocab}"
        hint = " (EAGLE-3's draft: hidden_states 3)" if draft.vocab < sections.model.vocab and draft.layers < 4 else ""
        yield (*path, "draft"), why + hint
    elif wrong := [f"{key} ({tp})" for key, tp in splits if draft.heads % tp]:
        yield (*path, "draft"), f"has {counted(draft.heads, 'head')}, which {wrong[0]} must divide"
    yield from _tree(inference, speculative)
    if p.cp > 1:
        yield ("parallelism", "cp"), f"found {p.cp}; drafted tokens are not split over cp ranks; allowed: 1"
    if p.pp > 1 and not engine_of(inference.engine).stages_drafting:
        able = ", ".join([name for name, engine in ENGINES.items() if engine.stages_drafting])
        why = f"engine {inference.engine} does not draft beside pipeline stages; allowed: 1 (or engine {able})"
        yield ("parallelism", "pp"), f"found {p.pp}; {why}"
    if inference.attention == "unfused":
        yield ("inference", "attention"), "found 'unfused'; drafted tokens need fused attention"


def _from_text(inference: Inference, speculative: Speculative) -> Problems:
    """Drafts from the text need no model, of an engine whose search for them was read."""
    path = ("inference", "speculative")
    if speculative.draft is not None:
        yield (*path, "draft"), "names a model, and lookup takes drafts from the text; allowed beside lookup: null"
    if speculative.hidden_states:
        yield (*path, "hidden_states"), f"found {speculative.hidden_states}; drafts from the text read none; allowed: 0"
    if engine_of(inference.engine).text is None:
        able = ", ".join([name for name, engine in ENGINES.items() if engine.text is not None])
        why = f"found {speculative.lookup}; how engine {inference.engine} drafts from the text is not simulated"
        yield (*path, "lookup"), f"{why}; allowed: null (or engine {able})"


def _tree(inference: Inference, speculative: Speculative) -> Problems:
    """A tree has as many tokens as its steps can make, of an engine that drafts any."""
    path, b, steps = ("inference", "speculative"), speculative.branches, speculative.tokens
    if b == 1 and speculative.tree_tokens not in (None, steps):
        why = f"found {speculative.tree_tokens}; a chain (branches 1) has as many tokens as steps; allowed: null"
        yield (*path, "tree_tokens"), why
    elif speculative.checked > (most := b + (steps - 1) * b * b):  # SGLang, speculative/eagle_utils.py
        yield (
            (*path, "tree_tokens"),
            f"found {speculative.checked}; {steps} steps with {b} branches have at most {most}",
        )
    if b > 1 and not engine_of(inference.engine).trees:
        able = ", ".join([name for name, engine in ENGINES.items() if engine.trees])
        yield (*path, "branches"), f"found {b}; engine {inference.engine} drafts chains; allowed: 1 (or engine {able})"
