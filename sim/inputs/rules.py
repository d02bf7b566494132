"""Rules between keys: which products of layouts, models and clusters are legal, each with its reason.

Here are those of the ranks, the GPUs and a teacher. Beside them: `layout_rules` (of a layout's sizes, which the search
asks too), `model_rules`, `training_rules`, `serving_rules`, `rl_rules` and `fault_rules`.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from sim.core.dtypes import matmul_peak_names, sixteen_bit
from sim.inputs.input_source import Source
from sim.inputs.layout_rules import ALL_RULES, first_problem
from sim.inputs.parallelism import Parallelism
from sim.inputs.sections import Sections, sizes_of
from sim.inputs.training_rules import check_training

if TYPE_CHECKING:
    from sim.inputs.workloads import Distillation

MAX_RANKS = 10_000_000
MAX_STAGES = 1_000_000


def _product(p: Parallelism) -> str:
    return f"tp·cp·dp·pp = {p.tp}·{p.cp}·{p.dp}·{p.pp} = {p.ranks:,} ranks"


def check_size(p: Parallelism, source: Source) -> None:
    """Raise where there are more ranks or stages than can be simulated."""
    if p.ranks > MAX_RANKS:
        raise source.error(("parallelism",), f"{_product(p)}; at most {MAX_RANKS:,} can be simulated")
    if p.stages > MAX_STAGES:
        raise source.error(("parallelism",), f"makes {p.stages:,} stages; at most {MAX_STAGES:,} can be simulated")


def check_rules(sections: Sections, source: Source) -> None:
    """Raise InputError for the first rule broken."""
    _check_ranks(sections, source)
    _check_program(sections, source)
    _check_positions(sections, source)
    if problem := first_problem(ALL_RULES, sizes_of(sections)):
        raise source.error(*problem)
    p = sections.parallelism
    if p.dp_sync == "reduce_broadcast" and p.zero > 0:
        why = f"needs whole gradients on every rank (zero 0, found {p.zero})"
        raise source.error(("parallelism", "dp_sync"), f"found 'reduce_broadcast'; {why}")
    if sections.training is not None:
        check_training(sections, sections.training, source)
    _check_precision(sections, source)
    _check_mixed(sections, source)
    if sections.inference is not None:
        from sim.inputs.serving_rules import check_serving

        check_serving(sections, sections.inference, source)
    if sections.distillation is not None:
        _check_distillation(sections, sections.distillation, source)
    if sections.faults is not None:
        from sim.inputs.fault_rules import check_faults

        check_faults(sections, sections.faults, source)


def _check_ranks(sections: Sections, source: Source) -> None:
    p, cluster = sections.parallelism, sections.cluster
    gpus = cluster.nodes * cluster.gpus_per_node
    if p.ranks > gpus:
        raise source.error(
            ("cluster", "nodes"),
            f"found {cluster.nodes} nodes of {cluster.gpus_per_node} = {gpus:,} GPUs; {_product(p)} need "
            f"at least {-(-p.ranks // cluster.gpus_per_node)} nodes (or leave nodes out)",
        )


def _check_program(sections: Sections, source: Source) -> None:
    """A captured program is a training step, and neither teacher nor student."""
    d = sections.distillation
    if d is not None and d.teacher.program is not None:
        raise source.error(
            ("distillation", "teacher", "program"), "a teacher cannot be a captured program; describe its model"
        )
    if sections.model.program is None:
        return
    for key, section in (("inference", sections.inference), ("distillation", d)):
        if section is not None:
            raise source.error((key,), "cannot be given with model.program; a captured program is a training step only")


def _check_positions(sections: Sections, source: Source) -> None:
    model = sections.model
    if model.positions == "learned" and sections.seq_len > model.max_positions:
        raise source.error(
            ("model", "max_positions"),
            f"found {model.max_positions}; learned positions must cover {sections.seq_len} tokens",
        )


def _check_precision(sections: Sections, source: Source) -> None:
    section, workload = ("training", sections.training) if sections.training else ("inference", sections.inference)
    assert workload is not None
    for gpu, needed in product(sections.cluster.gpus, (workload.precision, sixteen_bit(workload.precision))):
        peaks = gpu.peak_flops_per_s
        if not any(name in peaks for name in matmul_peak_names(needed)):
            raise source.error(
                (section, "precision"),
                f"found '{workload.precision}'; GPU {gpu.name} has no {needed} peak (it has: {', '.join(peaks)})",
            )


def _check_mixed(sections: Sections, source: Source) -> None:
    """Serving and a teacher are priced on one sort of GPU."""
    names = " and ".join(gpu.name for gpu in sections.cluster.gpus)
    if len(sections.cluster.gpus) > 1 and sections.inference is not None:
        raise source.error(("cluster",), f"has GPUs of several kinds, {names}; requests are served on one kind")
    if len(sections.cluster.gpus) > 1 and sections.distillation is not None:
        raise source.error(("cluster",), f"has GPUs of several kinds, {names}; a teacher is priced on one kind")


def _check_distillation(sections: Sections, distillation: Distillation, source: Source) -> None:
    path, teacher, tp = ("distillation",), distillation.teacher, distillation.teacher_parallelism.tp
    if distillation.mode == "logits" and teacher.vocab != sections.model.vocab:
        raise source.error(
            (*path, "teacher"),
            f"has a vocabulary of {teacher.vocab}; mode logits needs the student's ({sections.model.vocab})",
        )
    if teacher.positions == "learned" and sections.seq_len > teacher.max_positions:
        raise source.error(
            (*path, "teacher", "max_positions"),
            f"found {teacher.max_positions}; learned positions must cover {sections.seq_len} tokens",
        )
    for what, size in (("heads", teacher.heads), ("ffn", teacher.ffn)):
        if size % tp:
            raise source.error(
                (*path, "teacher_parallelism", "tp"), f"found {tp}; must divide the teacher's {what} ({size})"
            )
    if sections.parallelism.ranks % tp:
        raise source.error(
            (*path, "teacher_parallelism", "tp"),
            f"found {tp}; must divide the number of ranks ({sections.parallelism.ranks})",
        )
