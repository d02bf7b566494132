"""The bundled engine as a server: OpenAI's completions API with streaming, for prompts of token ids.

    python -m calibrate.serving.front SCENARIO.yaml --port 8000 --profile parts.json

It stands for a real engine where there is none: `python -m calibrate.serving` can be tried and judged on it. One thread
runs the engine; every request has a thread of its own, which writes its tokens as they come.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence as Items
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import click
import torch

from calibrate.serving.engine import Prompt, Settings, begin_serving, check, finish, iterate
from calibrate.serving.forward import Model, make_model
from calibrate.serving.side_by_side import (
    LONGEST,
    REPEATS,
    Samples,
    measured_blocks,
    runnable,
    sample_parts,
    usable_device,
)
from sim.commands.command import Command, run_command
from sim.commands.files_named import OUTPUT, check_output
from sim.commands.options import scenario_argument
from sim.core.errors import InputError
from sim.core.files import write_json
from sim.inputs.scenario import Scenario, load_scenario
from sim.prices.profile import Profile
from sim.serve.scheduling.sequences import Sequence

Tokens = SimpleQueue[int | None]  # of one answer; None ends it
MOST_BYTES = 64 * 2**20  # of a request


class LiveEngine:
    """The bundled engine with requests that come while it runs."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.served = begin_serving(model, [], settings)
        self.prompts: list[Prompt] = []
        self.answers: list[Tokens] = []
        self.asked: SimpleQueue[tuple[Prompt, Tokens]] = SimpleQueue()

    def ask(self, tokens: tuple[int, ...], output_tokens: int) -> Tokens:
        """The tokens of an answer as they come.

        Raises:
            ValueError: for a prompt that is empty or never fits, or a token that the model does not have.
        """
        prompt, answer = Prompt(tokens, output_tokens), Tokens()
        if not tokens or output_tokens < 1:
            raise ValueError("prompt and max_tokens must be at least one token")
        if not all(0 <= token < self.model.config.vocab for token in tokens):
            raise ValueError(f"tokens must be from 0 to {self.model.config.vocab - 1}")
        check([prompt], self.settings)
        self.asked.put((prompt, answer))
        return answer

    def run(self) -> None:
        """Serve until the process ends."""
        scheduler, begin = self.served.scheduler, time.perf_counter()
        while True:
            self._take(begin, wait=not scheduler.running and not scheduler.waiting)
            batch = scheduler.schedule(time.perf_counter() - begin)
            iterate(self.model, self.prompts, self.served, batch, time.perf_counter)
            finish(self.prompts, self.served, batch, time.perf_counter() - begin)
            for piece in batch.pieces:
                if piece.samples:
                    self._hand_out(piece.sequence)

    def _take(self, begin: float, wait: bool) -> None:
        """Queue what was asked; `wait`: until something is."""
        while True:
            try:
                prompt, answer = self.asked.get(block=wait)
            except Empty:
                return
            request = prompt.request._replace(arrival_s=time.perf_counter() - begin)
            sequence = Sequence(request, len(self.prompts))
            self.prompts.append(prompt)
            self.answers.append(answer)
            self.served.outputs.append([])
            self.served.sequences.append(sequence)
            self.served.scheduler.waiting.append(sequence)
            wait = False

    def _hand_out(self, sequence: Sequence) -> None:
        output, answer = self.served.outputs[sequence.index], self.answers[sequence.index]
        answer.put(output[-1])
        if len(output) == sequence.request.output_tokens:
            answer.put(None)


