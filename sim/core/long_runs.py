"""Lines on standard error while something takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FIRST_S = 10.0  # until the first line; the next one comes after three times as long, and so on
TIMES = 3.0


@contextmanager
def lines_while(line: Callable[[], str]) -> Iterator[None]:
    """While the body runs, a thread writes what `line` returns, after 10 s, 30 s, 90 s and so on."""
    done = threading.Event()

    def run() -> None:
        wait_s, due_s = FIRST_S, FIRST_S
        while not done.wait(wait_s):
            print(f"note: {line()}", file=sys.stderr, flush=True)
            wait_s, due_s = due_s * (TIMES - 1), due_s * TIMES

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        done.set()
