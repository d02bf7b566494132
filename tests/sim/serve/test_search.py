"""The highest rate of requests within promised latencies, and the gaps between tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sim.commands.search import main
from sim.core.errors import InputError
from sim.core.units import seconds
from sim.inputs.scenario import parse_scenario
from sim.search.serving_units import lasting_tokens_per_s
from sim.serve.simulation import simulate_serving
from sim.studies.promised_latencies import parse_slo
from tests.processes import invoked
from tests.sim.serve.serving_cases import searched

SMALL: dict[str, Any] = {
    "model": "llama3.2-1b",
    "cluster": "dgx-h100",
    "parallelism": {"tp": 2},
    "inference": {"requests": {"prompt_len": 512, "output_len": 16, "count": 60, "rate_per_s": 40.0, "seed": 1}},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slo") / "small.yaml"
    path.write_text(json.dumps(SMALL))
    return path


def test_the_highest_rate_keeps_every_promise_and_a_higher_one_does_not(file: Path) -> None:
    result = searched(file, "ttft_p99=0.02,latency_p90=0.06", "--gpus", "1", "--price", "3.6")
    (best,) = result["best"]
    assert best["within_slo"]
    assert best["limit_found"]
    assert best["time_to_first_token_s"]["p99"] <= 0.02
    assert best["request_latency_s"]["p90"] <= 0.06
    assert best["cost_per_million_output_tokens"] == pytest.approx(1e-3 / best["output_tokens_per_s"] * 1e6)
    energy = 1e6 / best["output_tokens_per_s"] / 3600 * 0.7  # an H100's 700 W, in kWh
    assert best["energy_kwh_per_million_output_tokens"] == pytest.approx(energy)
    faster = {
        **SMALL,
        "parallelism": {},
        "inference": {"requests": {**SMALL["inference"]["requests"], "rate_per_s": 1.1 * best["rate_per_s"]}},
    }
    beyond = simulate_serving(parse_scenario(faster)).result
    assert beyond["time_to_first_token_s"]["p99"] > 0.02 or beyond["request_latency_s"]["p90"] > 0.06


def test_where_no_layout_keeps_the_promises_the_nearest_one_says_by_how_much(file: Path) -> None:
    """A first token takes as long as the prompt of a request that is alone; the other promise is kept."""
    slo = "ttft_p50=0.001,latency_p99=9s"
    result = searched(file, slo, "--gpus", "2")
    alone = {"prompt_len": 512, "output_len": 16, "rate_per_s": 1e-3, "count": 4, "seed": 1}
    for row in result["best"]:
        (broken,) = row["broken"]
        own = {**SMALL, "parallelism": {k: n for k, n in row["unit"].items() if k in ("tp", "pp")}}
        served = simulate_serving(parse_scenario({**own, "inference": {"requests": alone}})).result
        expected = served["time_to_first_token_s"]["p50"]
        assert broken == {"promise": "ttft_p50=0.001", "found_s": pytest.approx(expected), "promised_s": 0.001}
    least = min(row["broken"][0]["found_s"] for row in result["best"])
    said = CliRunner().invoke(main, [str(file), "--slo", slo, "--gpus", "2"]).output
    assert f"TTFT p50 is {1e3 * least:.4g} ms, {1e3 * least:.3g} times the promised 1.000 ms" in said
    assert "latency p99" not in said.partition("the nearest")[2]


def test_a_rate_that_is_carried_is_served_while_requests_arrive(tmp_path: Path) -> None:
    """Sixty requests are over before a queue has grown: each layout keeps this promise of theirs at any rate. Arrivals
    that last four mean latencies are served as they come; what the last of them take after that is not counted."""
    file, slo = tmp_path / "loose.yaml", "latency_p99=0.5"
    file.write_text(json.dumps(SMALL))
    for row in searched(file, slo)["best"]:
        assert row["limit_found"]
        assert row["output_tokens_per_s"] == pytest.approx(16 * row["rate_per_s"])
        assert row["requests"] >= 4 * row["rate_per_s"] / row["parallelism"]["dp"] * row["request_latency_s"]["mean"]


def test_the_end_of_a_short_trace_is_no_limit(tmp_path: Path) -> None:
    """A trace has no more requests: faster than they can be told apart from a burst, no rate is said to be carried."""
    trace = tmp_path / "trace.csv"
    rows = [f"{0.1 * i},512,16" for i in range(60)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    file = tmp_path / "traced.yaml"
    file.write_text(json.dumps({**SMALL, "inference": {"requests": {"trace": str(trace)}}}))
    (best,) = searched(file, "latency_p99=5", "--gpus", "1")["best"]
    assert not best["limit_found"]
    assert best["rate_per_s"] * best["request_latency_s"]["mean"] <= 60 / 4


def test_looser_promises_carry_more_and_replicas_add_up(file: Path) -> None:
    tight, loose = (searched(file, f"ttft_p99={s}") for s in (0.015, 0.03))
    rates = [{tuple(r["parallelism"].values()): r["rate_per_s"] for r in x["best"]} for x in (tight, loose)]
    assert all(rates[0][key] < rates[1][key] for key in rates[0])
    alone = searched(file, "ttft_p99=0.03", "--gpus", "1")["best"][0]["rate_per_s"]
    assert rates[1][1, 1, 2] == pytest.approx(2 * alone, rel=0.03)
    assert loose["fewest_gpus"]["gpus"] <= tight["fewest_gpus"]["gpus"]
    for found in (tight, loose):  # the layout that is named has all of these GPUs
        assert math.prod(found["fewest_gpus"]["parallelism"].values()) == found["fewest_gpus"]["gpus"]


def test_the_curve_trades_one_for_the_other(file: Path) -> None:
    curve = searched(file, "ttft_p99=0.03", "--gpus", "1")["curve"]
    users = [p["tokens_per_s_per_user"] for p in curve]
    gpus = [p["output_tokens_per_s_per_gpu"] for p in curve]
    assert users == sorted(users, reverse=True)
    assert gpus == sorted(gpus)
    assert len(curve) > 3


def test_pools_are_searched_and_the_best_pair_keeps_its_promises(tmp_path: Path) -> None:
    """On three GPUs there are one replica for prompts and two for tokens, or the reverse."""
    file = tmp_path / "pools.yaml"
    data = {**SMALL, "parallelism": {}, "inference": {**SMALL["inference"], "disaggregated": {}}}
    file.write_text(json.dumps(data))
    result = searched(file, "ttft_p99=0.05,itl_p99=0.01", "--gpus", "3")
    degrees = [tuple(row["parallelism"].values()) for row in result["best"]]
    assert sorted(degrees) == [(1, 1, 2, 1, 1), (2, 1, 1, 1, 1)]
    best = result["best"][0]
    pools = {
        name: {"replicas": best["unit"][f"{name}_replicas"], "tp": best["unit"][f"{name}_tp"]}
        for name in ("prefill", "decode")
    }
    requests = {**SMALL["inference"]["requests"], "rate_per_s": best["rate_per_s"], "count": best["requests"]}
    again = simulate_serving(parse_scenario({**data, "inference": {"requests": requests, "disaggregated": pools}}))
    assert again.result["time_to_first_token_s"]["p99"] == best["time_to_first_token_s"]["p99"] <= 0.05
    assert best["output_tokens_per_s_per_gpu"] == pytest.approx(16 * best["rate_per_s"] / 3)


@pytest.mark.parametrize("times", [0.25, 8.0])
def test_tokens_a_second_are_those_of_a_service_that_goes_on(times: float) -> None:
    """Below what a server carries they are what is asked for, also as counted; far above, what it
    makes: eight sequences at a time, nearly to the end."""
    rate_per_s = 60.0 * times
    asked = {**SMALL["inference"]["requests"], "output_len": 64, "count": 400, "rate_per_s": rate_per_s}
    few = {"requests": asked, "max_running_requests": 8}
    served = simulate_serving(parse_scenario({**SMALL, "parallelism": {}, "inference": few}))
    counted_per_s, whole_per_s = lasting_tokens_per_s(served, rate_per_s, False), served.result["output_tokens_per_s"]
    if times < 1:
        assert counted_per_s == pytest.approx(64 * rate_per_s, rel=0.1)
        assert lasting_tokens_per_s(served, rate_per_s, True) == pytest.approx(64 * rate_per_s)
    else:
        assert counted_per_s == pytest.approx(whole_per_s, rel=0.03)
        assert counted_per_s < 0.5 * 64 * rate_per_s


def test_a_pair_of_pools_is_never_called_one_gpu(tmp_path: Path) -> None:
    file = tmp_path / "pair.yaml"
    inference = {**SMALL["inference"], "disaggregated": {}}
    file.write_text(json.dumps({**SMALL, "parallelism": {}, "inference": inference}))
    page = tmp_path / "pair.html"
    options = [str(file), "--slo", "ttft_p99=0.05", "--gpus", "2", "--html", str(page)]
    done = CliRunner().invoke(main, options, catch_exceptions=False)
    for text in (page.read_text(), done.stdout):
        assert "prefill 1 × tp 1, decode 1 × tp 1" in text
        assert "one GPU" not in text


def test_the_pages_headline_has_the_percentile_that_is_promised(file: Path, tmp_path: Path) -> None:
    page, found = tmp_path / "p90.html", tmp_path / "p90.json"
    options = [str(file), "--slo", "ttft_p90=0.02", "--gpus", "1", "--html", str(page), "--json", str(found)]
    CliRunner().invoke(main, options, catch_exceptions=False)
    (best,) = json.loads(found.read_text())["best"]
    head = page.read_text().partition("Highest rate of each layout")[0]
    assert "TTFT p90 ≤ 20.00 ms is promised" in head
    assert seconds(best["time_to_first_token_s"]["p90"]) in head
    assert "Time per output token" in head


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", [{"dp": 2, "ep": 2}, {"tp": 2}])
def test_replicas_that_share_experts_are_searched(tmp_path: Path, parallelism: dict[str, int]) -> None:
    """Of two GPUs: one with all experts; both with half of them, whose attention is split or not; both with half of
    every expert; and both with half of the layers. Whatever the scenario's own layout is."""
    file = tmp_path / "experts.yaml"
    moe = {"experts": 8, "top_k": 2, "ffn": 512}
    model = {"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "vocab": 1024, "ffn": 1024, "moe": moe}
    file.write_text(json.dumps({**SMALL, "model": model, "parallelism": parallelism}))
    result = searched(file, "ttft_p99=0.05")
    layouts = [{key: n for key, n in row["unit"].items() if n > 1} for row in result["best"]]
    for expected in ({}, {"dp": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"tp": 2}, {"pp": 2}):
        layouts.remove(expected)
    assert not layouts
    assert {row["parallelism"]["dp"] for row in result["best"]} == {1, 2}
    assert all(row["own_rate"]["within_slo"] for row in result["best"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {"cp": 2}}, "parallelism.cp: found 2; --slo searches tp, pp, dp, ep and pools"),
        (
            {"inference": {**SMALL["inference"], "autoscaling": {}}},
            "inference.autoscaling: --slo searches replicas that are always on",
        ),
    ],
)
def test_what_is_not_laid_out_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "refused.yaml"
    file.write_text(json.dumps({**SMALL, **changes}))
    done = invoked(main, str(file), "--slo", "ttft_p99=0.1", code=2)
    assert message in done.output