class Handler(BaseHTTPRequestHandler):
    """One connection. `engine` and `name` are its server's."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a token waits for the receipt of the one before
    engine: LiveEngine
    name: str

    def do_GET(self) -> None:
        """List the model."""
        if self.path != "/v1/models":
            return self._refuse(404, f"{self.path}: there are /v1/models and /v1/completions")
        self._send(200, {"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def do_POST(self) -> None:
        """Answer a prompt."""
        if self.path != "/v1/completions":
            return self._refuse(404, f"{self.path}: there are /v1/models and /v1/completions")
        try:
            asked = json.loads(self.rfile.read(min(int(self.headers["Content-Length"] or 0), MOST_BYTES)))
            tokens, most = tuple(asked["prompt"]), asked["max_tokens"]
            if not asked.get("stream") or not all(isinstance(x, int) for x in (*tokens, most)):
                raise TypeError
            answer = self.engine.ask(tokens, most)
        except ValueError as error:
            return self._refuse(400, str(error))
        except (KeyError, TypeError):
            return self._refuse(400, "needs prompt (a list of token ids), max_tokens and stream true")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while (token := answer.get()) is not None:
            self._event({"choices": [{"index": 0, "text": f" {token}"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": len(tokens), "completion_tokens": most}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, data: dict[str, Any]) -> None:
        text = json.dumps({"object": "text_completion", "model": self.name, **data})
        self._chunk(f"data: {text}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, {"error": {"message": why}})

    def _send(self, status: int, data: dict[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


class Server(ThreadingHTTPServer):
    """A threading HTTP server that accepts as many connections at once as an engine's own server."""

    daemon_threads = True
    request_queue_size = 1024


def serve_http(scenario: Scenario, longest: int, port: int) -> Server:
    """A server whose engine runs; `longest`: tokens of prompt and answer, port 0: any free one.

    Raises:
        InputError: if the bundled engine cannot run the scenario, or the port is taken.
    """
    inference = runnable(scenario)
    if scenario.parallelism.tp > 1 or inference.speculative is not None or inference.quantization != "none":
        raise InputError(f"{scenario.name}: the front serves one rank, without a draft and without quantization")
    block = inference.kv_cache.block_tokens
    settings = Settings(
        blocks=-(-longest // block) * inference.max_running_requests,
        block_tokens=block,
        max_running=inference.max_running_requests,
        max_batch_tokens=inference.max_batch_tokens,
    )
    engine = LiveEngine(make_model(scenario.model, longest, device=usable_device(scenario)), settings)
    handler = type("OwnHandler", (Handler,), {"engine": engine, "name": scenario.name})
    try:
        server = Server(("127.0.0.1", port), handler)
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}") from None
    threading.Thread(target=engine.run, daemon=True).start()
    return server


def parts_profile(scenario: Scenario) -> Profile:
    """The engine's parts, measured without a server; between two forwards it has no time."""
    model, samples = make_model(scenario.model, LONGEST, device=usable_device(scenario)), Samples()
    block = runnable(scenario).kv_cache.block_tokens
    for number in range(REPEATS + 1):
        if number == 1:
            samples.clear()  # the first warms up
        sample_parts(model, block, samples)
    blocks = measured_blocks(scenario.model, 1, samples, 0.0)
    return Profile(name="serving-engine", source="calibrate.serving.front", blocks=blocks)


@click.command("serving-front", cls=Command)
@scenario_argument
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="port on this machine alone")
@click.option("--max-model-len", type=click.IntRange(2, 1_000_000), default=1024, help="tokens of prompt and answer")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a key of the scenario")
@click.option("--profile", type=OUTPUT, metavar="FILE", help="first measure the engine's parts, for calibration")
def main(scenario: Path, port: int, max_model_len: int, overrides: Items[str], profile: Path | None) -> None:
    """Serve SCENARIO's model with the bundled engine over HTTP, until Ctrl-C."""
    torch.set_num_threads(1)
    served = load_scenario(scenario, overrides)
    check_output("--profile", profile)
    server = serve_http(served, max_model_len, port)
    if profile is not None:
        print("measuring parts", flush=True)
        write_json(profile, parts_profile(served).to_json(), indent=1)
    print(f"http://127.0.0.1:{port} serves {served.name}; Ctrl-C ends it", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    run_command(main)
