"""What all iterations of a workload cost by their parts: whence its seconds come, which the result reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

from msgspec.structs import replace

from sim.prices.cost import REPEAT_UNCERTAINTY
from sim.programs.priced_items import Shares, add_all
from sim.serve.prices.afd import DisaggregatedExperts
from sim.serve.prices.costs import IterationCosts
from sim.serve.prices.host import MEETING
from sim.serve.prices.iteration_parts import Key, Work
from sim.serve.prices.kept_sizes import CHUNKS, LENGTHS, below, prefill_parts, sizes_around
from sim.serve.prices.load import Load
from sim.serve.prices.operator_prices import PricedProgram
from sim.serve.prices.two_batches import hidden_seconds
from sim.serve.replicas.replica import Iteration

# Kinds of seconds beside those of operators.
HOST = "host_between_iterations"
LAUNCHES = "kernel_launches"
WEIGHTS = "weights_from_host_memory"
Computed = Items[tuple[Load, int]]  # loads, and how often each was computed


def loads_of(iterations: Iterable[Iteration]) -> list[tuple[Load, int]]:
    """What was computed, and how often: the steps of a run all as its middle one."""
    return [(i.load.later(i.steps // 2), i.steps) for i in iterations]


def priced_together(costs: IterationCosts, computed: Computed) -> PricedProgram:
    """Seconds of all that was computed, the draft's part among them, each part at the kept size below its own; `shares`
    have what GPUs wait for as well, so that they sum up to the iterations' seconds on all stages, but for sizes
    between two kept ones."""
    seconds, comm_s, shares = 0.0, 0.0, Shares()
    own = [(costs.own_share(load), times) for load, times in computed]
    if costs.afd is not None:
        return _with_afd(costs, costs.afd, own)
    for key, times in _used(costs, own).items():
        priced = costs.priced(key)
        seconds += priced.seconds * times
        comm_s += priced.comm_s * times
        add_all(shares, priced.shares, times)
    for load, times in own:
        if costs.attends_jointly(load):
            each = [costs.attention_s(load, i) for i in range(len(costs.attentions))]
            attention_s = sum([stage.attention_s(each) for stage in costs.stages]) * times
            seconds += attention_s
            add_all(shares, {("attention", "measured", REPEAT_UNCERTAINTY): attention_s})
    hidden_s = sum([hidden_seconds(costs, load) * times for load, times in own])
    if hidden_s:
        seconds, comm_s = seconds - hidden_s, max(0.0, comm_s - max(0.0, hidden_s))
        _hide(shares, hidden_s)
    add_all(shares, _waits(costs, own))
    if costs.draft is not None:
        passes = [(one, times) for load, times in own for one in costs.drafted(load)]
        for by in filter(None, (costs.draft, costs.draft.later)):
            drafted = priced_together(by, [pass_ for pass_ in passes if costs.drafting_costs(pass_[0]) is by])
            seconds, comm_s = seconds + drafted.seconds, comm_s + drafted.comm_s
            add_all(shares, drafted.shares)
    return PricedProgram(seconds, comm_s, shares)


def _with_afd(costs: IterationCosts, afd: DisaggregatedExperts, computed: Computed) -> PricedProgram:
    """Where experts have GPUs of their own: what both sides compute and send, in proportion, so that it sums up to the
    iterations' seconds."""
    shares: Shares = {}
    comm_s = 0.0
    used = defaultdict(float, _used(costs, [(replace(load, pooled=0), times) for load, times in computed]))
    routed: defaultdict[Key, float] = defaultdict(float)
    for load, times in computed:
        padded = costs.host.padded(load.tokens, load.prompts)
        for i, n in enumerate(costs.stages[0].layers):
            used[Key(Work.ROUTED, i, sizes_around(padded)[0])] -= times * n
            routed[Key(Work.ROUTED, i, sizes_around(afd.tokens_of(load))[0])] += times * n * afd.batches_of(load)
    for prices, keys in ((costs, used), (afd.experts, routed)):
        for key, often in keys.items():
            priced = prices.priced(key)
            comm_s += priced.comm_s * often
            add_all(shares, priced.shares, often)
    whole_s = sum(shares.values())
    seconds = sum([costs.device_seconds(load)[0] * times for load, times in computed])
    scaled = {share: s * seconds / whole_s for share, s in shares.items() if s > 0.0}
    add_all(scaled, _waits(costs, computed))
    return PricedProgram(seconds, comm_s * seconds / whole_s, scaled)


def _hide(shares: Shares, hidden_s: float) -> None:
    """Take what overlap saves off the experts' messages; where it costs, add that to what is computed twice."""
    changed = [share for share in shares if (share[0] == "all_to_all") == (hidden_s > 0)]
    whole_s = sum([shares[share] for share in changed])
    for share in changed:
        shares[share] *= max(0.0, 1.0 - hidden_s / whole_s)


