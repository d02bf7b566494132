"""Serves a scenario for real and compares: `python -m calibrate.serving.measure SCENARIO.yaml`.

It serves on the CPU if the scenario's cluster is one (cpu-host), else on this machine's CUDA GPU.

With `parallelism.tp` above 1 as many processes serve together over gloo, and rank 0 compares.

Every round measures the engine's parts before and after a real run, because machines drift, makes a profile of them,
and simulates the scenario with it. The scheduler is the same, so only times can differ. The table shows the round with
the median error, and the noise over all rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from calibrate.launch import is_rank, join, run_ranks
from calibrate.machine_load import machine_busy_s
from calibrate.serving.cache import PagedCache, make_cache
from calibrate.serving.drafting import Drafts
from calibrate.serving.engine import Prompt, Served, Settings, serve
from calibrate.serving.forward import Clock, Model, SequenceChunk, Spent, forward, make_model
from calibrate.serving.tensor_parallel import from_rank_0, split
from calibrate.serving.weight_only import quantize
from sim.commands.command import Command
from sim.commands.files_named import OUTPUT, check_output
from sim.commands.options import scenario_argument
from sim.core.errors import InputError
from sim.core.files import write_json
from sim.core.processes import python_module
from sim.inputs.model_config import ModelConfig
from sim.inputs.scenario import Scenario, load_scenario
from sim.inputs.workloads import Inference
from sim.prices.profile import BlockPoint, Profile
from sim.prices.serving_parts import check_part, part_key
from sim.serve.requests import Request, accepted, make_requests
from sim.serve.results.records import percentiles
from sim.serve.simulation import simulate_serving

REPEATS = 5
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS, BEFORE = (2, 16, 64, 256), (0, 64, 256)
DECODES, LENGTHS = (1, 4, 16, 32), (16, 64, 256, 512)
LONGEST = max(LENGTHS)
Samples = dict[tuple[str, int, int], list[float]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One real run and its simulation."""

    profile: Profile
    measured: dict[str, Any]
    simulated: dict[str, Any]

    @property
    def error(self) -> float:
        """Simulated ÷ measured throughput − 1."""
        return float(self.simulated["output_tokens_per_s"] / self.measured["output_tokens_per_s"] - 1.0)


