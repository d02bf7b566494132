"""The step as a timeline: a row for each kind of phase of each pool, and one for each replica of the engine."""

from __future__ import annotations

from sim.core.timeline import Detail, RankClass, Span, Timeline, from_spans
from sim.core.units import counted
from sim.rl.records import Phase, PhaseKind
from sim.rl.step import RlStep

REPLICAS_SHOWN = 16


def make_rl_timeline(sim: RlStep) -> Timeline:
    """Phases on the ranks of their pool, and how long each replica writes."""
    trainer, engine = sim.scenario.parallelism.ranks, sim.rl.generation.ranks
    first = 0 if sim.rl.colocated else trainer
    training, generation = RankClass(0, range(trainer), 0), RankClass(first, range(first, first + engine), 1)
    classes = (training,) if sim.rl.colocated else (training, generation)
    pools = {"training": [training], "generation": [classes[-1]], "both": list(classes)}
    spans = [_span(c, phase, n) for n, phase in enumerate(sim.phases, 1) for c in pools[phase.pool]]
    return from_spans([*spans, *_replicas(sim, classes[-1])], classes)


def _span(c: RankClass, phase: Phase, number: int) -> Span:
    """A phase; rows are sorted by name, so its number comes first."""
    end_s = phase.start_s + phase.seconds
    return Span(c.rank, f"{number:2d} {phase.name}", phase.kind, -1, -1, phase.start_s, end_s, Detail(phase.name))


def _replicas(sim: RlStep, c: RankClass) -> list[Span]:
    """From the first to the last token of each replica; of many replicas, those that end first and last."""
    ended = []
    for r in (r for pool in sim.served.pools for r in pool.replicas):
        if r.sequences:
            ended.append((max(s.finish_s for s in r.sequences), r.index, len(r.sequences)))
    ended.sort()
    if len(ended) > REPLICAS_SHOWN:
        ended = ended[: REPLICAS_SHOWN // 2] + ended[-REPLICAS_SHOWN // 2 :]
    kind, width = PhaseKind.GENERATION.value, len(str(max((i for _, i, _ in ended), default=0)))
    return [
        Span(c.rank, f"replica {i:{width}d}", kind, -1, -1, 0.0, end, Detail(f"replica {i}", note=counted(n, "answer")))
        for end, i, n in sorted(ended, key=lambda x: x[1])
    ]
