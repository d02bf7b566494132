"""Forward passes alone: the log-probabilities of answers, and a reward model's scores.

The very forward programs of a training step are run, without backward. Micro-batches follow each other through the
pipeline: a flow shop of equal jobs with transport between the machines. With t(s) the seconds of stage s, d of a
message and T of the busiest rank, which may hold several stages, m micro-batches take

    m·T + Σ (t(s) + d) over the first pp stages − the longest t(s),

exact for one stage a rank, and for equal interleaved stages where micro-batches come in groups of pp. Where a rank
waits for its messages (`p2p_overlap` false), t(s) holds the message to the next stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from sim.inputs.rl_config import RewardModel
from sim.inputs.scenario import Scenario
from sim.prices.profile import Profile
from sim.prices.shared_cores import costs_of
from sim.programs.compile import CompiledProgram, compile_program
from sim.programs.priced_items import Shares
from sim.programs.stages import Stage, stage_input_bytes
from sim.results.step import FinishedStep
from sim.rl.batches import Batch
from sim.rl.parts import reward_scenario
from sim.simulation import prepare


class Forward(Struct, frozen=True):
    """Forward passes of a step. `shares`: seconds of one pass on the busiest rank by (kind, source, uncertainty);
    `weight_bytes`, `buffer_bytes`: of the model on a rank, and what a pass needs beside it."""

    seconds: float
    shares: Shares
    weight_bytes: float = 0.0
    buffer_bytes: float = 0.0


def pipeline_s(stage_s: Sequence[float], send_s: Sequence[float], rank_of: Sequence[int], passes: int) -> float:
    """Seconds of `passes` micro-batches through stages of `stage_s` seconds, held by the ranks `rank_of`; `send_s`:
    from each stage to the next.

    >>> pipeline_s([1.0, 1.0, 1.0], [0.5, 0.5], [0, 1, 2], 4), pipeline_s([1.0, 3.0], [0.0], [0, 1], 4)
    (7.0, 13.0)
    """
    busy: dict[int, float] = {}
    for seconds, rank in zip(stage_s, rank_of, strict=True):
        busy[rank] = busy.get(rank, 0.0) + seconds
    first = stage_s[: len(busy)]
    return passes * max(busy.values()) + sum(first) + sum(send_s[: len(busy) - 1]) - max(first)


def policy_forward(step: FinishedStep, passes: int) -> Forward:
    """The policy's forward over `passes` micro-batches of each replica, in the layout that it is trained in."""
    schedule, plan, pricing = step.schedule, step.plan, step.pricing
    chain = schedule.chains[0]
    ranks = [schedule.rank_of_stage[s] for s in chain]
    programs = [_slowest(step, s, rank, False) for s, rank in zip(chain, ranks, strict=True)]
    seconds = [program.makespan_s for program in programs]
    once_s = _gathered_once_s(step, chain, ranks, seconds)
    sizes = [stage_input_bytes(plan, schedule.part_of_stage[s]) for s in chain[1:]]
    first_of = [c.rank for c in plan.classes[:: plan.pipelines]]
    sends = [
        pricing.send(first_of[a], first_of[b], size).seconds if a != b else 0.0
        for (a, b), size in zip(pairwise(ranks), sizes, strict=True)
    ]
    if not step.scenario.parallelism.p2p_overlap:
        seconds = [own + send for own, send in zip(seconds, [*sends, 0.0], strict=True)]
        sends = [0.0] * len(sends)
    busiest = max(programs, key=lambda program: program.makespan_s)
    return Forward(once_s + pipeline_s(seconds, sends, ranks, passes), busiest.shares)


def _gathered_once_s(step: FinishedStep, chain: Sequence[int], ranks: Sequence[int], seconds: Sequence[float]) -> float:
    """Return what the first pass takes more: ZeRO-3 that keeps gathered parameters gathers them in it alone."""
    dp = next(iter(step.stages[0].values())).dp
    if dp.zero != 3 or dp.reshard:
        return 0.0
    first = [_slowest(step, s, rank, True).makespan_s for s, rank in zip(chain, ranks, strict=True)]
    return max(a - b for a, b in zip(first, seconds, strict=True))


def _slowest(step: FinishedStep, stage: int, pipeline_rank: int, first: bool) -> CompiledProgram:
    """A stage's forward on the slowest of the classes that hold it. ZeRO-3 gathers parameters in it."""
    held = [
        (step.stages[i][stage], c.rank)
        for i, c in enumerate(step.plan.classes)
        if c.pipeline_rank == pipeline_rank and stage in step.stages[i]
    ]
    compiled = [_compile(own, step, rank, first) for own, rank in held]
    return max(compiled, key=lambda program: program.makespan_s)


def _compile(stage: Stage, step: FinishedStep, rank: int, first: bool) -> CompiledProgram:
    # nothing is kept for a backward, and none frees what ZeRO-3 has gathered for it
    alone = replace(stage, offload=(), dp=replace(stage.dp, stays=not stage.dp.reshard))
    return compile_program(alone.forward(first, True), step.pricing.on(rank))


def reward_forward(scenario: Scenario, reward: RewardModel, batch: Batch, profile: Profile) -> Forward:
    """The reward model's forward over all answers, without the output layer: a score is one number.

    Answers are dealt out evenly to its replicas, which pack as many as the policy does (NeMo-RL and verl divide a batch
    over the ranks before they pack it).
    """
    answers = batch.updates * batch.micro_batches * batch.micro_batch_size * scenario.parallelism.dp
    own_answers = -(-answers // (scenario.parallelism.ranks // reward.tp))
    together = min(batch.micro_batch_size, own_answers)
    own = reward_scenario(scenario, reward, replace(batch, micro_batch_size=together))
    ready = prepare(own, costs_of(own, profile))
    (stage,) = ready.stages[0].values()
    body = replace(stage, blocks=stage.blocks[: 1 + reward.model.layers])
    program = compile_program(body.forward(False, False), ready.pricing.on(0))
    weights = sum(b.params + b.expert_params for b in body.blocks) * stage.dp.parameter_bytes
    seconds = -(-own_answers // together) * program.makespan_s
    return Forward(seconds, program.shares, weights, max(b.forward_peak_bytes for b in body.blocks))