@pytest.mark.slow
def test_any_number_of_workers_finds_the_same(file: Path) -> None:
    one, two = (searched(file, "ttft_p99=0.1", "--gpus", "2", "--workers", n) for n in ("1", "2"))
    assert one == two


def test_latencies_may_be_given_one_by_one(file: Path) -> None:
    assert searched(file, "ttft_p99=0.1", "--slo", "tpot_p99=1")["slo"] == ["ttft_p99=0.1", "tpot_p99=1"]


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        (("--objective", "step_time"), "a search of serving (--slo) does not have it"),
        (("--cluster", "dgx-h100,dgx-a100"), "for serving, search each cluster by itself"),
    ],
)
def test_options_that_serving_does_not_have_are_refused(file: Path, options: tuple[str, str], instead: str) -> None:
    done = invoked(main, str(file), "--slo", "ttft_p99=0.1", *options, code=2)
    said = f"{options[0]} A,B" if options[0] == "--cluster" else options[0]
    assert f"{said}: is for searches of training steps; {instead}" in done.output


def test_the_fewest_gpus_come_with_what_simulates_them(file: Path) -> None:
    command = [str(file), "--slo", "ttft_p99=0.1", "--gpus", "1", "--set", "inference.precision=fp16"]
    command += ["--vary", "inference.max_batch_tokens=4096"]
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    assert "replicas of at most 1 GPU were tried, --gpus N tries larger ones" in done.stdout
    degrees = "--set parallelism.tp=1 --set parallelism.pp=1 --set parallelism.dp="
    assert f"stepsim run {file} --set inference.precision=fp16 {degrees}" in done.stdout
    assert " --set inference.max_batch_tokens=4096\n" in done.stdout


