"""Rules between keys of a training step: its number formats, packing, optimizer, recomputation and batches."""

from __future__ import annotations

from sim.core.dtypes import sixteen_bit
from sim.core.errors import InputError
from sim.inputs.input_source import Source
from sim.inputs.layout_rules import batch, first_problem, micro_batches
from sim.inputs.model_config import ModelConfig
from sim.inputs.parallelism import Parallelism
from sim.inputs.sections import Sections, sizes_of
from sim.inputs.training_config import Packing, Recompute, Training
from sim.models.frameworks import framework_of
from sim.models.recipes import recipe_of


def check_training(sections: Sections, t: Training, source: Source) -> None:
    """Raise InputError for the first rule broken."""
    _check_dtypes(t, source)
    _check_indexer(t, sections.model, sections.parallelism, source)
    _check_packing(sections, t, source)
    _check_recipe(t, source)
    _check_gathers(sections.parallelism, t, source)
    _check_muon(sections, t, source)
    if t.optimizer_offload and sections.model.program is not None:
        raise source.error(("training", "optimizer_offload"), "found true; a captured program's states stay")
    _check_four_bits(sections, t, source)
    _check_frozen_experts(sections, t, source)
    _check_recompute(t, sections.model, source)
    _check_loss(t, sections, source)
    _check_batches(t, sections, source)


def _check_dtypes(t: Training, source: Source) -> None:
    allowed = tuple(dict.fromkeys((sixteen_bit(t.precision), "fp32")))
    if t.param_dtype not in allowed:
        raise source.error(
            ("training", "param_dtype"),
            f"found '{t.param_dtype}'; precision {t.precision} keeps parameters in {' or '.join(allowed)}",
        )


def _check_indexer(t: Training, model: ModelConfig, p: Parallelism, source: Source) -> None:
    """Raise for a training of indexers that the model lacks, and for a warm-up that is not simulated."""
    if t.indexer == "trained":
        return
    path, found = ("training", "indexer"), f"found '{t.indexer}'"
    if model.indexer is None:
        raise source.error(path, f"{found}; needs model.indexer")
    if t.indexer == "warm_up" and (p.pp > 1 or framework_of(t).masks_unselected):
        why = "simulated only at pp 1 (stages would exchange no gradients) and in frameworks that train indexers"
        raise source.error(path, f"{found}; {why}")


def _check_packing(sections: Sections, t: Training, source: Source) -> None:
    """Raise for documents longer than a sequence, and for attention that cannot skip pairs between documents."""
    x, m, p = t.packing, sections.model, sections.parallelism
    if x is None:
        return
    path = ("training", "packing")
    if bool(x.lengths) == (x.mean_seq_len is not None):
        raise source.error(path, "needs either lengths, or mean_seq_len to draw lengths from")
    if sum(x.lengths) > t.seq_len:
        raise source.error(
            (*path, "lengths"), f"found {sum(x.lengths)} tokens in all; a sequence has {t.seq_len} (training.seq_len)"
        )
    longest = min(t.seq_len, x.max_seq_len or t.seq_len)
    if x.min_seq_len > longest:
        raise source.error(
            (*path, "min_seq_len"), f"found {x.min_seq_len}; must be at most {longest}, the longest document"
        )
    if x.mean_seq_len is not None and not x.min_seq_len <= x.mean_seq_len <= longest:
        allowed = f"between the shortest document ({x.min_seq_len}) and the longest ({longest})"
        found = f"found {x.mean_seq_len:g}; must lie {allowed}"
        raise source.error((*path, "mean_seq_len"), found)
    if x.mean_seq_len is not None:
        _check_drawn(x, t, source)
    for bad, what in (
        (m.program is not None, "a captured program, whose attention is replayed as it was"),
        (m.indexer is not None, "model.indexer"),
        (
            t.attention == "unfused",
            "unfused attention (training.attention), which also computes scores between documents",
        ),
        (
            p.cp > 1 and m.window is not None and p.cp_method != "all_to_all",
            "model.window and cp, unless cp_method is all_to_all",
        ),
    ):
        if bad:
            raise source.error(path, f"packed documents are not simulated with {what}")


def _check_drawn(x: Packing, t: Training, source: Source) -> None:
    """Raise for more documents than can be drawn in seconds."""
    from sim.models.packing import MOST_DOCUMENTS, expected_tokens  # with numpy, which no other reader needs

    tokens = expected_tokens(x, t.seq_len)
    if t.global_batch_size * t.seq_len / tokens > MOST_DOCUMENTS:
        found = (
            f"found {x.mean_seq_len:g} with lognormal_sigma {x.lognormal_sigma:g}; clipped to the allowed lengths, "
            f"the documents have {tokens:.3g} tokens on average"
        )
        most = f"at most {MOST_DOCUMENTS:,} documents are drawn for a step; give lengths or a smaller lognormal_sigma"
        raise source.error(("training", "packing", "mean_seq_len"), f"{found}; {most}")


def _check_recipe(t: Training, source: Source) -> None:
    """Raise for a recipe that the framework does not have for the precision."""
    try:
        recipe_of(t)
    except InputError as error:
        raise source.error(("training", "fp8_recipe"), str(error)) from None


