"""The numbers of a step of reinforcement learning."""

from __future__ import annotations

import math
import re

from msgspec import Struct
from msgspec.structs import replace

from sim.results.beside_allocator import left_of, memory_limit
from sim.results.fit import PEAK_UNCERTAINTY, judge
from sim.results.metrics import source_shares
from sim.results.records import Engine, Provenance
from sim.rl.memory import peaks
from sim.rl.phases import step_s
from sim.rl.records import GenerationResult, PoolUse, RlResult, Trained
from sim.rl.step import RlStep

TAIL = 0.1  # of the answers


def make_rl_result(sim: RlStep) -> RlResult:
    """A simulated step as its record."""
    seconds, tokens = sim.step_time_s, sim.batch.useful_tokens
    low, high = (step_s([(p.pool, p.interval_s[i]) for p in sim.phases], sim.rl.steps_off) for i in (0, 1))
    pools = _pools(sim)
    fits = all(pool.fits_in_memory for pool in pools)
    served, trained = sim.served.outcome, sim.update.outcome
    return RlResult(
        scenario=sim.scenario,
        step_time_s=seconds,
        step_time_interval_s=(low, high),
        tokens=tokens,
        tokens_per_s=tokens / seconds,
        tokens_per_s_per_gpu=tokens / seconds / sim.scenario.ranks,
        answers_per_s=sim.rl.answers / seconds,
        critical_path=_critical_path(sim),
        phases=sim.phases,
        generation=_generation(sim),
        training=_trained(sim),
        weight_transfer=sim.transfer,
        pools=pools,
        peak_memory_bytes=max(pool.peak_memory_bytes for pool in pools),
        peak_reserved_bytes=max(pool.peak_reserved_bytes for pool in pools),
        fits_in_memory=fits,
        provenance=_provenance(sim),
        warnings=tuple(dict.fromkeys((*trained.warnings, *_engine_warnings(sim), *_warnings(pools)))),
        engine=Engine(
            tasks=trained.engine.tasks + served.engine.tasks,
            wall_s=sim.wall_s,
            path=trained.engine.path if trained.engine.path == served.engine.path else "simpy and static",
        ),
    )


def _critical_path(sim: RlStep) -> dict[str, float]:
    """The phases that make up the step, longest first: one step off, of the two pools' the longer ones alone."""
    sums = {pool: sum(p.seconds for p in sim.phases if p.pool == pool) for pool in ("generation", "training")}
    shorter = min(sums, key=lambda pool: sums[pool]) if sim.rl.steps_off else ""
    on_it = {p.name: p.seconds for p in sim.phases if p.pool != shorter}
    return dict(sorted(on_it.items(), key=lambda item: -item[1]))


def tail_s(finish_s: list[float]) -> float:
    """Seconds at the end in which fewer than a tenth of the answers are under way.

    >>> tail_s([1.0] * 10), tail_s([1.0] * 9 + [3.0])
    (0.0, 2.0)
    """
    ordered = sorted(finish_s)
    return ordered[-1] - ordered[math.ceil((1 - TAIL) * len(ordered)) - 1]


def busy_share(sim: RlStep) -> float:
    """Return the mean part of the generation in which the engine's GPUs compute."""
    replicas = [r for pool in sim.served.pools for r in pool.replicas]
    stages = len(sim.served.costs.stages)
    busy = sum(i.spans[s][1] - i.spans[s][0] for r in replicas for i in r.iterations for s in range(stages))
    whole = sim.served.end_s * stages * (sim.rl.generation.replicas or 1)
    return min(1.0, busy / whole) if whole > 0 else 0.0


def _generation(sim: RlStep) -> GenerationResult:
    outcome, kv, answers = sim.served.outcome, sim.served.outcome.kv_cache, sim.answers
    return GenerationResult(
        duration_s=sim.served.end_s,
        tail_s=tail_s([s.finish_s for s in sim.served.sequences]),
        busy_share=busy_share(sim),
        replicas=sim.rl.generation.replicas or 1,
        answers=sim.rl.answers,
        prompt_tokens=int(answers.prompt_tokens.sum()),
        output_tokens=int(answers.output_tokens.sum()),
        longest_output=int(answers.output_tokens.max()),
        output_tokens_per_s_per_gpu=outcome.output_tokens_per_s_per_gpu,
        prefix_hit_rate=kv.prefix_hit_rate,
        running_max=kv.running_max,
        preemptions=kv.preemptions,
    )


def _trained(sim: RlStep) -> Trained:
    batch, outcome = sim.batch, sim.update.outcome
    return Trained(
        update_s=outcome.step_time_s,
        updates=sim.updates,
        micro_batches=batch.micro_batches,
        micro_batch_size=batch.micro_batch_size,
        seq_len=batch.seq_len,
        filled=batch.filled,
        mfu=outcome.utilization.mfu,
        bubble_fraction=outcome.mean_rank.bubble_fraction,
    )