def test_the_curve_says_which_points_keep_the_limits(file: Path) -> None:
    """Above the highest rate more is offered than is served, so tokens are fewer than the rate times the answer."""
    done = CliRunner().invoke(main, [str(file), "--slo", "ttft_p99=0.1", "--gpus", "1"], catch_exceptions=False)
    _, _, curve = done.stdout.partition("throughput against speed")
    assert "offered requests/s/GPU" in curve
    rows = [line.split() for line in curve.splitlines() if line.split()[3:4] in (["yes"], ["no"])]
    assert {row[3] for row in rows} == {"yes", "no"}


def test_a_clusters_own_price_is_taken(file: Path) -> None:
    options = ("--gpus", "1", "--cluster", "dgx-h100", "--price")
    own, all_ = (searched(file, "ttft_p99=0.03", *options, price) for price in ("dgx-h100=2,dgx-b200=4", "2"))
    assert own["best"] == all_["best"]
    assert own["best"][0]["cost_per_million_output_tokens"] > 0


def test_a_promise_that_nobody_keeps_is_no_rate(file: Path) -> None:
    result = searched(file, "ttft_p50=0.0001", "--gpus", "1")
    assert result["best"][0]["rate_per_s"] == 0.0
    assert result["fewest_gpus"] is None


def test_the_table_has_the_percentiles_that_are_promised(file: Path) -> None:
    done = CliRunner().invoke(main, [str(file), "--slo", "ttft_p90=0.03,latency_mean=0.1", "--gpus", "1"])
    heads = done.stdout.splitlines()[1:4]
    found = [" ".join(heads).split().count(word) for word in ("p90", "mean", "p50")]
    assert found == [1, 1, 2], done.stdout


