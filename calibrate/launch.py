"""Starts the local ranks of a real run, watches them, and leaves none behind.

Each rank is a process with one compute thread. The rendezvous is a file in a new temporary folder; messages go over the
loopback interface. Under `torchrun` no rank is started, and torchrun's environment is used.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, Protocol

from calibrate.rank_messages import FOLDER, Listener, words_file

PARENT = "STEPSIM_PARENT"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # torchrun's name for it
END_WITHIN_S = 3.0
TAIL_CHARACTERS = 4000

# Keep freed memory in the process. Otherwise temporaries of the optimizer and large activations cause page faults in
# every step, which cost a third of the optimizer's time and do not scale with its size.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


class RankError(RuntimeError):
    """A rank ended with an error or did not end in time; the others have been ended.

    `code`: exit code to pass on. `killed_by`: the signal that ended the rank, 0 if none did.
    """

    def __init__(self, message: str, code: int = 1, killed_by: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.killed_by = killed_by


def is_rank() -> bool:
    """Return whether this process is a rank, started by `run_ranks` or by torchrun."""
    return "RANK" in os.environ and ("MASTER_ADDR" in os.environ or FOLDER in os.environ)


def rank_environment(rank: int, ranks: int, folder: str) -> dict[str, str]:
    """Return the environment variables of one local rank."""
    env = (
        os.environ
        | MALLOC
        | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            LOCAL_WORLD_SIZE: str(ranks),
            FOLDER: folder,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # a crash in torch's own code says which Python line called it
            PARENT: str(os.getpid()),
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",  # torch makes this folder even if it compiles nothing
        }
    )
    env.pop("MASTER_ADDR", None)
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def ranks_here(ranks: int) -> int:
    """Return how many of a run's `ranks` run on this machine; all of them unless the environment says otherwise."""
    said = os.environ.get(LOCAL_WORLD_SIZE, "")
    return min(ranks, int(said)) if said.isdecimal() and int(said) > 0 else ranks


def need_torch() -> None:
    """Fail before ranks are started if torch is not installed.

    Raises:
        ModuleNotFoundError: if torch is missing; a command prints it as one line.
    """
    if find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")


class Process(Protocol):
    """What is asked of a rank's process: a part of `subprocess.Popen`."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def _start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    with log.open("wb") as err:
        return subprocess.Popen(command, env=environment, stderr=err, stdin=subprocess.DEVNULL)


def run_ranks(
    command: Sequence[str],
    ranks: int,
    timeout_s: float | None = None,
    start: Callable[[Sequence[str], Mapping[str, str], Path], Process] = _start,
) -> None:
    """Run `command` once for each rank and wait for all, printing what ranks pass to `calibrate.rank_messages.say`.

    If a rank fails, the others are ended within seconds. An interrupt ends all ranks. `start` makes a process of the
    command, an environment and the file for standard error.

    Raises:
        RankError: names the rank that failed and the end of its standard error.
    """
    need_torch()
    with tempfile.TemporaryDirectory(prefix="stepsim-") as folder:
        logs = [Path(folder) / f"rank{r}.err" for r in range(ranks)]
        processes: list[Process] = []
        try:
            for r, log in enumerate(logs):
                processes.append(start(command, rank_environment(r, ranks, folder), log))
            _watch(processes, logs, timeout_s, Listener([words_file(folder, r) for r in range(ranks)]))
        finally:
            _end(processes)


def _watch(processes: Sequence[Process], logs: list[Path], timeout_s: float | None, listener: Listener) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        codes = [p.poll() for p in processes]
        listener.pass_on()  # after the poll, so that the last lines of an ended rank are printed
        if any(codes):
            _fail(processes, logs)
        if all(c == 0 for c in codes):
            return
        if deadline is not None and time.monotonic() > deadline:
            waiting = [r for r, c in enumerate(codes) if c is None]
            raise RankError(f"ranks {waiting} did not end within {timeout_s:g} s; all were ended")
        time.sleep(0.05)


def _fail(processes: Sequence[Process], logs: list[Path]) -> NoReturn:
    """Report the rank that failed first: a killed rank rather than those that lost their connection to it."""
    time.sleep(0.2)  # several ranks may fail at once; this finds the one that caused it
    codes = {r: code for r, p in enumerate(processes) if (code := p.poll())}
    killed = [r for r, code in codes.items() if code < 0]
    rank = killed[0] if killed else min(codes, key=lambda r: (codes[r] not in (1, 2), r))
    code = codes[rank]
    tail = logs[rank].read_text(errors="replace")[-TAIL_CHARACTERS:].strip()
    if code == 2:
        raise RankError(tail, 2)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise RankError(
        f"rank {rank} {how}; the others were ended" + (f":\n{tail}" if tail else ""), killed_by=max(0, -code)
    )


def _end(processes: Sequence[Process]) -> None:
    """End the processes that still run: terminate them, then kill those that remain."""
    for p in processes:
        if p.poll() is None:
            p.terminate()
    deadline = time.monotonic() + END_WITHIN_S
    for p in processes:
        try:
            p.wait(max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            p.kill()
            p.wait()


def join(device: str = "cpu") -> tuple[int, int]:
    """Become a rank: end with the parent, use one thread, join the process group. Returns (rank, number of ranks)."""
    _die_with_parent()
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    folder = os.environ.get(FOLDER)
    init = f"file://{folder}/rendezvous" if folder else "env://"
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"  # ranks also exchange CPU tensors
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=ranks)
    return rank, ranks


def _die_with_parent() -> None:
    """Ask Linux to kill this rank when its parent ends for any reason."""
    if sys.platform == "linux" and FOLDER in os.environ:
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(os.environ.get(PARENT, os.getppid())):
            os._exit(1)  # the parent ended before the request
