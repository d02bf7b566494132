"""Time the messages between vLLM's engine core and the workers of a server of several GPUs. No GPU is needed.

    python tools/time_vllm_messages.py --source FOLDER

FOLDER holds the package `vllm` of a release since 0.10, of which only the message queue and the records that it carries
are run; what these import is replaced. The engine core sends a `SchedulerOutput` to all workers through shared memory,
and the first worker sends a `ModelRunnerOutput` back (v1/executor/multiproc_executor.py, `collective_rpc`). Both are of
an iteration that adds one token to each sequence, of which every sixteenth begins a block of the cache.

The clock is the CPU time of one thread, which writes and reads in turn, so that other processes do not count. A reader
that waits polls without a pause; how long a written message stays unseen is therefore left out. Printed are the lowest
deciles of `ROUNDS` times `STEPS` iterations in microseconds, as what runs beside can only slow them. A round tries each
number of sequences, so that a slow minute is not one number's alone. By least squares they give the microseconds of an
iteration and of a sequence.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import statistics
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from stub_modules import Stub, Stubs

SEQUENCES = (1, 16, 32, 64, 128, 256)
RANKS, WARM_UP, STEPS, ROUNDS = 8, 20, 200, 5
BLOCK = 16
QUEUE, SCHEDULED, RETURNED = "distributed/device_communicators/shm_broadcast", "v1/core/sched/output", "v1/outputs"


def module_of(source: Path, path: str) -> Any:
    """One module of vLLM, with stubs for all that it imports but does not need here."""
    spec = importlib.util.spec_from_file_location("vllm." + path.replace("/", "."), source / "vllm" / f"{path}.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{source}: holds no vllm/{path}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def with_stubs() -> None:
    """Replace what the three modules import: paths of sockets, an address, constants."""
    folder = tempfile.mkdtemp()
    Stubs.packages.add("vllm")
    sys.meta_path.insert(0, Stubs())
    helpers: dict[str, Any] = {
        "get_open_zmq_ipc_path": lambda: f"ipc://{folder}/{uuid.uuid4().hex[:8]}",
        "get_open_zmq_inproc_path": lambda: f"inproc://{uuid.uuid4().hex}",
        "is_valid_ipv6_address": lambda text: ipaddress.ip_address(text).version == 6,
        "bc_linter_include": lambda found: found,
        "bc_linter_skip": lambda found: found,
        "check_cgroup_memory_available": lambda *_: None,
    }
    constants: dict[str, Any] = {
        "VLLM_USE_SPINLOOP_EXT": False,
        "VLLM_RINGBUFFER_WARNING_INTERVAL": 60,
        "VLLM_SLEEP_WHEN_IDLE": False,
    }
    owners: dict[str, dict[str, Any]] = {
        "vllm.utils": helpers,
        "vllm.utils.network_utils": helpers,
        "vllm.utils.cpu_resource_utils": helpers,
        "vllm": helpers,
        "vllm._bc_linter": helpers,
        "vllm.envs": constants,
    }
    for name, values in owners.items():
        sys.modules[name] = stub = Stub(name)
        stub.__path__ = []
        for key, value in values.items():
            setattr(stub, key, value)
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]


def message_of(output: types.ModuleType, ids: list[str], step: int) -> Any:
    """A call of the workers with a `SchedulerOutput`, as `collective_rpc` sends it."""
    begins = [(i + step) % BLOCK == 0 for i in range(len(ids))]
    cached = _of(
        output.CachedRequestData,
        req_ids=ids,
        new_block_ids=[([1000 + i],) if begins[i] else None for i in range(len(ids))],
        num_computed_tokens=[1000 + step + i for i in range(len(ids))],
        num_output_tokens=[step] * len(ids),
    )
    scheduled = _of(
        output.SchedulerOutput,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        total_num_scheduled_tokens=len(ids),
        num_common_prefix_blocks=[0],
    )
    return "execute_model", (scheduled,), {}, 0


def _of(record: Any, **known: Any) -> Any:
    """A record of a release, with empty values for the fields that no argument states."""
    empty: dict[str, Any] = {"list": [], "set": set(), "dict": {}}
    fields = record.__dataclass_fields__
    found = {}
    for name, field in fields.items():
        found[name] = known[name] if name in known else empty.get(str(field.type).split("[")[0])
    return record(**found)


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.thread_time()
    result = call()
    return time.thread_time() - begin, result


def iterations_us(modules: tuple[Any, Any, Any], queues: Any, sequences: int) -> list[tuple[float, float]]:
    """Microseconds of each iteration's message to the workers and of the one back: written, then read by one."""
    _, output, outputs = modules
    (to, readers), (back, reader) = queues
    ids = [f"chatcmpl-{uuid.uuid4().hex}" for _ in range(sequences)]
    rows = []
    for step in range(WARM_UP + STEPS):
        message = message_of(output, ids, step)
        sent, _ = seconds_of(partial(to.enqueue, message))
        read = [seconds_of(end.dequeue)[0] for end in readers]
        result = _of(
            outputs.ModelRunnerOutput,
            req_ids=list(ids),
            req_id_to_index={name: i for i, name in enumerate(ids)},
            sampled_token_ids=[[5 * i % 1000] for i in range(sequences)],
        )
        answered, _ = seconds_of(partial(back.enqueue, (1, result)))
        taken, _ = seconds_of(reader.dequeue)
        rows.append((1e6 * (sent + read[0]), 1e6 * (answered + taken)))
    return rows[WARM_UP:]


def lowest_us(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """The lowest deciles of both messages."""
    there, back = (statistics.quantiles(each, n=10)[0] for each in zip(*rows, strict=True))
    return there, back


def queue_of(broadcast: Any, readers: int) -> tuple[Any, list[Any]]:
    """A queue's writing end, and a reading end for each reader."""
    queue = broadcast.MessageQueue(readers, readers)
    ends = [broadcast.MessageQueue.create_from_handle(queue.export_handle(), rank) for rank in range(readers)]
    queue.wait_until_ready()
    for end in ends:
        end.wait_until_ready()
    return queue, ends


def main() -> None:
    """Print a line for each number of sequences, and the fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, type=Path, help="folder with the package vllm")
    source = parser.parse_args().source
    if not (source / "vllm").is_dir():
        raise SystemExit(f"{source}: holds no folder vllm")
    with_stubs()
    modules = tuple(module_of(source, path) for path in (QUEUE, SCHEDULED, RETURNED))
    to, (back, ends) = queue_of(modules[0], RANKS), queue_of(modules[0], 1)
    print(f"{'sequences':>9s} {'to workers':>10s} {'back':>10s}  microseconds")
    rows: dict[int, list[tuple[float, float]]] = {sequences: [] for sequences in SEQUENCES}
    for _ in range(ROUNDS):
        for sequences, found in rows.items():
            found += iterations_us(modules, (to, (back, ends[0])), sequences)
    lowest = [lowest_us(found) for found in rows.values()]
    for sequences, (there, here) in zip(SEQUENCES, lowest, strict=True):
        print(f"{sequences:9d} {there:10.1f} {here:10.1f}")
    slope, first = np.polyfit(SEQUENCES, [there + here for there, here in lowest], 1)
    print(f"{first:.0f} us an iteration and {slope:.2f} us a sequence")


if __name__ == "__main__":
    main()
