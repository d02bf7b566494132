"""Which ranks are equal. Those of a pipeline stage form classes, of which each is simulated once.

A pipeline is one such class on every pipeline rank: of pipelines that do the same, one is simulated.

Two ranks are equal if they compute the same at the same speed on equal GPUs, if their groups and messages cost the
same, if their own links carry the same, and if the groups of both reach into the same pipelines. The last is found by
refining a first partition until nothing more splits (colour refinement, as in the minimization of automata: Hopcroft
1971; here with sets of neighbours, for a collective starts with its last member, however many are alike). By
induction over the tasks in the order of their starts, equal ranks then have equal times to the last bit.

Every pipeline has a class on all pipeline ranks: a rank's neighbours in the pipeline wait for it, so what tells two
ranks apart tells apart those before and after them. So columns fold: ranks of equal tp, cp and dp coordinates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from sim.core.columns import Ints
from sim.inputs.parallelism import Parallelism
from sim.inputs.scenario import Scenario
from sim.ranks.faults import compute_scales, disturbs, has_jitter, link_scales, network_of, nic_scales
from sim.ranks.places import GroupLocations, aligned
from sim.ranks.rank_mesh import ALONG, CUTS, Mesh
from topology.spec import ClusterSpec

MAX_ACTIONS = 1_000_000  # forwards and backwards of ranks that faults tell apart: some minutes
APART_RANKS = 1024  # as many ranks are simulated one by one under jitter
UNFOLDED_RANKS = 256  # the same with processes, or with collectives as messages


def group_numbers(scenario: Scenario, mesh: Mesh, plane: Ints, sizes: Mapping[str, int]) -> dict[str, Ints]:
    """Return the number of each rank's group, by the group's name: of groups in which ranks of one stage (`plane`,
    ascending) meet. `sizes`: members of each group."""
    whole = scenario.parallelism.zero == 0  # nothing is sharded, so gradients are summed over all holders at once
    rings = ["cp_exchanged", "cp_ring"] if scenario.parallelism.cp_exchanged > 1 else []
    plus_plus = ["secondary"] if scenario.parallelism.zero_hpz_partition_size else []
    plus_plus += ["local", "between"] if scenario.parallelism.zero_quantized_gradients else []
    names = ["tp", "cp", *rings, *(["dp_cp"] if whole else ["shard", "replica", *plus_plus])]
    if scenario.model.moe is not None:
        names += ["expert_tp", "ep", *(["expert_dp"] if whole else ["expert_shard", "expert_replica"])]
    # Numbers without gaps, as `members` needs them.
    return {name: np.unique(_in_group(name, mesh, plane, sizes)[0], return_inverse=True)[1] for name in names}


def _in_group(name: str, mesh: Mesh, plane: Ints, sizes: Mapping[str, int]) -> tuple[Ints, Ints]:
    """Return the number of each rank's group, and the rank's place in it: `Plan.group` for all ranks at once."""
    if name in CUTS:
        cut = CUTS[name]
        number, place = _in_group(cut.outer, mesh, plane, sizes)
        run, place = np.divmod(place, sizes[cut.size])
        part, place = (place, run) if cut.across else (run, place)
        return number * len(plane) + part, place
    number = plane - sum(plane // mesh.strides[d] % mesh.sizes[d] * mesh.strides[d] for d in ALONG[name])  # its first
    place = np.empty_like(plane)
    place[np.argsort(number, kind="stable")] = np.arange(len(plane)) % sizes[name]
    return number, place


def members(number: Ints) -> Ints:
    """Positions of the members of each group, [groups, size], ascending."""
    return np.argsort(number, kind="stable").reshape(int(number.max()) + 1, -1)


def refine(colors: Ints, groups: Iterable[Ints]) -> Ints:
    """The coarsest partition, no coarser than `colors`, whose parts see the same parts in every group."""
    listed = [(number, members(number)) for number in groups]
    listed = [(number, table) for number, table in listed if table.shape[1] > 1]  # who is alone waits for nobody
    count = int(colors.max()) + 1
    while True:
        # A set of colours for each group: a collective starts with its last member, however many come that late.
        seen = [_rows(_sets(colors[table]))[number] for number, table in listed]
        colors = _rows(np.stack([colors, *seen], axis=1))
        if int(colors.max()) + 1 == count:  # a round only ever splits parts, so as many are the same ones
            return colors
        count = int(colors.max()) + 1


def _sets(table: Ints) -> Ints:
    """Each row as a set: sorted, with -1 in place of what is repeated."""
    rows = np.sort(table, axis=1)
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = -1
    return np.sort(rows, axis=1)


def _rows(table: Ints) -> Ints:
    """Number of each row among the different rows."""
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)


def embedding_ranks(scenario: Scenario) -> tuple[int, ...]:
    """The pipeline ranks that hold the embedding matrix, and sum its gradients: the first, the last where the output is
    tied to it, and that of modules for multi-token prediction (Megatron-LM, pretrain_gpt.py: `get_embedding_ranks`);
    the first alone where it has the last stage, too (in a V, and with DualPipe)."""
    m, p = scenario.model, scenario.parallelism
    if not p.form.ends_on_last_rank:
        return (0,)
    last = p.pp - 1
    predicting = last if p.mtp_stage is None else p.mtp_stage % p.pp
    return tuple(sorted({0, *[last] * m.tied_embeddings, *[predicting] * (m.mtp_layers > 0)}))


def expert_rank(p: Parallelism, position: int) -> int:
    """The expert-parallel coordinate of the rank at `position` of its stage's ranks in order."""
    return position // p.expert_tp % p.ep


