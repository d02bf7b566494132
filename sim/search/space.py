"""The layouts that a search goes through: which there are, which are legal, and the scenario of each.

A layout is legal where `parse_scenario` accepts its scenario. Its sizes are asked here by the reader's own rules
(`sim.inputs.layout_rules`), without parsing anything.

The space of N GPUs: tp·cp·pp·dp = N; sp only beside tp; ep over the experts' divisors; zero above 0 only where
dp·cp > 1, a schedule only where pp > 1 (else they are the same layout under other names); at most two stages more
than layers (embedding and output alone); micro-batch sizes that divide the batch. Every other key is the
scenario's own, and those with defaults that follow from searched ones take these unless the scenario says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from sim.core.errors import InputError
from sim.inputs.input_source import Source, validate
from sim.inputs.layout_rules import LAYOUT_RULES, MESH_RULES, Problem, Sizes, first_problem
from sim.inputs.overrides import merge
from sim.inputs.parallelism import Parallelism, split_layers
from sim.inputs.scenario import Recompute, Scenario, Training, resolve
from sim.models.balance import cost_of_last, deal
from sim.schedules import FORMS, ONE_RANK, ScheduleForm
from sim.search.cached import cached

SEARCHED = ("tp", "sp", "cp", "pp", "dp", "ep", "zero", "schedule", "virtual_stages")
# Keys whose defaults follow from searched ones. Unless they were written, each layout has its own value.
DERIVED = ("shard_size", "expert_tp", "layers_per_stage", "p2p_overlap", "ep_overlap")
RECOMPUTE = ("none", "selective", "selective_op", "full")
EXTRA_STAGES = 2
# Keeps a list of ranks in memory, and refuses what is surely a slip.
MOST_GPUS = 1_000_000


class Layout(NamedTuple):
    """One point of the space. `recompute` is a mode, or text such as `full, layers 8` for the scenario's own."""

    tp: int
    sp: bool
    cp: int
    pp: int
    dp: int
    ep: int
    zero: int
    schedule: str
    virtual_stages: int
    micro_batch_size: int
    recompute: str


class Grid(NamedTuple):
    """The sizes of a layout's mesh of ranks."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int


class Way(NamedTuple):
    """How layers run on a mesh. Layouts of one way differ in ZeRO stage and schedule alone."""

    grid: Grid
    sp: bool
    micro_batch_size: int
    recompute: str


class Linked(NamedTuple):
    """Fields of Layout that have one of these rows of values, together."""

    keys: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def allows(self, found: Layout | Grid) -> bool:
        """Whether a row agrees with the fields that are known."""
        # A mesh knows some of the keys only. It passes if any row may still fit once the rest is known.
        known = [(i, getattr(found, key)) for i, key in enumerate(self.keys) if key in found._fields]
        return any(all(row[i] == value for i, value in known) for row in self.rows)


class Space(Struct, frozen=True, dict=True):
    """Where a search looks. `base` has the searched keys at any legal values; `fixed` holds what the scenario says
    of the keys that otherwise follow from searched ones; `only` narrows fields of Layout to some values, `linked` some
    of them together. `trainer`: the name of one (`sim.emit.TRAINERS`) that must be able to run the layouts, or nothing.
    """

    base: Scenario
    gpus: int
    fixed: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    linked: tuple[Linked, ...] = ()
    trainer: str = ""
    sums_in_pipelines: bool = False

    @property
    def training(self) -> Training:
        """The training section, which a search needs."""
        return self.base.for_training

    def allows(self, field: str, value: object) -> bool:
        """Whether the caller's own restriction of `field` lets `value` through."""
        return field not in self.only or value in self.only[field]

    def allows_together(self, found: Layout | Grid) -> bool:
        """Whether linked fields let a mesh or a layout through."""
        return all(link.allows(found) for link in self.linked)

    def accumulates(self, pp: int, zero: int) -> bool:
        """`accumulate_unsharded`: what the scenario says, or what its trainer does."""
        if not self.sums_in_pipelines:
            return self.base.parallelism.accumulate_unsharded
        return pp > 1 and zero >= 2

    @cached
    def schedule_forms(self, pp: int) -> list[tuple[str, int]]:
        """Schedules with their stages per rank; a space's own restrictions of them are part of it, so pp is all."""
        if pp == 1:
            forms = [(ONE_RANK.name, 1)]
        else:
            # Stages without a layer may hold the embedding or the output, and no more.
            most = (self.base.model.layers + EXTRA_STAGES) // pp
            forms = []
            for name, form in FORMS.items():
                least = form.stages_per_rank
                # Interleaved schedules take any number of virtual stages from their least on; others have one.
                if form.least_stages is not None:
                    forms += [(name, v) for v in range(least, most + 1)]
                elif form.model_stages(1, least) <= most:
                    forms.append((name, least))
        return [f for f in forms if self.allows("schedule", f[0]) and self.allows("virtual_stages", f[1])]

    @cached_property
    def cost_of_last(self) -> float:
        """See `sim.models.balance`."""
        return cost_of_last(self.base)

    @cached_property
    def recomputes(self) -> dict[str, Recompute]:
        """Recomputations by their name in a Layout: all modes, and the scenario's own if it is none of them."""
        found = {mode: Recompute.model_validate({"mode": mode}) for mode in RECOMPUTE}
        own = self.training.recompute
        # A list of modules or of layers is no mode, but the user's own choice must be in the space.
        found.setdefault(_recompute_name(own), own)
        return found


