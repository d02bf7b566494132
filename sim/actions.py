"""Pipeline actions: what one rank does with one micro-batch on one stage, and whole schedules of them.

A schedule is data: for every pipeline rank an ordered tuple of entries. The simulator expands it into tasks
and `calibrate` executes the very same lists, so simulated and real runs can differ in cost, never in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action computes. Letters are those of torch.distributed.pipelining."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients together
    I = "I"  # backward for the input only  # noqa: E741
    W = "W"  # backward for the weights only


class Action(NamedTuple):
    """One stage's work on one micro-batch; prints as `2F0`: stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


class Overlap(NamedTuple):
    """A forward and a backward that a rank runs at the same time (DualPipe), each hiding the other's messages."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Entry = Action | Overlap


@dataclass(frozen=True, slots=True)
class Schedule:
    """Per-rank action lists over `len(rank_of_stage)` schedule stages.

    `rank_of_stage[s]` is the pipeline rank that runs schedule stage s; `part_of_stage[s]` the slice of the model
    it holds (equal to s, except for DualPipe, which holds each of its p parts on two ranks: 2p schedule stages).
    `chains` are the paths a micro-batch's activations take, first stage to last; DualPipe has two, one for each
    direction; every other schedule has one. `ranks[r]` is rank r's list.
    """

    name: str
    micro_batches: int
    rank_of_stage: tuple[int, ...]
    part_of_stage: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[Entry, ...], ...]