def uneven_context(scenario: Scenario) -> bool:
    """Tell whether context-parallel ranks have unequal work: a sequence that is not folded back (zigzag), or windows,
    of which the queries at the sequence's beginning see a part. Elsewhere kernels still differ in shape, not in FLOPs;
    all ranks are taken to run those of the first.
    """
    p, window = scenario.parallelism, scenario.model.window
    methods = p.cp_methods - {"all_to_all"}
    if p.cp == 1 or not methods:
        return False
    uneven = ("contiguous",) if methods == {"all_gather"} else ("contiguous", "striped")
    return p.cp_split in uneven or (window is not None and window < scenario.for_training.seq_len)


def uneven_experts(scenario: Scenario) -> bool:
    """Tell whether experts, and so their ranks, have unequal work."""
    moe = scenario.model.moe
    return scenario.parallelism.ep > 1 and moe is not None and moe.imbalance != "balanced"


def _work(scenario: Scenario, mesh: Mesh, plane: Ints) -> Ints:
    """Return by position in a stage a number for the rank's work; equal numbers mean equal work."""
    p = scenario.parallelism
    # Equal numbers for even work: context and expert coordinates then decide nothing, and ranks may fold.
    out = plane // mesh.strides["cp"] % p.cp if uneven_context(scenario) else np.zeros_like(plane)
    return out * p.ep + np.arange(len(plane)) // p.expert_tp % p.ep if uneven_experts(scenario) else out


