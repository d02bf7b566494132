"""Time what SGLang's HTTP server, tokenizer and detokenizer take for requests, tokens and pieces, without a GPU.

    PYTHON tools/time_sglang_server.py --source FOLDER [--logprobs 5]

FOLDER has SGLang's Python sources (an unpacked wheel of PyPI), 0.5.23 or near it. PYTHON is an interpreter with torch,
transformers, openai, fastapi, python-multipart, uvicorn, uvloop, orjson, msgspec, setproctitle, pyzmq, xgrammar and
apache-tvm-ffi; what else SGLang imports is replaced by empty modules. HTTP server, TokenizerManager and
DetokenizerManager are SGLang's own, in its own two processes. In place of the scheduler a process draws a token for
each sequence in every step, and hands it to SGLang's own `SchedulerOutputStreamer`, which is timed, too. The clock is
the CPU time of each process (`/proc`), so that other programs do not count. Loads differ in sequences at once, lengths,
and tokens in a piece (`--stream-interval`). Least squares over the loads give the seconds of each process.
`sim/variants/engines/hosts.py` quotes them. With `--logprobs` each token comes with its log probability and that many
others.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from streamed_loads import (
    INTERVALS,
    LONGEST,
    NAME,
    VOCAB,
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
from stub_modules import import_with_stubs

SOURCE, COUNTS = "SGLANG_SOURCE", "SGLANG_COUNTS"  # what spawned processes are told
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
STEP = 0.02  # seconds: of an engine's iteration
WHAT = ("a request", "a prompt's token", "a token", "a piece", "a message of an iteration", "a step without one")
PROCESSES = {
    "HTTP and tokenizer, its loop": (0, 1, 3, 4, 5),
    "detokenizer": (0, 2, 3, 4),
    "scheduler's output": (2, 3, 4, 5),
}  # and which of `WHAT` each of them handles
SERVER = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler_components.output_streamer")


def request_of(got: Any) -> Any:
    """The scheduler's own record of a request that came (scheduler.py: `_handle_generate_request`)."""
    from sglang.srt.managers.schedule_batch import Req

    made = Req(
        got.rid, got.input_text, got.input_ids, got.sampling_params, stream=got.stream, eos_token_ids={1},
        vocab_size=VOCAB, http_worker_ipc=got.http_worker_ipc, return_logprob=got.return_logprob,
        top_logprobs_num=got.top_logprobs_num,
    )  # fmt: skip
    made.sampling_params.ignore_eos = True
    return made


def add_token(one: Any, token: int) -> None:
    """Give a request its next token, with log probabilities where it asks for them."""
    one.output_ids.append(token)
    if one.return_logprob:
        found, number = one.logprob, one.logprob.top_logprobs_num
        found.output_token_logprobs_val.append(-1.25)
        found.output_token_logprobs_idx.append(token)
        found.output_top_logprobs_val.append([-1.25] * number)
        found.output_top_logprobs_idx.append([(token + i) % VOCAB for i in range(number)])
        found.output_token_ids_logprobs_val.append(None)
        found.output_token_ids_logprobs_idx.append(None)
    one.update_finish_state()


