"""Enumerate the layouts that a search goes through, tell which are legal, and make the scenario of each.

A layout is legal if `parse_scenario` accepts its scenario. The reader's own rules (`sim.inputs.rules.layout`) decide
this from the layout's sizes, without parsing.

The space of N GPUs: tp·cp·pp·dp = N; sp only with tp above 1; ep over the divisors of the experts; zero above 0 only if
dp·cp > 1, a schedule only if pp > 1 (otherwise equal layouts would have several names); at most two stages more than
layers (embedding and output alone); micro-batch sizes that divide the batch. All other keys stay as in the scenario.
Keys whose defaults follow from searched keys get the defaults of each layout, unless the scenario sets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, get_args

from msgspec import Struct

from sim.inputs.parallelism import Parallelism, all_replicas, form_of, overlaps_messages, split_layers
from sim.inputs.rules.layout import LAYOUT_RULES, MESH_RULES, first_problem
from sim.inputs.rules.sizes import Problem, Sizes
from sim.inputs.scenario import Scenario
from sim.inputs.training_config import Recompute, RecomputeMode, Training
from sim.inputs.zero_keys import as_reduced, zero_keys
from sim.models.balance import cost_of_last, deal
from sim.schedules import FORMS, ONE_RANK, ScheduleForm
from sim.search.cached import cached

SEARCHED = ("tp", "sp", "cp", "pp", "dp", "ep", "zero", "schedule", "virtual_stages")
# What a layout has of `parallelism`. `tp_overlap` is the scenario's unless --only names values.
LAID_OUT = (*SEARCHED, "tp_overlap")
TP_OVERLAPS: tuple[str, ...] = get_args(Parallelism.model_fields["tp_overlap"].annotation)
SIZES = ("tp", "cp", "pp", "dp")  # whose product is the number of ranks
# Keys whose defaults follow from searched keys. Each layout has its own value, unless the scenario sets the key.
DERIVED = ("shard_size", "layers_per_stage", "p2p_overlap")
# Keys of which all layouts have the scenario's value. The base lacks them, because they need searched keys to be legal.
KEPT = ("expert_tp", "ep_overlap", "mtp_stage")
RECOMPUTE: tuple[str, ...] = get_args(RecomputeMode)
EXTRA_STAGES = 2


class Layout(NamedTuple):
    """Hold one point of the space. `recompute`: a mode, or text such as `full, layers 8` for the scenario's own."""

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
    tp_overlap: str


