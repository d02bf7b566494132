"""What is said while a serving workload is simulated that takes long: how far it is, and which keys make it shorter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sim.core.long_runs import lines_while

if TYPE_CHECKING:
    from sim.serve.scheduling.sequences import Sequence as Served

SHORTER = (
    "fewer requests (inference.requests.count), shorter ones or more max_batch_tokens take less time; Ctrl-C ends it"
)


class Progress:
    """Sequences that are served, which a thread looks at now and then; `watch` is told of them when they start."""

    def __init__(self) -> None:
        self._sequences: Sequence[Served] = ()
        self._begin_s = time.monotonic()

    def watch(self, sequences: Sequence[Served]) -> None:
        """Look at these from now on."""
        self._sequences = sequences

    def line(self) -> str:
        """How far it is: requests that have all their tokens, and tokens computed of all that were asked for."""
        seconds, all_of = time.monotonic() - self._begin_s, self._sequences
        if not all_of:
            return f"still preparing after {seconds:,.0f} s; Ctrl-C ends it"
        ended = sum([s.finish_s >= 0 for s in all_of])
        if ended == len(all_of):
            return f"all requests are served; after {seconds:,.0f} s their intervals are still simulated"
        asked = sum([s.request.prompt_tokens + s.request.output_tokens for s in all_of])
        share = sum([s.computed for s in all_of]) / asked
        return (
            f"still serving after {seconds:,.0f} s: {ended:,} of {len(all_of):,} requests have ended, "
            f"{share:.1%} of {asked:,} tokens are computed; {SHORTER}"
        )


@contextmanager
def progress() -> Iterator[Progress]:
    """Write lines of progress while the body runs."""
    shown = Progress()
    with lines_while(shown.line):
        yield shown
