"""Keys and values of computed prompts on their way from replicas that prefill to replicas that decode.

A decode replica that admits a request sets blocks aside and asks for it; until everything has come, the blocks of the
prefill replica stay taken. Both replicas' links are resources that carry one request at a time: transfers that meet on
one wait for each other. Each GPU sends or receives its own part of the cache; where one side has fewer GPUs, its
parts are larger and decide (Zhong et al. 2024, "DistServe", arXiv 2401.09670; Patel et al. 2024, "Splitwise", arXiv
2311.18677).

A draft has its keys and values in blocks of the same numbers, which move with the model's (SGLang 0.5.6,
srt/disaggregation/prefill.py, 126 to 134: "We should also transfer draft model kv cache"; vLLM 0.32,
v1/worker/gpu_model_runner.py, 7117 to 7119: all caches are registered, the draft's among them). SGLang also sends the
hidden state and the first drafted token, so that the decode replica checks drafts at once
(srt/disaggregation/decode_schedule_batch_mixin.py, "Simulate the eagle run"); vLLM's adds a token alone first
(v1/core/sched/scheduler.py, 3171: the last token is computed again): `hands_drafts_over` in `sim.variants.engines`. A
computed prompt's LoRA adapter may give way on the prefill replica before its blocks do (vLLM counts the adapters of
those that run), and must be on the decode replica's GPU before the next token.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

import simpy

from sim.engine.simpy_events import Clock
from sim.serve.on_simpy import Process, ReplicaProcess
from sim.serve.replicas.pools import Pool
from sim.serve.replicas.router import Router
from sim.serve.scheduling.sequences import Sequence


class Transfer(NamedTuple):
    """A computed prompt that moved: between which replicas, when it was asked for, and when it was on its way."""

    prefill: int
    decode: int
    tokens: int
    asked_s: float
    start_s: float
    end_s: float


class Handover:
    """Takes prompts that are computed, and brings them to the decode replica that `router` chooses."""

    def __init__(
        self, clock: Clock, pools: Items[Pool], processes: Items[Items[ReplicaProcess]], router: Router
    ) -> None:
        self.clock, self.router = clock, router
        self.prefill, self.decode = pools
        self.prefilling, self.decoding = processes
        self.token_bytes = max(pool.capacity.stage_token_bytes for pool in pools)
        self.out, self.into = ([simpy.Resource(clock) for _ in pool.replicas] for pool in pools)
        self.sources: dict[Sequence, tuple[int, Sequence]] = {}  # the replica, and what it still holds
        self.transfers: list[Transfer] = []
        for i, process in enumerate(self.prefilling):
            process.on_left.append(partial(self._computed, i))
        for i, process in enumerate(self.decoding):
            process.replica.scheduler.fetch = lambda sequence, i=i: self._asked(sequence, i)

    def _computed(self, replica: int, sequence: Sequence) -> None:
        """A prompt is computed: its sequence goes on elsewhere, its blocks stay until they have been copied."""
        if sequence.finish_s >= 0:
            return
        self.prefilling[replica].held += 1
        self.sources[sequence] = replica, self.prefilling[replica].replica.scheduler.held_for_others(sequence)
        sequence.remote, sequence.computed = sequence.computed, 0
        sequence.private = sequence.shared = 0
        sequence.reads = None
        self.decoding[self.router.choose(sequence)].take(sequence)

    def _asked(self, sequence: Sequence, replica: int) -> None:
        self.clock.process(self._transfer(sequence, replica))

    def _transfer(self, sequence: Sequence, replica: int) -> Process:
        clock, order, asked = self.clock, sequence.order, self.clock.now
        source, held = self.sources.pop(sequence)
        with self.out[source].request() as out:
            yield out
            with self.into[replica].request() as into:
                yield into
                start = clock.now
                yield clock.timeout(self.seconds(source, replica, held.computed))
        self.transfers.append(Transfer(source, replica, held.computed, asked, start, clock.now))
        self.prefilling[source].copied_away(held)
        if sequence.running and sequence.order == order:  # else it was preempted meanwhile, and is recomputed
            sequence.ready_s = self.decoding[replica].replica.scheduler.adapter_ready_s(sequence, clock.now)
            self.decoding[replica].tell()

    def seconds(self, source: int, replica: int, tokens: int) -> float:
        """Seconds of one transfer alone."""
        a = self.prefill.first_rank_of(self.prefill.replicas[source])
        b = self.decode.first_rank_of(self.decode.replicas[replica])
        return self.prefill.costs.prices.pricing.network.send(a, b, tokens * self.token_bytes)
