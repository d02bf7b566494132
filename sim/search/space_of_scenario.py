"""Read the space of layouts of a scenario, and refuse what a search does not cover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from sim.core.errors import InputError
from sim.emit import TRAINERS
from sim.inputs.input_source import Source, validate
from sim.inputs.overrides import merge
from sim.inputs.parallelism import Parallelism
from sim.inputs.scenario import Scenario, resolve
from sim.search.space import DERIVED, KEPT, SEARCHED, SIZES, Linked, Space

# A search holds a list of ranks in memory, and more GPUs are surely a mistake.
MOST_GPUS = 1_000_000


# Keys of `training` that a search refuses.
OF_TRAINING = {
    "fp8_param_gather": "found true; a search compares layouts with 16-bit parameters (false)",
    # of ZeRO's stages the third alone has it
    "parameter_offload": "found true; a search compares ZeRO's stages with parameters on the GPU (false)",
    # the bounds know no reference's forward, and the simplest layout has micro-batches of one sequence
    "preference": "a search covers training on next tokens; sim.sweep varies keys of a step over pairs of answers",
    # the bounds count a step until its last rank ends
    "optimizer_post_validation": "found true; a search compares steps that all ranks end together (false)",
}


def make_space(
    source: Source,
    gpus: int | None,
    name: str,
    only: Mapping[str, Sequence[Any]] | None = None,
    linked: Sequence[Linked] = (),
    trainer: str = "",
) -> Space:
    """Return the space of a scenario as its file says it (`sim.inputs.scenario.read_source`); `name`: see `resolve`.

    `gpus`: None for the scenario's ranks or, if it has none of `SIZES` in `parallelism`, its cluster's GPUs.

    Raises:
        InputError: if the scenario is no training step or has a wrong or unsupported key; for too many GPUs.
    """
    data = source.data
    section = {} if data.get("parallelism") is None else data["parallelism"]
    if gpus is None:
        as_written = resolve(source, name)
        cluster = as_written.cluster
        # Written ranks say how many GPUs the user wants; the cluster may be larger.
        sized = any(section.get(key) is not None for key in SIZES)
        gpus = as_written.parallelism.ranks if sized else cluster.nodes * cluster.gpus_per_node
    if gpus > MOST_GPUS:
        raise InputError(f"{source.label}: a search covers at most {MOST_GPUS:,} GPUs; found {gpus:,}")
    given = validate(Parallelism, section, source, ("parallelism",))
    _check_written(source, given)
    kept = {k: v for k, v in section.items() if k not in (*SEARCHED, *DERIVED, *KEPT)}
    # The written layout need not match the searched GPUs, so one pipeline of all ranks replaces it. It is not run, so
    # it does not matter that most of its stages hold nothing, which trainers may refuse of layers dealt out evenly.
    neutral = {**data, "parallelism": {**kept, "pp": gpus, "layers_per_stage": "balanced"}}
    model = data.get("model")
    captured = isinstance(model, dict) and model.get("program") is not None
    if isinstance(data.get("training"), dict) and not captured:
        # The written micro-batch size may not divide the batch of other numbers of replicas. One sequence does.
        neutral["training"] = merge(data["training"], {"micro_batch_size": 1})
    base = resolve(replace(source, data=neutral), name)
    _check_resolved(source, base)
    # Keys that the scenario sets, even to their default.
    fixed = {k: getattr(given, k) for k in DERIVED if k in given.model_fields_set}
    fixed |= {k: getattr(given, k) for k in KEPT}
    narrowed = {k: tuple(v) for k, v in (only or {}).items()}
    sums = bool(trainer) and TRAINERS[trainer].sums_in_pipelines
    derives = sums and "accumulate_unsharded" not in given.model_fields_set
    return Space(base, gpus, fixed, narrowed, tuple(linked), trainer, derives, frozenset(given.model_fields_set))


def _check_written(source: Source, given: Parallelism) -> None:
    """Refuse keys that stay as they are written in every layout."""
    data = source.data
    # The bounds know the forwards before the first backward only for groups of pp micro-batches.
    if given.micro_batch_group is not None:
        said = "a search runs interleaved_1f1b in groups of pp micro-batches (null)"
        raise source.error(("parallelism", "micro_batch_group"), f"found {given.micro_batch_group}; {said}")
    # The bounds know nothing that runs beside the optimizer, and count all of a backward before the one behind it.
    if given.overlap_param_gather_with_optimizer_step:
        why = "found true; a search compares steps that gather behind the optimizer (false)"
        raise source.error(("parallelism", "overlap_param_gather_with_optimizer_step"), why)
    if given.wgrad_deferral_limit is not None:
        why = f"found {given.wgrad_deferral_limit}; a search compares steps that put nothing off (null)"
        raise source.error(("parallelism", "wgrad_deferral_limit"), why)
    if data.get("rl") is not None:
        why = "a search covers training steps and serving; sim.sweep varies keys of an rl step"
        raise source.error(("rl",), why)
    training = data.get("training")
    for key, why in OF_TRAINING.items():
        if isinstance(training, dict) and training.get(key):
            raise source.error(("training", key), why)


def _check_resolved(source: Source, base: Scenario) -> None:
    """Refuse what is known once presets are read."""
    # With messages every hop is a task, which is too slow for a search, and bounds know only closed forms.
    if base.engine.collectives != "closed_form":
        raise source.error(("engine", "collectives"), "found messages; a search compares closed forms (closed_form)")
    # The kind of GPU that a stage gets would be one more dimension of the space.
    if base.cluster.others:
        raise source.error(("cluster",), "has GPUs of several kinds; a search needs GPUs of one kind")
    if base.processes is not None:
        raise source.error(("processes",), "a search compares steps without processes; leave it out")
    if base.training is None:
        raise InputError(f"{source.label}: training: is missing; a search needs a training step (with --slo, serving)")