def _waits(costs: IterationCosts, computed: Computed) -> Shares:
    """Seconds for which GPUs wait: for launches of kernels, for weights from host memory, and for their host's own
    work. What an engine was measured to do between iterations is its own part.

    A host that overlaps is waited for as long as it takes more than the GPU, but then all of its work decides when an
    iteration ends: where it is uncertain by some percent, so is the whole iteration. Likewise T = (h^4 + d^4)^(1/4)
    of launches changes by h^4 / T^3 times the relative error of h, which the wait T - d is given.
    """
    host, copied_s, read_s = costs.host, costs.copied_s, sum([own.read_s for own in costs.offloaded])
    launches_s = copies_s = waited_s = decides_s = launching_s = 0.0
    for load, times in computed if host.engine.host or costs.offloaded else ():
        first_s = 0.0
        each = zip(costs.device_seconds(load), costs.draft_seconds(load), copied_s, strict=True)
        for stage, (device_s, draft_s, copy_s) in enumerate(each):
            launched_s = host.launched_each(stage, [device_s], load)[0]
            busy_s = max(launched_s + draft_s, copy_s)
            first_s = first_s if stage else busy_s
            launches_s += (launched_s - device_s) * times
            launching_s += (launched_s**MEETING - device_s**MEETING) / launched_s ** (MEETING - 1) * times
            copies_s += (busy_s - launched_s - draft_s) * times
        drafting_s = costs.drafting_device_s(load)
        for device_s, launched_s in zip(drafting_s, host.drafted_each(drafting_s, load), strict=True):
            launches_s += (launched_s - device_s) * times
            launching_s += (launched_s**MEETING - device_s**MEETING) / launched_s ** (MEETING - 1) * times
        copies_s += read_s * times
        own_s, beside_s = (host.own_s(load), host.beside_s(load)) if host.engine.host else (0.0, 0.0)
        longer_s, search_s = max(0.0, beside_s - first_s), host.search_s(load)
        wait_s = max(0.0, own_s - first_s) if host.overlaps else own_s + longer_s
        waited_s += (wait_s + search_s) * times
        decides_s += ((own_s if wait_s else 0.0) + (beside_s if longer_s else 0.0) + search_s) * times
    unsure, shares = host.times.uncertainty, Shares()
    if waited_s > 0.0:
        shares[HOST, "host", unsure * decides_s / waited_s] = waited_s
    if launches_s > 0.0:
        shares[LAUNCHES, "host", unsure * launching_s / launches_s] = launches_s
    if copies_s > 0.0:
        shares[WEIGHTS, "topology", 0.0] = copies_s
    if costs.overhead_s:
        times = sum([times for _, times in computed])
        shares[HOST, "measured", REPEAT_UNCERTAINTY] = costs.overhead_s * times
    return shares


class _Sizes(NamedTuple):
    """How many iterations had each size."""

    tokens: Counter[int]
    padded: Counter[tuple[int, int]]  # tokens with those that pad them; whether all-reduces send them
    routed: Counter[tuple[int, int]]  # that experts compute, less the padded ones, which are in a layer's price
    chunks: Counter[tuple[tuple[int, int, int], ...]]  # as `Load.prefills`
    decodes: Counter[tuple[bool, int, int, int]]  # beside prompts; sequences, the kept length below, queries
    samples: Counter[int]
    adapted: Counter[tuple[int, int]]  # tokens and adapters


def _sizes(costs: IterationCosts, loads: Computed) -> _Sizes:
    found = _Sizes(Counter(), Counter(), Counter(), Counter(), Counter(), Counter(), Counter())
    computed = Counter[tuple[int, int, bool]]()  # tokens, those of which experts compute a part, whether with prompts
    for load, times in loads:
        prompts, joint = bool(load.prefills), costs.attends_jointly(load)
        computed[load.tokens, load.pooled or load.tokens, prompts] += times
        found.samples[load.samples] += times
        if prompts and not joint:
            found.chunks[load.prefills] += times
        if load.decodes and not joint:
            mean = LENGTHS[below(LENGTHS, load.decode_kv / load.decodes)]
            found.decodes[prompts, load.decodes, mean, load.queries] += times
        if load.adapters:
            found.adapted[load.adapted, load.adapters] += times
    for (tokens, pooled, prompts), times in computed.items():
        padded, summed = costs.host.padded(tokens, prompts), costs.summed(prompts)
        found.tokens[tokens] += times
        found.padded[padded, summed] += times
        found.routed[padded, summed] -= times
        found.routed[costs.host.routed(pooled, prompts, costs.dims.ep > 1), summed] += times
    return found


def _used(costs: IterationCosts, loads: Computed) -> dict[Key, float]:
    """Count how often all iterations used each part; a layer's parts count once for each layer."""
    found, used = _sizes(costs, loads), defaultdict[Key, float](float)
    layers = [sum(s.layers[i] for s in costs.stages) for i in range(len(costs.specs))]
    attentions = [sum(s.attentions[i] for s in costs.stages) for i in range(len(costs.attentions))]
    for size, times in _at_kept(found.tokens).items():
        used[Key(Work.EMBEDDING, 0, size)] += times
    for work, counted in ((Work.LAYER, found.padded), (Work.ROUTED, found.routed)):
        for summed in (0, 1):
            of_kind = Counter({size: times for (size, kind), times in counted.items() if kind == summed})
            for size, times in _at_kept(of_kind).items():
                for i, n in enumerate(layers):
                    used[Key(work, i, size, summed)] += times * n
    for prefills, times in found.chunks.items():
        for chunk, cached, equal, part in prefill_parts(prefills):
            sizes = *(CHUNKS[below(CHUNKS, n)] for n in (chunk, cached)), equal
            for i, n in enumerate(attentions):
                used[Key(Work.PREFILL, i, *sizes)] += times * n * part
    for (prompts, sequences, length, queries), times in found.decodes.items():
        for i, n in enumerate(attentions):
            used[Key(costs.decode_work(prompts, queries, i), i, sequences, length, queries)] += times * n
    for size, times in _at_kept(found.samples).items():
        if size:
            used[Key(Work.HEAD, 0, size)] += times
    for (size, adapters), times in found.adapted.items():
        for i, n in enumerate(layers):
            used[Key(Work.ADAPTERS, i, sizes_around(size)[0], adapters)] += times * n
    return {key: times for key, times in used.items() if times}


def _at_kept(sizes: Counter[int]) -> Counter[int]:
    """How often each kept size is the one below."""
    kept: Counter[int] = Counter()
    for size, times in sizes.items():
        kept[sizes_around(size)[0]] += times
    return kept