def _check_gathers(p: Parallelism, t: Training, source: Source) -> None:
    """Parameters are gathered in the 16 bits that they are used in, or in fp8 where a recipe casts shards."""
    recipe = None if t.lora is not None else recipe_of(t)
    in_8_bits = p.zero == 3 and recipe is not None and recipe.shards_quantized
    path, used = ("parallelism", "param_gather_dtype"), sixteen_bit(t.precision)
    if p.param_gather_dtype == "fp8" and not in_8_bits:
        raise source.error(path, "found 'fp8'; needs zero 3, precision fp8, torchao's recipe tensorwise and no lora")
    if p.param_gather_dtype == "bf16" and used != "bf16":
        raise source.error(path, f"found 'bf16'; with precision {t.precision} parameters are used in {used}")


def _check_muon(sections: Sections, t: Training, source: Source) -> None:
    """Muon's matrices and their gradients are whole on a rank."""
    if t.optimizer != "muon":
        return
    zero = sections.parallelism.zero
    if zero >= 2:
        why = "Muon needs a matrix's whole gradient: zero 0 or 1"
        raise source.error(("parallelism", "zero"), f"found {zero}; {why}")
    if t.lora is not None:
        raise source.error(("training", "optimizer"), "found 'muon'; adapters are simulated with adamw and sgd")
    if sections.model.program is not None:
        raise source.error(("training", "optimizer"), "found 'muon'; a captured program has its own optimizer")


def _check_four_bits(sections: Sections, t: Training, source: Source) -> None:
    """Frozen weights in 4 bits are whole on a rank, and multiplied in 16."""
    if t.lora is None or t.lora.weights is None:
        return
    path, zero = ("training", "lora", "weights"), sections.parallelism.zero
    if zero == 3:
        raise source.error(path, f"found '{t.lora.weights}'; 4-bit weights are simulated whole: zero below 3")
    if sections.model.moe is not None:
        raise source.error(path, f"found '{t.lora.weights}'; experts are simulated in 16 bits only")
    if sixteen_bit(t.precision) != t.precision:
        raise source.error(path, f"found '{t.lora.weights}'; precision {t.precision} multiplies in 8 bits or less")


def _check_frozen_experts(sections: Sections, t: Training, source: Source) -> None:
    """Experts without gradients are whole on their rank."""
    zero = sections.parallelism.zero
    if t.lora is not None and sections.model.moe is not None and zero == 3:
        raise source.error(("parallelism", "zero"), f"found {zero}; frozen experts are simulated whole: zero below 3")


def _check_recompute(t: Training, model: ModelConfig, source: Source) -> None:
    path, recompute = ("training", "recompute"), t.recompute
    if recompute.layers is not None and recompute.every is not None:
        raise source.error(path, "found both layers and every; give one of the two")
    for key in ("layers", "every"):
        if getattr(recompute, key) is not None and recompute.mode != "full":
            raise source.error((*path, key), f"cannot be given with mode {recompute.mode}; only mode full takes it")
    _check_modules(recompute, model, source)
    if recompute.layers is not None and recompute.layers > model.layers:
        raise source.error(
            (*path, "layers"), f"found {recompute.layers}; must be at most model.layers ({model.layers})"
        )


def _check_modules(recompute: Recompute, model: ModelConfig, source: Source) -> None:
    """Raise for parts that the model lacks, and for `modules` with a mode other than selective."""
    path, modules = ("training", "recompute", "modules"), recompute.modules
    usual = Recompute.model_fields["modules"].default  # which resolved scenarios write out for every mode
    if modules != usual and recompute.mode != "selective":
        raise source.error(path, f"cannot be given with mode {recompute.mode}; only mode selective takes it")
    if len(set(modules)) < len(modules):
        raise source.error(path, f"found {list(modules)}; each at most once")
    shared = model.moe is not None and model.moe.shared_width > 0
    for name, there, needed in (
        ("moe", model.moe is not None, "model.moe"),
        ("moe_act", model.moe is not None, "model.moe"),
        ("shared_experts", shared, "shared experts in model.moe"),
        ("mla_up_proj", model.mla is not None, "model.mla"),
        ("mlp", model.has_dense_layers, "layers with a dense MLP"),
    ):
        if name in modules and not there:
            raise source.error(path, f"found '{name}'; needs {needed}")


def _check_loss(t: Training, sections: Sections, source: Source) -> None:
    path, d = ("training", "cross_entropy"), sections.distillation
    if t.cross_entropy == "chunked" and d is not None and d.mode == "logits":
        raise source.error(path, "found 'chunked'; distillation.mode logits needs all logits (unfused or fused)")


def _check_batches(t: Training, sections: Sections, source: Source) -> None:
    """A schedule of batches starts with the first token, grows in tokens to less than all, and every batch is legal."""
    path, schedule = ("training", "batch_schedule"), t.batch_schedule
    if not schedule:
        return
    if t.tokens is None:
        raise source.error(path, "found phases without training.tokens, which says where the last one ends")
    starts = [phase.from_tokens for phase in schedule]
    if starts[0] != 0:
        raise source.error((*path, 0, "from_tokens"), f"found {starts[0]:g}; the first phase starts at 0")
    for i, (before, start) in enumerate(zip(starts, [*starts[1:], t.tokens], strict=True), 1):
        if start <= before:
            where = (*path, i, "from_tokens") if i < len(starts) else ("training", "tokens")
            raise source.error(where, f"found {start:g}; must be above {before:g}, where the phase before starts")
    for i, phase in enumerate(schedule):
        changed = t.model_copy(update={"global_batch_size": phase.global_batch_size})
        if problem := first_problem((batch, micro_batches), sizes_of(sections._replace(training=changed))):
            raise source.error((*path, i, "global_batch_size"), problem[1])
