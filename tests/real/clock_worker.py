"""A real pipeline on a logical clock: messages are real, and each rank's time is what its actions are said to take.

Every message carries the time at which it was posted, and a blocking exchange tells both ends when the other came
(Lamport 1978, "Time, clocks, and the ordering of events"). So a step takes what order and rendezvous make of it,
however busy the machine is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from calibrate.parallel.pipeline import Message, Pipeline
from calibrate.schedule_replay import SLOWDOWN, make_scenario, replay_profile
from sim.simulation import simulate
from tests.real.ranks import find_on_this_rank, from_all_ranks

ACKNOWLEDGES = 100_000  # added to a message's tag


class Clocked(Pipeline):
    """A pipeline whose time is `clock`, in seconds. `message_s`: what a blocking exchange takes."""

    clock = 0.0
    message_s = 0.0

    def now(self) -> int:
        return round(self.clock * 1e9)

    def _exchange(self, results: Sequence[tuple[Message, Tensor]], needs: Sequence[Message]) -> None:
        """As the pipeline's own, and both ends learn when the other posted."""
        if not results and not needs:
            return
        posted, answers = torch.tensor([self.clock], dtype=torch.float64), {}
        ops = []
        for m, x in results:
            peer, tag = self.peers[self.links.taker(m)], self.links.tag(m)
            answers[m] = torch.zeros(1, dtype=torch.float64)
            ops.append(dist.P2POp(dist.isend, x.contiguous(), peer, tag=tag))
            ops.append(dist.P2POp(dist.irecv, answers[m], peer, tag=ACKNOWLEDGES + tag))
        for m in needs:
            peer, tag = self.peers[self.links.giver(m)], self.links.tag(m)
            self.inbox[m] = torch.zeros(self.shape, dtype=self.dtype)
            ops.append(dist.P2POp(dist.irecv, self.inbox[m], peer, tag=tag))
            ops.append(dist.P2POp(dist.isend, posted, peer, tag=ACKNOWLEDGES + tag))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        others = [float(t) for t in (*answers.values(), *(self.inbox[m] for m in needs))]
        self.clock = max(self.clock, *others) + self.message_s


@dataclass(slots=True)
class Stage:
    """Stands in for a stage: an action starts when its input is there, and takes what it is said to."""

    pipeline: Clocked
    seconds: dict[str, float]

    def forward(self, micro_batch: int, x: Tensor, targets: Tensor) -> Tensor:
        return self._act("forward", x)

    def backward(self, micro_batch: int, grad: Tensor | None) -> Tensor:
        return self._act("backward", grad)

    def backward_input(self, micro_batch: int, grad: Tensor | None) -> Tensor:
        return self._act("input_grad", grad)

    def backward_weight(self, micro_batch: int) -> None:
        self._act("weight_grad", None)

    def _act(self, phase: str, given: Tensor | None) -> Tensor:
        p = self.pipeline
        p.clock = max(p.clock, 0.0 if given is None else float(given)) + self.seconds[phase]
        return torch.tensor([p.clock], dtype=torch.float64)


def _step(_: str, case: dict[str, Any], rank: int) -> float:
    """When the last action of the last of the case's ranks ended; the other ranks have nothing to do."""
    ranks, slow, seconds = case["ranks"], case["slow"], case["seconds"]
    if rank >= ranks:
        return max(from_all_ranks(0.0))
    scenario = make_scenario(case["schedule"], ranks, slow)
    schedule = simulate(scenario, replay_profile(scenario, seconds)).schedule
    overlap = bool(scenario.parallelism.p2p_overlap)
    pipeline = Clocked(schedule, rank, range(ranks), {}, (1,), torch.float64, "cpu", overlap)
    pipeline.message_s = seconds["message"]
    own = {phase: s * (SLOWDOWN if rank == slow else 1.0) for phase, s in seconds.items()}
    pipeline.stages = {s: Stage(pipeline, own) for s, r in enumerate(schedule.rank_of_stage) if r == rank}
    nothing = torch.zeros(schedule.micro_batches, 1, dtype=torch.float64)
    pipeline.step(nothing, nothing)
    return max(from_all_ranks(pipeline.clock))


if __name__ == "__main__":
    find_on_this_rank(_step, *sys.argv[1:])
