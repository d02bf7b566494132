"""Rules on packed documents (`training.packing`): their lengths, and what they are simulated with."""

from __future__ import annotations

from sim.inputs.input_source import Problems
from sim.inputs.sections import Sections
from sim.inputs.training_config import Packing, Training


def packing(sections: Sections, t: Training) -> Problems:
    """No documents longer than a sequence, and no attention that cannot skip pairs between documents."""
    x, m, p = t.packing, sections.model, sections.parallelism
    if x is None:
        return
    path = ("training", "packing")
    if bool(x.lengths) == (x.mean_seq_len is not None):
        yield path, "needs either lengths, or mean_seq_len to draw lengths from"
    if sum(x.lengths) > t.seq_len:
        yield (*path, "lengths"), f"found {sum(x.lengths)} tokens in all; a sequence has {t.seq_len} (training.seq_len)"
    longest = min(t.seq_len, x.max_seq_len or t.seq_len)
    if x.min_seq_len > longest:
        yield (*path, "min_seq_len"), f"found {x.min_seq_len}; must be at most {longest}, the longest document"
    if x.mean_seq_len is not None and not x.min_seq_len <= x.mean_seq_len <= longest:
        allowed = f"between the shortest document ({x.min_seq_len}) and the longest ({longest})"
        yield (*path, "mean_seq_len"), f"found {x.mean_seq_len:g}; must lie {allowed}"
    if x.mean_seq_len is not None:
        yield from _drawn(x, t)
    for bad, what in (
        (m.program is not None, "a captured program, whose attention is replayed as it was"),
        (m.indexer is not None, "model.indexer"),
        (m.block_indexer is not None, "model.block_indexer"),
        (
            t.attention == "unfused",
            "unfused attention (training.attention), which also computes scores between documents",
        ),
        (
            p.cp > 1 and m.window is not None and p.cp_methods != {"all_to_all"},
            "model.window and cp, unless cp_method is all_to_all",
        ),
    ):
        if bad:
            yield path, f"packed documents are not simulated with {what}"


def _drawn(x: Packing, t: Training) -> Problems:
    """No more documents than can be drawn in seconds."""
    from sim.inputs.packed_documents import MOST_DOCUMENTS, expected_tokens  # with numpy, which no other reader needs

    tokens = expected_tokens(x, t.seq_len)
    if t.global_batch_size * t.seq_len / tokens > MOST_DOCUMENTS:
        found = (
            f"found {x.mean_seq_len:g} with lognormal_sigma {x.lognormal_sigma:g}; clipped to the allowed lengths, "
            f"the documents have {tokens:.3g} tokens on average"
        )
        most = f"at most {MOST_DOCUMENTS:,} documents are drawn for a step; give lengths or a smaller lognormal_sigma"
        yield ("training", "packing", "mean_seq_len"), f"{found}; {most}"