def make_space(
    source: Source,
    gpus: int | None,
    name: str,
    only: Mapping[str, Sequence[Any]] | None = None,
    linked: Sequence[Linked] = (),
    trainer: str = "",
    sums_in_pipelines: bool = False,
) -> Space:
    """The space of a scenario as it stands in its file (`sim.inputs.scenario.read_source`); `name`: as in `resolve`.

    `gpus`: null for the scenario's ranks or, where it has no section `parallelism`, its cluster's GPUs.

    Raises:
        InputError: if the scenario is no training step, or wrong in a key that no layout changes; for too many GPUs.
    """
    data = source.data
    if gpus is None:
        as_written = resolve(source, name)
        cluster = as_written.cluster
        # Ranks that were written say what the user wants to run on; the cluster may be larger.
        gpus = as_written.parallelism.ranks if data.get("parallelism") else cluster.nodes * cluster.gpus_per_node
    if gpus > MOST_GPUS:
        raise InputError(f"{source.label}: a search lays out at most {MOST_GPUS:,} GPUs; found {gpus:,}")
    section = {} if data.get("parallelism") is None else data["parallelism"]
    given = validate(Parallelism, section, source, ("parallelism",))
    # The bounds read forwards off the schedule's own lists, which other groups would change.
    if given.micro_batch_group is not None:
        said = "a search runs interleaved_1f1b in groups of pp micro-batches (null)"
        raise source.error(("parallelism", "micro_batch_group"), f"found {given.micro_batch_group}; {said}")
    if data.get("rl") is not None:
        why = "a search lays out training steps, and serving; sim.sweep varies keys of an rl step"
        raise source.error(("rl",), why)
    kept = {k: v for k, v in section.items() if k not in (*SEARCHED, *DERIVED)}
    # A written layout need not fit the GPUs that are searched. All ranks in one pipeline stand in for it.
    neutral = {**data, "parallelism": {**kept, "pp": gpus}}
    if isinstance(data.get("training"), dict) and not _is_captured(data.get("model")):
        # A written micro-batch size may not divide the batch of another number of replicas. One sequence always does.
        neutral["training"] = merge(data["training"], {"micro_batch_size": 1})
    base = resolve(replace(source, data=neutral), name)
    # Messages take a task each on every rank, which is too slow for a search, and bounds know closed forms alone.
    if base.engine.collectives != "closed_form":
        raise source.error(("engine", "collectives"), "found messages; a search compares closed forms (closed_form)")
    # Which kind of GPU a stage gets would be one more dimension of the space.
    if base.cluster.others:
        raise source.error(("cluster",), "has GPUs of several kinds; a search lays out GPUs of one kind")
    if base.processes is not None:
        raise source.error(("processes",), "a search compares steps that nothing disturbs; leave it out")
    if base.training is None:
        raise InputError(f"{source.label}: training: is missing; a search lays out training steps, with --slo serving")
    # What was set on purpose, even to its default, and nothing else.
    fixed = {k: getattr(given, k) for k in DERIVED if k in given.model_fields_set}
    narrowed = {k: tuple(v) for k, v in (only or {}).items()}
    derives = sums_in_pipelines and "accumulate_unsharded" not in given.model_fields_set
    return Space(base, gpus, fixed, narrowed, tuple(linked), trainer, derives)