class MeshSizes(NamedTuple):
    """Hold the sizes of a layout's mesh of ranks."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int


class PartialLayout(NamedTuple):
    """Hold a mesh and how layers run on it. ZeRO stage, schedule and virtual stages are still open."""

    mesh: MeshSizes
    sp: bool
    micro_batch_size: int
    recompute: str
    tp_overlap: str


class Linked(NamedTuple):
    """Hold fields of Layout whose values must together be one of these rows."""

    keys: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def allows(self, found: Layout | MeshSizes) -> bool:
        """Tell whether a row agrees with the fields that are known."""
        # A mesh knows only some of the keys. It passes if a row may fit once the other keys are known.
        known = [(i, getattr(found, key)) for i, key in enumerate(self.keys) if key in found._fields]
        return any(all(row[i] == value for i, value in known) for row in self.rows)


class Space(Struct, frozen=True, dict=True):
    """Hold the space of layouts that a search covers.

    `base`: the scenario, with searched keys at any legal values. `fixed`: the scenario's values of keys that otherwise
    follow from searched keys. `only`: the allowed values of fields of Layout. `linked`: allowed rows of several fields.
    `trainer`: the trainer (`sim.emit.TRAINERS`) that must be able to run the layouts, or "". `sums_in_pipelines`:
    `accumulate_unsharded` follows from the layout, as in the trainer. `given`: keys of `parallelism` that the scenario
    sets.
    """

    base: Scenario
    gpus: int
    fixed: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    linked: tuple[Linked, ...] = ()
    trainer: str = ""
    sums_in_pipelines: bool = False
    given: frozenset[str] = frozenset()

    @property
    def training(self) -> Training:
        """Return the training section."""
        return self.base.for_training

    def allows(self, field: str, value: object) -> bool:
        """Tell whether `only` allows this value of the field."""
        return field not in self.only or value in self.only[field]

    def allows_together(self, found: Layout | MeshSizes) -> bool:
        """Tell whether the linked fields allow a mesh or a layout."""
        return all(link.allows(found) for link in self.linked)

    def accumulates(self, pp: int, zero: int) -> bool:
        """Return `accumulate_unsharded`: the scenario's value, or the trainer's for this pp and ZeRO stage."""
        if not self.sums_in_pipelines:
            return self.base.parallelism.accumulate_unsharded
        return pp > 1 and zero >= 2

    @cached
    def keys_of_zero(self, pp: int, dp: int, zero: int) -> dict[str, Any]:
        """Return the keys of `parallelism` that follow from the ZeRO stage, as parsing a scenario would set them."""
        own = zero_keys(self.training, self.base.parallelism, zero, dp, self.given)
        return {"accumulate_unsharded": self.accumulates(pp, zero), **own}

    @cached
    def schedule_forms(self, pp: int) -> list[tuple[str, int]]:
        """Return the allowed schedules of pp ranks, each with its stages per rank."""
        if pp == 1:
            forms = [(ONE_RANK.name, 1)]
        else:
            # Only the stages of the embedding and of the output may be without a layer.
            most = (self.base.model.layers + EXTRA_STAGES) // pp
            forms = []
            for name, form in FORMS.items():
                least = form.stages_per_rank
                # Interleaved schedules allow any number of virtual stages from their least on; others have one number.
                if form.least_stages is not None:
                    forms += [(name, v) for v in range(least, most + 1)]
                elif form.model_stages(1, least) <= most:
                    forms.append((name, least))
        return [f for f in forms if self.allows("schedule", f[0]) and self.allows("virtual_stages", f[1])]

    def tp_overlaps(self, tp: int) -> tuple[str, ...]:
        """Return the values of `tp_overlap` to try: the scenario's own where --only has none; with tp 1 none."""
        own = (self.base.parallelism.tp_overlap,)
        return ("none",) if tp == 1 else self.only.get("tp_overlap", own)

    @cached
    def cost_of_last(self, mtp_apart: bool) -> float:
        """Return `sim.models.balance.cost_of_last` of the base scenario."""
        return cost_of_last(self.base, mtp_apart)

    @cached_property
    def recomputes(self) -> dict[str, Recompute]:
        """Return recomputations by their name in a Layout: all modes, and the scenario's own if it is no plain mode."""
        found = {mode: Recompute.model_validate({"mode": mode}) for mode in RECOMPUTE}
        own = self.training.recompute
        # A list of modules or of layers is no plain mode, but the user's own choice must be in the space.
        found.setdefault(_recompute_name(own), own)
        return found


def meshes_of(space: Space) -> Iterator[MeshSizes]:
    """Yield all meshes (tp, cp, pp, dp, ep) of the space's GPUs, legal or not."""
    moe = space.base.model.moe
    for tp, cp, pp, dp in _degrees(space.gpus):
        # Tested before the loop over ep, which would repeat the test.
        if pp > space.base.model.layers + EXTRA_STAGES:
            continue
        # Expert parallelism uses the ranks of dp, cp and tp again, so it is not in the product.
        for ep in divisors(moe.experts) if moe else (1,):
            mesh = MeshSizes(tp, cp, pp, dp, ep)
            if all(space.allows(k, v) for k, v in mesh._asdict().items()) and space.allows_together(mesh):
                yield mesh


