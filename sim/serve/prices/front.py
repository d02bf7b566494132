"""What a client waits for behind the engine: the server's processes that make text of tokens and stream it.

vLLM since 0.7 has one such process for each replica (entrypoints/cli/serve.py: api_server_count is
data_parallel_size where nobody says otherwise), with one thread. It takes an iteration's outputs from the engine core's
socket, makes text of each, a slice of 128 outputs after another (v1/engine/async_llm.py, output_handler;
VLLM_V1_OUTPUT_PROC_CHUNK_SIZE), and after each slice the slice's requests send a piece of their answer, one after
another. The engine core does not wait for it: its socket holds any number of outputs. Where pieces take longer than the
next iteration, tokens of several iterations leave in one piece (v1/engine/output_processor.py, RequestOutputCollector).

SGLang has two: the detokenizer makes text of all of an iteration's tokens and sends it on (0.5.23,
srt/managers/detokenizer_manager.py, handle_batch_token_id_out); the process of HTTP and tokenizer wakes the requests of
16 outputs after another (srt/managers/tokenizer_manager.py, _handle_batch_output; batch_notify_size), which send their
pieces then. Its pieces, too, hold what came since the last one (_stream_one_response takes the whole out_list).
"""

from __future__ import annotations

from msgspec import Struct

from sim.variants.engines.host_times import HostTimes
from sim.variants.engines.record import Engine

MOST_BUSY = 0.9  # of an iteration's time: with more for text alone a queue grows as long as the load lasts


class Front(Struct, frozen=True):
    """Seconds of the process for an iteration's outputs, for each sequence in it, and for a piece that it sends, which
    it does after each `together` outputs; and of the process before it for an iteration's text and a sequence's."""

    outputs_s: float
    sequence_s: float
    piece_s: float
    together: int
    text_outputs_s: float = 0.0
    text_sequence_s: float = 0.0

    def text_s(self, sequences: int) -> float:
        """Seconds of the process that makes text for the one that sends it."""
        return self.text_outputs_s + sequences * self.text_sequence_s

    def work_s(self, sequences: int) -> float:
        """Seconds of the process that sends, for an iteration of `sequences`, each with a piece of its own."""
        return self.outputs_s + sequences * (self.sequence_s + self.piece_s)

    def keeps_up(self, sequences: int, iteration_s: float) -> bool:
        """Whether an iteration's tokens are sent before the next ones come."""
        return max(self.work_s(sequences), self.text_s(sequences)) <= iteration_s

    def after_s(self, sequences: int, iteration_s: float) -> tuple[float, float]:
        """Seconds from the end of one of many iterations like it to the piece with a token of it: in the mean of its
        sequences, and of the last of them.

        The last are those whose prompts have just been computed, because the scheduler takes up running sequences first
        (vLLM, v1/core/sched/scheduler.py: update_from_output goes through num_scheduled_tokens in the order in which it
        was filled). Where pieces take longer than an iteration, rounds follow one another without a pause: one makes
        text of all tokens that came in the round before, and sends as many pieces as there are sequences, so that it
        takes pieces / (1 - share of the time that text takes). A token waits half a round for the next to begin, and
        half of it to its piece. The process before, if there is one, hands on all text of an iteration at once.
        """
        before_s = self.text_s(sequences)
        if not self.keeps_up(sequences, iteration_s):
            text = (self.outputs_s + sequences * self.sequence_s) / iteration_s
            round_s = sequences * self.piece_s / (1 - min(text, MOST_BUSY))
            return before_s + round_s, before_s + round_s
        whole, total_s = sequences // self.together, 0.0
        for i, size in enumerate([self.together] * whole + [sequences - whole * self.together]):
            slices_s = self.outputs_s + i * self.together * (self.sequence_s + self.piece_s)
            total_s += size * (slices_s + size * self.sequence_s + (size + 1) / 2 * self.piece_s)
        return before_s + total_s / sequences, before_s + self.work_s(sequences)


def front_of(times: HostTimes, engine: Engine, logprobs: int = 0, interval: int = 1) -> Front | None:
    """The processes of an engine's server; None where they take no time that is known. `logprobs`: log probabilities
    that come with each token.

    With an `interval` above 1 a request streams that many tokens in a piece: a share of 1 / interval of an iteration's
    sequences sends one, in the mean. vLLM's server makes text of every token all the same (0.33,
    v1/engine/output_processor.py, make_request_output). Other engines hand no tokens on between (SGLang 0.5.23,
    srt/managers/scheduler_components/output_streamer.py, `num_unsent >= stream_interval`; TensorRT-LLM,
    _torch/pyexecutor/py_executor.py, _handle_responses). First and last tokens go out at once; they are not counted.
    """
    text_s = times.output_s + bool(logprobs) * times.logprobs_s + logprobs * times.logprob_s
    piece_s = (times.piece_s + logprobs * times.logprob_piece_s) / interval
    skipped = interval if engine.interval_skips_text else 1
    before = times.text_outputs_s, times.text_output_s / skipped
    front = Front(times.outputs_s, text_s / skipped, piece_s, engine.sent_together, *before)
    return front if front.work_s(1) else None