def _is_captured(model: Any) -> bool:
    return isinstance(model, dict) and model.get("program") is not None


def grids(space: Space) -> Iterator[Grid]:
    """All meshes of the space's GPUs: tp, cp, pp, dp and ep; legal ones have a layout or more."""
    moe = space.base.model.moe
    n = space.gpus
    # Divisors of what is left: every product is N, and nothing has to be thrown away.
    for tp in divisors(n):
        for cp in divisors(n // tp):
            for pp in divisors(n // tp // cp):
                dp = n // (tp * cp * pp)
                # Before ep: such a pipeline would be refused as often as there are divisors of the experts.
                if pp > space.base.model.layers + EXTRA_STAGES:
                    continue
                # Expert parallelism reuses the ranks of dp, cp and tp, so it does not enter the product.
                for ep in divisors(moe.experts) if moe else (1,):
                    grid = Grid(tp, cp, pp, dp, ep)
                    if all(space.allows(k, v) for k, v in grid._asdict().items()) and space.allows_together(grid):
                        yield grid


def ways_of(space: Space, grid: Grid) -> Iterator[Way]:
    """All ways to run layers on one legal mesh; some have no legal layout."""
    sizes = [b for b in divisors(space.training.global_batch_size // grid.dp) if space.allows("micro_batch_size", b)]
    modes = [r for r in space.recomputes if space.allows("recompute", r)]
    for sp in (False, True) if grid.tp > 1 else (False,):
        if space.allows("sp", sp):
            yield from (Way(grid, sp, size, mode) for size in sizes for mode in modes)


def layouts_of(space: Space, way: Way) -> Iterator[tuple[Layout, bool]]:
    """The layouts of one way, each with whether it is legal. No rule between sizes reads `zero`."""
    (tp, cp, pp, dp, ep), sp, size, mode = way
    # With one replica there is nothing to shard. `reduce_broadcast` needs whole gradients on every rank.
    whole = dp * cp == 1 or space.base.parallelism.dp_sync == "reduce_broadcast"  # of whole gradients alone
    zeros = [z for z in ((0,) if whole else (0, 1, 2, 3)) if space.allows("zero", z)]
    for schedule, v in space.schedule_forms(pp):
        # Once for all ZeRO stages, as no rule reads them.
        legal = is_legal(space, Layout(tp, sp, cp, pp, dp, ep, 0, schedule, v, size, mode))
        for zero in zeros:
            layout = Layout(tp, sp, cp, pp, dp, ep, zero, schedule, v, size, mode)
            if not space.linked or space.allows_together(layout):
                yield layout, legal


def grid_problem(space: Space, grid: Grid) -> Problem | None:
    """The first rule that the mesh alone breaks, with micro-batches of one sequence; None for a legal mesh."""
    tp, cp, pp, dp, ep = grid
    # A mesh that fails with one sequence and no options fails with all of them, since rules only forbid more.
    smallest = Layout(tp, False, cp, pp, dp, ep, 0, ONE_RANK.name, 1, 1, "none")
    return first_problem(MESH_RULES, sizes_of(space, smallest))


def grid_is_legal(space: Space, grid: Grid) -> bool:
    """Whether the mesh alone breaks no rule."""
    return grid_problem(space, grid) is None


def is_legal(space: Space, layout: Layout) -> bool:
    """The rest of the rules, for a layout of a legal mesh."""
    return first_problem(LAYOUT_RULES, sizes_of(space, layout)) is None


def sizes_of(space: Space, x: Layout) -> Sizes:
    """The sizes that decide whether a layout is legal."""
    fixed, p = space.fixed, space.base.parallelism
    # In the order of `Sizes`. Positional arguments are quicker, and a search makes these for every layout.
    return Sizes(
        space.base.model,
        space.training,
        x.micro_batch_size,
        space.recomputes[x.recompute].mode,
        x.tp,
        x.sp,
        x.cp,
        x.pp,
        x.dp,
        x.ep,
        fixed.get("expert_tp", 1),
        fixed.get("ep_overlap", False),
        fixed.get("shard_size", x.dp * x.cp),
        p.cp_method,
        p.cp_split,
        schedule_form(space, x),
        x.virtual_stages,
        fixed.get("layers_per_stage") or None,
    )


def schedule_form(space: Space, x: Layout) -> ScheduleForm:
    """The schedule's record, as `Parallelism.form` gives it."""
    if x.pp == 1:
        return ONE_RANK
    return FORMS[x.schedule].paired if x.ep > 1 and space.fixed.get("ep_overlap", False) else FORMS[x.schedule]


def stage_layers(space: Space, stages: int) -> tuple[int, ...]:
    """Layers of each of so many stages: as the scenario says, else evenly dealt out."""
    fixed = space.fixed.get("layers_per_stage")
    if fixed == "balanced":
        return deal(space.base.model.layers, stages, space.cost_of_last)
    return fixed or split_layers(space.base.model.layers, stages)


def stages_of(layout: Layout) -> int:
    """Parts that the model's layers are dealt out to."""
    return FORMS[layout.schedule].model_stages(layout.pp, layout.virtual_stages) if layout.pp > 1 else 1


def scenario_of(space: Space, layout: Layout) -> Scenario:
    """The layout's scenario, as parsing it would give, without parsing."""
    x, base = layout, space.base
    # `model_copy` checks nothing. Validating anew what the rules have passed would take longer than a bound.
    changes: dict[str, Any] = {k: getattr(x, k) for k in SEARCHED}
    changes["shard_size"] = space.fixed.get("shard_size", x.dp * x.cp)
    changes["expert_tp"] = space.fixed.get("expert_tp", 1)
    changes["ep_overlap"] = space.fixed.get("ep_overlap", False)
    changes["layers_per_stage"] = stage_layers(space, stages_of(x))
    changes["p2p_overlap"] = overlaps(space, x)
    changes["accumulate_unsharded"] = space.accumulates(x.pp, x.zero)
    training = space.training.model_copy(
        update={"micro_batch_size": x.micro_batch_size, "recompute": space.recomputes[x.recompute]}
    )
    return base.model_copy(update={"parallelism": base.parallelism.model_copy(update=changes), "training": training})


def divisors(n: int) -> list[int]:
    """In ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    # Divisors come in pairs around the root, so numbers up to the root find both.
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def overlaps(space: Space, layout: Layout) -> bool:
    """`p2p_overlap`: what the scenario says, else what the schedule has by default."""
    return bool(space.fixed.get("p2p_overlap", not FORMS[layout.schedule].blocking_sends))


def _recompute_name(recompute: Recompute) -> str:
    extra = [f"{k} {v}" for k, v in (("layers", recompute.layers), ("every", recompute.every)) if v is not None]
    # Usual modules need no mention, so that the name equals the mode's and is no entry of its own.
    if recompute.mode == "selective" and recompute.modules != ("core_attn",):
        extra = list(recompute.modules)
    return ", ".join([recompute.mode, *extra])
