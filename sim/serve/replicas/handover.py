"""Keys and values of computed prompts on their way from replicas that prefill to replicas that decode.

A decode replica that admits a request sets blocks aside and asks for it; until everything has come, the blocks of the
prefill replica stay taken. Where an engine sets `room_first`, a request waits for these blocks before it comes to a
prefill replica, and each chunk of its prompt is sent once it is computed. Both replicas' links are resources that carry
one part at a time: parts that meet on one wait for each other. Each GPU sends or receives its own part of the cache;
where one side has fewer GPUs, its parts are larger and decide (Zhong et al. 2024, "DistServe", arXiv 2401.09670; Patel
et al. 2024, "Splitwise", arXiv 2311.18677). What else engines do differently, first tokens above all, says
`sim.variants.engines.handing_over`.

A draft has its keys and values in blocks of the same numbers, which move with the model's (SGLang 0.5.6,
srt/disaggregation/prefill.py, 126 to 134: "We should also transfer draft model kv cache"; vLLM 0.32,
v1/worker/gpu_model_runner.py, 7117 to 7119: all caches are registered, the draft's among them). SGLang also sends the
hidden state and the first drafted token, so that the decode replica checks drafts at once
(srt/disaggregation/decode_schedule_batch_mixin.py, "Simulate the eagle run"); vLLM's samples the first token alone. A
computed prompt's LoRA adapter may give way on the prefill replica before its blocks do (vLLM counts the adapters of
those that run), and must be on the decode replica's GPU before the next token.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple

import simpy
from msgspec import Struct

from sim.engine.simpy_events import Clock
from sim.inputs.engine_file import engine_of
from sim.serve.on_simpy import Process, ReplicaProcess, take_in
from sim.serve.replicas.pools import Pool
from sim.serve.replicas.router import Router
from sim.serve.scheduling.sequences import Sequence


class Transfer(NamedTuple):
    """The cache of a computed prompt, or of a part of it, that moved from a prefill to a decode replica.

    It has the two replicas, when the part was asked for, and when it was on its way. `last`: it is the prompt's last
    part.
    """

    prefill: int
    decode: int
    tokens: int
    asked_s: float
    start_s: float
    end_s: float
    last: bool = True


class Ahead(Struct, eq=False):
    """Blocks that a decode replica has set aside for `sequence`, whose prompt is not computed yet.

    `order`: the sequence's order when they were set aside. `sent`: tokens of the prompt that have left.
    """

    sequence: Sequence
    decode: int
    order: int
    sent: int = 0


class Handover:
    """Brings requests to a prefill replica, takes prompts that are computed, and brings them to a decode replica; the
    pools' `routers` choose which."""

    def __init__(
        self, clock: Clock, pools: Items[Pool], processes: Items[Items[ReplicaProcess]], routers: Items[Router]
    ) -> None:
        self.clock = clock
        self.prefill, self.decode = pools
        self.prefilling, self.decoding = processes
        self.to_prefill, self.to_decode = routers
        self.rules = engine_of(self.prefill.scenario.for_serving.engine).handing_over
        self.token_bytes = max(pool.capacity.stage_token_bytes for pool in pools)
        self.out, self.into = ([simpy.Resource(clock) for _ in pool.replicas] for pool in pools)
        self.sources: dict[Sequence, tuple[int, Sequence]] = {}  # the replica, and what it still holds
        self.ahead: dict[Sequence, Ahead] = {}  # by the sequence of the prompt alone
        self.transfers: list[Transfer] = []
        for i, process in enumerate(self.prefilling):
            process.on_left.append(partial(self._computed, i))
            if self.rules.room_first:
                process.on_chunk.append(partial(self._chunk, i))
        for i, process in enumerate(self.decoding):
            process.replica.scheduler.fetch = partial(self._asked, i)

    def enter(self, sequence: Sequence) -> None:
        """Take a new request to a prefill replica; to a decode replica if the engine sets room aside first."""
        if self.rules.room_first and sequence.request.output_tokens > 1:
            sequence.remote, sequence.generated = sequence.request.prompt_tokens, 1
            self.decoding[self.to_decode.choose(sequence)].take(sequence)
        else:
            take_in(self.prefilling, self.to_prefill, sequence)

    def _asked(self, decode: int, sequence: Sequence) -> None:
        """Go on with a request for which a decode replica has set blocks aside."""
        order = sequence.order
        if not self.rules.room_first:
            source, held = self.sources.pop(sequence)
            self.clock.process(self._transfer(sequence, order, source, decode, held, held.computed))
            return
        prompt = Sequence(sequence.request, sequence.index, sequence.arrival_s)
        self.ahead[prompt] = Ahead(sequence, decode, order)
        chosen = self.prefilling[self.to_prefill.choose(prompt)]
        chosen.replica.sequences.append(sequence)
        chosen.take(prompt)

    def _chunk(self, replica: int, prompt: Sequence) -> None:
        """A chunk of a prompt is computed that is not its last: its whole blocks are sent (SGLang, _send_kv_chunk)."""
        ahead = self.ahead.get(prompt)
        if ahead is None:
            return
        block = self.prefill.scenario.for_serving.kv_cache.block_tokens
        tokens = prompt.computed // block * block - ahead.sent
        if tokens > 0:
            ahead.sent += tokens
            self.clock.process(self._send(replica, ahead.decode, tokens, last=False))

    def _computed(self, replica: int, sequence: Sequence) -> None:
        """A prompt is computed: its sequence goes on elsewhere, its blocks stay until they have been copied."""
        if sequence.finish_s >= 0:
            return
        self.prefilling[replica].held += 1
        ahead = self.ahead.pop(sequence, None)
        held = self.prefilling[replica].replica.scheduler.held_for_others(sequence, goes=ahead is None)
        if ahead is not None:
            ahead.sequence.admitted_s = sequence.admitted_s
            left = held.computed - ahead.sent
            self.clock.process(self._transfer(ahead.sequence, ahead.order, replica, ahead.decode, held, left))
            return
        self.sources[sequence] = replica, held
        sequence.remote, sequence.computed = sequence.computed, 0
        sequence.private = sequence.shared = 0
        sequence.reads = None
        after_s = self._asks_after_s(sequence)
        if self.rules.first_token != "computed":
            sequence.first_token_s, sequence.last_output_s, sequence.first_after_s = -1.0, -1.0, 0.0
        if self.rules.first_token == "sampled":
            sequence.generated, sequence.again = 0, 1
        if after_s:
            self.clock.process(self._hand_on(sequence, after_s))
        else:
            self.decoding[self.to_decode.choose(sequence)].take(sequence)

    def _asks_after_s(self, sequence: Sequence) -> float:
        """Seconds from a computed prompt until the engine of the decode server has the request."""
        if self.rules.asks == "at_once":
            return 0.0
        tokens = sequence.request.prompt_tokens if self.rules.asks == "with_text" else 0
        return sequence.first_after_s + self.decode.costs.host.times.before_s(tokens)

    def _hand_on(self, sequence: Sequence, after_s: float) -> Process:
        yield self.clock.timeout(after_s)
        self.decoding[self.to_decode.choose(sequence)].take(sequence)

    def _transfer(
        self, sequence: Sequence, order: int, source: int, decode: int, held: Sequence, tokens: int
    ) -> Process:
        """Copy the rest of a prompt's cache, free its blocks, and let its sequence go on if it was not preempted."""
        yield from self._send(source, decode, tokens)
        self.prefilling[source].copied_away(held)
        if sequence.running and sequence.order == order:  # else it was preempted meanwhile, and is recomputed
            scheduler = self.decoding[decode].replica.scheduler
            sequence.ready_s = scheduler.adapter_ready_s(sequence, self.clock.now)
            if self.rules.first_token == "copied":
                scheduler.arrived.append(sequence)
            self.decoding[decode].tell()

    def _send(self, source: int, decode: int, tokens: int, last: bool = True) -> Process:
        clock, asked = self.clock, self.clock.now
        with self.out[source].request() as out:
            yield out
            with self.into[decode].request() as into:
                yield into
                start = clock.now
                yield clock.timeout(self.seconds(source, decode, tokens))
        self.transfers.append(Transfer(source, decode, tokens, asked, start, clock.now, last))

    def seconds(self, source: int, replica: int, tokens: int) -> float:
        """Seconds of one transfer alone."""
        a = self.prefill.first_rank_of(self.prefill.replicas[source])
        b = self.decode.first_rank_of(self.decode.replicas[replica])
        return self.prefill.costs.prices.pricing.network.send(a, b, tokens * self.token_bytes)
