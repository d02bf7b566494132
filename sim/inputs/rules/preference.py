"""Rules of `training.preference` beside other keys: what a step over pairs of answers is not simulated with."""

from __future__ import annotations

from sim.core.dtypes import sixteen_bit
from sim.inputs.input_source import Problems
from sim.inputs.sections import Sections
from sim.inputs.training_config import WITH_REFERENCE, Preference, Training


def preference_problems(sections: Sections, t: Training) -> Problems:
    """Return what is wrong with a step over pairs."""
    if t.preference is not None:
        yield from _of_reference(t, t.preference)
        yield from _beside(sections, t, t.preference)


def _of_reference(t: Training, preference: Preference) -> Problems:
    path, named = ("training", "preference", "reference"), preference.reference
    if preference.loss == "kto" and named == "none":
        yield path, "found 'none'; a loss kto compares with a reference: model, adapters_off or precomputed"
    if preference.loss not in WITH_REFERENCE and t.reference != "none":
        yield path, f"found '{named}'; a loss {preference.loss} has no reference: none, or left out"
    if named == "adapters_off" and t.lora is None:
        yield path, "found 'adapters_off'; needs training.lora; allowed without: model, precomputed, none"


def _beside(sections: Sections, t: Training, preference: Preference) -> Problems:
    path, model, runs = ("training", "preference"), sections.model, t.runs_beside
    without_logits = t.cross_entropy in ("chunked", "tiled")
    never_scored = t.cross_entropy == "chunked" and preference.loss in WITH_REFERENCE
    for bad, what in (
        (model.program is not None, "model.program, which has a loss of its own"),
        (model.mtp_layers > 0, "model.mtp_layers, which predict next tokens"),
        (sections.distillation is not None, "distillation, which learns next tokens"),
        (t.packing is not None, "training.packing: a sequence is one answer behind its prompt"),
        (t.indexer != "trained", f"training.indexer {t.indexer}"),
        (never_scored, "training.cross_entropy chunked, which makes gradients in its forward: unfused, fused or tiled"),
        (
            preference.loss == "orpo" and without_logits,
            f"training.cross_entropy {t.cross_entropy}: of loss orpo unfused, native or fused",
        ),
        (runs and sixteen_bit(t.precision) != t.precision, f"training.precision {t.precision} beside a reference"),
        (runs and t.cuda_graphs != "none", f"training.cuda_graphs {t.cuda_graphs} beside a reference"),
        (
            runs and sections.parallelism.zero == 3 and not sections.parallelism.reshard_after_forward,
            "parallelism.reshard_after_forward false beside a reference",
        ),
    ):
        if bad:
            yield path, f"is not simulated with {what}"
