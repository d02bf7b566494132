"""What requests ask for beside tokens: log probabilities, and answers that follow a grammar."""

from __future__ import annotations

from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.inputs.scenario import load_scenario
from sim.inputs.serving_keys import Sampling
from sim.models.serving.sampling import chosen_tokens
from sim.serve.prices.iteration_shares import HOST
from sim.serve.prices.load import Load
from sim.serve.simulation import ServingSimulation, simulate_serving
from sim.variants.engines import ENGINES
from sim.views.scenario_words import sampling_words
from tests.sim.serve.serving_cases import serving

VOCAB = 1000


def more(engine: str, rows: int = 200, size: float = 2.0, **asked: Any) -> float:
    """Bytes for each logit beyond those of the same draw without it."""
    sampler = ENGINES[engine].sampler
    drawn = {key: asked[key] for key in ("temperature", "top_p") if key in asked}
    usual, own = (
        sum(i.bytes for i in chosen_tokens(sampler, s, rows, VOCAB, size, "bf16") if isinstance(i, Compute))
        for s in (Sampling(**drawn), Sampling(**asked))
    )
    return (own - usual) / (rows * VOCAB)


def test_vllm_v1_computes_log_softmax_of_all_logits() -> None:
    """torch casts 2 bytes to 4 before a log-softmax of 8; the chosen token's rank reads 4; a top-k of numbers of 4
    bytes reads them four times to count digits and once more."""
    assert more("vllm-0.14", logprobs=0) == 2 + 4 + 8 + 4
    assert more("vllm-0.14", logprobs=5) == more("vllm-0.14", logprobs=0) + 5 * 4
    assert more("vllm-0.14", logprobs=5, temperature=0) == more("vllm-0.14", logprobs=5, top_p=0.9)


def test_vllms_second_model_runner_computes_those_of_few_tokens() -> None:
    """A row is read twice for the largest and the sum, once for the rank, all of 2 bytes; a top-k of numbers of 2 bytes
    reads them twice to count digits and once more."""
    assert more("vllm-0.29", logprobs=0) == 2 * 2 + 2
    assert more("vllm-0.29", logprobs=5) == 2 * 2 + 2 + 3 * 2


def test_sglang_takes_the_logarithm_of_what_it_draws_from() -> None:
    """Of the largest logit a log-softmax; of a draw the logarithm; either is clamped in place."""
    assert more("sglang-0.5", logprobs=0, temperature=0) == 8 + 8
    assert more("sglang-0.5", logprobs=0) == 8 + 8
    assert more("sglang-0.5", logprobs=3) == 8 + 8 + 5 * 4


def test_a_grammars_mask_is_a_bit_for_each_logit_that_it_overwrites() -> None:
    """vLLM masks the logits of 2 bytes, SGLang its copies of 4."""
    assert more("vllm-0.14", structured_outputs=True) == more("vllm-0.29", structured_outputs=True) == 1 / 8 + 2
    assert more("sglang-0.5", structured_outputs=True) == 1 / 8 + 4


@pytest.mark.parametrize("key", [{"logprobs": 1}, {"structured_outputs": True}])
def test_engines_of_which_it_was_not_read_refuse(key: dict[str, Any]) -> None:
    for engine in ("vllm-0.6", "trtllm-1.3"):
        with pytest.raises(InputError, match=rf"sampling.{next(iter(key))}: found .*; how engine {engine} does this"):
            serving({"engine": engine, "sampling": key})


def test_more_than_an_engine_returns_is_refused() -> None:
    with pytest.raises(InputError, match="logprobs"):
        serving({"engine": "vllm-0.14", "sampling": {"logprobs": 21}})


def served(*changes: str) -> ServingSimulation:
    small = ("inference.requests.count=64", "inference.requests.rate_per_s=null", "inference.requests.output_len=8")
    return simulate_serving(load_scenario("scenarios/serve_llama8b.yaml", [*small, *changes]))


GRAMMAR = "inference.sampling={temperature: 1, structured_outputs: true}"
ASYNC_OFF = "inference.async_scheduling=false"


