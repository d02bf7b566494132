"""What a client waits for behind the engine: the server's process that makes text of tokens and streams it.

vLLM since 0.7 has one such process for each replica (entrypoints/cli/serve.py: api_server_count is
data_parallel_size where nobody says otherwise), with one thread. It takes an iteration's outputs from the engine core's
socket, makes text of each, a slice of 128 outputs after another (v1/engine/async_llm.py, output_handler;
VLLM_V1_OUTPUT_PROC_CHUNK_SIZE), and after each slice the slice's requests send a piece of their answer, one after
another. The engine core does not wait for it: its socket holds any number of outputs. Where pieces take longer than the
next iteration, tokens of several iterations leave in one piece (v1/engine/output_processor.py, RequestOutputCollector).
"""

from __future__ import annotations

from msgspec import Struct

from sim.serve.engines.record import HostTimes

SLICE = 128  # outputs
MOST_BUSY = 0.9  # of an iteration's time: with more for text alone a queue grows as long as the load lasts


class Front(Struct, frozen=True):
    """Seconds of the process for an iteration's outputs, for each sequence in it, and for a piece that it sends."""

    outputs_s: float
    sequence_s: float
    piece_s: float

    def work_s(self, sequences: int) -> float:
        """Seconds for an iteration of so many sequences, each with a piece of its own."""
        return self.outputs_s + sequences * (self.sequence_s + self.piece_s)

    def keeps_up(self, sequences: int, iteration_s: float) -> bool:
        """Whether it sends an iteration's tokens before the next ones come."""
        return self.work_s(sequences) <= iteration_s

    def after_s(self, sequences: int, iteration_s: float) -> tuple[float, float]:
        """Seconds from the end of one of many iterations like it to the piece with a token of it: in the mean of its
        sequences, and of the last of them.

        The last are those whose prompts have just been computed, because the scheduler takes up running sequences first
        (vLLM, v1/core/sched/scheduler.py: update_from_output goes through num_scheduled_tokens in the order in which it
        was filled). Where pieces take longer than an iteration, rounds follow one another without a pause: one makes
        text of all tokens that came in the round before, and sends as many pieces as there are sequences, so that it
        takes pieces / (1 - share of the time that text takes). A token waits half a round for the next to begin, and
        half of it to its piece.
        """
        if not self.keeps_up(sequences, iteration_s):
            text = (self.outputs_s + sequences * self.sequence_s) / iteration_s
            round_s = sequences * self.piece_s / (1 - min(text, MOST_BUSY))
            return round_s, round_s
        whole, total_s = sequences // SLICE, 0.0
        for i, size in enumerate([SLICE] * whole + [sequences - whole * SLICE]):
            before_s = self.outputs_s + i * SLICE * (self.sequence_s + self.piece_s)
            total_s += size * (before_s + size * self.sequence_s + (size + 1) / 2 * self.piece_s)
        return total_s / sequences, self.work_s(sequences)


def front_of(times: HostTimes) -> Front | None:
    """The process of an engine's server; None where it takes no time that is known."""
    front = Front(times.outputs_s, times.output_s, times.piece_s)
    return front if front.work_s(1) else None