def pipeline_numbers(
    scenario: Scenario, mesh: Mesh, plane: Ints, sizes: Mapping[str, int], single: frozenset[int] = frozenset()
) -> Ints | None:
    """The number of the pipeline at every position in a stage (`plane`: ranks of the first, ascending); None if all are
    equal. `sizes`: members of each group of ranks.

    Pipelines are numbered by their first members. Jitter tells all ranks apart, up to `APART_RANKS` of them; those of
    `single` are alone in their pipelines.
    """
    p = scenario.parallelism
    if has_jitter(scenario) and p.ranks <= APART_RANKS:
        _check_size(scenario, len(plane))
        return np.arange(len(plane))
    faulty = {node for pair in link_scales(scenario) for node in pair}
    faulty |= {rank // scenario.cluster.gpus_per_node for rank in nic_scales(scenario)}
    work, speeds = _work(scenario, mesh, plane), _speeds(scenario, mesh, len(plane))
    gpus = _gpus(scenario.cluster, mesh, plane)
    alone = np.zeros_like(work)  # processes may change these ranks by themselves, so none stands for another
    for i, position in enumerate(sorted({position_of(mesh, rank) for rank in single})):
        alone[position] = i + 1
    # Groups that lie in nodes and leaves alike cost the same, and their prices need not be compared.
    apart = bool(faulty) or not aligned(scenario)
    if not (apart or work.any() or speeds.any() or alone.any() or gpus.any()):
        return None
    colors = _rows(np.stack([work, speeds, alone, gpus], axis=1))
    numbers = group_numbers(scenario, mesh, plane, sizes)
    if apart:
        places = GroupLocations(scenario.cluster, network_of(scenario), faulty)
        colors = _rows(np.stack([colors, *_prices(places, scenario, mesh, plane, numbers)], axis=1))
    colors = refine(colors, numbers.values())
    if colors.max() == 0:
        return None
    _, first, number = np.unique(colors, return_index=True, return_inverse=True)
    if disturbs(scenario):
        _check_size(scenario, len(first))
    # The rank of each pipeline's first member among all first members: pipeline 0 is that of the stage's first rank.
    return np.argsort(np.argsort(first))[number]


def check_each_rank(scenario: Scenario, why: str) -> None:
    """Refuse to simulate each of very many ranks by itself.

    Raises:
        InputError: ends with `why`.
    """
    ranks = scenario.parallelism.ranks
    if ranks > UNFOLDED_RANKS:
        found = f"{ranks:,} ranks are too many to simulate each by itself, {UNFOLDED_RANKS} at most; {why}"
        raise scenario.error(("parallelism",), found)


def _check_size(scenario: Scenario, pipelines: int) -> None:
    p = scenario.parallelism
    actions = 2 * pipelines * p.stages * scenario.micro_batches
    if actions > MAX_ACTIONS:
        raise scenario.error(
            ("faults",),
            f"{pipelines:,} ranks of each of {p.pp} pipeline stages differ, so {actions:,} actions are simulated; "
            f"at most {MAX_ACTIONS:,} (take fewer faults or micro-batches)",
        )


def _speeds(scenario: Scenario, mesh: Mesh, columns: int) -> Ints:
    """A number for the compute scales of each column's ranks."""
    slow: dict[int, list[tuple[int, float]]] = {}
    for rank, scale in sorted(compute_scales(scenario).items()):
        # With its pipeline rank: columns fold as a whole, so equal columns are slow at the same stages.
        slow.setdefault(position_of(mesh, rank), []).append((mesh.coordinate("pp", rank), scale))
    numbers: dict[tuple[tuple[int, float], ...], int] = {}
    out = np.zeros(columns, dtype=np.int64)
    for position, scales in slow.items():
        out[position] = numbers.setdefault(tuple(scales), len(numbers) + 1)
    return out


def _gpus(cluster: ClusterSpec, mesh: Mesh, plane: Ints) -> Ints:
    """A number for the kinds of GPUs of each column's ranks."""
    if not cluster.others:
        return np.zeros_like(plane)
    columns = [tuple(cluster.kind_of(rank + i * mesh.strides["pp"]) for i in range(mesh.sizes["pp"])) for rank in plane]
    numbers: dict[tuple[str, ...], int] = {}
    return np.array([numbers.setdefault(column, len(numbers)) for column in columns], dtype=np.int64)


def position_of(mesh: Mesh, rank: int) -> int:
    """Where a rank stands among the ranks of its stage, in ascending order."""
    stride, stages = mesh.strides["pp"], mesh.sizes["pp"]
    return rank // (stride * stages) * stride + rank % stride


def _prices(
    places: GroupLocations, scenario: Scenario, mesh: Mesh, plane: Ints, numbers: dict[str, Ints]
) -> list[Ints]:
    """For each column, as numbers: what its ranks' links carry, and what each kind of group or message that they take
    part in costs."""
    pp, stride = mesh.sizes["pp"], mesh.strides["pp"]
    out = []
    tables = [members(n) for n in numbers.values()]
    for i in range(pp):
        ranks = plane + i * stride
        out.append(places.of_ranks(ranks))
        out += [places.of_groups(ranks[t])[n] for n, t in zip(numbers.values(), tables, strict=True) if t.shape[1] > 1]
        if pp > 1:
            out.append(places.of_messages(ranks, plane + (i + 1) % pp * stride))
    whole = np.concatenate([plane[tables[0]] + i * stride for i in range(pp)], axis=1)  # the group `model`
    if whole.shape[1] > 1:
        out.append(places.of_groups(np.sort(whole, axis=1))[numbers["tp"]])
    if len(holders := embedding_ranks(scenario)) > 1:
        out.append(places.of_groups(np.stack([plane + i * stride for i in holders], axis=1)))
    return out
