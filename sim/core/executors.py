"""Where tasks run: in this process, in others of this machine, or on a Dask cluster. All are `concurrent.futures`
executors; `slots` is how many tasks are worth having under way."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from msgspec import Struct

from sim.core.errors import InputError
from sim.core.long_runs import lines_while

T = TypeVar("T")
PATIENCE_S = 30
WATCH_EVERY_S = 0.5
CLOSES_ITS_PIPE = (3, 11, 5)  # since then a pool whose workers are gone does (github.com/python/cpython, issue 94777)
AHEAD = 4  # times the slots: a long task in front does not leave workers idle


class Workers(Struct, frozen=True, dict=True):
    """An executor, how many tasks it works on at once, and how many to hand it."""

    executor: Executor
    cores: Callable[[], int]

    @property
    def slots(self) -> int:
        """Tasks under way: two a core, so that none waits for the next; one where they run on the spot."""
        cores = self.cores()
        return 1 if isinstance(self.executor, _OnTheSpot) else 2 * cores


class _OnTheSpot(Executor):
    """Runs a task when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def results(workers: Workers, task: Callable[..., T], work: Iterable[tuple[Any, ...]]) -> Iterator[T]:
    """`task(*item)` for every item of `work`, in order; a few more than `slots` are handed out ahead."""
    waiting: deque[Future[T]] = deque()
    for item in work:
        waiting.append(workers.executor.submit(task, *item))
        if len(waiting) > AHEAD * (workers.slots - 1):
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class SoFar(list[T]):
    """What iterators give, kept as it comes: `take` returns at Ctrl-C what has come by then, if anything has."""

    interrupted = False

    @contextmanager
    def or_interrupted(self) -> Iterator[None]:
        """Stand around the workers, so that at Ctrl-C they end first, whatever they are at.

        Raises:
            KeyboardInterrupt: if nothing has come yet.
        """
        try:
            yield
        except KeyboardInterrupt:
            if not self:
                raise
            self.interrupted = True


def tracked(found: Iterable[T], what: str, count: int, hint: str = "") -> Iterator[T]:
    """Yield what `found` yields, with a progress bar on standard error if that is a terminal, else with lines there if
    it takes long. `hint`: what makes it shorter."""
    if not sys.stderr.isatty():
        begin_s, done, then = time.monotonic(), 0, f"; {hint}" * bool(hint)
        with lines_while(lambda: f"{what}: {done:,} of {count:,} after {time.monotonic() - begin_s:,.0f} s{then}"):
            for one in found:
                yield one
                done += 1
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(found, what, count, console=Console(stderr=True), transient=True)


HOLDS_SIGNALS_BACK = hasattr(signal, "pthread_sigmask")  # Windows does not
ENDING = {signal.SIGINT, signal.SIGTERM}


class _Pool(ProcessPoolExecutor):
    """Processes that start with Ctrl-C and SIGTERM held back: either would make one that imports print a traceback.

    A fork has this process's handler of SIGTERM until `stay_with` takes it away.
    """

    def submit(self, task: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Hand out a task, and start a process for it while there are fewer than wanted."""
        if not HOLDS_SIGNALS_BACK:
            return super().submit(task, *args, **kwargs)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            return super().submit(task, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def local_workers(count: int, start: str | None = "spawn") -> Iterator[Workers]:
    """`count` processes, or this one if it is one.

    `start`: how they start (`multiprocessing.get_context`): fresh, or with None as the system does, where a fork has
    all modules at once. When the block ends early, so do they, whatever they are at.
    """
    if count <= 1:
        yield Workers(_OnTheSpot(), lambda: 1)
        return
    pool = _Pool(count, multiprocessing.get_context(start), stay_with, (os.getpid(),))
    try:
        yield Workers(pool, lambda: count)
    except BaseException:
        for worker in multiprocessing.active_children():  # what they are at is wanted no more
            worker.terminate()
        if sys.version_info < CLOSES_ITS_PIPE:
            _stop_sending(pool)
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _stop_sending(pool: ProcessPoolExecutor) -> None:
    """Let the thread that hands tasks to workers fail, not wait, once no worker is left to read them.

    Python before `CLOSES_ITS_PIPE` never ends otherwise, where a task is larger than a pipe. Later ones close the same
    end of the pipe in a thread of their own: two threads must not close one file at once.
    """
    queue: Any = getattr(pool, "_call_queue", None)
    if queue is not None:
        queue._reader.close()


def stay_with(parent: int) -> None:
    """Make this process end soon after `parent`, however that ends, leave Ctrl-C to it, and end silently at SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if HOLDS_SIGNALS_BACK:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def dask_workers(address: str) -> Iterator[Workers]:
    """The workers of a running Dask cluster. A task whose worker dies is run again elsewhere by Dask's scheduler.

    Raises:
        InputError: if dask.distributed is not installed, nothing answers at `address`, or it has no workers.
    """
    try:
        import distributed
    except ImportError:
        raise InputError("--dask: dask.distributed is not installed; pip install 'stepsim[dask]'") from None
    try:
        client: Any = distributed.Client(address, timeout=PATIENCE_S, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise InputError(f"--dask: no Dask scheduler answers at {address}: {error}") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=PATIENCE_S)
        except TimeoutError:
            raise InputError(f"--dask: the cluster at {address} has no workers") from None
        with client.get_executor(pure=False) as executor:
            yield Workers(executor, lambda: max(1, sum(client.nthreads().values())))