@pytest.mark.slow
def test_too_few_requests_find_no_limit_and_no_rate_is_shown(tmp_path: Path) -> None:
    """A layout that keeps the promise although all requests come at once."""
    file = tmp_path / "few.yaml"
    few = {**SMALL["inference"]["requests"], "count": 5}
    file.write_text(json.dumps({**SMALL, "inference": {"requests": few}}))
    result = searched(file, "ttft_p99=10", "--gpus", "1")
    (best,) = result["best"]
    assert (best["limit_found"], best["fewest_gpus"], result["fewest_gpus"]) == (False, None, None)
    html = tmp_path / "few.html"
    options = [str(file), "--slo", "ttft_p99=10", "--gpus", "1", "--html", str(html)]
    done = CliRunner().invoke(main, options, catch_exceptions=False)
    assert done.stdout.count("no limit found: too few requests") == 2  # the rate, and the fewest GPUs
    assert f"{best['rate_per_s']:.3g}" not in done.stdout.partition("throughput against")[0]
    assert html.read_text().count("no limit found: too few requests") == 2  # the headline, and the table


@pytest.mark.parametrize(
    "text",
    ["ttft=0.2", "ttft_p99", "ttft_p80=1", "speed_p99=1", "ttft_p99=-1", "ttft_p99=x", "e2e_p99=1,latency_p99=2"],
)
def test_other_promises_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--slo"):
        parse_slo(text)


def test_milliseconds_without_their_unit_are_told_and_long_limits_are_written_with_theirs() -> None:
    with pytest.raises(InputError, match=r"--slo tpot_p99=50: 50 seconds\? write 50ms or 50s"):
        parse_slo("ttft_p99=0.5,tpot_p99=50")
    (long,) = parse_slo("tpot_p99=50s")
    assert parse_slo(long.text) == (long,)


def test_the_mean_gap_is_all_time_between_tokens_over_all_gaps() -> None:
    served = simulate_serving(parse_scenario({**SMALL, "parallelism": {}}), engine="static")
    sequences = [s for r in served.replicas for s in r.sequences]
    seconds = sum(s.finish_s - s.first_token_s for s in sequences)
    gaps = sum(s.request.output_tokens - 1 for s in sequences)
    found = served.result["inter_token_latency_s"]
    assert found["mean"] == pytest.approx(seconds / gaps, rel=1e-9)
    assert found["p50"] <= found["p90"] <= found["p99"]


def test_one_sequence_alone_has_equal_gaps() -> None:
    inference = {"batching": "static", "requests": {"prompt_len": 128, "output_len": 64, "count": 4}}
    result = simulate_serving(parse_scenario({**SMALL, "inference": inference})).result
    assert result["inter_token_latency_s"]["p50"] == pytest.approx(result["time_per_output_token_s"]["p50"], rel=1e-3)