def sample_parts(
    model: Model,
    block_tokens: int,
    samples: Samples,
    clock: Clock = time.perf_counter,
    longest: int = LONGEST,
    checked: int = 0,
) -> None:
    """Time every part once, in sequences of at most `longest` tokens; the caller takes means over calls. `checked`:
    tokens of each sequence where a draft's are checked, or 0.

    No part is timed twice in a row, as hot loops come out too fast.
    """
    per = -(-longest // block_tokens)
    cache = make_cache(model.config, per * max(DECODES), block_tokens, model.dtype, model.device)
    for kept in (cache.keys, cache.values):
        kept.zero_()  # or the first that touches a page would be timed with the system's work for it
        float(kept.flatten()[0])  # waits for a GPU
    for n in TOKENS:
        if n in DECODES:
            continue
        sizes = [min(longest, n - first) for first in range(0, n, longest)]
        parts = [SequenceChunk(i, _tokens(model, size, i), 0, size) for i, size in enumerate(sizes)]
        _timed(model, cache, parts, clock, samples)
    for chunk in (c for c in CHUNKS if c <= longest // 2):
        for before in (b for b in BEFORE if b <= longest // 2):
            spent = _timed(model, cache, [SequenceChunk(0, _tokens(model, chunk, before), before)], clock)
            samples.setdefault(("prefill", chunk, before), []).append(statistics.mean(spent.core_seconds))
    for part, each in {"decode": 1, check_part(checked): checked}.items():
        for n in DECODES if each else ():
            for length in (x for x in LENGTHS if each <= x <= longest):
                parts = [SequenceChunk(i, _tokens(model, each, i), length - each, each) for i in range(n)]
                spent = _timed(model, cache, parts, clock, samples)
                samples.setdefault((part, n, length), []).append(statistics.mean(spent.core_seconds))


def _tokens(model: Model, count: int, seed: int) -> tuple[int, ...]:
    """Draw random tokens, so that they go to all experts."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, model.config.vocab, (count,), generator=draw).tolist())


def _timed(
    model: Model, cache: PagedCache, parts: list[SequenceChunk], clock: Clock, samples: Samples | None = None
) -> Spent:
    """Time one forward; with `samples` its head and the rest are added to these."""
    for p in parts:
        cache.grow(p.sequence, p.end)
    spent = Spent()
    begin = clock()
    forward(model, cache, parts, spent, clock).argmax(-1).tolist()
    total = clock() - begin
    for p in parts:
        cache.release(p.sequence)
    if samples is not None:
        rest = total - sum(spent.core_seconds) - spent.head_seconds
        samples.setdefault(("rest", sum(len(p.tokens) for p in parts), 0), []).append(rest)
        samples.setdefault(("head", sum(p.logits for p in parts), 0), []).append(spent.head_seconds)
    return spent


def measured_blocks(m: ModelConfig, tp: int, samples: Samples, engine_s: float) -> tuple[BlockPoint, ...]:
    """Return the means as a profile's blocks, and the engine's seconds between forwards.

    A run takes the sum of its iterations' seconds, and so their number times the mean. The median is less where ranks
    wait for each other: most waits are short, and a few are long.
    """
    blocks = [BlockPoint(part_key(m, "engine", 0, tp=tp), "forward", 0, max(engine_s, 1e-9), 0.0)]
    for (part, a, b), values in samples.items():
        mean = statistics.mean(values)
        spread = statistics.median(abs(v - mean) for v in values) / mean
        blocks.append(BlockPoint(part_key(m, part, a, b, tp=tp), "forward", 0, mean, spread))
    return tuple(blocks)


def compare(
    scenario: Scenario, say: Callable[[str], None] = lambda text: None, clock: Clock = time.perf_counter
) -> Comparison:
    """Measure the parts, serve, measure again, simulate.

    `clock`: `time.process_time` leaves out the time of other processes.

    Raises:
        InputError: if this engine cannot run the scenario (pipeline stages, latent attention, …).
    """
    inference, device = runnable(scenario), usable_device(scenario)
    torch.set_num_threads(1)
    requests = accepted(make_requests(inference.requests), inference)
    drafted = 0 if inference.speculative is None else inference.speculative.tokens
    longest = max(r.prompt_tokens + r.output_tokens for r in requests) + drafted
    model, tp = _target(scenario, max(longest, LONGEST), device), scenario.parallelism.tp
    settings = _settings(inference, len(requests), longest)
    prompts = _prompts(requests, scenario.model.vocab)
    drafts = _drafts(inference, settings, max(longest, LONGEST), model.dtype, device)
    models = [model] if drafts is None else [model, drafts.model]
    samples: list[Samples] = [{} for _ in models]

    def measure(times: int) -> None:
        for _ in range(times):
            for made, own, checked in zip(models, samples, (drafted + 1 if drafted else 0, 0), strict=False):
                sample_parts(made, settings.block_tokens, own, clock, checked=checked)

    measure(1)  # warms up
    for own in samples:
        own.clear()
    say("measuring parts")
    measure(REPEATS // 2 + 1)
    say("serving")
    served = serve(model, prompts, settings, clock, from_rank_0 if tp > 1 else float, drafts)
    say("measuring parts again")
    measure(REPEATS // 2)
    blocks = measured_blocks(scenario.model, tp, samples[0], _between(served))
    if drafts is not None:  # its steps are inside the other's iterations
        blocks += measured_blocks(drafts.model.config, 1, samples[1], 0.0)
    profile = Profile(name="serving-engine", source="calibrate.serving.measure", blocks=blocks)
    simulated = simulate_serving(_with_acceptance(scenario, drafts), profile).result
    return Comparison(profile, _result(served), simulated)


def _target(scenario: Scenario, longest: int, device: str) -> Model:
    """Return the served model for sequences of up to `longest` tokens, split over ranks and quantized as it says."""
    model = make_model(scenario.model, longest, device=device)
    if scenario.parallelism.tp > 1:
        model = split(model)
    if scenario.for_serving.quantization != "none":
        quantize(model.blocks)
    return model


def _drafts(inference: Inference, settings: Settings, longest: int, dtype: torch.dtype, device: str) -> Drafts | None:
    """Return the draft model of speculative decoding with its own cache; None where none drafts."""
    if inference.speculative is None or inference.speculative.draft is None:
        return None
    small = inference.speculative.draft
    cache = make_cache(small, settings.blocks, settings.block_tokens, dtype, device)
    return Drafts(make_model(small, longest, seed=1, device=device), cache, inference.speculative.tokens)


def _settings(inference: Inference, requests: int, longest: int) -> Settings:
    """Return the engine's settings, with a cache that holds all running requests of the `longest` tokens."""
    block = inference.kv_cache.block_tokens
    return Settings(
        blocks=-(-longest // block) * min(requests, inference.max_running_requests),
        block_tokens=block,
        max_running=inference.max_running_requests,
        max_batch_tokens=inference.max_batch_tokens,
        host_tokens=1 << 20 if inference.prefix_cache == "cpu" else 0,
        max_concurrency=inference.requests.max_concurrency,
    )


def usable_device(scenario: Scenario) -> str:
    """Return torch's device of the scenario's cluster: cpu or cuda.

    Raises:
        InputError: for a GPU where torch finds none.
    """
    if scenario.cluster.gpu.chip.is_host:
        return "cpu"
    if not torch.cuda.is_available():
        gpu = scenario.cluster.gpu.name
        why = "torch finds no CUDA GPU on this machine; cluster=cpu-host serves on its CPU"
        raise scenario.error(("cluster",), f"found GPU '{gpu}'; {why}")
    return "cuda"


def _with_acceptance(scenario: Scenario, drafts: Drafts | None) -> Scenario:
    """Return the scenario with the acceptance that was measured; speed is compared, not how well a draft guesses."""
    inference = scenario.for_serving
    if drafts is None or inference.speculative is None:
        return scenario
    own = inference.speculative.model_copy(update={"acceptance": drafts.acceptance})
    return scenario.unchecked_copy(update={"inference": inference.model_copy(update={"speculative": own})})


def runnable(scenario: Scenario) -> Inference:
    """The section `inference`.

    Raises:
        InputError: if the bundled engine cannot run the scenario.
    """
    m, i = scenario.model, scenario.inference
    if i is None:
        raise scenario.error(("inference",), "is missing; this scenario serves no requests")
    tp, drafted = scenario.parallelism.tp, i.speculative is not None
    draft = i.speculative.draft if i.speculative is not None else None
    models = (m,) if draft is None else (m, draft)
    sizes = {"heads": m.heads, "kv_heads": m.kv_heads, "ffn": m.ffn, "vocab": m.vocab}
    wrong = [
        what
        for what, bad in (
            ("ranks other than tensor-parallel ones", scenario.parallelism.ranks > tp),
            *((f"model.{key} {n} on {tp} ranks", True) for key, n in sizes.items() if n % tp),
            ("a draft on several ranks", drafted and tp > 1),
            ("a prediction layer as a draft", drafted and draft is None),
            ("latent attention", any(x.mla is not None for x in models)),
            ("query-key norms", any(x.qk_norm for x in models)),
            *((f"model.{key}", True) for x in models for key in x.variations),
            ("precision other than fp32", i.precision != "fp32"),
            ("a contiguous cache", i.kv_cache.layout != "paged"),
            ("prefixes kept on the GPU", i.prefix_cache == "gpu"),
            ("unfused attention", i.attention == "unfused"),
            (f"quantization {i.quantization}", i.quantization not in ("none", "int8_weight_only")),
            ("static batching", i.batching == "static"),
        )
        if bad
    ]
    if wrong:
        raise InputError(f"{scenario.name}: the bundled engine does not run {', '.join(wrong)}")
    return i


def _prompts(requests: tuple[Request, ...], vocab: int) -> list[Prompt]:
    """Draw random prompts; those of one prefix share their first tokens."""
    draw = torch.Generator().manual_seed(0)
    shared: dict[str, tuple[int, ...]] = {}
    longest = max(r.prompt_tokens for r in requests)
    out = []
    for r in requests:
        own = tuple(torch.randint(0, vocab, (r.prompt_tokens,), generator=draw).tolist())
        beginning: tuple[int, ...] = ()
        if r.prefix_id:
            if r.prefix_id not in shared:
                shared[r.prefix_id] = tuple(torch.randint(0, vocab, (longest,), generator=draw).tolist())
            beginning = shared[r.prefix_id][: r.prefix_tokens]
        tokens = beginning + own[len(beginning) :]
        out.append(Prompt(tokens, r.output_tokens, r.arrival_s, r.prefix_id, r.prefix_tokens))
    return out


def _between(served: Served) -> float:
    """Return the mean seconds from the end of a forward to the start of the next while there was work."""
    return statistics.mean(served.gaps) if served.gaps else 0.0


def _result(served: Served) -> dict[str, Any]:
    """Return the measured run's figures under the keys of a simulated result."""
    done = served.sequences
    output = sum(s.request.output_tokens for s in done)
    seconds = max(s.finish_s for s in done) - min(s.arrival_s for s in done)
    return {
        "output_tokens_per_s": output / seconds,
        "request_latency_s": percentiles([s.finish_s - s.arrival_s for s in done]).to_json(),
        "time_to_first_token_s": percentiles([s.first_token_s - s.arrival_s for s in done]).to_json(),
        "time_per_output_token_s": percentiles(
            [
                (s.finish_s - s.first_token_s) / (s.request.output_tokens - 1)
                for s in done
                if s.request.output_tokens > 1
            ]
        ).to_json(),
        "iterations": len(served.iterations),
    }


@click.command("serving-measure", cls=Command)
@scenario_argument
@click.option("--out", type=OUTPUT, metavar="FILE", help="write figures and profile as JSON")
@click.option(
    "--cpu-seconds", is_flag=True, help="count this process's CPU time instead of wall time, for busy machines"
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, help="number of rounds")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a key of the scenario")
def main(scenario: Path, out: Path | None, cpu_seconds: bool, rounds: int, overrides: tuple[str, ...]) -> None:
    """Serve SCENARIO for real and print measured and simulated figures side by side."""
    clock = time.process_time if cpu_seconds else time.perf_counter
    loaded = load_scenario(scenario, overrides)
    check_output("--out", out)
    tp, rank = loaded.parallelism.tp, 0
    if cpu_seconds and not loaded.cluster.gpu.chip.is_host:
        raise InputError("--cpu-seconds: a GPU's work takes no CPU time; leave it out")
    if tp > 1 and cpu_seconds:
        raise InputError("--cpu-seconds: ranks that wait for each other take no CPU time; leave it out")
    if tp > 1 and not is_rank():
        runnable(loaded)
        usable_device(loaded)
        changes = [text for change in overrides for text in ("--set", change)]
        options = ["--rounds", str(rounds), *(["--out", str(out)] if out else []), *changes]
        run_ranks([*python_module("calibrate.serving.measure"), str(scenario), *options], tp)
        return
    if tp > 1:
        rank, _ = join(usable_device(loaded))
    begin, busy = time.perf_counter(), machine_busy_s() - tp * time.process_time()
    every = [compare(loaded, lambda text: print(text, flush=True) if rank == 0 else None, clock) for _ in range(rounds)]
    others = (machine_busy_s() - tp * time.process_time() - busy) / (time.perf_counter() - begin)
    if rank:
        return
    found = sorted(every, key=lambda c: c.error)[len(every) // 2]
    rates = [c.measured["output_tokens_per_s"] for c in every]
    print(f"{'':24} {'measured':>12} {'simulated':>12} {'error':>8}")
    for name in ("output_tokens_per_s", "time_to_first_token_s", "time_per_output_token_s", "request_latency_s"):
        pair = [r[name]["p50"] if isinstance(r[name], dict) else r[name] for r in (found.measured, found.simulated)]
        print(f"{name:24} {pair[0]:12.5g} {pair[1]:12.5g} {pair[1] / pair[0] - 1:+8.1%}")
    print(
        f"throughput's error in {rounds} rounds: {', '.join(f'{c.error:+.1%}' for c in every)}; measured "
        f"{min(rates):.5g} to {max(rates):.5g} tokens/s; other processes used {others:.1f} cores"
    )
    if out is not None:
        data = {"measured": found.measured, "simulated": found.simulated, "profile": found.profile.to_json()}
        write_json(out, data, indent=1)
