"""What choosing tokens out of their logits reads, writes and holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.core.errors import InputError
from sim.core.program import Compute
from sim.core.sampler import Sampler
from sim.inputs.scenario import load_scenario
from sim.inputs.serving_keys import Sampling
from sim.models.serving.operators import head_samples
from sim.models.serving.sampling import chosen_tokens
from sim.serve.prices.dims import serving_dims
from sim.serve.simulation import simulate_serving
from sim.variants.engines import ENGINES
from tests.sim.cases import scenario_with
from tests.sim.serve.serving_cases import ONE, engine_scenario, serving

# The second model runner of vLLM copies logits for draws alone.
WITHOUT_COPY = ("bundled", "vllm-0.28", "vllm-0.29", "vllm-0.3")
ROOT = Path(__file__).parents[3]
V0 = ("vllm-0.2", "vllm-0.2.7", "vllm-0.5", "vllm-0.6", "vllm-0.6.5")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tp", [1, 4])
def test_engines_choose_out_of_logits_in_fp32(engine: str, tp: int) -> None:
    """The copy reads 2 bytes and writes 4, the choice reads 4, of all logits on every rank; without a copy, 2. vLLM
    before V1 computes softmax and log-softmax in any case."""
    d = serving_dims(scenario_with(parallelism={"tp": tp}, inference={"engine": engine, "requests": ONE}))
    kernels = [i for i in head_samples(d, 3) if isinstance(i, Compute) and i.kind in ("cast", "softmax")]
    each = [2.0] if d.sampler.copies != "always" else [2.0 + 4, *([8.0, 8.0] if engine in V0 else []), 4.0]
    assert (d.sampler.copies != "always") == engine.startswith(WITHOUT_COPY)
    assert [k.bytes for k in kernels] == [3 * d.vocab * tp * n for n in each]


def moved(engine: str, rows: int, **asked: Any) -> float:
    """Bytes for each logit of what is beyond the largest one's choice."""
    vocab, sampler = 1000, ENGINES[engine].sampler
    usual, drawn = (
        sum(i.bytes for i in chosen_tokens(sampler, s, rows, vocab, 2.0, "bf16") if isinstance(i, Compute))
        for s in (None, Sampling(**asked))
    )
    return (drawn - usual) / (rows * vocab)


def test_tensorrt_llm_draws_with_flashinfer_s_kernels() -> None:
    """Division by the temperature 8, search for NaN 6, the draw 4 for the largest logit's 4; with top-p alone the
    softmax divides; a top-k is a mask of 8 before the softmax of 8, also alone."""
    assert moved("trtllm-1.3", 200) == moved("trtllm-1.3", 200, temperature=0.5) == 8 + 6
    assert moved("trtllm-1.3", 200, top_p=0.75) == 6 + 8 + 6 / 0.75 - 4
    assert moved("trtllm-1.3", 200, top_k=20) == 8 + 6 + 8 + 8 + 6 - 4
    assert moved("trtllm-1.3", 200, top_k=20, top_p=0.75) == 8 + 6 + 8 + 8 + 6 / 0.75 - 4


def test_an_engine_without_penalties_refuses_one() -> None:
    with pytest.raises(InputError, match=r"repetition_penalty: found 1.1; engine trtllm-1.3 has no penalties"):
        serving({"engine": "trtllm-1.3", "sampling": {"repetition_penalty": 1.1}})


def test_draws_by_engine() -> None:
    """Temperature 8, softmax 8, noise 4, its division 12 and the largest 4, for the largest logit's 4; SGLang writes
    probabilities over the logits and checks them; vLLM's second model runner adds noise in the kernel that chooses."""
    assert moved("vllm-v1", 200) == 8 + 8 + 4 + 12
    assert moved("sglang-0.5", 200) == 8 + 8 + 8 + 12 + 4 + 12
    assert moved("vllm-0.29", 200) == 0
    assert moved("vllm-0.29", 200, temperature=0.5) == (2 + 4) + 8 + (4 - 2)
    assert moved("vllm-0.6", 200) == 4 + 12  # whose softmax is there anyhow


@pytest.mark.parametrize(("rows", "sort"), [(127, 8 + 4 + 4 * 24 + 24 + 24), (128, 8 + 6 * 28)])
def test_top_p_by_engine(rows: int, sort: float) -> None:
    """A sort, a softmax, a running sum, a comparison that masks, and the way back; or a search for the smallest logit
    to keep, which reads twice and then rewrites; or draws until one is inside, half a row and a row each."""
    drawn = moved("vllm-0.8", rows)
    assert moved("vllm-0.8", rows, top_p=0.9) == pytest.approx(drawn + sort + 8 + 8 + 14 + 24)
    assert moved("vllm-0.17", rows, top_p=0.9) == pytest.approx(drawn + 2 * 4 + 8)
    assert moved("vllm-0.17", rows, top_p=0.9, top_k=20) == pytest.approx(drawn + 4 + 8)
    assert moved("vllm-0.21", rows, top_p=0.8) == pytest.approx(8 + 8 + 1.5 * 4 / 0.8 - 4)
    assert moved("sglang-0.5", rows, top_p=0.8, top_k=20) == pytest.approx(8 + 8 + 8 + 1.5 * 4 / 0.8 - 4)