def _degrees(n: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield all (tp, cp, pp, dp) whose product is n: each degree divides what the degrees before leave."""
    for tp in divisors(n):
        for cp in divisors(n // tp):
            for pp in divisors(n // tp // cp):
                yield tp, cp, pp, n // (tp * cp * pp)


def partial_layouts_of(space: Space, mesh: MeshSizes) -> Iterator[PartialLayout]:
    """Yield all partial layouts of one legal mesh; some have no legal layout."""
    sizes = [b for b in divisors(space.training.global_batch_size // mesh.dp) if space.allows("micro_batch_size", b)]
    modes = [r for r in space.recomputes if space.allows("recompute", r)]
    for sp in (False, True) if mesh.tp > 1 else (False,):
        if space.allows("sp", sp):
            options = product(sizes, modes, space.tp_overlaps(mesh.tp))
            yield from (PartialLayout(mesh, sp, size, mode, overlap) for size, mode, overlap in options)


def layouts_of(space: Space, partial: PartialLayout) -> Iterator[tuple[Layout, bool]]:
    """Yield the layouts that a partial layout leaves open, each with whether it is legal."""
    (tp, cp, pp, dp, ep), sp, size, mode, overlap = partial
    # With one replica there is nothing to shard. `reduce_broadcast` needs unsharded gradients on every rank.
    whole = dp * cp == 1 or space.base.parallelism.dp_sync == "reduce_broadcast"
    zeros = [z for z in ((0,) if whole else (0, 1, 2, 3)) if space.allows("zero", z)]
    for schedule, v in space.schedule_forms(pp):
        # One check serves all ZeRO stages, because no rule about sizes reads `zero`.
        legal = is_legal(space, Layout(tp, sp, cp, pp, dp, ep, 0, schedule, v, size, mode, overlap))
        for zero in zeros:
            layout = Layout(tp, sp, cp, pp, dp, ep, zero, schedule, v, size, mode, overlap)
            if not space.linked or space.allows_together(layout):
                yield layout, legal


def simplest(space: Space, mesh: MeshSizes) -> Layout:
    """Return the layout of a mesh without options, with micro-batches of one sequence."""
    tp, cp, pp, dp, ep = mesh
    return Layout(tp, False, cp, pp, dp, ep, 0, ONE_RANK.name, 1, 1, "none", space.base.parallelism.tp_overlap)


def mesh_problem(space: Space, mesh: MeshSizes) -> Problem | None:
    """Return the first rule that the mesh alone breaks, with micro-batches of one sequence; None for a legal mesh."""
    # A mesh that is illegal with one sequence and no options is illegal with any.
    return first_problem(MESH_RULES, sizes_of(space, simplest(space, mesh)))


def mesh_is_legal(space: Space, mesh: MeshSizes) -> bool:
    """Tell whether the mesh alone breaks no rule."""
    return mesh_problem(space, mesh) is None


def is_legal(space: Space, layout: Layout) -> bool:
    """Tell whether a layout of a legal mesh breaks none of the other rules."""
    return first_problem(LAYOUT_RULES, sizes_of(space, layout)) is None


def sizes_of(space: Space, x: Layout) -> Sizes:
    """Return the sizes that decide whether a layout is legal."""
    fixed, p = space.fixed, space.base.parallelism
    # Positional arguments, in the order of `Sizes`, are faster, and a search makes a record for every layout.
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
        fixed["expert_tp"],
        fixed["ep_overlap"],
        fixed.get("shard_size", all_replicas(x.dp, x.cp)),
        p.cp_method,
        p.cp_split,
        schedule_form(space, x),
        x.virtual_stages,
        fixed.get("layers_per_stage") or None,
        fixed["mtp_stage"],
        cp_method_by_layer=p.cp_method_by_layer,
        hierarchical_context_parallel_sizes=p.hierarchical_context_parallel_sizes,
    )


def schedule_form(space: Space, x: Layout) -> ScheduleForm:
    """Return the schedule's record, as `Parallelism.form` does."""
    return form_of(x.schedule, x.pp, x.ep > 1 and space.fixed["ep_overlap"])


def stage_layers(space: Space, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage: the scenario's, else as even as possible."""
    fixed, k, layers = space.fixed.get("layers_per_stage"), space.fixed["mtp_stage"], space.base.model.layers
    if fixed == "balanced":
        return deal(layers, stages, space.cost_of_last(k is not None and k < stages - 1), k)
    return fixed or split_layers(layers, stages, k)


def scenario_of(space: Space, layout: Layout) -> Scenario:
    """Return the layout's scenario, the same as parsing would give."""
    x, base = layout, space.base
    # `model_copy` does not validate. Validation would take longer than a bound, and the rules have passed already.
    changes: dict[str, Any] = {k: getattr(x, k) for k in LAID_OUT}
    changes |= {key: space.fixed[key] for key in KEPT}
    changes["shard_size"] = space.fixed.get("shard_size", all_replicas(x.dp, x.cp))
    stages = schedule_form(space, x).model_stages(x.pp, x.virtual_stages) if x.pp > 1 else 1
    changes["layers_per_stage"] = stage_layers(space, stages)
    changes["p2p_overlap"] = overlaps(space, x)
    changes |= space.keys_of_zero(x.pp, x.dp, x.zero)
    parallelism = base.parallelism.model_copy(update=changes)
    training = as_reduced(space.training, parallelism).model_copy(
        update={"micro_batch_size": x.micro_batch_size, "recompute": space.recomputes[x.recompute]}
    )
    return base.unchecked_copy(update={"parallelism": parallelism, "training": training})


def divisors(n: int) -> list[int]:
    """Return all divisors of n in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    # Divisors come in pairs around the square root, so numbers up to the root suffice.
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def overlaps(space: Space, layout: Layout) -> bool:
    """Return `p2p_overlap`: the scenario's value, else the schedule's default."""
    return bool(space.fixed.get("p2p_overlap", overlaps_messages(layout.schedule)))


def _recompute_name(recompute: Recompute) -> str:
    extra = [f"{k} {v}" for k, v in (("layers", recompute.layers), ("every", recompute.every)) if v is not None]
    # The default modules are left out of the name, so that it equals the plain mode's.
    if recompute.mode == "selective" and recompute.modules != ("core_attn",):
        extra = list(recompute.modules)
    return ", ".join([recompute.mode, *extra])
