"""Request traces: what is read, and what hostile files are told."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from sim.core.errors import InputError
from sim.inputs.scenario import parse_scenario
from sim.inputs.workloads import RequestPattern
from sim.serve.requests import Request, make_requests, read_trace
from sim.serve.simulation import simulate_serving


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_trace_in_order_of_arrival(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens,prefix_id\n2.5,10,3,sys\n0,7,1,\n"
    assert read_trace(written(tmp_path, text)) == (Request(0.0, 7, 1), Request(2.5, 10, 3, "sys", 10))


def test_prefix_tokens_and_further_columns(tmp_path: Path) -> None:
    text = '\ufeffuser, arrival_s ,prompt_tokens,output_tokens,prefix_id,prefix_tokens\n"a,b",0,10,3,p,4\n'
    assert read_trace(written(tmp_path, text)) == (Request(0.0, 10, 3, "p", 4),)


HEAD = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "csv: has no line of column names; needs arrival_s"),
        (HEAD, "holds no requests"),
        ("arrival_s,prompt_tokens\n0,1\n", "column output_tokens is missing"),
        (HEAD + "0,1\n", "csv:2: has 2 values; the header has 3"),
        (HEAD + "0,1,1\nnan,1,1\n", "csv:3: arrival_s: found 'nan'"),
        (HEAD + "-1,1,1\n", "arrival_s"),
        (HEAD + "1e999,1,1\n", "arrival_s"),
        (HEAD + "0,0,1\n", "prompt_tokens: found '0'"),
        (HEAD + "0,1,1e3\n", "output_tokens: found '1e3'"),
        (HEAD + "0,²,1\n", "prompt_tokens"),
        (HEAD + f"0,{'9' * 5000},1\n", "prompt_tokens"),
        (HEAD + '0,"1\n', "is no CSV"),
        (HEAD + "0,1,1,,\n", "has 5 values"),
        ("arrival_s,arrival_s,prompt_tokens,output_tokens\n", "twice"),
        (b"\xff\xfe\x00", "csv:1: is not UTF-8"),
        (HEAD.strip() + ",prefix_id\n0,1,1," + "x" * 1001 + "\n", "prefix_id"),
        (HEAD.strip() + ",prefix_id,prefix_tokens\n0,5,1,a,6\n", "prefix_tokens"),
    ],
)
def test_hostile_traces(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(written(tmp_path, text))
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.csv: no such file"):
        read_trace(tmp_path / "none.csv")


def test_a_rate_is_a_poisson_process() -> None:
    pattern = RequestPattern(prompt_len=5, output_len=2, count=4000, rate_per_s=10.0, seed=3)
    arrivals = [r.arrival_s for r in make_requests(pattern)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(400, rel=0.05)
    assert arrivals == [r.arrival_s for r in make_requests(pattern)]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert sum(g > 0.1 for g in gaps) / len(gaps) == pytest.approx(2.718**-1, abs=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 1e9])
def test_gaps_spread_by_burstiness_around_the_same_mean(burstiness: float) -> None:
    """Of a gamma distribution with this shape: standard deviation ÷ mean is one over its root."""
    pattern = RequestPattern(prompt_len=8, output_len=2, count=40_000, rate_per_s=5.0, burstiness=burstiness)
    arrivals = [r.arrival_s for r in make_requests(pattern)]
    gaps = [b - a for a, b in itertools.pairwise([0.0, *arrivals])]
    mean_s = sum(gaps) / len(gaps)
    spread_s = (sum((gap - mean_s) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean_s == pytest.approx(0.2, rel=0.03)
    assert spread_s == pytest.approx(0.2 / burstiness**0.5, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 1e9])
def test_gaps_of_an_exact_rate_are_the_others_by_one_factor(burstiness: float) -> None:
    """vllm/benchmarks/serve.py, get_request: target_total_delay_s = total_requests / request_rate."""
    free, exact = (
        [
            r.arrival_s
            for r in make_requests(
                RequestPattern(
                    prompt_len=8, output_len=2, count=50, rate_per_s=5.0, burstiness=burstiness, exact_rate=told
                )
            )
        ]
        for told in (False, True)
    )
    assert exact[-1] == pytest.approx(10.0, rel=1e-12)
    assert [a / b for a, b in zip(exact, free, strict=True)] == pytest.approx([10.0 / free[-1]] * 50)
    assert burstiness == 1e9 or free[-1] != pytest.approx(10.0, rel=1e-3)


def test_gaps_that_are_all_zero_stay_with_an_exact_rate() -> None:
    """The smallest burstiness draws gaps below the smallest number of fp64."""
    pattern = RequestPattern(prompt_len=8, output_len=2, rate_per_s=5.0, burstiness=1e-3, exact_rate=True)
    found = {make_requests(pattern.model_copy(update={"seed": seed}))[0].arrival_s for seed in range(20)}
    assert sorted({round(s, 9) for s in found}) == [0.0, 0.2]


def test_an_exact_rate_needs_a_rate() -> None:
    requests = {"prompt_len": 500, "output_len": 20, "exact_rate": True}
    section = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"requests": requests}}
    with pytest.raises(InputError, match=r"inference.requests.exact_rate: found true; needs rate_per_s"):
        parse_scenario(section)


def test_requests_in_bursts_wait_longer_for_their_first_token() -> None:
    waits = []
    for burstiness in (1e9, 1.0, 0.1):
        requests = {"prompt_len": 500, "output_len": 20, "count": 200, "rate_per_s": 25, "burstiness": burstiness}
        section = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"requests": requests}}
        waits.append(simulate_serving(parse_scenario(section)).result["time_to_first_token_s"]["p99"])
    assert waits == sorted(waits)
    assert waits[2] > 1.5 * waits[0]


def test_gaps_need_a_rate() -> None:
    requests = {"prompt_len": 500, "output_len": 20, "burstiness": 2}
    section = {"model": "llama3-8b", "cluster": "dgx-h100", "inference": {"requests": requests}}
    with pytest.raises(InputError, match=r"inference.requests.burstiness: found 2; needs rate_per_s"):
        parse_scenario(section)
