"""Time what SGLang's own scheduler takes for an iteration that adds one token to each sequence. No GPU is needed.

    PYTHON tools/time_sglang_host.py --source FOLDER

FOLDER and PYTHON are those of tools/record_sglang.py, whose bare scheduler runs here: SGLang's overlap loop, its
batches with tensors on the CPU, its radix cache, and its output as far as the message to the detokenizer. In place of
the model a function returns a token for each sequence; its own seconds are subtracted. What remains has no launches, no
copies to and from a GPU, and nothing of the thread that prepares the model's forward, so it is a lower bound beside a
GPU.

The clock is the CPU time of the thread, so that other processes do not count. Printed are medians of iterations in
milliseconds and, by least squares, the milliseconds of an iteration and the microseconds of a sequence, which
`sim/variants/engines/hosts.py` quotes.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from record_sglang import SCHEDULER, Ended, Recording, bare_scheduler
from stub_modules import import_with_stubs

SEQUENCES = (1, 16, 32, 64, 128, 256)
PROMPT_LEN, WARM_UP, STEPS = 100, 12, 60


class Timed(Recording):
    """Notes the seconds of each loop but for those of what stands for the model and for arrivals."""

    def __init__(self, case: dict[str, Any], scheduler: Any) -> None:
        super().__init__(case, scheduler)
        self.loops: list[tuple[int, float]] = []  # sequences of the iteration launched in it, and its seconds
        self.resumed_s, self.own_s, self.sequences = time.thread_time(), 0.0, 0
        scheduler.recv_requests, scheduler.run_batch = self.next_loop, self.launched_batch
        self.whole = scheduler.tp_worker.resolve_last_batch_result
        scheduler.tp_worker.resolve_last_batch_result = self.resolved

    def request(self, i: int) -> Any:
        """Its answer is streamed."""
        made = super().request(i)
        made.stream = True
        return made

    def outside(self, act: Callable[..., Any], *args: Any) -> Any:
        """What is no part of SGLang's work."""
        self.own_s += time.thread_time() - self.resumed_s
        found = act(*args)
        self.resumed_s = time.thread_time()
        return found

    def next_loop(self) -> list[Any]:
        """The loop before has ended."""
        found: list[Any] = self.outside(self.receive)
        self.loops.append((self.sequences, self.own_s))
        self.own_s, self.sequences = 0.0, 0
        return found

    def launched_batch(self, batch: Any) -> Any:
        """What the model's worker is given is SGLang's; the rest is the recording's."""
        batch.get_model_worker_batch()
        self.sequences = 0 if batch.forward_mode.is_extend() else len(batch.reqs)
        return self.outside(self.launch, batch)

    def resolved(self, done: Any) -> Any:
        """The tokens of the iteration before."""
        return self.outside(self.whole, done)


def iteration_ms(sequences: int) -> float:
    """Median milliseconds of an iteration with `sequences` sequences."""
    requests = [[PROMPT_LEN, WARM_UP + STEPS + 8, 0, "", 0] for _ in range(sequences)]
    settings = {"running": sequences, "batch_tokens": 8192, "blocks": 10**6, "chunked": False}
    made = bare_scheduler({"requests": requests, **settings})
    del made.stream_output  # SGLang's own again
    made.send_to_detokenizer = SimpleNamespace(send_pyobj=pickle.dumps)
    made.model_config.is_multimodal_gen, made.stream_interval, made.tp_rank = False, 1, 0
    timed = Timed({"requests": requests, **settings}, made)
    with contextlib.suppress(Ended):
        made.event_loop_overlap()
    found = [seconds for n, seconds in timed.loops if n == sequences]
    return 1e3 * statistics.median(found[WARM_UP : WARM_UP + STEPS])


def main() -> None:
    """Print a line for each number of sequences, and the fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    import_with_stubs(str(parser.parse_args().source), SCHEDULER)
    import numpy as np
    import torch

    torch.set_num_threads(1)
    found = []
    for sequences in SEQUENCES:
        found.append(iteration_ms(sequences))
        print(f"{sequences:9d} sequences {found[-1]:10.3f} ms", flush=True)
    slope, first = np.polyfit(SEQUENCES, found, 1)
    print(f"{first:.2f} ms an iteration and {1e3 * slope:.1f} us a sequence")


if __name__ == "__main__":
    main()
