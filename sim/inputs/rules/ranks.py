"""Rules between keys: which products of layouts, models and clusters are legal, each with its reason.

Here are those of the ranks, the GPUs and a teacher. The other files of the folder have those of a section each;
`layout` has those of a layout's sizes, which the search asks too. A rule yields the problems
that it finds; the first of all is told, so a rule may take for granted what those before it hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sim.core.dtypes import sixteen_bit
from sim.core.units import counted
from sim.inputs.input_source import Problems, Source, raise_first
from sim.inputs.parallelism import MAX_RANKS, Parallelism
from sim.inputs.program_file import read_program
from sim.inputs.rules.layout import ALL_RULES, empty_stages, first_problem
from sim.inputs.rules.preference import preference_problems
from sim.inputs.rules.training import training_problems
from sim.inputs.sections import Sections, sizes_of

if TYPE_CHECKING:
    from sim.inputs.distillation_config import Distillation

MAX_STAGES = 1_000_000


def _product(p: Parallelism) -> str:
    return f"tp·cp·dp·pp = {p.tp}·{p.cp}·{p.dp}·{p.pp} = {counted(p.ranks, 'rank')}"


def check_size(p: Parallelism, source: Source) -> None:
    """Raise where there are more ranks or stages than can be simulated."""
    if p.ranks > MAX_RANKS:
        raise source.error(("parallelism",), f"{_product(p)}; at most {MAX_RANKS:,} can be simulated")
    if p.stages > MAX_STAGES:
        raise source.error(("parallelism",), f"makes {p.stages:,} stages; at most {MAX_STAGES:,} can be simulated")


def check_rules(sections: Sections, source: Source, evenly: bool = False) -> None:
    """Raise InputError for the first rule broken; `evenly`: layers are dealt out, not listed."""
    raise_first(_problems(sections), source)
    if evenly and (problem := empty_stages(sizes_of(sections))):
        raise source.error(*problem)


def _problems(sections: Sections) -> Problems:
    yield from _of_ranks(sections)
    yield from _of_program(sections)
    yield from _of_positions(sections)
    if problem := first_problem(ALL_RULES, sizes_of(sections)):
        yield problem
    yield from _of_reductions(sections.parallelism)
    if sections.training is not None:
        yield from training_problems(sections, sections.training)
        yield from preference_problems(sections, sections.training)
    yield from _of_precision(sections)
    yield from _of_mixed_gpus(sections)
    if sections.inference is not None:
        from sim.inputs.rules.serving import serving_problems

        yield from serving_problems(sections, sections.inference)
    if sections.distillation is not None:
        yield from _of_distillation(sections, sections.distillation)
    if sections.faults is not None:
        from sim.inputs.rules.faults import fault_problems

        yield from fault_problems(sections, sections.faults)


def _of_reductions(p: Parallelism) -> Problems:
    if p.dp_sync == "reduce_broadcast" and p.zero > 0:
        why = f"needs whole gradients on every rank (zero 0, found {p.zero})"
        yield ("parallelism", "dp_sync"), f"found 'reduce_broadcast'; {why}"
    if p.all_reduce_once and p.reduces_rows:
        why = "shards of single micro-batches add up, not of rows (accumulate_in_a_row must be false)"
        yield ("parallelism", "all_reduce_once"), f"found true; {why}"


def _of_ranks(sections: Sections) -> Problems:
    p, cluster = sections.parallelism, sections.cluster
    gpus = cluster.nodes * cluster.gpus_per_node
    if p.ranks > gpus:
        found = f"found {counted(cluster.nodes, 'node')} of {cluster.gpus_per_node} = {counted(gpus, 'GPU')}"
        least = f"at least {counted(-(-p.ranks // cluster.gpus_per_node), 'node')} (or leave nodes out)"
        yield ("cluster", "nodes"), f"{found}; {_product(p)} need {least}"


def _of_program(sections: Sections) -> Problems:
    """A captured program is run as it is: it serves no requests, and is neither teacher nor student."""
    d = sections.distillation
    if d is not None and d.teacher.program is not None:
        path = ("distillation", "teacher", "program")
        yield path, "a teacher cannot be a captured program; describe its model"
    if sections.model.program is None:
        return
    zero = sections.parallelism.zero
    if zero and read_program(Path(sections.model.program)).forward_alone:
        yield ("parallelism", "zero"), f"found {zero}; a captured forward alone has nothing to reduce or update: 0"
    for key, section in (("inference", sections.inference), ("distillation", d)):
        if section is not None:
            yield (key,), "cannot be given with model.program; a captured program runs as it was captured"


def _of_positions(sections: Sections) -> Problems:
    model = sections.model
    if model.positions == "learned" and sections.seq_len > model.max_positions:
        why = f"learned positions must cover {sections.seq_len} tokens"
        yield ("model", "max_positions"), f"found {model.max_positions}; {why}"


def _of_precision(sections: Sections) -> Problems:
    section, workload = ("training", sections.training) if sections.training else ("inference", sections.inference)
    assert workload is not None
    for needed in (workload.precision, sixteen_bit(workload.precision)):
        if why := sections.without_peak(needed):
            yield (section, "precision"), f"found '{workload.precision}'; {why}"


def _of_mixed_gpus(sections: Sections) -> Problems:
    """Serving and a teacher are priced on one kind of GPU."""
    names = " and ".join(gpu.name for gpu in sections.cluster.gpus)
    if len(sections.cluster.gpus) > 1 and sections.inference is not None:
        yield ("cluster",), f"has GPUs of several kinds, {names}; requests are served on one kind"
    if len(sections.cluster.gpus) > 1 and sections.distillation is not None:
        yield ("cluster",), f"has GPUs of several kinds, {names}; a teacher is priced on one kind"


def _of_distillation(sections: Sections, distillation: Distillation) -> Problems:
    path, teacher, tp = ("distillation",), distillation.teacher, distillation.teacher_parallelism.tp
    if distillation.mode == "logits" and teacher.vocab != sections.model.vocab:
        why = f"mode logits needs the student's ({sections.model.vocab})"
        yield (*path, "teacher"), f"has a vocabulary of {teacher.vocab}; {why}"
    if teacher.positions == "learned" and sections.seq_len > teacher.max_positions:
        why = f"learned positions must cover {sections.seq_len} tokens"
        yield (*path, "teacher", "max_positions"), f"found {teacher.max_positions}; {why}"
    ranks = sections.parallelism.ranks
    sizes = (("the teacher's heads", teacher.heads), ("the teacher's ffn", teacher.ffn), ("the number of ranks", ranks))
    for what, size in sizes:
        if size % tp:
            yield (*path, "teacher_parallelism", "tp"), f"found {tp}; must divide {what} ({size})"