def decode_s(sim: ServingSimulation, device_s: float, sequences: int) -> float:
    """An iteration of as many single tokens, whose kernels take so long."""
    load = Load(tokens=sequences, decodes=sequences, decode_kv=1000 * sequences, samples=sequences)
    return sim.costs.host.seconds_each(0, [device_s], load)[0]


def test_masks_are_made_before_the_gpu_computes_or_beside_it() -> None:
    """vLLM 0.11 in its scheduler; later behind the launch of the model, also without asynchronous scheduling, so that a
    long iteration hides it and a short one waits for it; accepting a token is the scheduler's own work."""
    times, vocab, n = ENGINES["vllm-0.14"].host_on("hopper"), 128_256, 64
    mask_s, accept_s, own_s = n * vocab * times.mask_s, n * times.accept_s, times.iteration_s + n * times.sequence_s
    for engine, change in (("vllm-0.11", GRAMMAR), ("vllm-0.14", GRAMMAR)):
        sim = served(f"inference.engine={engine}", change, ASYNC_OFF)
        beside = engine == "vllm-0.14"
        for device_s in (0.001, 0.1):
            expected = max(device_s, mask_s) if beside else device_s + mask_s
            assert decode_s(sim, device_s, n) == pytest.approx(expected + own_s + accept_s)
    overlapping = served("inference.engine=vllm-0.14", GRAMMAR)
    assert decode_s(overlapping, 0.1, n) == pytest.approx(0.1)
    assert decode_s(overlapping, 0.001, n) == pytest.approx(own_s + accept_s + mask_s)


@pytest.mark.parametrize("engine", ["vllm-0.11", "vllm-0.14", "sglang-0.5"])
def test_masks_cost_as_much_in_a_run_of_alike_iterations(engine: str) -> None:
    """Iterations that are looked at one by one take the same times as a run of them."""
    changes = (f"inference.engine={engine}", GRAMMAR, "inference.requests.output_len=40")
    scenario = served(*changes).scenario
    runs = [simulate_serving(scenario, engine="static", group=group) for group in (True, False)]
    assert max(iteration.steps for iteration in runs[0].replicas[0].iterations) > 1
    latencies = [[s.finish_s for s in run.sequences] for run in runs]
    assert latencies[0] == pytest.approx(latencies[1], rel=1e-9)


def test_threads_share_the_masks_of_many_sequences() -> None:
    """vLLM's eight, of more than 128 sequences; SGLang's host makes them one after another."""
    for engine, threads in (("vllm-0.14", 8), ("sglang-0.5", 1)):
        host = served(f"inference.engine={engine}", GRAMMAR).costs.host
        for n, rows in ((128, 128), (129, -(-129 // threads)), (400, 400 // threads)):
            assert host.masks_s(Load(tokens=n, decodes=n, samples=n)) == pytest.approx(
                rows * 128_256 * host.times.mask_s
            )


def test_waits_for_masks_are_the_hosts() -> None:
    """What the host takes is all that a longer vocabulary's grammar adds, kernels aside."""
    plain, masked = (served("inference.engine=vllm-0.11", ASYNC_OFF, s) for s in ("inference.sampling=null", GRAMMAR))
    waits = [sum(s for (kind, *_), s in sim.shares.items() if kind == HOST) for sim in (plain, masked)]
    samples = 64 * 8
    times = plain.costs.host.times
    assert waits[1] - waits[0] == pytest.approx(samples * (128_256 * times.mask_s + times.accept_s), rel=0.02)


@pytest.mark.parametrize("engine", ["vllm-0.14", "sglang-0.5"])
def test_log_probabilities_keep_the_servers_process_busy(engine: str) -> None:
    pair = [
        served(f"inference.engine={engine}", f"inference.sampling={{logprobs: {n}}}").costs.host for n in ("null", 5)
    ]
    usual, asked = (host.front for host in pair)
    assert usual is not None
    assert asked is not None
    assert asked.work_s(100) > 2 * usual.work_s(100)


def test_the_headline_names_them() -> None:
    words = sampling_words(Sampling(logprobs=5, structured_outputs=True))
    assert words == "temperature 1, 5 logprobs, structured outputs"
