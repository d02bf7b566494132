"""Lines on standard error for serving that takes long: how far it is, and which keys make it shorter."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.serve.scheduling.sequences import Sequence as Served

FIRST_S = 10.0  # until the first line; each further one after three times as long
TIMES = 3.0
SHORTER = (
    "fewer requests (inference.requests.count), shorter ones or more max_batch_tokens take less time; Ctrl-C ends it"
)


class Progress:
    """Sequences that are served, which a thread looks at now and then; `watch` is told of them when they start."""

    def __init__(self) -> None:
        self._sequences: Sequence[Served] = ()
        self._begin_s = time.monotonic()
        self.done = threading.Event()

    def watch(self, sequences: Sequence[Served]) -> None:
        """Look at these from now on."""
        self._sequences = sequences

    def line(self) -> str:
        """How far it is: requests that have all their tokens, and tokens computed of all that were asked for."""
        seconds, all_of = time.monotonic() - self._begin_s, self._sequences
        if not all_of:
            return f"note: still preparing after {seconds:,.0f} s; Ctrl-C ends it"
        ended = sum([s.finish_s >= 0 for s in all_of])
        if ended == len(all_of):
            return f"note: all requests are served; their intervals are simulated since {seconds:,.0f} s"
        asked = sum([s.request.prompt_tokens + s.request.output_tokens for s in all_of])
        share = sum([s.computed for s in all_of]) / asked
        return (
            f"note: still serving after {seconds:,.0f} s: {ended:,} of {len(all_of):,} requests have ended, "
            f"{share:.1%} of {asked:,} tokens are computed; {SHORTER}"
        )

    def run(self) -> None:
        """Write a line whenever it is due, until `done`."""
        wait_s = FIRST_S
        while not self.done.wait(wait_s):
            print(self.line(), file=sys.stderr, flush=True)
            wait_s *= TIMES - 1 if wait_s == FIRST_S else TIMES


@contextmanager
def progress() -> Iterator[Progress]:
    """Write lines of progress while the body runs."""
    shown = Progress()
    thread = threading.Thread(target=shown.run, daemon=True)
    thread.start()
    try:
        yield shown
    finally:
        shown.done.set()