def test_few_rows_are_sorted_where_many_are_searched() -> None:
    assert moved("vllm-0.17", 7, top_p=0.9) == moved("vllm-0.8", 7, top_p=0.9)


def test_penalties_change_the_largest_logit_too() -> None:
    assert moved("vllm-0.8", 10, temperature=0, repetition_penalty=1.1) == 85
    assert moved("sglang-0.5", 10, temperature=0, repetition_penalty=1.1) == 12


def test_tokens_take_longer_to_draw_than_to_choose() -> None:
    def seconds(**inference: Any) -> float:
        s = engine_scenario("vllm-0.14", model="llama3-8b", batching="continuous", **inference)
        return simulate_serving(s).outcome.duration_s

    asked = [None, {"temperature": 0}, {"temperature": 1}, {"top_k": 20}, {"top_p": 0.9}, {"top_p": 0.9, "top_k": 20}]
    found = [seconds(sampling=one) for one in asked]
    assert found[0] == found[1]
    assert found[1:] == sorted(found[1:])
    assert len({*found}) == 5


@pytest.mark.parametrize("engine", ["bundled", "trtllm-1.0"])
def test_engines_whose_sampler_was_not_read_refuse(engine: str) -> None:
    with pytest.raises(InputError, match=rf"sampling: engine {engine} is simulated with the choice of the largest"):
        serving({"engine": engine, "sampling": {"temperature": 1}})


@pytest.mark.parametrize(
    ("engine", "tokens", "sequences", "each"),
    [
        ("vllm-0.6", 8192, 256, 2 + 4 + 12 + 20),  # sorted, of at least 128 rows
        ("vllm-0.14", 8192, 100, 2 + 4 + 12 + 32),
        ("vllm-0.17", 8192, 256, 2 + 4 + 8),
        ("trtllm", 8192, 256, 2 + 4),
    ],
)
def test_room_is_left_for_the_largest_iteration(engine: str, tokens: int, sequences: int, each: float) -> None:
    """8,192 hidden states in 16 bits, and the logits of as many sequences as may run; their requests are four."""
    limits = {"max_running_requests": sequences, "max_batch_tokens": tokens, "chunked_prefill": True}
    s = engine_scenario(engine, model="llama3-8b", batching="continuous", **limits)
    layer = tokens * (2 * 4096 + 3 * 14336) * 2
    head = tokens * 4096 * 2 + sequences * 128_256 * each
    assert simulate_serving(s).capacity.buffer_bytes == (max(layer, head),)
    assert Sampler().held_bytes(sequences) == 0


def test_room_for_tokens_or_for_what_requests_need() -> None:
    """TensorRT-LLM's PyTorch backend computes as many tokens as may be, SGLang and `bundled` leave what is needed."""
    held = {}
    for engine in ("trtllm-1.0", "bundled"):
        limits = {"max_running_requests": 256, "max_batch_tokens": 8192, "chunked_prefill": True}
        s = engine_scenario(engine, model="llama3-8b", batching="continuous", **limits)
        held[engine] = simulate_serving(s).capacity.buffer_bytes[0]
    width = (2 * 4096 + 3 * 14336) * 2
    assert held == {"trtllm-1.0": 8192 * width, "bundled": (4 * 128 + 4) * width}


@pytest.mark.parametrize("engine", ["vllm-0.14", "vllm-0.29", "sglang-0.5"])
def test_the_pages_numbers_are_the_simulators(engine: str) -> None:
    """Milliseconds a token of the largest logit and of the scenario's own sampling, and the room of the latter."""
    page = (ROOT / "docs" / "serving_sampling.md").read_text("utf-8").splitlines()
    cells = next(line for line in page if line.startswith(f"| `{engine}`")).split("|")
    file, own = ROOT / "scenarios" / "serve_sampling.yaml", f"inference.engine={engine}"
    greedy, drawn = (simulate_serving(load_scenario(file, [own, *more])) for more in (["inference.sampling=null"], []))
    found = [sim.result["time_per_output_token_s"]["mean"] * 1e3 for sim in (greedy, drawn)]
    assert [float(cells[i]) for i in (2, 4)] == pytest.approx(found, abs=0.006)
    assert float(cells[7].split()[0]) == pytest.approx(drawn.capacity.buffer_bytes[0] / 2**30, abs=0.006)