def streamer_of(server_args: Any, port_args: Any) -> tuple[Any, Any]:
    """The socket on which requests come, and SGLang's own code that sends tokens to the detokenizer."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    ipc = SchedulerIpcChannels.create(
        port_args=port_args,
        is_rank_zero=True,
        skip_tokenizer_init=False,
        metrics_enabled=False,
        enable_scripted_runtime=False,
    )
    streamer = SchedulerOutputStreamer(
        send_to_detokenizer=ipc.send_to_detokenizer,
        tree_cache=None,
        server_args=server_args,
        is_generation=True,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        disaggregation_mode=DisaggregationMode.NULL,
        enable_hicache_storage=lambda: False,
    )
    return ipc.recv_from_tokenizer, streamer


def arrivals(socket: Any) -> list[Any]:
    """Requests that have come."""
    import zmq
    from sglang.srt.managers.io_struct import sock_recv

    found: list[Any] = []
    while True:
        try:
            got = sock_recv(socket, zmq.NOBLOCK)
        except zmq.ZMQError:
            return found
        found += [request_of(one) for one in getattr(got, "batch", [got]) if hasattr(one, "input_ids")]


def run_scheduler(server_args: Any, port_args: Any, *places: Any) -> None:
    """In place of SGLang's scheduler process: a token for each request in every step, sent by SGLang's own code."""
    import setproctitle

    setproctitle.setproctitle("sglang::scheduler")
    socket, streamer = streamer_of(server_args, port_args)
    counts = np.memmap(os.environ[COUNTS], dtype=np.float64, mode="r+", shape=(2,))
    sender, send_output = streamer.send_to_detokenizer, streamer.send_to_detokenizer.send_output

    def counted(output: Any, recv_obj: Any = None) -> None:
        counts[0] += 1
        send_output(output, recv_obj)

    sender.send_output = counted
    places[-1].send({"status": "ready", "max_total_num_tokens": 10**6, "max_req_input_len": 8192})
    running: list[Any] = []
    drawn, due = random.Random(0), time.monotonic()
    while True:
        running += arrivals(socket)
        due = max(due + STEP, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        tokens = [drawn.randrange(2, VOCAB) for _ in running]
        begin_s = time.thread_time()
        for one, token in zip(running, tokens, strict=True):
            add_token(one, token)
        if running:
            streamer.stream_output(running, any(one.return_logprob for one in running))
        counts[1] += time.thread_time() - begin_s
        running = [one for one in running if not one.finished()]


def serve(folder: str, port: int, interval: int) -> None:
    """SGLang's server, with `run_scheduler` as its scheduler."""
    import_with_stubs(os.environ[SOURCE], *SERVER)
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=folder,
        port=port,
        stream_interval=interval,
        device="cpu",
        load_format="dummy",
        log_level="error",
        skip_server_warmup=True,
        served_model_name=NAME,
        context_length=LONGEST,
    )
    launch_server(args, run_scheduler_process_func=run_scheduler, execute_warmup_func=lambda *a, **k: True)


def loop_s(pid: int) -> float:
    """CPU seconds of a process's first thread, which runs its event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def detokenizer_of(server: int) -> int:
    """The detokenizer's process among a server's."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            named, parent = (entry / "cmdline").read_text(), (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if named.startswith("sglang::detokenizer") and int(parent) == server:
            return int(entry.name)
    raise SystemExit("no process is SGLang's detokenizer")


def measure(source: str, port: int, folder: str, more: dict[str, int]) -> tuple[list[list[float]], list[list[float]]]:
    """How often each load has each of `WHAT`, and the seconds of each of `PROCESSES`."""
    rows, seconds, path = [], [], str(Path(folder, "counts"))
    counts = np.memmap(path, dtype=np.float64, mode="w+", shape=(2,))
    told = ENVIRONMENT | os.environ | {SOURCE: source, COUNTS: path}
    for at, interval in enumerate(INTERVALS):
        server = started(__file__, folder, port + at, interval, told, start_new_session=True)
        try:
            detokenizer = detokenizer_of(server.pid)
            asyncio.run(send(port + at, WARM_UP))
            for load in loads(interval):
                before = [loop_s(server.pid), loop_s(detokenizer), *counts[::-1]]
                pieces, prompt_tokens = asyncio.run(send(port + at, load, more))
                time.sleep(0.2)
                after = [loop_s(server.pid), loop_s(detokenizer), *counts[::-1]]
                *own, messages = (b - a for a, b in zip(before, after, strict=True))
                silent = max(0.0, load.steps - messages)
                rows.append([load.count, prompt_tokens, load.count * load.output, pieces, messages, silent])
                seconds.append(own)
                print(*(f"{x:9.0f}" for x in (*load, *rows[-1])), *(f"{s:9.3f}" for s in own), flush=True)
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # of its own session: the server, and what it has started
            server.wait()
    return rows, seconds


def main() -> None:
    """Print a line for each load, and the fit of each process."""
    parser = parser_of(__doc__, 8223)
    parser.add_argument("--source", metavar="FOLDER", help="SGLang's Python sources")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.port, args.interval)
        return
    if not args.source:
        parser.error("--source is missing: the folder with SGLang's Python sources")
    names = [*Load._fields, "requests", "prompts", "tokens", "pieces", "messages", "steps", "http s", "detok s"]
    print(" ".join(f"{n:>9s}" for n in [*names, "stream s"]))
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        counted, seconds = map(np.array, measure(args.source, args.port, folder, asked(args.logprobs)))
    for own, (process, handled) in zip(seconds.T, PROCESSES.items(), strict=True):
        print_fit(process, counted[:, handled], own, [WHAT[i] for i in handled])


if __name__ == "__mp_main__":  # a process that the server starts
    import_with_stubs(os.environ[SOURCE], *SERVER)

if __name__ == "__main__":
    main()