class _Pool(Struct, frozen=True):
    """GPUs that belong together. `trains`, `writes`: the trainer, the engine that writes answers runs on them."""

    name: str
    gpus: int
    busy_s: float
    trains: bool
    writes: bool


def _busy(sim: RlStep) -> list[_Pool]:
    """Busy is a GPU that computes, copies or sends; of the generation its share, of a rule's reward nothing."""
    rl, share, of = sim.rl, busy_share(sim), {"generation": 0.0, "training": 0.0, "both": 0.0}
    for phase in sim.phases:
        of[phase.pool] += phase.seconds
    of["generation"] -= rl.reward_s + (1.0 - share) * sim.served.end_s
    trainer, engine = sim.scenario.parallelism.ranks, rl.generation.ranks
    if rl.colocated:
        busy_s = of["generation"] * engine / trainer + of["training"] + of["both"]
        return [_Pool("colocated", trainer, busy_s, trains=True, writes=True)]
    return [
        _Pool("training", trainer, of["training"] + of["both"], trains=True, writes=False),
        _Pool("generation", engine, of["generation"] + of["both"], trains=False, writes=True),
    ]


def _pools(sim: RlStep) -> tuple[PoolUse, ...]:
    critic = (sim.critic.states, sim.critic.peak_bytes) if sim.critic is not None else (None, 0.0)
    found = peaks(sim.rl, sim.update.plan, sim.update.outcome, sim.states, sim.served, sim.reward, *critic)
    gpu, trained, out = sim.scenario.cluster.gpu, sim.update.outcome, []
    for pool in _busy(sim):
        turns = found[pool.name]
        # An engine's own GPUs have none of the trainer's communicators.
        limit = (memory_limit(sim.scenario, gpu) if pool.trains else left_of(gpu)).limit
        peak = max(turns.values())
        idle = trained.peak_reserved_bytes - trained.peak_memory_bytes if pool.trains else 0.0
        reserved = max(peak, turns.get("training", 0.0) + idle)
        fit = judge(reserved, limit, PEAK_UNCERTAINTY)
        use = PoolUse(
            name=pool.name,
            gpus=pool.gpus,
            busy_s=pool.busy_s,
            idle_share=max(0.0, 1.0 - pool.busy_s / sim.step_time_s),  # additions round
            peak_memory_bytes=peak,
            peak_reserved_bytes=reserved,
            peak_by_turn=turns,
            memory_limit_bytes=limit,
            fits_in_memory=fit.fits and (not pool.writes or sim.served.outcome.fits_in_memory),
            fit=fit,
        )
        out.append(use)
    return tuple(out)


def _provenance(sim: RlStep) -> Provenance:
    """The profile, and the sources of prices, each phase by its seconds."""
    base, total = sim.update.outcome.provenance, dict[str, float]()
    parts = [
        (sim.update.outcome.step_time_s * sim.updates, base.shares),
        (sim.served.end_s, sim.served.outcome.provenance.shares),
        (sim.forward.seconds * (1 if sim.rl.reference == "none" else 2), source_shares(sim.forward.shares)),
        (sim.transfer.seconds, {"topology": 1.0}),
    ]
    if sim.critic is not None:
        trained = sim.critic.update.outcome
        parts.append((trained.step_time_s * sim.updates, trained.provenance.shares))
        parts.append((sim.critic.forward.seconds, source_shares(sim.critic.forward.shares)))
    if sim.reward is not None:
        parts.append((sim.reward.seconds, source_shares(sim.reward.shares)))
    whole = sum(seconds for seconds, _ in parts)
    for seconds, shares in parts:
        for source, share in shares.items():
            total[source] = total.get(source, 0.0) + share * seconds / whole
    return replace(base, shares=total)


def _engine_warnings(sim: RlStep) -> list[str]:
    """The engine's warnings, which name keys of `inference`, under the keys of `rl.generation`."""
    return [re.sub(r"^inference\.", "rl.generation.", text) for text in sim.served.outcome.warnings]


def _warnings(pools: tuple[PoolUse, ...]) -> list[str]:
    out = []
    for pool in pools:
        reserved, limit = pool.peak_reserved_bytes, pool.memory_limit_bytes
        if not pool.fit.fits:  # a cache that is too small the engine's own warnings tell
            turn = max(pool.peak_by_turn, key=lambda name: pool.peak_by_turn[name])
            said = f"{reserved / 2**30:.1f} GiB reserved of {limit / 2**30:.1f} GiB"
            out.append(f"does not fit in memory: the {pool.name} GPUs need most during {turn}, {said}")
    return out
