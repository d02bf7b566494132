"""Loads of streamed completions for an OpenAI-like server, and the seconds that they tell of its processes."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from byte_tokenizer import BEGIN, END, SOURCES, WORDS, texts_of, trained
from tiny_llama import tiny_llama

VOCAB, LONGEST = 32_000, 8192
NAME = "m"  # under which the server knows the model
PATIENCE_S = 900
LAST_LINES = 12  # of a server that does not answer
INTERVALS = (1, 16)  # `--stream-interval`
# At once, how often, a prompt's words, an answer's tokens.
SHAPES = (
    (1, 20, 32, 32),
    (1, 4, 32, 256),
    (16, 8, 32, 4),
    (16, 4, 2048, 4),
    (16, 2, 32, 256),
    (64, 1, 32, 256),
    (128, 1, 32, 200),
)


class Load(NamedTuple):
    """A load: requests at once and in all, words of a prompt, tokens of an answer, the server's `--stream-interval`."""

    at_once: int
    count: int
    prompt: int
    output: int
    interval: int

    @property
    def steps(self) -> int:
        """Iterations that add tokens."""
        return self.count // self.at_once * self.output


WARM_UP = Load(8, 16, 64, 16, 1)


def loads(interval: int) -> list[Load]:
    """The loads for a server with this `--stream-interval`."""
    return [Load(at_once, at_once * turns, prompt, output, interval) for at_once, turns, prompt, output in SHAPES]


def write_model(folder: str) -> None:
    """A tiny model's config, and a tokenizer."""
    Path(folder, "config.json").write_text(json.dumps(tiny_llama(VOCAB, LONGEST)))
    lines = (line for text in texts_of(sorted(SOURCES.glob("*.py"))) for line in text.splitlines(keepends=True))
    trained(VOCAB, lines).save(str(Path(folder, "tokenizer.json")))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": BEGIN}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))


async def request(port: int, prompt: str, output: int, more: Mapping[str, int] | None = None) -> tuple[int, int]:
    """Stream one answer, `more`: what is asked for besides; pieces that came, and tokens that the server counted."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": output, "stream": True, "ignore_eos": True}
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


async def send(port: int, load: Load, more: Mapping[str, int] | None = None) -> tuple[int, int]:
    """Send a load's requests, `at_once` at a time; pieces and prompt tokens of all."""
    places = asyncio.Semaphore(load.at_once)
    drawn = random.Random(load.prompt)

    async def one() -> tuple[int, int]:
        async with places:
            return await request(port, " ".join(drawn.choices(WORDS, k=load.prompt)), load.output, more)

    found = await asyncio.gather(*[one() for _ in range(load.count)])
    return sum(p for p, _ in found), sum(t for _, t in found)


def started(
    tool: str, folder: str, port: int, interval: int, environment: Mapping[str, str], **how: Any
) -> subprocess.Popen[bytes]:
    """A server that answers: the file `tool`, which serves with the option `--serve`.

    Raises:
        SystemExit: if the server ends or does not answer; the message has the last lines that it wrote.
    """
    argv = [sys.executable, tool, "--serve", folder, "--port", str(port), "--interval", str(interval)]
    log = Path(folder, f"server_{port}.log")
    with log.open("wb") as written:
        server = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=written, **how)
    for _ in range(PATIENCE_S):
        try:
            asyncio.run(request(port, "hello", 2))
            return server
        except (OSError, AssertionError):
            if server.poll() is not None:
                break
            time.sleep(1)
    server.kill()
    last = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    raise SystemExit(f"the server does not answer; its last lines:\n{last}")


def parser_of(purpose: str, port: int) -> argparse.ArgumentParser:
    """The options of a tool that times a server."""
    parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--logprobs", type=int, metavar="N", help="of other tokens, asked for with each token")
    parser.add_argument("--interval", type=int, default=1, help=argparse.SUPPRESS)
    return parser


def asked(logprobs: int | None) -> dict[str, int]:
    """What a request asks for beside tokens."""
    return {} if logprobs is None else {"logprobs": logprobs}


def print_fit(process: str, counts: Any, own_s: Any, names: Sequence[str]) -> None:
    """Print the microseconds of each count, by least squares of relative errors, and the largest error of a load.

    `counts`: `[loads, names]`, `own_s`: `[loads]`, a process's CPU seconds.
    """
    found, *_ = np.linalg.lstsq(counts / own_s[:, None], np.ones(len(counts)), rcond=None)
    print(f"{process}: largest error of a load {max(abs(counts @ found / own_s - 1)):.0%}")
    for name, each in zip(names, found, strict=True):
        print(f"{1e6 * each:9.1f} us {name}")
